"""Changing parts: what two prompts have between what they share, and how much of it they share all the same.

Two prompts part at a token. Where both go on alike soon after, what lies between is a part that changes: a time, an id,
parts in another order. All that is alike behind it could have been found, had the part been at the end.
"""

from __future__ import annotations

from typing import NamedTuple

from pagefold.kv import TOKEN_BYTES
from pagefold.observe.nearest_prompts import common_prefix

__all__ = ["ChangingPart", "Span", "changing_part"]

_GRAM = 16
"""So many equal tokens in a row are taken for the same place of both prompts."""

_FAR = 1024
"""So many tokens that are not alike are searched for such places, in both."""

_MOST_SPANS = 4


class Span(NamedTuple):
    """Tokens of one prompt that stand where the other has others, or none.

    Attributes:
        own_start, own_end: positions in the one.
        other_start, other_end: in the other.
    """

    own_start: int
    own_end: int
    other_start: int
    other_end: int


class ChangingPart(NamedTuple):
    """Where two prompts differ before they go on alike.

    Attributes:
        spans: the parts that differ, in order.
        num_common: how many tokens behind the first of them are alike.
        is_reordered: whether both have the same tokens in all spans together, in another order.
    """

    spans: tuple[Span, ...]
    num_common: int
    is_reordered: bool


def changing_part(own: bytes, other: bytes, start: int) -> ChangingPart | None:
    """Return what changes between two prompts that are alike up to a token; None where they do not go on alike.

    Args:
        own: tokens of the one, packed.
        other: of the other.
        start: the first token in which they differ.
    """
    own_at = other_at = start
    spans: list[Span] = []
    num_common = 0
    num_left = _FAR
    while len(spans) < _MOST_SPANS:
        met = _meeting(own, other, own_at, other_at, num_left)
        if met is None:
            break
        num_left -= max(met[0] - own_at, met[1] - other_at)
        spans.append(Span(own_at, met[0], other_at, met[1]))
        run = common_prefix(own[met[0] * TOKEN_BYTES :], other[met[1] * TOKEN_BYTES :])
        num_common += run
        own_at, other_at = met[0] + run, met[1] + run
    if not spans:
        return None
    left = sorted(_tokens(own, [(span.own_start, span.own_end) for span in spans]))
    right = sorted(_tokens(other, [(span.other_start, span.other_end) for span in spans]))
    return ChangingPart(tuple(spans), num_common, bool(left) and left == right)


def _meeting(own: bytes, other: bytes, own_at: int, other_at: int, far: int) -> tuple[int, int] | None:
    """Return where both have the same tokens again, at the first such place of ``own``; no more than so far behind."""
    places: dict[bytes, int] = {}
    for at in range(other_at, min(other_at + far, len(other) // TOKEN_BYTES - _GRAM + 1)):
        places.setdefault(_gram(other, at), at)
    for at in range(own_at, min(own_at + far, len(own) // TOKEN_BYTES - _GRAM + 1)):
        found = places.get(_gram(own, at))
        if found is not None:
            return at, found
    return None


def _gram(packed: bytes, at: int) -> bytes:
    return packed[at * TOKEN_BYTES : (at + _GRAM) * TOKEN_BYTES]


def _tokens(packed: bytes, ranges: list[tuple[int, int]]) -> list[bytes]:
    """Return the tokens of some ranges, each packed."""
    return [packed[at * TOKEN_BYTES : (at + 1) * TOKEN_BYTES] for first, last in ranges for at in range(first, last)]
