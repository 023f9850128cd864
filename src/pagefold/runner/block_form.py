"""Of what a block's bytes are made, for those who pack them."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from pagefold.runner.cells import cell_places
from pagefold.runner.codec_slab import CODEC_LAYOUT, CODEC_ROWS_LAYOUT
from pagefold.runner.codecs import CELL_CODECS
from pagefold.runner.codecs.int8 import Int8
from pagefold.transport.block_form import BlockForm

if TYPE_CHECKING:
    from pagefold.kv import KVGeometry
    from pagefold.runner.codecs.vectors import VectorFormat

__all__ = ["block_form"]

_ROWS = 4
"""Rows of a part are dealt to so many streams."""


def block_form(geometry: KVGeometry, codec_layout: str = CODEC_LAYOUT) -> BlockForm:
    """Return where codes of 8 bit are in a block of ``geometry``, and where numbers of how many bytes.

    Of several cache groups that is where the one with the most cells has them: those of the others lie in the same
    places.

    Args:
        geometry: of the block.
        codec_layout: how K's codes lie in it.
    """
    if geometry.codec is None:
        return BlockForm(geometry.bytes_per_block, (), ((0, geometry.bytes_per_block, geometry.element_bytes),))
    head_dim, size = geometry.head_dim, geometry.block_size
    parts: list[tuple[int, ...]] = []
    planes: list[tuple[int, int, int]] = []

    def add(form: VectorFormat, begin: int, end: int, *, is_value: bool) -> None:
        if isinstance(form, Int8) and head_dim % _ROWS == 0:
            strides = (1, head_dim) if is_value or codec_layout == CODEC_ROWS_LAYOUT else (size, 1)
            parts.append((begin, int(is_value), head_dim, size, *strides))
        elif end > begin:
            planes.append((begin, end, max(1, form.bits // 8)))

    whole = max(geometry.groups, key=lambda group: group.num_cells)
    all_places = cell_places(geometry)
    for layer, head in product(whole.layers, range(geometry.num_kv_heads)):
        places, codec = all_places[geometry.cell(layer, head)], CELL_CODECS[geometry.codec_of(layer).name]
        add(codec.keys, places.keys, places.values, is_value=False)
        add(codec.values, places.values, places.key_scales, is_value=True)
        if places.end > places.key_scales:
            planes.append((places.key_scales, places.end, 2))
    return BlockForm(geometry.bytes_per_block, parts, planes)
