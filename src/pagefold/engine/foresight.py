"""Foresight: what a prompt would find in the cache if it were sent now. Nothing is held, counted or brought for it."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.kv import KVCore

__all__ = ["Foreseen", "foresee"]


class Foreseen(NamedTuple):
    """What a prompt would find.

    Attributes:
        namespace: key of the namespace that it would be sought in.
        num_hit_tokens: that would be found.
        num_host_tokens: those of them that the host holds, and the device does not.
        num_lost_tokens: behind them, cached but for a window.
        has_tiers: whether the device has tiers behind it.
        now_s: when it was sought, on the engine's clock.
    """

    namespace: bytes
    num_hit_tokens: int
    num_host_tokens: int
    num_lost_tokens: int
    has_tiers: bool
    now_s: float


def foresee(core: KVCore, namespace: bytes, token_ids: Sequence[int], mask: int, now_s: float) -> Foreseen:
    """Return what device and host have of a prompt. Disks and pools are not asked.

    Args:
        core: the KV core.
        namespace: key of the prompt's namespace.
        token_ids: the prompt.
        mask: by which mask older tokens would be kept.
        now_s: the time.
    """
    if not core.publishes:
        return Foreseen(namespace, 0, 0, 0, core.host.is_on, now_s)
    hit = core.match(namespace, array("i", token_ids).tobytes(), len(token_ids) - 1, mask=mask)
    num_tokens = hit.num_blocks * core.block_size + hit.num_partial_tokens
    num_host = hit.num_behind * core.block_size
    return Foreseen(namespace, num_tokens, num_host, hit.num_lost * core.block_size, core.host.is_on, now_s)
