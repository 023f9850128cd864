"""Attention over blocks that are sealed when they are full, in plain torch: slow and obvious, any dtype.

A token sees its own block in 16 bit, up to itself, and all blocks before it as they are sealed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from pagefold.runner.attention.sinks import softmax_with_sinks
from pagefold.runner.sealed_slab import to_residual

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagefold.runner.attention.inputs import AttentionInputs
    from pagefold.runner.slab import SealingSlab

__all__ = ["sealed_reference_attention"]


class _Part(NamedTuple):
    """One KV head of one sequence.

    Attributes:
        head: index of the KV head.
        cell: of this layer.
        tokens: which of the step's tokens are the sequence's.
        start, end: which of its entries these are.
        block_ids: int64 ``[blocks]``: its table,
        first_block: which of its blocks that begins with,
        sink_ids: int64 ``[blocks]``: the first of its blocks, where sink tokens are kept.
        residual_id: where its unsealed block is.
    """

    head: int
    cell: int
    tokens: slice
    start: int
    end: int
    block_ids: torch.Tensor
    first_block: int
    sink_ids: torch.Tensor
    residual_id: int


def sealed_reference_attention(  # noqa: PLR0913, PLR0917 - the operands of the op
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slab: SealingSlab,
    inputs: AttentionInputs,
    layer: int,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    turned: torch.Tensor | None = None,
) -> torch.Tensor:
    """See :class:`~pagefold.runner.attention.inputs.AttentionBackend`."""
    num_tokens, num_kv_heads, head_dim = key.shape
    queries = query.reshape(num_tokens, num_kv_heads, -1, head_dim)  # [T, Hkv, G, D]
    queries_of_sinks = queries if turned is None else turned.reshape(queries.shape)
    out = torch.empty(queries.shape, dtype=query.dtype, device=query.device)
    parts = list(_parts(inputs, layer, slab.block_size))
    recent = [_write(slab, part, key[part.tokens, part.head], value[part.tokens, part.head]) for part in parts]
    size, group = slab.block_size, inputs.group_of(layer)
    for part, (recent_keys, recent_values) in zip(parts, recent, strict=True):
        first = part.start - part.start % size  # entry that ``recent`` begins with
        for begin in range(first, part.end, size):  # the tokens of one block after another
            query_entries = torch.arange(max(begin, part.start), min(begin + size, part.end))
            first_seen = torch.from_numpy(group.first_seen(int(query_entries[0]), len(query_entries)))
            entries = torch.arange(min(begin, int(first_seen.min())), begin)
            sink_entries = torch.arange(min(group.keeps.num_sinks, int(first_seen.max())))
            ids = torch.cat((part.sink_ids[sink_entries // size], part.block_ids[entries // size - part.first_block]))
            keys, values = slab.read(part.cell, ids, torch.cat((sink_entries, entries)))
            own = torch.arange(begin, int(query_entries[-1]) + 1)
            keys = torch.cat((keys, slab.uncentred(part.cell, own, recent_keys[own - first]))).to(query.dtype)
            values = torch.cat((values, recent_values[own - first].float())).to(query.dtype)
            tokens = part.tokens.start + query_entries - part.start
            num_sinks = len(sink_entries)
            of_sinks = torch.einsum("qgd,nd->gqn", queries_of_sinks[tokens, part.head], keys[:num_sinks])
            of_others = torch.einsum("qgd,nd->gqn", queries[tokens, part.head], keys[num_sinks:])
            scores = torch.cat((of_sinks, of_others), -1) * scale
            if softcap:
                scores = softcap * (scores / softcap).tanh()
            seen = torch.cat((entries, own))
            visible = (seen <= query_entries[:, None]) & (seen >= first_seen[:, None])  # [q, n]
            visible = torch.cat((sink_entries < first_seen[:, None], visible), 1)
            scores = scores.masked_fill(~visible.to(query.device), float("-inf"))
            if sinks is None:
                weights = scores.softmax(-1)
            else:
                weights = softmax_with_sinks(scores, sinks.to(scores.dtype).view(num_kv_heads, -1)[part.head])
            out[tokens, part.head] = torch.einsum("gqn,nd->qgd", weights, values)
    return out.flatten(1, 2)


def _write(
    slab: SealingSlab, part: _Part, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write one part's K and V: what is left unsealed into its residual, and all blocks that are full now.

    Returns both in 16 bit, float16 ``[n, D]`` each, from the beginning of the block that the part begins in.
    """
    size = slab.block_size
    num_there = part.start % size
    assert not num_there or part.end <= part.start - num_there + size, "it begins inside a block and ends beyond it"
    entries = torch.arange(part.start, part.end)
    kept_keys, kept_values = slab.residual(part.cell, part.residual_id)
    keys = torch.cat((kept_keys[:num_there], to_residual(slab.centred(part.cell, entries, keys))))
    values = torch.cat((kept_values[:num_there], to_residual(values)))
    num_last = (len(keys) - 1) % size + 1
    kept_keys[:num_last], kept_values[:num_last] = keys[-num_last:], values[-num_last:]
    first_block = part.start // size - part.first_block
    for index in range(len(keys) // size):
        rows = slice(index * size, (index + 1) * size)
        slab.seal(part.cell, int(part.block_ids[first_block + index]), keys[rows], values[rows])
    return keys, values


def _parts(inputs: AttentionInputs, layer: int, block_size: int) -> Iterator[_Part]:
    assert inputs.residual_ids is not None, "blocks are sealed, and nobody said where the unsealed ones are"
    group = inputs.group_of(layer)
    for s in range(inputs.num_seqs):
        tokens = slice(int(inputs.query_starts[s]), int(inputs.query_starts[s + 1]))
        for h in range(group.lengths.shape[1]):
            end = int(group.lengths[s, h])
            yield _Part(
                h,
                int(inputs.cells[s, layer, h]),
                tokens,
                end - (tokens.stop - tokens.start),
                end,
                torch.from_numpy(group.tables[s, h].astype(np.int64)),
                int(group.firsts[s]) // block_size,
                torch.from_numpy(group.sink_blocks(s)[h].astype(np.int64)),
                int(inputs.residual_ids[s]),
            )
