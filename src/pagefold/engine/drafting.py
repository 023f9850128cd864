"""Drafting: gives requests drafts before each step, as many as pay, and learns from what has become of them."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from pagefold.errors import InvalidRequestError
from pagefold.memory.cache_size import CacheSize
from pagefold.request import RequestStatus
from pagefold.speculation import NO_DRAFT, Acceptance, Chance, how_many
from pagefold.speculation.kinds import OF_MODEL
from pagefold.speculation.params import OF_THE_START, SpeculativeParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagefold.request import Request
    from pagefold.scheduler import Scheduler
    from pagefold.speculation import Draft, Drafter, StepCosts

__all__ = ["NO_DRAFTING", "Drafting"]

_MOST_OF_GRAMMARS = 4
_HORIZON = 64
"""What is read of a request for drafts should pay within so many tokens: it may end then."""
_TRY_AGAIN = 64
"""After so many steps without one a request gets a draft that does not seem to pay: texts change, and the cache."""


class _Asked:
    """A request that drafts are made for.

    Attributes:
        request: that.
        drafter: who makes them.
        kind: of those that it was given for the last step.
        num_draft_tokens, num_accepted_tokens: as the request's were before that.
        num_without: steps since its last draft.
    """

    __slots__ = ("drafter", "kind", "num_accepted_tokens", "num_draft_tokens", "num_without", "request")

    def __init__(self, request: Request, drafter: Drafter) -> None:
        self.request = request
        self.drafter = drafter
        self.kind = 0
        self.num_draft_tokens = self.num_accepted_tokens = 0
        self.num_without = 0


class _Step(NamedTuple):
    """A step without drafts.

    Attributes:
        num_tokens: that it computes.
        num_sampled: how many of those that decode get a token.
        num_left: how many tokens more it may compute.
    """

    num_tokens: int
    num_sampled: int
    num_left: int


class Drafting:
    """Who drafts for whom, and how much.

    Args:
        scheduler: has the requests.
        default: for requests that ask for nothing else; None for nobody.
        drafter_for: makes a drafter, given what is asked.
        costs: of steps.
        max_drafts: of a step, for all requests together.
    """

    is_on = True

    def __init__(
        self,
        scheduler: Scheduler,
        default: SpeculativeParams | None,
        drafter_for: Callable[[SpeculativeParams], Drafter],
        costs: StepCosts,
        max_drafts: int,
    ) -> None:
        self.default = default
        self._scheduler = scheduler
        self._drafter_for = drafter_for
        self._drafters: dict[SpeculativeParams, Drafter] = {}
        if default is not None:  # what it keeps is counted from the start
            self._drafters[default] = drafter_for(default)
        self._costs = costs
        self._max_drafts = max_drafts
        self._acceptance = Acceptance()
        self._asked: dict[str, _Asked] = {}
        self._head: Request | None = None  # who waited first before the last step

    def wanted(self, asked: SpeculativeParams | None) -> SpeculativeParams | None:
        """Return who drafts for a request: what it does not say of that, the default does. None for nobody.

        Raises:
            InvalidRequestError: the two do not go together, or a draft model is asked for that is not here.
        """
        if asked is None:
            return self.default
        wanted, default = asked.over(self.default), self.default or SpeculativeParams()
        if wanted.is_off:
            return wanted
        for name in OF_THE_START:
            value = getattr(asked, name)
            if value is not None and value != getattr(default, name):
                param = f"speculative_config.{name}"
                msg = f"{param} is {value!r}, and a draft model is loaded when the server starts."
                raise InvalidRequestError(msg, param=param, remedy="Leave it out, or give it to --speculative-config.")
        if wanted.is_by_model and default.model is None:
            param = "speculative_config.method"
            msg = f"{param} is {wanted.method}, and this server has no draft model."
            remedy = "Use tree or ngram, or start with a model in --speculative-config."
            raise InvalidRequestError(msg, param=param, remedy=remedy)
        return wanted

    @property
    def drafts_for_any(self) -> bool:
        """Whether anybody who runs may get drafts: then no step is planned before the last one's tokens are known."""
        return self._scheduler.guardrails.pacing.allows_drafts and any(
            request.speculation is not None for request in self._scheduler.running
        )

    def cache_sizes(self) -> list[CacheSize]:
        """Return what drafters keep beside what they know of requests. Plain reads, so any thread may ask."""
        drafters = dict.fromkeys(list(self._drafters.values()))  # several parameters may have one
        return [CacheSize(*kept) for drafter in drafters if (kept := drafter.kept()) is not None]

    def prepare(self) -> None:
        """Give drafts to those that will compute their last token in the step that is planned next."""
        self._learn()
        self.forget_ended()
        running = self._scheduler.running
        is_allowed = self._scheduler.guardrails.pacing.allows_drafts
        if not is_allowed or self._scheduler.suspicion.is_on:  # whoever is looked for is looked for without them
            for request in running:
                request.drafts = ()
            return
        ready = [asked for request in running if (asked := self._ready(request)) is not None]
        if ready:
            self._give(ready)

    def forget_ended(self) -> None:
        """Forget requests that have ended."""
        for asked in list(self._asked.values()):
            if asked.request.status is RequestStatus.FINISHED:
                self._forget(asked)

    def reset(self) -> None:
        """Let drafters forget what they have cached, as the prefix cache is forgotten."""
        for drafter in dict.fromkeys(self._drafters.values()):
            drafter.reset()

    def _ready(self, request: Request) -> _Asked | None:
        """Return what is known of a request that can be given drafts now; None of others, which get none."""
        request.drafts = ()
        params = request.speculation
        if params is None or request.num_computed_tokens + 1 < request.num_tokens or request.forks:
            return None
        if not request.may_draft or request.finish_reason is not None:
            return None
        asked = self._asked.get(request.request_id)
        if asked is not None and asked.request is not request:  # somebody came by a name that has become free
            self._forget(asked)
            asked = None
        if asked is None:
            drafter = self._drafters.get(params)
            if drafter is None:
                drafter = self._drafters[params] = self._drafter_for(params)
            asked = self._asked[request.request_id] = _Asked(request, drafter)
        return asked

    def _give(self, ready: list[_Asked]) -> None:
        base = self._step_without()
        most = min(self._max_drafts, base.num_left)
        if most <= 0:
            return
        found = self._drafts([asked for asked in ready if asked.drafter.costs is None], _most)
        chances = [self._chance(asked, found.get(asked.request.request_id)) for asked in ready]
        chosen = how_many(self._costs, base.num_tokens, base.num_sampled, chances, most)
        most -= sum(chosen)
        numbers: dict[str, int] = {}
        for asked, chance, num_drafts in zip(ready, chances, chosen, strict=True):
            num = num_drafts
            asked.num_without += 1
            if not num and chance.num_drafts and asked.num_without > _TRY_AGAIN and most:
                num, most = 1, most - 1
            numbers[asked.request.request_id] = num
        made = [asked for asked in ready if asked.drafter.costs is not None and numbers[asked.request.request_id]]
        for asked in made:
            asked.num_without = 0
        found |= self._drafts(made, lambda request: numbers[request.request_id])
        for asked in ready:
            request = asked.request
            draft = found.get(request.request_id, NO_DRAFT)
            num = min(numbers[request.request_id], len(draft.token_ids))
            if num:
                asked.num_without = 0
                asked.kind = draft.kind
                asked.num_draft_tokens, asked.num_accepted_tokens = (
                    request.num_draft_tokens,
                    request.num_accepted_tokens,
                )
                request.drafts = draft.token_ids[:num]

    def _chance(self, asked: _Asked, draft: Draft | None) -> Chance:
        """Return what drafts of a request promise.

        Args:
            asked: the request.
            draft: that was found already; None where one is yet to be made.
        """
        request, drafter = asked.request, asked.drafter
        name = request.request_id
        if draft is not None:
            return Chance(self._acceptance.chance(name, draft.kind), len(draft.token_ids))
        num_unread = drafter.num_unread(request)
        chance, making = self._acceptance.chance(name, OF_MODEL), drafter.costs
        if num_unread is None or making is None:
            return Chance(chance, 0)
        num_left = min(_HORIZON, request.stop.max_total_tokens - request.num_tokens)
        reading_s = making.of(1 + num_unread) - making.of(1)
        return Chance(chance, _most(request), making, reading_s / max(1, num_left))

    def _step_without(self) -> _Step:
        """Return what the next step has without drafts: prompts come first, also those that will be let in."""
        limits, running = self._scheduler.limits, self._scheduler.running
        num_tokens = num_sampled = num_seats = 0
        for request in running:
            num_new = request.num_tokens - request.num_computed_tokens
            num_tokens += num_new
            num_sampled += num_new == 1
            num_seats += request.num_seqs
        waiting = self._scheduler.waiting
        head = waiting[0] if waiting else None
        is_stuck, self._head = head is self._head, head  # the last step had room for it: it waits for memory or a seat
        for request in () if is_stuck else islice(waiting, limits.max_num_seqs):
            num_seats += request.num_seqs
            if num_seats > limits.max_num_seqs or num_tokens >= limits.max_num_batched_tokens:
                break
            num_tokens += request.num_tokens
        num_left = limits.max_num_batched_tokens - num_tokens
        return _Step(min(num_tokens, limits.max_num_batched_tokens), num_sampled, num_left)

    @staticmethod
    def _drafts(those: list[_Asked], most: Callable[[Request], int]) -> dict[str, Draft]:
        """Ask each drafter once for all of its requests, for so many drafts of each; return drafts by requests' ids."""
        by_drafter: dict[Drafter, list[Request]] = {}
        for asked in those:
            by_drafter.setdefault(asked.drafter, []).append(asked.request)
        drafts: dict[str, Draft] = {}
        for drafter, requests in by_drafter.items():
            found = drafter.draft(requests, [most(request) for request in requests])
            drafts.update(zip((request.request_id for request in requests), found, strict=True))
        return drafts

    def _learn(self) -> None:
        """Note what has become of the drafts that were given last, if a step computed them."""
        for request_id, asked in self._asked.items():
            num_drafts = asked.request.num_draft_tokens - asked.num_draft_tokens
            if num_drafts:
                num_accepted = asked.request.num_accepted_tokens - asked.num_accepted_tokens
                self._acceptance.learn(request_id, asked.kind, num_drafts, max(0, num_accepted))
                asked.num_draft_tokens += num_drafts
                asked.num_accepted_tokens += num_accepted

    def _forget(self, asked: _Asked) -> None:
        """Forget a request that has ended."""
        request_id = asked.request.request_id
        del self._asked[request_id]
        self._acceptance.forget(request_id)
        asked.drafter.forget(request_id)


