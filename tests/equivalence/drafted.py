"""Drafts of tests: what is known to follow, cut and spoiled at random, for every request in every step."""

from __future__ import annotations

from array import array
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from equivalence.suite import EngineFactory, build
from pagefold.config import EngineConfig
from pagefold.engine.build import build_engine
from pagefold.engine.drafting import Drafting
from pagefold.engine.planning import plan_engine
from pagefold.events import DraftsVerified, fan_out
from pagefold.kv.audit import audit
from pagefold.speculation import ModelDrafter, NgramDrafter, SpeculativeParams, StepCosts, TreeDrafter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from pagefold.engine.engine import Engine
    from pagefold.events import Event
    from pagefold.request import Request
    from pagefold.steps import StepPlan, StepResult

__all__ = ["DraftCounts", "RandomDrafting", "drafted", "drafting_by", "drafting_by_model", "known_by"]

_MOST_RIGHT, _MOST_WRONG = 7, 3
_FREE = StepCosts((1, 2), (1.0, 1.0))
_NO_TIME = StepCosts((1, 2), (1e-9, 1e-9))


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
        return Drafting(engine.scheduler, params, lambda _: drafter, _FREE, 64)

    return make


class Unsteady:
    """A runner that now and then says another token than the model does, finds no number, or fails.

    Args:
        runner: of the model.
        vocab_size: of the model.
        seed: of chance.
    """

    def __init__(self, runner, vocab_size: int, seed: int) -> None:
        self._runner = runner
        self._vocab_size = vocab_size
        self._random = Random(seed)

    def run(self, plan: StepPlan) -> StepResult:
        """Run a step, and perhaps spoil it."""
        random = self._random
        result = self._runner.run(plan)
        if random.random() < 0.005:
            raise RuntimeError
        token_ids = [random.randrange(self._vocab_size) if random.random() < 0.2 else one for one in result.token_ids]
        corrupted = [row for row in range(plan.num_rows) if random.random() < 0.002]
        return replace(result, token_ids=token_ids, corrupted=corrupted)


class _Audited(ModelDrafter):
    """Looks at what it keeps after each round."""

    def draft(self, requests, num_tokens):
        found = super().draft(requests, num_tokens)
        audit(self.core)
        return found


def drafting_by_model(folder: Path, vocab_size: int, num_blocks: int = 256) -> Callable[[Engine], Drafting]:
    """Return what drafts with the model of a folder, as a server does; it is unsteady."""

    def make(engine: Engine) -> Drafting:
        how = {"dtype": "float64", "attention_backend": "reference", "max_model_len": 2048}
        core, size = engine.scheduler.core, engine.scheduler.core.block_size
        config = EngineConfig(model=str(folder), block_size=size, max_num_batched_tokens=64, max_num_seqs=64, **how)
        plan = plan_engine(config)
        num_bytes = num_blocks * plan.geometry.bytes_per_block
        least = plan.geometry.layout.num_blocks_for(2048, 64) * plan.geometry.bytes_per_block
        other = build_engine(plan_engine(replace(config, kv_cache_memory_bytes=max(num_bytes, least))))
        drafter = _Audited(
            other.scheduler.core,
            Unsteady(other.runner, vocab_size, core.pool.num_blocks),
            costs=_NO_TIME,
            max_num_batched_tokens=64,
            vocab_size=vocab_size,
            own_vocab_size=vocab_size,
            block_bytes=plan.geometry.bytes_per_block,
        )
        params = SpeculativeParams(method="draft_model", num_speculative_tokens=8)
        return Drafting(engine.scheduler, params, lambda _: drafter, _FREE, 64)

    return make
