"""The search alone, beside a slow twin that keeps every continuation, written from transformers' description."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagefold.beams import BeamSearch

VOCAB = 7


def logprob_of(context: tuple[int, ...], token_id: int, seed: int) -> float:
    """Return a number of the context and the token, and of nothing else; no two of one context are equal."""
    mixed = hash((seed, context, token_id)) % 1_000_003
    return -0.1 - 3 * mixed / 1_000_003


def tops_of(context: tuple[int, ...], num_tops: int, seed: int) -> list[tuple[int, float]]:
    found = [(token_id, logprob_of(context, token_id, seed)) for token_id in range(VOCAB)]
    return sorted(found, key=lambda each: -each[1])[:num_tops]


def slow_twin(*, width, stop_ids, max_tokens, min_tokens, length_penalty, early_stopping, seed):
    """Return (tokens, score) of each result: all continuations of all beams, ranked anew in each step."""
    running, finished = {(): 0.0}, {}
    for length in range(1, max_tokens + 1):
        continued = {
            (*beam, token_id): total + logprob_of(beam, token_id, seed)
            for beam, total in running.items()
            for token_id in range(VOCAB)
            if token_id not in stop_ids or length > min_tokens
        }
        ranked = sorted(continued, key=lambda beam: -continued[beam])
        is_ended = {beam: beam[-1] in stop_ids or length == max_tokens for beam in ranked}
        for beam in ranked[:width]:
            if is_ended[beam]:
                finished[beam] = continued[beam] / length**length_penalty
        finished = dict(sorted(finished.items(), key=lambda each: -each[1])[:width])
        running = {beam: continued[beam] for beam in [beam for beam in ranked if not is_ended[beam]][:width]}
        if not running:
            break
        if len(finished) == width:
            if early_stopping is True:
                break
            hoped_length = max_tokens if early_stopping == "never" and length_penalty > 0 else length
            if max(running.values()) / hoped_length**length_penalty <= min(finished.values()):
                break
    return list(finished.items())


def search(*, width, stop_ids, max_tokens, min_tokens, length_penalty, early_stopping, seed):
    made = BeamSearch(
        width,
        stop_ids,
        max_tokens,
        min_tokens=min_tokens,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
    )
    outputs = []
    for _ in range(2):  # it begins again as if nothing had been
        beams = [()]
        while True:
            moves = made.take([tops_of(beam, made.num_tops, seed) for beam in beams])
            if not moves:
                break
            assert len(moves) == width
            for move in moves:
                assert tops_of(beams[move.parent], made.num_tops, seed)[move.rank - 1] == move[1::2]
            beams = [(*beams[move.parent], move.token_id) for move in moves]
        assert made.is_over
        outputs.append([(tuple(m.token_id for m in each.moves), each.score) for each in made.best()])
        for hypothesis in made.best():
            assert hypothesis.is_stopped == (hypothesis.moves[-1].token_id in stop_ids)
        made.begin_again()
    assert outputs[0] == outputs[1]
    return outputs[0]


CASES = {
    "width": st.integers(1, 4),
    "stop_ids": st.frozensets(st.integers(0, VOCAB - 1), max_size=3),
    "max_tokens": st.integers(1, 9),
    "min_tokens": st.integers(0, 9),
    "length_penalty": st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]),
    "early_stopping": st.sampled_from([True, False, "never"]),
    "seed": st.integers(0, 10**9),
}


@settings(max_examples=300)
@given(**CASES)
def test_it_finds_what_its_slow_twin_finds(**case):
    got, expected = search(**case), slow_twin(**case)
    assert len(got) == case["width"]
    assert [each[0] for each in got] == [each[0] for each in expected]
    for (_, score), (_, wanted) in zip(got, expected, strict=True):
        assert score == pytest.approx(wanted)


@settings(max_examples=50)
@given(**CASES)
def test_results_are_in_order_and_no_two_are_the_same(**case):
    got = search(**case)
    assert all(first[1] >= second[1] for first, second in pairwise(got))
    assert len({tokens for tokens, _ in got}) == len(got)
    for tokens, _ in got:
        assert len(tokens) <= case["max_tokens"]
        stops = [at for at, token_id in enumerate(tokens) if token_id in case["stop_ids"] and at >= case["min_tokens"]]
        assert stops in ([], [len(tokens) - 1])


def test_as_wide_as_all_that_is_possible_it_finds_the_likeliest_of_all():
    """With as many beams as continuations nothing is ever dropped: the best is the best of all outputs."""
    best = BeamSearch(VOCAB**2, (), 3)
    beams = [()]
    while moves := best.take([tops_of(beam, VOCAB, 3) for beam in beams]):
        beams = [(*beams[move.parent], move.token_id) for move in moves]
    every = [(a, b, c) for a in range(VOCAB) for b in range(VOCAB) for c in range(VOCAB)]
    total = {each: sum(logprob_of(each[:at], each[at], 3) for at in range(3)) for each in every}
    found = best.best()[0]
    assert tuple(move.token_id for move in found.moves) == max(total, key=total.__getitem__)
    assert math.isclose(found.score * 3, max(total.values()))
