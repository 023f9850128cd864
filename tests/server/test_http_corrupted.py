"""Logits that are no numbers, over HTTP: an error in OpenAI's form, valid JSON, and others are answered as ever."""

from __future__ import annotations

import json
import logging
import threading
from typing import TYPE_CHECKING

import openai
import pytest
from local_server import LocalServer, error_of, finish_reasons, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": 6}
POISON = 777  # of poisoned_chat_model
BAD = [*range(200, 230), POISON]


@pytest.fixture(scope="module")
def poisoned(poisoned_chat_model: Path) -> Iterator[LocalServer]:
    server = LocalServer(poisoned_chat_model, kv_cache_memory_bytes=2**21, max_num_seqs=8, max_num_batched_tokens=64)
    yield server
    server.close()


@pytest.mark.parametrize("fields", [{}, {"n": 3, "temperature": 1}, {"logprobs": 4}], ids=str)
def test_a_whole_answer_is_an_error(poisoned, fields, caplog):
    before = poisoned.metric("vllm:corrupted_requests_total")
    error = error_of(poisoned.http.post("/v1/completions", json={"prompt": BAD, **GREEDY, **fields}), 500)
    assert (error["type"], error["code"]) == ("server_error", "step_failed")
    assert "NaN or infinite" in error["message"]
    assert poisoned.metric("vllm:corrupted_requests_total") == before + fields.get("n", 1)
    poisoned.check_pool()


@pytest.mark.parametrize("fields", [{}, {"n": 3, "temperature": 1}, {"logprobs": 4}], ids=str)
@pytest.mark.parametrize("bias", [None, {str(POISON): 100}], ids=["in the prompt", "sampled"])
def test_an_error_in_a_stream_is_an_event(poisoned, fields, bias, caplog):
    """And every event is JSON as everybody reads it: no NaN, no Infinity."""
    prompt = BAD if bias is None else BAD[:-1]
    body = {"prompt": prompt, **GREEDY, **fields, "logit_bias": bias, "stream": True}
    with poisoned.http.stream("POST", "/v1/completions", json=body) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    *texts, last = (json.loads(line, parse_constant=pytest.fail) for line in lines)
    assert last["error"]["code"] == "step_failed"
    assert finish_reasons(texts) == []
    poisoned.check_pool()


def test_the_log_names_the_request(poisoned, caplog):
    """By the id of its response, which the line of its HTTP request has too, as ``response_id``."""
    caplog.set_level(logging.INFO, logger="pagefold")
    error_of(poisoned.http.post("/v1/completions", json={"prompt": BAD, **GREEDY}), 500)
    (line,) = [record for record in caplog.records if "NaN or infinite" in record.message]

    def of_http() -> list[logging.LogRecord]:
        return [record for record in caplog.records if record.name == "pagefold.request"]

    until(lambda: bool(of_http()), "the line of the request, which is written when the answer has been sent")
    (told,) = of_http()
    assert line.request_ids == f"{told.response_id}-0"


def test_others_of_the_batch_are_answered_as_ever(poisoned, caplog):
    prompt = list(range(200, 230))
    (expected,) = poisoned.complete(prompt, **GREEDY, logprobs=2)["choices"]
    found = []

    def ask():
        found.extend(poisoned.complete(prompt, **GREEDY, logprobs=2)["choices"])

    def ask_badly():
        poisoned.http.post("/v1/completions", json={"prompt": BAD})

    poisoned.runner.close_gate()
    askers = [threading.Thread(target=target) for target in (ask, ask, ask, ask_badly)]
    for asker in askers:
        asker.start()
    poisoned.runner.allow()
    for asker in askers:
        asker.join()
    assert len(found) == 3
    alone = expected.pop("logprobs")
    for choice in found:
        ours = choice.pop("logprobs")
        assert choice == expected
        # torch sums a softmax in another order by how many rows there are and where they lie: the last bit may differ.
        assert ours.pop("token_logprobs") == pytest.approx(alone["token_logprobs"], rel=1e-14)
        for top, top_alone in zip(ours.pop("top_logprobs"), alone["top_logprobs"], strict=True):
            assert top == pytest.approx(top_alone, rel=1e-14)
        assert ours.items() <= alone.items()
        assert alone.keys() - ours.keys() == {"token_logprobs", "top_logprobs"}


def test_openai_s_client_raises(poisoned, caplog):
    with openai.OpenAI(base_url=f"{poisoned.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.InternalServerError, match="NaN or infinite"):
            client.completions.create(model="tiny", prompt=BAD, max_tokens=3)
        with pytest.raises(openai.APIError, match="NaN or infinite"):
            list(client.completions.create(model="tiny", prompt=BAD, max_tokens=3, stream=True))
