"""What takes long stands aside: the event loop, and so everybody's streams, do not wait for one request's size."""

from __future__ import annotations

import threading

import pytest

from pagefold.errors import QueueFullError
from pagefold.memory.limit import Limit
from pagefold.request import Caller
from pagefold.sampling import SamplingParams
from pagefold.server import generation
from pagefold.server.generation import Generation
from pagefold.tokenizer import Tokenizer

ASK = {"role": "user", "content": "Hi"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def threads_of(monkeypatch, method):
    """Note on which threads the tokenizer works."""
    seen: list[str] = []
    real = getattr(Tokenizer, method)

    def watched(self, *args, **kwargs):
        seen.append(threading.current_thread().name)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Tokenizer, method, watched)
    return seen


@pytest.mark.parametrize(
    ("path", "body", "method"),
    [
        ("/v1/chat/completions", {"messages": [ASK], "tools": [TOOL]}, "render_chat"),
        ("/tokenize", {"messages": [ASK, {"role": "assistant", "tool_calls": [CALL]}]}, "render_chat"),
        ("/tokenize", {"messages": [{"role": "user", "content": ""}] * 1000}, "render_chat"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "assistant", "content": "", "reasoning": "a b " * 4000}, ASK]},
            "render_chat",
        ),
        ("/tokenize", {"prompt": "a b " * 4000, "return_token_strs": True}, "token_texts"),
    ],
)
def test_long_work_is_done_on_another_thread(tiny, monkeypatch, path, body, method):
    seen = threads_of(monkeypatch, method)
    answer = tiny.http.post(path, json={"max_tokens": 1, **body})
    assert answer.status_code == 200, answer.text
    assert [name.startswith("pagefold-text") for name in seen] == [True]


def test_what_the_queue_refuses_has_cost_nothing(monkeypatch):
    class Full:
        context = Limit(100)
        cached_block_size = None

        def submit(self, *_, **__):
            msg = "The queue is full."
            raise QueueFullError(msg, retry_after_s=1)

    made = []
    monkeypatch.setattr(generation, "Output", lambda: made.append(1))
    with pytest.raises(QueueFullError):
        Generation(
            Full(),
            request_id="a",
            prompts=[[1]] * 2048,
            sampling=SamplingParams(n=128),
            caller=Caller(),
            param="prompt",
        )
    assert not made
