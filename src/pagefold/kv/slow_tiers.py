"""SlowTiers: what goes from the host arena to slower tiers, and what is brought from them for whom. It decides only.

What a request would find in slow tiers is brought into the arena while the request waits in a state of its own; from
there a step loads it as anything else that the host holds. So slow tiers are never part of a step, and nobody else
waits. What is brought is pinned by who reads it in, and by every request that waits for it, until that was admitted.

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

from pagefold.kv.arbiter import Arbiter
from pagefold.kv.plans import FetchOp, WriteOp
from pagefold.kv.tiers import NO_HOST

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pagefold.kv.block import Node
    from pagefold.kv.held_block import HeldBlock
    from pagefold.kv.names import BlockName
    from pagefold.kv.tiers import HostTier

__all__ = ["NO_SLOW_TIERS", "WRITE_POLICIES", "Fetch", "SlowTiers", "WritePolicy"]

WritePolicy = Literal["write_back", "write_through", "write_through_selective"]
WRITE_POLICIES: tuple[WritePolicy, ...] = get_args(WritePolicy)

_MIN_HITS = 1
"""``write_through_selective`` writes what was found so often."""

_SHARE_SPARE, _NUM_SPARE, _MAX_SPARE = 8, 64, 512
"""``write_back`` keeps one host block in so many spare (free, or written), but so many at least, as far as half of all
allow, and so many at most: a step that lets long prompts in takes as many at once. As many may be being written; what
a tier cannot keep up with is dropped."""

_SHARE_ARRIVING = 2
"""At most one host block in so many is on its way in, or held by a request that waits."""


class _Arrival:
    """A block on its way, and who waits for it."""

    __slots__ = ("held", "is_wanted", "waiting")

    def __init__(self, held: HeldBlock, fetch: Fetch) -> None:
        self.held = held
        self.waiting = [fetch]
        self.is_wanted = True  # nobody has asked to forget everything since


class Fetch:
    """Blocks that one request waits for, in order.

    Attributes:
        blocks: those that are on their way or here, pinned.
        num_arrived: the first so many are here.
        num_coming, num_here: so many had to come when it began, and so many of these are here.
        followers: others that wait for blocks that are brought for this one.
        begun_s, last_s: when it began, and when something last arrived.
        patience_s: how long it waits though nothing arrives.
        is_over: nothing more will be waited for.
        ops: what must be brought for it, by tier.
    """

    __slots__ = (
        "begun_s",
        "blocks",
        "followers",
        "is_over",
        "last_s",
        "num_arrived",
        "num_coming",
        "num_here",
        "ops",
        "patience_s",
    )

    def __init__(self, now: float, patience_s: float) -> None:
        self.blocks: list[HeldBlock] = []
        self.num_arrived = self.num_coming = self.num_here = 0
        self.followers: set[Fetch] = set()
        self.begun_s = self.last_s = now
        self.patience_s = patience_s
        self.is_over = False
        self.ops: dict[str, list[FetchOp]] = {}

    @property
    def is_wanted(self) -> bool:
        """Whether anybody waits for what is brought for it. Any thread may ask."""
        return not self.is_over or any(not one.is_over for one in tuple(self.followers))


class SlowTiers:
    """What moves between the host arena and slower tiers.

    Args:
        host: the arena's blocks.
        policy: when what the arena holds is written.
        arbiter: whether loading pays.

    Attributes:
        is_on: whether there are any.
        num_fetched, num_lost, num_written, num_unwritten: blocks since the start: brought, not brought though they were
            asked for, written, and not kept by any tier.
    """

    is_on = True

    def __init__(self, host: HostTier, policy: WritePolicy, arbiter: Arbiter) -> None:
        self.host = host
        self.policy = policy
        self.arbiter = arbiter
        self.num_fetched = self.num_lost = self.num_written = self.num_unwritten = 0
        self._arriving: dict[int, _Arrival] = {}  # by host block
        self._by_digest: dict[bytes, _Arrival] = {}
        self._fetches: dict[int, Fetch] = {}
        self._writing: dict[int, HeldBlock] = {}
        num_blocks = host.num_blocks
        spare = max(1, num_blocks // _SHARE_SPARE, min(_NUM_SPARE, num_blocks // 2))
        self._num_spare = min(_MAX_SPARE, spare)
        # Of the unsaved, those that the policy writes at once; and some that have left the arena since.
        self._early: deque[HeldBlock] = deque()

    @property
    def max_waited(self) -> int:
        """How many host blocks may be on their way in, or held by requests that wait."""
        return max(1, self.host.num_blocks // _SHARE_ARRIVING)

    @property
    def max_early(self) -> int:
        """How many blocks that are to be written at once are remembered, at most."""
        return 2 * self.host.num_blocks

    @property
    def num_early(self) -> int:
        """How many are remembered now."""
        return len(self._early)

    # From slow tiers.

    def begin(self, found: Sequence[tuple[str, BlockName]], patience_s: float, now: float) -> Fetch | None:
        """Let a request wait for blocks that slow tiers hold. None if there is no room for them now.

        Args:
            found: the blocks of a path in order, each with the tier that holds it.
            patience_s: how long it waits though nothing arrives.
            now: seconds.
        """
        found = found[: self.max_waited]
        num_more = sum(name.digest not in self._by_digest for _, name in found)
        if num_more > self.max_waited - len({*self._arriving, *self._waited_ids()}):
            return None
        fetch = Fetch(now, patience_s)
        for tier, name in found:
            held = self._join(name, fetch) or self._reserve(tier, name, fetch)
            if held is None:
                break
            fetch.blocks.append(held)
        if not fetch.blocks:
            return None
        self._fetches[id(fetch)] = fetch
        self._advance(fetch)
        return fetch

    def arrived(self, host_id: int, now: float, *, is_good: bool) -> None:
        """A transfer has let go of a block: it is there, and right, or it could not be had."""
        arrival = self._arriving.pop(host_id)
        held = arrival.held
        del self._by_digest[held.name.digest]
        if is_good and arrival.is_wanted:
            self.num_fetched += 1
            self.host.arrived(held)
        else:
            self.num_lost += 1
        for fetch in arrival.waiting:
            if not fetch.is_over:
                fetch.num_here += is_good
                fetch.last_s = now
                self._advance(fetch)
        self.host.unpin([held])

    def late(self, now: float) -> None:
        """Give up the fetches that do not pay any more."""
        for fetch in self._fetches.values():
            if not fetch.is_over and not self._pays(fetch, now):
                fetch.is_over = True
                self.arbiter.num_late += 1

    def next_late_s(self) -> float:
        """Return when the next fetch will be given up unless something arrives; inf for never."""
        return min(
            (one.last_s + one.patience_s for one in self._fetches.values() if not one.is_over), default=float("inf")
        )

    def end(self, fetch: Fetch) -> None:
        """The request that waited was admitted, or is gone: nothing is kept for it any more."""
        del self._fetches[id(fetch)]
        fetch.is_over = True
        self.host.unpin(fetch.blocks)

    @property
    def num_spare(self) -> int:
        """How many host blocks could be given out without losing what no slower tier was given."""
        return self.host.num_spare - len(self._writing)

    def let_go(self) -> bool:
        """Take back what is kept in the arena for requests that wait; whether there was anything. They compute it."""
        had_any = False
        for fetch in self._fetches.values():
            had_any = had_any or bool(fetch.blocks)
            fetch.is_over = True
            self.host.unpin(fetch.blocks)
            fetch.blocks = []
        return had_any

    def give_up(self) -> None:
        """Let nobody wait any more."""
        for fetch in self._fetches.values():
            fetch.is_over = True

    def reset(self) -> None:
        """Forget all: what arrives from now on is of no use, and nobody waits for it. Nor is anything kept for them."""
        self.let_go()
        for arrival in self._arriving.values():
            arrival.waiting.clear()
            arrival.is_wanted = False

    def distrust(self, digests: set[bytes]) -> None:
        """What is on its way of these paths is of no use."""
        for digest in digests & self._by_digest.keys():
            self._by_digest[digest].is_wanted = False

    # To slow tiers.

    def wants(self, node: Node) -> bool:
        """Whether a node's block is to be written as soon as nobody uses it."""
        return self._is_early(node.num_hits)

    def take_writes(self, *, is_flush: bool = False) -> list[WriteOp]:
        """Return what is to be written now, pinned until :meth:`written`.

        Args:
            is_flush: all that is unsaved, whatever the policy.
        """
        host = self.host
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
            self.host.unpin_written(self._writing.pop(op.host_id))

    # For audits.

    def pins(self) -> Iterator[int]:
        """Yield the host block of every pin that transfers and waiting requests have."""
        yield from self._arriving
        yield from self._writing
        yield from self._waited_ids()

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is on its way, in or out."""
        return not self._arriving and not self._writing

    # Inside.

    def _waited_ids(self) -> Iterator[int]:
        for fetch in self._fetches.values():
            yield from (held.host_id for held in fetch.blocks)

    def _pays(self, fetch: Fetch, now: float) -> bool:
        if now >= fetch.last_s + fetch.patience_s:  # as in next_late_s(), to the last bit
            return False
        return self.arbiter.goes_on(fetch.num_here, fetch.num_coming, fetch.last_s - fetch.begun_s)

    def _is_early(self, num_hits: int) -> bool:
        """Whether the policy writes at once what was found so often."""
        is_proved = self.policy == "write_through_selective" and num_hits >= _MIN_HITS
        return self.policy == "write_through" or is_proved

    def _bound_early(self) -> None:
        """Forget who has left the arena, when there may be as many as the arena has blocks.

        Nobody is forgotten who could still be written. So of a tier that hangs no more is kept than two of each host
        block, and what this costs is shared by as many blocks.
        """
        if len(self._early) >= self.max_early:
            self._early = deque(held for held in self._early if self._is_unsaved(held))

    def _is_unsaved(self, held: HeldBlock) -> bool:
        return self.host.unsaved.get(held.name.digest) is held

    def _write(self, held: HeldBlock, ops: list[WriteOp]) -> None:
        host = self.host
        if self._is_unsaved(held):  # and has not left meanwhile
            del host.unsaved[held.name.digest]
            host.pin_to_write(held)
            self._writing[held.host_id] = held
            ops.append(WriteOp(held.host_id, held.name))

    def _join(self, name: BlockName, fetch: Fetch) -> HeldBlock | None:
        """Pin a block that is here, or on its way for somebody else, and wait for it too."""
        held = self.host.get(name.digest)
        if held is not None:
            self.host.pin([held])
            return held
        arrival = self._by_digest.get(name.digest)
        if arrival is None or not arrival.is_wanted:
            return None
        arrival.held.num_pins += 1
        arrival.waiting.append(fetch)
        arrival.waiting[0].followers.add(fetch)
        fetch.num_coming += 1
        return arrival.held

    def _reserve(self, tier: str, name: BlockName, fetch: Fetch) -> HeldBlock | None:
        if name.digest in self._by_digest:
            return None  # on its way since before a reset
        held = self.host.reserve(name, tier)
        if held is None:
            return None
        held.num_pins += 1  # one is the transfer's, one the request's
        self._arriving[held.host_id] = self._by_digest[name.digest] = _Arrival(held, fetch)
        fetch.num_coming += 1
        fetch.ops.setdefault(tier, []).append(FetchOp(held.host_id, name))
        return held

    def _advance(self, fetch: Fetch) -> None:
        """Count what has arrived in a row; over, if that is all or the next one will not come."""
        blocks = fetch.blocks
        while fetch.num_arrived < len(blocks):
            held = blocks[fetch.num_arrived]
            if self.host.get(held.name.digest) is None:
                fetch.is_over = held.host_id not in self._arriving
                return
            fetch.num_arrived += 1
        fetch.is_over = True


class _NoSlowTiers(SlowTiers):
    """No slow tiers: nothing moves, and nobody waits."""

    is_on = False


NO_SLOW_TIERS: SlowTiers = _NoSlowTiers(NO_HOST, "write_back", Arbiter(1, 1, compute_s_per_token=0.0))
"""No slow tiers; it never changes, so all cores without some share it."""
