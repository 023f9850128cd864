"""Cases of attention whose blocks are sealed when they are full: what kernels of a CPU and of a card are held to."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from pagefold.kv import CODECS, KEEP_ALL, KVGeometry
from pagefold.runner.attention import AttentionInputs, GroupInputs, choose_backend
from pagefold.runner.attention.reference import reference_attention
from pagefold.runner.sealed_slab import SEALED_LAYOUT, SEALED_ROWS_LAYOUT, SealedSlab

__all__ = ["SealedCase", "attend_sealed", "hold_slabs", "seal_extremes"]


class SealedCase:
    """A step of the op over a slab of two layers that holds what its sequences had before, and NaN everywhere else.

    Args:
        shape: of the op.
        sequences: of each the tokens it had, those it computes, and how many of the sequence before it shares: whole
            blocks, also some that the step fills.
        seed: of all numbers.
        rule: what is kept.
        trims: whether tables begin as late as the rule allows, rather than with the first entry.
    """

    def __init__(self, shape, sequences, seed, rule=KEEP_ALL, *, trims=False):
        size, heads, dim = shape.block_size, shape.num_kv_heads, shape.head_dim
        self.shape, self.random = shape, torch.Generator().manual_seed(seed)
        self.geometry = KVGeometry(2, heads, dim, 4, size, CODECS["kivi2"])
        rows, tables, firsts, num_blocks = [], [], [], 0
        last_seen = 0  # of the sequence before, whatever its table begins with
        num_sink_blocks, sink_tables = -(-rule.num_sinks // size), []
        for num_old, num_wanted, num_shared in sequences:
            inside = num_old % size  # then it goes no further than its block
            end = num_old + (min(num_wanted, size - inside) if inside else num_wanted)
            shared = min(num_shared, num_old) // size if rows else 0
            shared = min(shared, rows[-1][1] // size) if rows else 0
            seen = rule.first_seen(num_old) // size
            if seen < last_seen:  # the other has given back blocks that this one needs
                shared = 0
            first, last_seen = seen if trims else 0, seen
            table = []
            for index in range(first, -(-end // size)):
                is_shared = index < shared and index >= firsts[-1]
                table.append(tables[-1][index - firsts[-1]] if is_shared else num_blocks)
                num_blocks += not is_shared
            own = range(num_blocks, num_blocks + min(first, num_sink_blocks))  # the sink tokens of a trimmed table
            num_blocks += len(own)
            sink_tables.append([*own, *table, *[0] * num_sink_blocks][:num_sink_blocks])
            tables.append(table)
            firsts.append(first)
            rows.append((num_old, end, shared))
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).tolist()
        tables, sink_tables = ([[order[block] for block in table] for table in own] for own in (tables, sink_tables))
        width = max(map(len, tables))
        padded = np.array([table + [0] * (width - len(table)) for table in tables], np.int32)
        residual_ids = torch.randperm(len(rows) + 2, generator=self.random)[: len(rows)].numpy().astype(np.int32)
        centres = self.randn(2 * heads, 2, dim)
        self.slab = SealedSlab.allocate(self.geometry, num_blocks, len(rows) + 2, centres)
        self.slab.data.fill_(0xFF)
        self.slab.residuals.fill_(torch.nan)
        self.sealed = {}
        for s, (num_old, _, _) in enumerate(rows):
            for cell in range(2 * heads):
                self._fill(cell, s, rows, (tables[s], sink_tables[s]), firsts[s])
                for part in self.slab.residual(cell, int(residual_ids[s])):
                    part[: num_old % size] = self.randn(num_old % size, dim).half()
        counts = [end - num_old for num_old, end, _ in rows]
        ends = np.array([end for _, end, _ in rows], np.int32)
        cells = np.arange(2 * heads, dtype=np.int32).reshape(1, 2, heads)
        group = GroupInputs(
            np.broadcast_to(padded[:, None], (len(rows), heads, width)),
            np.broadcast_to(ends[:, None], (len(rows), heads)),
            np.array(firsts, np.int32) * size,
            rule,
            np.broadcast_to(np.array(sink_tables, np.int32)[:, None], (len(rows), heads, num_sink_blocks)),
        )
        self.inputs = AttentionInputs(
            np.cumsum([0, *counts], dtype=np.int32),
            (group,),
            (0, 0),
            np.broadcast_to(cells, (len(rows), 2, heads)),
            residual_ids,
        )
        self.query = self.randn(sum(counts), heads * shape.group, dim)
        self.key, self.value = self.randn(sum(counts), heads, dim), self.randn(sum(counts), heads, dim)
        self.turned = self.randn(*self.query.shape) if rule.num_sinks else None

    def _fill(self, cell, s, rows, tables, first):
        """Seal what sequence ``s`` had before the step; what it shares is as the sequence before has it.

        Numbers are drawn of blocks that it holds no more, too: they are the same however tables begin.
        """
        (num_old, _, shared), size = rows[s], self.shape.block_size
        table, sink_table = tables
        for index in range(num_old // size):
            if index < shared:
                block = self.sealed.get((cell, s - 1, index))  # none if the step writes it
            else:
                block = [self.randn(size, self.shape.head_dim).half() for _ in range(2)]
            if block is not None:
                self.sealed[cell, s, index] = block
                if index >= first:
                    self.slab.seal(cell, table[index - first], *block)
                elif index < len(sink_table):
                    self.slab.seal(cell, sink_table[index], *block)

    def randn(self, *shape):
        return torch.randn(*shape, generator=self.random)

    def run(self, backend, layer=1, softcap=0.0, sinks=None, **changes):
        """Return the op's result, and the slab that it left."""
        slab = self.new_slab()
        shape = {"block_size": self.shape.block_size, "head_dim": self.shape.head_dim, "codes_a_byte": 4}
        operands = [changes.get(name, getattr(self, name)) for name in ("query", "key", "value")]
        attention = choose_backend(backend, torch.float32, **shape)
        scoring = self.shape.head_dim**-0.5, softcap, sinks, *([] if self.turned is None else [self.turned])
        return attention(*operands, slab, self.inputs, layer, *scoring), slab

    def new_slab(self, layout=SEALED_LAYOUT, device="cpu"):
        """Return a slab of that layout, on that device, that holds the same."""
        before, size = self.slab, self.shape.block_size
        data, residuals = before.data.clone(), before.residuals.clone()
        slab = SealedSlab(data, residuals, self.geometry, before.centres, layout)
        if layout == SEALED_ROWS_LAYOUT:
            for places in before.places:
                codes = before.data[:, places.keys : places.values].view(len(data), -1, size)
                data[:, places.keys : places.values] = codes.transpose(1, 2).flatten(1)
            keys = before.residuals[:, :, 0].view(*residuals.shape[:2], -1, size)
            residuals[:, :, 0] = keys.transpose(2, 3).flatten(2)
        return SealedSlab(data.to(device), residuals.to(device), self.geometry, slab.centres, layout)

    def padded(self, num_padding):
        """Return the inputs with rows that only fill up a batch behind them."""
        real, heads, groups = self.inputs, self.shape.num_kv_heads, []
        num_rows = real.num_seqs + num_padding
        for group in real.groups:
            tables = np.concatenate([group.tables[:, :1], np.zeros((num_padding, 1, group.tables.shape[2]), np.int32)])
            lengths = np.concatenate([group.lengths[:, :1], np.zeros((num_padding, 1), np.int32)])
            groups.append(
                replace(
                    group,
                    tables=np.broadcast_to(tables, (num_rows, heads, tables.shape[2])),
                    lengths=np.broadcast_to(lengths, (num_rows, heads)),
                    firsts=np.concatenate([group.firsts, np.zeros(num_padding, np.int32)]),
                )
            )
        last = real.query_starts[-1]
        return replace(
            real,
            query_starts=np.concatenate(
                [real.query_starts, np.arange(last + 1, last + num_padding + 1, dtype=np.int32)]
            ),
            groups=tuple(groups),
            cells=np.broadcast_to(real.cells[:1], (num_rows, *real.cells.shape[1:])),
            residual_ids=np.concatenate([real.residual_ids, np.zeros(num_padding, np.int32)]),
        )


