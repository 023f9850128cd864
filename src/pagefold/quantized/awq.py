"""AWQ (Lin et al., 2024), as AutoAWQ saves it for its GEMM kernels.

``qweight`` is int32 ``[K, N / 8]``, ``qzeros`` int32 ``[K / group_size, N / 8]``: a word holds eight codes of columns
that follow each other, in the order 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits on. ``scales`` is ``[K / group_size,
N]``. Activations are scaled before the norms in front of them, whose weights have that already; in families without
such norms a tensor of its own does it (``act.scales``), which is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagefold.quantized.fields import flag_of, group_size_of, number_of, refused, word_of
from pagefold.quantized.layout import Grid, MatrixLayout, Packed, StoredTensors, damaged, matrix_of, part_of

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Awq", "read_awq"]

_METHOD, _BITS = "awq", 4
_PLACES = 0, 4, 1, 5, 2, 6, 3, 7
"""In a word, of each of eight columns that follow each other."""
_FLOATS = ("F16", "BF16", "F32")


@dataclass(frozen=True, slots=True)
class Awq:
    """A folder in AWQ; see :class:`~pagefold.quantized.quantization.Quantization`.

    Attributes:
        group_size: columns that share a scale and a zero point; -1 for all.
    """

    group_size: int

    @property
    def name(self) -> str:
        """What a start says."""
        return f"AWQ, 4 bit in {'channels' if self.group_size == -1 else f'groups of {self.group_size}'}"

    @property
    def activations(self) -> str:
        """None are rounded."""
        return ""

    def layout(self, module: str, stored: StoredTensors) -> MatrixLayout | None:
        """Return how the matrix of a module is stored; see the protocol."""
        if module.endswith(".act") and f"{module}.scales" in stored:
            msg = f"by {_METHOD} with scales of activations ({module}.scales)"
            raise refused(msg, "awq in a family without them")
        name = f"{module}.qweight"
        if name not in stored:
            return None
        words = matrix_of(stored, name, ["I32"])
        num_columns, num_rows = words[0], words[1] * len(_PLACES)
        group = num_columns if self.group_size == -1 else self.group_size
        if num_columns % group:
            msg = f"{name} has {num_columns} rows, which groups of {group} do not divide"
            raise damaged(msg)
        shape = num_rows, num_columns
        scales = Grid(f"{module}.scales", 1, group, is_transposed=True)
        num_groups = scales.shape(shape)[1]
        part_of(stored, scales.name, _FLOATS, scales.stored_shapes(shape))
        zeros = Packed(f"{module}.qzeros", _BITS, 1, _PLACES, is_transposed=True)
        part_of(stored, zeros.name, ["I32"], [zeros.stored_shape((num_rows, num_groups))])
        return MatrixLayout(shape, Packed(name, _BITS, 1, _PLACES, is_transposed=True), scales, zeros)


def read_awq(fields: Mapping[str, Any]) -> Awq:
    """Read a ``quantization_config`` of AWQ.

    Raises:
        UnsupportedModelError: it is of a kind that is not computed; says which.
    """
    form = word_of(fields, "version", "format", "checkpoint_format", default="gemm")
    if word_of(fields, "backend") == "llm-awq":
        form = "llm-awq"
    if form != "gemm":
        msg = f"by {_METHOD} in the packing {form}"
        raise refused(msg, "awq in the packing gemm")
    number_of(fields, "bits" if fields.get("bits") is not None else "w_bit", _BITS, (_BITS,), _METHOD)
    if not flag_of(fields, "zero_point", default=True):
        msg = f"by {_METHOD} without zero points"
        raise refused(msg, "awq with zero points")
    return Awq(group_size_of(fields, _METHOD, "group_size", "q_group_size", default=128))