def _most(request: Request) -> int:
    """Return how many drafts a request could use: it samples one token beside them."""
    assert request.speculation is not None, "nobody drafts for it"
    most = min(request.speculation.num_speculative_tokens, request.stop.max_total_tokens - request.num_tokens - 1)
    if request.matcher is not None:  # what a grammar may hold in memory is bounded, and copies of a matcher add to it
        most = min(most, _MOST_OF_GRAMMARS)
    return max(0, most)


class _NoDrafting(Drafting):
    """Nobody drafts."""

    is_on = False

    def __init__(self) -> None:
        self.default = None

    def wanted(self, asked: SpeculativeParams | None) -> SpeculativeParams | None:
        if asked is not None and not asked.is_off:
            msg = "speculative_config is given, but this server drafts nothing."
            remedy = "Leave it out, or start with a --speculative-config that has drafts."
            raise InvalidRequestError(msg, param="speculative_config", remedy=remedy)
        return None

    @property
    def drafts_for_any(self) -> bool:
        return False

    def cache_sizes(self) -> list[CacheSize]:
        return []

    def prepare(self) -> None:
        return

    def forget_ended(self) -> None:
        return

    def reset(self) -> None:
        return


NO_DRAFTING: Drafting = _NoDrafting()
"""No drafting; it never changes, so all engines without it share it."""
