"""TenantBlocks: what one tenant has of the device's blocks, and its quota of them."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["KVQuota", "TenantBlocks"]

_NO_CAP = 2**62


class KVQuota(NamedTuple):
    """A tenant's quota of the device's blocks.

    Attributes:
        floor_blocks: so many of its cached blocks others cannot have evicted.
        cap_blocks: it never has more; None for any number.
    """

    floor_blocks: int = 0
    cap_blocks: int | None = None


class TenantBlocks:
    """What one tenant has of the device's blocks.

    Attributes:
        name: the tenant's; empty for all that have no quota.
        floor_blocks, cap_blocks: of its quota.
        num_blocks: all that it has: held by requests or transfers, or cached.
        num_cached: how many of them are CACHED.
        num_pinned: how many of those a pin keeps.
        num_withheld: how many that could be evicted others cannot have.
    """

    __slots__ = ("cap_blocks", "floor_blocks", "name", "num_blocks", "num_cached", "num_pinned", "num_withheld")

    def __init__(self, name: str, quota: KVQuota) -> None:
        self.name = name
        self.floor_blocks = quota.floor_blocks
        self.cap_blocks = _NO_CAP if quota.cap_blocks is None else quota.cap_blocks
        self.num_blocks = self.num_cached = self.num_pinned = self.num_withheld = 0

    @property
    def has_cap(self) -> bool:
        """Whether there is a number of blocks that it never has more than."""
        return self.cap_blocks != _NO_CAP

    @property
    def num_above_floor(self) -> int:
        """How many blocks more than its floor it has, or 0."""
        return max(0, self.num_blocks - self.floor_blocks)

    @property
    def room(self) -> int:
        """How many blocks its cap lets it get, with those that would be evicted of its own; pins stay."""
        return self.cap_blocks - self.num_blocks + self.num_cached - self.num_pinned

    def withheld(self, num_evictable: int) -> int:
        """Return how many of its cached blocks others cannot have, if so many can be evicted at all."""
        return max(0, num_evictable - self.num_above_floor)
