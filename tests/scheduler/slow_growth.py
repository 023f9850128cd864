"""The slow twin of ``ExpectedGrowth``: the same two bounds as formulas over lists, with no sums kept.

Of groups that keep all. It is told what the rule is told, and has nothing of it but its forecasts.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from pagefold.kv import NO_MASK

if TYPE_CHECKING:
    from pagefold.request import Request
    from pagefold.scheduler import Scheduler

__all__ = ["End", "KeptEnds", "has_room", "most_at_once"]


class End(NamedTuple):
    """Where a sequence ends: in which lot of steps, and with how many blocks."""

    lot: int
    num_blocks: int


class KeptEnds:
    """Where each that runs ends, written down anew whenever the rule is told of it.

    Attributes:
        tokens: how many each has at its end, as was last forecast.
        ends: where that is.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.tokens: dict[Request, int] = {}
        self.ends: dict[Request, End] = {}
        rule = scheduler.rule
        note, forget = rule.note, rule.forget

        def hear(request: Request, step_id: int) -> None:
            note(request, step_id)
            self._note(request, step_id)

        def hear_of_end(request: Request) -> None:
            forget(request)
            self.tokens.pop(request, None)
            self.ends.pop(request, None)

        rule.note, rule.forget = hear, hear_of_end

    def _note(self, request: Request, step_id: int) -> None:
        end = self.tokens.get(request)
        if end is None or request.num_tokens > end:
            likely = self._scheduler.rule._forecasts[request].likely_tokens
            end = self.tokens[request] = max(request.num_tokens, request.num_prompt_tokens + likely)
        core, num_new = self._scheduler.core, self._scheduler.limits.max_num_batched_tokens
        if core.packing.is_on and request.mask != NO_MASK:
            num_new = min(num_new, core.packing.short_step)
        num_blocks = core.num_blocks_for(end, num_new, is_expected=True, mask=request.mask)
        num_blocks += len(request.forks) * (_own(self._scheduler, request, end) + core.num_groups)
        self.ends[request] = End((step_id + end - request.num_tokens) // core.block_size, num_blocks)

    def by_lot(self) -> dict[int, tuple[int, int]]:
        """Return how many end in each lot of steps, and with how many blocks in all."""
        lots = {end.lot for end in self.ends.values()}
        return {
            lot: (len(there), sum(end.num_blocks for end in there))
            for lot in lots
            if (there := [end for end in self.ends.values() if end.lot == lot])
        }

    def all_at_their_ends(self) -> int:
        """Return how many blocks those that run take yet: for tokens without a place, and to copy a shared one."""
        core = self._scheduler.core
        total = 0
        for request in self._scheduler.running:
            end, cache = self.tokens[request], request.cache
            for table in cache.tables:
                total += max(0, math.ceil(end / core.block_size) - len(table.block_ids)) + cache.may_share_tail
            total += len(request.forks) * (_own(self._scheduler, request, end) + core.num_groups)
        return total


def most_at_once(ends: list[End], coming: End, num_seqs: int, growth_a_lot: int, now: int) -> int:
    """Return the most blocks that are held in any lot up to the end of who is coming."""

    def held(end: End, lot: int, seqs: int = 1) -> int:
        if max(end.lot, now) < lot:
            return 0
        return end.num_blocks - seqs * growth_a_lot * max(0, max(end.lot, now) - lot - 1)

    lots = {max(end.lot, now) for end in ends} | {coming.lot}
    return max(sum(held(end, lot) for end in ends) + held(coming, lot, num_seqs) for lot in lots if lot <= coming.lot)


def has_room(kept: KeptEnds, request: Request, step_id: int) -> bool:
    """Whether ``request``, which waits, may be let in beside those that run, as far as growth is concerned."""
    scheduler = kept._scheduler
    core, rule, num_new = scheduler.core, scheduler.rule, scheduler.limits.max_num_batched_tokens
    if not scheduler.running:
        return True
    forecast = rule._forecast_of(request).most_tokens
    end = min(request.stop.max_total_tokens, max(request.num_prompt_tokens + forecast, request.num_tokens + 1))
    needed = core.num_blocks_for(end, num_new, is_expected=True, mask=request.mask)
    needed += len(request.forks) * (_own(scheduler, request, end) + core.num_groups)
    needed += int(core.pool.num_blocks * 0.01)
    hit = core.match(request.namespace, request.packed(), request.max_hit_tokens, mask=request.mask)
    shared = [block for block in core.rules.of(hit.mask).blocks_of(hit) if block.num_table_refs]
    promised = kept.all_at_their_ends()
    if needed + promised - len(shared) <= core.num_available_to(request.tenant) + core.pool.num_pinned:
        return True
    if rule.name == "max_tokens":
        return False
    lot = (step_id + end - request.num_tokens) // core.block_size
    a_lot = 0 if core.trims else core.num_groups
    now = step_id // core.block_size
    coming = End(lot, needed)
    num_blocks = core.pool.num_blocks - core.quotas.num_withheld_from(request.tenant)
    return most_at_once([*kept.ends.values()], coming, request.num_seqs, a_lot, now) <= num_blocks


def _own(scheduler: Scheduler, request: Request, end: int) -> int:
    core, num_new = scheduler.core, scheduler.limits.max_num_batched_tokens
    counts = [
        core.num_blocks_for(num_tokens, num_new, is_expected=True, mask=request.mask)
        for num_tokens in (end, request.num_prompt_tokens)
    ]
    return counts[0] - counts[1]
