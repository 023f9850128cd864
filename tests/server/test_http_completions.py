"""/v1/completions: texts and token ids, streamed and whole, with exact usage."""

from __future__ import annotations

import asyncio

import httpx
import openai
import pytest
from local_server import PATIENCE_S, finish_reasons, joined

GREEDY = {"temperature": 0, "ignore_eos": True}
EMOJI = "I ❤ 日本語 and 👨‍👩‍👧‍👦 families, naïve café; 🇫🇷\u2028 line \u0085 feeds.\r\n\n"


def test_a_completion_has_openai_s_form(tiny):
    answer = tiny.complete("one two three", max_tokens=5, model="tiny", user="somebody", **GREEDY)
    assert set(answer) == {"id", "object", "created", "model", "choices", "usage"}
    assert answer["id"].startswith("cmpl-")
    assert (answer["object"], answer["model"]) == ("text_completion", "tiny")
    (choice,) = answer["choices"]
    assert set(choice) == {"index", "text", "logprobs", "finish_reason"}
    assert (choice["index"], choice["finish_reason"]) == (0, "length")
    num_prompt = len(tiny.tokenizer.encode("one two three"))
    assert answer["usage"]["prompt_tokens"] == num_prompt
    assert answer["usage"]["completion_tokens"] == 5
    assert answer["usage"]["total_tokens"] == num_prompt + 5


def test_sixteen_tokens_unless_told_otherwise(tiny):
    assert tiny.complete([5, 6, 7], **GREEDY)["usage"]["completion_tokens"] == 16
    assert tiny.complete([5, 6, 7], max_tokens=None, **GREEDY)["usage"]["completion_tokens"] == 16
    assert tiny.complete([5, 6, 7], max_completion_tokens=3, **GREEDY)["usage"]["completion_tokens"] == 3


def test_token_ids_are_the_prompt_as_it_is(tiny):
    text = "The quick brown fox"
    by_ids = tiny.complete(tiny.tokenizer.encode(text), **GREEDY)
    assert by_ids["choices"][0]["text"] == tiny.complete(text, **GREEDY)["choices"][0]["text"]


@pytest.mark.parametrize("texts", [True, False])
def test_several_prompts_each_get_a_choice(tiny, texts):
    prompts = ["alpha", "beta gamma", "delta"]
    if not texts:
        prompts = [tiny.tokenizer.encode(prompt) for prompt in prompts]
    together = tiny.complete(prompts, max_tokens=6, **GREEDY)
    alone = [tiny.complete(prompt, max_tokens=6, **GREEDY) for prompt in prompts]
    assert [choice["index"] for choice in together["choices"]] == [0, 1, 2]
    assert [c["text"] for c in together["choices"]] == [answer["choices"][0]["text"] for answer in alone]
    assert together["usage"]["prompt_tokens"] == sum(answer["usage"]["prompt_tokens"] for answer in alone)
    assert together["usage"]["completion_tokens"] == 18

    events = tiny.events(
        "/v1/completions",
        {"prompt": prompts, "max_tokens": 6, "stream_options": {"include_usage": True}, **GREEDY},
    )
    assert [joined(events, index) for index in range(3)] == [c["text"] for c in together["choices"]]
    assert [finish_reasons(events, index) for index in range(3)] == [["length"]] * 3
    assert events[-1]["usage"]["completion_tokens"] == 18


def test_a_stream_has_openai_s_form(tiny):
    body = {"prompt": "one two", "max_tokens": 6, **GREEDY}
    events = tiny.events("/v1/completions", body)
    assert len({event["id"] for event in events}) == 1
    assert all(event["object"] == "text_completion" and event["model"] == "tiny" for event in events)
    assert all("usage" not in event for event in events)
    assert finish_reasons(events) == ["length"]
    assert joined(events) == tiny.complete("one two", max_tokens=6, **GREEDY)["choices"][0]["text"]

    events = tiny.events("/v1/completions", {**body, "stream_options": {"include_usage": True}})
    assert all(event["usage"] is None for event in events[:-1])
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 6


