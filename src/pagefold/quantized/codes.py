"""Codes, zero points and scales of a quantized matrix, unpacked, some rows at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from pagefold.quantized.layout import damaged

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pagefold.quantized.layout import MatrixLayout, Packed

__all__ = ["CodedRows", "Groups", "coded_rows", "groups_of", "settled"]

_ELEMENTS_AT_ONCE = 1 << 22
"""About so many are unpacked at once, which takes some 50 MB."""
_EXPONENT_OF_1 = 127


class CodedRows(NamedTuple):
    """Rows ``[start, start + R)`` of a matrix with C groups of columns: weight = (code - zero) * scale.

    Attributes:
        start: the first of them.
        codes: ``[R, K]``: whole numbers, or e4m3.
        zeros: int32 ``[R, C]``; None where there are none to take off.
        scales: float32 ``[R, C]``.
        groups: int64 ``[K]``: which of the C groups each column is in.
    """

    start: int
    codes: torch.Tensor
    zeros: torch.Tensor | None
    scales: torch.Tensor
    groups: torch.Tensor


class Groups(NamedTuple):
    """Scales and zero points of a matrix: R groups of rows, C of columns.

    Attributes:
        zeros: int32 ``[R, C]``; None where there are none to take off.
        scales: float32 ``[R, C]``.
        columns: int64 ``[K]``: which of the C groups each column is in.
    """

    zeros: torch.Tensor | None
    scales: torch.Tensor
    columns: torch.Tensor


def settled(layout: MatrixLayout, read: Callable[[str], torch.Tensor]) -> MatrixLayout:
    """Return a layout with the shape that its stored tensor of shapes says.

    Args:
        layout: of a matrix, by headers.
        read: returns a stored tensor.

    Raises:
        UnsupportedModelError: no matrix of that shape is stored so.
    """
    if not layout.shape_name:
        return layout
    num_rows, num_columns = (int(size) for size in read(layout.shape_name).tolist())
    shape = num_rows, num_columns
    fits = min(shape) > 0 and layout.codes.stored_shape(shape) == layout.codes.stored_shape(layout.shape)
    exact = replace(layout, shape=shape)
    if not fits or exact.scales.shape(shape) != layout.scales.shape(layout.shape):
        msg = f"{layout.shape_name} says {list(shape)}, and {layout.codes.name} holds {list(layout.shape)}"
        raise damaged(msg)
    if layout.scales.columns < layout.shape[1] and num_columns != layout.shape[1]:  # groups say it exactly
        msg = f"{layout.shape_name} says {num_columns} columns, and {layout.scales.name} {layout.shape[1]}"
        raise damaged(msg)
    return exact


def groups_of(layout: MatrixLayout, read: Callable[[str], torch.Tensor]) -> Groups:
    """Return scales and zero points of a matrix; its codes are not read.

    Args:
        layout: of it; see :func:`settled`.
        read: returns a stored tensor.

    Raises:
        UnsupportedModelError: a column is in a group that is not there.
    """
    columns = _columns(layout, layout.scales.shape(layout.shape)[1], read)
    return Groups(_zeros(layout, read), _scales(layout, read), columns)


def coded_rows(layout: MatrixLayout, read: Callable[[str], torch.Tensor]) -> Iterator[CodedRows]:
    """Yield all rows of a matrix, some at a time, in their order.

    Args:
        layout: of it; see :func:`settled`.
        read: returns a stored tensor.

    Raises:
        UnsupportedModelError: a column is in a group that is not there.
    """
    num_rows, num_columns = layout.shape
    groups, codes = groups_of(layout, read), read(layout.codes.name)
    at_once = max(32, _ELEMENTS_AT_ONCE // num_columns // 32 * 32)  # whole words, however they lie
    for start in range(0, num_rows, at_once):
        end = min(num_rows, start + at_once)
        grid_rows = torch.arange(start, end) // layout.scales.rows
        yield CodedRows(
            start,
            _unpacked(layout.codes, codes, start, end)[:, :num_columns],
            None if groups.zeros is None else groups.zeros[grid_rows],
            groups.scales[grid_rows],
            groups.columns,
        )


def _columns(layout: MatrixLayout, num_groups: int, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
    if not layout.group_of_column:
        return torch.arange(layout.shape[1]) // layout.scales.columns
    groups = read(layout.group_of_column).to(torch.int64)
    if bool((groups == -1).all()):  # as it is written where there is no order
        return torch.arange(layout.shape[1]) // layout.scales.columns
    if int(groups.min()) < 0 or int(groups.max()) >= num_groups:
        odd = int(groups.min()) if int(groups.min()) < 0 else int(groups.max())
        msg = f"{layout.group_of_column} has group {odd}, and there are {num_groups}"
        raise damaged(msg)
    return groups


def _scales(layout: MatrixLayout, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
    scales = read(layout.scales.name)
    if scales.dtype == torch.uint8:
        scales = torch.ldexp(torch.ones(()), scales.to(torch.int32) - _EXPONENT_OF_1)
    scales = scales.to(torch.float32)
    return scales.T if layout.scales.is_transposed else scales.reshape(layout.scales.shape(layout.shape))


def _zeros(layout: MatrixLayout, read: Callable[[str], torch.Tensor]) -> torch.Tensor | None:
    """Return the zero point of each scale; packed ones are counted within their bits."""
    grid = layout.scales.shape(layout.shape)
    if layout.zeros is None:
        return torch.full(grid, layout.zero, dtype=torch.int32) if layout.zero else None
    stored = read(layout.zeros.name)
    if not layout.zeros.bits:
        return stored.to(torch.int32).reshape(grid) + layout.zero
    found = _unpacked(layout.zeros, stored, 0, grid[0])[:, : grid[1]]
    return (found + layout.zero) & ((1 << layout.zeros.bits) - 1)


def _unpacked(packed: Packed, stored: torch.Tensor, start: int, end: int) -> torch.Tensor:
    """Return codes of rows ``[start, end)``, with those that fill up the last words of columns."""
    if not packed.bits:
        return stored[start:end]
    along = 1 if packed.is_transposed else 0  # the stored tensor's axis of rows
    first, last = start, end
    if along == packed.axis:
        first, last = start // packed.in_a_word, -(-end // packed.in_a_word)
    words = stored.narrow(along, first, last - first)
    shifts = torch.tensor([packed.bits * place for place in packed.places], dtype=torch.int32)
    shifts = shifts[:, None] if packed.axis == 0 else shifts
    codes = (words.unsqueeze(packed.axis + 1) >> shifts) & ((1 << packed.bits) - 1)
    codes = codes.flatten(packed.axis, packed.axis + 1)
    return (codes.T if packed.is_transposed else codes)[: end - start]
