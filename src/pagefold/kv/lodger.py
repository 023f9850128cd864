"""Lodger: a part of the core that has something of a sequence beside its blocks, and is told what becomes of it.

``core.lodgers`` are all of them, told and asked as one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pagefold.kv.ops import ResidualCopy
    from pagefold.kv.sequence_cache import SequenceCache

__all__ = ["Lodger", "Lodgers"]


class Lodger:
    """What all such parts are told, and asked. As it is it has nothing.

    Attributes:
        is_on: whether there is such a part at all; nobody tells or asks it anything otherwise.
    """

    is_on = True

    def on_acquire(self, cache: SequenceCache) -> None:
        """A sequence begins."""

    def on_fork(self, cache: SequenceCache, twin: SequenceCache) -> None:
        """``twin`` begins, and goes on from what ``cache`` has."""

    def on_release(self, cache: SequenceCache) -> None:
        """A sequence ends. Its tables hold their blocks still."""

    def on_forget(self, cache: SequenceCache) -> None:
        """What a sequence has is not to be found any more, and the sequence goes on."""

    def on_failed(self, rows: Sequence[tuple[SequenceCache, int]], copies: Sequence[ResidualCopy]) -> None:
        """A step failed, perhaps in the midst of its writes.

        Args:
            rows: the sequences that it computed, each with its first position there.
            copies: what it was to copy between residuals.
        """

    def num_left(self, cache: SequenceCache, num_tokens: int) -> int | None:  # noqa: ARG002
        """Return how many of a sequence's ``num_tokens`` computed ones it still has after steps have failed.

        None where it cannot go on from anything that it has. Who asks has been told, and is not told again.
        """
        return num_tokens

    def growth(self, cache: SequenceCache, num_tokens: int, num_blocks: int) -> int:  # noqa: ARG002
        """Return how many blocks a sequence takes yet until it has ``num_tokens``, of those that its tables lack.

        Args:
            cache: what it has.
            num_tokens: how many it will have.
            num_blocks: how many blocks its tables lack.
        """
        return num_blocks

    def limit(self, cache: SequenceCache, start: int, num_tokens: int, num_all: int) -> int:  # noqa: ARG002
        """Return how many tokens a sequence may compute in one step.

        Args:
            cache: what it has.
            start: its first position.
            num_tokens: how many there could be.
            num_all: how many the sequence has in all.
        """
        return num_tokens

    def draft_limit(self, cache: SequenceCache, start: int, num_tokens: int) -> int:  # noqa: ARG002
        """Return how many tokens a row may have that ends in drafts.

        Args:
            cache: what the sequence has.
            start: the row's first position.
            num_tokens: how many there could be, the sequence's own last token among them.
        """
        return num_tokens


class Lodgers(Lodger):
    """Several lodgers, those of them that are on: told one by one, and each is asked of what the one before answered.

    Args:
        lodgers: in the order in which they are asked.
    """

    def __init__(self, lodgers: Iterable[Lodger]) -> None:
        self._lodgers = tuple(lodger for lodger in lodgers if lodger.is_on)
        self.is_on = bool(self._lodgers)

    def on_acquire(self, cache: SequenceCache) -> None:
        """A sequence begins."""
        for lodger in self._lodgers:
            lodger.on_acquire(cache)

    def on_fork(self, cache: SequenceCache, twin: SequenceCache) -> None:
        """``twin`` begins, and goes on from what ``cache`` has."""
        for lodger in self._lodgers:
            lodger.on_fork(cache, twin)

    def on_release(self, cache: SequenceCache) -> None:
        """A sequence ends."""
        for lodger in self._lodgers:
            lodger.on_release(cache)

    def on_forget(self, cache: SequenceCache) -> None:
        """What a sequence has is not to be found any more."""
        for lodger in self._lodgers:
            lodger.on_forget(cache)

    def on_failed(self, rows: Sequence[tuple[SequenceCache, int]], copies: Sequence[ResidualCopy]) -> None:
        """A step failed. What it had promised and moved is taken back beside this."""
        for lodger in self._lodgers:
            lodger.on_failed(rows, copies)

    def num_left(self, cache: SequenceCache, num_tokens: int) -> int | None:
        """Return how many computed tokens a sequence still has after steps have failed."""
        for lodger in self._lodgers:
            left = lodger.num_left(cache, num_tokens)
            if left is None:
                return None
            num_tokens = left
        return num_tokens

    def growth(self, cache: SequenceCache, num_tokens: int, num_blocks: int) -> int:
        """Return how many blocks a sequence takes yet until it has ``num_tokens``."""
        for lodger in self._lodgers:
            num_blocks = lodger.growth(cache, num_tokens, num_blocks)
        return num_blocks

    def limit(self, cache: SequenceCache, start: int, num_tokens: int, num_all: int) -> int:
        """Return how many tokens a sequence may compute in one step."""
        for lodger in self._lodgers:
            num_tokens = lodger.limit(cache, start, num_tokens, num_all)
        return num_tokens

    def draft_limit(self, cache: SequenceCache, start: int, num_tokens: int) -> int:
        """Return how many tokens a row may have that ends in drafts."""
        for lodger in self._lodgers:
            num_tokens = lodger.draft_limit(cache, start, num_tokens)
        return num_tokens
