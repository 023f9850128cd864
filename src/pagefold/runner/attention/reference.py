"""Attention over blocks in plain torch: slow and obvious, any dtype. The other implementations are held to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pagefold.runner.attention.inputs import AttentionInputs
    from pagefold.runner.slab import Slab

__all__ = ["reference_attention"]


def reference_attention(  # noqa: PLR0913, PLR0917 - the operands of the op
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slab: Slab,
    inputs: AttentionInputs,
    layer: int,
    scale: float,
) -> torch.Tensor:
    """See :class:`~pagefold.runner.attention.inputs.AttentionBackend`."""
    num_kv_heads = key.shape[1]
    group = query.shape[1] // num_kv_heads
    out = torch.empty_like(query)
    places = [
        [_entries(inputs, s, layer, h, slab.block_size) for h in range(num_kv_heads)] for s in range(inputs.num_seqs)
    ]
    for s, heads in enumerate(places):
        first, last = int(inputs.query_starts[s]), int(inputs.query_starts[s + 1])
        for h, (blocks, offsets, cell) in enumerate(heads):
            new = slice(len(blocks) - (last - first), None)
            slab.keys[blocks[new], cell, offsets[new]] = key[first:last, h]
            slab.values[blocks[new], cell, offsets[new]] = value[first:last, h]
    for s, heads in enumerate(places):
        first, last = int(inputs.query_starts[s]), int(inputs.query_starts[s + 1])
        num_queries = last - first
        for h, (blocks, offsets, cell) in enumerate(heads):
            keys = slab.keys[blocks, cell, offsets]  # [n, D]
            values = slab.values[blocks, cell, offsets]  # [n, D]
            queries = query[first:last, h * group : (h + 1) * group]  # [num_queries, G, D]
            scores = torch.einsum("qgd,nd->qgn", queries, keys) * scale
            num_entries = len(blocks)
            visible = torch.arange(num_entries)[None] <= torch.arange(num_entries - num_queries, num_entries)[:, None]
            scores = scores.masked_fill(~visible[:, None, :], float("-inf"))
            out[first:last, h * group : (h + 1) * group] = torch.einsum("qgn,nd->qgd", scores.softmax(-1), values)
    return out


def _entries(
    inputs: AttentionInputs, s: int, layer: int, h: int, block_size: int
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return block and offset of each of the entries of sequence ``s`` and head ``h``, and their cell."""
    entries = torch.arange(int(inputs.lengths[s, h]))
    table = torch.tensor(inputs.tables[s, h], dtype=torch.long)
    return table[entries // block_size], entries % block_size, int(inputs.cells[s, layer, h])
