"""KeepRule: which tokens of a sequence a cache group keeps, and so which of its blocks are given back while it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagefold.kv.table import num_blocks_for

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["KEEP_ALL", "KeepRule"]


@dataclass(frozen=True, slots=True)
class KeepRule:
    """What the layers of a group see of a sequence, as transformers defines its attention masks.

    Attributes:
        window: how many tokens a token sees at most, itself included; None for all that are before it.
        is_chunked: it sees the tokens since the last multiple of ``window`` instead.
        num_sinks: how many of the first tokens it sees beside its window, which slides then.
    """

    window: int | None = None
    is_chunked: bool = False
    num_sinks: int = 0

    def __post_init__(self) -> None:
        assert not self.num_sinks or (self.window is not None and not self.is_chunked), "sinks beside a sliding window"

    @property
    def trims(self) -> bool:
        """Whether tokens are left behind for good, when a sequence has grown beyond them."""
        return self.window is not None

    def first_seen(self, position: int) -> int:
        """Return the first position that the token at ``position`` sees, but for sinks.

        What lies before it, and is no sink, nobody behind it sees.
        """
        if self.window is None:
            return 0
        if self.is_chunked:
            return position - position % self.window
        return max(0, position + 1 - self.window)

    def num_sink_blocks(self, block_size: int) -> int:
        """Return how many of a sequence's first blocks hold its sinks."""
        return num_blocks_for(self.num_sinks, block_size)

    def first_kept(self, position: int, block_size: int) -> int:
        """Return from which block on all are kept that the token at ``position`` sees.

        As long as nothing lies between the sinks' blocks and the window that is the first of all.
        """
        return self._behind_sinks(self.first_seen(position) // block_size, block_size)

    def first_block(self, num_blocks: int, block_size: int) -> int:
        """Return from which of so many full blocks on whoever goes on behind them needs all, beside those of sinks.

        The last one always: a path goes on in it.
        """
        if self.window is None or not num_blocks:
            return 0
        first = min(self.first_seen(num_blocks * block_size) // block_size, num_blocks - 1)
        return self._behind_sinks(first, block_size)

    def places(self, num_blocks: int, block_size: int) -> Sequence[int]:
        """Return which of so many full blocks whoever goes on behind them needs, in order."""
        first = self.first_block(num_blocks, block_size)
        if not first or not self.num_sinks:
            return range(first, num_blocks)
        return (*range(self.num_sink_blocks(block_size)), *range(first, num_blocks))

    def num_blocks_for(self, num_tokens: int, num_new: int, block_size: int) -> int:
        """Return the most blocks that a sequence of ``num_tokens`` holds while steps write up to ``num_new`` of them.

        The tokens of a window seldom begin where a block does, so they lie in one block more than they fill. And one
        more is kept: the last that is published, where the sequence goes on from in the prefix tree.
        """
        num_blocks = num_blocks_for(num_tokens, block_size)
        if self.window is None:
            return num_blocks
        num_kept = num_blocks_for(self.window - 1 + num_new, block_size) + 2
        return min(num_blocks, self.num_sink_blocks(block_size) + num_kept)

    def _behind_sinks(self, first: int, block_size: int) -> int:
        """Return ``first``, where the window begins; 0 if the sinks' blocks reach up to it."""
        return first if first > self.num_sink_blocks(block_size) else 0


KEEP_ALL = KeepRule()
"""The rule of full attention."""
