"""HostTier: which evicted blocks the host's memory holds, and in which block of its arena. It decides; others copy.

A block that is evicted from the device is copied to a block of the arena, and stays there when it comes back: evicted
again, it need not be copied again. What was used longest ago makes room. Of one path the tail was always used before
the head, as on the device, so that what is left of a path can be used.

Slower tiers (``slow_tiers.py``) fill the arena and are written from it; a request never waits for them in a step.

A host block is pinned while something reads or writes it, from when that is planned until it is over.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import TYPE_CHECKING

from pagefold.kv.held_block import HeldBlock
from pagefold.kv.names import digest_of, name_of, names_behind, path_digest, root_digest
from pagefold.kv.plans import NO_HOST_OPS, HostOps, LoadOp, StoreOp
from pagefold.kv.tree import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from pagefold.kv.block import BlockId, Node
    from pagefold.kv.names import BlockName
    from pagefold.kv.tree import PrefixHit

__all__ = ["NO_HOST", "HostTier"]


class HostTier:
    """The blocks of a host arena, and what is in them.

    A step's copies are planned one by one, handed over by :meth:`take`, and end with :meth:`done` or :meth:`failed`.

    Args:
        num_blocks: of the arena.
        notes_unsaved: whether ``unsaved`` and ``fresh`` are kept, for slower tiers.

    Attributes:
        is_on: whether there is a host tier at all.
        num_stored, num_loaded, num_dropped: blocks since the start: stored, loaded, and lost for want of room.
        unsaved: what was stored here and nobody has taken for a slower tier yet; used longest ago first.
        fresh: the part of ``unsaved`` that nobody has looked at yet.
    """

    is_on = True

    def __init__(self, num_blocks: int, *, notes_unsaved: bool = False) -> None:
        self.num_blocks = num_blocks
        self.num_stored = self.num_loaded = self.num_dropped = 0
        self.unsaved: OrderedDict[bytes, HeldBlock] = OrderedDict()
        self.fresh: deque[HeldBlock] = deque()
        self._notes_unsaved = notes_unsaved
        self._held: dict[bytes, HeldBlock] = {}
        # Those that nothing pins, or only who writes them to a slower tier; used longest ago first.
        self._idle: OrderedDict[bytes, HeldBlock] = OrderedDict()
        self._free = list(reversed(range(num_blocks)))
        self._stores: list[StoreOp] = []
        self._loads: list[LoadOp] = []
        self._checks: list[HeldBlock] = []
        self._by_id: dict[int, HeldBlock] = {}
        self.in_flight: list[HostOps] = []

    @property
    def num_held(self) -> int:
        """How many blocks it holds."""
        return len(self._held)

    @property
    def num_spare(self) -> int:
        """How many host blocks could be given out without losing what no slower tier was given."""
        return len(self._free) + len(self._idle) - len(self.unsaved)

    def num_ready(self, at_most: int) -> int:
        """Return how many host blocks will be given out next without losing what no slower tier was given.

        Counted up to ``at_most``, what is being written included.
        """
        num = len(self._free)
        for digest in self._idle:
            if num >= at_most or digest in self.unsaved:
                break
            num += 1
        return num

    @property
    def pending(self) -> HostOps:
        """What was planned and not taken yet."""
        checks = dict.fromkeys(held.host_id for held in self._checks if held.host_id >= 0)  # not of what has left since
        return HostOps(self._stores, self._loads, list(checks))

    @property
    def has_loads(self) -> bool:
        """Whether a block is to be loaded."""
        return bool(self._loads)

    @property
    def has_live_stores(self) -> bool:
        """Whether a block is to be stored that stays what it is."""
        return any(store.is_live for store in self._stores)

    def get(self, digest: bytes) -> HeldBlock | None:
        """Return the block of that name, if it is held."""
        return self._held.get(digest)

    def extend(self, hit: PrefixHit, packed: bytes, max_tokens: int, stride: int) -> PrefixHit:
        """Return ``hit`` with the blocks behind it that are held here.

        Args:
            hit: what the device has of ``packed``.
            packed: a sequence's tokens, packed.
            max_tokens: how many of them may be found.
            stride: bytes of a block's packed tokens.
        """
        parent = digest_of(hit.nodes[-1]) if hit.nodes else root_digest(hit.namespace)
        held = self.match(parent, packed[len(hit.nodes) * stride : max_tokens * TOKEN_BYTES], stride)
        return hit._replace(partial=None, num_partial_tokens=0, held=held) if held else hit

    def match(self, parent: bytes, packed: bytes, stride: int) -> tuple[HeldBlock, ...]:
        """Find the blocks that go on from the path ``parent``: as many whole ones of ``packed`` as are held in a row.

        Args:
            parent: a path's digest.
            packed: the tokens behind that path, packed.
            stride: bytes of a block's packed tokens.
        """
        found: list[HeldBlock] = []
        for offset in range(0, len(packed) - stride + 1, stride):
            key = packed[offset : offset + stride]
            parent = path_digest(parent, key)
            held = self._held.get(parent)
            if held is None or held.name.key != key:
                break
            found.append(held)
        return tuple(found)

    def keep(self, name: BlockName, block_id: BlockId, *, num_hits: int = 0, is_live: bool = False) -> bool:
        """Keep the bytes of a block: plan to store them, unless they are held or all host blocks are in use.

        Args:
            name: names what the block holds.
            block_id: where its bytes are.
            num_hits: how often it was found on the device.
            is_live: whether the block stays what it is, so that the caller pins it until the store is over.

        Returns whether a store was planned.
        """
        held = self._held.get(name.digest)
        if held is not None:
            self._touch(held)
            return False
        host_id = self._take_id()
        if host_id is None:
            self.num_dropped += 1
            return False
        held = HeldBlock(name, host_id, num_hits=num_hits)
        self._held[name.digest] = self._by_id[host_id] = held
        held.num_pins = 1
        self._stores.append(StoreOp(block_id, host_id, is_live))
        return True

    def keep_evicted(self, node: Node) -> None:
        """Keep the bytes of a node's block, which is being evicted."""
        assert node.block is not None
        self.keep(name_of(node), node.block.block_id, num_hits=node.num_hits)

    def keep_live(self, node: Node) -> bool:
        """Keep the bytes of a node's block, which stays what it is. Return whether a store was planned."""
        assert node.block is not None
        return self.keep(name_of(node), node.block.block_id, num_hits=node.num_hits, is_live=True)

    def pin(self, held: Sequence[HeldBlock]) -> list[HeldBlock]:
        """Pin the blocks of a match that are still there, up to the first that is not, and return them."""
        pinned: list[HeldBlock] = []
        for one in held:
            if self._held.get(one.name.digest) is not one:
                break
            one.num_pins += 1
            self._idle.pop(one.name.digest, None)
            pinned.append(one)
        return pinned

    def unpin(self, held: Sequence[HeldBlock]) -> None:
        """Let go of pinned blocks. The first becomes the one used last: tails leave before heads."""
        for one in reversed(held):
            one.num_pins -= 1
            if one.num_pins:
                continue
            if self._held.get(one.name.digest) is one:
                self._idle[one.name.digest] = one
                self._touch(one)
            else:  # forgotten while it was pinned
                self._free_up(one)

    def pin_to_write(self, held: HeldBlock) -> None:
        """Pin a block whose bytes go to a slower tier. It is not used by that: it stays as old as it is."""
        held.num_pins += 1

    def unpin_written(self, held: HeldBlock) -> None:
        """A slower tier has let go of a block."""
        held.num_pins -= 1
        if held.num_pins:
            return
        if self._held.get(held.name.digest) is held:
            self._idle.setdefault(held.name.digest, held)
        else:  # forgotten meanwhile
            self._free_up(held)

    def load(self, held: HeldBlock, block_id: BlockId) -> None:
        """Plan to load a pinned block; it stays pinned until the step is over."""
        self._loads.append(LoadOp(held.host_id, block_id))

    def check(self, held: HeldBlock) -> None:
        """Plan to check a pinned block that will be read where it is."""
        self._checks.append(held)

    def cancel(self, loads: list[LoadOp]) -> None:
        """Forget planned loads."""
        for load in loads:
            self._loads.remove(load)
        self.unpin([self._by_id[load.host_id] for load in loads])

    def cancel_live_stores(self) -> list[StoreOp]:
        """Forget the planned stores of blocks that are still cached and that nobody waits for, and return them."""
        cancelled = [store for store in self._stores if store.is_live and self._by_id[store.host_id].num_pins == 1]
        if cancelled:
            dropped = set(cancelled)
            self._stores = [store for store in self._stores if store not in dropped]
        for store in cancelled:
            held = self._by_id[store.host_id]
            self.forget(held)
            self.unpin([held])
        return cancelled

    def take(self) -> HostOps:
        """Hand over the copies of the step being planned."""
        ops = self.pending
        self._stores, self._loads, self._checks = [], [], []
        if ops.stores or ops.loads:
            self.in_flight.append(ops)
        return ops

    def done(self, ops: HostOps) -> None:
        """The copies were made."""
        if not (ops.stores or ops.loads):
            return
        self.in_flight.remove(ops)
        for store in ops.stores:
            held = self._by_id[store.host_id]
            if self._notes_unsaved and self._held.get(held.name.digest) is held:
                self.unsaved[held.name.digest] = held
                self.fresh.append(held)
            self.unpin([held])
        self.unpin([self._by_id[load.host_id] for load in ops.loads])
        self.num_stored += len(ops.stores)
        self.num_loaded += len(ops.loads)

    def failed(self, ops: HostOps, damaged_ids: frozenset[int] = frozenset()) -> None:
        """The step failed: what it was to store may not be there, and is dropped; so is what is damaged.

        What it was to check the next step checks.
        """
        again = [host_id for host_id in ops.checks if host_id in self._by_id and host_id not in damaged_ids]
        self._checks += [self._by_id[host_id] for host_id in again]  # perhaps they were not made
        if ops.stores or ops.loads:
            self.in_flight.remove(ops)
        for host_id in sorted({store.host_id for store in ops.stores} | damaged_ids):
            held = self._by_id.get(host_id)
            if held is not None:
                self.forget(held)
        self.unpin([self._by_id[load.host_id] for load in ops.loads])
        for store in ops.stores:
            self.unpin([self._by_id[store.host_id]])

    def reset(self) -> None:
        """Forget all. What is pinned is never given out again, and leaves when nothing pins it."""
        for held in list(self._held.values()):
            self.forget(held)

    def distrust(
        self, namespace: bytes, packed: bytes, stride: int, nodes: Iterable[Node], copied_from: Node | None
    ) -> set[bytes]:
        """Forget the blocks of a sequence, of ``nodes``, and of all that go on from them; return the paths meant.

        Args:
            namespace: of the sequence.
            packed: its tokens, packed.
            stride: bytes of a block's packed tokens.
            nodes: of the device, that are forgotten there.
            copied_from: whose block it took a part of: it may have left the tree, and be held all the same.
        """
        root = root_digest(namespace)
        found = {name.digest for name in names_behind(root, root, packed, stride)}.union(map(digest_of, nodes))
        if copied_from is not None:
            found.add(digest_of(copied_from))
        behind: dict[bytes, list[bytes]] = {}
        for digest, held in self._held.items():
            behind.setdefault(held.name.parent, []).append(digest)
        left = list(found)
        while left:
            more = [digest for digest in behind.get(left.pop(), ()) if digest not in found]
            found.update(more)
            left += more
        for held in [held for digest, held in self._held.items() if digest in found]:
            self.forget(held)
        return found

    # For slower tiers.

    def reserve(self, name: BlockName, origin: str) -> HeldBlock | None:
        """Return a host block for what a slower tier is to bring, pinned; None when all are in use.

        Nobody finds it until :meth:`arrived`.
        """
        host_id = self._take_id()
        if host_id is None:
            return None
        held = self._by_id[host_id] = HeldBlock(name, host_id, origin=origin)
        held.num_pins = 1
        return held

    def arrived(self, held: HeldBlock) -> None:
        """A reserved block's bytes are there and right: it is found from now on, unless another one already is."""
        self._held.setdefault(held.name.digest, held)

    def forget(self, held: HeldBlock) -> None:
        """Let a block not be found any more; its host block is free once nothing pins it."""
        digest = held.name.digest
        self._idle.pop(digest, None)
        if self._held.get(digest) is held:
            del self._held[digest]
            self.unsaved.pop(digest, None)
        if not held.num_pins:
            self._free_up(held)

    # For audits.

    def held(self) -> Iterator[HeldBlock]:
        """Yield all that have a host block."""
        return iter(self._by_id.values())

    def free_ids(self) -> list[int]:
        """Return the host blocks that hold nothing."""
        return list(self._free)

    # Inside.

    def _take_id(self) -> int | None:
        if not self._free:
            oldest = next((held for held in self._idle.values() if not held.num_pins), None)
            if oldest is None:
                return None
            self.forget(oldest)
            self.num_dropped += 1
        return self._free.pop()

    def _touch(self, held: HeldBlock) -> None:
        for order in (self._idle, self.unsaved):
            if held.name.digest in order:
                order.move_to_end(held.name.digest)

    def _free_up(self, held: HeldBlock) -> None:
        del self._by_id[held.host_id]
        self._free.append(held.host_id)
        held.host_id = -1


class _NoHost(HostTier):
    """No host tier: it has no blocks, is asked for names of none, and plans nothing."""

    is_on = False

    def __init__(self) -> None:
        super().__init__(0)

    def extend(self, hit: PrefixHit, packed: bytes, max_tokens: int, stride: int) -> PrefixHit:  # noqa: ARG002
        return hit

    def keep_evicted(self, node: Node) -> None:
        pass

    def keep_live(self, node: Node) -> bool:  # noqa: ARG002
        return False

    def take(self) -> HostOps:
        return NO_HOST_OPS

    def distrust(
        self,
        namespace: bytes,  # noqa: ARG002
        packed: bytes,  # noqa: ARG002
        stride: int,  # noqa: ARG002
        nodes: Iterable[Node],  # noqa: ARG002
        copied_from: Node | None,  # noqa: ARG002
    ) -> set[bytes]:
        return set()


NO_HOST: HostTier = _NoHost()
"""No host tier; it never changes, so all cores without one share it."""
