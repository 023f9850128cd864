"""MatrixLayout: of which stored tensors a quantized matrix is made, and how they lie; said from headers alone.

Standard library only: planners ask as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from pagefold.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["WORD_BITS", "Grid", "MatrixLayout", "Packed", "Part", "StoredTensors", "damaged", "matrix_of", "part_of"]

WORD_BITS = 32
"""Bits of the words that codes are packed into."""
_REMEDY = "Check that config.json and the weights belong together, or download them again."


class Part(NamedTuple):
    """A stored tensor, before it is read.

    Attributes:
        dtype: by safetensors' name, such as ``I32``.
        shape: of it.
    """

    dtype: str
    shape: tuple[int, ...]


StoredTensors: TypeAlias = "Mapping[str, Part]"
"""All tensors of a folder's weight files, by the names that they have there."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Codes, of weights or of zero points, in a stored tensor.

    Attributes:
        name: of the tensor.
        bits: of a code in words of 32; 0 where each lies in a number of its own.
        axis: of the stored tensor along which the codes of one word follow each other.
        places: the place in a word, from the lowest bits on, of each of the codes that follow each other.
        is_transposed: whether it is stored as ``[K, N]``.
        is_float: whether codes are e4m3, each in a number of its own, rather than whole numbers.
    """

    name: str
    bits: int = 0
    axis: int = 1
    places: tuple[int, ...] = ()
    is_transposed: bool = False
    is_float: bool = False

    @property
    def in_a_word(self) -> int:
        """Codes of a word."""
        return WORD_BITS // self.bits if self.bits else 1

    def stored_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return the shape of the tensor that stores a matrix of this shape."""
        stored = [shape[1], shape[0]] if self.is_transposed else [shape[0], shape[1]]
        stored[self.axis] = -(-stored[self.axis] // self.in_a_word)
        return stored[0], stored[1]


@dataclass(frozen=True, slots=True)
class Grid:
    """Scales, each of a rectangle of weights.

    Attributes:
        name: of the tensor.
        rows: of the matrix that share one, N or fewer.
        columns: of it likewise. Where columns have an order of their own, it is that of the group's columns.
        is_transposed: whether it is stored as ``[columns, rows]``.
    """

    name: str
    rows: int
    columns: int
    is_transposed: bool = False

    def shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Return how many there are for a matrix of this shape: of groups of rows, and of groups of columns."""
        return -(-shape[0] // self.rows), -(-shape[1] // self.columns)

    def stored_shapes(self, shape: tuple[int, int]) -> list[tuple[int, ...]]:
        """Return the shapes that the tensor may have for a matrix of this shape: axes of one may be left out."""
        rows, columns = self.shape(shape)
        if self.is_transposed:
            return [(columns, rows)]
        shapes: list[tuple[int, ...]] = [(rows, columns)]
        if columns == 1:
            shapes += [(rows,), ()] if rows == 1 else [(rows,)]
        return shapes


@dataclass(frozen=True, slots=True)
class MatrixLayout:
    """A quantized matrix ``[N, K]``: weight = (code - zero point) * scale.

    Attributes:
        shape: N and K.
        codes: of the weights.
        scales: of them.
        zeros: zero points, one for each scale; None where all are ``zero``.
        zero: that of all weights; what zero points are counted from where there are some.
        group_of_column: the tensor that says of which group each column is; empty where groups follow each other.
        shape_name: the tensor that says the shape again; empty where there is none.
    """

    shape: tuple[int, int]
    codes: Packed
    scales: Grid
    zeros: Packed | None = None
    zero: int = 0
    group_of_column: str = ""
    shape_name: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """All stored tensors that it is made of."""
        zeros = "" if self.zeros is None else self.zeros.name
        return tuple(filter(None, (self.codes.name, self.scales.name, zeros, self.group_of_column, self.shape_name)))


def part_of(stored: StoredTensors, name: str, dtypes: Sequence[str], shapes: Sequence[tuple[int, ...]] = ()) -> Part:
    """Return a stored tensor that must be there.

    Args:
        stored: all of them.
        name: of it.
        dtypes: that it may have.
        shapes: that it may have; any where none is named.

    Raises:
        UnsupportedModelError: it lacks, or is another one.
    """
    part = stored.get(name)
    if part is None:
        msg = f"{name} is not there, and the weight beside it is quantized"
        raise damaged(msg)
    if part.dtype not in dtypes:
        msg = f"{name} is of {part.dtype}, where it must be of {' or '.join(dtypes)}"
        raise damaged(msg)
    if shapes and part.shape not in shapes:
        allowed = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
        msg = f"{name} is of shape {list(part.shape)}, where it must be of {allowed}"
        raise damaged(msg)
    return part


def matrix_of(stored: StoredTensors, name: str, dtypes: Sequence[str]) -> tuple[int, int]:
    """Return the shape of a stored matrix that must be there.

    Raises:
        UnsupportedModelError: it lacks, is of another dtype, or is no matrix.
    """
    part = part_of(stored, name, dtypes)
    if len(part.shape) != 2 or not all(part.shape):  # noqa: PLR2004 - a matrix
        msg = f"{name} is of shape {list(part.shape)}, and no matrix"
        raise damaged(msg)
    return part.shape[0], part.shape[1]


def damaged(what: str) -> UnsupportedModelError:
    """Return the error of stored tensors that do not go together."""
    return UnsupportedModelError(f"The quantized weights are not whole: {what}.", remedy=_REMEDY)
