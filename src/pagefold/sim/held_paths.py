"""HeldPaths: what simulated replicas have told of their prefix trees; see :class:`pagefold.routing.Holdings`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["HeldPaths"]


class HeldPaths:
    """Who holds which path, by its digest."""

    def __init__(self) -> None:
        self._holders: dict[bytes, set[str]] = {}

    def stored(self, replica: str, digest: bytes) -> None:
        """A replica holds this now."""
        self._holders.setdefault(digest, set()).add(replica)

    def removed(self, replica: str, digest: bytes) -> None:
        """A replica holds this no more."""
        holders = self._holders.get(digest, set())
        holders.discard(replica)
        if not holders:
            self._holders.pop(digest, None)

    def match(self, block_hashes: Sequence[bytes]) -> dict[str, int]:
        """Return how many of a prompt's blocks, from the first on, each replica holds; those with none left out."""
        found: dict[str, int] = {}
        left: set[str] | None = None
        for each in block_hashes:
            holders = self._holders.get(each, set())
            left = holders.copy() if left is None else left & holders
            if not left:
                break
            for replica in left:
                found[replica] = found.get(replica, 0) + 1
        return found

    def is_known(self, replica: str) -> bool:  # noqa: ARG002
        """Whether it is known what a replica holds: here nothing is ever lost."""
        return True

    def holds(self, replica: str) -> set[bytes]:
        """Return all that a replica holds."""
        return {digest for digest, holders in self._holders.items() if replica in holders}
