"""HotPrefixes: which prefixes were found most, by their lengths and the digests of their paths; never their text.

A prefix is named when what a request has found ends with it: what follows differs, so others may find as much. From
then on each request counts that finds all of it, however much more it finds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from pagefold.kv import Namespace
from pagefold.kv.names import digest_of

if TYPE_CHECKING:
    from pagefold.kv.block import Node

__all__ = ["HotPrefix", "HotPrefixes"]

_MOST = 256


@dataclass(slots=True)
class HotPrefix:
    """A prefix that was found.

    Attributes:
        name: the begin of its path's digest, in hexadecimal digits.
        tenant: whose blocks those are.
        num_blocks: of its path.
        num_finds: how many requests found all of it, since it is remembered.
        last_s: when it was found last.
        is_cached: whether its last block still is.
    """

    name: str
    tenant: str
    num_blocks: int
    num_finds: int = 0
    last_s: float = 0.0
    is_cached: bool = True

    @property
    def num_saved_blocks(self) -> int:
        """How many blocks were not computed thanks to it."""
        return self.num_finds * self.num_blocks


class HotPrefixes:
    """The prefixes that saved most, of those that were found lately. Whoever calls holds a lock."""

    def __init__(self) -> None:
        self._found: dict[bytes, HotPrefix] = {}  # by digest

    def find(self, tail: Node, num_blocks: int, now_s: float) -> None:
        """A request has found the first blocks of a path.

        Args:
            tail: a node of the path, behind them or the last of them.
            num_blocks: how many.
            now_s: the time.
        """
        node: Node | None = tail
        while node is not None and node.depth >= num_blocks:
            node = node.parent
        if node is not None and node.parent is not None and digest_of(node) not in self._found:
            self._add(node)
        while node is not None and node.parent is not None:
            known = self._found.get(node.digest)
            if known is not None:
                known.num_finds += 1
                known.last_s, known.is_cached = now_s, True
            node = node.parent

    def gone(self, node: Node) -> None:
        """A node has left the tree: nobody can go on from it."""
        known = self._found.get(node.digest)
        if known is not None:
            known.is_cached = False

    def back(self, node: Node) -> None:
        """A node was published, perhaps once more."""
        known = self._found.get(node.digest)
        if known is not None:
            known.is_cached = True

    def clear(self) -> None:
        """Nothing is cached any more."""
        for known in self._found.values():
            known.is_cached = False

    def hottest(self, num: int) -> list[HotPrefix]:
        """Return copies of those that saved most, the best first."""
        best = sorted(self._found.values(), key=lambda one: one.num_saved_blocks, reverse=True)
        return [replace(one) for one in best[:num]]

    def _add(self, node: Node) -> None:
        if len(self._found) >= _MOST:  # the half that saved least makes room: seldom, and in one go
            by_worth = sorted(self._found.items(), key=lambda item: (item[1].is_cached, item[1].num_saved_blocks))
            for digest, _ in by_worth[: _MOST // 2]:
                del self._found[digest]
        tenant = Namespace.from_key(node.root.key).tenant
        self._found[node.digest] = HotPrefix(node.digest.hex()[:8], tenant, node.depth + 1)
