"""Fetches: what is brought from slow tiers into the host arena, and for which requests. It decides only.

What a request would find in slow tiers is brought into the arena while the request waits in a state of its own; from
there a step loads it as anything else that the host holds. So slow tiers are never part of a step, and nobody else
waits. What is brought is pinned by who reads it in, and by every request that waits for it, until that was admitted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.kv.ops import FetchOp

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from pagefold.kv.arbiter import Arbiter
    from pagefold.kv.chunk_notes import ChunkNotes
    from pagefold.kv.held_block import HeldBlock
    from pagefold.kv.host_blocks import HostBlocks
    from pagefold.kv.missing import Missing
    from pagefold.kv.names import BlockName

__all__ = ["Fetch", "Fetches"]

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
        missing: what of the path is missing without them.
        is_over: nothing more will be waited for.
        is_late: it is over since it took too long.
        ops: what must be brought for it, by tier.
        num_later: so many blocks are expected to follow, for which room is kept (:attr:`Missing.num_more`).
    """

    __slots__ = (
        "begun_s",
        "blocks",
        "followers",
        "is_late",
        "is_over",
        "last_s",
        "missing",
        "num_arrived",
        "num_coming",
        "num_here",
        "num_later",
        "ops",
        "patience_s",
    )

    def __init__(self, now: float, patience_s: float, missing: Missing) -> None:
        self.blocks: list[HeldBlock] = []
        self.num_arrived = self.num_coming = self.num_here = 0
        self.followers: set[Fetch] = set()
        self.begun_s = self.last_s = now
        self.patience_s = patience_s
        self.missing = missing
        self.is_over = self.is_late = False
        self.ops: dict[str, list[FetchOp]] = {}
        self.num_later = missing.num_more

    @property
    def is_wanted(self) -> bool:
        """Whether anybody waits for what is brought for it. Any thread may ask."""
        return not self.is_over or any(not one.is_over for one in tuple(self.followers))


