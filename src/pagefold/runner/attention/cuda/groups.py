"""Operands that belong together, in the Triton kernels of attention: a group is one parameter of inner functions.

Kernels take what a step brings one by one: Triton specializes by parameter, not by what is in it. There groups are
marked, in one order, and ``arguments.py`` makes them. Three things hold in Triton 3.6:

- A group is built by the names of its fields. What is compiled is found again by the source of functions, in which the
  order of fields is not.
- No field is called ``values``, ``type``, ``count`` or ``index``: tuples have these.
- A constant is no field of a group that a kernel builds: an assignment would make a number of it. So ``Shape`` and
  ``CellFormat`` are made by who launches, and are constants as a whole.
"""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["PER_STEP", "Blocks", "Cell", "Scoring", "Shape", "Sight", "Softmax", "Unsealed"]

PER_STEP = [
    "layer",
    "num_tokens",
    "num_residuals",
    "num_splits",
    "table_stride_s",
    "length_stride_s",
    "cell_stride_s",
    "window",
]
"""Numbers that nothing is compiled for: they differ by layer or step."""


class Shape(NamedTuple):
    """Sizes that kernels are compiled for.

    Attributes:
        NUM_KV_HEADS: of the model.
        GROUP: query heads a KV head.
        HEAD_DIM: numbers of a head.
        DIMS: the same, filled up to a power of two of at least 16.
        BLOCK_SIZE: slots of a block.
    """

    NUM_KV_HEADS: int
    GROUP: int
    HEAD_DIM: int
    DIMS: int
    BLOCK_SIZE: int


class Blocks(NamedTuple):
    """The slab, and what it has of each cell; see ``CardBlocks``.

    Attributes:
        data: pointer to the slab.
        block_stride: elements from a block to the next one.
        places: pointer to int32 ``[num_cells, 4]`` (this and the next with a codec only): where a cell's parts begin.
        key_centres: pointer to float32 ``[num_cells, 1 + R, D]``: what was taken off K, where something was.
        value_centres: pointer to float32 ``[num_cells, 2, D]``: and off V.
        num_ranges: int32: R.
    """

    data: Any
    block_stride: Any
    places: Any
    key_centres: Any
    value_centres: Any
    num_ranges: Any


class Softmax(NamedTuple):
    """A running softmax of ``ROWS`` queries, in powers of two.

    Attributes:
        acc: float32 ``[ROWS, DIMS]``: the weighted sum of V so far.
        top: float32 ``[ROWS]``: the largest score so far.
        total: float32 ``[ROWS]``: the sum of weights so far.
    """

    acc: Any
    top: Any
    total: Any


class Sight(NamedTuple):
    """Which entries ``ROWS`` queries see, where a tile is masked.

    Attributes:
        low: int32: entries before it are not loaded.
        end: int32: nor those from here on.
        visible: int32 ``[ROWS]``: a row sees the entries before it,
        begins: int32 ``[ROWS]``: and of these, where there is a window, those from here on.
    """

    low: Any
    end: Any
    visible: Any
    begins: Any


class Cell(NamedTuple):
    """Where the K and V of one layer, head and sequence lie.

    Attributes:
        key, value: pointers to elements of the slab: the cell's K and V in block 0.
        key_scales, value_scales: the same of scales, where there are any.
        block_stride: elements from a block to the next one.
        table: pointer to int32 ``[W]``: the sequence's blocks.
        key_centres: pointer to float32 ``[1 + R, D]``: what was taken off K, where something was.
        value_centres: pointer to float32 ``[2, D]``: and off V.
        num_ranges: int32: R.
    """

    key: Any
    value: Any
    key_scales: Any
    value_scales: Any
    block_stride: Any
    table: Any
    key_centres: Any
    value_centres: Any
    num_ranges: Any


class Unsealed(NamedTuple):
    """Entries of rows' own blocks, which are not sealed to them.

    Attributes:
        at: pointer to float16: the K of the first one.
        first: int32: which entry that is.
        end: int32: entries from here on are not loaded.
        begins: int32 ``[ROWS]``: a row sees the entries from here on,
        visible: int32 ``[ROWS]``: and before this.
        slot_stride: int32: from an entry's K or V to the next one's.
        value_offset: int32: from an entry's K to its V.
    """

    at: Any
    first: Any
    end: Any
    begins: Any
    visible: Any
    slot_stride: Any
    value_offset: Any


class Scoring(NamedTuple):
    """What makes scores, in powers of two, of products.

    Attributes:
        scale: float32: times a product.
        softcap: float32: the bound that scores bend towards, where there is one.
    """

    scale: Any
    softcap: Any
