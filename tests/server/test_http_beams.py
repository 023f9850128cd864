"""Beams over HTTP: what the library finds, in both forms; who goes away; what cannot be asked."""

from __future__ import annotations

import openai
import pytest
from local_server import PATIENCE_S, error_of

BEAMS = {"use_beam_search": True, "n": 3, "max_tokens": 8}
USER = {"role": "user", "content": "Say hello."}


def found(tiny, prompt, **fields):
    """What each choice must be, of the engine that the server has: the text of the tokens, told with logprobs."""
    return tiny.complete(prompt, **{**BEAMS, "logprobs": 0} | fields)["choices"]


def score(choice, length_penalty=1.0):
    told = choice["logprobs"]["token_logprobs"]
    return sum(told) / len(told) ** length_penalty


def test_choices_are_the_likeliest_outputs_the_best_first(tiny):
    """The best of three is at least as likely as what greedy finds; no temperature is the same as 0."""
    choices = found(tiny, "Once upon a time")
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert len({choice["text"] for choice in choices}) == 3
    assert [score(choice) for choice in choices] == sorted(map(score, choices), reverse=True)
    (greedy,) = tiny.complete("Once upon a time", temperature=0, max_tokens=8, logprobs=0)["choices"]
    assert score(choices[0]) >= score(greedy) - 1e-6
    assert found(tiny, "Once upon a time", temperature=0) == choices
    assert found(tiny, "Once upon a time", temperature=None) == choices


def test_one_beam_is_greedy_and_more_are_never_less_likely(tiny):
    greedy = {"max_tokens": 8, "logprobs": 0, "ignore_eos": True}
    for prompt in ("a", "Tell me", [300, 301, 302]):
        (expected,) = tiny.complete(prompt, temperature=0, **greedy)["choices"]
        (one,) = tiny.complete(prompt, use_beam_search=True, **greedy)["choices"]
        assert one["text"] == expected["text"]
        best = tiny.complete(prompt, use_beam_search=True, n=1, best_of=6, **greedy)["choices"]
        assert len(best) == 1
        assert score(best[0]) >= score(one) - 1e-6


def test_openais_client_asks_for_beams_in_both_forms(tiny):
    with openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        extra = {"use_beam_search": True, "length_penalty": 0.5, "early_stopping": "never", "ignore_eos": True}
        answer = client.completions.create(model="tiny", prompt=["x", "y"], n=2, max_tokens=5, extra_body=extra)
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        for number, prompt in enumerate(("x", "y")):
            expected = found(tiny, prompt, n=2, max_tokens=5, **extra)
            assert [one.text for one in answer.choices[2 * number :][:2]] == [one["text"] for one in expected]
        assert answer.usage.completion_tokens == 20
        chat = client.chat.completions.create(
            model="tiny", messages=[USER], n=3, max_tokens=5, logprobs=True, top_logprobs=2, extra_body=extra
        )
        assert len({choice.message.content for choice in chat.choices}) == 3
        for choice in chat.choices:
            assert len(choice.logprobs.content) == 5
            assert all(len(one.top_logprobs) == 2 for one in choice.logprobs.content)


def test_a_stop_token_ends_an_output_and_not_the_others(tiny):
    choices = found(tiny, "ends", max_tokens=12, ignore_eos=True, return_token_ids=True)
    stop_id = choices[0]["token_ids"][5]
    how = {"stop_token_ids": [stop_id], "length_penalty": 0.0, "ignore_eos": True, "return_token_ids": True}
    stopped = found(tiny, "ends", max_tokens=12, **how)
    for choice in stopped:
        at = choice["token_ids"].index(stop_id) if stop_id in choice["token_ids"] else None
        assert (choice["finish_reason"] == "stop") == (at is not None)
        assert at is None or at == len(choice["token_ids"]) - 1
    assert any(choice["finish_reason"] == "stop" for choice in stopped)


def test_usage_and_metrics_count_what_is_told(tiny):
    before = tiny.metric("vllm:request_success_total", "length")
    answer = tiny.complete("count", use_beam_search=True, n=4, max_tokens=6, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 24
    assert tiny.metric("vllm:request_success_total", "length") == before + 4


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_who_goes_away_takes_all_beams_along(tiny, num_steps):
    """Waiting, in the step that forks, and later."""
    before = tiny.metric("vllm:request_success_total", "abort")
    tiny.runner.close_gate()
    tiny.runner.allow(num_steps)
    body = {"prompt": [400 + num_steps] * 20, "use_beam_search": True, "n": 5, "max_tokens": 400, "ignore_eos": True}
    connection = tiny.post_raw("/v1/completions", body)
    tiny.runner.wait_in_step([0] if num_steps == 0 else [20 + num_steps - 1] * 5)
    connection.close()
    tiny.runner.allow()
    tiny.check_pool()
    assert tiny.metric("vllm:request_success_total", "abort") == before + 5


def test_a_step_that_fails_changes_nothing(tiny):
    expected = found(tiny, "once more", max_tokens=10, ignore_eos=True)
    tiny.runner.fail(2)
    assert found(tiny, "once more", max_tokens=10, ignore_eos=True) == expected


BAD = {
    "a stream": ({"stream": True}, "stream", "known at the end"),
    "a temperature": ({"temperature": 0.7}, "temperature", "Send temperature 0"),
    "top_p": ({"top_p": 0.9}, "top_p", "not sampled"),
    "a penalty": ({"presence_penalty": 1.0}, "presence_penalty", "not sampled"),
    "a bias": ({"logit_bias": {"5": 1}}, "logit_bias", "not sampled"),
    "a stop string": ({"stop": "x"}, "stop", "leave use_beam_search out"),
    "a form": ({"response_format": {"type": "json_object"}}, "structured_outputs", "leave use_beam_search out"),
    "no tokens": ({"max_tokens": 0}, "max_tokens", "at least 1"),
    "too many beams": ({"n": 20}, "n", "Ask for fewer beams"),
    "too many to choose from": ({"n": 1, "best_of": 20}, "best_of", "Ask for fewer beams"),
    "more than can be": ({"n": 129}, "n", "between 1 and 128"),
    "too many stop tokens": ({"stop_token_ids": list(range(20, 39))}, "n", "fewer stop_token_ids"),
    "a penalty out of range": ({"length_penalty": 100.0}, "length_penalty", "between -10 and 10"),
    "a penalty that is no number": ({"length_penalty": "1"}, "length_penalty", "number"),
    "a word that is none": ({"early_stopping": "soon"}, "early_stopping", "never"),
    "a number for it": ({"early_stopping": 1}, "early_stopping", "never"),
    "no flag": ({"use_beam_search": "yes"}, "use_beam_search", "bool"),
    "a penalty without beams": ({"use_beam_search": False, "length_penalty": 2.0}, "length_penalty", "of beams"),
    "early_stopping without": ({"use_beam_search": False, "early_stopping": True}, "early_stopping", "of beams"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_searched_is_refused(tiny, name):
    fields, param, said = BAD[name]
    body = {"prompt": "a", **BEAMS, "n": 2} | fields
    error = error_of(tiny.http.post("/v1/completions", json=body), 400)
    assert error["param"] == param
    assert said in error["message"]
