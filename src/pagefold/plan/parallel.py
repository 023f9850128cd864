"""Shards: what each device of a tensor- and pipeline-parallel replica holds. The tightest one binds all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagefold.errors import ConfigError
from pagefold.kv import CacheLayout, Codec, lay_out

if TYPE_CHECKING:
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
    """

    stage: int
    first_layer: int
    end_layer: int
    weight_bytes: int
    layout: CacheLayout
    layers: tuple[DecoderLayer, ...]
    holds_output: bool


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


def shards_of(  # noqa: PLR0913, PLR0917 - a model, how it is stored, and how it is cut
    shape: ModelShape, settings: PlanSettings, weights: WeightDtype, codec: Codec, max_len: int, element_bytes: int
) -> tuple[Shard, ...]:
    """Cut a model: layers by stages (those that do not come out even go to the later stages), heads by devices.

    KV heads are divided among the devices of a stage; where there are more devices than heads, heads are repeated. A
    latent vector is one head, which every device needs. Embedding and output layer lie on the first and the last stage;
    where they are one table and the stages several, both have it.
    """
    size, num_stages = settings.tensor_parallel_size, settings.pipeline_parallel_size
    num_layers = len(shape.layers)
    scale = shape.num_parameters / shape.counted_parameters
    shards = []
    first = 0
    for stage in range(num_stages):
        end = first + num_layers // num_stages + (1 if stage >= num_stages - num_layers % num_stages else 0)
        layers = shape.layers[first:end]
        tables = shape.embedding_parameters if stage == 0 else 0
        is_last = stage == num_stages - 1
        if is_last:
            tables += shape.head_parameters if shape.head_parameters or num_stages == 1 else shape.output_parameters
        whole = shape.other_parameters if is_last else 0
        experts = 0
        for layer in layers:
            heads = layer.kv.num_kv_heads if layer.kv is not None else shape.num_kv_heads
            tables += layer.split_parameters
            whole += layer.whole_parameters + -(-layer.kv_parameters // min(size, heads))
            experts += -(-layer.expert_parameters // size)
        mine = -(-tables // size) + whole + experts
        kept = [layer.kv.shard(size) for layer in layers if layer.kv is not None]
        state = -(-sum(layer.state_elements for layer in layers) * element_bytes // size)
        if not kept:
            message = (
                f"Pipeline stage {stage} (layers {first} to {end - 1}) has no attention layer, so it has no blocks."
            )
            raise ConfigError(message, remedy="Use fewer stages.")
        layout = lay_out(kept, codec, block_size=settings.block_size, state_bytes=state, max_len=max_len)
        weight_bytes = weights.num_bytes(round(mine * scale), round(experts * scale))
        shards.append(Shard(stage, first, end, weight_bytes, layout, layers, is_last))
        first = end
    return tuple(shards)
