"""HostileBody: a good body, bent. A seed and an index say all of it, so that whoever is told both has the same body."""

from __future__ import annotations

import json
import random
from copy import deepcopy
from typing import Any, NamedTuple

from good_bodies import good_bodies

JSON = "application/json"


class HostileBody(NamedTuple):
    """What is sent.

    Attributes:
        seed, index: say all the rest, of the same routes.
    """

    seed: int
    index: int
    method: str
    path: str
    content: bytes
    headers: dict[str, str]

    @property
    def label(self) -> str:
        shown = self.content if len(self.content) <= 400 else self.content[:400] + b"..."
        return (
            f"seed {self.seed}, body {self.index}: {self.method} {self.path} {str(self.headers)[:120]}, "
            f"{len(self.content)} bytes: {shown.decode(errors='backslashreplace')}"
        )


class Raw(NamedTuple):
    """A place in a body that is written as it is, whatever JSON says."""

    text: str


SURROGATE = "\ud83d"
TEXTS = [
    "", " ", "\0", "\x7f", "\u2028", "\u200f", "\ufeff", "\uffff", "a\u0301" * 50, "🏳️‍🌈" * 20, "ﷺ" * 30, "İ" * 20,
    SURROGATE, "\udfff\ud83d", "<|im_start|>", "<|im_end|>" * 20, "<|endoftext|>", "{{ messages }}", "{% for x in y %}",
    "../../etc/passwd", "${jndi:ldap://x}", "'; DROP TABLE kv; --", "%s%n%x", "null", "NaN", "true", "1e999", "0x10",
]  # fmt: skip
NUMBERS = [
    0, -0.0, -1, 1, 2, 3.5, 128, 129, 2047, 2048, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63) - 1,
    10**30, 10**400, 1e308, -1e308, 5e-324, 0.1, 1e-10, Raw("NaN"), Raw("Infinity"), Raw("-Infinity"), Raw("1e999"),
    Raw("9" * 4299), Raw("9" * 5000), Raw("-" + "9" * 100_000), Raw("0." + "1" * 9999), Raw("01"), Raw("+1"), Raw("1."),
]  # fmt: skip
OTHERS = [None, True, False, [], {}, [None], [[]], {"": None}, {"a": {"b": []}}, Raw("undefined"), Raw("")]

