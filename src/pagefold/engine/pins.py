"""What an engine tells about its pins."""

from __future__ import annotations

from dataclasses import dataclass
from math import isinf
from typing import TYPE_CHECKING

from pagefold.kv import Namespace

if TYPE_CHECKING:
    from pagefold.events import PinCause
    from pagefold.kv import KVCore

__all__ = ["GonePin", "PinReport", "PinStatus", "report_pins"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PinStatus:
    """A pin, now.

    Attributes:
        pin_id: the id of the request that warmed it, or brought the hint.
        tenant, cache_salt: who can find its blocks.
        num_tokens: of its prefix; whoever goes on behind them finds all that is needed.
        num_blocks: that it keeps, alone or with others: fewer than these tokens fill where not all are kept.
        retention_priority: what is left of it.
        age_s: seconds since it was pinned.
        ttl_left_s: seconds until it expires; None for never.
        is_hint: whether a client's breakpoint has made it, and nobody was promised it.
    """

    pin_id: str
    tenant: str
    cache_salt: str
    num_tokens: int
    num_blocks: int
    retention_priority: float
    age_s: float
    ttl_left_s: float | None
    is_hint: bool


@dataclass(frozen=True, slots=True)
class GonePin:
    """A pin that is no more, and why."""

    pin_id: str
    num_blocks: int
    cause: PinCause


@dataclass(frozen=True, slots=True, kw_only=True)
class PinReport:
    """All pins.

    Attributes:
        pins: those that are there.
        dropped: the last that went, oldest first.
        num_blocks: how many blocks pins keep, each counted once.
        max_blocks: how many they may keep.
    """

    pins: tuple[PinStatus, ...]
    dropped: tuple[GonePin, ...]
    num_blocks: int
    max_blocks: int


def report_pins(core: KVCore, now_s: float) -> PinReport:
    """Return what there is to tell of ``core.pins``, after those are gone whose time has come."""
    pins = core.pins
    pins.expire(now_s)
    told: list[PinStatus] = []
    for pin in pins:
        namespace = Namespace.from_key(pin.namespace)
        told.append(
            PinStatus(
                pin_id=pin.pin_id,
                tenant=namespace.tenant,
                cache_salt=namespace.cache_salt,
                num_tokens=(pin.tail.depth + 1) * core.block_size,
                num_blocks=pin.num_blocks,
                retention_priority=pins.priority_at(pin, now_s),
                age_s=now_s - pin.pinned_at_s,
                ttl_left_s=None if isinf(pin.expires_at_s) else pin.expires_at_s - now_s,
                is_hint=pin.by is not None,
            )
        )
    return PinReport(
        pins=tuple(told),
        dropped=tuple(GonePin(gone.pin_id, gone.num_blocks, gone.cause) for gone in pins.dropped),
        num_blocks=pins.num_blocks,
        max_blocks=pins.max_blocks,
    )
