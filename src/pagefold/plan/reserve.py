"""Reserve: what an engine takes of a device beside weights and KV. Each part is a span, from a formula."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagefold.plan.span import GIB, NOTHING, Span

if TYPE_CHECKING:
    from pagefold.plan.engine import Engine
    from pagefold.plan.parallel import Shard
    from pagefold.plan.settings import PlanSettings
    from pagefold.plan.shape import DecoderLayer, ModelShape
    from pagefold.plan.tables import Device

__all__ = ["CONTEXT_BYTES", "Profiling", "Reserve", "Step"]

CONTEXT_BYTES = round(0.51 * GIB)
"""Of a device in use before an engine has allocated anything: what vLLM's start logs have as ``cuda_memory``."""

_WORKSPACE = 40 * 2**20
"""What libraries of products keep once they have run: what nine start logs leave when all else is taken off, 34 to 45
MiB."""
_STREAMS = 4
"""How many residual streams live where a feed-forward part is widest."""
_LOGIT_BYTES, _FLOAT_BYTES = 2, 4
_ALONE = Span.of_gib(0.2, 0.25, 0.5)
_TENSOR_PARALLEL = Span.of_gib(1.3, 2.1, 2.5)
_PIPELINE = Span.of_gib(0.04, 0.07, 0.3)
_GRAPH_BYTES, _GRAPH_BYTES_A_LAYER, _EXPERT_GRAPH_BYTES = round(0.3 * GIB), round(0.0175 * GIB), round(0.5 * GIB)
_OWN_OUTSIDE = Span.of_gib(0.25, 0.5, 0.5)
"""Our own server's bound of what is not torch's (``memory/card.py``), until it has measured it."""


@dataclass(frozen=True, slots=True)
class Step:
    """The largest step of an engine.

    Attributes:
        num_tokens: that it computes.
        num_seqs: that it samples for.
        element_bytes: of what it computes in.
    """

    num_tokens: int
    num_seqs: int
    element_bytes: int


@dataclass(frozen=True, slots=True)
class Reserve:
    """What a device has beside weights and KV.

    Attributes:
        activations: what a step needs at its peak.
        outside: what is not torch's: kernels, buffers of communication.
        graphs: CUDA graphs.
    """

    activations: Span
    outside: Span
    graphs: Span


_NO_RESERVE = Reserve(NOTHING, NOTHING, NOTHING)


@dataclass(frozen=True, slots=True)
class Profiling:
    """The run by which an engine finds out what it takes, foreseen.

    Attributes:
        engine: that profiles.
        shape: of the model.
        device: that it runs on.
        settings: that it runs with.
        step: the largest.
    """

    engine: Engine
    shape: ModelShape
    device: Device
    settings: PlanSettings
    step: Step

    def reserve(self, shard: Shard) -> Reserve:
        """Return what is reserved on each device of a stage."""
        if self.device.is_cpu:
            return _NO_RESERVE
        if self.engine.is_ours:
            bound = _own_bound(self.shape, self.step)
            return Reserve(Span(bound // 8, bound, bound), _OWN_OUTSIDE, NOTHING)
        likely = self._activations(shard)
        slack = likely // 10 + GIB // 10
        activations = Span(likely - min(slack, likely // 5), likely, likely + slack)
        graphs = NOTHING if self.settings.enforce_eager else _graphs(shard)
        return Reserve(activations, self._outside(), graphs)

    def _outside(self) -> Span:
        if self.settings.tensor_parallel_size > 1:
            return _TENSOR_PARALLEL
        return _PIPELINE if self.settings.pipeline_parallel_size > 1 else _ALONE

    def _activations(self, shard: Shard) -> int:
        """Return what a step needs at its peak: in the layers, or where it samples; the larger of both."""
        step, size = self.step, self.settings.tensor_parallel_size
        stream = step.num_tokens * self.shape.hidden_size * step.element_bytes
        experts = max(_expert_elements(layer, self.shape.hidden_size, size) for layer in shard.layers)
        inner = max(layer.inner_width for layer in shard.layers) // size
        experts_bytes = step.num_tokens * experts * step.element_bytes
        inside = _STREAMS * stream + step.num_tokens * inner * step.element_bytes + experts_bytes + _WORKSPACE
        if self.settings.pipeline_parallel_size > 1:
            inside += 2 * stream  # what one stage sends to the next
        images = _images(self.shape, step) if shard.stage == 0 else 0
        if not shard.holds_output:
            return inside + images
        # All tokens' outputs are still held, and what experts work in is kept.
        sampling = self._sampling() + stream + experts_bytes + _WORKSPACE
        return max(inside, sampling) + images

    def _sampling(self) -> int:
        """Return what is held of each sequence that is sampled."""
        num_seqs, vocab = min(self.step.num_seqs, self.step.num_tokens), self.shape.vocab_size
        # Logits in 16 bit lie beside those in float32; where all is float32, they are the same.
        logit_bytes = self.engine.logit_bytes - (_LOGIT_BYTES if self.step.element_bytes > _LOGIT_BYTES else 0)
        rows = min(self.device.num_multiprocessors, num_seqs) if self.engine.has_row_buffers else 0
        picked = num_seqs * self.shape.hidden_size * self.step.element_bytes
        return num_seqs * vocab * logit_bytes + rows * vocab * _FLOAT_BYTES + picked


def _expert_elements(layer: DecoderLayer, hidden: int, size: int) -> int:
    """Return the elements of a token that experts work in: two buffers, each as wide as the widest that lies in it."""
    width = layer.expert_width // size
    return layer.num_active_experts * (max(width, hidden) + max(2 * width, hidden)) if width else 0


def _images(shape: ModelShape, step: Step) -> int:
    """Return what the images of a step take: as many of the largest as its tokens hold, and what they become."""
    if shape.vision is None:
        return 0
    num_images = min(step.num_seqs, max(1, step.num_tokens // max(1, shape.vision.tokens)))
    each = shape.vision.pixels + shape.vision.tokens * shape.hidden_size
    return num_images * each * step.element_bytes


def _graphs(shard: Shard) -> Span:
    """Return what CUDA graphs take: by layers, and more where there are experts. A line through 15 start logs."""
    likely = _GRAPH_BYTES + len(shard.layers) * _GRAPH_BYTES_A_LAYER
    if any(layer.expert_width for layer in shard.layers):
        likely += _EXPERT_GRAPH_BYTES
    return Span(likely * 2 // 3, likely, likely * 3 // 2)


def _own_bound(shape: ModelShape, step: Step) -> int:
    """Return our own server's bound on a card, as ``engine/on_card.py`` has it before it measures."""
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    inner = max(layer.inner_width for layer in shape.layers)
    row = step.element_bytes * (4 * shape.hidden_size + 3 * heads + inner) + 8 * shape.hidden_size
    return step.num_tokens * row + step.num_seqs * shape.vocab_size * 48
