"""EngineStatus: what an engine is doing at a moment."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from pagefold.scheduler import GuardrailStatus

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pagefold.engine.adapters import AdapterStatus
    from pagefold.engine.kinds import Kind
    from pagefold.kv.transfers import TierUse
    from pagefold.memory.cache_size import CacheSize
    from pagefold.scheduler import Scheduler

__all__ = ["EngineStatus", "KindCount"]


class KindCount(NamedTuple):
    """How many blocks there are of a kind.

    Attributes:
        name: of the kind, as requests call it.
        codec: that encodes its blocks; empty for none.
        num_pinned: blocks that pins keep cached, each counted once.
        num_packed: blocks that hold what was kept of older chunks.
    """

    name: str
    codec: str
    num_pinned: int
    num_packed: int


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """What an engine is doing now; by default nothing, and it has no memory yet.

    Attributes:
        num_running, num_waiting: requests.
        kv_cache_usage: share of blocks held by requests, 0 to 1.
        num_free_blocks, num_cached_blocks, num_blocks: of the pool. ``free + cached == all`` when nothing runs.
        num_pinned_blocks: how many of them pins keep, whether or not somebody uses them.
        num_running_sessions, num_paused_sessions: sessions, by whether they have a request.
        num_superseded_blocks: nodes of the prefix tree whose session has no use for them any more.
        num_wasted_slots: slots in blocks of running requests that hold no token.
        kv_waste: their share of all slots in blocks held by requests, 0 to 1.
        num_unsaved_blocks: of the host's memory, that no slow tier was given yet.
        tiers_fast: of each slow tier whether it is thought to bring a block sooner than the block is computed.
        is_healthy: False after a failure that the engine does not survive.
        num_deferred: how many of those that wait could not run yet: slow tiers bring their blocks.
        num_idle_pinned_blocks: how many of the cached ones pins keep.
        num_host_blocks, num_held_host_blocks: of the host's memory: all, and those that are found there.
        caches: what else is kept, each with its bound.
        tier_uses: of each slow tier that knows it what it has.
        num_promised_blocks: that running requests are expected to take yet.
        kinds: the kinds of blocks that requests may ask for, and how many there are of each.
        guardrails: what they do, where there are targets.
        adapters: what they do; None where requests may name none.
    """

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    num_blocks: int = 0
    num_pinned_blocks: int = 0
    num_running_sessions: int = 0
    num_paused_sessions: int = 0
    num_superseded_blocks: int = 0
    num_wasted_slots: int = 0
    kv_waste: float = 0.0
    num_unsaved_blocks: int = 0
    tiers_fast: Mapping[str, bool] = field(default_factory=dict)
    is_healthy: bool = True
    num_deferred: int = 0
    num_idle_pinned_blocks: int = 0
    num_host_blocks: int = 0
    num_held_host_blocks: int = 0
    caches: tuple[CacheSize, ...] = ()
    tier_uses: Mapping[str, TierUse] = field(default_factory=dict)
    kinds: tuple[KindCount, ...] = ()
    num_promised_blocks: int = 0
    guardrails: GuardrailStatus = field(default_factory=GuardrailStatus)
    adapters: AdapterStatus | None = None

    @property
    def num_for_capacity(self) -> int:
        """How many of those that wait wait for a place or for memory."""
        return self.num_waiting - self.num_deferred

    @classmethod
    def of(  # noqa: PLR0913 - what it looks at, by name
        cls,
        scheduler: Scheduler,
        *,
        is_healthy: bool = True,
        caches: Sequence[CacheSize] = (),
        tier_uses: Mapping[str, TierUse] = MappingProxyType({}),
        kinds: Sequence[Kind] = (),
        adapters: AdapterStatus | None = None,
    ) -> EngineStatus:
        """Look at ``scheduler`` and its core. Plain reads, so any thread may."""
        core = scheduler.core
        by_pins, packed = core.pins.num_by_mask, core.pool.num_packed
        slow = core.slow
        num_wasted_slots = scheduler.num_wasted_slots
        num_deferred = len(scheduler.fetching)
        return cls(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + num_deferred,
            num_deferred=num_deferred,
            num_promised_blocks=scheduler.rule.num_promised,
            caches=tuple(caches),
            adapters=adapters,
            kinds=tuple(KindCount(one.name, one.codec, by_pins[one.mask], packed[one.mask]) for one in kinds),
            kv_cache_usage=core.usage,
            num_free_blocks=core.pool.num_free,
            num_cached_blocks=core.pool.num_cached,
            num_blocks=core.pool.num_blocks,
            num_running_sessions=scheduler.sessions.counts.num_running,
            num_paused_sessions=scheduler.sessions.counts.num_paused,
            num_superseded_blocks=core.blocks.expectations.num_superseded,
            num_pinned_blocks=core.pins.num_blocks,
            num_idle_pinned_blocks=core.pool.num_pinned,
            num_host_blocks=core.host.blocks.num_blocks,
            num_held_host_blocks=core.host.blocks.num_held,
            num_wasted_slots=num_wasted_slots,
            kv_waste=min(1.0, num_wasted_slots / max(1, core.num_active * core.block_size)),
            num_unsaved_blocks=len(slow.host.blocks.unsaved),
            tiers_fast={tier: slow.arbiter.is_fast(tier) for tier in tuple(slow.arbiter.links)},
            is_healthy=is_healthy,
            guardrails=scheduler.guardrails.status(is_idle=not scheduler.has_requests),
            tier_uses=tier_uses,
        )
