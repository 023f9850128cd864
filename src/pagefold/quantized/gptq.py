"""GPTQ (Frantar et al., 2023), as AutoGPTQ and GPTQModel save it.

``qweight`` is int32 ``[K * bits / 32, N]``: a word holds codes of rows that follow each other, the first in the lowest
bits. ``scales`` is ``[G, N]``, ``qzeros`` int32 ``[G, N * bits / 32]``, ``g_idx`` int32 ``[K]``: the group of each
column of the model, which is any with order of activations (``desc_act``), and ``k // group_size`` without.
In ``gptq`` (v1) zero points are stored less 1, within their bits; in ``gptq_v2`` as they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagefold.quantized.fields import flag_of, group_size_of, number_of, refused, word_of
from pagefold.quantized.layout import WORD_BITS, Grid, MatrixLayout, Packed, StoredTensors, matrix_of, part_of

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Gptq", "read_gptq"]

_METHOD = "gptq"
_FORMATS = {"gptq": 1, "gptq_v2": 0}
"""By checkpoint formats, what is missing in stored zero points."""
_FLOATS = ("F16", "BF16", "F32")


@dataclass(frozen=True, slots=True)
class Gptq:
    """A folder in GPTQ; see :class:`~pagefold.quantized.quantization.Quantization`.

    Attributes:
        bits: of a code, 4 or 8.
        group_size: columns that share a scale; -1 for all.
        is_ordered: whether columns are in groups by the order of their activations.
        zero_shift: what is missing in stored zero points.
    """

    bits: int
    group_size: int
    is_ordered: bool
    zero_shift: int

    @property
    def name(self) -> str:
        """What a start says."""
        groups = "channels" if self.group_size == -1 else f"groups of {self.group_size}"
        return f"GPTQ, {self.bits} bit in {groups}{', in order of activations' if self.is_ordered else ''}"

    @property
    def activations(self) -> str:
        """None are rounded."""
        return ""

    def layout(self, module: str, stored: StoredTensors) -> MatrixLayout | None:
        """Return how the matrix of a module is stored; see the protocol."""
        name = f"{module}.qweight"
        if name not in stored:
            return None
        words = matrix_of(stored, name, ["I32"])
        in_a_word = WORD_BITS // self.bits
        num_columns, num_rows = words[0] * in_a_word, words[1]
        group = num_columns if self.group_size == -1 else self.group_size
        shape = num_rows, num_columns
        places = tuple(range(in_a_word))
        scales = Grid(f"{module}.scales", 1, group, is_transposed=True)
        num_groups = scales.shape(shape)[1]
        part_of(stored, scales.name, _FLOATS, scales.stored_shapes(shape))
        zeros = Packed(f"{module}.qzeros", self.bits, 1, places, is_transposed=True)
        part_of(stored, zeros.name, ["I32"], [zeros.stored_shape((num_rows, num_groups))])
        order = f"{module}.g_idx"
        if order in stored or self.is_ordered:
            part_of(stored, order, ["I32", "I64"], [(num_columns,)])
        return MatrixLayout(
            shape,
            Packed(name, self.bits, 0, places, is_transposed=True),
            scales,
            zeros,
            self.zero_shift,
            group_of_column=order if order in stored else "",
        )


def read_gptq(fields: Mapping[str, Any]) -> Gptq:
    """Read a ``quantization_config`` of GPTQ.

    Raises:
        UnsupportedModelError: it is of a kind that is not computed; says which.
    """
    form = word_of(fields, "checkpoint_format", "format", default="gptq")
    if fields.get("is_marlin_format"):
        form = "marlin"
    if form not in _FORMATS:
        msg = f"by {_METHOD} in the format {form}"
        raise refused(msg, f"gptq in the format {' or '.join(_FORMATS)}")
    bits = number_of(fields, "bits", 4, (4, 8), _METHOD)
    packed = word_of(fields, "pack_dtype", default="int32").removeprefix("torch.")
    if packed != "int32":
        msg = f"by {_METHOD} in words of {packed}"
        raise refused(msg, "gptq in words of int32")
    if fields.get("rotation"):
        msg = f"by {_METHOD} with rotated activations"
        raise refused(msg, "gptq without rotation")
    rules = fields.get("dynamic")
    odd = [rule for rule in rules if not str(rule).startswith("-:")] if isinstance(rules, dict) else []
    if odd:
        msg = f"by {_METHOD} with bits of its own for {odd[0][:60]}"
        raise refused(msg, "gptq with the same bits everywhere")
    return Gptq(
        bits,
        group_size_of(fields, _METHOD, "group_size", default=128),
        flag_of(fields, "desc_act", default=False),
        _FORMATS[form],
    )
