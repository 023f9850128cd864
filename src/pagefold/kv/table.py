"""BlockTable: which blocks of one cache group hold a sequence's tokens, and where in them a position lies."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pagefold.kv.block import BlockId

__all__ = ["BlockTable", "num_blocks_for", "slot_of"]


class BlockTable:
    """The blocks of one cache group that a sequence holds, in order of position.

    Attributes:
        block_ids: position ``p`` lies in block ``block_ids[p // block_size - num_trimmed]``, at ``p % block_size``. Ids
            from the number of the device's blocks on are blocks of the host's arena, of a sequence that streams.
        num_trimmed: how many blocks lie before these: given back, since the group keeps what was in them no more, or
            among ``sink_ids``.
        sink_ids: the first blocks of the sequence, which hold the group's sinks. Empty until blocks behind them are
            given back: as long as ``num_trimmed`` is 0 they are the first of ``block_ids``.
    """

    __slots__ = ("block_ids", "num_trimmed", "sink_ids")

    def __init__(
        self, block_ids: Iterable[BlockId] = (), num_trimmed: int = 0, sink_ids: Iterable[BlockId] = ()
    ) -> None:
        self.block_ids = list(block_ids)
        self.num_trimmed = num_trimmed
        self.sink_ids = list(sink_ids)

    @property
    def end(self) -> int:
        """How many blocks the sequence has had in it: those that it holds, and those given back before them."""
        return self.num_trimmed + len(self.block_ids)

    @property
    def num_held(self) -> int:
        """How many blocks it holds."""
        return len(self.sink_ids) + len(self.block_ids)

    def all_ids(self) -> Iterator[BlockId]:
        """Yield all blocks that it holds, in order of position."""
        yield from self.sink_ids
        yield from self.block_ids

    def first_ids(self, num_blocks: int) -> list[BlockId]:
        """Return the first so many blocks of the sequence; no more of them than its sinks lie in."""
        return (self.sink_ids or self.block_ids)[:num_blocks]

    def at(self, place: int) -> BlockId | None:
        """Return which block is at one place of the sequence, counted in blocks; None if that was given back."""
        if place >= self.num_trimmed:
            return self.block_ids[place - self.num_trimmed]
        return self.sink_ids[place] if place < len(self.sink_ids) else None

    def put(self, place: int, block_id: BlockId) -> None:
        """Let it hold another block at a place where it holds one."""
        if place >= self.num_trimmed:
            self.block_ids[place - self.num_trimmed] = block_id
        else:
            self.sink_ids[place] = block_id

    def hold(self, block_ids: list[BlockId], num_trimmed: int, num_sink_blocks: int) -> None:
        """Hold just these.

        Args:
            block_ids: in order of position; where any were given back, those of sinks first.
            num_trimmed: as the attribute.
            num_sink_blocks: how many blocks the sinks lie in.
        """
        num_apart = num_sink_blocks if num_trimmed else 0
        self.sink_ids, self.block_ids = block_ids[:num_apart], block_ids[num_apart:]
        self.num_trimmed = num_trimmed

    def cut_front(self, num_trimmed: int, num_sink_blocks: int) -> list[BlockId]:
        """Hold nothing before place ``num_trimmed`` but the sinks' blocks. Return what is to be given back.

        Args:
            num_trimmed: more than before, and behind the sinks' blocks.
            num_sink_blocks: how many blocks the sinks lie in.
        """
        num_apart = 0 if self.num_trimmed else num_sink_blocks
        num_old = num_trimmed - self.num_trimmed
        if num_apart:
            self.sink_ids = self.block_ids[:num_apart]
        gone = self.block_ids[num_apart:num_old]
        del self.block_ids[:num_old]
        self.num_trimmed = num_trimmed
        return gone

    def clear(self) -> None:
        """Hold nothing."""
        self.block_ids.clear()
        self.sink_ids.clear()


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks ``num_tokens`` need: a ceiling division."""
    return -(-num_tokens // block_size)


def slot_of(block_ids: list[BlockId], position: int, block_size: int) -> int:
    """Return the slot of ``position`` in the slab: ``block_id * block_size + offset``."""
    return block_ids[position // block_size] * block_size + position % block_size
