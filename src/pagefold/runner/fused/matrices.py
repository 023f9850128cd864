"""The matrices of a model: which tensors each is made of, in which formats, and where its panels lie.

A matrix is a list of panels, and each panel is multiplied by its format's own product. So a matrix may have parts of
several formats, as files have whose tensors are quantized in several ways: q, k and v are one matrix, and v is often
kept in more bits. All of a matrix are multiplied with the same rows.
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pagefold.kernels.emit import LINE_BYTES
from pagefold.kernels.formats import PANEL_WIDTH, num_panels

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from pagefold.kernels.formats import ProductFormat
    from pagefold.runner.fused.families import FusedConfig
    from pagefold.runner.fused.formats import DecoderFormats

__all__ = ["SCORERS", "Layer", "Matrix", "Part", "Room", "Tensor", "layers_of", "vocabulary_of"]

SCORERS = "scorers"
"""What stands for the rows that score entries, which no checkpoint has."""


class Tensor(NamedTuple):
    """Some rows of a matrix.

    Attributes:
        name: as transformers calls it.
        num_rows: of it, which are columns of the matrix.
    """

    name: str
    num_rows: int


class Part(NamedTuple):
    """Tensors side by side that are packed together.

    Attributes:
        form: of their panels.
        tensors: which.
        num_k: numbers of a column.
    """

    form: ProductFormat
    tensors: tuple[Tensor, ...]
    num_k: int

    @property
    def num_panels(self) -> int:
        """How many panels they are."""
        return num_panels(sum(one.num_rows for one in self.tensors))

    @property
    def num_bytes(self) -> int:
        """Bytes of its panels."""
        return self.num_panels * self.form.panel_bytes(self.num_k)


class Matrix(NamedTuple):
    """A matrix ``[N, K]``, as it will be packed: parts one behind the other."""

    parts: tuple[Part, ...]

    @property
    def num_panels(self) -> int:
        """How many panels it has."""
        return sum(part.num_panels for part in self.parts)

    @property
    def num_bytes(self) -> int:
        """Bytes of its panels."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def rows(self) -> int:
        """The address of what turns float32 rows into those that it is multiplied with; 0 for nothing."""
        return self.parts[0].form.tiles().rows

    @property
    def row_bytes(self) -> int:
        """Of such a row; 0 where rows stay as they are."""
        form, _, num_k = self.parts[0]
        return form.row_bytes(num_k) if self.rows else 0


class Layer(NamedTuple):
    """The matrices of a layer, in the order in which they are multiplied; panels of gate and up alternate."""

    qkv: Matrix
    out: Matrix
    gate: Matrix
    up: Matrix
    down: Matrix


def layers_of(config: FusedConfig, formats: DecoderFormats, num_scores: int = 0) -> Iterator[Layer]:
    """Yield the matrices of each layer.

    Args:
        config: of the model.
        formats: of its tensors.
        num_scores: how many scores an entry has, which are the last columns of q, k and v.
    """
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    num_out, num_kv = config.num_heads * head_dim, config.num_kv_heads * head_dim
    for index in range(config.num_layers):
        at = f"model.layers.{index}."
        rows = zip("qkv", (num_out, num_kv, num_kv), strict=True)
        qkv = [Tensor(f"{at}self_attn.{one}_proj.weight", num) for one, num in rows]
        qkv += [Tensor(SCORERS, num_scores)] * bool(num_scores)
        gate, up = (Tensor(f"{at}mlp.{one}_proj.weight", inner) for one in ("gate", "up"))
        yield Layer(
            qkv=_matrix(qkv, hidden, formats),
            out=_matrix([Tensor(f"{at}self_attn.o_proj.weight", hidden)], num_out, formats),
            gate=_matrix([gate], hidden, formats, beside=up),
            up=_matrix([up], hidden, formats, beside=gate),
            down=_matrix([Tensor(f"{at}mlp.down_proj.weight", hidden)], inner, formats),
        )


def vocabulary_of(
    config: FusedConfig, formats: DecoderFormats, *, head: str, embedding: str | None
) -> tuple[Matrix, Matrix | None]:
    """Return the head and the embedding; no embedding where it is the head.

    Args:
        config: of the model.
        formats: of its tensors.
        head: the tensor that it is, by name.
        embedding: likewise; None where it is the same.
    """
    sizes = config.vocab_size, config.hidden_size
    first = Matrix((Part(formats.of(head), (Tensor(head, sizes[0]),), sizes[1]),))
    if embedding is None:
        return first, None
    form = formats.of(embedding, formats.embedding)
    return first, Matrix((Part(form, (Tensor(embedding, sizes[0]),), sizes[1]),))


def _matrix(tensors: Sequence[Tensor], num_k: int, formats: DecoderFormats, beside: Tensor | None = None) -> Matrix:
    """Return tensors as one matrix: each in its own format, if that goes together, else all in the model's.

    Args:
        tensors: which.
        num_k: numbers of a column.
        formats: of tensors.
        beside: one of another matrix that is multiplied with the same rows.
    """
    parts = [
        Part(form, tuple(together), num_k) for form, together in groupby(tensors, lambda one: formats.of(one.name))
    ]
    are_whole = all(sum(one.num_rows for one in part.tensors) % PANEL_WIDTH == 0 for part in parts[:-1])
    rows = {formats.of(one.name).tiles().rows for one in (*tensors, beside or tensors[0])}
    goes = are_whole and len(rows) == 1
    return Matrix(tuple(parts) if goes else (Part(formats.products, tuple(tensors), num_k),))


class Room:
    """Memory for panels: one piece of it, so that the system can give it in large pages.

    Args:
        matrices: for which there is room.
    """

    def __init__(self, matrices: Iterable[Matrix]) -> None:
        parts = [part for matrix in matrices for part in matrix.parts]
        room = np.zeros(sum(map(_with_padding, parts)) + LINE_BYTES, np.uint8)
        self._left = room[-room.ctypes.data % LINE_BYTES :]

    def take(self, matrix: Matrix) -> list[NDArray[np.uint8]]:
        """Return where panels of a matrix go, zeros: ``[panels, bytes of a panel]`` of each part."""
        taken = []
        for part in matrix.parts:
            taken.append(self._left[: part.num_bytes].reshape(part.num_panels, -1))
            self._left = self._left[_with_padding(part) :]
        return taken


def _with_padding(part: Part) -> int:
    return -(-part.num_bytes // LINE_BYTES) * LINE_BYTES
