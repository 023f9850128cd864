"""Random runs: in `make test` until all has happened that must, in the long form all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Collection, Iterable, Iterator

__all__ = ["IN_FULL", "until_seen"]

IN_FULL = pytest.mark.parametrize(
    "in_full", [pytest.param(False, id="quick"), pytest.param(True, id="in full", marks=pytest.mark.long)]
)
"""Decorator of a test that has a quick form and a long one, and is told which it runs."""


def until_seen(seeds: Iterable[int], seen: Counter[str], asked: Collection[str], *, in_full: bool) -> Iterator[int]:
    """Return the seeds of a test's runs, up to the first behind which all that is asked has happened.

    Args:
        seeds: of all runs.
        seen: what has happened so far, which the caller adds to after each run.
        asked: what must happen.
        in_full: whether all runs are made, whatever has happened.
    """
    for seed in seeds:
        yield seed
        if not in_full and all(seen[what] > 0 for what in asked):
            return
