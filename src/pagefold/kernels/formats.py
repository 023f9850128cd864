"""What a format of numbers is, to a product of rows with a matrix: the one protocol of all tiles.

A matrix ``[N, K]`` lies in *panels* of :data:`PANEL_WIDTH` columns, one of its rows a column. A panel is a stream of
bytes that one product walks through from end to end: numbers, and whatever scales belong to them. Rows that are
multiplied with it are turned into the format first, once for all panels. What comes out is float32.

A *tile* is ``mr`` rows of a product. Its ``mr * nv`` accumulators stay in vector registers while it walks all of K::

    for k:                                     one row of the panel, nv vectors, is loaded once for all mr rows
        for r in mr, v in nv:
            acc[r][v] += x[r][k] * w[k][v]     a broadcast and a multiply-add

**Every output is a chain of multiply-adds in the order of k, whatever mr is**, or the sum of such chains where K is cut
into passes. So a row's result never depends on which rows it was computed with: the decoder's batch invariance rests on
this. Passes are there because one long chain rounds more: over 1,536 numbers some eight times more than what libraries
do, who sum in many lanes.

While the first rows go through a panel, the next panel is fetched into the cache: a product of few rows, which is bound
by memory, overlaps with the reading of its weights.

A decoder need not know in which format it computes: it has the bytes of a panel and of a row, and the addresses of
three functions. So its kernel is compiled once for all formats, and whoever adds one writes a file, with its panels,
its rows and its tile, and a twin for its tests. A format tells its ``arithmetic``: blocks that were computed in one are
never taken for those of another. Numba offers no vector types, hence LLVM's own language; what is
written in it is compiled once for a machine, apart from the kernels (see ``object_code.py``), which call it by address.

The plan (registers for accumulators, panels, fetching ahead) is that of Goto and van de Geijn, "Anatomy of
High-Performance Matrix Multiplication" (2008), without the packing of x: there are few rows.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from pagefold.kernels.emit import MAX_LANES

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "PANEL_VECTORS",
    "PANEL_WIDTH",
    "FormatTiles",
    "ProductFormat",
    "call",
    "column",
    "convert",
    "multiply",
    "num_panels",
    "pack",
]

PANEL_VECTORS = 2
"""Vectors a row of a panel."""

PANEL_WIDTH = PANEL_VECTORS * MAX_LANES
"""Columns of a panel."""


class FormatTiles(NamedTuple):
    """Addresses of what is computed in a format. Arguments are integers: addresses and distances in bytes, and numbers.

    Attributes:
        rows: (x, x_distance, num_k, num_rows, out, out_distance): turns float32 rows into the format's; distances are
            those between rows. 0 if rows stay as they are.
        product: (x, x_distance, panel, num_k, num_rows, y, y_distance, adds, following): ``y[num_rows, W] (+)=
            x[num_rows, K] @ panel[K, W]``, of rows in the format; y is float32. With ``adds`` not 0 it adds to y.
            Meanwhile it fetches as many bytes at ``following`` as a panel has.
        column: (panel, column, num_k, out): a column as float32 ``[num_k]``.
    """

    rows: int
    product: int
    column: int


class ProductFormat(Protocol):
    """A format of weights and of the rows that they are multiplied with."""

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def arithmetic(self) -> str:
        """What decides the bits of a product: numbers, groups, the order of sums. Another text, other bits."""

    @property
    def means(self) -> str:
        """What computes in it on this processor, for people; what comes out is the same by any means."""

    def row_bytes(self, num_k: int) -> int:
        """Return the bytes of a row of ``num_k`` numbers."""

    def panel_bytes(self, num_k: int) -> int:
        """Return the bytes of a panel of ``num_k`` rows."""

    def pack(self, matrix: NDArray[np.float32], into: NDArray[np.uint8]) -> None:
        """Pack a matrix.

        Args:
            matrix: float32 ``[N, K]``.
            into: ``[ceil(N / W), panel_bytes(K)]``. Columns beyond N become zeros.
        """

    def tiles(self) -> FormatTiles:
        """Return what computes in it, compiled for this processor."""


def num_panels(num_columns: int) -> int:
    """Return how many panels hold so many columns."""
    return -(-num_columns // PANEL_WIDTH)


def pack(product_format: ProductFormat, matrix: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return a matrix ``[N, K]`` packed: ``[ceil(N / W), panel_bytes(K)]``."""
    panels = np.zeros((num_panels(len(matrix)), product_format.panel_bytes(matrix.shape[1])), np.uint8)
    product_format.pack(matrix, panels)
    return panels


def convert(product_format: ProductFormat, x: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return rows ``[T, K]`` in a format: ``[T, row_bytes(K)]``."""
    num_rows, num_k = x.shape
    rows = np.zeros((num_rows, product_format.row_bytes(num_k)), np.uint8)
    if product_format.tiles().rows == 0:
        return np.ascontiguousarray(x).view(np.uint8)
    ends = x.ctypes.data, x.strides[0], num_k, num_rows, rows.ctypes.data, rows.strides[0]
    call(product_format.tiles().rows, *ends)
    return rows


def multiply(product_format: ProductFormat, x: NDArray[np.float32], panels: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Return rows ``[T, K]`` times a packed matrix, ``[T, panels * W]``: what a decoder does, called from Python."""
    num_rows, num_k = x.shape
    rows = convert(product_format, x)
    y = np.zeros((num_rows, len(panels) * PANEL_WIDTH), np.float32)
    for index, panel in enumerate(panels):
        here, at_y = panel.ctypes.data, y[:, index * PANEL_WIDTH :].ctypes.data
        x_rows = rows.ctypes.data, rows.strides[0]
        call(product_format.tiles().product, *x_rows, here, num_k, num_rows, at_y, y.strides[0], 0, here)
    return y


def column(product_format: ProductFormat, panels: NDArray[np.uint8], index: int, num_k: int) -> NDArray[np.float32]:
    """Return a column of a packed matrix, ``[K]``."""
    out = np.zeros(num_k, np.float32)
    panel = panels[index // PANEL_WIDTH]
    call(product_format.tiles().column, panel.ctypes.data, index % PANEL_WIDTH, num_k, out.ctypes.data)
    return out


def call(address: int, *arguments: int) -> None:
    """Call what was compiled, from Python."""
    ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(arguments))(address)(*arguments)
