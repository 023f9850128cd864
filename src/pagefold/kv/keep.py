"""KeepRule: which tokens of a sequence a cache group keeps, and so which of its blocks are given back while it runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagefold.kv.table import num_blocks_for

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["KEEP_ALL", "NO_MASK", "KeepRule", "blocks_per_place"]

NO_MASK = -1
"""The mask of a sequence that keeps all, where others have chunks packed. Others are numbered from 0 on."""


@dataclass(frozen=True, slots=True)
class KeepRule:
    """What the layers of a group see of a sequence, as transformers defines its attention masks.

    Attributes:
        window: how many tokens a token sees at most, itself included; None for all that are before it.
        is_chunked: it sees the tokens since the last multiple of ``window`` instead: its own chunk.
        num_sinks: how many of the first tokens it sees beside its window, which slides then.
        num_before: how many chunks before its own it sees whole, where it sees chunks.
        packs: of older chunks it sees what was kept of them, which is packed into blocks of its own (``packing.py``).
    """

    window: int | None = None
    is_chunked: bool = False
    num_sinks: int = 0
    num_before: int = 0
    packs: bool = False

    def __post_init__(self) -> None:
        assert not self.num_sinks or (self.window is not None and not self.is_chunked), "sinks beside a sliding window"
        assert self.is_chunked or not (self.num_before or self.packs), "chunks beside a window that slides"

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
            return max(0, position - position % self.window - self.num_before * self.window)
        return max(0, position + 1 - self.window)

    def num_sink_blocks(self, block_size: int) -> int:
        """Return how many of a sequence's first blocks hold its sinks."""
        return num_blocks_for(self.num_sinks, block_size)

    def num_packed(self, position: int) -> int:
        """Return how many chunks are packed when all tokens before ``position`` have been computed.

        Those of which no token behind them sees all.
        """
        if not self.packs:
            return 0
        assert self.window is not None, "chunks have a size"
        return self.first_seen(position) // self.window

    def reach(self, num_packed: int) -> int:
        """Return the last position up to which so many packed chunks are enough."""
        assert self.window is not None, "chunks have a size"
        return (num_packed + self.num_before + 1) * self.window - 1

    def chunk_blocks(self, block_size: int) -> int:
        """Return how many blocks a chunk fills; packed, it fills no more."""
        assert self.window is not None, "chunks have a size"
        assert self.window % block_size == 0, "a chunk is whole blocks"
        return self.window // block_size

    def chunk_places(self, chunk: int, block_size: int) -> range:
        """Return which blocks of a sequence are those of a chunk; the last one is where the chunk lies when packed."""
        num_blocks = self.chunk_blocks(block_size)
        return range(chunk * num_blocks, (chunk + 1) * num_blocks)

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

    def num_blocks_for(
        self, num_tokens: int, num_new: int, block_size: int, kept_share: float = 1.0, num_packed: int = 0
    ) -> int:
        """Return the most blocks that a sequence of ``num_tokens`` holds while steps write up to ``num_new`` of them.

        The tokens of a window seldom begin where a block does, so they lie in one block more than they fill. And one
        more is kept: the last that is published, where the sequence goes on from in the prefix tree.

        Args:
            num_tokens: of the sequence.
            num_new: the most that one step computes of it.
            block_size: tokens a block.
            kept_share: of the blocks that are granted for chunks, how many these fill when they are packed: all of them
                at most. For less than all, one chunk as it is granted comes on top; a step that packs several is
                granted as many.
            num_packed: how many of its chunks are packed already: what these fill is not counted.
        """
        num_blocks = num_blocks_for(num_tokens, block_size)
        if self.window is None:
            return num_blocks
        num_kept = num_blocks_for((self.num_before + 1) * self.window - 1 + num_new, block_size) + 2
        num_whole = min(num_blocks, self.num_sink_blocks(block_size) + num_kept)
        if not self.packs:
            return num_whole
        of_chunk = self.chunk_blocks(block_size)
        num_granted = max(0, self.num_packed(num_tokens) - num_packed) * of_chunk
        return num_whole + min(num_granted, math.ceil(kept_share * num_granted) + of_chunk)

    def _behind_sinks(self, first: int, block_size: int) -> int:
        """Return ``first``, where the window begins; 0 if the sinks' blocks reach up to it."""
        return first if first > self.num_sink_blocks(block_size) else 0


KEEP_ALL = KeepRule()
"""The rule of full attention."""


def blocks_per_place(rules: Iterable[KeepRule]) -> int:
    """Return how many blocks a place of a path takes: one of each cache group that keeps all, by the groups' rules."""
    return max(1, sum(not rule.trims for rule in rules))
