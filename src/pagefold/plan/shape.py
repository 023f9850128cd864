"""ModelShape: what of a model costs memory and time, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from pagefold.errors import ConfigError
from pagefold.kv import KeepRule, lay_out
from pagefold.plan.quantized import NOTHING_QUANTIZED, Quantized

if TYPE_CHECKING:
    from collections.abc import Collection

    from pagefold.files.weights import QuantizedTensors
    from pagefold.kv import CacheLayout, Codec, LayerKV
    from pagefold.plan.vision import Vision

__all__ = ["DecoderLayer", "ModelShape"]


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer of a decoder.

    Attributes:
        kv: what it keeps of a token; None where it keeps nothing (it reads another layer's, or has a state).
        state_elements: elements that it keeps of a sequence, however long.
        split_parameters: parameters that tensor parallelism divides.
        whole_parameters: parameters that every device of a tensor-parallel group has: norms, routers, down-projections.
        kv_parameters: of the projections to K and V, which are divided by KV heads only; not in ``split_parameters``.
        expert_parameters: of routed experts, which are divided; not in ``split_parameters``.
        active_share: share of ``expert_parameters`` that one token uses.
        score_width: query heads times the elements of K and of V that each token of context costs a multiplication.
        activation_width: elements that a token has at once between this layer's products, at their widest.
        inner_width: elements that a token has at once in its feed-forward part: gate, up and what they make.
        expert_width: of one routed expert; 0 without experts.
        num_active_experts: how many of them a token uses.
        absorbed_parameters: of matrices that an engine keeps again in another form, where attention is latent.
        quantized: what of its parameters a quantized checkpoint stores in fewer bits.
    """

    kv: LayerKV | None
    state_elements: int = 0
    split_parameters: int = 0
    whole_parameters: int = 0
    kv_parameters: int = 0
    expert_parameters: int = 0
    active_share: float = 1.0
    score_width: int = 0
    activation_width: int = 0
    inner_width: int = 0
    expert_width: int = 0
    num_active_experts: int = 0
    absorbed_parameters: int = 0
    quantized: Quantized = NOTHING_QUANTIZED

    @property
    def num_parameters(self) -> int:
        """Parameters of the layer."""
        return self.split_parameters + self.whole_parameters + self.kv_parameters + self.expert_parameters

    @property
    def num_active_parameters(self) -> float:
        """Parameters that one token is multiplied with."""
        return self.num_parameters - (1 - self.active_share) * self.expert_parameters


