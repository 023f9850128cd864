"""CacheSize: what a cache of the server keeps, beside what it may keep."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CacheSize"]


@dataclass(frozen=True, slots=True)
class CacheSize:
    """What one cache keeps now. Each one in the server is bounded.

    Attributes:
        name: of the cache.
        num_bytes: what it keeps takes no more.
        max_bytes: what it may keep takes no more.
    """

    name: str
    num_bytes: int
    max_bytes: int
