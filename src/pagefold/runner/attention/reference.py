"""Attention over blocks in plain torch: slow and obvious, any dtype. The other implementations are held to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from pagefold.runner.attention.sealed_reference import sealed_reference_attention
from pagefold.runner.attention.sinks import softmax_with_sinks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagefold.runner.attention.inputs import AttentionInputs
    from pagefold.runner.slab import AnySlab

__all__ = ["reference_attention"]


def reference_attention(  # noqa: PLR0913, PLR0917 - the operands of the op
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slab: AnySlab,
    inputs: AttentionInputs,
    layer: int,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    turned: torch.Tensor | None = None,
) -> torch.Tensor:
    """See :class:`~pagefold.runner.attention.inputs.AttentionBackend`."""
    if slab.seals:
        return sealed_reference_attention(query, key, value, slab, inputs, layer, scale, softcap, sinks, turned)
    num_kv_heads, head_dim = key.shape[1:]
    queries = query.reshape(len(query), num_kv_heads, -1, head_dim)  # [T, Hkv, G, D]
    queries_of_sinks = queries if turned is None else turned.reshape(queries.shape)
    out = torch.empty(queries.shape, dtype=query.dtype, device=query.device)
    parts = list(_parts(inputs, layer, slab.block_size))
    for tokens, heads, blocks, cells, entries, *_ in parts if len(key) else ():
        num_old = len(entries) - (tokens.stop - tokens.start)
        for h, (cell, block_ids) in enumerate(zip(cells.tolist(), blocks, strict=True)):
            kv = key[tokens, heads[h]], value[tokens, heads[h]]
            slab.write(cell, block_ids[num_old:], entries[num_old:], kv)
    for tokens, heads, blocks, cells, entries, first_seen, sink_blocks in parts:
        sink_entries = torch.arange(sink_blocks.shape[1])
        all_blocks, all_entries = torch.cat((sink_blocks, blocks), 1), torch.cat((sink_entries, entries))
        read = [slab.read(cell, ids, all_entries) for cell, ids in zip(cells.tolist(), all_blocks, strict=True)]
        keys, values = (torch.stack(vectors).to(query.dtype) for vectors in zip(*read, strict=True))  # [h, n, D] each
        num_sinks = len(sink_entries)
        of_sinks = torch.einsum("qhgd,hnd->hgqn", queries_of_sinks[tokens, heads], keys[:, :num_sinks])
        of_others = torch.einsum("qhgd,hnd->hgqn", queries[tokens, heads], keys[:, num_sinks:])
        scores = torch.cat((of_sinks, of_others), -1) * scale
        if softcap:
            scores = softcap * (scores / softcap).tanh()
        last_seen = entries[len(entries) - len(first_seen) :]
        visible = (entries <= last_seen[:, None]) & (entries >= first_seen[:, None])  # [q, n]
        visible = torch.cat((sink_entries < first_seen[:, None], visible), 1)
        scores = scores.masked_fill(~visible.to(query.device), float("-inf"))
        if sinks is None:
            weights = scores.softmax(-1)
        else:
            own = sinks.to(scores.dtype).view(num_kv_heads, -1)[heads]  # [h, G]
            weights = softmax_with_sinks(scores, own)
        out[tokens, heads] = torch.einsum("hgqn,hnd->qhgd", weights, values)
    return out.flatten(1, 2)


class _Part(NamedTuple):
    """The ``h`` KV heads of one sequence that have as many entries, of which it sees ``n``; mostly all of its heads.

    Attributes:
        tokens: which of the step's tokens are the sequence's.
        heads: int64 ``[h]``.
        blocks: int64 ``[h, n]``: where each entry lies: its block,
        cells: int64 ``[h]``: the cell in it,
        entries: int64 ``[n]``: and which entry it is, from which follows the slot in that.
        first_seen: int64 ``[q]``: the first entry that each of the tokens sees; the last one is its own.
        sink_blocks: int64 ``[h, m]``: where the m sink tokens lie that any of the tokens sees before that: the first
            entries.
    """

    tokens: slice
    heads: torch.Tensor
    blocks: torch.Tensor
    cells: torch.Tensor
    entries: torch.Tensor
    first_seen: torch.Tensor
    sink_blocks: torch.Tensor


def _parts(inputs: AttentionInputs, layer: int, block_size: int) -> Iterator[_Part]:
    group = inputs.group_of(layer)
    for s in range(inputs.num_seqs):
        tokens = slice(int(inputs.query_starts[s]), int(inputs.query_starts[s + 1]))
        num_new, first_block = tokens.stop - tokens.start, int(group.firsts[s]) // block_size
        for num_entries in np.unique(group.lengths[s]):
            heads = np.flatnonzero(group.lengths[s] == num_entries)
            first_seen = group.first_seen(int(num_entries) - num_new, num_new)
            entries = np.arange(first_seen.min(), num_entries)
            sink_entries = np.arange(min(group.keeps.num_sinks, first_seen.max()))
            yield _Part(
                tokens,
                torch.from_numpy(heads),
                torch.from_numpy(group.tables[s, heads][:, entries // block_size - first_block].astype(np.int64)),
                torch.from_numpy(inputs.cells[s, layer, heads].astype(np.int64)),
                torch.from_numpy(entries),
                torch.from_numpy(first_seen),
                torch.from_numpy(group.sink_blocks(s)[heads][:, sink_entries // block_size].astype(np.int64)),
            )
