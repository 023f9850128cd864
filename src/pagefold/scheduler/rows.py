"""Rows: the one place where a plan's rows are written. It runs for every request in every step, so it is one loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.kv import num_blocks_for
from pagefold.scheduler.extras import plan_extras
from pagefold.scheduler.samples import plan_samples
from pagefold.steps import AdaptedRow, DraftedRow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.beams import BeamGroup
    from pagefold.kv import KVCore
    from pagefold.request import Request
    from pagefold.scheduler.admission import Admission
    from pagefold.scheduler.guardrails import Guardrails
    from pagefold.scheduler.limits import SchedulerLimits
    from pagefold.scheduler.queues import Queues
    from pagefold.scheduler.relief import Relief
    from pagefold.scheduler.step_in_flight import StepInFlight

__all__ = ["RowPlanner"]


class RowPlanner:
    """Plans who computes which tokens.

    Args:
        core: the KV core.
        queues: who runs.
        relief: finds memory for those that run.
        admission: lets those in that wait.
        limits: of a step.
        guardrails: say how many tokens of prompts a step may compute.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the parts that it holds together
        self,
        core: KVCore,
        queues: Queues,
        relief: Relief,
        admission: Admission,
        limits: SchedulerLimits,
        guardrails: Guardrails,
    ) -> None:
        self._core = core
        self._queues = queues
        self._relief = relief
        self._admission = admission
        self._max_num_batched_tokens = limits.max_num_batched_tokens
        self._most_of_one = limits.prefills.long_threshold or limits.max_num_batched_tokens
        self._guardrails = guardrails

    def plan(self, step: StepInFlight) -> None:  # noqa: C901, PLR0912, PLR0915 - for each row of each step: calls cost
        """Plan a row for everybody who runs, preempting from the end where memory is short, and then for who is let in.

        Each of those that run leaves one token of the budget for everyone behind it, so that a long prompt never stops
        those that decode. So do drafts. What is left admits. What a row with drafts fills is published when it is known
        which of them count. Of prompts no more is computed than the guardrails allow, but for one token of each that
        runs already.

        Where tokens are reserved for the head of the queue, prompts and drafts of those behind it in order leave them.
        Where somebody made way for it, no drafts take a block: nobody goes in vain.

        A step that is planned ahead ends where nobody may be preempted: it has fewer rows than requests run then.
        """
        plan, queues = step.plan, self._queues
        running = queues.running
        block_size, packs = self._core.block_size, self._core.packing.is_on
        add_request, add_token = step.requests.append, plan.token_ids.append
        add_start, add_num, add_tables = plan.starts.append, plan.num_tokens.append, plan.tables.append
        add_row, add_sampling, add_sample = plan.sampling_rows.append, plan.sampling.append, step.samples.append
        add_seed, add_draw = plan.seeds.append, plan.draws.append
        budget = self._max_num_batched_tokens
        num_reserved, reserved_for = step.num_reserved, step.reserved_for
        prompt_budget = step.prefill_cap_tokens = self._guardrails.pacing.prefill_cap_tokens
        row = 0
        while True:
            if row == len(running):  # all that ran before have theirs
                if not queues.waiting:
                    return
                step.waits_for = self._admission.admit(step, min(budget, prompt_budget))
                if step.waits_for is not None:
                    return
                step.num_admitted += 1
                num_reserved = 0
            request = running[row]
            token_ids = request.token_ids
            start = request.num_computed_tokens
            num_tokens = min(len(token_ids) - start, budget - (len(running) - row - 1))
            cache = request.cache
            assert cache is not None
            is_plain = request.is_plain
            if not is_plain and request.beams is not None and not self._extend_beams(step, row, request.beams):
                if step.is_ahead:
                    return
                continue
            if num_tokens > 1:
                num_tokens = min(num_tokens, self._most_of_one)
                if num_tokens > prompt_budget:
                    num_tokens = max(1, prompt_budget)
                if num_reserved and request.order > reserved_for:
                    num_left = min(budget - (len(running) - row - 1), prompt_budget) - num_reserved
                    num_tokens = max(1, min(num_tokens, num_left))
                num_tokens = self._core.lodgers.limit(cache, start, num_tokens, len(token_ids))
            end = start + num_tokens
            needs_blocks = end > cache.capacity or cache.may_share_tail
            if packs and not needs_blocks:
                needs_blocks = self._core.packing.needs_grant(cache, end)
            if needs_blocks and not self._relief.extend(step, request, start, end):
                if step.is_ahead:
                    return
                continue  # it was the last, and went itself
            budget -= num_tokens
            num_drafts = 0
            drafts = request.drafts
            if drafts:
                request.drafts = ()
                num_behind = len(running) - row - 1
                num_left = budget - num_behind - (num_reserved if request.order > reserved_for else 0)
                num_drafts = self._num_drafts(step, request, min(len(drafts), num_left), num_behind)
            add_request(request)
            if num_tokens == 1:
                add_token(token_ids[start])
            else:
                plan.token_ids.extend(token_ids[start:end])
            add_start(start)
            add_num(num_tokens + num_drafts)
            add_tables(cache.tables)
            if request.adapter:
                plan.adapted.append(AdaptedRow(row, request.adapter))
            if num_drafts:
                self._plan_drafts(step, request, drafts[:num_drafts])
                budget -= num_drafts
            elif end == len(token_ids):
                add_row(row)
                add_sampling(request.sampling)
                add_seed(request.seed)
                add_draw(end - request.num_prompt_tokens)
                add_sample(request)
                if request.forks:
                    plan_samples(step, request)
            else:
                step.partial.append(request)
            if not is_plain:
                plan_extras(plan, request)
            if start < request.num_prompt_tokens or num_tokens > 1 or start < request.max_computed_tokens:
                prompt_budget -= num_tokens
                step.num_prefill_rows += 1
                step.num_prefill_tokens += num_tokens
                step.num_recomputed_tokens += max(0, min(end, request.max_computed_tokens) - start)
            if end // block_size > cache.num_published and cache.tail is not None and not num_drafts:
                self._promise(step, request, end)
            row += 1

    def _extend_beams(self, step: StepInFlight, row: int, group: BeamGroup[Request]) -> bool:
        """Find memory for all beams of a group before the first of them is planned: later none of them may have to go.

        False when they had to go; or somebody, while a step is in flight.
        """
        running = self._queues.running
        if not group.has_begun or running[row] is not group.seats[0]:
            return True
        assert running[row : row + len(group.seats)] == group.seats, "beams come one behind the other"
        return all(self._relief.extend(step, seat, seat.num_computed_tokens, seat.num_tokens) for seat in group.seats)

    def _num_drafts(self, step: StepInFlight, request: Request, num_drafts: int, num_behind: int) -> int:
        """Return how many of a request's drafts there is room for, if those behind it can have a block each.

        None where the step computes more of it than its last token, its prompt's samples begin, or its tokens are not
        all known; and no more than it may sample tokens, less the one that it samples anyway.
        """
        cache, start, num_all = request.cache, request.num_computed_tokens, len(request.token_ids)
        assert cache is not None
        if start + 1 < num_all or request.forks or step.is_ahead or not request.may_draft:
            return 0
        num_drafts = min(num_drafts, request.stop.max_total_tokens - num_all - 1)
        if num_drafts <= 0:
            return 0
        num_drafts = self._core.lodgers.draft_limit(cache, start, num_drafts + 1) - 1
        end = start + 1 + num_drafts
        if end > cache.capacity:
            num_new = num_blocks_for(end - cache.capacity, self._core.block_size) + num_behind
            num_available = 0 if step.has_made_way else self._core.num_available_to(request.tenant)
            has_room = num_available >= num_new * self._core.num_groups
            if not (has_room and self._core.extend(cache, start, end)):
                num_drafts = cache.capacity - start - 1
        return num_drafts

    def _plan_drafts(self, step: StepInFlight, request: Request, drafts: Sequence[int]) -> None:
        """Add a request's drafts to its row, which is the plan's last, and what is sampled behind each."""
        plan, row, num_drafts = step.plan, step.plan.num_rows - 1, len(drafts)
        plan.drafted.append(DraftedRow(row, len(plan.sampling_rows), len(plan.token_ids), num_drafts))
        plan.token_ids.extend(drafts)
        num_places = num_drafts + 1
        plan.sampling_rows += [row] * num_places
        plan.sampling += [request.sampling] * num_places
        plan.seeds += [request.seed] * num_places
        plan.draws += range(request.num_output_tokens, request.num_output_tokens + num_places)
        step.samples += [request] * num_places

    def _promise(self, step: StepInFlight, request: Request, end: int) -> None:
        """Promise the blocks of ``request`` up to position ``end``, or note that they are filled with a late token."""
        if request in step.late:
            step.filling.append(request)
            return
        assert request.cache is not None
        promise = self._core.publishing.promise(request.cache, request.packed(), end)
        if promise is not None:
            step.promises.append(promise)