@pytest.mark.long
def test_streamed_is_whole_for_any_bytes(tiny):
    """A random model at temperature 1 emits pieces of characters all the time; what they come to is the same text."""
    for seed in range(8):
        body = {"prompt": "any", "max_tokens": 48, "seed": seed, "ignore_eos": True}
        whole = tiny.complete(**body)
        events = tiny.events("/v1/completions", {**body, "stream_options": {"include_usage": True}})
        assert joined(events) == whole["choices"][0]["text"]
        assert events[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"] == 48


def test_never_half_a_character(tiny):
    tiny.runner.script = tiny.tokenizer.encode(EMOJI)
    assert sum("\ufffd" in tiny.tokenizer.decode([token_id]) for token_id in tiny.runner.script) > 10
    body = {"prompt": "x", "max_tokens": len(tiny.runner.script), **GREEDY}
    assert tiny.complete(**body)["choices"][0]["text"] == EMOJI
    events = tiny.events("/v1/completions", body)
    assert joined(events) == EMOJI
    assert not any("\ufffd" in choice["text"] for event in events for choice in event["choices"])
    with tiny.http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        response.read().decode("ascii")  # whatever cuts the bytes, cuts no character


def test_an_output_cut_in_a_character_ends_before_it(tiny):
    """The bytes of a character that never came to its end are no text, streamed and whole alike."""
    (first, *_) = tiny.runner.script = tiny.tokenizer.encode("𓀀")
    assert tiny.tokenizer.decode([first]) != "𓀀"
    body = {"prompt": "x", "max_tokens": 1, **GREEDY}
    assert tiny.complete(**body)["choices"][0]["text"] == ""
    assert joined(tiny.events("/v1/completions", body)) == ""
    tiny.runner.script = tiny.tokenizer.encode("ok 𓀀")[:-1]
    body = {"prompt": "x", "max_tokens": len(tiny.runner.script), "stop": "\ufffd", **GREEDY}
    for choice in (tiny.complete(**body)["choices"][0], {"text": joined(tiny.events("/v1/completions", body))}):
        assert choice["text"].rstrip() == "ok"
        assert choice.get("finish_reason", "length") == "length"


@pytest.mark.parametrize(
    ("stop", "expected"),
    [
        ("fox", "The quick brown "),
        ("ick bro", "The qu"),
        (["lazy", "jumps over"], "The quick brown fox "),
        ("T", ""),
        ("fox jumped", "The quick brown fox jumps over the dog 日本."),
        ("日", "The quick brown fox jumps over the dog "),
        ("og 日本.", "The quick brown fox jumps over the d"),
    ],
)
def test_a_stop_string_ends_the_text_before_it(tiny, stop, expected):
    tiny.runner.script = tiny.tokenizer.encode("The quick brown fox jumps over the dog 日本.")
    body = {"prompt": "x", "max_tokens": len(tiny.runner.script), "stop": stop, **GREEDY}
    whole = tiny.complete(**body)["choices"][0]
    events = tiny.events("/v1/completions", body)
    assert whole["text"] == expected == joined(events)
    reason = "length" if stop == "fox jumped" else "stop"
    assert whole["finish_reason"] == reason
    assert finish_reasons(events) == [reason]


def test_stop_token_ids_and_eos(tiny):
    ids = tiny.runner.script = [*tiny.tokenizer.encode("a b c d"), 2, *tiny.tokenizer.encode(" e f")]
    body = {"prompt": "x", "max_tokens": len(ids), "temperature": 0}
    at_eos = tiny.complete(**body)
    assert at_eos["choices"][0] == {"index": 0, "text": "a b c d", "logprobs": None, "finish_reason": "stop"}
    assert at_eos["usage"]["completion_tokens"] == ids.index(2) + 1  # the stop token was sampled too
    assert tiny.complete(**body, ignore_eos=True)["choices"][0]["text"] == "a b c d e f"
    at_c = tiny.complete(**body, stop_token_ids=[ids[2], 77])
    assert at_c["choices"][0]["text"] == "a b"
    assert at_c["usage"]["completion_tokens"] == 3
    events = tiny.events("/v1/completions", {**body, "stop_token_ids": [ids[2]]})
    assert (joined(events), finish_reasons(events)) == ("a b", ["stop"])


def test_a_seed_repeats_itself(tiny):
    def text(seed: int) -> str:
        return tiny.complete("dice", max_tokens=12, seed=seed, top_p=0.9, top_k=1000)["choices"][0]["text"]

    assert text(1) == text(1)
    assert len({text(seed) for seed in range(4)}) > 1


def test_tiny_temperatures_are_greedy(tiny):
    greedy = tiny.complete("cold", **GREEDY)["choices"][0]["text"]
    for temperature in (1e-9, 1e-300, 5e-324):
        answer = tiny.complete("cold", temperature=temperature, ignore_eos=True)
        assert answer["choices"][0]["text"] == greedy


def test_a_huge_top_k_keeps_all(tiny):
    body = {"prompt": "all", "seed": 3, "ignore_eos": True}
    assert tiny.complete(**body, top_k=2**63 - 1)["choices"] == tiny.complete(**body, top_k=-1)["choices"]


def test_cached_tokens_are_told(tiny):
    """Whole blocks are cached; a block is used up to where it matches, and the last token is always computed."""
    prompt = [10_000 + i for i in range(40)]

    def ask(token_ids: list[int], max_tokens: int) -> tuple[int, str]:
        answer = tiny.complete(token_ids, max_tokens=max_tokens, cache_salt="cached-tokens", **GREEDY)
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["choices"][0]["text"]

    num_cached, text = ask(prompt, 4)
    assert num_cached == 0
    assert ask(prompt, 4) == (32, text)  # 8 prompt and 3 output tokens do not make a block
    assert ask(prompt, 12)[0] == 32
    assert ask(prompt, 4) == (39, text)  # 8 prompt and 8 output tokens do
    assert ask([*prompt[:35], 5, 6, 7], 1)[0] == 35
    assert ask(prompt[:32], 1)[0] == 31
    assert ask(prompt[:1], 1)[0] == 0
    events = tiny.events(
        "/v1/completions",
        {"prompt": prompt, "cache_salt": "cached-tokens", "stream_options": {"include_usage": True}, **GREEDY},
    )
    assert events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 39


def test_salts_keep_caches_apart(tiny):
    prompt = [20_000 + i for i in range(40)]

    def cached(**fields: str) -> int:
        usage = tiny.complete(prompt, max_tokens=1, **fields, **GREEDY)["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert [cached(cache_salt="a"), cached(cache_salt="b"), cached()] == [0, 0, 0]
    assert [cached(cache_salt="a"), cached(cache_salt="b"), cached()] == [32, 32, 32]


def test_the_longest_request_fits(tiny):
    assert tiny.complete([7] * 2040, max_tokens=8, **GREEDY)["usage"]["total_tokens"] == 2048


def test_a_long_text_is_tokenized_like_a_short_one(tiny):
    text = "word " * 1500  # beyond what is tokenized on the event loop
    answer = tiny.complete(text, max_tokens=1, **GREEDY)
    assert answer["usage"]["prompt_tokens"] == len(tiny.tokenizer.encode(text))


@pytest.mark.long
def test_sixty_four_streams_at_once(tiny):
    """Each gets what it gets alone; openai's client reads them all."""
    prompts = [f"stream number {i}" for i in range(64)]

    async def read_all() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0) as client:

            async def read(prompt: str) -> str:
                stream = await client.completions.create(
                    model="tiny",
                    prompt=prompt,
                    max_tokens=24,
                    temperature=0,
                    stream=True,
                    extra_body={"ignore_eos": True},
                )
                return "".join([chunk.choices[0].text async for chunk in stream])

            return await asyncio.gather(*(read(prompt) for prompt in prompts))

    together = asyncio.run(read_all())
    alone = tiny.complete(prompts, max_tokens=24, **GREEDY)["choices"]
    assert together == [choice["text"] for choice in alone]
    assert len(set(together)) > 1


@pytest.mark.long
def test_streams_go_on_beside_whole_answers(tiny):
    """Requests of all kinds at once, more of them than there are blocks for: they wait, and all end."""

    async def send_all() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=tiny.url, timeout=PATIENCE_S) as client:
            bodies = [
                {"prompt": [i] * (200 + 5 * i), "max_tokens": 30, "stream": i % 2 == 0, "ignore_eos": True}
                for i in range(40)
            ]
            return await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))

    responses = asyncio.run(send_all())
    assert [response.status_code for response in responses] == [200] * 40
    assert all("[DONE]" in response.text for response in responses[::2])
    assert all(response.json()["usage"]["completion_tokens"] == 30 for response in responses[1::2])
