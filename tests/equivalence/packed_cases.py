"""Sequences whose older chunks are packed, computed step by step, beside the dense arithmetic that they stand for.

It does what a server does: a step writes whole blocks, packs chunks that nobody sees whole behind it, and attends,
layer by layer. Whole blocks that nobody sees any more are given back, and NaN is in every slot that nobody has written
or may read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import numpy as np
import torch
from hypothesis import strategies as st

from pagefold.kv import KVGeometry
from pagefold.runner.attention import AttentionInputs, GroupInputs
from pagefold.runner.attention.packed import KeptUnits, PackedInputs, UnitShape
from pagefold.runner.attention.packed_reference import pack_chunk, packed_attention, write_whole
from pagefold.runner.slab import LAYOUT, Slab

__all__ = ["KEEPERS", "NUM_SINKS", "Holder", "PackedCase", "Run", "cut", "keep_some", "steps_of"]

NUM_SINKS = 4


def keep_some(share):
    """Keep so much of everything, by chance; more in some heads than in others."""

    def keeps(shape, random):
        shares = share * (0.5 + torch.rand(*shape[:2], 1, generator=random, dtype=torch.float64))
        return torch.rand(shape, generator=random, dtype=torch.float64) < shares

    return keeps


def _keep_one_head(shape, random):
    keep = torch.zeros(shape, dtype=torch.bool)
    keep[-1, -1] = True
    return keep


KEEPERS = {
    "nothing": lambda shape, random: torch.zeros(shape, dtype=torch.bool),
    "everything": lambda shape, random: torch.ones(shape, dtype=torch.bool),
    "one head": _keep_one_head,
    "a hundredth": keep_some(0.01),
    "half": keep_some(0.5),
}
"""What is kept, of bits ``[L, Hkv, n]``."""


def cut(length, size):
    """Cut a prompt into steps of so many tokens."""
    return [min(size, length - start) for start in range(0, length, size)]


@st.composite
def steps_of(draw, lengths, most):
    """Draw steps in which all tokens of some sequences are computed, of up to so many of each."""
    steps, left = [], dict(enumerate(lengths))
    while left:
        seqs = draw(st.lists(st.sampled_from(sorted(left)), min_size=1, unique=True))
        steps.append([(seq, min(left[seq], draw(st.one_of(st.just(1), st.integers(1, most))))) for seq in seqs])
        left = {seq: rest for seq, num in left.items() if (rest := num - dict(steps[-1]).get(seq, 0))}
    return steps


@dataclass
class Holder:
    """What one sequence holds while it runs; lists are in order.

    Attributes:
        table: whole blocks, from ``first`` on.
        first: the entry that the table begins with.
        sink_ids: the first whole blocks of all.
        chunks: what is packed.
        num_entries: how many it has.
    """

    table: list = field(default_factory=list)
    first: int = 0
    sink_ids: list = field(default_factory=list)
    chunks: list = field(default_factory=list)
    num_entries: int = 0


class PackedCase:
    """Operands of some sequences in all layers, and what is kept of each.

    Args:
        shape: an ``attention_cases.Shape``.
        lengths: of the sequences.
        keeps: of ``KEEPERS``, or another like these.
        seed: of all numbers.
        masked: the layers whose older chunks are packed; None for all. Others are not computed.
        softcap: of the scores; 0 for none.
        sink_size: standard deviation of the learned sinks; 0 for none.
        num_cells: of a block; None for as many as there are layers and heads.
        chunk_size: tokens of a chunk.
        exact: sequences that see all; only the kernel knows such.
    """

    def __init__(
        self, shape, lengths, keeps, seed=1, *, masked=None, softcap=0.0, sink_size=0.0, num_cells=None, chunk_size=256,
        exact=(),
    ):  # fmt: skip
        random = torch.Generator().manual_seed(seed)

        def normal(*size):
            return torch.randn(size, generator=random, dtype=torch.float64)

        layers, kv_heads, dim = shape.num_layers, shape.num_kv_heads, shape.head_dim
        heads = kv_heads * shape.group
        self.shape, self.lengths, self.seed, self.chunk_size = shape, lengths, seed, chunk_size
        self.masked = tuple(range(layers)) if masked is None else masked
        self.query = [normal(layers, n, heads, dim) for n in lengths]
        self.key = [normal(layers, n, kv_heads, dim) for n in lengths]
        self.value = [normal(layers, n, kv_heads, dim) for n in lengths]
        self.scale, self.softcap, self.exact = dim**-0.5, softcap, exact
        self.sinks = sink_size * normal(heads) if sink_size else None
        self.keep = []
        for n in lengths:
            keep = keeps((layers, kv_heads, -(-n // chunk_size) * chunk_size), random)
            keep[:, :, :NUM_SINKS] = False
            keep[[layer for layer in range(layers) if layer not in self.masked]] = False
            self.keep.append(keep)
        self.units = UnitShape(shape.block_size, num_cells or layers * kv_heads)

    def sees(self, seq, layer, head):
        """Return what each token sees, bool ``[q, k]``: the mask, as its rule says it, number by number."""
        length = self.lengths[seq]
        q, k = torch.arange(length)[:, None], torch.arange(length)
        is_whole = (k // self.chunk_size >= q // self.chunk_size - 1) | (seq in self.exact)
        return (k <= q) & (is_whole | (k < NUM_SINKS) | self.keep[seq][layer, head, :length])

    def dense(self, seq):
        """Return dense attention under the mask, float64 ``[L, n, H, D]``."""
        out = torch.zeros_like(self.query[seq])
        group = self.shape.group
        for layer in self.masked:
            for h in range(self.shape.num_kv_heads):
                heads = slice(h * group, (h + 1) * group)
                scores = self.query[seq][layer, :, heads].transpose(0, 1) @ self.key[seq][layer, :, h].T * self.scale
                if self.softcap:
                    scores = self.softcap * torch.tanh(scores / self.softcap)
                scores = scores.masked_fill(~self.sees(seq, layer, h), -torch.inf)  # [G, q, k]
                if self.sinks is not None:
                    own = self.sinks[heads][:, None, None].expand(*scores.shape[:2], 1)
                    scores = torch.cat([scores, own], -1)
                weights = scores.softmax(-1)[..., : self.lengths[seq]]
                out[layer, :, heads] = (weights @ self.value[seq][layer, :, h]).transpose(0, 1)
        return out

    def run(self, steps, dtype=torch.float64, *, gives_back=True, layout=LAYOUT):
        """Return the outputs of each sequence, ``[L, n, H, D]``.

        Args:
            steps: of each step, which sequences have how many tokens in it: ``[(seq, num_new), ...]``.
            dtype: of everything.
            gives_back: whether whole blocks are given back that nobody sees any more.
            layout: of the slab.
        """
        return Run(self, dtype, layout).all_of(steps, gives_back=gives_back)

    def run_each(self, size, dtype=torch.float64, **how):
        """Return the outputs of sequences that run alone, one behind the other, cut into steps of one size."""
        steps = [[(seq, num)] for seq, length in enumerate(self.lengths) for num in cut(length, size)]
        return self.run(steps, dtype, **how)

    def hold(self, outputs, bound):
        """Hold outputs to dense attention. Return how far off they are at most."""
        errors = [0.0]
        for seq, output in enumerate(outputs):
            assert not output.isnan().any(), "it has read what nothing may read"
            errors.append((output.double() - self.dense(seq)).abs().max().item())
        assert max(errors) <= bound, f"off by {max(errors):.2e}"
        return max(errors)


class Run:
    """A case that is computed step by step."""

    def __init__(self, case, dtype, layout):
        shape = case.shape
        self.case, self.dtype, self.chunk_size = case, dtype, case.chunk_size
        whole = sum(-(-length // shape.block_size) for length in case.lengths)
        units = sum(
            case.units.most_blocks(self.chunk_size, shape.num_layers, shape.num_kv_heads) * (length // self.chunk_size)
            for length in case.lengths
        )
        self.layout = layout
        self.slab = self.allocate(whole + units + 1)
        for block in range(whole + units + 1):
            self.forget(block, 0)
        self.free = list(range(1, whole + units + 1))
        Random(case.seed).shuffle(self.free)
        self.held = [Holder() for _ in case.lengths]
        self.outputs = [torch.zeros_like(query, dtype=dtype) for query in case.query]

    def allocate(self, num_blocks):
        case, shape = self.case, self.case.shape
        geometry = KVGeometry(1, case.units.num_cells, shape.head_dim, self.dtype.itemsize, shape.block_size)
        return Slab.allocate(geometry, num_blocks, self.dtype, layout=self.layout)

    def all_of(self, steps, *, gives_back):
        for step in steps:
            self._step(step)
            for seq, _ in step if gives_back else ():
                if seq not in self.case.exact:
                    self.give_back(self.held[seq])
        assert [held.num_entries for held in self.held] == self.case.lengths, "the test has left something out"
        return self.outputs

    def _step(self, step):
        """Run one step: what it needs is granted before it, whole room for its chunks too."""
        case, shape = self.case, self.case.shape
        to_pack = []
        for seq, num_new in step:
            held = self.held[seq]
            self._grow(held, num_new)
            num_packed = max(0, held.num_entries // self.chunk_size - 1)  # for the token behind the step
            num_packed = 0 if seq in case.exact else num_packed
            for number in range(len(held.chunks), num_packed):
                most = case.units.most_blocks(self.chunk_size, shape.num_layers, shape.num_kv_heads)
                ids = np.array([self.free.pop() for _ in range(most)], np.int32)
                counts = np.zeros((shape.num_layers, shape.num_kv_heads), np.int32)
                held.chunks.append(KeptUnits(case.units, ids, counts))
                to_pack.append((seq, number))
        for layer, attended in zip(case.masked, self.compute(step, to_pack), strict=True):
            for (seq, num_new), own in zip(step, attended.split([num for _, num in step]), strict=True):
                end = self.held[seq].num_entries
                self.outputs[seq][layer, end - num_new : end] = own
        for seq, number in to_pack:
            self.free_spare(self.held[seq], number)

    def compute(self, step, to_pack):
        """Yield what a step attends to, layer by layer, when it has written and packed."""
        case = self.case
        inputs = self.inputs(step)
        packed = PackedInputs(self.chunk_size, NUM_SINKS, tuple(tuple(self.held[seq].chunks) for seq, _ in step))
        rows = {seq: row for row, (seq, _) in enumerate(step)}
        scoring = case.scale, case.softcap, None if case.sinks is None else case.sinks.to(self.dtype)
        for layer in case.masked:
            query, key, value = (self.of_step(own, step, layer) for own in (case.query, case.key, case.value))
            write_whole(key, value, self.slab, inputs, layer)
            for seq, number in to_pack:
                keep = case.keep[seq][:, :, number * self.chunk_size : (number + 1) * self.chunk_size]
                self.held[seq].chunks[number].counts[layer] = keep[layer].sum(-1).numpy()
                pack_chunk(self.slab, inputs, packed, rows[seq], number, keep, [layer])
            yield packed_attention(query, self.slab, inputs, packed, layer, *scoring)

    def _grow(self, held, num_new):
        size = self.case.shape.block_size
        held.num_entries += num_new
        while held.first + len(held.table) * size < held.num_entries:
            held.table.append(self.free.pop())
            if len(held.sink_ids) * size < NUM_SINKS:
                held.sink_ids.append(held.table[-1])

    def free_spare(self, held, number):
        """Give back the blocks of a chunk that were granted and are not needed, now that counts are known."""
        chunk = held.chunks[number]
        num_needed = chunk.shape.num_blocks_for(chunk.counts)
        self.free += chunk.block_ids[num_needed:].tolist()
        held.chunks[number] = KeptUnits(chunk.shape, chunk.block_ids[:num_needed], chunk.counts)

    def give_back(self, held):
        """Give back what no token behind this step sees whole, but for the blocks of sinks, where only these stay."""
        first_seen, size = max(0, held.num_entries // self.chunk_size - 1) * self.chunk_size, self.case.shape.block_size
        while held.first + size <= first_seen:
            block = held.table.pop(0)
            begin = NUM_SINKS - held.first if block in held.sink_ids else 0
            self.forget(block, max(0, begin))
            if block not in held.sink_ids:
                self.free.insert(0, block)
            held.first += size

    def forget(self, block, begin):
        """Make slots of a block from ``begin`` on mean nothing."""
        if begin:
            self.slab.keys[block, :, begin:] = torch.nan
            self.slab.values[block, :, begin:] = torch.nan
        else:
            self.slab.data[block] = torch.nan

    def of_step(self, operands, step, layer):
        ends = {seq: self.held[seq].num_entries for seq, _ in step}
        own = [operands[seq][layer, ends[seq] - num_new : ends[seq]] for seq, num_new in step]
        return torch.cat(own).to(self.dtype)

    def inputs(self, step):
        shape, helds = self.case.shape, [self.held[seq] for seq, _ in step]
        tables, sink_tables = (
            self._padded([own.table for own in helds]),
            self._padded([own.sink_ids for own in helds]),
        )
        lengths = np.array([own.num_entries for own in helds], np.int32)[:, None]
        group = GroupInputs(
            tables=np.broadcast_to(tables, (len(step), shape.num_kv_heads, tables.shape[2])),
            lengths=np.broadcast_to(lengths, (len(step), shape.num_kv_heads)),
            firsts=np.array([own.first for own in helds], np.int32),
            sink_tables=np.broadcast_to(sink_tables, (len(step), shape.num_kv_heads, sink_tables.shape[2])),
        )
        cells = np.arange(shape.num_layers * shape.num_kv_heads, dtype=np.int32)
        cells = cells.reshape(1, shape.num_layers, shape.num_kv_heads)
        return AttentionInputs(
            np.cumsum([0, *(num for _, num in step)]).astype(np.int32),
            (group,),
            (0,) * shape.num_layers,
            np.broadcast_to(cells, (len(step), *cells.shape[1:])),
        )

    @staticmethod
    def _padded(tables):
        padded = np.zeros((len(tables), 1, max(map(len, tables))), np.int32)  # block 0 is nobody's
        for row, table in zip(padded, tables, strict=True):
            row[0, : len(table)] = table
        return padded
