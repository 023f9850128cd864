"""HostTier: which evicted blocks the host's memory holds, and in which block of its arena. It decides; others copy.

A block that is evicted from the device is copied to a block of the arena, and stays there when it comes back: evicted
again, it need not be copied again. What was used longest ago makes room. Of one path the tail was always used before
the head, as on the device, so that what is left of a path can be used.

Outside the device a block is named by a digest of its whole path: its namespace and all tokens up to its end. Two paths
have the same digest only if BLAKE2b (RFC 7693, 256 bits) collides; the block's own tokens are compared as well.

A host block is pinned while a step reads or writes it, from when that is planned until the step is over.
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import TYPE_CHECKING

from pagefold.kv.plans import HostOps, LoadOp, StoreOp

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagefold.kv.block import BlockId
    from pagefold.kv.tree import Node

__all__ = ["HeldBlock", "HostTier", "digest_of", "path_digest", "root_digest"]

_DIGEST_BYTES = 32


def root_digest(namespace: bytes) -> bytes:
    """Return what names the empty path of a namespace, given its exact key."""
    return blake2b(namespace, digest_size=_DIGEST_BYTES).digest()


def path_digest(parent: bytes, key: bytes) -> bytes:
    """Return what names the path of ``parent`` and one more block, whose packed tokens are ``key``."""
    return blake2b(parent + key, digest_size=_DIGEST_BYTES).digest()


def digest_of(node: Node) -> bytes:
    """Return what names a node's path. Each node is digested once."""
    path: list[Node] = []
    while not node.digest and node.parent is not None:
        path.append(node)
        node = node.parent
    digest = node.digest = node.digest or root_digest(node.key)
    for child in reversed(path):
        digest = child.digest = path_digest(digest, child.key)
    return digest


class HeldBlock:
    """A block in the host arena.

    Attributes:
        digest: names its path.
        key: its own packed tokens.
        host_id: where it is; -1 when it is there no more.
        num_pins: how many planned copies read or write it.
    """

    __slots__ = ("digest", "host_id", "key", "num_pins")

    def __init__(self, digest: bytes, key: bytes, host_id: int) -> None:
        self.digest = digest
        self.key = key
        self.host_id = host_id
        self.num_pins = 0


class HostTier:
    """The blocks of a host arena, and what is in them.

    A step's copies are planned one by one, handed over by :meth:`take`, and end with :meth:`done` or :meth:`failed`.

    Args:
        num_blocks: of the arena.

    Attributes:
        num_stored, num_loaded, num_dropped: blocks since the start: stored, loaded, and lost for want of room.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_stored = self.num_loaded = self.num_dropped = 0
        self._held: dict[bytes, HeldBlock] = {}
        self._idle: OrderedDict[bytes, HeldBlock] = OrderedDict()  # those that no copy pins; used longest ago first
        self._free = list(reversed(range(num_blocks)))
        self._stores: list[StoreOp] = []
        self._loads: list[LoadOp] = []
        self._by_id: dict[int, HeldBlock] = {}
        self.in_flight: list[HostOps] = []

    @property
    def num_held(self) -> int:
        """How many blocks it holds."""
        return len(self._held)

    @property
    def pending(self) -> HostOps:
        """What was planned and not taken yet."""
        return HostOps(self._stores, self._loads)

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
            if held is None or held.key != key:
                break
            found.append(held)
        return tuple(found)

    def keep(self, node: Node, block_id: BlockId) -> None:
        """Keep the bytes of an evicted node: plan to store them, unless they are held or all host blocks are in use."""
        digest = digest_of(node)
        held = self._held.get(digest)
        if held is not None:
            if not held.num_pins:
                self._idle.move_to_end(digest)
            return
        host_id = self._take_id()
        if host_id is None:
            self.num_dropped += 1
            return
        held = HeldBlock(digest, node.key, host_id)
        self._held[digest] = self._by_id[host_id] = held
        held.num_pins = 1
        self._stores.append(StoreOp(block_id, host_id))

    def pin(self, held: tuple[HeldBlock, ...]) -> list[HeldBlock]:
        """Pin the blocks of a match that are still there, up to the first that is not, and return them."""
        pinned: list[HeldBlock] = []
        for one in held:
            if one.host_id < 0:
                break
            one.num_pins += 1
            self._idle.pop(one.digest, None)
            pinned.append(one)
        return pinned

    def unpin(self, held: list[HeldBlock]) -> None:
        """Let go of blocks that :meth:`pin` returned. The first becomes the one used last: tails leave before heads."""
        for one in reversed(held):
            self._unpin(one)

    def load(self, held: HeldBlock, block_id: BlockId) -> None:
        """Plan to load a pinned block; it stays pinned until the step is over."""
        self._loads.append(LoadOp(held.host_id, block_id))

    def cancel(self, loads: list[LoadOp]) -> None:
        """Forget planned loads."""
        for load in loads:
            self._loads.remove(load)
        self.unpin([self._by_id[load.host_id] for load in loads])

    def take(self) -> HostOps:
        """Hand over the copies of the step being planned."""
        ops = HostOps(self._stores, self._loads)
        self._stores, self._loads = [], []
        if ops.stores or ops.loads:
            self.in_flight.append(ops)
        return ops

    def done(self, ops: HostOps) -> None:
        """The copies were made."""
        if not (ops.stores or ops.loads):
            return
        self.in_flight.remove(ops)
        for store in ops.stores:
            self._unpin(self._by_id[store.host_id])
        self.unpin([self._by_id[load.host_id] for load in ops.loads])
        self.num_stored += len(ops.stores)
        self.num_loaded += len(ops.loads)

    def failed(self, ops: HostOps, damaged_ids: frozenset[int] = frozenset()) -> None:
        """The step failed: what it was to store may not be there, and is dropped; so is what is damaged."""
        if not (ops.stores or ops.loads):
            return
        self.in_flight.remove(ops)
        self.unpin([self._by_id[load.host_id] for load in ops.loads])
        lost = {store.host_id for store in ops.stores}
        for host_id in sorted(lost):
            self._unpin(self._by_id[host_id])
        for host_id in sorted(lost | damaged_ids):
            held = self._by_id.get(host_id)
            if held is not None:
                self._drop(held)

    def reset(self) -> None:
        """Forget all that no copy pins, and never give out the rest again."""
        self._held.clear()
        for held in list(self._idle.values()):
            self._drop(held)

    def held(self) -> Iterator[HeldBlock]:
        """Yield all that have a host block: for audits."""
        return iter(self._by_id.values())

    def free_ids(self) -> list[int]:
        """Return the host blocks that hold nothing: for audits."""
        return list(self._free)

    # Inside.

    def _take_id(self) -> int | None:
        if not self._free:
            if not self._idle:
                return None
            self._drop(next(iter(self._idle.values())))
            self.num_dropped += 1
        return self._free.pop()

    def _drop(self, held: HeldBlock) -> None:
        assert not held.num_pins, "a copy reads or writes it"
        self._idle.pop(held.digest, None)
        if self._held.get(held.digest) is held:
            del self._held[held.digest]
        del self._by_id[held.host_id]
        self._free.append(held.host_id)
        held.host_id = -1

    def _unpin(self, held: HeldBlock) -> None:
        held.num_pins -= 1
        if held.num_pins:
            return
        if self._held.get(held.digest) is held:
            self._idle[held.digest] = held
        else:  # forgotten by reset() while a step used it
            self._drop(held)
