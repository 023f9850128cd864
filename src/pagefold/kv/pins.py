"""Pins: prefixes that stay cached though no table holds them, until they expire or somebody needs their memory.

A pin keeps the blocks of one path of the tree, from the first block to its tail; of a group that leaves tokens behind,
those that whoever goes on behind the tail needs. They are CACHED as ever, but not evictable. It is a wish and no
claim: before a request is preempted or made to wait for memory, pins are given up, those of least priority first, and
their blocks are evictable again. So a pin never blocks a request for ever.

A *hint* is a pin that a tenant's client has wished for, and nobody was promised. It is worth less than any other pin.
Where all are not allowed at once, the oldest hints of the same tenant yield to a new one, and anybody's to a pin that
is none.

Pure: time is passed in, in seconds of any clock that does not go back.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass
from math import exp2, inf
from typing import TYPE_CHECKING, NamedTuple

from pagefold.events import Emit, PinCause, PinDropped
from pagefold.kv.block import BlockState

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from pagefold.kv.block import Block, Node
    from pagefold.kv.keep_rules import KeepRules
    from pagefold.kv.pool import BlockPool

__all__ = ["DroppedPin", "HintedBy", "Pin", "PinLimits", "PinTable", "hint_id"]

_NUM_DROPPED_KEPT = 100

_MOST_HINTS = 256
"""Of one tenant."""


class HintedBy(NamedTuple):
    """Who has wished for a pin.

    Attributes:
        tenant: the tenant's name.
        owner: for whose session its blocks are used, as in ``kv/expectations.py``; None for no session's.
    """

    tenant: str
    owner: object | None = None


def hint_id(request_id: str, num_tokens: int) -> str:
    """Return the id of the hint that a request brings for its first so many tokens."""
    return f"{request_id}@{num_tokens}"


@dataclass(frozen=True, slots=True)
class PinLimits:
    """What pins may do.

    Attributes:
        max_share: of all blocks, how many pins may keep together, 0 to 1; a block that several keep counts once.
        half_life_s: seconds in which a pin's priority halves.
    """

    max_share: float = 0.5
    half_life_s: float = 3600.0


@dataclass(frozen=True, slots=True)
class Pin:
    """One pinned prefix.

    Attributes:
        pin_id: the caller's name for it.
        tail: the last node of its path.
        blocks: that it keeps, the last first: of a group that keeps the last tokens only those of the path's end.
        priority: when it was pinned; the larger, the longer it is kept.
        pinned_at_s: when that was.
        expires_at_s: when it ends by itself; infinite for never.
        by: who has wished for it, if it is a hint.
    """

    pin_id: str
    tail: Node
    blocks: tuple[Block, ...]
    priority: float
    pinned_at_s: float
    expires_at_s: float
    by: HintedBy | None = None

    @property
    def num_blocks(self) -> int:
        """How many blocks it keeps, alone or with others."""
        return len(self.blocks)

    @property
    def namespace(self) -> bytes:
        """The key of the namespace that it lies in."""
        node = self.tail
        while node.parent is not None:
            node = node.parent
        return node.key

    def path(self) -> Iterator[Node]:
        """Yield the nodes of its path, the last first: of those too far back for a window it keeps some blocks only."""
        node = self.tail
        while node.parent is not None:
            yield node
            node = node.parent


class DroppedPin(NamedTuple):
    """A pin that is no more, or that never came to be.

    Attributes:
        pin_id, num_blocks: of the pin.
        cause: why.
    """

    pin_id: str
    num_blocks: int
    cause: PinCause


class PinTable:
    """All pins of a core. No two have the same tail: to pin a prefix again renews its pin.

    A pin's priority halves every ``half_life_s``: at time t it is ``priority * 2 ** -((t - pinned_at) / half_life)``.

    Args:
        pool: of the blocks.
        rules: what each cache group keeps.
        limits: what pins may do.
        update_evictable: told of every node that may have become evictable, or ceased to be.
        emit: where events go.

    Attributes:
        max_blocks: how many blocks pins may keep together.
        num_blocks: how many they keep, each counted once.
        num_by_mask: the same by the mask that older tokens are kept by; see ``Node.mask``.
        dropped: the last pins that went, but for hints.
        next_expiry_s: when the first pin expires; infinite if none does.
    """

    def __init__(
        self,
        pool: BlockPool,
        rules: KeepRules,
        limits: PinLimits,
        *,
        update_evictable: Callable[[Node], None],
        emit: Emit,
    ) -> None:
        self._pool = pool
        self._rules = rules
        self._trims = bool(rules.trimmed)
        self._half_life_s = limits.half_life_s
        self._update_evictable = update_evictable
        self._emit = emit
        self._pins: dict[str, Pin] = {}
        self._by_tail: dict[Node, Pin] = {}
        self.max_blocks = int(pool.num_blocks * limits.max_share)
        self.num_blocks = 0
        self.num_by_mask: Counter[int] = Counter()
        self.dropped: deque[DroppedPin] = deque(maxlen=_NUM_DROPPED_KEPT)
        self.next_expiry_s = inf

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Iterator[Pin]:
        return iter(self._pins.values())

    def get(self, pin_id: str) -> Pin | None:
        """Return the pin of that id, if it is still there."""
        return self._pins.get(pin_id)

    def priority_at(self, pin: Pin, now_s: float) -> float:
        """Return what is left of a pin's priority."""
        return pin.priority * exp2((pin.pinned_at_s - now_s) / self._half_life_s)

    def num_new_blocks(self, nodes: Sequence[Node], num_blocks: int, mask: int = 0) -> int:
        """Return how many blocks a pin would keep that no pin keeps yet.

        Args:
            nodes: the first nodes of its path, as far as they are there.
            num_blocks: how many the path will have.
            mask: by which mask it keeps older tokens, where those are packed; ``NO_MASK`` for all of them.
        """
        num_new, rules = 0, self._rules.of(mask)
        for group, rule in enumerate(rules):
            places = rule.places(num_blocks, rules.block_size)
            blocks = (nodes[at].blocks[group] for at in places if at < len(nodes))
            num_new += len(places) - sum(1 for block in blocks if block is not None and block.num_pin_refs)
        packing = rules.packing
        if packing is not None:  # all may be kept of what is not packed yet
            packed = rules.packed_of(list(nodes))
            num_chunks = packing.num_packed(num_blocks * self._rules.block_size)
            num_new += max(0, num_chunks - len(packed)) * packing.chunk_blocks(self._rules.block_size)
            num_new += sum(not block.num_pin_refs for chunk in packed for block in chunk.blocks)
        return num_new

    def add(
        self,
        pin_id: str,
        tail: Node | None,
        now_s: float,
        *,
        ttl_s: float | None = None,
        priority: float = 0.0,
    ) -> Pin | None:
        """Pin the path that ends in ``tail``, as far as it is committed; an earlier pin of just that path is renewed.

        Hints yield to it, whosever they are.

        None, and nothing has changed but ``dropped``, if the quota does not allow it (cause ``quota``), or if nothing
        is published there (cause ``reset``: that is what a reset leaves of a table).
        """
        assert pin_id not in self._pins, f"pin id {pin_id!r} is in use"
        self.expire(now_s)
        tail = _committed(tail)
        if tail is None:
            self._tell(DroppedPin(pin_id, 0, "reset"))
            return None
        expires_at_s = inf if ttl_s is None else now_s + ttl_s
        pin = Pin(pin_id, tail, tuple(self._blocks_of(tail)), priority, now_s, expires_at_s)
        yielding = self._yielding(pin, [other for other in self if other.by is not None])
        if yielding is None:
            self._tell(DroppedPin(pin_id, pin.num_blocks, "quota"))
            return None
        self._put(pin, yielding)
        return pin

    def hint(self, pin_id: str, tail: Node | None, now_s: float, *, ttl_s: float, by: HintedBy) -> Pin | None:
        """Pin the path that ends in ``tail`` if it is all there and the quota allows it; oldest hints of ``by`` yield.

        A hint of the same tenant for just that path is renewed, and lives no shorter than before. Where a pin that is
        no hint, or another tenant's, keeps just that path, that one stays. None, and nothing has changed, if there is
        no such pin then; the event says so, ``dropped`` does not.
        """
        assert pin_id not in self._pins, f"pin id {pin_id!r} is in use"
        self.expire(now_s)
        if tail is None or _committed(tail) is not tail or not self._is_whole(tail):
            self._emit(PinDropped(pin_id, 0, "reset"))
            return None
        expires_at_s = now_s + ttl_s
        before = self._by_tail.get(tail)
        if before is not None:
            if before.by is None or before.by.tenant != by.tenant:
                self._emit(PinDropped(pin_id, 0, "renewed"))
                return None
            expires_at_s = max(expires_at_s, before.expires_at_s)
        pin = Pin(pin_id, tail, tuple(self._blocks_of(tail)), 0.0, now_s, expires_at_s, by)
        own = [other for other in self if other.by is not None and other.by.tenant == by.tenant]
        yielding = self._yielding(pin, own)
        if yielding is None:
            self._emit(PinDropped(pin_id, 0, "quota"))
            return None
        if before is None and not yielding and len(own) >= _MOST_HINTS:
            yielding = own[:1]
        self._put(pin, yielding)
        return pin

    def num_hinted(self, apart_from: Iterable[Node] = ()) -> int:
        """Return how many blocks hints alone keep, but for those of some nodes."""
        refs: Counter[Block] = Counter()
        for pin in self:
            if pin.by is not None:
                refs.update(pin.blocks)
        for node in apart_from:
            for block in node.all_blocks:
                refs.pop(block, None) if block is not None else None
        return sum(num_refs == block.num_pin_refs for block, num_refs in refs.items())

    def remove(self, pin_id: str) -> Pin | None:
        """Unpin; the blocks stay cached. None if there is no such pin (any more)."""
        pin = self._pins.get(pin_id)
        if pin is not None:
            self._drop(pin, "removed")
        return pin

    def remove_at(self, nodes: Iterable[Node], owner: object) -> None:
        """Give up the hints of ``owner`` that end at one of these nodes."""
        found = [self._by_tail[node] for node in nodes if node in self._by_tail]
        for pin in found:
            if pin.by is not None and pin.by.owner is owner:
                self._drop(pin, "superseded")

    def expire(self, now_s: float) -> None:
        """Drop the pins whose time has come."""
        if now_s < self.next_expiry_s:
            return
        for pin in [pin for pin in self if pin.expires_at_s <= now_s]:
            self._drop(pin, "expired")

    def give_up(
        self, now_s: float, spared: Collection[Block] = (), is_of_use: Callable[[Block], bool] | None = None
    ) -> bool:
        """Give up the pin of least priority among those that alone keep a block from being evicted; hints first.

        Where several keep each such block, as may be of a group that keeps the last tokens only, the first of those.

        ``spared`` are blocks that the caller is about to use: to let go of them alone gains it nothing. ``is_of_use``
        says whether a block helps it that a pin keeps; None for each does. False when no block outside of ``spared``
        is kept by pins alone.
        """
        best: Pin | None = None
        least = (True, True, inf, inf)
        for pin in self:
            kept = self._kept(pin, spared)
            if not kept or (is_of_use is not None and not is_of_use(kept[0])):
                continue
            is_shared = all(block.num_pin_refs > 1 for block in kept)
            rank = (is_shared, pin.by is None, self.priority_at(pin, now_s), pin.pinned_at_s)
            if rank < least or best is None:
                best, least = pin, rank
        if best is None:
            return False
        self._drop(best, "memory")
        return True

    def distrust(self, nodes: Collection[Node]) -> None:
        """Drop the pins of these nodes, whose blocks are not to be used any more."""
        for pin in [pin for pin in self if pin.tail in nodes]:
            self._drop(pin, "corrupted")

    def forget(self, nodes: Collection[Node]) -> None:
        """Drop the pins of these nodes, which are forgotten."""
        for pin in [pin for pin in self if pin.tail in nodes]:
            self._drop(pin, "reset")

    def clear(self) -> None:
        """Drop all pins: the cache is being reset."""
        for pin in list(self):
            self._drop(pin, "reset")

    def _yielding(self, pin: Pin, hints: list[Pin]) -> list[Pin] | None:
        """Return which of ``hints``, the oldest first, have to go for ``pin``; None if it cannot be even so."""
        num_over = self.num_blocks + sum(1 for block in pin.blocks if not block.num_pin_refs) - self.max_blocks
        if num_over <= 0:
            return []
        wanted, path = set(pin.blocks), set(pin.path())
        refs: Counter[Block] = Counter()
        yielding: list[Pin] = []
        for hint in hints:
            if hint.tail in path:  # it keeps nothing else
                continue
            yielding.append(hint)
            refs.update(hint.blocks)
            num_over -= sum(refs[block] == block.num_pin_refs and block not in wanted for block in hint.blocks)
            if num_over <= 0:
                return yielding
        return None

    def _put(self, pin: Pin, yielding: Iterable[Pin]) -> None:
        """Let a pin be, for which others go: those that yield, and the one of the same path."""
        self._count(pin, sum([self._pool.pin(block) for block in pin.blocks]))
        for hint in yielding:
            self._drop(hint, "quota")
        renewed = self._by_tail.get(pin.tail)
        if renewed is not None:
            self._drop(renewed, "renewed")
        self._pins[pin.pin_id] = self._by_tail[pin.tail] = pin
        self.next_expiry_s = min(self.next_expiry_s, pin.expires_at_s)
        self._update_nodes(pin)

    def _is_whole(self, tail: Node) -> bool:
        """Whether whoever goes on behind ``tail`` finds all that is needed."""
        rules = self._rules.of(tail.root.mask)
        size, num_blocks = rules.block_size, tail.depth + 1
        packing = rules.packing
        first = 0 if packing is None else packing.num_packed(num_blocks * size) * packing.chunk_blocks(size)
        places = [set(rule.places(num_blocks, size)) for rule in rules]
        node = tail
        while node.parent is not None:
            for block, of_group in zip(node.blocks, places, strict=True):
                if block is None and node.depth in of_group and not (node.packed is not None and node.depth < first):
                    return False
            node = node.parent
        return True

    def _drop(self, pin: Pin, cause: PinCause) -> None:
        del self._pins[pin.pin_id], self._by_tail[pin.tail]
        self.next_expiry_s = min((other.expires_at_s for other in self), default=inf)
        self._count(pin, -sum([self._pool.unpin(block) for block in pin.blocks]))
        self._update_nodes(pin)
        if pin.by is None:
            self.dropped.append(DroppedPin(pin.pin_id, pin.num_blocks, cause))
        self._emit(PinDropped(pin.pin_id, pin.num_blocks, cause, pin.tail))

    def _count(self, pin: Pin, num_blocks: int) -> None:
        """Note that pins keep so many blocks more, which are of the kind of ``pin``."""
        self.num_blocks += num_blocks
        self.num_by_mask[pin.tail.root.mask] += num_blocks

    def _kept(self, pin: Pin, spared: Collection[Block]) -> list[Block]:
        """Return blocks of ``pin`` that pins alone keep from being evicted: those that tell whether to give it up."""
        # Of a group that keeps all, whoever holds or pins a block holds or pins those above it: the last one tells.
        blocks = pin.blocks if self._trims else pin.blocks[: len(self._rules)]
        return [block for block in blocks if block.state == BlockState.CACHED and block not in spared]

    def _blocks_of(self, tail: Node) -> Iterator[Block]:
        """Yield the blocks that whoever goes on behind ``tail`` needs, the last first."""
        rules = self._rules.of(tail.root.mask)
        size, num_blocks = rules.block_size, tail.depth + 1
        places = [set(rule.places(num_blocks, size)) for rule in rules]
        rule = rules.packing
        last_packed = 0 if rule is None else rule.num_packed(num_blocks * size) * rule.chunk_blocks(size)
        node = tail
        while node.parent is not None:
            for block, of_group in zip(node.blocks, places, strict=True):
                if block is not None and node.depth in of_group:
                    yield block
            if node.packed is not None and node.depth < last_packed:
                yield from node.packed.blocks
            node = node.parent

    def _update_nodes(self, pin: Pin) -> None:
        """Note what became evictable, or ceased to be."""
        for node in pin.path():
            self._update_evictable(node)

    def _tell(self, dropped: DroppedPin) -> None:
        self.dropped.append(dropped)
        self._emit(PinDropped(*dropped))


def _committed(node: Node | None) -> Node | None:
    """Return the deepest node of the path that ends in ``node`` up to which all is written; None for nothing."""
    deepest = None
    while node is not None and node.blocks:
        if not node.committed:
            deepest = None
        elif deepest is None:
            deepest = node
        node = node.parent
    return deepest