@dataclass(frozen=True)
class ModelShape:
    """A model, as far as planning needs to know it.

    Attributes:
        name: what it is called.
        source: where its numbers were read.
        model_type: transformers' name of the family.
        num_heads, num_kv_heads: of its attention.
        head_dim: elements of K of a head.
        hidden_size: width of the residual stream.
        vocab_size: tokens that it knows.
        max_positions: the longest sequence it was made for.
        served_limit: the longest sequence that Pagefold's own server computes as the model is meant; None for all.
        not_served: why Pagefold's own server does not run it; empty where it does.
        layers: of the decoder, in order.
        embedding_parameters: of the tables that tokens are looked up in.
        head_parameters: of the output layer, where it is not the embedding again.
        other_parameters: of neither layers nor tables: the last norm, say.
        dtype: of the checkpoint, as its config names it.
        quantization: how the checkpoint's weights are stored, if not in ``dtype``: ``fp8``, ``mxfp4``, ...
        exact_parameters: counted from the weights' files, where there are any.
        is_fused: whether Pagefold's own server computes it with its fused decoder on a CPU.
        num_ropes: how many tables of cosines and sines that decoder has.
        is_estimate: whether the parameters are counted by the formula of another family.
        rope_elements: of the tables of ropes that other engines keep.
        vision: the tower that it sees with; None for a model of text.
        has_quantized_head: whether a quantized checkpoint quantizes its output layer too.
        blocks: of a GGUF file the quantized matrices, which our own server's fused decoder computes with as they are.
    """

    name: str
    source: str
    model_type: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    layers: tuple[DecoderLayer, ...]
    embedding_parameters: int
    head_parameters: int
    other_parameters: int
    served_limit: int | None = None
    not_served: str = ""
    dtype: str = "bfloat16"
    quantization: str = ""
    exact_parameters: int | None = None
    is_fused: bool = False
    num_ropes: int = 1
    is_estimate: bool = False
    rope_elements: int = 0
    vision: Vision | None = None
    has_quantized_head: bool = False
    blocks: QuantizedTensors | None = None

    @cached_property
    def counted_parameters(self) -> int:
        """Parameters by formula."""
        tables = self.embedding_parameters + self.head_parameters + self.other_parameters
        return tables + sum(layer.num_parameters for layer in self.layers)

    @property
    def num_parameters(self) -> int:
        """Parameters: from the weights' files, else by formula."""
        return self.exact_parameters if self.exact_parameters is not None else self.counted_parameters

    @cached_property
    def num_active_parameters(self) -> float:
        """Parameters that a token is multiplied with on its way through the layers, without the output layer."""
        return sum(layer.num_active_parameters for layer in self.layers)

    @property
    def output_parameters(self) -> int:
        """Parameters of the output layer, its own or the embedding's."""
        return self.head_parameters or self.vocab_size * self.hidden_size

    @property
    def kv_layers(self) -> tuple[LayerKV, ...]:
        """What each layer that keeps something keeps."""
        return tuple(layer.kv for layer in self.layers if layer.kv is not None)

    def storing(self, skipped: Collection[int], codec: Codec) -> ModelShape:
        """Return the model with the KV of these layers stored by ``codec``, however that of the others is.

        Raises:
            ConfigError: it has no such layer, or one that keeps none.
        """
        unknown = [layer for layer in skipped if not 0 <= layer < len(self.layers)]
        if unknown:
            msg = f"kv_cache_dtype_skip_layers has {unknown[0]}, and {self.name} has {len(self.layers)} layers."
            raise ConfigError(msg, remedy=f"Give layers between 0 and {len(self.layers) - 1}.")
        without = [layer for layer in skipped if self.layers[layer].kv is None]
        if without:
            msg = f"kv_cache_dtype_skip_layers has {without[0]}, which keeps no K and V of its own."
            raise ConfigError(msg, remedy="Give layers that have their own.")
        layers = tuple(
            replace(layer, kv=replace(layer.kv, codec=codec)) if number in skipped and layer.kv is not None else layer
            for number, layer in enumerate(self.layers)
        )
        return replace(self, layers=layers)

    def with_sinks(self, window: int, num_sinks: int) -> ModelShape:
        """Return the model as ``streaming_llm`` has it: layers that keep more than both together keep these alone.

        Raises:
            ConfigError: both together are more than it was made for, or no layer keeps more.
        """
        most, made_for = window + num_sinks, min(self.max_positions, self.served_limit or self.max_positions)
        if most > made_for:
            msg = f"streaming_llm and its sinks are {most} tokens together, and {self.name} was made for {made_for}."
            raise ConfigError(msg, remedy=f"Give at most {made_for - num_sinks} for streaming_llm.")
        if all(kv.keeps.window is not None and kv.keeps.window <= most for kv in self.kv_layers):
            msg = f"streaming_llm is {window}, and no layer of {self.name} sees more than that and its sinks anyway."
            raise ConfigError(msg, remedy="Leave it out, or give a smaller window.")
        layers = tuple(
            replace(layer, kv=replace(layer.kv, keeps=KeepRule(window, num_sinks=num_sinks)))
            if layer.kv is not None and (layer.kv.keeps.window is None or layer.kv.keeps.window > most)
            else layer
            for layer in self.layers
        )
        return replace(self, layers=layers)

    @property
    def state_elements(self) -> int:
        """Elements that a sequence keeps however long it is."""
        return sum(layer.state_elements for layer in self.layers)

    def layout(self, codec: Codec, *, block_size: int, max_len: int, state_element_bytes: int = 2) -> CacheLayout:
        """Return how the KV of the whole model is laid out in blocks, for sequences of at most ``max_len`` tokens."""
        state_bytes = self.state_elements * state_element_bytes
        return lay_out(self.kv_layers, codec, block_size=block_size, state_bytes=state_bytes, max_len=max_len)
