"""TorchRunner: carries out plans with a real model. Copy, compute and write KV, sample."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import torch

from pagefold.errors import UnsupportedModelError
from pagefold.kv import BlockId
from pagefold.request import SamplingParams
from pagefold.runner.inputs import make_inputs
from pagefold.runner.loader import AttentionContext
from pagefold.runner.sampler import sample
from pagefold.steps import StepPlan, StepResult

if TYPE_CHECKING:
    from pagefold.kv import KVGeometry
    from pagefold.runner.attention import AttentionBackend
    from pagefold.runner.slab import Slab

__all__ = ["TorchRunner"]


class TorchRunner:
    """A :class:`~pagefold.steps.Runner` over a transformers decoder.

    Args:
        model: what :func:`~pagefold.runner.loader.load_model` returned.
        geometry: of its KV.
        slab: its blocks.
        attention: the implementation.
        max_model_len: no sequence gets longer.
    """

    def __init__(
        self,
        model: Any,  # noqa: ANN401
        geometry: KVGeometry,
        slab: Slab,
        attention: AttentionBackend,
        *,
        max_model_len: int,
    ) -> None:
        self.model = model
        self.geometry = geometry
        self.slab = slab
        self._attention = attention
        self._max_model_len = max_model_len

    def run(self, plan: StepPlan) -> StepResult:
        """Run one step; see :class:`~pagefold.steps.Runner`."""
        logits = self.logits(plan)
        return StepResult(sample(logits, plan.sampling, plan.seeds, plan.draws))

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Run one step and return the logits of its sampling rows, ``[R, vocab]``, instead of sampling."""
        self.slab.copy(plan.copies)
        inputs = make_inputs(plan, self.geometry)
        context = AttentionContext(self._attention, self.slab, inputs.attention, max_model_len=self._max_model_len)
        output = self.model(
            input_ids=inputs.token_ids,
            position_ids=inputs.positions,
            use_cache=False,
            logits_to_keep=inputs.logit_rows,
            paged=context,
        )
        if context.layers != list(range(self.geometry.num_layers)):
            msg = f"The model attended in layers {context.layers}, not once in each of {self.geometry.num_layers}."
            raise UnsupportedModelError(msg, remedy="Use a model with one plain attention a layer.")
        logits: torch.Tensor = output.logits[0]
        return logits

    def warm_up(self) -> None:
        """Run one dummy step on block 0: loads or compiles kernels, and finds out a model that cannot work."""
        plan = StepPlan(0)
        plan.token_ids = array("i", [0])
        plan.starts, plan.num_tokens, plan.block_ids = [0], [1], [[BlockId(0)]]
        plan.sampling_rows, plan.sampling = [0], [SamplingParams(temperature=0.0)]
        plan.seeds, plan.draws = [0], [0]
        self.run(plan)
