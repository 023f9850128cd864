"""Where two prompts differ and go on alike, against how they were made."""

from __future__ import annotations

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from pagefold.observe.changing_part import Span, changing_part

LONG = 16
"""Tokens in a row that are found again."""


def packed(tokens: list[int]) -> bytes:
    return array("i", tokens).tobytes()


def alike(name: int, length: int) -> list[int]:
    """Tokens that stand nowhere else."""
    return [1000 * name + at for at in range(length)]


@given(
    before=st.integers(1, 40),
    runs=st.lists(st.integers(LONG, 60), min_size=1, max_size=4),
    changes=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).filter(any), min_size=4, max_size=4),
    tail=st.integers(0, LONG - 1),
)
@settings(deadline=None)
def test_spans_are_those_that_were_put_in(before, runs, changes, tail):
    own, other = alike(1, before), alike(1, before)
    spans = []
    for number, (run, (num_own, num_other)) in enumerate(zip(runs, changes, strict=False), 2):
        spans.append(Span(len(own), len(own) + num_own, len(other), len(other) + num_other))
        own += [*alike(100 + number, num_own), *alike(number, run)]
        other += [*alike(200 + number, num_other), *alike(number, run)]
    own += alike(300, tail + 1)
    other += alike(301, 5)
    part = changing_part(packed(own), packed(other), before)
    assert part is not None
    assert list(part.spans) == spans
    assert part.num_common == sum(runs)
    assert not part.is_reordered


def test_what_ends_otherwise_is_no_part_that_changes():
    system, end = alike(1, 50), alike(2, LONG - 1)  # two questions, and what a template puts behind them
    own, other = [*system, *alike(3, 30), *end], [*system, *alike(4, 40), *end]
    assert changing_part(packed(own), packed(other), 50) is None
    assert changing_part(packed(system), packed([*system, 7]), 50) is None


def test_parts_in_another_order_are_the_same_parts():
    first, one, two, three, rest = (alike(name, 40) for name in range(1, 6))
    own, other = [*first, *three, *one, *two, *rest], [*first, *one, *two, *three, *rest]
    part = changing_part(packed(own), packed(other), 40)
    assert part is not None
    assert part.is_reordered
    assert part.num_common >= 80
    again = changing_part(packed(own), packed([*other[:50], 9, *other[51:]]), 40)
    assert again is not None
    assert not again.is_reordered
