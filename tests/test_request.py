"""SamplingParams and the moves of a request."""

from __future__ import annotations

from array import array
from dataclasses import FrozenInstanceError
from itertools import product

import pytest

from pagefold.errors import InvalidRequestError
from pagefold.request import LEGAL_MOVES, Request, RequestStatus, StopRule
from pagefold.sampling import SamplingParams

# What was asked.


@pytest.mark.parametrize(
    "setting",
    [
        {"temperature": 0.0},
        {"temperature": 2.0},
        {"top_p": 1e-9},
        {"top_p": 1.0},
        {"top_k": -1},
        {"top_k": 0},
        {"top_k": 10**6},
        {"max_tokens": 0},
        {"max_tokens": 1},
        {"allowed_token_ids": (5,)},
        {"bad_words": ("x" * 256,) * 1024},
        {"truncate_prompt_tokens": -1},
        {"truncate_prompt_tokens": 1},
        {"include_stop_str_in_output": True},
        {"skip_special_tokens": False},
        {"max_tokens": None},
        {"stop": ("a",) * 16},
        {"seed": -1},
        {"min_p": 0.0},
        {"min_p": 1.0},
        {"presence_penalty": -2.0},
        {"frequency_penalty": 2.0},
        {"repetition_penalty": 1e-9},
        {"repetition_penalty": 1e9},
        {"logit_bias": {5: -100.0, 6: 100}},
        {"min_tokens": 0},
        {"logprobs": 0},
        {"logprobs": 20},
        {"prompt_logprobs": 0},
        {"prompt_logprobs": 20},
        {"n": 128},
        {"n": 2, "best_of": 2},
        {"best_of": 128},
        {"best_of": 1, "temperature": 0.0},
    ],
    ids=str,
)
def test_what_is_in_range_is_taken(setting):
    sampling = SamplingParams(**setting)
    assert all(getattr(sampling, name) == value for name, value in setting.items())


@pytest.mark.parametrize(
    "setting",
    [
        {"n": 0},
        {"n": -1},
        {"n": 129},
        {"best_of": 0},
        {"best_of": 129},
        {"temperature": -0.1},
        {"temperature": 2.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": -0.5},
        {"top_p": 1.1},
        {"top_p": float("nan")},
        {"top_k": -2},
        {"max_tokens": -5},
        {"allowed_token_ids": ()},
        {"bad_words": ("a",) * 1025},
        {"bad_words": ("a", " ")},
        {"bad_words": ("",)},
        {"bad_words": ("x" * 257,)},
        {"bad_words": ("\ud83d",)},
        {"truncate_prompt_tokens": 0},
        {"truncate_prompt_tokens": -2},
        {"stop": ("a",) * 17},
        {"stop": ("a", "")},
        {"stop": ""},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"min_p": float("nan")},
        {"presence_penalty": -2.1},
        {"presence_penalty": 2.1},
        {"presence_penalty": float("nan")},
        {"frequency_penalty": -2.1},
        {"frequency_penalty": 2.1},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": -1.0},
        {"repetition_penalty": float("inf")},
        {"repetition_penalty": float("nan")},
        {"logit_bias": {5: 100.1}},
        {"logit_bias": {5: 0, 6: -100.1}},
        {"logit_bias": {5: float("nan")}},
        {"min_tokens": -1},
        {"logprobs": -1},
        {"logprobs": 21},
        {"prompt_logprobs": -1},
        {"prompt_logprobs": 21},
    ],
    ids=str,
)
def test_what_is_out_of_range_is_refused_by_name(setting):
    (name,) = setting
    with pytest.raises(InvalidRequestError, match=f"^{name} is .* It must be") as refusal:
        SamplingParams(**setting)
    assert refusal.value.param == name


def test_stops_in_every_form_that_vllm_takes():
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()
    assert SamplingParams(stop_token_ids=[1, 2]).stop_token_ids == (1, 2)


@pytest.mark.parametrize(
    "setting",
    [
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"repetition_penalty": 1.1},
        {"logit_bias": {3: 1.0}},
        {"min_tokens": 1},
        {"logprobs": 0},
        {"prompt_logprobs": 0},
    ],
    ids=str,
)
def test_what_asks_for_more_than_a_draw_is_not_plain(setting):
    assert SamplingParams(temperature=0.5, top_p=0.5, top_k=5, min_p=0.5, seed=1, stop="x", logit_bias={}).is_plain
    assert not SamplingParams(**setting).is_plain
    assert SamplingParams(**setting).has_penalties == next(iter(setting)).endswith("penalty")


def test_a_bias_is_the_params_own_and_params_are_hashable():
    bias = {3: 1.0}
    sampling = SamplingParams(logit_bias=bias)
    bias[4] = 2.0
    assert sampling.logit_bias == {3: 1.0}
    assert hash(sampling) == hash(SamplingParams(logit_bias={3: 1.0}))
    assert sampling != SamplingParams()


def test_defaults_are_vllms_and_frozen():
    sampling = SamplingParams()
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (1.0, 1.0, 0, 16)
    assert not sampling.is_greedy
    assert SamplingParams(temperature=0).is_greedy
    with pytest.raises(FrozenInstanceError):
        sampling.top_p = 0.5


