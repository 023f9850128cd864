"""Forms: how an engine stores a model: weights, what it keeps beside them, and blocks of KV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagefold.kv import lay_out
from pagefold.plan.vllm_layout import vllm_layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.kv import CacheLayout, Codec, LayerKV
    from pagefold.plan.engine import Engine
    from pagefold.plan.shape import DecoderLayer, ModelShape
    from pagefold.plan.weights import WeightDtype

__all__ = ["Forms"]

_HIDDEN_MULTIPLE = 256
"""What kernels of MXFP4 want the width of a model to be a multiple of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Forms:
    """How an engine stores a model.

    Attributes:
        engine: whose these are.
        weights: how weights are stored.
        codec: how K and V are.
        block_size: tokens a block.
        max_len: of a sequence.
        element_bytes: of what is computed.
        expert_multiple: what vLLM rounds the width of an expert of MXFP4 up to.
    """

    engine: Engine
    weights: WeightDtype
    codec: Codec
    block_size: int
    max_len: int
    element_bytes: int
    expert_multiple: int = 128

    @property
    def keeps_16_bit(self) -> bool:
        """Whether what is no matrix stays in 16 bit where matrices have fewer.

        Our own server packs all alike, but where a format is of experts only.
        """
        return not self.engine.is_ours or self.weights.is_of_experts

    def layout(self, kept: Sequence[LayerKV], layers: Sequence[DecoderLayer], size: int) -> CacheLayout | None:
        """Return how the KV of these layers lies on one of ``size`` devices; None where they keep none."""
        if not kept:
            return None
        state = -(-sum(layer.state_elements for layer in layers) * self.element_bytes // size)
        sharded = [layer.shard(size) for layer in kept]
        if self.engine.is_ours or state:  # vLLM's pages of states are not known here: ours stand for them
            return lay_out(sharded, self.codec, block_size=self.block_size, state_bytes=state, max_len=self.max_len)
        return vllm_layout(
            sharded, self.codec, block_size=self.block_size, state_bytes=state, even_ratio=self.engine.even_ratio
        )

    def padding(self, num_quantized: int, expert_width: int, hidden: int, size: int) -> int:
        """Return how many parameters of a layer's experts are padding on a device.

        Of MXFP4 vLLM rounds the widths of an expert and of the model up (``mxfp4.py``).
        """
        if self.engine.is_ours or not self.weights.is_of_experts or not expert_width:
            return 0
        mine = -(-expert_width // size)
        width = -(-mine // self.expert_multiple) * self.expert_multiple
        whole = -(-hidden // _HIDDEN_MULTIPLE) * _HIDDEN_MULTIPLE
        return round(num_quantized / size * (width * whole / (mine * hidden) - 1))

    def expert_bytes(self, layer: DecoderLayer, hidden: int, size: int) -> int:
        """Return what the experts of a layer take on a device, padding included."""
        mine = -(-layer.expert_parameters // size)
        padded = self.padding(layer.quantized.experts, layer.expert_width, hidden, size)
        kept = mine - -(-layer.quantized.experts // size) if self.keeps_16_bit else 0
        return self.weights.num_bytes(mine + padded, num_kept=max(0, kept))

    def extra_bytes(self, shape: ModelShape, layers: Sequence[DecoderLayer], size: int, *, is_first: bool) -> int:
        """Return what vLLM keeps of a stage beside its weights; our own server's ropes are counted elsewhere."""
        if self.engine.is_ours:
            return 0
        absorbed = -(-sum(layer.absorbed_parameters for layer in layers) // size)
        tower = 0
        if is_first and shape.vision is not None and shape.exact_parameters is None:
            tower = -(-shape.vision.parameters // size)
        return (absorbed + tower + shape.rope_elements) * self.element_bytes
