"""Relief: who gives up memory for whom, in which order. That is written here and nowhere else.

Blocks that nobody has come first, for all: the core finds them by itself (``kv/block_cache.py`` has their order). When
these are short, memory is given for a request that

- *runs* by those that stream, which make blocks cold; then by pins, from the least important on; then by others that
  run and come behind it in order, which are preempted: ``victims.py`` says who of them;
- *runs and streams* by itself before all others; and before anybody is preempted by what the arena keeps for those that
  wait, so that it can make more of its own cold;
- *waits* by pins, if that is enough; not beyond its tenant's cap (``kv/quotas.py``), below which its own make room;
- *waits to stream* by those that stream, and then by pins, if that is enough.

Where tenants have quotas, pins and requests give only what who asks can have then: at its cap its own tenant's alone,
and none of a tenant that has no more than its floor. Who runs and cannot be given any goes itself.

So who runs gets on, whatever that costs; for who waits nobody is preempted, unless tenants have shares
(``making_way.py``), and no pin goes in vain. Who was preempted waits until there is room for a while
(``reservation.py``). Those that stream
give to one that will, since each of them needs room for a step only. To one that is to be held whole they give nothing
before it runs: it is let in if all its tokens fit beside what they have and will take, which is a share of the device.
Room in the arena helps none but who streams: it is where blocks are cold.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from pagefold.events import Emit, PreemptionCause, RequestPreempted

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.events import WaitCause
    from pagefold.kv import Block, KVCore, PrefixHit
    from pagefold.request import Request
    from pagefold.scheduler.growth import AdmissionRule, Gone
    from pagefold.scheduler.leaving import Leaving
    from pagefold.scheduler.needs import Needs
    from pagefold.scheduler.queues import Queues
    from pagefold.scheduler.reservation import Reservation
    from pagefold.scheduler.step_in_flight import StepInFlight
    from pagefold.scheduler.streamer import Streamer
    from pagefold.scheduler.victims import Victims

__all__ = ["Relief"]


class Relief:
    """Finds memory for one request at the cost of what is kept for others.

    Args:
        core: the KV core.
        queues: who runs.
        needs: how many blocks requests take.
        streamer: makes blocks cold.
        leaving: lets those go that are preempted.
        victims: says who these are.
        reservation: says what room there must be for them to come back.
        rule: says what those that run will take yet.
        emit: where events go.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the parts that it holds together
        self,
        core: KVCore,
        queues: Queues,
        needs: Needs,
        streamer: Streamer,
        leaving: Leaving,
        victims: Victims,
        reservation: Reservation,
        rule: AdmissionRule,
        emit: Emit,
    ) -> None:
        self._core = core
        self._queues = queues
        self._needs = needs
        self._streamer = streamer
        self._leaving = leaving
        self._victims = victims
        self._reservation = reservation
        self._rule = rule
        self._emit = emit

    def extend(self, step: StepInFlight, request: Request, start: int, end: int) -> bool:
        """Extend the cache of ``request``, which runs, for writing positions [start, end).

        False when ``request`` itself had to go; or somebody, while a step is in flight that reads what they have.
        """
        assert request.cache is not None
        if request.cache.streams:
            self._streamer.make_room(request, end)
        while not self._core.extend(request.cache, start, end):
            if self._streamer.cool(self._queues.with_blocks) or self._give_up_a_pin(request, end):
                continue
            if self._streamer.take_back(request, end):
                continue
            if step.is_ahead:
                return False
            victim = self._victims.choose(request, len(step.requests), self._needs.left(request, end))
            self._queues.take_out(victim)
            self.preempt(victim, request, "memory")
            if victim is request.leader:
                return False
        self._rule.note(request, step.plan.step_id)
        return True

    def lacks(self, request: Request, hit: PrefixHit, step: StepInFlight, beside: Request | None) -> WaitCause | None:
        """Return why ``request``, which waits, may not be let in, where that is plain or is growth of those that run.

        Nothing is given up for it. ``beside`` is somebody who waits, too, and whose memory it must not take.
        """
        num_steps = self._reservation.num_steps(request)
        if num_steps is None:
            return "kv_cap" if self._core.quotas.of(request.tenant).has_cap else "memory"
        found = self._core.rules.of(hit.mask).blocks_of(hit)
        if self._core.quotas.is_on and self._num_above_cap(request, found, num_steps) > 0:
            return "kv_cap"
        needed = self._needed_at_once(request, hit, beside, num_steps)
        if not self._core.pool.num_pinned and self._num_missing(request, needed, found) > 0:
            return "memory"  # mostly so where many run: it does not fit, however little these will take yet
        return None if self._rule.has_room(request, found, step.plan.step_id, beside=beside) else "growth"

    def room_for_all(
        self, request: Request, hit: PrefixHit, now: float, beside: Request | None = None
    ) -> PrefixHit | None:
        """Return what of ``hit`` can be used if all tokens of ``request``, which waits, fit beside those that run.

        None if they do not. All its tokens, not only its first chunk: a prompt that is let in and cannot be finished
        only preempts others. Samples that will fork need a block each, for a copy of the tail or the next one. A
        request that runs alone does not wait for these: its samples can run one after another. One that was preempted
        needs room for a while more, of its own and of those that run.
        """
        num_steps = self._reservation.num_steps(request)
        if num_steps is None:
            return None
        running = self._queues.with_blocks
        num_groups = self._core.num_groups
        needed = self._needed_at_once(request, hit, beside, num_steps)
        blocks = self._core.rules.of(hit.mask).blocks_of(hit)
        for other in running:
            needed += self._needs.growth(other, num_steps) + len(other.forks) * num_groups
        if self._num_missing(request, needed, blocks) > 0 and not self._give_up_pins(request, needed, blocks, now):
            return None
        if self._core.quotas.is_on:
            self._give_up_own_pins(request, blocks, num_steps, now)
        is_tight = self._num_missing(request, needed, blocks) > -num_groups
        if is_tight or self._num_above_cap(request, blocks, num_steps, with_pins=True) > -num_groups:
            # A copy keeps its sources for this step.
            return hit._replace(partial=None, num_partial_tokens=0)
        return hit

    def _needed_at_once(self, request: Request, hit: PrefixHit, beside: Request | None, num_steps: int) -> int:
        """Return how many blocks ``request``, which waits, needs for so many steps, with those of ``beside``."""
        begun = hit.num_blocks * self._core.block_size + hit.num_partial_tokens
        needed = max(self._needs.whole(request, num_steps), self._needs.to_begin(request, begun))
        if self._queues.with_blocks:
            needed += self._needs.watermark_blocks + len(request.forks) * self._core.num_groups
            if request.beams is not None:  # they begin again, and would have to go again
                needed += max(0, request.beams.num_held - self._needs.whole(request))
        if beside is not None:
            needed += self._needs.whole(beside) + len(beside.forks) * self._core.num_groups
        return needed

    def room_to_stream(self, request: Request, now: float) -> bool:
        """Make room for what ``request``, which waits, needs of the device at a time; False if there is none."""
        streamer, running = self._streamer, self._queues.with_blocks
        if request.forks or not streamer.fits(request, running):
            return False
        needed = streamer.num_hot_blocks(request)
        needed += sum(self._needs.growth(other) for other in running)
        while self._num_missing(request, needed, []) > 0 and streamer.cool(running):
            pass
        if self._num_missing(request, needed, []) > 0 and not self._give_up_pins(request, needed, [], now):
            return False
        return self._core.blocks.make_free(needed, asked_by=request.request_id)

    def has_room_without(self, gone: Gone, request: Request, hit: PrefixHit, step_id: int) -> bool:
        """Whether ``request``, which waits, could be let in with ``hit`` if some of those that run were gone.

        Pins count as given up. It changes nothing; :meth:`room_for_all` knows it to the block.
        """
        num_steps = self._reservation.num_steps(request)
        if num_steps is None:
            return False
        blocks = self._core.rules.of(hit.mask).blocks_of(hit)
        running = self._queues.with_blocks
        if gone.requests:
            going = set(gone.requests)
            running = [one for one in running if one not in going]
        needed = self._needed_at_once(request, hit, None, num_steps)
        needed += sum(self._grows_first(one, num_steps) for one in running)
        needed += sum(len(one.forks) for one in running) * self._core.num_groups
        num_freed = gone.num_blocks - _num_only_of(gone, blocks)  # it begins with these: they are no room for the rest
        if self._num_missing_without_pins(request, needed, blocks) > num_freed:
            return False
        return self._rule.has_room(request, blocks, step_id, gone=gone)

    def _grows_first(self, request: Request, num_steps: int) -> int:
        """Return the blocks that ``request``, which runs, takes in a step before anybody is let in, and grows by then.

        Among them are copies of those that it shares with other samples.
        """
        cache = request.cache
        if cache is None:
            return 0
        if self._core.trims:
            return self._needs.growth(request, num_steps)
        num_copied = cache.may_share_tail * self._core.num_groups
        if not num_steps and request.num_tokens <= cache.capacity:  # so it is of most, and all that run are asked
            return num_copied
        return num_copied + self._needs.growth(request, num_steps)

    def preempt(self, victim: Request, beneficiary: Request, cause: PreemptionCause) -> None:
        """Take a running request's blocks; what is published stays cached and spares work if it is still there.

        It stands in no queue.
        """
        usage = self._core.usage
        num_computed = victim.num_computed_tokens
        self._leaving.wait_again(victim, is_preempted=True)
        self._emit(
            RequestPreempted(
                victim.request_id,
                num_computed,
                usage,
                self._core.usage,
                cause_request_id=beneficiary.request_id,
                cause=cause,
            )
        )

    def is_at_cap(self, request: Request) -> bool:
        """Whether ``request``, which waits, does so since its tenant has as many blocks as its cap allows."""
        if not self._core.quotas.of(request.tenant).has_cap:
            return False
        num_steps = self._reservation.num_steps(request)
        if num_steps is None:
            return True
        hit = self._core.match(request.namespace, request.packed(), request.max_hit_tokens, mask=request.mask)
        return self._num_above_cap(request, self._core.rules.of(hit.mask).blocks_of(hit), num_steps) > 0

    def _num_above_cap(self, request: Request, found: list[Block], num_steps: int, *, with_pins: bool = False) -> int:
        """Return by how many blocks its tenant would pass its cap with ``request``, which waits; may be negative.

        Args:
            request: with what it needs for ``num_steps`` steps, as those of its tenant that run do.
            found: blocks that it begins with.
            num_steps: as the reservation says.
            with_pins: whether its tenant's pins keep what they keep; else all may be given up.
        """
        tenant = self._core.quotas.of(request.tenant)
        if not tenant.has_cap:
            return -self._core.pool.num_blocks
        needed = self._needs.whole(request, num_steps)
        own = [one for one in self._queues.with_blocks if one.tenant == request.tenant]
        if own:
            needed += len(request.forks) + sum(self._needs.growth(one, num_steps) + len(one.forks) for one in own)
            if request.beams is not None:
                needed += max(0, request.beams.num_held - self._needs.whole(request))
        if with_pins:
            return needed - sum(1 for block in found if block.num_table_refs or block.num_pin_refs) - tenant.room
        return needed - sum(1 for block in found if block.num_table_refs) - tenant.room - tenant.num_pinned

    def _give_up_own_pins(self, request: Request, found: list[Block], num_steps: int, now: float) -> None:
        """Give up pins of the tenant of ``request`` until that fits below its cap, as is known that it can."""
        tenant, spared = self._core.quotas.of(request.tenant), set(found)
        while self._num_above_cap(request, found, num_steps, with_pins=True) > 0:
            has_gained = self._core.pins.give_up(now, spared, lambda block: block.tenant is tenant)
            assert has_gained, "pins alone keep a tenant above its cap, and it has no pin"

    def _give_up_a_pin(self, request: Request, end: int) -> bool:
        """Give up a pin, if that helps ``request``, which runs and needs blocks up to position ``end``."""
        core = self._core
        if not core.quotas.is_on:
            return core.pins.give_up(core.now_s)
        num_new = self._needs.left(request, end)
        return core.pins.give_up(
            core.now_s, (), lambda block: core.quotas.unpinning_helps(request.tenant, block.tenant, num_new)
        )

    def _num_missing(self, request: Request, needed: int, found: list[Block]) -> int:
        """Return how many of ``needed`` blocks can neither be allocated nor are a gift of a hit; may be negative."""
        # Found blocks that nobody keeps are among the available ones, so they are needed too; kept ones are a gift.
        kept = sum(1 for block in found if block.num_table_refs or block.num_pin_refs)
        return needed - kept - self._core.num_available_to(request.tenant)

    def _num_missing_without_pins(self, request: Request, needed: int, found: list[Block]) -> int:
        """Return the same, had all pins been given up."""
        core = self._core
        if not core.quotas.is_on:
            return self._num_missing(request, needed, found) - self._num_kept_beside(found)
        kept = sum(1 for block in found if block.num_table_refs)
        num_cached = core.pool.num_cached - core.quotas.num_withheld_without_pins(request.tenant)
        return needed - kept - core.pool.num_free - num_cached

    def _give_up_pins(self, request: Request, needed: int, found: list[Block], now: float) -> bool:
        """Give up pins until ``needed`` blocks are there beside ``found``; none at all if that is out of reach."""
        if self._num_missing_without_pins(request, needed, found) > 0:
            return False
        core, tenant, spared = self._core, request.tenant, set(found)
        while self._num_missing(request, needed, found) > 0:
            has_gained = core.pins.give_up(
                now,
                spared,
                (lambda block: core.quotas.unpinning_helps(tenant, block.tenant, 0)) if core.quotas.is_on else None,
            )
            assert has_gained, "pins alone keep a block, and no pin keeps it"
        return True

    def _num_kept_beside(self, found: list[Block]) -> int:
        """Return how many blocks pins alone keep, those of a hit aside: who has it has them anyway."""
        own = sum(1 for block in found if block.num_pin_refs and not block.num_table_refs)
        return self._core.pool.num_pinned - own


def _num_only_of(gone: Gone, found: Sequence[Block]) -> int:
    """Return how many of the blocks ``found`` in the cache only those hold who would be gone."""
    held = [block for block in found if block.num_table_refs and not block.num_pin_refs]
    if not held:
        return 0
    caches = [one.cache for one in gone.requests if one.cache is not None]
    refs = Counter(block_id for cache in caches for block_id in cache.all_block_ids())
    return sum(block.num_table_refs == refs[block.block_id] for block in held)