# A request.


def request_of(*tokens: int) -> Request:
    return Request("a", tokens, SamplingParams(), stop=StopRule(frozenset(), 100))


def test_tokens_are_prompt_then_output():
    request = request_of(5, 6, 7)
    assert (request.num_tokens, request.num_prompt_tokens, request.num_output_tokens) == (3, 3, 0)
    request.token_ids.append(2**31 - 1)
    assert (request.num_tokens, request.num_output_tokens, request.output_token_ids) == (4, 1, [2**31 - 1])
    assert request.packed() == array("i", [5, 6, 7, 2**31 - 1]).tobytes()
    assert repr(request) == "Request('a', waiting, 0/4 tokens)"


def test_the_prompt_is_the_requests_own():
    prompt = array("i", [1, 2, 3])
    request = Request("a", prompt, SamplingParams(), stop=StopRule(frozenset(), 100))
    prompt.append(4)
    assert request.num_tokens == 3


@pytest.mark.parametrize(("old", "new"), list(product(RequestStatus, RequestStatus)), ids=str)
def test_only_legal_moves_are_made(old, new):
    request = request_of(1)
    request.status = old
    if new in LEGAL_MOVES[old]:
        request.to(new)
        assert request.status is new
    else:
        with pytest.raises(AssertionError, match=f"a: {old} -> {new}"):
            request.to(new)
        assert request.status is old


def test_the_table_of_moves_is_the_life_of_a_request():
    assert set(LEGAL_MOVES) == set(RequestStatus)
    assert LEGAL_MOVES[RequestStatus.FINISHED] == frozenset()
    for status in set(RequestStatus) - {RequestStatus.FINISHED}:
        assert RequestStatus.FINISHED in LEGAL_MOVES[status], "anything can be cancelled"
    assert RequestStatus.WAITING not in LEGAL_MOVES[RequestStatus.PREEMPTED], "who was preempted stays known as such"


@pytest.mark.parametrize(
    "field",
    [
        {"temperature": "hot"},
        {"temperature": None},
        {"temperature": True},
        {"top_p": None},
        {"top_k": 1.5},
        {"max_tokens": "5"},
        {"max_tokens": 2.5},
        {"stop": 5},
        {"stop": [5]},
        {"stop_token_ids": ["a"]},
        {"stop_token_ids": [True]},
        {"ignore_eos": 1},
        {"seed": "x"},
        {"min_p": "0.1"},
        {"logit_bias": [1, 2]},
        {"logit_bias": {"5": 1.0}},
        {"logit_bias": {5: "much"}},
        {"logprobs": True},
        {"min_tokens": 1.5},
    ],
    ids=str,
)
def test_a_value_of_the_wrong_type_is_refused_by_name(field):
    ((name, _),) = field.items()
    with pytest.raises(InvalidRequestError, match=f"^{name} is ") as refused:
        SamplingParams(**field)
    assert refused.value.param == name
    assert refused.value.remedy.startswith("It must be ")


def test_ints_are_numbers_and_lists_are_sequences():
    how = SamplingParams(temperature=1, top_p=1, stop=["a", "b"], stop_token_ids=[1, 2])
    assert (how.stop, how.stop_token_ids) == (("a", "b"), (1, 2))
    assert SamplingParams(stop=None, stop_token_ids=None).stop == ()


def test_more_is_sampled_than_returned_only_where_the_best_are_asked_for():
    for n, best_of, num_samples, ranks in ((1, None, 1, False), (3, None, 3, False), (3, 3, 3, False), (2, 5, 5, True)):
        sampling = SamplingParams(n=n, best_of=best_of)
        assert (sampling.num_samples, sampling.ranks_samples, sampling.is_plain) == (num_samples, ranks, not ranks)


@pytest.mark.parametrize(
    ("setting", "param", "remedy"),
    [
        ({"n": 3, "best_of": 2}, "best_of", "at least n"),
        ({"n": 2, "temperature": 0.0}, "n", "higher temperature"),
        ({"n": 2, "temperature": 1e-6}, "n", "higher temperature"),
        ({"best_of": 2, "temperature": 0.0}, "best_of", "higher temperature"),
    ],
    ids=str,
)
def test_samples_that_make_no_sense_are_refused(setting, param, remedy):
    with pytest.raises(InvalidRequestError, match=f"{param} is") as refused:
        SamplingParams(**setting)
    assert refused.value.param == param
    assert remedy in refused.value.remedy


def test_a_request_with_forks_is_several_sequences():
    def sample(index):
        stop = StopRule(frozenset(), 9)
        return Request(f"a{index}", [1], SamplingParams(n=3), stop=stop, parent_id="a", sample_index=index)

    first, *first.forks = (sample(index) for index in range(3))
    assert (first.num_seqs, first.forks[0].num_seqs) == (3, 1)
    assert Request("b", [1], SamplingParams(), stop=StopRule(frozenset(), 9)).parent_id == "b"
