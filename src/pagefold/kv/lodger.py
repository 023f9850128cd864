"""Lodger: a part of the core that has something of a sequence beside its blocks, and is told what becomes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagefold.kv.sequence_cache import SequenceCache

__all__ = ["Lodger"]


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

    def limit(self, cache: SequenceCache, start: int, num_tokens: int, num_all: int) -> int:  # noqa: ARG002
        """Return how many tokens a sequence may compute in one step.

        Args:
            cache: what it has.
            start: its first position.
            num_tokens: how many there could be.
            num_all: how many the sequence has in all.
        """
        return num_tokens
