"""What a block is called outside the device: digests of its path.

Inside, a prefix is found by its exact tokens. A name must be short, survive a restart and mean the same on another
machine: it is a digest of the block's whole path, its namespace and all tokens up to its end (BLAKE2b, RFC 7693,
256 bits). Two paths have the same digest only if that collides; the block's own tokens are compared as well.

Where a model has several cache groups, a path has a block of each: its digest is that of the path in the first group,
and differs from it in the last byte in the others.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pagefold.kv.block import Node

__all__ = ["BlockName", "digest_of", "in_group", "is_of_path", "name_of", "names_behind", "path_digest", "root_digest"]

_DIGEST_BYTES = 32


class BlockName(NamedTuple):
    """What a block is, outside the device.

    Attributes:
        digest: names its path, itself included, and its cache group; 32 bytes.
        parent: names the path before it; 32 bytes.
        namespace: names the empty path of its namespace; 32 bytes.
        key: its own packed tokens.
        group: the index of its cache group.
    """

    digest: bytes
    parent: bytes
    namespace: bytes
    key: bytes
    group: int = 0

    @property
    def path(self) -> bytes:
        """Names its path, whatever the group."""
        return in_group(self.digest, self.group)

    def of_group(self, group: int) -> BlockName:
        """Return the name of the block that another group has of the same path."""
        return self._replace(digest=in_group(self.path, group), group=group)


def root_digest(namespace: bytes) -> bytes:
    """Return what names the empty path of a namespace, given its exact key."""
    return blake2b(namespace, digest_size=_DIGEST_BYTES).digest()


def path_digest(parent: bytes, key: bytes) -> bytes:
    """Return what names the path of ``parent`` and one more block, whose packed tokens are ``key``."""
    return blake2b(parent + key, digest_size=_DIGEST_BYTES).digest()


def in_group(digest: bytes, group: int) -> bytes:
    """Return what names a path's block of a cache group, given what names the path; and the other way round."""
    return digest if not group else digest[:-1] + bytes([digest[-1] ^ group])


def is_of_path(digest: bytes, path: bytes) -> bool:
    """Whether ``digest`` names a block of the path that ``path`` names, of whatever cache group."""
    return digest[:-1] == path[:-1]


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


def name_of(node: Node, group: int = 0) -> BlockName:
    """Return the name of a node's block of a cache group; the node is no root."""
    assert node.parent is not None, "a root has no block"
    digest = in_group(digest_of(node), group)
    return BlockName(digest, node.parent.digest, digest_of(node.root), node.key, group)


def names_behind(namespace: bytes, parent: bytes, packed: bytes, stride: int) -> list[BlockName]:
    """Return the names of the whole blocks of ``packed``, which come behind the path ``parent``.

    Args:
        namespace: digest of the empty path.
        parent: digest of the path before.
        packed: tokens, packed.
        stride: bytes of a block's packed tokens.
    """
    names: list[BlockName] = []
    for offset in range(0, len(packed) - stride + 1, stride):
        key = packed[offset : offset + stride]
        digest = path_digest(parent, key)
        names.append(BlockName(digest, parent, namespace, key))
        parent = digest
    return names
