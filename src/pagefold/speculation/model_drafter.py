"""ModelDrafter: a smaller model reads what requests have so far, and says what it would go on with.

It has blocks and a prefix tree of its own (a :class:`~pagefold.kv.KVCore`) and is carried out by a runner of its own: a
round of drafts is one step of it for each token, with all requests in it. What it finds is kept of a request from one
round to the next, as far as the request has sampled what was drafted; and of prompts in the tree, under the request's
namespace, so it never reads for one tenant what it has read for another.

Each draft is drawn as the request itself will draw there: with its parameters and seed and the same number of the draw.
Since every token has its own noise in a draw, two models that nearly agree mostly draw the same token, greedy or not
(a Gumbel coupling; "Coupling without Communication and Drafter-Invariant Speculative Decoding", Daliri et al., 2024).

Nothing of a request hangs on it: where memory is short, or a step of it fails, requests have no drafts.
"""

from __future__ import annotations

import logging
from array import array
from typing import TYPE_CHECKING

from pagefold.speculation.drafter import NO_DRAFT, Draft, Kept
from pagefold.speculation.kinds import OF_MODEL
from pagefold.steps import StepPlan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.kv import KVCore, SequenceCache
    from pagefold.request import Request
    from pagefold.speculation.how_many import StepCosts
    from pagefold.steps import Runner, StepResult

__all__ = ["ModelDrafter"]

_log = logging.getLogger(__name__)


class _Reading:
    """What the model has read of one request.

    Attributes:
        request: whose tokens.
        cache: their blocks.
        num_read: the first so many tokens have KV there.
        drafts: what was drafted in the last round, behind the tokens that the request had then.
        num_ahead: the first so many of these have KV there too.
    """

    __slots__ = ("cache", "drafts", "num_ahead", "num_read", "request")

    def __init__(self, request: Request, cache: SequenceCache, num_read: int) -> None:
        self.request = request
        self.cache = cache
        self.num_read = num_read
        self.drafts: array[int] = array("i")
        self.num_ahead = 0

    def catch_up(self) -> None:
        """Count what was drafted, and has come, as read: all but the request's last token, which has come since."""
        token_ids, last = self.request.token_ids, self.request.num_tokens - 1
        for token_id in self.drafts[: self.num_ahead]:
            if self.num_read >= last or token_ids[self.num_read] != token_id:
                break
            self.num_read += 1
        self.drafts, self.num_ahead = array("i"), 0


class _Round:
    """A request in a round.

    Attributes:
        reading: what was read of it.
        most: how many drafts it may have.
        is_over: whether it gets no more.
    """

    __slots__ = ("is_over", "most", "reading")

    def __init__(self, reading: _Reading, most: int) -> None:
        self.reading = reading
        self.most = most
        self.is_over = False

    @property
    def found(self) -> array[int]:
        """Its drafts so far."""
        return self.reading.drafts


