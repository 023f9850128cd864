"""Drafts of tests: what is known to follow, cut and spoiled at random, for every request in every step."""

from __future__ import annotations

from array import array
from random import Random
from typing import TYPE_CHECKING

from equivalence.suite import EngineFactory, build
from pagefold.engine.drafting import Drafting
from pagefold.events import DraftsVerified, fan_out
from pagefold.speculation import NgramDrafter, SpeculativeParams, StepCosts, TreeDrafter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pagefold.engine.engine import Engine
    from pagefold.events import Event
    from pagefold.request import Request

__all__ = ["DraftCounts", "RandomDrafting", "drafted", "drafting_by", "known_by"]

_MOST_RIGHT, _MOST_WRONG = 7, 3


class DraftCounts:
    """Counts drafts, and those that were right."""

    def __init__(self) -> None:
        self.num_drafts = self.num_accepted = self.num_rejected = 0

    def emit(self, event: Event) -> None:
        """Count an event."""
        if isinstance(event, DraftsVerified):
            for _, num_drafts, num_accepted in event.counts:
                self.num_drafts += num_drafts
                self.num_accepted += num_accepted
                self.num_rejected += num_drafts - num_accepted


class RandomDrafting(Drafting):
    """Gives everybody who runs drafts: the first of them right ones, as many as chance will have it.

    Args:
        engine: whose requests get them.
        coming: returns all output tokens that a request will have, as far as anybody knows.
        vocab_size: wrong drafts are any of so many tokens.
        seed: of chance.
    """

    def __init__(
        self, engine: Engine, coming: Callable[[Request], Sequence[int]], vocab_size: int, seed: int = 0
    ) -> None:
        self.default = None
        self._scheduler = engine.scheduler
        self._coming = coming
        self._vocab_size = vocab_size
        self._random = Random(seed)

    @property
    def drafts_for_any(self) -> bool:
        """Now and then a step is planned ahead, and has none."""
        return self._random.random() < 0.5

    def prepare(self) -> None:
        """Give drafts, to those too that cannot use them now."""
        random = self._random
        for request in self._scheduler.running:
            num_right, num_wrong = random.randrange(_MOST_RIGHT + 1), random.randrange(_MOST_WRONG + 1)
            begin = request.num_output_tokens
            drafts = list(self._coming(request)[begin : begin + num_right])
            drafts += [random.randrange(self._vocab_size) for _ in range(num_wrong)]
            request.drafts = array("i", drafts)


def drafted(
    drafting_of: Callable[[Engine], Drafting], counts: DraftCounts, factory: EngineFactory = build
) -> EngineFactory:
    """Return a factory whose engines draft so, and tell ``counts``."""

    def make(setting, folder, budget, emit):
        engine = factory(setting, folder, budget, fan_out(emit, counts.emit))
        engine.drafting = drafting_of(engine)
        return engine

    return make


def known_by(references, vocab_size: int, seed: int = 0) -> Callable[[Engine], Drafting]:
    """Return what makes a :class:`RandomDrafting` that knows what references say."""

    def coming(request: Request) -> Sequence[int]:
        return references.of(list(request.token_ids[: request.num_prompt_tokens]))

    return lambda engine: RandomDrafting(engine, coming, vocab_size, seed)


def drafting_by(method: str) -> Callable[[Engine], Drafting]:
    """Return what drafts as a server does, and always as much as it can: steps cost the same, however long."""

    def make(engine: Engine) -> Drafting:
        drafter = TreeDrafter(engine.scheduler.core) if method == "tree" else NgramDrafter(2, 5)
        params = SpeculativeParams(method=method, num_speculative_tokens=8)
        return Drafting(engine.scheduler, params, lambda _: drafter, StepCosts((1, 2), (1.0, 1.0)), 64)

    return make
