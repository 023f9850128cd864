"""A plan's columns as the tensors that a forward pass takes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from pagefold.kv import Packed, num_blocks_for
from pagefold.runner.attention import AttentionInputs, GroupInputs
from pagefold.runner.attention.cuda.columns import plan_columns
from pagefold.runner.attention.device_columns import DeviceColumns
from pagefold.runner.attention.packed import KeptUnits, PackedInputs, UnitShape
from pagefold.runner.to_device import pack

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from pagefold.kv import BlockTable, CacheGroup, KVGeometry, PackedChunk
    from pagefold.steps import MovesInFlight, StepPlan

__all__ = ["LateTokens", "StepInputs", "fill_in", "late_tokens", "make_inputs", "on_card", "packed_by"]


class LateTokens(NamedTuple):
    """Tokens that the step before has sampled, which the host has not read yet. Both are where the model computes.

    Attributes:
        at: which of the step's T tokens they are, int64 ``[L]``.
        token_ids: those tokens, int64 ``[L]``.
    """

    at: torch.Tensor
    token_ids: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One flattened ragged batch of T tokens.

    Attributes:
        token_ids: int64 ``[1, T]``.
        positions: int64 ``[1, T]``.
        logit_rows: int64 ``[D + P]``: the tokens whose logits are needed, one for each row that samples and for each
            draft, then one for each token of the prompt parts.
        samples: which of the first D of them each of the R sampling rows takes, int64 ``[R]``; None where each has its
            own.
        attention: where each sequence's KV lies.
        late: those of ``token_ids`` that mean nothing until :func:`fill_in`; None where all are known.
        adapters: the slot of each token's adapter, int64 ``[T]`` on the host; None where none has one.
        moves: blocks that are on their way from the host: before a layer reads KV, ``moves.hold(layer)``; None where
            all are there.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    logit_rows: torch.Tensor
    samples: torch.Tensor | None
    attention: AttentionInputs
    late: LateTokens | None = None
    adapters: NDArray[np.int64] | None = None
    moves: MovesInFlight | None = None


def make_inputs(plan: StepPlan, geometry: KVGeometry) -> StepInputs:
    """Turn ``plan`` into tensors. All heads of a sequence share its tables and lengths: broadcast, stride 0.

    In all cache groups of today, a token's entry has the number of its position.
    """
    starts = np.array(plan.starts, dtype=np.int64)
    num_tokens = np.array(plan.num_tokens, dtype=np.int64)
    query_starts = np.zeros(plan.num_rows + 1, dtype=np.int32)
    np.cumsum(num_tokens, out=query_starts[1:])
    positions = np.arange(query_starts[-1]) + np.repeat(starts - query_starts[:-1], num_tokens)
    ends = starts + num_tokens
    sampled_at = query_starts[1:][plan.sampling_rows].astype(np.int64) - 1
    for one in plan.drafted:
        sampled_at[one.place : one.place + one.num_drafts] -= np.arange(one.num_drafts, 0, -1)
    logit_rows, places = np.unique(sampled_at, return_inverse=True)  # they ascend already
    samples = torch.from_numpy(places) if len(logit_rows) < len(sampled_at) else None
    if plan.prompt_parts:
        firsts = [(int(query_starts[part.row]) + part.offset, len(part.token_ids)) for part in plan.prompt_parts]
        logit_rows = np.concatenate([logit_rows, *(np.arange(first, first + length) for first, length in firsts)])
    group_of_layer, cells = _layers_of(geometry)
    groups = []
    for index, group in enumerate(geometry.groups):
        tables = [row[index] for row in plan.tables]
        begins = np.array([table.num_trimmed * group.block_size for table in tables], np.int32)
        groups.append(_group_inputs(tables, begins, ends, group))
    return StepInputs(
        token_ids=torch.from_numpy(np.array(plan.token_ids, dtype=np.int64))[None],
        positions=torch.from_numpy(positions)[None],
        logit_rows=torch.from_numpy(logit_rows),
        samples=samples,
        attention=AttentionInputs(
            query_starts=query_starts,
            groups=tuple(groups),
            group_of_layer=group_of_layer,
            cells=np.broadcast_to(cells, (plan.num_rows, *cells.shape)),
            residual_ids=np.array(plan.residual_ids, dtype=np.int32) if plan.residual_ids else None,
            sources=geometry.sources,
            packed=_packed_inputs(plan, geometry),
        ),
        adapters=_adapters_of(plan, num_tokens),
    )


def _adapters_of(plan: StepPlan, num_tokens: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Return the slot of each token's adapter; None where no row has one."""
    if not plan.adapted:
        return None
    slots = np.zeros(plan.num_rows, np.int64)
    for row, slot in plan.adapted:
        slots[row] = slot
    return np.repeat(slots, num_tokens)


def _packed_inputs(plan: StepPlan, geometry: KVGeometry) -> PackedInputs | None:
    """Return where each row has its older chunks, those included that the step packs; None where none are packed."""
    group = geometry.packing
    if group is None:
        return None
    rule, shape = group.keeps, UnitShape(group.block_size, group.num_cells)
    assert rule.window is not None, "chunks have a size"
    num_blocks = rule.chunk_blocks(group.block_size)
    chunks = [[_units_of(chunk, shape) for chunk in row] for row in plan.chunks]
    num_old = tuple(map(len, chunks))
    for row, granted in zip(plan.packing_rows, plan.granted, strict=True):
        ids = np.array([block.block_id for block in granted], np.int32)
        for own in ids.reshape(-1, num_blocks):
            counts = np.zeros((geometry.num_layers, geometry.num_kv_heads), np.int32)
            chunks[row].append(KeptUnits(shape, own, counts))
    return PackedInputs(rule.window, 0, tuple(map(tuple, chunks)), num_old, np.array(plan.mask_of, np.int32))


