"""What the two sides of the connector tell each other: vLLM's scheduler and its workers are processes of their own.

The scheduler's side knows which block of a path lies in which host block; the worker's side has the host's memory and
vLLM's tensors, and knows host blocks and block ids alone. Once a step the one sends :class:`StepOrders`, and the other
answers with a :class:`StepReport`. Both are plain values, and travel pickled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pagefold.kv import BlockName
    from pagefold.kv.ops import FetchOp, LoadOp, StoreOp, WriteOp
    from pagefold.kv.transfers import Outcome

__all__ = ["FetchOrder", "Link", "LookOrder", "StepOrders", "StepReport", "WorkerFacts"]


class LookOrder(NamedTuple):
    """Ask a tier how much of a path it has.

    Attributes:
        ticket: of the question, which the answer repeats.
        tier: who is asked.
        names: of the path's blocks, in order.
    """

    ticket: int
    tier: str
    names: Sequence[BlockName]


class FetchOrder(NamedTuple):
    """Bring blocks of one path from a tier into host blocks.

    Attributes:
        ticket: of the order.
        tier: where they are.
        ops: which go where, in order of the path.
    """

    ticket: int
    tier: str
    ops: Sequence[FetchOp]


class StepOrders(NamedTuple):
    """What the worker does about one step of vLLM.

    Loads come before the step computes, stores after it. What is brought from slow tiers is begun before it, what they
    are given after it; both go on beside the steps.

    Attributes:
        step: its number.
        loads: host blocks that are copied into vLLM's blocks.
        stores: vLLM's blocks that are copied into host blocks.
        looks, fetches: what slow tiers are asked.
        dropped: tickets of fetches that nobody waits for any more.
        writes: host blocks that slow tiers are given.
        clears: whether slow tiers forget everything first.
        acknowledged: the last step with a failed load that the scheduler knows of; -1 for none. What a worker computed
            behind one that is not known yet is not stored: it may have been computed from a damaged block.
        num_tokens, num_requests: what the step computes.
    """

    step: int
    loads: Sequence[LoadOp] = ()
    stores: Sequence[StoreOp] = ()
    looks: Sequence[LookOrder] = ()
    fetches: Sequence[FetchOrder] = ()
    dropped: Sequence[int] = ()
    writes: Sequence[WriteOp] = ()
    clears: bool = False
    acknowledged: int = -1
    num_tokens: int = 0
    num_requests: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do, and so nothing to report."""
        lists = (self.loads, self.stores, self.looks, self.fetches, self.dropped, self.writes)
        return not self.clears and not any(lists)


class StepReport(NamedTuple):
    """What has become of a step's orders, and of what was begun before.

    Attributes:
        step: whose orders; -1 where there were none, and only outcomes are told.
        damaged: host blocks whose bytes were not those that were stored; their loads failed.
        stored: whether all stores were made. If not, none counts.
        outcomes: what came of slow tiers.
        num_tokens, num_requests, seconds: what the step computed, and how long that took; 0 s where nobody knows.
        num_bytes: copied, by direction: "load" and "store".
        busy_s: how long that took, by direction.
        num_differing: bytes that were read back, and are not what was to be restored.
    """

    step: int
    damaged: frozenset[int] = frozenset()
    stored: bool = True
    outcomes: Sequence[Outcome] = ()
    num_tokens: int = 0
    num_requests: int = 0
    seconds: float = 0.0
    num_bytes: Mapping[str, int] = {}
    busy_s: Mapping[str, float] = {}
    num_differing: int = 0

    @property
    def failed(self) -> bool:
        """Whether the step computed with a block that was damaged."""
        return bool(self.damaged)

    def with_other(self, other: StepReport) -> StepReport:
        """Return what two workers of one step report together: each has a part of every block."""
        keys = set(self.num_bytes) | set(other.num_bytes)
        return StepReport(
            max(self.step, other.step),
            self.damaged | other.damaged,
            self.stored and other.stored,
            [*self.outcomes, *other.outcomes],
            max(self.num_tokens, other.num_tokens),
            max(self.num_requests, other.num_requests),
            max(self.seconds, other.seconds),
            {key: self.num_bytes.get(key, 0) + other.num_bytes.get(key, 0) for key in sorted(keys)},
            {key: max(self.busy_s.get(key, 0.0), other.busy_s.get(key, 0.0)) for key in sorted(keys)},
            self.num_differing + other.num_differing,
        )


class Link(NamedTuple):
    """How fast a tier was when it was tried at the start.

    Attributes:
        tier: its name.
        latency_s: of a question.
        bytes_per_s: read.
    """

    tier: str
    latency_s: float
    bytes_per_s: float


class WorkerFacts(NamedTuple):
    """What a worker tells before the first step.

    Attributes:
        num_host_blocks: blocks that its memory of the host holds.
        block_bytes: of one, all its layers.
        layout: names how a block's bytes are to be read.
        links: the slow tiers, faster ones first.
        on_disk: digests of what the disk holds of this layout, used longest ago first.
        most_on_disk: how many blocks the disk may hold.
    """

    num_host_blocks: int
    block_bytes: int
    layout: bytes
    links: Sequence[Link] = ()
    on_disk: Sequence[bytes] = ()
    most_on_disk: int = 0
