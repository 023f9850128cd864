"""TorchRunner: carries out plans with a real model. Copy, compute and write KV, sample."""

from __future__ import annotations

import contextlib
import statistics
import time
from array import array
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

from pagefold.errors import CardMemoryError
from pagefold.kv import Block, BlockId, BlockTable
from pagefold.runner.finite import are_finite, broken_rows
from pagefold.runner.inputs import late_tokens, make_inputs, packed_by
from pagefold.runner.logits import adjust
from pagefold.runner.logprobs import token_logprobs
from pagefold.runner.sampler import sample, sample_on_card
from pagefold.runner.to_device import put, to_host
from pagefold.sampling import SamplingParams
from pagefold.steps import StepPlan, StepResult, TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pagefold.kv import KVGeometry, Packed
    from pagefold.runner.inputs import StepInputs
    from pagefold.runner.slab import AnySlab
    from pagefold.steps import BlockMover, MovesInFlight

__all__ = ["Decoder", "OnQueries", "TorchRunner"]


_MEMORY_REMEDY = (
    "Start with a smaller gpu_memory_utilization, max_num_batched_tokens or max_num_seqs, or end what else runs there."
)

_NUM_ROUNDS, _ROUNDS_S = range(3, 8), 2.0
"""Steps of each size are timed so many times: more often than the least only as long as all of that is not over."""
_PROBE_TOKENS = 256
"""What prefilling takes is measured with so many tokens."""


class Decoder(Protocol):
    """Computes a step's tokens: their K and V into the blocks, and logits of some of them."""

    def logits(self, inputs: StepInputs) -> torch.Tensor:
        """Return the logits of ``inputs.logit_rows``, ``[R, vocab]``. They may be valid until the next step only."""

    def states(self) -> torch.Tensor:
        """Return numbers of each of the last step's tokens, ``[T, N]``: not finite where the token's KV is not.

        They are K and V of the last layer that has its own, which follow from what enters that: whatever is not finite
        of a token in any layer before has spread there. What layers behind it compute of a token, no other token reads.
        Nobody asks after a step whose tokens all sample: those have logits.
        """


class OnQueries(Protocol):
    """Is told what a step's tokens ask in each layer: for a calibration (see ``engine/calibration.py``)."""

    def __call__(self, layer: int, queries: torch.Tensor) -> None:
        """Take a layer's queries, ``[T, H, D]``, rope already applied; they may be valid during the call only."""


class _Computed(NamedTuple):
    """What a step's forward pass has found. All may be valid until the next step only.

    Attributes:
        logits: of its sampling rows, ``[R, vocab]``.
        of_prompts: logits of its prompt parts' tokens, ``[P, vocab]``.
        states: of its tokens, ``[T, N]``: see :meth:`Decoder.states`; None where all of them sample.
        packed: what it has packed, of each of the plan's packing rows. It lasts.
    """

    logits: torch.Tensor
    of_prompts: torch.Tensor
    states: torch.Tensor | None
    packed: list[list[Packed]]


class _Broken(NamedTuple):
    """What of a step is not finite.

    Attributes:
        places: which sampling rows' logits.
        tokens: which tokens' states.
    """

    places: list[int]
    tokens: list[int]


