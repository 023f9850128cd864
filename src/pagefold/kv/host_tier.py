"""HostTier: which evicted blocks the host's memory holds, and what a step copies between it and the device.

A block that is evicted from the device is copied to a block of the arena, and stays there when it comes back: evicted
again, it need not be copied again. ``host_blocks.py`` has the places and says who makes room. Blocks of every cache
group lie here: behind a path of one group :meth:`HostTier.extend` looks for what is held, of several ``host_paths.py``.

Slower tiers (``slow_tiers.py``) fill the arena and are written from it; a request never waits for them in a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.kv.block import MANY
from pagefold.kv.host_blocks import HostBlocks
from pagefold.kv.names import digest_of, in_group, name_of, names_behind, path_digest, root_digest
from pagefold.kv.ops import NO_HOST_OPS, HostOps, LoadOp, StoreOp
from pagefold.kv.tree import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from pagefold.kv.block import Block, BlockId, Node
    from pagefold.kv.chunk_notes import ChunkNotes
    from pagefold.kv.held_block import HeldBlock, HeldChunk
    from pagefold.kv.keep_rules import KeepRules
    from pagefold.kv.names import BlockName
    from pagefold.kv.tree import PrefixHit

__all__ = ["NO_HOST", "HostTier"]


class HostTier:
    """What evicted blocks become: stored in a host arena, found there, and loaded from it.

    A step's copies are planned one by one, handed over by :meth:`take`, and end with :meth:`done` or :meth:`failed`.
    It decides; others copy.

    Args:
        num_blocks: of the arena.
        notes_unsaved: whether slower tiers want to know what was stored.
        notes: what they have of packed chunks beside the blocks, where there are some.

    Attributes:
        is_on: whether there is a host tier at all.
        notes: as given.
        blocks: who has which block of the arena.
        num_stored, num_loaded: blocks since the start.
        in_flight: what steps move that have not ended.
    """

    is_on = True

    def __init__(self, num_blocks: int, *, notes_unsaved: bool = False, notes: ChunkNotes | None = None) -> None:
        self.notes = notes
        self.blocks = HostBlocks(num_blocks, notes_unsaved=notes_unsaved)
        self.num_stored = self.num_loaded = 0
        self.in_flight: list[HostOps] = []
        self._stores: list[StoreOp] = []
        self._loads: list[LoadOp] = []
        self._checks: list[HeldBlock] = []

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
        return hit._replace(partial=None, num_partial_tokens=0, held=held, num_behind=len(held)) if held else hit

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
            held = self.blocks.get(parent)
            if held is None or held.name.key != key:
                break
            found.append(held)
        return tuple(found)

    def keep(  # noqa: PLR0913 - a block, and what is noted of it
        self,
        name: BlockName,
        block_id: BlockId,
        *,
        num_hits: int = 0,
        is_live: bool = False,
        chunk: HeldChunk | None = None,
        claim: object = None,
    ) -> bool:
        """Keep the bytes of a block: plan to store them, unless they are held or all host blocks are in use.

        Args:
            name: names what the block holds.
            block_id: where its bytes are.
            num_hits: how often it was found on the device.
            is_live: whether the block stays what it is, so that the caller pins it until the store is over.
            chunk: that of :class:`HeldBlock`.
            claim: which session has it for itself; None for none.

        Returns whether a store was planned.
        """
        blocks = self.blocks
        held = blocks.get(name.digest)
        if held is not None:
            blocks.touch(held)
            if held.claim is not claim:
                held.claim = MANY
            return False
        held = blocks.reserve(name, num_hits=num_hits)
        if held is None:
            blocks.num_dropped += 1
            return False
        held.chunk = chunk
        held.claim = claim
        blocks.arrived(held)
        self._stores.append(StoreOp(block_id, held.host_id, is_live))
        return True

    def keep_evicted(self, node: Node, block: Block) -> None:
        """Keep the bytes of a node's block, which is being evicted."""
        self.keep(name_of(node, block.group), block.block_id, num_hits=node.num_hits, claim=node.claim)

    def keep_live(self, node: Node, block: Block) -> bool:
        """Keep the bytes of a node's block, which stays what it is. Return whether a store was planned."""
        name = name_of(node, block.group)
        return self.keep(name, block.block_id, num_hits=node.num_hits, is_live=True, claim=node.claim)

    def supersede(self, node: Node, owner: object, num_groups: int) -> None:
        """Let the copies of a superseded node make room first, where ``owner`` alone has used them.

        Args:
            node: of the device.
            owner: whose it was.
            num_groups: how many names a path's blocks have.
        """
        path = digest_of(node)
        for group in range(num_groups):
            held = self.blocks.get(in_group(path, group))
            if held is not None and held.claim is owner:
                self.blocks.supersede(held)

    def supersede_behind(self, path: bytes, packed: bytes, owner: object) -> int:
        """Let what is held behind a path make room first, as far as ``owner`` alone has used it, but for ``packed``.

        What has left the device is found here alone, from parent to child, up to the first block that is not held.

        Args:
            path: digest of the path.
            packed: tokens behind it that somebody goes on with, packed; what goes on as they do keeps its value.
            owner: who has no use for the others.

        Returns how many blocks lost their value.
        """
        blocks, offset, end = self.blocks, 0, path
        gone: list[bytes] = []  # the path of each block

        def take(held: HeldBlock) -> None:
            if held.claim is owner and not held.is_superseded:
                blocks.supersede(held)
                gone.append(held.name.path)

        while end:
            path, end = end, b""
            num_bytes = 0
            for held in blocks.behind(path):
                key = held.name.key
                if packed[offset : offset + len(key)] == key:
                    end, num_bytes = held.name.path, len(key)
                else:
                    take(held)
            offset += num_bytes
        for path in gone:  # it grows: what is deeper makes room before what is above it
            for held in blocks.behind(path):
                take(held)
        return len(gone)

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
        self.blocks.unpin([self._at(load.host_id) for load in loads])

    def cancel_live_stores(self) -> list[StoreOp]:
        """Forget the planned stores of blocks that are still cached and that nobody waits for, and return them."""
        cancelled = [store for store in self._stores if store.is_live and self._at(store.host_id).num_pins == 1]
        if cancelled:
            dropped = set(cancelled)
            self._stores = [store for store in self._stores if store not in dropped]
        for store in cancelled:
            held = self._at(store.host_id)
            self.blocks.forget(held)
            self.blocks.unpin([held])
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
            held = self._at(store.host_id)
            self.blocks.stored(held)
            self.blocks.unpin([held])
        self.blocks.unpin([self._at(load.host_id) for load in ops.loads])
        self.num_stored += len(ops.stores)
        self.num_loaded += len(ops.loads)

    def failed(self, ops: HostOps, damaged_ids: frozenset[int] = frozenset()) -> None:
        """The step failed: what it was to store may not be there, and is dropped; so is what is damaged.

        What it was to check the next step checks.
        """
        checked = [self.blocks.at(host_id) for host_id in ops.checks if host_id not in damaged_ids]
        self._checks += [held for held in checked if held is not None]  # perhaps they were not made
        if ops.stores or ops.loads:
            self.in_flight.remove(ops)
        for host_id in sorted({store.host_id for store in ops.stores} | damaged_ids):
            held = self.blocks.at(host_id)
            if held is not None:
                self.blocks.forget(held)
        self.blocks.unpin([self._at(load.host_id) for load in ops.loads])
        for store in ops.stores:
            self.blocks.unpin([self._at(store.host_id)])

    def reset(self) -> None:
        """Forget all. What is pinned is never given out again, and leaves when nothing pins it."""
        for held in list(self.blocks.found()):
            self.blocks.forget(held)

    def distrust(
        self,
        namespace: bytes,
        packed: bytes,
        rules: KeepRules,
        nodes: Iterable[Node],
        copied_from: Node | None,
    ) -> set[bytes]:
        """Forget the blocks of a sequence, of ``nodes``, and of all that go on from them; return the paths meant.

        Where no group keeps all, paths have gaps here, and nobody knows what goes on from what: then all blocks of the
        namespace go.

        Args:
            namespace: of the sequence.
            packed: its tokens, packed.
            rules: what each cache group keeps.
            nodes: of the device, that are forgotten there.
            copied_from: whose block it took a part of: it may have left the tree, and be held all the same.
        """
        root = root_digest(namespace)
        stride = rules.block_size * TOKEN_BYTES
        found = {name.digest for name in names_behind(root, root, packed, stride)}.union(map(digest_of, nodes))
        if copied_from is not None:
            found.add(digest_of(copied_from))
        if not rules.keeps_paths:
            found.update(held.name.path for held in self.blocks.found() if held.name.namespace == root)
        behind: dict[bytes, list[bytes]] = {}
        for held in self.blocks.found():
            behind.setdefault(held.name.parent, []).append(held.name.path)
        left = list(found)
        while left:
            more = [digest for digest in behind.get(left.pop(), ()) if digest not in found]
            found.update(more)
            left += more
        for held in [held for held in self.blocks.found() if held.name.path in found]:
            self.blocks.forget(held)
        return found

    def forget(self, namespaces: Collection[bytes]) -> None:
        """Forget the blocks of namespaces, by digest. What is pinned leaves when nothing pins it."""
        for held in [held for held in self.blocks.found() if held.name.namespace in namespaces]:
            self.blocks.forget(held)

    # Inside.

    def _at(self, host_id: int) -> HeldBlock:
        held = self.blocks.at(host_id)
        assert held is not None, "what a move is planned for has its place"
        return held


class _NoHost(HostTier):
    """No host tier: it has no blocks, is asked for names of none, and plans nothing."""

    is_on = False

    def __init__(self) -> None:
        super().__init__(0)

    def extend(self, hit: PrefixHit, packed: bytes, max_tokens: int, stride: int) -> PrefixHit:  # noqa: ARG002
        return hit

    def keep_evicted(self, node: Node, block: Block) -> None:
        pass

    def keep_live(self, node: Node, block: Block) -> bool:  # noqa: ARG002
        return False

    def supersede(self, node: Node, owner: object, num_groups: int) -> None:
        pass

    def supersede_behind(self, path: bytes, packed: bytes, owner: object) -> int:  # noqa: ARG002
        return 0

    def take(self) -> HostOps:
        return NO_HOST_OPS

    def distrust(
        self,
        namespace: bytes,  # noqa: ARG002
        packed: bytes,  # noqa: ARG002
        rules: KeepRules,  # noqa: ARG002
        nodes: Iterable[Node],  # noqa: ARG002
        copied_from: Node | None,  # noqa: ARG002
    ) -> set[bytes]:
        return set()


NO_HOST: HostTier = _NoHost()
"""No host tier; it never changes, so all cores without one share it."""
