"""Shards: what each device of a tensor- and pipeline-parallel replica holds. The tightest one binds all."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from pagefold.errors import ConfigError

if TYPE_CHECKING:
    from pagefold.kv import CacheLayout
    from pagefold.plan.forms import Forms
    from pagefold.plan.settings import PlanSettings
    from pagefold.plan.shape import DecoderLayer, ModelShape
    from pagefold.plan.weights import WeightDtype

__all__ = ["Shard", "check_parallel", "shards_of"]


@dataclass(frozen=True, slots=True)
class Shard:
    """What each device of one pipeline stage holds; those of a stage hold equally much.

    Attributes:
        stage: which of the stages, from 0.
        first_layer, end_layer: its layers, [first, end).
        weight_bytes: of one device.
        layout: of the KV of one device.
        layers: of the stage.
        holds_output: whether the output layer is here.
        extra_bytes: that an engine keeps beside weights: tables of ropes, a tower, matrices in another form.
    """

    stage: int
    first_layer: int
    end_layer: int
    weight_bytes: int
    layout: CacheLayout
    layers: tuple[DecoderLayer, ...]
    holds_output: bool
    extra_bytes: int = 0


def check_parallel(shape: ModelShape, settings: PlanSettings) -> None:
    """Check that the model can be cut as asked.

    Raises:
        ConfigError: its heads or its layers cannot.
    """
    size = settings.tensor_parallel_size
    if shape.num_heads % size:
        fitting = [n for n in range(1, shape.num_heads + 1) if shape.num_heads % n == 0]
        message = f"tensor_parallel_size is {size}, which does not divide the {shape.num_heads} attention heads."
        raise ConfigError(message, remedy=f"It must be one of {', '.join(map(str, fitting))}.")
    if not shape.kv_layers:
        message = f"{shape.name} has no attention layer that keeps KV, so there is nothing to cut into blocks."
        raise ConfigError(message, remedy="Plan for a model with attention layers.")
    heads = max(layer.num_kv_heads for layer in shape.kv_layers)
    if max(heads, size) % min(heads, size):
        message = f"tensor_parallel_size is {size}: {heads} KV heads can be neither divided nor repeated evenly by it."
        raise ConfigError(message, remedy=f"It must divide {heads}, or be a multiple of it.")
    if settings.pipeline_parallel_size > len(shape.layers):
        message = (
            f"pipeline_parallel_size is {settings.pipeline_parallel_size}, and there are {len(shape.layers)} layers."
        )
        raise ConfigError(message, remedy=f"It must be at most {len(shape.layers)}.")


def shards_of(shape: ModelShape, settings: PlanSettings, forms: Forms) -> tuple[Shard, ...]:
    """Cut a model: layers by stages, heads by devices.

    KV heads are divided among the devices of a stage; where there are more devices than heads, heads are repeated. A
    latent vector is one head, which every device needs. Embedding and output layer lie on the first and the last stage;
    where they are one table and the stages several, both have it. Where layers do not come out even, the stages before
    the last have one more, as in vLLM: the last has the output layer.
    """
    size, num_stages = settings.tensor_parallel_size, settings.pipeline_parallel_size
    scale = shape.num_parameters / shape.counted_parameters
    shards = []
    first = 0
    for stage, num_layers in enumerate(_stage_sizes(len(shape.layers), num_stages)):
        end = first + num_layers
        layers = shape.layers[first:end]
        is_last = stage == num_stages - 1
        head = shape.head_parameters if shape.head_parameters or num_stages == 1 else shape.output_parameters
        tables = (shape.embedding_parameters if stage == 0 else 0) + (head if is_last else 0)
        whole = shape.other_parameters if is_last else 0
        quantized = Fraction(shape.head_parameters, size) if is_last and shape.has_quantized_head else Fraction()
        experts = padded = 0
        for layer in layers:
            heads = layer.kv.num_kv_heads if layer.kv is not None else shape.num_kv_heads
            tables += layer.split_parameters
            whole += layer.whole_parameters + -(-layer.kv_parameters // min(size, heads))
            experts += -(-layer.expert_parameters // size)
            quantized += _quantized(layer, size, heads, forms.weights)
            padded += forms.padding(layer.quantized.experts, layer.expert_width, shape.hidden_size, size)
        mine = -(-tables // size) + whole + experts
        kept = 0
        if forms.keeps_16_bit and forms.weights.is_quantized:
            kept = max(0, mine - math.ceil(quantized))
        layout = forms.layout([layer.kv for layer in layers if layer.kv is not None], layers, size)
        if layout is None:
            message = (
                f"Pipeline stage {stage} (layers {first} to {end - 1}) has no attention layer, so it has no blocks."
            )
            raise ConfigError(message, remedy="Use fewer stages.")
        weight_bytes = forms.weights.num_bytes(round((mine + padded) * scale), num_kept=round(kept * scale))
        extra_bytes = forms.extra_bytes(shape, layers, size, is_first=stage == 0)
        shards.append(Shard(stage, first, end, weight_bytes, layout, layers, is_last, extra_bytes))
        first = end
    return tuple(shards)


def _stage_sizes(num_layers: int, num_stages: int) -> list[int]:
    """Return how many layers each stage has; those that do not come out even go to the stages before the last."""
    each, more = divmod(num_layers, num_stages)
    takers = range(num_stages - 1 - more, num_stages - 1)
    return [each + (stage in takers) for stage in range(num_stages)]


def _quantized(layer: DecoderLayer, size: int, heads: int, weights: WeightDtype) -> Fraction:
    """Return how many of a device's parameters of a layer are stored in fewer bits."""
    found = layer.quantized
    experts = Fraction(found.experts, size)
    if weights.is_of_experts:
        return experts
    return Fraction(found.split, size) + found.whole + Fraction(found.kv, min(size, heads)) + experts
