"""Packing of chunks, and attention over what was packed, in plain torch: slow and obvious, any dtype.

What a step does in one layer: its K and V are written into whole blocks, chunks that nobody behind the step sees whole
are packed, then it attends. A token attends to one *split* after another: the sinks, what was kept of each older chunk,
the chunk before its own, and its own up to itself. Its result is the left fold of what they come to. Each token is
computed by itself, and its splits follow from its entry alone: so the result is the same, to the bit, in any step and
beside whatever else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from pagefold.runner.attention.inputs import AttentionInputs
    from pagefold.runner.attention.packed import KeptUnits, PackedInputs
    from pagefold.runner.slab import Slab

__all__ = ["pack_chunk", "packed_attention", "write_whole"]

_KeysValues = tuple[torch.Tensor, torch.Tensor]
"""K and V of some entries of one KV head, ``[n, D]`` each."""


def write_whole(key: torch.Tensor, value: torch.Tensor, slab: Slab, inputs: AttentionInputs, layer: int) -> None:
    """Write a step's K and V of one layer into whole blocks.

    Args:
        key: ``[T, Hkv, D]``, rope already applied, dtype of the slab.
        value: as many.
        slab: the blocks; written in place.
        inputs: where everything lies.
        layer: which layer this is.
    """
    for s in range(inputs.num_seqs):
        begin, end = inputs.query_starts[s : s + 2].tolist()
        for h, length in enumerate(inputs.group_of(layer).lengths[s].tolist()):
            entries = np.arange(length - (end - begin), length)
            _Head(slab, inputs, layer, s, h).write_whole(entries, key[begin:end, h], value[begin:end, h])


def pack_chunk(  # noqa: PLR0913, PLR0917 - what is copied, from where, and where to
    slab: Slab,
    inputs: AttentionInputs,
    packed: PackedInputs,
    seq: int,
    number: int,
    keep: torch.Tensor,
    layers: Iterable[int] | None = None,
) -> None:
    """Copy the kept entries of one chunk, K and V, from whole blocks into units, in order.

    Args:
        slab: the blocks; written in place.
        inputs: where the chunk lies whole.
        packed: where its units are: the counts of ``layers``, and of those before them, are those of ``keep``.
        seq: which sequence of the step it belongs to.
        number: which of the sequence's chunks it is. It is full.
        keep: bool ``[L, Hkv, chunk_size]``: the entries that each layer and head keeps. No sinks: these stay where they
            are.
        layers: whose entries are copied now; None for all.
    """
    chunk, first = packed.chunks[seq][number], number * packed.chunk_size
    assert number or not keep[..., : packed.num_sinks].any(), "sinks are seen where they are"
    for layer in range(len(keep)) if layers is None else layers:
        for h, kept in enumerate(keep[layer]):
            entries = first + kept.nonzero()[:, 0].numpy()
            assert len(entries) == chunk.counts[layer, h], "the directory says something else"
            if len(entries):
                head = _Head(slab, inputs, layer, seq, h)
                head.write_kept(chunk, *head.read_whole(entries))


def packed_attention(  # noqa: PLR0913, PLR0917 - the operands of the op
    query: torch.Tensor,
    slab: Slab,
    inputs: AttentionInputs,
    packed: PackedInputs,
    layer: int,
    scale: float,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend over whole blocks and units of one layer, in the dtype of ``query``; everything is written by then.

    Of ``inputs`` it takes where entries lie. What a token sees is what ``packed`` says, not the group's keep rule. The
    sinks of a sequence are read from its ``sink_tables``, as soon as a token does not see the first chunk whole.

    Args:
        query: ``[T, H, D]``; heads ``[h * G, (h + 1) * G)`` share KV head ``h``, with ``G = H // Hkv``.
        slab: the blocks.
        inputs: where the step's sequences have what is seen whole.
        packed: where they have their older chunks.
        layer: which layer this is.
        scale: factor of the scores.
        softcap: scores become ``softcap * tanh(score / softcap)`` before softmax; 0 leaves them as they are.
        sinks: ``[H]``: of each head the score of a sink that is no entry, neither scaled nor capped, which has its
            share of the softmax and no value; None for none.

    Returns:
        ``[T, H, D]``, dtype of ``query``.
    """
    lengths = inputs.group_of(layer).lengths
    queries = query.reshape(len(query), lengths.shape[1], -1, query.shape[-1])  # [T, Hkv, G, D]
    sink_scores = None if sinks is None else sinks.to(query.dtype).view(lengths.shape[1], -1)
    out = torch.empty_like(queries)
    for s in range(inputs.num_seqs):
        begin, end = inputs.query_starts[s : s + 2].tolist()
        for h, length in enumerate(lengths[s].tolist()):
            entries = range(length - (end - begin), length)
            seen = _Seen.read(_Head(slab, inputs, layer, s, h), packed, entries)
            own_sinks = None if sink_scores is None else sink_scores[h]
            for t, entry in zip(range(begin, end), entries, strict=True):
                splits = seen.splits(packed, entry)
                parts = (_part(queries[t, h], keys, values, scale, softcap) for keys, values in splits)
                out[t, h] = _folded(parts, own_sinks)
    return out.flatten(1, 2)