class Fetches:
    """All that is on its way from slow tiers, and who waits for it.

    Args:
        host: the arena's blocks.
        arbiter: whether loading pays.
        notes: what comes with blocks of packed chunks, where there are some.

    Attributes:
        num_fetched, num_lost: blocks since the start: brought, and not brought though they were asked for.
    """

    def __init__(self, host: HostBlocks, arbiter: Arbiter, notes: ChunkNotes | None = None) -> None:
        self._notes = notes
        self.num_fetched = self.num_lost = 0
        self._host = host
        self._arbiter = arbiter
        self._arriving: dict[int, _Arrival] = {}  # by host block
        self._by_digest: dict[bytes, _Arrival] = {}
        self._fetches: dict[int, Fetch] = {}

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is on its way."""
        return not self._arriving

    @property
    def max_waited(self) -> int:
        """How many host blocks may be on their way in, or held by requests that wait."""
        return max(1, self._host.num_blocks // _SHARE_ARRIVING)

    def begin(
        self, found: Sequence[tuple[str, BlockName]], patience_s: float, now: float, missing: Missing
    ) -> Fetch | None:
        """Let a request wait for blocks that slow tiers hold. None if there is no room for them now.

        Where there is room for a part, that is brought, if it is of use.

        Args:
            found: the blocks of a path in order, each with the tier that holds it.
            patience_s: how long it waits though nothing arrives.
            now: seconds.
            missing: what of the path is missing, whose first blocks these are.
        """
        if missing.is_whole_or_nothing and not self._has_room_for(found, missing.num_more):
            return None
        found = found[: self.max_waited]
        num_new = sum(name.digest not in self._by_digest for _, name in found) + missing.num_more
        num_kept = sum(fetch.num_later for fetch in self._fetches.values() if not fetch.is_over)
        if num_new > self.max_waited - len({*self._arriving, *self._waited_ids()}) - num_kept:
            return None
        fetch = Fetch(now, patience_s, missing)
        for near in reversed(missing.near):  # else it might make room for what is of no use without it
            self._host.touch(near)
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

    def arrived(self, host_id: int, now: float, *, is_good: bool, note: bytes = b"") -> bool:
        """A transfer has let go of a block: it is there, and right, or it could not be had.

        Args:
            host_id: where it was to come.
            now: seconds.
            is_good: whether it is there.
            note: what came with it.

        Returns whether it is what was asked for: a block of a packed chunk without the note of one is not.
        """
        arrival = self._arriving.pop(host_id)
        held = arrival.held
        del self._by_digest[held.name.digest]
        if is_good and self._notes is not None and self._notes.is_packed(held.name):
            held.chunk = self._notes.read(held.name, note)
            is_good = held.chunk is not None
        is_there = is_good and arrival.is_wanted
        if is_there:
            self.num_fetched += 1
            self._host.arrived(held)
        else:
            self.num_lost += 1
        for fetch in arrival.waiting:
            if not fetch.is_over:
                fetch.num_here += is_good
                fetch.last_s = now
                self._advance(fetch)
                fetch.is_over |= fetch.missing.is_whole_or_nothing and not is_there
        self._host.unpin([held])
        return is_good

    def reject(self, digests: Iterable[bytes]) -> None:
        """What has come under these names is of no use together: it is found no more."""
        for digest in digests:
            held = self._host.get(digest)
            if held is not None:
                self._host.forget(held)

    def late(self, now: float) -> None:
        """Give up the fetches that do not pay any more."""
        for fetch in self._fetches.values():
            if not fetch.is_over and not self._pays(fetch, now):
                fetch.is_over = fetch.is_late = True
                self._arbiter.num_late += 1

    def next_late_s(self) -> float:
        """Return when the next fetch will be given up unless something arrives; inf for never."""
        return min(
            (one.last_s + one.patience_s for one in self._fetches.values() if not one.is_over), default=float("inf")
        )

    def end(self, fetch: Fetch) -> None:
        """The request that waited was admitted, or is gone: nothing is kept for it any more."""
        del self._fetches[id(fetch)]
        fetch.is_over = True
        self._host.unpin(fetch.blocks)

    def let_go(self) -> bool:
        """Take back what is kept in the arena for requests that wait; whether there was anything. They compute it."""
        had_any = False
        for fetch in self._fetches.values():
            had_any = had_any or bool(fetch.blocks)
            fetch.is_over = True
            self._host.unpin(fetch.blocks)
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
        """What is on its way of these paths is of no use, nor is what it would have made whole."""
        for digest in digests & self._by_digest.keys():
            self._by_digest[digest].is_wanted = False
        for fetch in self._fetches.values():
            if fetch.missing.is_whole_or_nothing:
                fetch.is_over |= any(held.name.digest in digests for held in fetch.blocks)

    def forget(self, namespaces: Collection[bytes]) -> None:
        """What is on its way of these namespaces, by digest, is of no use."""
        for arrival in self._arriving.values():
            if arrival.held.name.namespace in namespaces:
                arrival.is_wanted = False

    def pins(self) -> Iterator[int]:
        """Yield the host block of every pin that transfers and waiting requests have."""
        yield from self._arriving
        yield from self._waited_ids()

    # Inside.

    def _waited_ids(self) -> Iterator[int]:
        for fetch in self._fetches.values():
            yield from (held.host_id for held in fetch.blocks)

    def _pays(self, fetch: Fetch, now: float) -> bool:
        if now >= fetch.last_s + fetch.patience_s:  # as in next_late_s(), to the last bit
            return False
        num_left = fetch.num_coming - fetch.num_here
        num_places = fetch.missing.at_stake(num_left)
        return self._arbiter.goes_on(fetch.num_here, num_left, fetch.last_s - fetch.begun_s, num_places)

    def _has_room_for(self, found: Sequence[tuple[str, BlockName]], num_later: int) -> bool:
        """Whether each of these blocks is here or on its way, or there is room for it; and for so many later."""
        digests = {name.digest for _, name in found}
        lacking = [digest for digest in digests if self._host.get(digest) is None]
        coming = [arrival for digest in lacking if (arrival := self._by_digest.get(digest)) is not None]
        is_coming = all(arrival.is_wanted for arrival in coming)
        num_more = len(lacking) - len(coming) + num_later
        return (
            len(found) + num_later <= self.max_waited and is_coming and self._host.has_room(num_more, besides=digests)
        )

    def _join(self, name: BlockName, fetch: Fetch) -> HeldBlock | None:
        """Pin a block that is here, or on its way for somebody else, and wait for it too."""
        held = self._host.get(name.digest)
        if held is not None:
            self._host.pin([held])
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
        held = self._host.reserve(name, origin=tier)
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
            if self._host.get(held.name.digest) is None:
                fetch.is_over = held.host_id not in self._arriving
                return
            fetch.num_arrived += 1
        fetch.is_over = True
