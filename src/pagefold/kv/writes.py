"""Writes: what goes from the host arena to slower tiers, and when. It decides only.

Writing is behind: what the arena holds and slow tiers do not is *unsaved*. When it is written, the policy says:

    write_back               just before the arena would need its place
    write_through            as soon as a request that computed it has ended
    write_through_selective  the same for what was found at least once; the rest as in write_back

Names are SGLang's (HiCache).
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import TYPE_CHECKING, Literal, get_args

from pagefold.kv.ops import WriteOp

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pagefold.kv.block import Node
    from pagefold.kv.held_block import HeldBlock
    from pagefold.kv.host_blocks import HostBlocks

__all__ = ["WRITE_POLICIES", "WritePolicy", "Writes"]

WritePolicy = Literal["write_back", "write_through", "write_through_selective"]
WRITE_POLICIES: tuple[WritePolicy, ...] = get_args(WritePolicy)

_MIN_HITS = 1
"""``write_through_selective`` writes what was found so often."""

_SHARE_SPARE, _NUM_SPARE, _MAX_SPARE = 8, 64, 512
"""``write_back`` keeps one host block in so many spare (free, or written), but so many at least, as far as half of all
allow, and so many at most: a step that lets long prompts in takes as many at once. As many may be being written; what
a tier cannot keep up with is dropped."""


class Writes:
    """What is to be written, and what is being written.

    Args:
        host: the arena's blocks.
        policy: when what the arena holds is written.

    Attributes:
        num_written, num_unwritten: blocks since the start: written, and not kept by any tier.
    """

    def __init__(self, host: HostBlocks, policy: WritePolicy) -> None:
        self.num_written = self.num_unwritten = 0
        self._host = host
        self._policy = policy
        self._writing: dict[int, HeldBlock] = {}
        num_blocks = host.num_blocks
        spare = max(1, num_blocks // _SHARE_SPARE, min(_NUM_SPARE, num_blocks // 2))
        self._num_spare = min(_MAX_SPARE, spare)
        # Of the unsaved, those that the policy writes at once; and some that have left the arena since.
        self._early: deque[HeldBlock] = deque()

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is being written."""
        return not self._writing

    @property
    def num_spare(self) -> int:
        """How many host blocks could be given out without losing what no slower tier was given."""
        return self._host.num_spare - len(self._writing)

    @property
    def max_early(self) -> int:
        """How many blocks that are to be written at once are remembered, at most."""
        return 2 * self._host.num_blocks

    @property
    def num_early(self) -> int:
        """How many are remembered now."""
        return len(self._early)

    def wants(self, node: Node) -> bool:
        """Whether a node's block is to be written as soon as nobody uses it."""
        return self._is_early(node.num_hits)

    def take(self, *, is_flush: bool = False) -> list[WriteOp]:
        """Return what is to be written now, pinned until :meth:`written`.

        Args:
            is_flush: all that is unsaved, whatever the policy.
        """
        host = self._host
        while host.fresh:
            held = host.fresh.popleft()
            if self._is_early(held.num_hits):
                self._early.append(held)
                self._bound_early()
        room = self._num_spare - len(self._writing)
        ops: list[WriteOp] = []
        while self._early and len(ops) < room:
            self._write(self._early.popleft(), ops)
        num_short = len(host.unsaved) if is_flush else self._num_spare - host.num_ready(self._num_spare)
        if num_short > 0:
            for held in list(islice(host.unsaved.values(), max(0, min(num_short, room - len(ops))))):
                self._write(held, ops)
        return ops

    def written(self, ops: Sequence[WriteOp], num_kept: int) -> None:
        """The slow tiers have let go of the blocks; they keep ``num_kept`` of them."""
        self.num_written += num_kept
        self.num_unwritten += len(ops) - num_kept
        for op in ops:
            self._host.unpin_written(self._writing.pop(op.host_id))

    def pins(self) -> Iterator[int]:
        """Yield the host block of every pin that transfers have."""
        yield from self._writing

    # Inside.

    def _is_early(self, num_hits: int) -> bool:
        """Whether the policy writes at once what was found so often."""
        is_proved = self._policy == "write_through_selective" and num_hits >= _MIN_HITS
        return self._policy == "write_through" or is_proved

    def _bound_early(self) -> None:
        """Forget who has left the arena, when there may be as many as the arena has blocks.

        Nobody is forgotten who could still be written. So of a tier that hangs no more is kept than two of each host
        block, and what this costs is shared by as many blocks.
        """
        if len(self._early) >= self.max_early:
            self._early = deque(held for held in self._early if self._is_unsaved(held))

    def _is_unsaved(self, held: HeldBlock) -> bool:
        return self._host.unsaved.get(held.name.digest) is held

    def _write(self, held: HeldBlock, ops: list[WriteOp]) -> None:
        host = self._host
        if self._is_unsaved(held):  # and has not left meanwhile
            host.pin_to_write(held)
            self._writing[held.host_id] = held
            note = b"" if held.chunk is None else held.chunk.note
            ops.append(WriteOp(held.host_id, held.name, note))