class _Head(NamedTuple):
    """One KV head of one sequence in one layer: it reads and writes what lies in blocks."""

    slab: Slab
    inputs: AttentionInputs
    layer: int
    seq: int
    head: int

    def read_sinks(self, num_sinks: int) -> _KeysValues:
        """Return the first entries."""
        entries = np.arange(num_sinks)
        tables = self.inputs.group_of(self.layer).sink_tables
        block_ids = tables[self.seq, self.head, entries // self.slab.block_size].astype(np.int64)
        return self.slab.read(self._cell, torch.from_numpy(block_ids), torch.from_numpy(entries))

    def read_whole(self, entries: NDArray[np.int64]) -> _KeysValues:
        """Return what entries have in whole blocks."""
        return self.slab.read(self._cell, self._blocks_of(entries), torch.from_numpy(entries))

    def write_whole(self, entries: NDArray[np.int64], keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put entries into whole blocks."""
        self.slab.write(self._cell, self._blocks_of(entries), torch.from_numpy(entries), (keys, values))

    def read_kept(self, chunk: KeptUnits) -> _KeysValues:
        """Return what was kept of a chunk; of a layer that reads another's, what that one has kept."""
        units = list(self._units_of(chunk))
        if not units:
            return self.read_whole(np.arange(0))
        read = [self.slab.read(cell, torch.full_like(slots, block_id), slots) for block_id, cell, slots in units]
        keys, values = (torch.cat(vectors) for vectors in zip(*read, strict=True))
        return keys, values

    def write_kept(self, chunk: KeptUnits, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put what is kept of a chunk into its units."""
        begin = 0
        for block_id, cell, slots in self._units_of(chunk):
            own = slice(begin, begin + len(slots))
            self.slab.write(cell, torch.full_like(slots, block_id), slots, (keys[own], values[own]))
            begin = own.stop

    @property
    def _cell(self) -> int:
        """Its cell in whole blocks."""
        return int(self.inputs.cells[self.seq, self.layer, self.head])

    def _blocks_of(self, entries: NDArray[np.int64]) -> torch.Tensor:
        """Return the whole block of each entry, int64 ``[n]``."""
        group, size = self.inputs.group_of(self.layer), self.slab.block_size
        places = entries // size - int(group.firsts[self.seq]) // size
        assert (places >= 0).all(), "an entry that lies before its table"
        return torch.from_numpy(group.tables[self.seq, self.head, places].astype(np.int64))

    def _units_of(self, chunk: KeptUnits) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield its units in a chunk: the block of each, the cell in that, and the slots that are filled, int64."""
        layer, size = self.inputs.source_of(self.layer), chunk.shape.block_size
        num_left = int(chunk.counts[layer, self.head])
        for block_id, cell in zip(*chunk.units(layer, self.head), strict=True):
            yield int(block_id), int(cell), torch.arange(min(num_left, size))
            num_left -= size


@dataclass(frozen=True, slots=True)
class _Seen:
    """What some tokens of a sequence see in one KV head.

    Attributes:
        sinks: the first entries, where any token does not see the first chunk whole.
        kept: of each older chunk.
        whole: of each chunk that any of them sees whole, by its number; the last one as far as it is filled.
    """

    sinks: _KeysValues
    kept: list[_KeysValues]
    whole: dict[int, _KeysValues]

    @classmethod
    def read(cls, head: _Head, packed: PackedInputs, entries: range) -> _Seen:
        """Read it; ``entries`` are those of the tokens."""
        num_packed, size = packed.num_packed(entries[-1]), packed.chunk_size
        numbers = range(packed.num_packed(entries[0]), entries[-1] // size + 1)
        return cls(
            head.read_sinks(packed.num_sinks if num_packed else 0),
            [head.read_kept(packed.chunks[head.seq][number]) for number in range(num_packed)],
            {number: head.read_whole(np.arange(number * size, entries.stop)[:size]) for number in numbers},
        )

    def splits(self, packed: PackedInputs, entry: int) -> Iterator[_KeysValues]:
        """Yield the splits that the token of an entry sees, in order; none of them is empty."""
        num_packed, own = packed.num_packed(entry), entry // packed.chunk_size
        older = [self.sinks, *self.kept[:num_packed]] if num_packed else []
        before = [self.whole[number] for number in range(num_packed, own)]
        yield from (split for split in (*older, *before) if len(split[0]))
        keys, values = self.whole[own]
        num_own = entry % packed.chunk_size + 1
        yield keys[:num_own], values[:num_own]


class _Part(NamedTuple):
    """What one split comes to, for the G heads of a group.

    Attributes:
        top: ``[G]``: the largest score.
        total: ``[G]``: the sum of weights, which are powers of e of scores less ``top``.
        acc: ``[G, D]``: the sum of values by weight.
    """

    top: torch.Tensor
    total: torch.Tensor
    acc: torch.Tensor


def _part(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, softcap: float) -> _Part:
    """Attend to one split: queries ``[G, D]``, K and V ``[n, D]``. No product of matrices: those round by shape."""
    keys, values = keys.to(queries.dtype), values.to(queries.dtype)
    scores = (queries[:, None] * keys).sum(-1) * scale  # [G, n]
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    top = scores.max(-1).values
    weights = (scores - top[:, None]).exp()
    return _Part(top, weights.sum(-1), (weights[:, :, None] * values).sum(1))


def _folded(parts: Iterator[_Part], sinks: torch.Tensor | None) -> torch.Tensor:
    """Return the left fold of parts, ``[G, D]``; sinks, ``[G]``, have their share of the whole."""
    top, total, acc = next(parts)
    for other in parts:
        new_top = torch.maximum(top, other.top)
        ours, theirs = (top - new_top).exp(), (other.top - new_top).exp()
        top, total = new_top, total * ours + other.total * theirs
        acc = acc * ours[:, None] + other.acc * theirs[:, None]
    if sinks is not None:
        new_top = torch.maximum(top, sinks)
        ours = (top - new_top).exp()
        total, acc = total * ours + (sinks - new_top).exp(), acc * ours[:, None]
    return acc / total[:, None]
