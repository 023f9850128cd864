"""Random cases of the attention op in its general signature, beside the dense arithmetic that they stand for.

A case knows, for every sequence and KV head, the keys and values that its queries see, as plain tensors, and has the
same laid out in blocks: tables, lengths and cells that differ by head, blocks that sequences share, also ones that are
written in the same step, cache groups that keep all, a window or a chunk, whose tables begin with any block that the
rule allows, and NaN in every slot and block that nothing may read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Any, NamedTuple

import numpy as np
import torch

from pagefold.kv import KEEP_ALL, KeepRule, KVGeometry
from pagefold.runner.attention import AttentionInputs, GroupInputs
from pagefold.runner.slab import LAYOUT, Slab

__all__ = ["Case", "Lengths", "Shape", "make_case"]


class Shape(NamedTuple):
    """What a kernel is compiled for, how many heads there are, and layers in each cache group."""

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
        sinks: of each query head, float64 ``[H]``; None for none.
        turned: queries as they look at sink tokens, as the op takes them; None where the layer keeps none.
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
    sinks: torch.Tensor | None = None
    turned: torch.Tensor | None = None

    @property
    def group(self) -> GroupInputs:
        """The layer's cache group."""
        return self.inputs.group_of(self.layer)

    def places(self, s: int, h: int, entries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the blocks, and the slots in them, of entries that a sequence has for a KV head."""
        size = self.slab.block_size
        return self.group.tables[s, h, (entries - self.group.firsts[s]) // size], entries % size

    def expected(self) -> torch.Tensor:
        """Return the op's result by dense attention, head by head, in float64: ``[T, H, D]``.

        Torch's, or with a softcap, sinks or sink tokens, which that has not, our own.
        """
        out = torch.empty_like(self.query)
        group = self.query.shape[1] // self.key.shape[1]
        for (s, h), (keys, values) in self.dense.items():
            tokens = slice(int(self.inputs.query_starts[s]), int(self.inputs.query_starts[s + 1]))
            heads = slice(h * group, (h + 1) * group)
            queries = self.query[tokens, heads].transpose(0, 1)  # [G, q, D]
            num_queries, num_entries = queries.shape[1], len(keys)
            visible = torch.ones(num_queries, num_entries, dtype=torch.bool).tril(num_entries - num_queries)
            by_turned = torch.zeros_like(visible)
            for q, seen in enumerate(visible, num_entries - num_queries):
                first_seen = self.group.keeps.first_seen(q)
                seen[:first_seen] = False
                num_sink_tokens = min(first_seen, self.group.keeps.num_sinks)
                seen[:num_sink_tokens] = by_turned[q - num_entries + num_queries, :num_sink_tokens] = True
            operands = queries, keys.expand(group, -1, -1), values.expand(group, -1, -1)
            if self.softcap or self.sinks is not None or self.turned is not None:
                sinks = torch.full((group,), -torch.inf) if self.sinks is None else self.sinks[heads]
                turned = queries if self.turned is None else self.turned[tokens, heads].transpose(0, 1)
                sight = visible, turned, by_turned
                attended = _plainly(*operands, sight, self.scale, self.softcap, sinks)
            else:
                attended = torch.nn.functional.scaled_dot_product_attention(
                    *operands, attn_mask=visible, scale=self.scale
                )
            out[tokens, heads] = attended.transpose(0, 1)
        return out

    @property
    def scoring(self) -> tuple[Any, ...]:
        """The op's last operands."""
        if self.turned is not None:
            return self.scale, self.softcap, self.sinks, self.turned
        return (self.scale, self.softcap) if self.sinks is None else (self.scale, self.softcap, self.sinks)

    def round_to(self, dtype: torch.dtype) -> None:
        """Let all numbers be what ``dtype`` holds, so that only the op's own rounding is judged."""
        for name in ("query", "key", "value"):
            setattr(self, name, getattr(self, name).to(dtype).double())
        self.sinks = None if self.sinks is None else self.sinks.to(dtype).double()
        self.turned = None if self.turned is None else self.turned.to(dtype).double()
        self.slab.data.copy_(self.slab.data.to(dtype).double())
        for at, (keys, values) in self.dense.items():
            self.dense[at] = keys.to(dtype).double(), values.to(dtype).double()

    def poison_unseen(self) -> None:
        """Let all be NaN in the layer's cells that no token of the step sees, in blocks that are still held too."""
        inputs, group = self.inputs, self.group
        is_seen = torch.zeros(*self.slab.data.shape[:2], self.slab.block_size, dtype=torch.bool)
        for s, h in self.dense:
            num_new, length = int(np.diff(inputs.query_starts)[s]), int(group.lengths[s, h])
            blocks, slots = self.places(s, h, np.arange(group.keeps.first_seen(length - num_new), length - num_new))
            is_seen[blocks, inputs.cells[s, self.layer, h], slots] = True
        self.slab.keys[~is_seen] = float("nan")
        self.slab.values[~is_seen] = float("nan")

    def pad(self, num_padding: int) -> None:
        """Append rows without entries to a decoding step whose heads share tables, and operands for them."""
        real, num_kv_heads = self.inputs, self.key.shape[1]
        num_rows = real.num_seqs + num_padding
        groups = []
        for group in real.groups:
            tables = np.concatenate([group.tables[:, :1], np.zeros((num_padding, 1, group.tables.shape[2]), np.int32)])
            lengths = np.concatenate([group.lengths[:, :1], np.zeros((num_padding, 1), np.int32)])
            groups.append(
                replace(
                    group,
                    tables=np.broadcast_to(tables, (num_rows, num_kv_heads, tables.shape[2])),
                    lengths=np.broadcast_to(lengths, (num_rows, num_kv_heads)),
                    firsts=np.concatenate([group.firsts, np.zeros(num_padding, np.int32)]),
                )
            )
        self.inputs = replace(
            real,
            query_starts=np.arange(num_rows + 1, dtype=np.int32),
            groups=tuple(groups),
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
        scoring = (one.to(device, dtype) if isinstance(one, torch.Tensor) else one for one in self.scoring)
        return *operands, slab, self.inputs, self.layer, *scoring


def _plainly(  # noqa: PLR0917 - the operands of the op
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    sight: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    scale: float,
    softcap: float,
    sinks: torch.Tensor,
) -> torch.Tensor:
    """Attention query by query, as the formulas of a softcap and of sinks ``[G]`` say it: ``[G, q, D]``.

    ``sight`` is what each query sees, ``[q, n]``, the queries turned, and what it looks at by these, ``[q, n]``.
    """
    visible, turned, by_turned = sight
    out = torch.empty_like(queries)
    for q in range(queries.shape[1]):
        seen_keys, seen_values = keys[:, visible[q]], values[:, visible[q]]  # [G, n, D]
        looking = torch.where(by_turned[q, visible[q], None], turned[:, q, None], queries[:, q, None])
        scores = (seen_keys * looking).sum(-1) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        top = torch.maximum(scores.max(-1).values, sinks)[:, None]
        weights, of_sinks = torch.exp(scores - top), torch.exp(sinks[:, None] - top)
        out[:, q] = (weights[..., None] * seen_values).sum(1) / (weights.sum(-1, keepdim=True) + of_sinks)
    return out


@dataclass(frozen=True)
class _How:
    """How a case is laid out; see :func:`make_case`."""

    per_head: bool
    rules: tuple[KeepRule, ...]
    trims: bool | None
    layer: int | None


def make_case(
    shape: Shape,
    sequences: list[Lengths],
    *,
    per_head: bool,
    seed: int,
    sharpness: float = 1.0,
    softcap: float = 0.0,
    sink_size: float = 0.0,
    rules: tuple[KeepRule, ...] = (KEEP_ALL,),
    trims: bool | None = None,
    layer: int | None = None,
) -> Case:
    """Make a case.

    Args:
        shape: of the op.
        sequences: of the step, in order.
        per_head: whether tables, lengths and cells differ by head; else they are broadcast, as the runner does it.
        seed: of all numbers and of who gets which block. Numbers are the same however ``trims`` is.
        sharpness: factor of the scores, whose standard deviation is 1.
        softcap: of the scores; 0 for none.
        sink_size: standard deviation of the sinks; 0 for none.
        rules: of each cache group, what it keeps. Layers are dealt to them in turn.
        trims: whether tables begin as late as the rule allows; None for anywhere up to there, False for the beginning.
        layer: which layer it is; None for any.
    """
    random, generator = Random(seed), torch.Generator().manual_seed(seed)
    maker = _CaseMaker(shape, sequences, _How(per_head, rules, trims, layer), random=random, generator=generator)
    return maker.make(sharpness, softcap, sink_size)


class _CaseMaker:
    def __init__(
        self, shape: Shape, sequences: list[Lengths], how: _How, *, random: Random, generator: torch.Generator
    ) -> None:
        self.shape = shape
        self.sequences = sequences
        self.how = how
        self.random = random
        self.generator = generator
        self.tables = (how.per_head and shape.num_kv_heads) or 1  # how many tables a sequence has

    def make(self, sharpness: float, softcap: float, sink_size: float) -> Case:
        shape, sequences = self.shape, self.sequences
        num_groups = len(self.how.rules)
        num_layers = shape.num_layers * num_groups
        drawn = self.random.randrange(num_layers)
        layer = drawn if self.how.layer is None else self.how.layer
        lengths = [self._all_lengths() for _ in self.how.rules]  # [S, tables] each
        firsts = [self._firsts(rule, own) for rule, own in zip(self.how.rules, lengths, strict=True)]
        num_blocks = 3 + sum(
            int((-(-own // shape.block_size) - first[:, None] // shape.block_size).sum())
            for own, first in zip(lengths, firsts, strict=True)
        )
        # Of sinks each table has so many blocks, or fewer. A count of their tokens would take tens of GB.
        num_sink_blocks = sum(-(-rule.num_sinks // shape.block_size) for rule in self.how.rules)
        num_blocks += num_sink_blocks * len(sequences) * self.tables
        spare_cells = 1 if self.how.per_head else 0
        num_cells = shape.num_layers * shape.num_kv_heads + spare_cells
        geometry = KVGeometry(1, num_cells, shape.head_dim, 8, shape.block_size)
        slab = Slab.allocate(geometry, num_blocks, torch.float64)
        slab.data.fill_(float("nan"))
        free = list(range(num_blocks))
        self.random.shuffle(free)
        of_groups = zip(self.how.rules, lengths, firsts, strict=True)
        groups = tuple(self._group(rule, own, first, free) for rule, own, first in of_groups)
        cells = self._cells(num_cells, num_groups)
        query_starts = np.cumsum([0, *(sequence.num_new for sequence in sequences)]).astype(np.int32)
        num_tokens = int(query_starts[-1])
        case = Case(
            query=self._normal(num_tokens, shape.num_kv_heads * shape.group, shape.head_dim),
            key=self._normal(num_tokens, shape.num_kv_heads, shape.head_dim),
            value=self._normal(num_tokens, shape.num_kv_heads, shape.head_dim),
            slab=slab,
            inputs=AttentionInputs(
                query_starts=query_starts,
                groups=groups,
                group_of_layer=tuple(index % num_groups for index in range(num_layers)),
                cells=np.broadcast_to(cells if self.how.per_head else cells[:1], cells.shape),
            ),
            layer=layer,
            scale=sharpness * shape.head_dim**-0.5,
            softcap=softcap,
            dense={},
        )
        self._fill(case)
        if case.group.keeps.num_sinks:
            case.turned = self._normal(*case.query.shape)
        if sink_size:
            case.sinks = sink_size * self._normal(shape.num_kv_heads * shape.group)
        return case

    def _all_lengths(self) -> np.ndarray:
        return np.array([self._lengths(sequence) for sequence in self.sequences], dtype=np.int32)

    def _lengths(self, sequence: Lengths) -> list[int]:
        """Return how many entries each table of a sequence has after the step."""
        lengths = [sequence.num_old + sequence.num_new]
        while len(lengths) < self.tables:
            lengths.append(self.random.randint(0, sequence.num_old) + sequence.num_new)
        return lengths

    def _firsts(self, rule: KeepRule, lengths: np.ndarray) -> np.ndarray:
        """Return which entry the tables of each sequence begin with: one that the rule allows for all of them."""
        firsts = np.zeros(len(lengths), np.int32)
        for s, sequence in enumerate(self.sequences):
            most = rule.first_seen(int(lengths[s].min()) - sequence.num_new) // self.shape.block_size
            of_its_own = self.random.randint(0, most)
            firsts[s] = {True: most, False: 0, None: of_its_own}[self.how.trims] * self.shape.block_size
        return firsts

    def _group(self, rule: KeepRule, lengths: np.ndarray, firsts: np.ndarray, free: list[int]) -> GroupInputs:
        """Return tables of one group, whose blocks are taken from the free ones, or from the sequence before."""
        num_seqs, size, num_kv_heads = len(lengths), self.shape.block_size, self.shape.num_kv_heads
        first_blocks = firsts // size
        widths = -(-lengths // size) - first_blocks[:, None]
        tables = np.full((num_seqs, self.tables, int(widths.max()) + 1), free[0], dtype=np.int32)  # that nobody gets
        for s in range(num_seqs):
            for t in range(self.tables):
                num_shared = self._num_shared_blocks(s, t, lengths)
                for index in range(first_blocks[s], first_blocks[s] + widths[s, t]):
                    is_shared = index < num_shared and index >= first_blocks[s - 1]
                    block = tables[s - 1, t, index - first_blocks[s - 1]] if is_shared else free.pop()
                    tables[s, t, index - first_blocks[s]] = block
        return GroupInputs(
            tables=np.broadcast_to(tables, (num_seqs, num_kv_heads, tables.shape[2])),
            lengths=np.broadcast_to(lengths, (num_seqs, num_kv_heads)),
            firsts=firsts,
            keeps=rule,
            sink_tables=self._sink_tables(rule, tables, first_blocks, free),
        )

    def _sink_tables(self, rule: KeepRule, tables: np.ndarray, first_blocks: np.ndarray, free: list[int]) -> np.ndarray:
        """Return the first blocks of each sequence: those of its tables, and before these blocks of its own."""
        num_seqs, num_tables, _ = tables.shape
        num_blocks = -(-rule.num_sinks // self.shape.block_size)
        sink_tables = np.full((num_seqs, num_tables, num_blocks), free[0], np.int32)
        for s in range(num_seqs):
            for t in range(num_tables):
                for index in range(num_blocks):
                    at = index - first_blocks[s]
                    sink_tables[s, t, index] = free.pop() if at < 0 else tables[s, t, min(at, tables.shape[2] - 1)]
        return np.broadcast_to(sink_tables, (num_seqs, self.shape.num_kv_heads, num_blocks))

    def _cells(self, num_cells: int, num_groups: int) -> np.ndarray:
        """Return which cells each sequence has for each layer in the blocks of that layer's group."""
        num_layers, num_kv_heads = self.shape.num_layers, self.shape.num_kv_heads
        cells = np.empty((len(self.sequences), num_layers * num_groups, num_kv_heads), dtype=np.int32)
        for group in range(num_groups):
            order = list(range(num_cells))
            for s, sequence in enumerate(self.sequences):
                if self.how.per_head and not sequence.num_shared:
                    self.random.shuffle(order)  # who shares blocks shares their cells
                own = np.array(order[: num_layers * num_kv_heads])
                cells[s, group::num_groups] = own.reshape(num_layers, num_kv_heads)
        return cells

    def _num_shared_blocks(self, s: int, t: int, lengths: np.ndarray) -> int:
        """Blocks that sequence ``s`` takes from the one before: whole, and written before its own tokens begin.

        But those that the one before has no more are its own, and hold the same.
        """
        if not s:
            return 0
        num_old = int(lengths[s, t]) - self.sequences[s].num_new
        return min(self.sequences[s].num_shared, num_old, int(lengths[s - 1, t])) // self.shape.block_size

    def _fill(self, case: Case) -> None:
        """Write what came before the step into the blocks, and note what each head will see."""
        inputs, slab, group = case.inputs, case.slab, case.group
        for s, sequence in enumerate(self.sequences):
            first = int(inputs.query_starts[s])
            new = slice(first, first + sequence.num_new)
            for h in range(self.shape.num_kv_heads):
                t = h if self.how.per_head else 0
                num_old = int(group.lengths[s, h]) - sequence.num_new
                num_shared = self._num_shared_blocks(s, t, group.lengths) * slab.block_size
                keys, values = self._normal(num_old, self.shape.head_dim), self._normal(num_old, self.shape.head_dim)
                if num_shared:
                    keys[:num_shared], values[:num_shared] = (kv[:num_shared] for kv in case.dense[s - 1, h])
                entries = np.arange(group.firsts[s], num_old)
                entries = entries[(entries >= num_shared) | (entries < group.firsts[s - 1])]  # what it has of its own
                blocks, slots = case.places(s, h, entries)
                slab.keys[blocks, inputs.cells[s, case.layer, h], slots] = keys[entries]
                slab.values[blocks, inputs.cells[s, case.layer, h], slots] = values[entries]
                for entry in range(min(group.keeps.num_sinks, int(group.firsts[s]))):
                    block, slot = group.sink_tables[s, h, entry // slab.block_size], entry % slab.block_size
                    slab.keys[block, inputs.cells[s, case.layer, h], slot] = keys[entry]
                    slab.values[block, inputs.cells[s, case.layer, h], slot] = values[entry]
                case.dense[s, h] = torch.cat([keys, case.key[new, h]]), torch.cat([values, case.value[new, h]])

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)
