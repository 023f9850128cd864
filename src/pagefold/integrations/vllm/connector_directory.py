"""HostDirectory: which host block holds which block of a path, by a :class:`~pagefold.kv.KVCore` of its own.

A block's key is vLLM's hash of it, which covers its tokens, all tokens before it, its adapter, its pictures and its
salt.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from pagefold.kv import TOKEN_BYTES, KVCore, RequestFacts
from pagefold.kv.names import name_of, names_behind, root_digest
from pagefold.kv.policies import make_policy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.kv import BlockName, PrefixHit, Promise, SequenceCache
    from pagefold.kv.block import Node

__all__ = ["KEY_BYTES", "HostDirectory", "Promised", "host_id_of", "path_of", "written_part"]

KEY_BYTES = 32
"""Of a block's key here: as many as a digest has."""

_KEY_TOKENS = KEY_BYTES // TOKEN_BYTES
"""What the core takes a key for: so many packed tokens."""


def path_of(hashes: Sequence[bytes], num_blocks: int, hashes_per_block: int = 1, before: bytes = b"") -> bytes:
    """Return the keys of the first blocks of a request, one behind the other.

    Args:
        hashes: vLLM's, each of which covers all tokens before it.
        num_blocks: how many blocks.
        hashes_per_block: vLLM may hash parts of a block: the last one's covers the block.
        before: the keys of the first of them, if they are known.
    """
    known = len(before) // KEY_BYTES
    if known >= num_blocks:
        return before[: num_blocks * KEY_BYTES]
    keys = (bytes(hashes[(index + 1) * hashes_per_block - 1]) for index in range(known, num_blocks))
    return before + b"".join(
        key if len(key) == KEY_BYTES else blake2b(key, digest_size=KEY_BYTES).digest() for key in keys
    )


class Promised(NamedTuple):
    """Host blocks that were taken for blocks of a path, and promised: nobody finds them yet.

    Attributes:
        cache: holds them, and the path before them.
        promise: of them.
        path: keys up to the last of them.
        num_before: blocks of the path before them.
    """

    cache: SequenceCache
    promise: Promise
    path: bytes
    num_before: int

    @property
    def host_ids(self) -> list[int]:
        """The host blocks, in order of the path."""
        return [*self.cache.tables[0].block_ids[self.num_before :]]


class HostDirectory:
    """The host blocks of one engine.

    Args:
        num_host_blocks: how many there are.
        policy: who makes room first, by name.
        layout: names how a block's bytes are to be read.

    Attributes:
        core: which of them holds what.
        namespace: the layout, as the core has it.
    """

    def __init__(self, num_host_blocks: int, policy: str, layout: bytes) -> None:
        self.core = KVCore(num_host_blocks, block_size=_KEY_TOKENS, policy=make_policy(policy, num_host_blocks))
        self.namespace = layout
        self._root = root_digest(layout)

    def match(self, path: bytes) -> PrefixHit:
        """Return what there is of a path, whole blocks alone; the last ones are perhaps not written yet."""
        hit = self.core.match(self.namespace, path, len(path) // TOKEN_BYTES)
        return hit._replace(partial=None, num_partial_tokens=0)

    def written(self, path: bytes) -> list[Node]:
        """Return the nodes of a path that are written, in a row from the first on."""
        return written_part(self.match(path))

    def promise(self, hit: PrefixHit, path: bytes, num_new: int, *, owner: str = "") -> Promised | None:
        """Take host blocks for the blocks of a path behind ``hit``, as many of them as there is room for.

        None, with nothing held, if there is room for none.
        """
        num_before = len(hit.nodes)
        cache, _ = self.core.acquire(hit, owner=owner)
        num_new = min(num_new, self.core.num_available)
        while num_new and not self.core.extend(cache, num_before * _KEY_TOKENS, (num_before + num_new) * _KEY_TOKENS):
            num_new //= 2
        path = path[: (num_before + num_new) * KEY_BYTES]
        promise = self.core.publishing.promise(cache, path, len(path) // TOKEN_BYTES) if num_new else None
        if promise is None:
            cache.facts = RequestFacts(is_repeat=True)  # nobody has used it by that
            self.core.release(cache)
            return None
        return Promised(cache, promise, path, num_before)

    def keep_first(self, promised: Promised, num: int) -> None:
        """Let the first so many of what was promised be found, and give the other host blocks back; hold the path."""
        cache, publishing = promised.cache, self.core.publishing
        publishing.abandon(promised.promise)
        num_tokens = (promised.num_before + num) * _KEY_TOKENS
        if num and cache.tail is not None:
            again = publishing.promise(cache, promised.path, num_tokens)
            if again is not None:
                publishing.commit(again)
        self.core.shrink(cache, num_tokens)

    def names_behind(self, path: bytes, nodes: list[Node]) -> list[BlockName]:
        """Return the names of a path's blocks behind its first ``nodes``."""
        parent = name_of(nodes[-1]).digest if nodes else self._root
        return names_behind(self._root, parent, path[len(nodes) * KEY_BYTES :], KEY_BYTES)


def written_part(hit: PrefixHit) -> list[Node]:
    """Return the first nodes of a hit that are written."""
    nodes = hit.nodes
    return nodes[: next((at for at, node in enumerate(nodes) if not node.committed), len(nodes))]


def host_id_of(node: Node) -> int:
    """Return the host block that holds a node's block."""
    block = node.blocks[0]
    assert block is not None, "all of a path is kept"
    return block.block_id
