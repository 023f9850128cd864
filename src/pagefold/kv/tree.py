"""PrefixTree: which blocks hold which tokens. Children are keyed by their exact packed tokens, as many as fill a block.

Keys are the tokens themselves (4 bytes each, in the machine's order), not a hash of them: two texts cannot collide.
Each namespace has a root of its own.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from pagefold.kv.block import Node

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagefold.kv.block import Block
    from pagefold.kv.held_block import HeldBlock

__all__ = ["TOKEN_BYTES", "NodeWatcher", "PrefixHit", "PrefixTree", "attached_part", "doubtful_nodes"]

TOKEN_BYTES = 4
"""Bytes of one packed token: ``array("i", token_ids).tobytes()``."""

_MAX_SIBLINGS_SCANNED = 32
"""A partial match looks at the newest so many siblings: a bounded search, since a popular prefix may have thousands."""


class PrefixHit(NamedTuple):
    """What :meth:`PrefixTree.match` found; a value, which pins nothing.

    Attributes:
        namespace: the key of the namespace that was searched.
        nodes: the nodes of the whole blocks that match, from the first block on.
        partial: a further node that agrees on its first ``num_partial_tokens`` tokens, to be copied and gone on from.
        held: blocks that the host tier holds, to be loaded; then there is no ``partial``. Group by group, in the order
            of their places: those that are behind ``nodes``, and those that nodes lack and whoever goes on needs.
            Packed chunks that nodes lack come last, in order (``host_chunks.py``).
        num_behind: how many blocks of the path there are behind ``nodes``, thanks to ``held``.
        lost: the last node of the path that the tree knows, where that goes on behind ``num_blocks``: a window is gone
            that whoever goes on there needs. Else None.
        mask: that of the sequence that it was sought for.
    """

    namespace: bytes
    nodes: list[Node]
    partial: Node | None
    num_partial_tokens: int
    held: tuple[HeldBlock, ...] = ()
    num_behind: int = 0
    lost: Node | None = None
    mask: int = 0

    @property
    def num_blocks(self) -> int:
        """How many whole blocks of the path can be gone on from."""
        return len(self.nodes) + self.num_behind

    @property
    def num_lost(self) -> int:
        """How many blocks behind those are computed once more, for want of a window."""
        return 0 if self.lost is None else self.lost.depth + 1 - self.num_blocks


def attached_part(nodes: list[Node]) -> list[Node]:
    """Return the first of a path's ``nodes`` that are still in the tree. Leaves leave first: parents are in it."""
    num_attached = len(nodes)
    while num_attached and not nodes[num_attached - 1].attached:
        num_attached -= 1
    return nodes[:num_attached]


class NodeWatcher:
    """Is told of every node that comes and goes, but for roots. As it is it does nothing."""

    def on_insert(self, node: Node) -> None:
        """A node was published; perhaps its bytes are not written yet."""

    def on_remove(self, node: Node) -> None:
        """A node has left."""

    def on_clear(self) -> None:
        """All nodes have left."""


