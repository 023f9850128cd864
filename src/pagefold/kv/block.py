"""The block, its states, and the one table of legal moves; and the node of the prefix tree that publishes it.

No other file assigns a block's state.

::

              allocate                      release (published)
        FREE ----------> ACTIVE  <------------------------------> CACHED
         ^                  | release (private)     acquire          |
         +------------------+-------------------- evict -------------+
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, NewType

if TYPE_CHECKING:
    from pagefold.kv.tenant_blocks import TenantBlocks

__all__ = [
    "LEGAL_MOVES",
    "MANY",
    "NOBODY",
    "Block",
    "BlockId",
    "BlockState",
    "IllegalMoveError",
    "Node",
    "PackedChunk",
]

BlockId = NewType("BlockId", int)

MANY = "many"
"""The claim of a node that no session has for itself."""

NOBODY = "nobody"
"""The claim of a node that is superseded: the session that had it for itself has edited it away, or has ended."""


class BlockState(IntEnum):
    """Where a block is in its life. Which tier holds a copy of it is not a state."""

    FREE = 0
    """In the free list; its bytes mean nothing."""
    ACTIVE = 1
    """Some table holds it, or a transfer that outlived its last table still does."""
    CACHED = 2
    """In the prefix tree, held by no table: readable, and evictable when no transfer reads it, no pin keeps it, and its
    node is a leaf, its group keeps the last tokens only, or it holds what is packed."""


LEGAL_MOVES: dict[BlockState, frozenset[BlockState]] = {
    BlockState.FREE: frozenset({BlockState.ACTIVE}),
    BlockState.ACTIVE: frozenset({BlockState.CACHED, BlockState.FREE}),
    BlockState.CACHED: frozenset({BlockState.ACTIVE, BlockState.FREE}),
}

_IS_LEGAL = tuple(tuple(new in LEGAL_MOVES[old] for new in BlockState) for old in BlockState)
"""``LEGAL_MOVES`` as ``[old][new]``: the hot path looks moves up by index instead of hashing."""


class IllegalMoveError(AssertionError):
    """A block was asked to make a move that its lifecycle does not have: a bug of ours, never a user's."""


class Block:
    """One block of KV memory: every block of a pool has the same number of bytes.

    Attributes:
        block_id: its place in the slab.
        state: where it is in its life; set only by :meth:`to`.
        num_table_refs: how many block tables hold it.
        num_io_refs: how many transfers (copies, loads, stores) still read or write it.
        num_pin_refs: how many pins keep it; they hold no bytes in use, but keep it from being evicted.
        group: index of the cache group whose layers it holds, while somebody holds it or it is cached; the number of
            groups, if it holds what is packed.
        node: the node of the prefix tree that publishes it; None while it is private or free.
        packed_by: by which mask what it holds was kept, if that is what was packed; None of all others.
        tenant: whose it is, or was last, where that is counted (``counting_pool.py``).
    """

    __slots__ = (
        "block_id",
        "group",
        "node",
        "num_io_refs",
        "num_pin_refs",
        "num_table_refs",
        "packed_by",
        "state",
        "tenant",
    )

    def __init__(self, block_id: BlockId) -> None:
        self.block_id = block_id
        self.state = BlockState.FREE
        self.num_table_refs = 0
        self.num_io_refs = 0
        self.num_pin_refs = 0
        self.group = 0
        self.node: Node | None = None
        self.packed_by: int | None = None
        self.tenant: TenantBlocks

    def to(self, state: BlockState) -> None:
        """Move to ``state``.

        Raises:
            IllegalMoveError: the lifecycle has no such move, or the block would become free while somebody holds it.
        """
        if not _IS_LEGAL[self.state][state]:
            msg = f"block {self.block_id}: {self.state.name} -> {state.name} is not a legal move"
            raise IllegalMoveError(msg)
        if state == 0 and (self.num_table_refs or self.num_io_refs or self.num_pin_refs or self.node is not None):
            msg = (
                f"block {self.block_id} cannot be freed: {self.num_table_refs} tables, "
                f"{self.num_io_refs} transfers, {self.num_pin_refs} pins, published: {self.node is not None}"
            )
            raise IllegalMoveError(msg)
        self.state = state

    def __repr__(self) -> str:
        return (
            f"Block({self.block_id}, {self.state.name}, tables={self.num_table_refs}, io={self.num_io_refs}, "
            f"pins={self.num_pin_refs}, published={self.node is not None})"
        )


