"""Of what a block's bytes are made, for those who pack them."""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from pagefold.runner.cells import cell_places
from pagefold.runner.codec_slab import CODEC_LAYOUT, CODEC_ROWS_LAYOUT
from pagefold.runner.codecs import CELL_CODECS
from pagefold.runner.codecs.int8 import Int8
from pagefold.transport.block_form import BlockForm

if TYPE_CHECKING:
    from pagefold.kv import CacheGroup, KVGeometry
    from pagefold.runner.codecs.vectors import VectorFormat

__all__ = ["block_form"]

_ROWS = 4
"""Rows of a part are dealt to so many streams."""


def block_form(geometry: KVGeometry, codec_layout: str = CODEC_LAYOUT) -> BlockForm:
    """Return where codes of 8 bit are in a block of ``geometry``, and where numbers of how many bytes.

    Blocks of all cache groups have one form. It is that of the group that fills its blocks, but for codes where another
    group, whose layers have other codecs, has something else: what is there is packed as bytes, and never rounded.

    Args:
        geometry: of the block.
        codec_layout: how K's codes lie in it.
    """
    if geometry.codec is None:
        return BlockForm(geometry.bytes_per_block, (), ((0, geometry.bytes_per_block, geometry.element_bytes),))
    sections_of = [_sections(geometry, group, codec_layout) for group in geometry.groups]
    whole = max(sections_of, key=lambda sections: sections[-1].end)
    others = {section for sections in sections_of for section in sections}
    parts: list[tuple[int, ...]] = []
    planes: list[tuple[int, int, int]] = []
    for section in whole:
        if not section.part:
            planes.append((section.begin, section.end, section.number_bytes))
        elif any(section.overlaps(other) for other in others):
            planes.append((section.begin, section.end, 1))
        else:
            parts.append(section.part)
    end = whole[-1].end
    if end < geometry.bytes_per_block:  # marks of what is kept
        planes.append((end, geometry.bytes_per_block, 1))
    return BlockForm(geometry.bytes_per_block, parts, planes)


class _Section(NamedTuple):
    """Bytes of a block that are of one kind: codes, or scales.

    Attributes:
        begin, end: where it is.
        number_bytes: of each of its numbers.
        part: its fields as a part of a form, where it is codes of 8 bit; else empty.
    """

    begin: int
    end: int
    number_bytes: int
    part: tuple[int, ...] = ()

    def overlaps(self, other: _Section) -> bool:
        """Whether the other one is something else in the same place."""
        return self != other and self.begin < other.end and other.begin < self.end


def _sections(geometry: KVGeometry, group: CacheGroup, codec_layout: str) -> list[_Section]:
    """Return what one cache group has in its blocks, from the beginning on without a gap."""
    head_dim, size = geometry.head_dim, geometry.block_size
    sections: list[_Section] = []

    def add(form: VectorFormat, begin: int, end: int, *, is_value: bool) -> None:
        part: tuple[int, ...] = ()
        if isinstance(form, Int8) and head_dim % _ROWS == 0:
            strides = (1, head_dim) if is_value or codec_layout == CODEC_ROWS_LAYOUT else (size, 1)
            part = begin, int(is_value), head_dim, size, *strides
        if end > begin:
            sections.append(_Section(begin, end, max(1, form.bits // 8), part))

    all_places = cell_places(geometry)
    for layer, head in product(group.layers, range(geometry.num_kv_heads)):
        places, codec = all_places[geometry.cell(layer, head)], CELL_CODECS[geometry.codec_of(layer).name]
        add(codec.keys, places.keys, places.values, is_value=False)
        add(codec.values, places.values, places.key_scales, is_value=True)
        if places.end > places.key_scales:
            sections.append(_Section(places.key_scales, places.end, 2))
    return sections