def hold_slabs(plain, ours):
    """Hold a slab to the reference's: the same bytes in all blocks and residuals, poison included."""
    assert torch.equal(plain.data, ours.data.cpu()), "blocks are not sealed alike"
    both = (slab.residuals.cpu() for slab in (plain, ours))
    assert torch.equal(*(residuals.view(torch.int16) for residuals in both)), "residuals differ"


def attend_sealed(shape, sequences, dtype, bound, *, seed, card=None, **how):
    """Hold a card's kernels to the reference in float64, and the slab that they leave to its.

    They run on ``card``; without one in Triton's interpreter. Returns the largest error.
    """
    from pagefold.runner.attention.cuda.attention import CudaAttention, HeadShape
    from pagefold.runner.attention.cuda.blocks import reads_of
    from pagefold.runner.codecs import CELL_CODECS

    num_splits, num_padding = how.pop("num_splits", None), how.pop("num_padding", 0)
    layer, softcap = how.pop("layer", 1), how.pop("softcap", 0.0)
    kept = {"rule": how.pop("rule", KEEP_ALL), "trims": how.pop("trims", False)}
    case, dtype = SealedCase(shape, sequences, seed, **kept), getattr(torch, dtype)
    operands = [operand.to(dtype) for operand in (case.query, case.key, case.value)]
    device, *processors = ("cpu", (9, 0), 4) if card is None else ("cuda", card.capability, card.num_processors)
    plain, slab = case.new_slab(SEALED_ROWS_LAYOUT), case.new_slab(SEALED_ROWS_LAYOUT, device)
    others = layer, shape.head_dim**-0.5, softcap
    expected = reference_attention(*(operand.double() for operand in operands), plain, case.inputs, *others)
    assert not expected.isnan().any(), "the reference has read what nothing may read"
    inputs, num_tokens = case.inputs, len(case.query)
    if num_padding:
        inputs = case.padded(num_padding)
        operands = [torch.cat([one, torch.ones(num_padding, *one.shape[1:], dtype=dtype)]) for one in operands]
    heads = case.query.shape[1], shape.num_kv_heads, shape.head_dim
    reads = reads_of(CELL_CODECS["kivi2"])
    attention = CudaAttention(HeadShape(dtype, *heads, *processors, reads), num_splits=num_splits)
    output = attention(*(operand.to(device) for operand in operands), slab, inputs, *others).cpu()
    assert output.dtype == dtype
    assert not output.isnan().any(), "the kernels have read what nothing may read"
    assert not output[num_tokens:].any(), "a row that fills up has seen something"
    hold_slabs(plain, slab)
    error = (output[:num_tokens].double() - expected).abs().max().item()
    assert error <= bound, f"off by {error:.2e}: {shape}, {sequences}, {seed}, {others}, {kept}"
    return error


