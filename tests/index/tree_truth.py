"""What an index should have of a core: its tree, walked."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pagefold.index import DEFAULT_SEED
from pagefold.index.block_hash import block_hash, first_parent
from pagefold.kv import KVCore, Namespace
from pagefold.observe.kv_event_batch import extra_keys_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagefold.kv.block import Node

_MASK = 2**64 - 1


class Known(NamedTuple):
    """A node that others may find, and the hashes of its path."""

    node: Node
    hashes: tuple[bytes, ...]

    @property
    def groups(self) -> set[int]:
        return {group for group, block in enumerate(self.node.blocks) if block is not None}

    def path(self) -> list[Node]:
        nodes: list[Node] = []
        node = self.node
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


def known_of(core: KVCore, seed: str = DEFAULT_SEED) -> Iterator[Known]:
    """Yield every node that is written."""
    stack = [Known(root, ()) for root in core.tree.roots.values()]
    while stack:
        before = stack.pop()
        for child in before.node.children.values():
            keys = extra_keys_of(Namespace.from_key(child.root.key)).of_block(child.depth)
            parent = before.hashes[-1] if before.hashes else first_parent(seed)
            own = block_hash(parent, tuple(memoryview(child.key).cast("i")), keys)
            known = Known(child, (*before.hashes, own))
            stack.append(known)
            if child.committed:
                yield known


def holds_of(core: KVCore, seed: str = DEFAULT_SEED) -> dict[int, set[int]]:
    """Return what ``PrefixIndex.holds`` should."""
    held = {int.from_bytes(known.hashes[-1], "big") & _MASK: known.groups for known in known_of(core, seed)}
    return {key: groups for key, groups in held.items() if groups}
