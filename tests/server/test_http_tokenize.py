"""``/tokenize`` and ``/detokenize``: what they return and refuse; nothing is begun for clients who left."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from local_server import error_of, until

from pagefold.server import context_length
from pagefold.server import served as served_module

if TYPE_CHECKING:
    from collections.abc import Iterator

    from local_server import LocalServer

USER = {"role": "user", "content": "Hello there"}
LONG = "seven words of some length a line\n" * 200


@contextmanager
def marked(server: LocalServer) -> Iterator[None]:
    """The model's prompts begin with a special token, as Llama's do."""
    from tokenizers.processors import TemplateProcessing

    backend = server.tokenizer._backend
    content = backend.get_added_tokens_decoder()[1].content
    before = backend.post_processor
    backend.post_processor = TemplateProcessing(single=f"{content} $A", special_tokens=[(content, 1)])
    try:
        yield
    finally:
        backend.post_processor = before


class Gate:
    """Stands in for the tokenizer: each call waits until it is let through."""

    def __init__(self, server: LocalServer) -> None:
        self._encode = server.tokenizer.encode
        self._open = threading.Event()
        self.num_begun = 0

    def __call__(self, text: str, **how: bool) -> list[int]:
        self.num_begun += 1
        assert self._open.wait(60)
        return self._encode(text, **how)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate(tiny: LocalServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(tiny)
    monkeypatch.setattr(tiny.tokenizer, "encode", gate)
    yield gate
    gate.open()


def test_special_tokens_are_added_to_prompts_and_not_to_chats_unless_it_is_said(tiny):
    def first(**body: object) -> int:
        return tiny.http.post("/tokenize", json=body).raise_for_status().json()["tokens"][0]

    plain = first(prompt="Hello")
    assert plain != 1
    of_chat = tiny.tokenizer.encode_chat([USER])
    assert tiny.http.post("/tokenize", json={"messages": [USER]}).json()["tokens"] == of_chat
    with marked(tiny):
        assert first(prompt="Hello") == 1
        assert first(prompt="Hello", add_special_tokens=True) == 1
        assert first(prompt="Hello", add_special_tokens=False) == plain
        for fields in ({}, {"add_special_tokens": None}, {"add_special_tokens": False}):
            told = tiny.http.post("/tokenize", json={"messages": [USER], **fields}).json()
            assert told["tokens"] == of_chat
        told = tiny.http.post("/tokenize", json={"messages": [USER], "add_special_tokens": True}).json()
        assert told["tokens"] == [1, *of_chat]


def test_a_long_text_is_written_as_a_short_one(tiny, monkeypatch):
    monkeypatch.setattr("pagefold.server.tokenize._NUM_TOGETHER", 7)
    monkeypatch.setattr(served_module, "_NUM_TOGETHER", 11)
    text = "Grüße, 日本 🦄!\n" * 300
    told = tiny.http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    token_ids = tiny.tokenizer.encode(text)
    assert told == {
        "count": len(token_ids),
        "max_model_len": 2048,
        "tokens": token_ids,
        "token_strs": tiny.tokenizer.token_texts(token_ids),
    }
    empty = tiny.http.post("/tokenize", json={"prompt": "", "return_token_strs": True}).json()
    assert (empty["tokens"], empty["token_strs"]) == ([], [])


def test_more_tokens_than_the_context_has_are_not_decoded(tiny):
    assert tiny.http.post("/detokenize", json={"tokens": [500] * 2048}).status_code == 200
    error = error_of(tiny.http.post("/detokenize", json={"tokens": [500] * 2049}), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "tokens")
    assert "2048 tokens" in error["message"]
    assert "2049" in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {"prompt": LONG}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
        ("/v1/completions", {"prompt": LONG}, "prompt"),
    ],
)
def test_where_nothing_is_proven_of_a_texts_tokens_its_characters_are_bounded(tiny, monkeypatch, path, body, param):
    """A vocabulary of Unigram or WordPiece: no length is certainly too long."""
    monkeypatch.setattr(tiny.tokenizer, "min_tokens", lambda _: 0)
    monkeypatch.setattr(context_length, "_MAX_CHARACTERS", 1000)
    monkeypatch.setattr(context_length, "_MAX_CHARACTERS_A_TOKEN", 1)
    monkeypatch.setattr(tiny.tokenizer, "encode", lambda *_, **__: pytest.fail("it was tokenized"))
    error = error_of(tiny.http.post(path, json=body), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert "at most 2048 are read" in error["message"]


@pytest.mark.quick(every=2)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": LONG}),
        ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}),
        ("/v1/completions", {"prompt": [LONG] * 5}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
        ("/v1/responses", {"input": LONG}),
    ],
)
def test_what_has_not_begun_is_dropped_when_its_client_goes(tiny, gate, path, body):
    """Two threads tokenize, whoever asks. Others wait, and who goes away meanwhile is never begun."""
    with_threads = [tiny.post_raw("/tokenize", {"prompt": LONG}) for _ in range(2)]
    until(lambda: gate.num_begun == 2, "two texts to be under way")
    before = tiny.metric("pagefold:http_responses_total", f"{path}499") if _has(tiny, f"{path}499") else 0
    waiting = [tiny.post_raw(path, body) for _ in range(3)]
    assert tiny.http.get("/health").status_code == 200, "the event loop goes on"
    for connection in waiting:
        connection.close()
    until(lambda: _has(tiny, f"{path}499"), "the server to notice")
    until(lambda: tiny.metric("pagefold:http_responses_total", f"{path}499") == before + 3, "the server to notice all")
    assert gate.num_begun == 2
    gate.open()
    for connection in with_threads:
        assert connection.recv(64).startswith(b"HTTP/1.1 200")
        connection.close()
    assert tiny.http.post("/tokenize", json={"prompt": LONG}).status_code == 200
    assert gate.num_begun == 3, "of those who went away, nothing was tokenized"


def test_of_many_texts_no_other_begins_when_the_client_has_gone(tiny, gate):
    connection = tiny.post_raw("/v1/completions", {"prompt": [LONG] * 5})
    until(lambda: gate.num_begun == 1, "the first to be under way")
    before = tiny.metrics().get(("pagefold:http_responses_total", "/v1/completions499"), 0)
    connection.close()
    until(lambda: tiny.metrics().get(("pagefold:http_responses_total", "/v1/completions499"), 0) > before, "the server")
    gate.open()
    assert tiny.http.post("/tokenize", json={"prompt": LONG}).status_code == 200
    assert gate.num_begun == 2


def _has(server: LocalServer, label: str) -> bool:
    return ("pagefold:http_responses_total", label) in server.metrics()


TOOL = {"type": "function", "function": {"name": "weather", "description": "Tell the weather.", "parameters": {}}}
SAID = {"role": "assistant", "content": "Well, I"}


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [USER]},
        {"messages": [USER], "tools": [TOOL]},
        {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}},
        {"messages": [USER, SAID], "add_generation_prompt": False, "continue_final_message": True},
        {"messages": [USER], "add_generation_prompt": False},
    ],
)
def test_a_chat_is_counted_as_it_is_answered(tiny, fields):
    answer = tiny.http.post("/v1/chat/completions", json={**fields, "max_tokens": 1}).json()
    counted = tiny.http.post("/tokenize", json=fields)
    assert counted.json()["count"] == answer["usage"]["prompt_tokens"]
    assert "x-pagefold-ignored" not in counted.headers


def test_a_chat_that_cannot_be_continued_is_not_counted(tiny):
    answer = tiny.http.post("/tokenize", json={"messages": [USER], "continue_final_message": True})
    assert error_of(answer, 400)["param"] == "continue_final_message"
    answer = tiny.http.post("/tokenize", json={"prompt": "a", "continue_final_message": True})
    assert error_of(answer, 400)["param"] == "continue_final_message"
