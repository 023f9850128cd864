"""n and best_of over HTTP, with openai's client: streamed and not, in both forms."""

from __future__ import annotations

from collections import Counter

import openai
import pytest
from local_server import PATIENCE_S, error_of, finish_reasons, joined, until

EXTRA = {"ignore_eos": True}
HELLO = [{"role": "user", "content": "Say hello."}]
LONG = {"max_tokens": 400, "ignore_eos": True}


@pytest.fixture
def client(tiny):
    with openai.OpenAI(base_url=f"{tiny.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


def alone(tiny, prompt, num_samples, **fields):
    """What each sample must be: the choice of a request with its own seed."""
    seed = fields.pop("seed")
    return [tiny.complete(prompt, seed=seed + i, **fields)["choices"][0] for i in range(num_samples)]


def test_choices_are_those_of_requests_with_seeds_that_count_up(tiny, client):
    answer = client.completions.create(model="tiny", prompt="once", n=4, seed=5, max_tokens=9, extra_body=EXTRA)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    expected = alone(tiny, "once", 4, seed=5, max_tokens=9, ignore_eos=True)
    assert [choice.text for choice in answer.choices] == [choice["text"] for choice in expected]
    assert len({choice.text for choice in answer.choices}) == 4
    assert {choice.finish_reason for choice in answer.choices} == {"length"}
    assert answer.usage.completion_tokens == 36
    assert answer.usage.prompt_tokens == len(tiny.tokenizer.encode("once"))


def test_prompts_come_one_after_another(tiny, client):
    prompts = ["one", "two", "three"]
    answer = client.completions.create(model="tiny", prompt=prompts, n=2, seed=1, max_tokens=6, extra_body=EXTRA)
    assert [choice.index for choice in answer.choices] == list(range(6))
    expected = [
        choice["text"] for prompt in prompts for choice in alone(tiny, prompt, 2, seed=1, max_tokens=6, **EXTRA)
    ]
    assert [choice.text for choice in answer.choices] == expected
    assert answer.usage.completion_tokens == 36
    assert answer.usage.prompt_tokens == sum(len(tiny.tokenizer.encode(prompt)) for prompt in prompts)


def test_cached_tokens_of_a_prompt_are_counted_once(tiny):
    prompt = list(range(3000, 3064))
    for cached in (0, 63):
        usage = tiny.complete(prompt, n=3, max_tokens=2, ignore_eos=True)["usage"]
        assert (usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) == (64, cached)


def test_a_stream_brings_the_same_choices(tiny, client):
    how = {"n": 3, "seed": 9, "max_tokens": 12, "logprobs": 1, "extra_body": EXTRA}
    whole = client.completions.create(model="tiny", prompt=["a", "b"], **how)
    stream = client.completions.create(
        model="tiny", prompt=["a", "b"], stream=True, stream_options={"include_usage": True}, **how
    )
    texts, tokens, reasons = Counter(), {}, {}
    for chunk in stream:
        for choice in chunk.choices:
            assert choice.index not in reasons, "a chunk behind the end"
            texts[choice.index] = (texts[choice.index] or "") + choice.text
            tokens.setdefault(choice.index, []).extend(choice.logprobs.tokens)
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert chunk.usage == whole.usage
    assert [texts[index] for index in range(6)] == [choice.text for choice in whole.choices]
    assert [tokens[index] for index in range(6)] == [choice.logprobs.tokens for choice in whole.choices]
    assert [reasons[index] for index in range(6)] == [choice.finish_reason for choice in whole.choices]


def test_chats_have_choices_too(tiny, client):
    how = {"model": "tiny", "messages": HELLO, "n": 3, "seed": 2, "max_tokens": 8, "extra_body": EXTRA}
    whole = client.chat.completions.create(**how, logprobs=True, top_logprobs=2)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert len({choice.message.content for choice in whole.choices}) == 3
    assert all(len(choice.logprobs.content) == 8 for choice in whole.choices)
    assert whole.usage.completion_tokens == 24
    single = client.chat.completions.create(**how | {"n": 1, "seed": 3})
    assert single.choices[0].message.content == whole.choices[1].message.content
    texts, roles = ["", "", ""], Counter()
    for chunk in client.chat.completions.create(**how, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.delta.content or ""
        roles[choice.index, choice.delta.role] += 1
    assert texts == [choice.message.content for choice in whole.choices]
    assert [roles[index, "assistant"] for index in range(3)] == [1, 1, 1]


def test_each_choice_ends_by_itself(tiny):
    how = {"seed": 4, "max_tokens": 20, "ignore_eos": True}
    text = alone(tiny, "ends", 3, **how)[1]["text"]
    how["stop"] = text[len(text) // 2 :][:3]
    choices = tiny.complete("ends", n=3, **how)["choices"]
    assert choices[1]["text"] == text[: text.index(how["stop"])]
    assert choices[1]["finish_reason"] == "stop"
    for choice, expected in zip(choices, alone(tiny, "ends", 3, **how), strict=True):
        assert (choice["text"], choice["finish_reason"]) == (expected["text"], expected["finish_reason"])


def test_best_of_returns_those_with_the_highest_logprob_per_token(tiny, client):
    how = {"max_tokens": 7, "logprobs": 0, "ignore_eos": True}
    samples = alone(tiny, "best", 6, seed=3, **how)
    means = [sum(choice["logprobs"]["token_logprobs"]) / 7 for choice in samples]
    order = sorted(range(6), key=lambda index: -means[index])
    answer = client.completions.create(
        model="tiny", prompt="best", n=2, best_of=6, seed=3, max_tokens=7, extra_body=EXTRA
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert [choice.text for choice in answer.choices] == [samples[index]["text"] for index in order[:2]]
    assert {choice.logprobs for choice in answer.choices} == {None}, "they were not asked for"
    assert answer.usage.completion_tokens == 42, "all that was sampled"
    several = tiny.complete(["x", "best"], best_of=6, seed=3, **how)["choices"]
    assert [choice["index"] for choice in several] == [0, 1]
    assert several[1]["text"] == samples[order[0]]["text"]


def test_best_of_as_many_as_asked_for_can_be_streamed(tiny):
    body = {"prompt": "x", "n": 2, "best_of": 2, "seed": 1, "max_tokens": 5, "ignore_eos": True}
    events = tiny.events("/v1/completions", body)
    expected = alone(tiny, "x", 2, seed=1, max_tokens=5, ignore_eos=True)
    assert [joined(events, index) for index in range(2)] == [choice["text"] for choice in expected]
    assert [finish_reasons(events, index) for index in range(2)] == [["length"], ["length"]]


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
def test_who_goes_away_takes_all_samples_along(tiny, num_steps):
    """Waiting at the door, in the step that forks, when the tails are copied, and later."""
    before = tiny.metric("vllm:request_success_total", "abort")
    tiny.runner.close_gate()
    tiny.runner.allow(num_steps)
    connection = tiny.post_raw("/v1/completions", {"prompt": [200 + num_steps] * 20, "n": 5, **LONG})
    tiny.runner.wait_in_step([0] if num_steps == 0 else [20 + num_steps - 1] * 5)
    connection.close()
    until(lambda: not tiny.client._commands.empty(), "the engine to be told")
    tiny.runner.allow()
    tiny.check_pool()
    assert tiny.metric("vllm:request_success_total", "abort") == before + 5


def test_a_prompt_is_counted_once_and_every_token(tiny):
    names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:time_to_first_token_seconds_count")
    before = [tiny.metric(name) for name in names]
    computed = tiny.metric("vllm:prompt_tokens_by_source_total", "local_compute")
    tiny.complete(list(range(5000, 5050)), n=8, max_tokens=10, ignore_eos=True)
    assert [tiny.metric(name) - was for name, was in zip(names, before, strict=True)] == [50, 80, 1]
    assert tiny.metric("vllm:prompt_tokens_by_source_total", "local_compute") - computed == 50


def test_more_samples_than_places_are_refused(narrow):
    body = {"prompt": "a", "n": 2}
    error = error_of(narrow.http.post("/v1/completions", json=body), 400)
    assert error["param"] == "n"
    assert "at most 1" in error["message"]


def test_a_step_that_keeps_failing_fails_the_whole(tiny, caplog):
    tiny.runner.fail(3)
    error = error_of(tiny.http.post("/v1/completions", json={"prompt": "no", "n": 3, **LONG}), 500)
    assert error["code"] == "step_failed"
    assert len(tiny.complete("yes", n=3, max_tokens=2)["choices"]) == 3
