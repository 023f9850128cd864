"""Continuations: what followed some tokens before, in the texts that the prefix tree holds.

An index over the nodes of the tree: of each of their tokens, where the grams were seen last that end with it. It has no
texts of its own. What it finds it reads from nodes that are in the tree, under the namespace that asks: so a tenant
finds its own texts only, and nothing that was evicted or forgotten.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

from pagefold.kv.gram_table import GRAM_SIZES, GramTable, num_common
from pagefold.kv.tree import TOKEN_BYTES, NodeWatcher

if TYPE_CHECKING:
    from pagefold.kv.block import Node

__all__ = ["MAX_COMPARED", "Continuation", "Continuations"]

MAX_COMPARED = 32
"""How many tokens before a place are compared: what agrees in so many is as good as what agrees in more."""

_MAX_SIBLINGS_SCANNED = 16
_MAX_PLACES = 2**31 - 1
_NODE_BYTES = 8


class Continuation(NamedTuple):
    """What followed before.

    Attributes:
        packed: the tokens that followed, 4 bytes each.
        num_matched: how many tokens before them agree with those of who asks; at most ``MAX_COMPARED``.
    """

    packed: bytes
    num_matched: int


class Continuations(NodeWatcher):
    """An index of bounded size over the nodes of a prefix tree.

    Args:
        num_blocks: how many nodes it knows at most; of more, the newest.
        block_size: tokens a node.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        num_nodes = max(1, min(num_blocks, _MAX_PLACES // block_size))
        self._grams = GramTable(num_nodes * block_size)
        self._nodes: list[Node | None] = [None] * num_nodes
        self._next = 0

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes, whatever it holds."""
        return self._grams.num_bytes + len(self._nodes) * _NODE_BYTES

    def on_insert(self, node: Node) -> None:
        """Note a node that was published."""
        at = self._next
        self._next = (at + 1) % len(self._nodes)
        self._nodes[at] = node
        node.index_slot = at
        before = _before(node, GRAM_SIZES[0] - 1)
        begin = at * self._block_size
        places = range(begin, begin + self._block_size)
        self._grams.note(before + node.key, len(before) // TOKEN_BYTES, places, _seed(node.root.key))

    def on_remove(self, node: Node) -> None:
        """Forget a node that has left the tree."""
        if self._nodes[node.index_slot] is node:
            self._nodes[node.index_slot] = None

    def on_clear(self) -> None:
        """Forget all nodes."""
        self._nodes = [None] * len(self._nodes)
        self._grams.clear()

    def after(self, namespace: bytes, packed: bytes, num_tokens: int) -> Continuation | None:
        """Return what followed the last tokens of ``packed`` where these were seen last, by the longest gram of them.

        Args:
            namespace: :meth:`Namespace.key`; of others nothing is found.
            packed: tokens, 4 bytes each: the last ``MAX_COMPARED`` are looked at.
            num_tokens: how many to return at most.
        """
        packed = packed[-MAX_COMPARED * TOKEN_BYTES :]
        for place in self._grams.find(packed, _seed(namespace)):
            node = self._nodes[place // self._block_size]
            if node is None or node.root.key != namespace:
                continue
            end = (place % self._block_size + 1) * TOKEN_BYTES
            num_matched = num_common(packed, _before(node, MAX_COMPARED) + node.key[:end])
            if num_matched < GRAM_SIZES[-1]:
                continue
            found = _following(node, end, num_tokens)
            if found:
                return Continuation(found, num_matched)
        return None

    def along(self, tail: Node, rest: bytes, num_tokens: int) -> Continuation | None:
        """Return what others published behind a path: they have all its tokens, and ``rest`` behind them.

        Args:
            tail: the last node of the path, or its root.
            rest: packed tokens behind it, less than a block.
            num_tokens: how many to return at most.
        """
        for child in islice(reversed(tail.children.values()), _MAX_SIBLINGS_SCANNED):
            if child.key.startswith(rest):
                return Continuation(_following(child, len(rest), num_tokens), MAX_COMPARED)
        return None


def _seed(namespace: bytes) -> int:
    return crc32(namespace)


def _before(node: Node, num_tokens: int) -> bytes:
    """Return the packed tokens before a node, so many or a few more; all of them if there are fewer."""
    before = b""
    parent = node.parent
    while parent is not None and parent.parent is not None and len(before) < num_tokens * TOKEN_BYTES:
        before = parent.key + before
        parent = parent.parent
    return before[-num_tokens * TOKEN_BYTES :]


def _following(node: Node, begin: int, num_tokens: int) -> bytes:
    """Return the packed tokens from byte ``begin`` of a node on, and of the newest nodes behind it."""
    found = node.key[begin:]
    while len(found) < num_tokens * TOKEN_BYTES and node.children:
        node = next(reversed(node.children.values()))
        found += node.key
    return found[: num_tokens * TOKEN_BYTES]
