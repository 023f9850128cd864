"""Weights in the quantized kinds of GGML, as they lie in a file: products with rows of int8, summed in integers.

A panel is blocks (see ``block_kinds.py``), one behind the other, each of all columns side by side: halves ``[W]``, then
words ``[W]``. It takes what the file takes. Rows of all kinds are alike (see ``block_rows.py``). An output is a chain
over groups of 32 numbers, in their order, whatever the number of rows::

    acc = acc + sum(x * (code - zero)) * (scale of w's group * scale of x's group)
    acc = acc + (sum of x's group * scale of x's group) * minimum of w's group           kinds that have one

where the first sum is exact, products of scales are rounded, and the rest is a fused multiply-add. Where 16 numbers
share a scale there are two of the first line. So weights are computed with as they are in the file: nothing of them is
rounded again. Rows are, to 8 bit.

Rows of 8 bit in groups of 32 against codes of fewer bits, with sums of the rows for what is taken off and added: as in
llama.cpp's ``ggml_vec_dot_q4_1_q8_1``. Columns side by side: as in its repacked ``q4_0_8x8``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import llvmlite.binding as llvm
import numpy as np

from pagefold.kernels.block_kinds import GROUP, KINDS, BlockKind
from pagefold.kernels.block_packing import block_packer
from pagefold.kernels.block_rounding import round_to_blocks
from pagefold.kernels.block_rows import GROUP_BYTES
from pagefold.kernels.block_tiles import block_tiles
from pagefold.kernels.emit import IS_WIDE
from pagefold.kernels.formats import PANEL_WIDTH, FormatTiles, call, num_panels

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Blocks", "blocks_of"]

_PANELS_AT_ONCE = 16
"""Panels that are packed together: what is rounded is there twice for a while."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Weights of one of GGML's kinds, and rows of int8: a :class:`~pagefold.kernels.formats.ProductFormat`.

    Rows are multiples of ``kind.numbers``.

    Attributes:
        kind: of the weights.
        is_native: whether by the processor's instruction; what comes out is the same.
    """

    kind: BlockKind
    is_native: bool

    @property
    def name(self) -> str:
        """The kind's."""
        return self.kind.name

    @property
    def arithmetic(self) -> str:
        """What decides the bits of a product, the same with and without the instruction."""
        return f"{self.kind.name} by int8 in groups of {GROUP}"

    @property
    def means(self) -> str:
        """What computes in it on this processor."""
        if self.is_native:
            return "vpdpbusd"
        return "vpmaddubsw in 16 bits: the same integers as by vpdpbusd, which this processor lacks, and slower"

    def row_bytes(self, num_k: int) -> int:
        """Return the bytes of a row: groups, each with its scale and sums."""
        return self._blocks_of(num_k) * self.kind.groups * GROUP_BYTES

    def panel_bytes(self, num_k: int) -> int:
        """Return the bytes of a panel: those of as many rows of a file."""
        return self._blocks_of(num_k) * self.kind.block_bytes * PANEL_WIDTH

    def pack_blocks(
        self, blocks: NDArray[np.uint8], into: NDArray[np.uint8], row_order: NDArray[np.int64] | None = None
    ) -> None:
        """Pack a matrix as a file has it.

        Args:
            blocks: rows of blocks, ``[N, bytes of a row]``.
            into: ``[ceil(N / W), panel_bytes(K)]``. Columns beyond N become zeros.
            row_order: ``[N]``, of rows that there are: row i of the matrix is row ``row_order[i]`` of the blocks; None
                for as they are.
        """
        num, row_bytes = blocks.shape if row_order is None else (len(row_order), blocks.shape[1])
        num_blocks = row_bytes // self.kind.block_bytes
        assert into.shape == (num_panels(num), row_bytes * PANEL_WIDTH)
        assert row_bytes == num_blocks * self.kind.block_bytes
        assert blocks.strides[1] == into.strides[1] == 1
        order = np.arange(num) if row_order is None else row_order
        nothing = np.zeros(row_bytes, np.uint8)
        rows = np.full(len(into) * PANEL_WIDTH, nothing.ctypes.data, np.int64)
        rows[:num] = blocks.ctypes.data + order * blocks.strides[0]
        panels = into.ctypes.data, into.strides[0], len(into)
        call(block_packer(self.kind.name), rows.ctypes.data, num_blocks, *panels)

    def pack(self, matrix: NDArray[np.float32], into: NDArray[np.uint8]) -> None:
        """Pack a matrix ``[N, K]`` of float32, rounded as llama.cpp's reference does.

        Only Q8_0, Q4_0 and Q4_1 are rounded to here; blocks of other kinds come from files.
        """
        step = _PANELS_AT_ONCE * PANEL_WIDTH
        for first in range(0, len(matrix), step):
            blocks = round_to_blocks(self.name, matrix[first : first + step])
            begin = first // PANEL_WIDTH
            self.pack_blocks(blocks, into[begin : begin + num_panels(len(blocks))])

    def tiles(self) -> FormatTiles:
        """Return what computes with such weights."""
        return block_tiles(self.kind.name, is_native=self.is_native)

    def _blocks_of(self, num_k: int) -> int:
        assert num_k % self.kind.numbers == 0, "a row is whole blocks"
        return num_k // self.kind.numbers


def blocks_of(kind: str) -> Blocks:
    """Return the format of a kind, by GGML's name, for this processor: by its instruction, if it has one."""
    return Blocks(KINDS[kind], is_native=bool(IS_WIDE and llvm.get_host_cpu_features().get("avx512vnni")))
