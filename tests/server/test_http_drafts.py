"""Drafting over HTTP: the same answers, sooner told; what counts them; what is expected; what cannot be."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from local_server import LocalServer, ProcessServer, error_of
from typer.testing import CliRunner

from pagefold.cli import app
from pagefold.speculation import StepCosts

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": 40}


def _drafting_server(folder: Path, **settings) -> LocalServer:
    server = LocalServer(folder, kv_cache_memory_bytes=400 * 2**13, max_model_len=512, max_num_seqs=8, **settings)
    if server.engine.drafting.is_on:  # a tiny model's steps take longer with each token: else few drafts would pay
        server.engine.drafting._costs = StepCosts((1, 2), (1.0, 1.0))
    return server


@pytest.fixture(scope="module")
def drafting(tiny_chat_model: Path) -> Iterator[LocalServer]:
    server = _drafting_server(tiny_chat_model, speculative_config={"method": "tree"})
    yield server
    server.check_pool()
    server.close()


@pytest.fixture(scope="module")
def plain(tiny_chat_model: Path) -> Iterator[LocalServer]:
    server = _drafting_server(tiny_chat_model)
    yield server
    server.check_pool()
    server.close()


def counts(server: LocalServer) -> dict[str, float]:
    names = ("drafts", "draft_tokens", "accepted_tokens")
    return {name: server.metric(f"vllm:spec_decode_num_{name}_total") for name in names}


@pytest.mark.quick(every=3)
@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.9, "seed": 5}, {"temperature": 1.0, "seed": 6, "logprobs": 2}]
)
def test_an_answer_that_was_given_before_is_given_again_in_fewer_steps(drafting, plain, sampling):
    """Its tokens are in the cache behind the same prompt: they are drafted, and all are right."""
    body = {**GREEDY, **sampling}
    prompt = f"An answer to be given twice, {sampling}"
    expected = plain.complete(prompt, **body)["choices"][0]
    first = drafting.complete(prompt, **body)["choices"][0]
    before, num_steps = counts(drafting), drafting.runner.num_entered
    again = drafting.complete(prompt, **body)
    assert first["text"] == expected["text"]
    assert again["choices"][0]["text"] == expected["text"]
    if "logprobs" in sampling:
        assert again["choices"][0]["logprobs"]["tokens"] == expected["logprobs"]["tokens"]
        assert again["choices"][0]["logprobs"]["text_offset"] == expected["logprobs"]["text_offset"]
    assert drafting.runner.num_entered - num_steps < 25
    details = again["usage"]["completion_tokens_details"]
    after = counts(drafting)
    assert details["accepted_prediction_tokens"] == after["accepted_tokens"] - before["accepted_tokens"] > 15
    assert after["draft_tokens"] - before["draft_tokens"] == sum(details.values())
    assert again["usage"]["completion_tokens"] == 40


def test_the_index_is_counted_among_what_a_server_remembers(drafting, plain):
    name = "pagefold:cache_bytes"
    num_bytes = drafting.metric(name, "drafts")
    num_tokens = drafting.engine.capacity.num_blocks * drafting.engine.capacity.block_size
    assert 10 * num_tokens < num_bytes < 24 * num_tokens
    assert drafting.metric("pagefold:cache_max_bytes", "drafts") == num_bytes
    assert (name, "drafts") not in plain.metrics()


def test_another_salt_drafts_nothing_of_it(drafting):
    """Who may not share blocks may not learn from how fast an answer comes, either."""
    prompt = "What one tenant has asked, and nobody else"
    drafting.complete(prompt, **GREEDY, cache_salt="one")
    for salt, is_same in (("other", False), ("one", True)):
        before = counts(drafting)
        drafting.complete(prompt, **GREEDY, cache_salt=salt)
        num_accepted = counts(drafting)["accepted_tokens"] - before["accepted_tokens"]
        assert (num_accepted > 15) == is_same


def test_a_stream_tells_each_token_once_and_its_usage(drafting, plain):
    body = {"prompt": "Streamed, and drafted", **GREEDY}
    expected = plain.complete(body["prompt"], **GREEDY)["choices"][0]["text"]
    for _ in range(2):
        events = drafting.events("/v1/completions", {**body, "stream_options": {"include_usage": True}})
        text = "".join(event["choices"][0]["text"] for event in events if event["choices"])
        assert text == expected
    assert events[-1]["usage"]["completion_tokens"] == 40
    assert events[-1]["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 15


def test_a_stop_string_ends_a_text_where_it_ends_without_drafts(drafting, plain):
    """Also if the step that found it found more tokens; these are nobody's, nor cached."""
    prompt = "Stopped in the midst of drafts"
    whole = plain.complete(prompt, **GREEDY)["choices"][0]["text"]
    drafting.complete(prompt, **GREEDY)
    for at in range(8, 24, 3):
        body = {**GREEDY, "stop": [whole[at : at + 3]], "logprobs": 1}
        expected, got = plain.complete(prompt, **body), drafting.complete(prompt, **body)
        for name in ("text", "finish_reason", "stop_reason"):
            assert got["choices"][0].get(name) == expected["choices"][0].get(name)
        assert got["choices"][0]["logprobs"]["tokens"] == expected["choices"][0]["logprobs"]["tokens"]
        assert got["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]


@pytest.mark.long
def test_the_best_of_several_outputs_are_those_without_drafts(drafting, plain):
    """Which are the best their logprobs say, of the tokens that are theirs."""
    body = {"max_tokens": 30, "temperature": 1.0, "seed": 3, "n": 2, "best_of": 4, "stop": ["e", "a"]}
    for prompt in ("The best of several", "And once more, the best of several"):
        expected = [choice["text"] for choice in plain.complete(prompt, **body)["choices"]]
        for _ in range(3):
            answer = drafting.complete(prompt, **body)
            assert [choice["text"] for choice in answer["choices"]] == expected
            details = answer["usage"].get("completion_tokens_details", {})
            assert details.get("accepted_prediction_tokens", 0) < answer["usage"]["completion_tokens"]


def test_what_is_expected_is_drafted(drafting, plain):
    """OpenAI's ``prediction``: the answer's text, sent along."""
    question = "Say something that you have never said"
    answer = plain.chat(question, **GREEDY)["choices"][0]["message"]["content"]
    without = drafting.chat(question, **GREEDY, cache_salt="first")
    for content in (answer, [{"type": "text", "text": answer}]):
        prediction = {"type": "content", "content": content}
        got = drafting.chat(question, **GREEDY, prediction=prediction, cache_salt=f"salt {type(content)}")
        assert got["choices"][0]["message"]["content"] == answer
        details = got["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] > 10
    of_other = without["usage"].get("completion_tokens_details", {}).get("accepted_prediction_tokens", 0)
    assert of_other < details["accepted_prediction_tokens"]
    wrong = {"type": "content", "content": "Something else altogether. " * 4}
    got = drafting.chat(question, **GREEDY, prediction=wrong, cache_salt="wrong")
    assert got["choices"][0]["message"]["content"] == answer
    assert plain.chat(question, **GREEDY, prediction=wrong)["choices"][0]["message"]["content"] == answer


def test_a_request_says_who_drafts_for_it(drafting):
    prompt = "Once again, as before, and once again, as before, and once again"
    drafting.complete(prompt, **GREEDY)
    before = counts(drafting)
    answer = drafting.complete(prompt, **GREEDY, speculative_config={"num_speculative_tokens": 0})
    assert "completion_tokens_details" not in answer["usage"]
    assert counts(drafting) == before
    for method in ("ngram", "tree"):
        config = {"method": method, "num_speculative_tokens": 3}
        assert drafting.complete(prompt, **GREEDY, speculative_config=config)["choices"][0]["text"]
    assert counts(drafting)["draft_tokens"] > before["draft_tokens"]


@pytest.mark.parametrize(
    ("config", "param"),
    [
        ({"method": "eagle"}, "speculative_config.method"),
        ({"method": "draft_model"}, "speculative_config.method"),
        ({"num_speculative_tokens": 1000}, "speculative_config.num_speculative_tokens"),
        ({"num_speculative_tokens": "3"}, "speculative_config.num_speculative_tokens"),
        ({"speculative_token_tree": "[]"}, "speculative_config.speculative_token_tree"),
        ({"prompt_lookup_min": 9}, "speculative_config.prompt_lookup_max"),  # the server's is 5
        ("tree", "speculative_config"),
    ],
)
def test_what_cannot_be_is_refused(drafting, config, param):
    response = drafting.http.post("/v1/completions", json={"prompt": "x", "speculative_config": config})
    assert error_of(response, 400)["param"] == param


@pytest.mark.parametrize(
    "prediction", ["text", {"type": "text", "content": "x"}, {"type": "content"}, {"type": "content", "content": 3}]
)
def test_a_prediction_of_another_form_is_refused(drafting, prediction):
    body = {"messages": [{"role": "user", "content": "x"}], "prediction": prediction}
    response = drafting.http.post("/v1/chat/completions", json=body)
    assert error_of(response, 400)["param"].startswith("prediction")


def test_a_server_that_drafts_nothing_says_so(plain):
    body = {"prompt": "x", "max_tokens": 2}
    refused = plain.http.post("/v1/completions", json={**body, "speculative_config": {"method": "tree"}})
    assert "--speculative-config" in error_of(refused, 400)["message"]
    assert plain.complete("x", max_tokens=2, speculative_config={"num_speculative_tokens": 0})


@pytest.mark.parametrize("given", ["tree", '{"method": "medusa"}', '["tree"]', '{"num_speculative_tokens": 0.5}'])
def test_a_flag_that_says_nothing_is_refused(given):
    result = CliRunner().invoke(app, ["serve", "smollm2-135m", "--speculative-config", given])
    assert result.exit_code == 2
    assert "speculative" in result.output


@pytest.mark.long
def test_a_real_model_drafts(smol: ProcessServer) -> None:
    """See the flag work in a process of its own."""
    server = ProcessServer("smollm2-135m", "--speculative-config", '{"method": "ngram"}')
    try:
        prompt = "one two three four five six seven eight nine ten " * 6
        with_drafts = server.complete(prompt, **GREEDY)
        assert with_drafts["choices"][0]["text"] == smol.complete(prompt, **GREEDY)["choices"][0]["text"]
        # How many pay hangs on what steps take on this machine.
        assert with_drafts["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0
    finally:
        server.close()