class PrefixTree:
    """The published blocks of all namespaces.

    Args:
        block_size: tokens a block.

    Attributes:
        watcher: is told which nodes come and go.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.roots: dict[bytes, Node] = {}
        self.watcher = NodeWatcher()

    def match(self, namespace: bytes, packed: bytes, max_tokens: int) -> PrefixHit:
        """Find the longest published prefix of ``packed``, of at most ``max_tokens`` tokens. Writes nothing."""
        nodes: list[Node] = []
        node = self.roots.get(namespace)
        if node is None:
            return PrefixHit(namespace, nodes, None, 0)
        stride = self.block_size * TOKEN_BYTES
        last = min(len(packed), max_tokens * TOKEN_BYTES) - stride
        offset = 0
        append = nodes.append
        while offset <= last:
            child = node.children.get(packed[offset : offset + stride])
            if child is None:
                break
            append(child)
            node = child
            offset += stride
        return self.match_part(namespace, nodes, packed, offset // TOKEN_BYTES, max_tokens)

    def match_part(self, namespace: bytes, nodes: list[Node], packed: bytes, start: int, max_tokens: int) -> PrefixHit:
        """Return the hit of ``nodes``, which hold ``start`` tokens, with the best part of a block behind them."""
        node = nodes[-1] if nodes else self.roots.get(namespace)
        end = min(start + self.block_size, max_tokens)
        rest = packed[start * TOKEN_BYTES : end * TOKEN_BYTES]
        partial, num_tokens = _best_partial(node, rest) if rest and node is not None and node.children else (None, 0)
        return PrefixHit(namespace, nodes, partial, num_tokens)

    def root(self, namespace: bytes, mask: int = 0) -> Node:
        """Return the root of ``namespace``; a new one is not in the tree until something is inserted under it.

        Args:
            namespace: its key.
            mask: of its paths.
        """
        root = self.roots.get(namespace)
        if root is None:
            root = Node(namespace, None, (), 0)
            root.mask = mask
        assert root.mask == mask, "one namespace has one kind of blocks"
        return root

    def insert(self, parent: Node, key: bytes, blocks: tuple[Block | None, ...], tick: int) -> Node:
        """Publish ``blocks``, one for each cache group, under ``parent``, uncommitted.

        ``parent`` is in the tree, or is what :meth:`root` just returned.
        """
        if parent.parent is None and not parent.children:
            parent.attached = True
            self.roots[parent.key] = parent
        node = Node(key, parent, blocks, tick)
        for block in blocks:
            if block is not None:
                block.node = node
        parent.children[key] = node
        self.watcher.on_insert(node)
        return node

    def remove(self, node: Node) -> None:
        """Take a leaf out of the tree, and its root with it if that was the last child."""
        assert not node.children, "only leaves leave the tree"
        parent = node.parent
        assert parent is not None, "a root leaves with its last child"
        del parent.children[node.key]
        node.attached = False
        self.watcher.on_remove(node)
        if parent.parent is None and not parent.children:
            del self.roots[parent.key]
            parent.attached = False

    def clear(self) -> None:
        """Forget all paths."""
        self.roots = {}
        self.watcher.on_clear()

    def nodes(self) -> Iterator[Node]:
        """Yield all nodes but the roots, parents before children."""
        stack = list(self.roots.values())
        while stack:
            for child in stack.pop().children.values():
                yield child
                stack.append(child)


def doubtful_nodes(tree: PrefixTree, namespace: bytes, first_key: bytes, copied_from: Node | None) -> list[Node]:
    """Return all nodes of paths that begin with ``first_key``, or as that of ``copied_from`` does; parents first.

    ``copied_from`` may have left the tree: what was stored of it elsewhere may have come back under another node.
    """
    begins = [(namespace, first_key)]
    if copied_from is not None:
        while copied_from.parent is not None and copied_from.depth:
            copied_from = copied_from.parent
        begins.append((copied_from.root.key, copied_from.key))
    nodes: list[Node] = []
    for key_of_root, key in dict.fromkeys(begins):
        root = tree.roots.get(key_of_root)
        first = None if root is None else root.children.get(key)
        if first is not None:
            nodes.append(first)
    for node in nodes:  # it grows
        nodes += node.children.values()
    return nodes


def _best_partial(parent: Node, rest: bytes) -> tuple[Node | None, int]:
    """Return the child of ``parent`` that shares the most leading tokens with ``rest``, and how many."""
    best: Node | None = None
    best_tokens = 0
    first = rest[:TOKEN_BYTES]
    for child in islice(reversed(parent.children.values()), _MAX_SIBLINGS_SCANNED):
        if child.key[:TOKEN_BYTES] != first or not child.committed:  # the copy runs before this step's writes
            continue
        if None in child.blocks:  # nothing to copy
            continue
        num_tokens = 1
        while (num_tokens + 1) * TOKEN_BYTES <= len(rest) and (
            child.key[num_tokens * TOKEN_BYTES : (num_tokens + 1) * TOKEN_BYTES]
            == rest[num_tokens * TOKEN_BYTES : (num_tokens + 1) * TOKEN_BYTES]
        ):
            num_tokens += 1
        if num_tokens > best_tokens:
            best, best_tokens = child, num_tokens
    return best, best_tokens
