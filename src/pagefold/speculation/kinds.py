"""Kinds: drafts of about equal worth: those found in texts by how many tokens agree before them, and a model's."""

from __future__ import annotations

from bisect import bisect_right

__all__ = ["NUM_KINDS", "OF_MODEL", "kind_of"]

_BEGIN = (3, 4, 6, 10, 20)
"""Of how many tokens that agree on each kind begins, but for the first."""

OF_MODEL = len(_BEGIN) + 1
"""The kind of drafts that a model makes."""

NUM_KINDS = OF_MODEL + 1


def kind_of(num_matched: int) -> int:
    """Return the kind of drafts that were found where so many tokens before them agree."""
    return bisect_right(_BEGIN, num_matched)