def seal_extremes(dim, *, card=None):
    """Hold a card's kernels to the reference in bits where K and V of ``dim`` numbers are what no model computes."""
    from pagefold.runner.attention.cuda.attention import CudaAttention, HeadShape
    from pagefold.runner.attention.cuda.blocks import reads_of
    from pagefold.runner.codecs import CELL_CODECS

    generator, size = torch.Generator().manual_seed(5), 16
    some = torch.randn(size, dim, generator=generator)
    first = (torch.arange(size) == 3)[:, None] & (torch.arange(dim) == 5)[None]
    blocks = [some * scale for scale in (0.0, -0.0, 1e-40, 1e-8, 1e-6, 1e4, 1e30)]
    blocks += [some.clamp(min=0), -some.abs(), (some * 4).round(), (some * 2).round() + 0.5, first * 100.0]
    blocks += [torch.full_like(some, 0.3), (some * 4).exp()]
    blocks += [torch.where(first, bad, some) for bad in (torch.inf, -torch.inf, torch.nan)] + [some * torch.nan]
    vectors = torch.cat(blocks)[:, None]
    geometry = KVGeometry(1, 1, dim, 4, size, CODECS["kivi2"])
    inputs = AttentionInputs.of_one_group(
        query_starts=np.array([0, len(vectors)], np.int32),
        tables=np.arange(len(blocks), dtype=np.int32)[None, None],
        lengths=np.array([[len(vectors)]], np.int32),
        cells=np.zeros((1, 1, 1), np.int32),
        residual_ids=np.zeros(1, np.int32),
    )
    device, *processors = ("cpu", (9, 0), 4) if card is None else ("cuda", card.capability, card.num_processors)
    heads = HeadShape(torch.float32, 1, 1, dim, *processors, reads_of(CELL_CODECS["kivi2"]))
    slabs = []
    for attend, where in ((reference_attention, "cpu"), (CudaAttention(heads), device)):
        data = torch.zeros(len(blocks), geometry.bytes_per_block, dtype=torch.uint8, device=where)
        residuals = torch.zeros(1, 1, 2, size * dim, dtype=torch.float16, device=where)
        slab = SealedSlab(data, residuals, geometry, layout=SEALED_ROWS_LAYOUT)
        operand = vectors.to(where)
        output = attend(torch.ones_like(operand), operand, operand, slab, inputs, 0, 1.0).cpu()
        assert output[-size:].isnan().all(), "a vector that is none is hidden"
        slabs.append(slab)
    assert torch.equal(slabs[0].data, slabs[1].data.cpu()), "blocks are not sealed alike"