class PackedChunk:
    """What was kept of a chunk of a path, in blocks that hold nothing else.

    Attributes:
        blocks: as many as it fills, in order; none if nothing was kept.
        counts: how many entries were kept, as whoever packed them tells; the core does not look into it.
        node: the last node of the chunk, if that publishes it.
    """

    __slots__ = ("blocks", "counts", "node")

    def __init__(self, blocks: tuple[Block, ...], counts: object) -> None:
        self.blocks = blocks
        self.counts = counts
        self.node: Node | None = None

    def put(self, node: Node | None) -> None:
        """Let ``node`` publish it, and all of its blocks; or nobody."""
        if self.node is not None:
            self.node.packed = None
        self.node = node
        if node is not None:
            assert node.packed is None, "a chunk is packed once"
            node.packed = self
            for block in self.blocks:
                block.node = node


class Node:
    """So many tokens of a path as fill a block, and the blocks that hold them: one for each cache group.

    Attributes:
        key: packed tokens of the block; of a root, the namespace's key.
        parent: the node of the block before it; None for a root.
        root: the node of its namespace; a root is its own.
        blocks: the block of each cache group, None where it is gone: of a group that keeps the last tokens only. Empty
            for a root.
        depth: how many blocks lie above it: 0 for the first block of a prefix.
        claim: which session has it for itself (``expectations.py``): an object that stands for it, :data:`MANY` or
            :data:`NOBODY`; None where nobody has said so.
        index_slot: where an index has it (``continuations.py``), if there is one.
        path_hash: of its namespace and all tokens up to its end: what policies remember it by when it is gone. Equal
            paths have equal hashes; nothing but a guess about the future may rest on the reverse.
        committed: its bytes have been written. Until then the node is promised: a request of the same step may lean
            on it, and :meth:`Publishing.abandon` takes it back.
        attached: the node is in the tree. Once removed a node never comes back.
        evictable: all its blocks are cached, read by no transfer and kept by no pin, and it has no children: the policy
            may choose it.
        created_at, last_used: ticks of the core's logical clock.
        born_s, used_s: when it was published; when it was last published, acquired or released. By ``KVCore.now_s``.
        num_hits: how often an acquire went through it.
        digest: names the node's whole path outside the device (see ``names.py``); empty until somebody asks.
        reuse_hint: whether it will be used again, as its last user believed; None for not said. No promise.
        packed: what was kept of the chunk whose last node it is; None of any other, and until that is packed.
        mask: of a root: by which mask its paths keep older tokens, where those are packed; ``NO_MASK`` for all of them.
    """

    __slots__ = (
        "attached",
        "blocks",
        "born_s",
        "children",
        "claim",
        "committed",
        "created_at",
        "depth",
        "digest",
        "evictable",
        "index_slot",
        "key",
        "last_used",
        "mask",
        "num_hits",
        "packed",
        "parent",
        "path_hash",
        "reuse_hint",
        "root",
        "used_s",
    )

    def __init__(self, key: bytes, parent: Node | None, blocks: tuple[Block | None, ...], tick: int) -> None:
        self.key = key
        self.parent = parent
        self.blocks = blocks
        if parent is None:
            self.depth = -1
            self.path_hash = hash(key)
            self.root = self
        else:
            self.depth = parent.depth + 1
            self.path_hash = hash((parent.path_hash, key))
            self.root = parent.root
        self.children: dict[bytes, Node] = {}
        self.committed = False
        self.attached = True
        self.evictable = False
        self.created_at = tick
        self.last_used = tick
        self.born_s = self.used_s = 0.0
        self.num_hits = 0
        self.digest = b""
        self.reuse_hint: bool | None = None
        self.packed: PackedChunk | None = None
        self.mask = 0
        self.claim: object = None
        self.index_slot = 0

    def put(self, group: int, block: Block | None) -> None:
        """Let it have another block of a cache group, or none."""
        self.blocks = (*self.blocks[:group], block, *self.blocks[group + 1 :])

    @property
    def all_blocks(self) -> tuple[Block | None, ...]:
        """Its blocks, those of a packed chunk last."""
        return self.blocks if self.packed is None else (*self.blocks, *self.packed.blocks)

    @property
    def is_bare(self) -> bool:
        """Whether none of its blocks is left; a root never had any."""
        return not any(self.all_blocks)
