"""The cases of ``packed_cases.py``, computed by the kernel of CPUs: it packs by marks, the first entries too."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from equivalence.packed_cases import NUM_SINKS, Holder, Run
from pagefold.kv import KeepRule, KVGeometry
from pagefold.runner.attention.cpu import CpuAttention
from pagefold.runner.attention.packed import KeptUnits, PackedInputs
from pagefold.runner.slab import PAIRS_LAYOUT, Slab

__all__ = ["run_kernel"]


def run_kernel(case, steps, *, in_pairs=False, num_threads=2):
    """Return the outputs of each sequence, ``[L, n, H, D]``, as :meth:`PackedCase.run` does."""
    return KernelRun(case, in_pairs=in_pairs, num_threads=num_threads).all_of(steps, gives_back=True)


class KernelRun(Run):
    """A run of the kernel.

    Args:
        case: what to compute; all of its layers.
        in_pairs: whether numbers lie in pairs of bfloat16.
        num_threads: of the team.
    """

    def __init__(self, case, *, in_pairs, num_threads):
        self.is_in_pairs = in_pairs
        super().__init__(case, torch.float32, PAIRS_LAYOUT if in_pairs else "")
        self.attention = CpuAttention(num_threads)

    def allocate(self, num_blocks):
        case, shape = self.case, self.case.shape
        self.rule = KeepRule(case.chunk_size, is_chunked=True, num_before=1, packs=True)
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
        inputs = replace(self.inputs(step), packed=PackedInputs(case.chunk_size, 0, chunks, num_old))
        sinks = None if case.sinks is None else case.sinks.float()
        for seq, num in step:
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

    def free_spare(self, held, number):
        chunk = held.chunks[number]
        assert isinstance(chunk, KeptUnits)
        super().free_spare(held, number)