class ModelDrafter:
    """A :class:`~pagefold.speculation.drafter.Drafter`.

    Args:
        core: of the model's blocks, which are nobody else's.
        runner: of the model, whose KV is in those.
        costs: what its steps take.
        max_num_batched_tokens: how many tokens one of its steps may have. A longer prompt is read in several rounds.
        vocab_size: tokens that requests may have: behind a draft that is none of them there are no more.
        own_vocab_size: tokens that the model knows: requests with others have no drafts.
        block_bytes: bytes of one of its blocks.
    """

    def __init__(  # noqa: PLR0913 - settings, by name
        self,
        core: KVCore,
        runner: Runner,
        *,
        costs: StepCosts,
        max_num_batched_tokens: int,
        vocab_size: int,
        own_vocab_size: int,
        block_bytes: int,
    ) -> None:
        self.core = core
        self.costs = costs
        self._runner = runner
        self._max_num_batched_tokens = max_num_batched_tokens
        self._vocab_size = vocab_size
        self._own_vocab_size = own_vocab_size
        self._block_bytes = block_bytes
        self._readings: dict[str, _Reading] = {}
        self._crowded_out: set[str] = set()
        """Requests that there was no memory for since another one gave some back last."""
        self._given_up: set[str] = set()
        """Requests with whom a step failed, for which the model found no numbers, or which it can never read."""
        self._num_steps = 0

    def kept(self) -> Kept:
        """See :class:`~pagefold.speculation.drafter.Drafter`."""
        pool, block_bytes = self.core.pool, self._block_bytes
        return Kept("draft_model", (pool.num_blocks - pool.num_free) * block_bytes, pool.num_blocks * block_bytes)

    def num_unread(self, request: Request) -> int | None:
        """See :class:`~pagefold.speculation.drafter.Drafter`. What others have read of its prompt is not known yet."""
        name = request.request_id
        if name in self._given_up or name in self._crowded_out:
            return None
        reading = self._readings.get(name)
        return request.num_tokens - 1 if reading is None else max(0, request.num_tokens - 1 - reading.num_read)

    def draft(self, requests: Sequence[Request], num_tokens: Sequence[int]) -> list[Draft]:
        """See :class:`~pagefold.speculation.drafter.Drafter`. Who has least to read goes first."""
        here = {request.request_id for request in requests}
        rounds: dict[str, _Round] = {}
        going: list[_Round] = []
        budget = self._max_num_batched_tokens
        wanted = sorted(zip(requests, num_tokens, strict=True), key=lambda one: self.num_unread(one[0]) or 0)
        for request, most in wanted:
            one = self._enter(request, most, budget, here) if most and budget else None
            if one is None:
                continue
            rounds[request.request_id] = one
            if not one.is_over:
                going.append(one)
                budget -= min(budget, request.num_tokens - one.reading.num_read)
        if going and self._read(going):
            while going := [one for one in going if not one.is_over and len(one.found) < one.most]:
                if not self._go_on(going):
                    break
        found = (rounds.get(request.request_id) for request in requests)
        return [NO_DRAFT if one is None or not one.found else Draft(one.found[: one.most], OF_MODEL) for one in found]

    def forget(self, request_id: str) -> None:
        """See :class:`~pagefold.speculation.drafter.Drafter`."""
        self._given_up.discard(request_id)
        self._crowded_out.discard(request_id)
        if self._let_go(request_id):
            self._crowded_out.clear()

    def reset(self) -> None:
        """See :class:`~pagefold.speculation.drafter.Drafter`."""
        self.core.forgetting.reset()

    # A round.

    def _enter(self, request: Request, most: int, budget: int, here: set[str]) -> _Round | None:
        """Return a request's part in a round, with room for what it reads and writes there; None without memory.

        It is over for who has got no token since the last one, since its step failed or had no room for drafts.
        """
        name = request.request_id
        if name in self._given_up or name in self._crowded_out:
            return None
        reading = self._readings.get(name)
        is_new = reading is None
        if reading is None:
            hit = self.core.match(request.namespace, request.packed(), request.num_tokens - 1)
            reading = self._readings[name] = _Reading(request, *self.core.acquire(hit))
        one = _Round(reading, most)
        if reading.num_read == request.num_tokens:
            one.is_over = True
            return one
        reading.catch_up()
        start, num_all = reading.num_read, request.num_tokens
        end = start + budget if num_all - start > budget else num_all - 1 + most
        never_fits = self.core.num_blocks_for(end, end - start) > self.core.pool.num_blocks
        if never_fits or max(request.token_ids[start:]) >= self._own_vocab_size:
            self._give_up(reading)
            return None
        while not self.core.extend(reading.cache, start, end):
            other = next((one for one in self._readings if one not in here), None)
            if other is None:
                self._let_go(name)
                if not is_new:  # others may have what it had
                    self._crowded_out.clear()
                self._crowded_out.add(name)
                return None
            self._let_go(other)
        return one

    def _read(self, going: list[_Round]) -> bool:
        """Read what requests have got since the last round, and find the first draft of those that are read to the end.

        Return whether that went well.
        """
        plan, budget = StepPlan(self._num_steps), self._max_num_batched_tokens
        ends: list[int] = []
        for row, one in enumerate(going):
            request, start = one.reading.request, one.reading.num_read
            end = min(request.num_tokens, start + budget)
            budget -= end - start
            ends.append(end)
            self._add_row(plan, one, request.token_ids[start:end], start)
            if end == request.num_tokens:
                self._sample(plan, one, row)
            else:
                one.is_over = True
        result = self._run(plan, going)
        if result is None:
            return False
        for row, (one, end) in enumerate(zip(going, ends, strict=True)):
            if row not in result.corrupted:
                one.reading.num_read = end
                self._publish(one.reading, end)
        self._take(plan, result, going)
        return True

    def _go_on(self, going: list[_Round]) -> bool:
        """Find one more draft of each; return whether that went well."""
        plan = StepPlan(self._num_steps)
        for row, one in enumerate(going):
            self._add_row(plan, one, one.found[-1:], one.reading.request.num_tokens + len(one.found) - 1)
            self._sample(plan, one, row)
        result = self._run(plan, going)
        if result is None:
            return False
        for row, one in enumerate(going):
            if row not in result.corrupted:
                one.reading.num_ahead += 1
        self._take(plan, result, going)
        return True

    @staticmethod
    def _add_row(plan: StepPlan, one: _Round, token_ids: array[int], start: int) -> None:
        plan.token_ids.extend(token_ids)
        plan.starts.append(start)
        plan.num_tokens.append(len(token_ids))
        plan.tables.append(one.reading.cache.tables)

    @staticmethod
    def _sample(plan: StepPlan, one: _Round, row: int) -> None:
        """Let a row sample as its request will behind the same tokens."""
        request = one.reading.request
        plan.sampling_rows.append(row)
        plan.sampling.append(request.sampling)
        plan.seeds.append(request.seed)
        plan.draws.append(request.num_output_tokens + len(one.found))

    def _run(self, plan: StepPlan, going: list[_Round]) -> StepResult | None:
        """Carry a step out; None where it failed: its requests have no drafts from then on."""
        core = self.core
        self._num_steps += 1
        plan.copies = core.moves.take_copies()
        try:
            result = self._runner.run(plan)
        except Exception:  # noqa: BLE001 - whatever it is, requests go on without drafts
            _log.warning("the draft model failed in a step of %d requests", len(going), exc_info=True)
            core.moves.copies_failed(plan.copies)
            for one in going:
                one.is_over = True
                self._give_up(one.reading)
            return None
        except BaseException:  # not the step's fault: the next one makes its copies
            core.moves.copies_failed(plan.copies)
            raise
        core.moves.copies_done(plan.copies)
        return result

    def _take(self, plan: StepPlan, result: StepResult, going: list[_Round]) -> None:
        """Give each request the draft that its row has sampled."""
        for row, token_id in zip(plan.sampling_rows, result.token_ids, strict=True):
            if token_id < self._vocab_size:
                going[row].found.append(token_id)
            else:
                going[row].is_over = True
        for row in result.corrupted:
            one = going[row]
            request, cache = one.reading.request, one.reading.cache
            self.core.forgetting.distrust(cache, request.namespace, request.packed())
            one.is_over = True
            self._give_up(one.reading)

    def _publish(self, reading: _Reading, end: int) -> None:
        """Let others find what is read of a request: its own tokens, and no draft."""
        core, cache = self.core, reading.cache
        promise = core.publishing.promise(cache, reading.request.packed(), end)
        if promise is not None:
            core.publishing.commit(promise)
        core.trim(cache, end)

    # Who has memory.

    def _give_up(self, reading: _Reading) -> None:
        """A request has no drafts any more."""
        name = reading.request.request_id
        reading.drafts = array("i")
        self._given_up.add(name)
        self._let_go(name)
        self._crowded_out.clear()

    def _let_go(self, name: str) -> bool:
        """Give back a request's blocks, if it has any; what is published of them stays cached."""
        reading = self._readings.pop(name, None)
        if reading is None:
            return False
        self.core.release(reading.cache)
        return True