def _units_of(chunk: PackedChunk, shape: UnitShape) -> KeptUnits:
    """Return where ``chunk`` lies now, of which the step that packed it told the counts alone.

    A chunk that came back from another tier lies elsewhere than where it was packed.
    """
    assert isinstance(chunk.counts, np.ndarray), "the core keeps what it was told"
    return KeptUnits(shape, np.array([block.block_id for block in chunk.blocks], np.int32), chunk.counts)


def packed_by(plan: StepPlan, inputs: StepInputs) -> list[list[Packed]]:
    """Return what a step has packed, for each of the plan's packing rows, chunk by chunk."""
    packed = inputs.attention.packed
    if packed is None or packed.num_old is None:
        return []
    return [
        [
            Packed(chunk.shape.num_blocks_for(chunk.counts), chunk.counts)
            for chunk in packed.chunks[row][packed.num_old[row] :]
        ]
        for row in plan.packing_rows
    ]


def _group_inputs(
    tables: Sequence[BlockTable], firsts: NDArray[np.int32], ends: NDArray[np.int64], group: CacheGroup
) -> GroupInputs:
    """Return where one cache group has the entries of each row.

    Args:
        tables: of each row, which may hold more blocks than the row fills.
        firsts: the entry that each row's table begins with.
        ends: entries of each row after the step.
        group: whose blocks these are.
    """
    widths = -(-ends // group.block_size) - firsts // group.block_size
    num_rows, max_blocks, num_kv_heads = len(ends), int(widths.max()), group.num_kv_heads
    block_ids = np.zeros((num_rows, max_blocks), np.int32)
    for row, (table, width) in enumerate(zip(tables, widths.tolist(), strict=True)):
        block_ids[row, :width] = table.block_ids[:width]
    num_sink_blocks = num_blocks_for(group.keeps.num_sinks, group.block_size)
    sink_ids = np.zeros((num_rows, num_sink_blocks), np.int32)
    for row, table in enumerate(tables) if num_sink_blocks else ():
        first_ids = table.first_ids(num_sink_blocks)
        sink_ids[row, : len(first_ids)] = first_ids
    return GroupInputs(
        tables=np.broadcast_to(block_ids[:, None], (num_rows, num_kv_heads, max_blocks)),
        lengths=np.broadcast_to(ends.astype(np.int32)[:, None], (num_rows, num_kv_heads)),
        firsts=firsts,
        keeps=group.keeps,
        sink_tables=np.broadcast_to(sink_ids[:, None], (num_rows, num_kv_heads, num_sink_blocks)),
    )


@lru_cache(maxsize=8)
def _layers_of(geometry: KVGeometry) -> tuple[tuple[int, ...], NDArray[np.int32]]:
    """Return each layer's group, and the numbers of its cells, int32 ``[L, Hkv]``."""
    (num_kv_heads,) = {group.num_kv_heads for group in geometry.groups}  # attention reads blocks of one shape
    (_,) = {group.block_size for group in geometry.groups}
    layers = range(geometry.num_layers)
    cells = [[geometry.cell(layer, head) for head in range(num_kv_heads)] for layer in layers]
    return geometry.group_of_layer, np.array(cells, np.int32)


def late_tokens(plan: StepPlan, sampled: torch.Tensor) -> LateTokens:
    """Take the late tokens of ``plan`` from what the step before sampled, int64 ``[R]``, where that lies."""
    at, places = pack([np.array(plan.late, dtype=np.int64), np.array(plan.late_from, dtype=np.int64)], sampled.device)
    return LateTokens(at, sampled[places])


def fill_in(token_ids: torch.Tensor, late: LateTokens | None) -> None:
    """Write late tokens into ``token_ids``, int64 ``[1, T]``; the host does not wait for them."""
    if late is not None:
        token_ids[0].index_copy_(0, late.at, late.token_ids)


def on_card(inputs: StepInputs, device: torch.device, tokens_a_tile: int, block_size: int) -> StepInputs:
    """Return the same where a card reads it, by one copy that nobody waits for.

    Args:
        inputs: on the host.
        device: the card.
        tokens_a_tile: what the kernels of attention ask for; 0 for an implementation that reads the host's columns.
        block_size: entries a block.
    """
    columns = plan_columns(inputs.attention, tokens_a_tile, block_size) if tokens_a_tile else []
    tensors = inputs.token_ids, inputs.positions, inputs.logit_rows
    token_ids, positions, logit_rows, *there = pack([*(tensor.numpy() for tensor in tensors), *columns], device)
    attention = replace(inputs.attention, on_device=DeviceColumns.of(there)) if columns else inputs.attention
    fill_in(token_ids, inputs.late)
    return replace(
        inputs, late=None, token_ids=token_ids, positions=positions, logit_rows=logit_rows, attention=attention
    )
