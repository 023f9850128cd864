"""TorchRunner: carries out plans with a real model. Copy, compute and write KV, sample."""

from __future__ import annotations

import time
from array import array
from itertools import chain
from typing import TYPE_CHECKING, Protocol

import torch

from pagefold.kv import BlockId
from pagefold.request import SamplingParams
from pagefold.runner.inputs import make_inputs
from pagefold.runner.logits import adjust
from pagefold.runner.logprobs import token_logprobs
from pagefold.runner.sampler import sample
from pagefold.steps import StepPlan, StepResult, TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagefold.kv import KVGeometry
    from pagefold.runner.inputs import StepInputs
    from pagefold.runner.slab import AnySlab
    from pagefold.store import HostArena

__all__ = ["Decoder", "TorchRunner"]


_PROBE_TOKENS = 256
"""What prefilling takes is measured with so many tokens."""


class Decoder(Protocol):
    """Computes a step's tokens: their K and V into the blocks, and logits of some of them."""

    def logits(self, inputs: StepInputs) -> torch.Tensor:
        """Return the logits of ``inputs.logit_rows``, ``[R, vocab]``. They may be valid until the next step only."""


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

    def __init__(self, decoder: Decoder, geometry: KVGeometry, slab: AnySlab, arena: HostArena | None = None) -> None:
        self.geometry = geometry
        self.slab = slab
        self.arena = arena
        self.decoder = decoder
        self.on_prompt_logits: Callable[[StepPlan, torch.Tensor], None] = _ignore

    def run(self, plan: StepPlan) -> StepResult:
        """Run one step; see :class:`~pagefold.steps.Runner`."""
        logits, of_prompts = self._forward(plan)
        if plan.prompt_parts:
            self.on_prompt_logits(plan, of_prompts)
        token_ids = sample(adjust(logits, plan), plan.sampling, plan.seeds, plan.draws)
        return StepResult(token_ids, _sampled_logprobs(plan, logits, token_ids), _prompt_logprobs(plan, of_prompts))

    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Run one step and return the logits of its sampling rows, ``[R, vocab]``, instead of sampling."""
        return self._forward(plan)[0]

    @torch.inference_mode()
    def _forward(self, plan: StepPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """Run one step; return the logits of its sampling rows and of its prompt parts' tokens, ``[., vocab]``."""
        if self.arena is not None:
            self.arena.carry_out(plan.host_ops, self.slab.as_bytes())
        self.slab.copy(plan.copies)
        inputs = make_inputs(plan, self.geometry)
        logits = self.decoder.logits(inputs)
        num_parts = sum(len(part.token_ids) for part in plan.prompt_parts)
        num_sampling = len(logits) - num_parts
        sampled = logits[:num_sampling] if inputs.samples is None else logits[inputs.samples]
        return sampled, logits[num_sampling:]

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

    def warm_up(self) -> None:
        """Run one dummy step on block 0: loads or compiles kernels, and finds out a model that cannot work."""
        self._dummy(1, 1)

    def _dummy(self, num_tokens: int, num_blocks: int) -> None:
        plan = StepPlan(0)
        plan.token_ids = array("i", [0] * num_tokens)
        plan.starts, plan.num_tokens, plan.block_ids = [0], [num_tokens], [list(map(BlockId, range(num_blocks)))]
        plan.sampling_rows, plan.sampling = [0], [SamplingParams()]  # not greedy: the sampler has a kernel too
        plan.seeds, plan.draws = [0], [0]
        self.run(plan)


def _ignore(_plan: StepPlan, _logits: torch.Tensor) -> None:
    pass


def _sampled_logprobs(plan: StepPlan, logits: torch.Tensor, token_ids: list[int]) -> list[TokenLogprobs]:
    if not plan.logprob_rows:
        return []
    places = plan.logprob_rows
    num_tops = [plan.sampling[place].logprobs or 0 for place in places]
    return token_logprobs(logits[places], [token_ids[place] for place in places], num_tops)


def _prompt_logprobs(plan: StepPlan, logits: torch.Tensor) -> list[list[TokenLogprobs]]:
    if not plan.prompt_parts:
        return []
    parts = plan.prompt_parts
    token_ids = list(chain.from_iterable(part.token_ids for part in parts))
    num_tops = list(chain.from_iterable([part.num_top] * len(part.token_ids) for part in parts))
    found = iter(token_logprobs(logits, token_ids, num_tops))
    return [[next(found) for _ in part.token_ids] for part in parts]
