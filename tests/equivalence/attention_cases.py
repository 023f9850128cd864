"""Random cases of the attention op in its general signature, beside the dense arithmetic that they stand for.

A case knows, for every sequence and KV head, the keys and values that its queries see, as plain tensors, and has the
same laid out in blocks: tables, lengths and cells that differ by head, blocks that sequences share, also ones that are
written in the same step, and NaN in every slot and block that nothing may read.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch

from pagefold.kv import KVGeometry
from pagefold.runner.attention import AttentionInputs
from pagefold.runner.slab import LAYOUT, Slab

__all__ = ["Case", "Lengths", "Shape", "make_case"]


class Shape(NamedTuple):
    """What a kernel is compiled for, and how many heads and layers there are."""

    block_size: int
    head_dim: int
    num_kv_heads: int
    group: int
    num_layers: int = 2


class Lengths(NamedTuple):
    """One sequence: entries before the step, tokens of the step, and how much of the sequence before it it shares.

    ``num_shared`` is rounded down to whole blocks that the sequence before has, which may be blocks of this very step.
    """

    num_old: int
    num_new: int
    num_shared: int = 0


@dataclass
class Case:
    """Operands for one layer, and what they mean.

    Attributes:
        query, key, value: as the op takes them, float64.
        slab: float64, with NaN wherever nothing may be read.
        inputs: of the op.
        layer: which layer it is.
        scale: of the scores.
        softcap: of the scores; 0 for none.
        dense: for each sequence and KV head, keys and values of all its entries, ``[n, D]`` each.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    slab: Slab
    inputs: AttentionInputs
    layer: int
    scale: float
    softcap: float
    dense: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]

    def expected(self) -> torch.Tensor:
        """Return the op's result by dense attention, head by head, in float64: ``[T, H, D]``.

        Torch's, or with a softcap, which that has not, our own.
        """
        out = torch.empty_like(self.query)
        group = self.query.shape[1] // self.key.shape[1]
        for (s, h), (keys, values) in self.dense.items():
            tokens = slice(int(self.inputs.query_starts[s]), int(self.inputs.query_starts[s + 1]))
            heads = slice(h * group, (h + 1) * group)
            queries = self.query[tokens, heads].transpose(0, 1)  # [G, q, D]
            num_queries, num_entries = queries.shape[1], len(keys)
            visible = torch.ones(num_queries, num_entries, dtype=torch.bool).tril(num_entries - num_queries)
            operands = queries, keys.expand(group, -1, -1), values.expand(group, -1, -1)
            if self.softcap:
                attended = _softcapped(*operands, visible, self.scale, self.softcap)
            else:
                attended = torch.nn.functional.scaled_dot_product_attention(
                    *operands, attn_mask=visible, scale=self.scale
                )
            out[tokens, heads] = attended.transpose(0, 1)
        return out

    def round_to(self, dtype: torch.dtype) -> None:
        """Let all numbers be what ``dtype`` holds, so that only the op's own rounding is judged."""
        for name in ("query", "key", "value"):
            setattr(self, name, getattr(self, name).to(dtype).double())
        self.slab.data.copy_(self.slab.data.to(dtype).double())
        for at, (keys, values) in self.dense.items():
            self.dense[at] = keys.to(dtype).double(), values.to(dtype).double()

    def pad(self, num_padding: int) -> None:
        """Append rows without entries to a decoding step whose heads share tables, and operands for them."""
        real, num_kv_heads = self.inputs, self.key.shape[1]
        num_rows = real.num_seqs + num_padding
        tables = np.concatenate([real.tables[:, :1], np.zeros((num_padding, 1, real.tables.shape[2]), np.int32)])
        lengths = np.concatenate([real.lengths[:, :1], np.zeros((num_padding, 1), np.int32)])
        self.inputs = AttentionInputs(
            query_starts=np.arange(num_rows + 1, dtype=np.int32),
            tables=np.broadcast_to(tables, (num_rows, num_kv_heads, tables.shape[2])),
            lengths=np.broadcast_to(lengths, (num_rows, num_kv_heads)),
            cells=np.broadcast_to(real.cells[:1], (num_rows, *real.cells.shape[1:])),
        )
        for name in ("query", "key", "value"):
            operand = getattr(self, name)
            ones = torch.ones(num_padding, *operand.shape[1:], dtype=operand.dtype)
            setattr(self, name, torch.cat([operand, ones]))

    def to(self, dtype: torch.dtype, layout: str = LAYOUT, device: str = "cpu") -> tuple[Any, ...]:
        """Return fresh operands of that dtype, in the op's order, with a slab of that layout, on that device."""
        data = torch.empty_like(self.slab.data, dtype=dtype, device=device)
        slab = Slab(data, self.slab.keys.shape[-1], layout)
        slab.keys.copy_(self.slab.keys)
        slab.values.copy_(self.slab.values)
        operands = (tensor.to(device, dtype, copy=True) for tensor in (self.query, self.key, self.value))
        return *operands, slab, self.inputs, self.layer, self.scale, self.softcap