class TorchRunner:
    """A :class:`~pagefold.steps.Runner` over a decoder.

    Args:
        decoder: the model.
        geometry: of its KV.
        slab: its blocks.
        arena: where evicted blocks are; None without a host tier.

    Attributes:
        on_prompt_logits: told, in each step that has prompt parts, the plan and the logits of these parts' tokens, one
            part after another, ``[P, vocab]``; they may be valid until the next step only.
    """

    def __init__(self, decoder: Decoder, geometry: KVGeometry, slab: AnySlab, arena: BlockMover | None = None) -> None:
        self.geometry = geometry
        self.slab = slab
        self.arena = arena
        self.decoder = decoder
        self.on_prompt_logits: Callable[[StepPlan, torch.Tensor], None] = _ignore
        self._sampled: torch.Tensor | None = None  # by the step launched last, where it was sampled

    def run(self, plan: StepPlan) -> StepResult:
        """Run one step; see :class:`~pagefold.steps.Runner`.

        Raises:
            CardMemoryError: the card had too little memory for the step. What it held for it is given back.
        """
        with _memory_for(plan):
            moves = self._begin_moves(plan)
            computed = self._forward(plan, moves)
            logits, of_prompts, states, _ = computed
            if moves is not None:
                moves.verify()
            if plan.prompt_parts:
                self.on_prompt_logits(plan, of_prompts)
            token_ids = sample(adjust(logits, plan), plan.sampling, plan.seeds, plan.draws)
            if moves is not None:
                moves.learn()
            broken = _Broken(broken_rows(logits), [] if states is None else broken_rows(states))
            return _result(plan, token_ids, broken, computed)

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Queue one step on a card; see :class:`~pagefold.steps.LaunchingRunner`. The host waits for nothing.

        What it samples is left on the card, for the step that may be launched behind it. Logits are valid until the
        next step: where logprobs are asked for, the result is to be asked for before that is launched.
        """
        with _memory_for(plan):
            moves = self._begin_moves(plan)
            computed = self._forward(plan, moves)
            logits, of_prompts, states, _ = computed
            sampled = sample_on_card(adjust(logits, plan), plan.sampling, plan.seeds, plan.draws)
            self._sampled = sampled
            told = sampled.where(are_finite(logits), ~sampled)  # below 0 where they are not
            if states is not None:
                told = torch.cat([told, are_finite(states).to(told.dtype)])
            read = to_host(told)  # in one copy

        def wait() -> StepResult:
            with _memory_for(plan):
                if moves is not None:
                    moves.verify()
                if plan.prompt_parts:
                    self.on_prompt_logits(plan, of_prompts)
                found = read()
                if moves is not None:
                    moves.learn()
                found, of_tokens = found[: len(logits)], found[len(logits) :]
                places = [place for place, token_id in enumerate(found) if token_id < 0]
                token_ids = [max(token_id, ~token_id) for token_id in found] if places else found
                broken = _Broken(places, [at for at, is_finite in enumerate(of_tokens) if not is_finite])
                return _result(plan, token_ids, broken, computed)

        return wait

    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Run one step and return the logits of its sampling rows, ``[R, vocab]``, instead of sampling."""
        moves = self._begin_moves(plan)
        logits = self._forward(plan, moves).logits
        if moves is not None:
            moves.verify()
        return logits

    def _begin_moves(self, plan: StepPlan) -> MovesInFlight | None:
        """Begin what moves between the host's blocks and ours; return what is still on its way."""
        if self.arena is None:
            return None
        return self.arena.begin(plan.host_ops, self.slab.as_bytes(), self.geometry.layer_ends)

    def _forward(self, plan: StepPlan, moves: MovesInFlight | None) -> _Computed:
        """Run one step."""
        try:
            return self._compute(plan, moves)
        finally:  # also of a step that could not be queued: its blocks are given to others
            if moves is not None:
                moves.hold_all()

    @torch.inference_mode()
    def _compute(self, plan: StepPlan, moves: MovesInFlight | None) -> _Computed:
        if plan.copies and moves is not None:
            moves.hold_all()
        self.slab.copy(plan.copies)
        self.slab.copy_residuals(plan.residual_copies)
        inputs = make_inputs(plan, self.geometry)
        if moves is not None:
            inputs = replace(inputs, moves=moves)
        if plan.late:
            assert self._sampled is not None, "a step behind one that was not launched"
            inputs = replace(inputs, late=late_tokens(plan, self._sampled))
        logits = self.decoder.logits(inputs)
        num_parts = sum(len(part.token_ids) for part in plan.prompt_parts)
        num_sampling = len(logits) - num_parts
        sampled = logits[:num_sampling] if inputs.samples is None else logits[put(inputs.samples, logits.device)]
        all_sample = num_sampling == len(plan.token_ids)
        states = None if all_sample else self.decoder.states()
        return _Computed(sampled, logits[num_sampling:], states, packed_by(plan, inputs))

    def seconds_per_token(self) -> float:
        """Measure what prefilling takes a token, before any block is in use."""
        num_blocks = min(-(-_PROBE_TOKENS // self.geometry.block_size), len(self.slab.data))
        num_tokens = min(_PROBE_TOKENS, num_blocks * self.geometry.block_size)
        times: list[float] = []
        for _ in range(2):  # the first of its shape may compile, and takes new pages of memory
            began = time.perf_counter()
            self._dummy(num_tokens, num_blocks)
            times.append(time.perf_counter() - began)
        return times[-1] / num_tokens

    def seconds_of_steps(self, num_tokens: Sequence[int]) -> list[float]:
        """Measure what steps take that have so many tokens, nearly all of which sample, before any block is in use.

        One row has two tokens: a step with drafts is none of those that a card has graphs of. All sizes take turns, and
        medians count: what is compared later should have seen the same machine, which may be slower for a while.
        """
        times: list[list[float]] = [[] for _ in num_tokens]
        first = time.perf_counter()
        for number in range(_NUM_ROUNDS.stop - 1):
            if number >= _NUM_ROUNDS.start and time.perf_counter() - first > _ROUNDS_S:
                break
            for num, taken in zip(num_tokens, times, strict=True):
                began = time.perf_counter()
                self.run_largest(num, max(1, num - 1))
                taken.append(time.perf_counter() - began)
        return [statistics.median(taken) for taken in times]

    def warm_up(self) -> None:
        """Run one dummy step on block 0: loads or compiles kernels, and finds out a model that cannot work."""
        self._dummy(1, 1)

    def decoding_step(self) -> StepInputs:
        """Return a decoding step of one row, on block 0: what is the same in all of them."""
        return make_inputs(_dummy_plan([1], 1, self.geometry), self.geometry)

    def run_largest(self, num_tokens: int, num_rows: int) -> None:
        """Run a dummy step of so many tokens and rows that sample, all of them on the same blocks."""
        num_rows = min(num_rows, num_tokens)
        self.run(_dummy_plan([num_tokens - num_rows + 1, *[1] * (num_rows - 1)], len(self.slab.data), self.geometry))

    def _dummy(self, num_tokens: int, num_blocks: int) -> None:
        self.run(_dummy_plan([num_tokens], num_blocks, self.geometry))


def _dummy_plan(num_tokens: list[int], num_blocks: int, geometry: KVGeometry) -> StepPlan:
    """Return a plan whose rows have so many tokens, all on the first blocks, and all sample."""
    table = BlockTable(map(BlockId, range(num_blocks)))
    plan, num_rows = StepPlan(0), len(num_tokens)
    plan.token_ids = array("i", [0] * sum(num_tokens))
    plan.starts, plan.num_tokens = [0] * num_rows, num_tokens
    plan.tables = [[table] * len(geometry.groups) for _ in num_tokens]
    plan.residual_ids = [0] * num_rows
    if geometry.packing is not None:
        rule = geometry.packing.keeps
        plan.chunks, plan.mask_of = [[] for _ in num_tokens], [0] * num_rows
        due = [rule.num_packed(num) * rule.chunk_blocks(geometry.block_size) for num in num_tokens]
        plan.packing_rows = [row for row, num in enumerate(due) if num]
        plan.granted = [[Block(BlockId(at % num_blocks)) for at in range(num)] for num in due if num]
    plan.sampling_rows = list(range(num_rows))
    plan.sampling = [SamplingParams()] * num_rows  # not greedy: the sampler has a kernel too
    plan.seeds, plan.draws = [0] * num_rows, [0] * num_rows
    return plan


@contextlib.contextmanager
def _memory_for(plan: StepPlan) -> Iterator[None]:
    """Turn a card's lack of memory into what a user is told; what the step held is given back."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        torch.cuda.empty_cache()
        msg = f"The card has too little memory left for a step of {len(plan.token_ids)} tokens."
        raise CardMemoryError(msg, remedy=_MEMORY_REMEDY) from error


def _result(plan: StepPlan, token_ids: list[int], broken: _Broken, computed: _Computed) -> StepResult:
    """Return what a step says."""
    logits, of_prompts, _, packed = computed
    rows = {plan.sampling_rows[place] for place in broken.places}
    if broken.tokens:
        rows.update(np.searchsorted(np.cumsum(plan.num_tokens), broken.tokens, side="right").tolist())
    if plan.prompt_parts:
        parts = chain.from_iterable([part.row] * len(part.token_ids) for part in plan.prompt_parts)
        rows_of_prompts = list(parts)
        rows.update(rows_of_prompts[at] for at in broken_rows(of_prompts))
    logprobs = _sampled_logprobs(plan, logits, token_ids)
    return StepResult(token_ids, logprobs, _prompt_logprobs(plan, of_prompts), sorted(rows), packed)


def _ignore(_plan: StepPlan, _logits: torch.Tensor) -> None:
    pass


def _sampled_logprobs(plan: StepPlan, logits: torch.Tensor, token_ids: list[int]) -> list[TokenLogprobs]:
    if not plan.logprob_rows:
        return []
    places = plan.logprob_rows
    return token_logprobs(logits[places], [token_ids[place] for place in places], plan.logprob_tops)


def _prompt_logprobs(plan: StepPlan, logits: torch.Tensor) -> list[list[TokenLogprobs]]:
    if not plan.prompt_parts:
        return []
    parts = plan.prompt_parts
    token_ids = list(chain.from_iterable(part.token_ids for part in parts))
    num_tops = list(chain.from_iterable([part.num_top] * len(part.token_ids) for part in parts))
    found = iter(token_logprobs(logits, token_ids, num_tops))
    return [[next(found) for _ in part.token_ids] for part in parts]