BOMBS: list[dict[str, Any]] = [
    {"guided_regex": "((((a{100}){100}){100}){100})"},
    {"guided_regex": "(a|a)*" * 50 + "b"},
    {"guided_regex": "(" * 2000 + "a" + ")" * 2000},
    {"guided_regex": "(.{1,500}){1,500}"},
    {"guided_regex": "[\\p{L}]{10000}"},
    {"guided_regex": "(?=a)b\\1"},
    {"guided_grammar": "start: start start | "},
    {"guided_grammar": "start: a\na: b\nb: a"},
    {"guided_grammar": 'start: "a"{100000}'},
    {"guided_grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000},
    {"guided_grammar": "root ::= root root | [a-z]"},
    {"guided_choice": [f"{number:x}" * 20 for number in range(3000)]},
    {"guided_choice": ["a" * 200_000]},
    {"guided_json": {"$ref": "#"}},
    {"guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}},
    {"guided_json": {"$ref": "http://127.0.0.1:1/schema.json"}},
    {"guided_json": {"type": "string", "pattern": "^(a+)+$", "maxLength": 100_000}},
    {"guided_json": {"type": "array", "minItems": 10_000, "items": {"type": "integer"}}},
    {"guided_json": {"type": "array", "items": {"enum": list(range(5000))}}},
    {"guided_json": {"type": "object", "properties": {f"k{number}": {"type": "string"} for number in range(2000)}}},
    {"guided_json": {"allOf": [{"anyOf": [{"type": "string"}, {"type": "null"}]}] * 60}},
    {"guided_json": {"type": "string", "pattern": "((((a{100}){100}){100}){100})"}},
    {"structured_outputs": {"json_object": True, "regex": "a"}},
    {"structured_outputs": {"regex": "a" * 200_000}},
]


def hostile_body(seed: int, index: int, paths: list[str]) -> HostileBody:
    """One of 2**64 bodies, always the same."""
    draw = random.Random(f"{seed}/{index}")
    path = draw.choice(paths)
    body: Any = deepcopy(draw.choice(good_bodies(path)))
    if draw.random() < 0.006:
        body = {**body, **draw.choice(BOMBS)}
    else:
        for _ in range(draw.choice([1, 1, 1, 2, 3, 6])):
            body = _bent(draw, body)
    content = _written(body)
    if draw.random() < 0.12:
        content = _torn(draw, content)
    method, headers = "POST", {"Content-Type": JSON}
    if draw.random() < 0.03:
        method = draw.choice(["GET", "PUT", "DELETE", "PATCH", "OPTIONS"])
    if draw.random() < 0.05:
        headers = draw.choice(_HEADERS)
    return HostileBody(seed, index, method, path, content, headers)


_HEADERS = [
    {},
    {"Content-Type": "text/plain"},
    {"Content-Type": "application/json; charset=utf-16"},
    {"Content-Type": "application/json; charset=\x7f"},
    {"Content-Type": "multipart/form-data; boundary=x"},
    {"Content-Type": "application/x-www-form-urlencoded"},
    {"Content-Type": JSON, "Content-Encoding": "gzip"},
    {"Content-Type": JSON, "Authorization": "Bearer " + "x" * 8000},
    {"Content-Type": JSON, "Authorization": "Basic \xff"},
    {"Content-Type": JSON, "Accept": "image/png"},
    {"Content-Type": JSON, "Accept-Encoding": "gzip;q=-1"},
    {"Content-Type": JSON, "X-Request-Id": "y" * 5000},
    {"Content-Type": JSON, "X-Forwarded-For": "x, " * 1000 + "x"},
]


def _bent(draw: random.Random, body: Any) -> Any:
    """``body`` with one place of it changed."""
    places = list(_places(body))
    if not places:
        return _value(draw)
    holder, key = draw.choice(places)
    match draw.choice(["value", "value", "value", "delete", "rename", "add", "twice", "deep", "many", "grown"]):
        case "value":
            holder[key] = _value(draw)
        case "delete":
            del holder[key]
        case "rename" if isinstance(holder, dict):
            holder[draw.choice([key.upper(), f"{key} ", "", key + "\0", SURROGATE, *_FIELDS])] = holder.pop(key)
        case "add" if isinstance(holder, dict):
            holder[draw.choice([*_FIELDS, "x" * 1000])] = _value(draw)
        case "twice" if isinstance(holder, dict):
            holder[key] = Raw(f"{_text(holder[key])}, {json.dumps(key)}: {_text(_value(draw))}")
        case "deep":
            depth = draw.choice([2, 20, 200, 900, 5000, 50_000])
            opening, closing = draw.choice([("[", "]"), ('{"a": ', "}"), ('[{"type": ', "}]")])
            holder[key] = Raw(opening * depth + _text(holder[key]) + closing * draw.choice([depth, depth, depth - 1]))
        case "many":
            text = _text(holder[key])
            num = min(draw.choice([2, 17, 129, 2049, 30_000] * 2 + [3_000_000]), 12_000_000 // max(1, len(text)))
            holder[key] = Raw("[" + ", ".join([text] * num) + "]")
        case _:
            length, text = _length(draw), draw.choice(["a", "word ", "9", "🏳️‍🌈", "\n", "[", "ab" * 40 + " "])
            holder[key] = (text * (length // len(text) + 1))[:length]
    return body


_FIELDS = [
    "n", "best_of", "stream", "echo", "suffix", "logprobs", "prompt_logprobs", "logit_bias", "stop", "seed", "tools",
    "max_tokens", "min_tokens", "temperature", "response_format", "guided_json", "guided_regex", "guided_choice",
    "cache_salt", "tool_choice", "messages", "prompt", "input", "stream_options", "chat_template", "returns_in_s",
    "priority", "service_tier", "previous_response_id", "store", "allowed_token_ids", "bad_words", "metadata",
    "chat_template_kwargs", "continue_final_message", "documents", "include", "truncate_prompt_tokens",
    "reasoning", "return_token_ids",
]  # fmt: skip


def _places(value: Any) -> Any:
    """Every place in a body: what holds it, and its key there."""
    if isinstance(value, dict | list):
        for key, inner in list(value.items() if isinstance(value, dict) else enumerate(value)):
            yield value, key
            yield from _places(inner)


def _value(draw: random.Random) -> Any:
    kind = draw.random()
    if kind < 0.4:
        return draw.choice(NUMBERS)
    if kind < 0.7:
        return draw.choice(TEXTS)
    if kind < 0.9:
        return deepcopy(draw.choice(OTHERS))
    if kind < 0.95:
        return {draw.choice(TEXTS): draw.choice(NUMBERS) for _ in range(3)}
    return [draw.choice([*NUMBERS, *TEXTS]) for _ in range(draw.choice([1, 5, 300]))]


def _length(draw: random.Random) -> int:
    """How many characters: seldom more than a body may have."""
    return draw.choice(
        [10, 100, 1000, 5000, 20_000] * 9 + [100_000, 100_000, 400_000, 1_000_000, 4_000_000, 20_000_000]
    )


def _torn(draw: random.Random, content: bytes) -> bytes:
    """Bytes that may be no JSON any more."""
    at = draw.randrange(len(content) + 1)
    return draw.choice(
        [
            content[:at],
            content[:at] + bytes([draw.randrange(256)]) + content[at + 1 :],
            content[:at] + draw.choice(_NO_TEXT) + content[at:],
            b"\xef\xbb\xbf" + content,
            content.decode(errors="replace").encode(draw.choice(["utf-16", "utf-32", "utf-7"])),
            content + draw.choice([b" ", b",", b"}", b"\0" * 1000, content]),
            draw.choice(_NO_OBJECT),
        ]
    )


_NO_TEXT = [b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\x00", b"\\ud83d", b"\\u", b"\xf4\x90\x80\x80"]
_NO_OBJECT = [b"", b"{}", b"[]", b"null", b"5", b'"a"', b"[" * 100_000, b'{"a":' * 50_000, b"-", b"{" * 9]


def _written(body: Any) -> bytes:
    """A body as JSON, with what is :class:`Raw` as it is."""
    return _text(body).encode("utf-8", "surrogatepass")


def _text(value: Any) -> str:
    if isinstance(value, Raw):
        return value.text
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {_text(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_text, value)) + "]"
    return json.dumps(value, ensure_ascii=isinstance(value, str) and len(value) % 2 == 0)