def _softcapped(  # noqa: PLR0917 - the operands of the op
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """Soft-capped attention query by query, as the formula says it: ``[G, q, D]``."""
    out = torch.empty_like(queries)
    for q in range(queries.shape[1]):
        seen_keys, seen_values = keys[:, visible[q]], values[:, visible[q]]  # [G, n, D]
        scores = (seen_keys * queries[:, q, None]).sum(-1) * scale
        weights = torch.exp(softcap * torch.tanh(scores / softcap))
        out[:, q] = (weights[..., None] * seen_values).sum(1) / weights.sum(-1, keepdim=True)
    return out


def make_case(
    shape: Shape, sequences: list[Lengths], *, per_head: bool, seed: int, sharpness: float = 1.0, softcap: float = 0.0
) -> Case:
    """Make a case.

    Args:
        shape: of the op.
        sequences: of the step, in order.
        per_head: whether tables, lengths and cells differ by head; else they are broadcast, as the runner does it.
        seed: of all numbers and of who gets which block.
        sharpness: factor of the scores, whose standard deviation is 1.
        softcap: of the scores; 0 for none.
    """
    random, generator = Random(seed), torch.Generator().manual_seed(seed)
    maker = _CaseMaker(shape, sequences, per_head=per_head, random=random, generator=generator)
    return maker.make(sharpness, softcap)


class _CaseMaker:
    def __init__(
        self, shape: Shape, sequences: list[Lengths], *, per_head: bool, random: Random, generator: torch.Generator
    ) -> None:
        self.shape = shape
        self.sequences = sequences
        self.per_head = per_head
        self.random = random
        self.generator = generator
        self.tables = (per_head and shape.num_kv_heads) or 1  # how many tables a sequence has

    def make(self, sharpness: float, softcap: float) -> Case:
        shape, sequences = self.shape, self.sequences
        block_size, num_kv_heads, num_layers = shape.block_size, shape.num_kv_heads, shape.num_layers
        lengths = np.array([self._lengths(sequence) for sequence in sequences], dtype=np.int32)  # [S, tables]
        widths = -(-lengths // block_size)
        num_blocks = int(widths.sum()) + 3
        num_cells = num_layers * num_kv_heads
        spare_cells = 1 if self.per_head else 0
        geometry = KVGeometry(1, num_cells + spare_cells, shape.head_dim, 8, block_size)
        slab = Slab.allocate(geometry, num_blocks, torch.float64)
        slab.data.fill_(float("nan"))
        free = list(range(num_blocks))
        self.random.shuffle(free)
        unused = free.pop()
        tables = np.full((len(sequences), self.tables, int(widths.max()) + 1), unused, dtype=np.int32)
        cells = np.empty((len(sequences), num_layers, num_kv_heads), dtype=np.int32)
        order = list(range(num_cells + spare_cells))
        for s in range(len(sequences)):
            if self.per_head and not sequences[s].num_shared:
                self.random.shuffle(order)  # who shares blocks shares their cells
            cells[s] = np.array(order[:num_cells]).reshape(num_layers, num_kv_heads)
            for t in range(self.tables):
                num_shared = self._num_shared_blocks(s, t, lengths)
                tables[s, t, :num_shared] = tables[s - 1, t, :num_shared]
                for index in range(num_shared, widths[s, t]):
                    tables[s, t, index] = free.pop()
        query_starts = np.cumsum([0, *(sequence.num_new for sequence in sequences)]).astype(np.int32)
        num_tokens = int(query_starts[-1])
        case = Case(
            query=self._normal(num_tokens, num_kv_heads * shape.group, shape.head_dim),
            key=self._normal(num_tokens, num_kv_heads, shape.head_dim),
            value=self._normal(num_tokens, num_kv_heads, shape.head_dim),
            slab=slab,
            inputs=AttentionInputs(
                query_starts=query_starts,
                tables=np.broadcast_to(tables, (len(sequences), num_kv_heads, tables.shape[2])),
                lengths=np.broadcast_to(lengths, (len(sequences), num_kv_heads)),
                cells=np.broadcast_to(cells if self.per_head else cells[:1], cells.shape),
            ),
            layer=self.random.randrange(num_layers),
            scale=sharpness * shape.head_dim**-0.5,
            softcap=softcap,
            dense={},
        )
        self._fill(case)
        return case

    def _lengths(self, sequence: Lengths) -> list[int]:
        """Return how many entries each table of a sequence has after the step."""
        lengths = [sequence.num_old + sequence.num_new]
        while len(lengths) < self.tables:
            lengths.append(self.random.randint(0, sequence.num_old) + sequence.num_new)
        return lengths

    def _num_shared_blocks(self, s: int, t: int, lengths: np.ndarray) -> int:
        """Blocks that sequence ``s`` takes from the one before: whole, and written before its own tokens begin."""
        if not s:
            return 0
        num_old = int(lengths[s, t]) - self.sequences[s].num_new
        return min(self.sequences[s].num_shared, num_old, int(lengths[s - 1, t])) // self.shape.block_size

    def _fill(self, case: Case) -> None:
        """Write what came before the step into the blocks, and note what each head will see."""
        inputs, slab = case.inputs, case.slab
        for s, sequence in enumerate(self.sequences):
            first = int(inputs.query_starts[s])
            new = slice(first, first + sequence.num_new)
            for h in range(self.shape.num_kv_heads):
                t = h if self.per_head else 0
                num_old = int(inputs.lengths[s, h]) - sequence.num_new
                num_shared = self._num_shared_blocks(s, t, inputs.lengths) * slab.block_size
                keys, values = self._normal(num_old, self.shape.head_dim), self._normal(num_old, self.shape.head_dim)
                if num_shared:
                    keys[:num_shared], values[:num_shared] = (kv[:num_shared] for kv in case.dense[s - 1, h])
                entries = np.arange(num_shared, num_old)
                blocks, slots = inputs.tables[s, h, entries // slab.block_size], entries % slab.block_size
                slab.keys[blocks, inputs.cells[s, case.layer, h], slots] = keys[num_shared:]
                slab.values[blocks, inputs.cells[s, case.layer, h], slots] = values[num_shared:]
                case.dense[s, h] = torch.cat([keys, case.key[new, h]]), torch.cat([values, case.value[new, h]])

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)
