"""Kinds: drafts of about equal worth, by how many tokens agree before them."""

from __future__ import annotations

from bisect import bisect_right

__all__ = ["NUM_KINDS", "kind_of"]

_BEGIN = (3, 4, 6, 10, 20)
"""Of how many tokens that agree on each kind begins, but for the first."""

NUM_KINDS = len(_BEGIN) + 1


def kind_of(num_matched: int) -> int:
    """Return the kind of drafts before which so many tokens agree."""
    return bisect_right(_BEGIN, num_matched)
