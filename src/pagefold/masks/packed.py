"""PACKED: what layers keep that have a mask, in the words of the cache."""

from __future__ import annotations

from pagefold.kv import KeepRule
from pagefold.masks.rule import CHUNK

__all__ = ["PACKED"]

PACKED = KeepRule(CHUNK, is_chunked=True, num_before=1, packs=True)
"""The rule of a masked layer: it keeps chunks whole that a query may see whole, and packs what is kept of others."""
