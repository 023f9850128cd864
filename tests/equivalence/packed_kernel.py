"""The cases of ``packed_cases.py``, computed by the kernel of CPUs: it packs by marks, the first entries too."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from itertools import product

import numpy as np
import torch

from equivalence.coded_cases import some_constants
from equivalence.packed_cases import NUM_SINKS, Holder, Run
from pagefold.kv import CODECS, KEEP_ALL, NO_MASK, KeepRule, KVGeometry
from pagefold.runner.attention.cpu import CpuAttention
from pagefold.runner.attention.packed import KeptUnits, PackedInputs
from pagefold.runner.codec_slab import CodecSlab
from pagefold.runner.codecs import CELL_CODECS
from pagefold.runner.slab import PAIRS_LAYOUT, Slab

__all__ = ["TOKEN_CODECS", "as_stored", "run_kernel"]

TOKEN_CODECS = sorted(name for name, codec in CELL_CODECS.items() if not codec.seals and name not in {"float32", "fp8"})
"""Codecs that encode token by token."""
POISON = 0xFF
"""Fills blocks of codes that mean nothing: scales are NaN then, or the largest numbers that there are."""


def run_kernel(case, steps, *, in_pairs=False, num_threads=2, codec="", packs=True):
    """Return the outputs of each sequence, ``[L, n, H, D]``, as :meth:`PackedCase.run` does."""
    run = KernelRun(case, in_pairs=in_pairs, num_threads=num_threads, codec=codec, packs=packs)
    return run.all_of(steps, gives_back=True)


def as_stored(case, codec):
    """Return a case of the K and V that a codec makes of another's: each entry's alone, where it is in its sequence."""
    shape, stored = case.shape, copy(case)
    stored.key, stored.value = ([own.clone() for own in operands] for operands in (case.key, case.value))
    for seq, length in enumerate(case.lengths):
        slab = CodecSlab.allocate(_coded_geometry(shape, codec), -(-length // shape.block_size), _constants_of(shape))
        entries = torch.arange(length)
        for layer, head in product(range(shape.num_layers), range(shape.num_kv_heads)):
            cell, kv = (
                layer * shape.num_kv_heads + head,
                (case.key[seq][layer, :, head], case.value[seq][layer, :, head]),
            )
            slab.write(cell, entries // shape.block_size, entries, kv)
            key, value = slab.read(cell, entries // shape.block_size, entries)
            stored.key[seq][layer, :, head], stored.value[seq][layer, :, head] = key.double(), value.double()
    return stored


def _coded_geometry(shape, codec, keeps=()):
    return KVGeometry(
        shape.num_layers, shape.num_kv_heads, shape.head_dim, 4, shape.block_size, codec=CODECS[codec], keeps=keeps
    )


def _constants_of(shape):
    return some_constants(shape.num_layers * shape.num_kv_heads, shape.head_dim, 3)


class KernelRun(Run):
    """A run of the kernel.

    Args:
        case: what to compute; all of its layers.
        in_pairs: whether numbers lie in pairs of bfloat16.
        num_threads: of the team.
        codec: of K and V; empty for none.
        packs: whether anything is packed at all; else all sequences of the case are exact.
    """

    def __init__(self, case, *, in_pairs, num_threads, codec="", packs=True):
        self.is_in_pairs, self.codec, self.packs = in_pairs, codec, packs
        super().__init__(case, torch.float32, PAIRS_LAYOUT if in_pairs else "")
        self.attention = CpuAttention(num_threads)

    def allocate(self, num_blocks):
        case, shape = self.case, self.case.shape
        self.rule = KeepRule(case.chunk_size, is_chunked=True, num_before=1, packs=True) if self.packs else KEEP_ALL
        if self.codec:
            geometry = _coded_geometry(shape, self.codec, (self.rule,) * shape.num_layers)
            return CodecSlab.allocate(geometry, num_blocks, _constants_of(shape))
        dtype = torch.bfloat16 if self.is_in_pairs else torch.float32
        geometry = KVGeometry(
            shape.num_layers, shape.num_kv_heads, shape.head_dim, dtype.itemsize, shape.block_size,
            keeps=(self.rule,) * shape.num_layers,
        )  # fmt: skip
        return Slab.allocate(geometry, num_blocks, dtype, layout=self.layout)

    def inputs(self, step):
        plain = super().inputs(step)
        (group,) = plain.groups
        return replace(plain, groups=(replace(group, keeps=self.rule),))

    def compute(self, step, to_pack):
        case, shape = self.case, self.case.shape
        chunks = tuple(tuple(self.held[seq].chunks) for seq, _ in step)
        num_new = {seq: sum(seq == other for other, _ in to_pack) for seq, _ in step}
        num_old = tuple(len(self.held[seq].chunks) - num_new[seq] for seq, _ in step)
        mask_of = np.array([NO_MASK if seq in case.exact else 0 for seq, _ in step], np.int32)
        packed = PackedInputs(case.chunk_size, 0, chunks, num_old, mask_of) if self.packs else None
        inputs = replace(self.inputs(step), packed=packed)
        sinks = None if case.sinks is None else case.sinks.float()
        for seq, num in step if self.packs else ():
            if seq not in case.exact:
                self.mark(seq, num)
        for layer in range(shape.num_layers):
            query, key, value = (self.of_step(own, step, layer) for own in (case.query, case.key, case.value))
            yield self.attention(query, key, value, self.slab, inputs, layer, case.scale, case.softcap, sinks)

    def mark(self, seq, num_new):
        """Write the marks of a step's tokens, bit by bit, as the decoder does."""
        held, shape, num_bytes = self.held[seq], self.case.shape, -(-self.case.shape.num_kv_heads // 8)
        blocks = self.slab.as_bytes()
        for entry in range(held.num_entries - num_new, held.num_entries):
            block = held.table[(entry - held.first) // shape.block_size]
            for layer in range(shape.num_layers):
                bits = np.zeros(8 * num_bytes, np.uint8)
                bits[: shape.num_kv_heads] = self.case.keep[seq][layer, :, entry].numpy() | (entry < NUM_SINKS)
                at = self.slab.mark_begin + (layer * shape.block_size + entry % shape.block_size) * num_bytes
                blocks[block, at : at + num_bytes] = np.packbits(bits, bitorder="little")

    def give_back(self, held: Holder):
        """Give back what no token behind this step sees whole."""
        first_seen = self.rule.first_seen(held.num_entries)
        while held.first + self.case.shape.block_size <= first_seen:
            block = held.table.pop(0)
            self.forget(block, 0)
            self.free.insert(0, block)
            held.first += self.case.shape.block_size

    def forget(self, block, begin):
        if self.codec:
            self.slab.data[block] = POISON
        else:
            super().forget(block, begin)

    def free_spare(self, held, number):
        chunk = held.chunks[number]
        assert isinstance(chunk, KeptUnits)
        super().free_spare(held, number)
