"""Weights in fp8 (e4m3) with scales in float, as DeepSeek and Qwen publish them, and FBGEMM's and AutoFP8's.

``weight`` is ``[N, K]`` in e4m3. ``weight_scale_inv`` has a scale for each rectangle of ``weight_block_size``, by which
the weight is multiplied, whatever it is called; without blocks ``weight_scale`` or ``weight_scale_inv`` is one for all.
FBGEMM has ``weight_scale`` ``[N, 1]``. Scales may be powers of two by their exponent (``ue8m0``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagefold.errors import UnsupportedModelError
from pagefold.quantized.fields import refused, word_of
from pagefold.quantized.layout import Grid, MatrixLayout, Packed, StoredTensors, matrix_of, part_of

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Fp8", "read_fbgemm_fp8", "read_fp8"]

_SCALES = "F32", "BF16", "F16", "F8_E8M0", "U8"
_NAMES = "weight_scale_inv", "weight_scale"
_UNSCALED = "F8_E4M3", "F8_E5M2"


@dataclass(frozen=True, slots=True)
class Fp8:
    """A folder in fp8; see :class:`~pagefold.quantized.quantization.Quantization`.

    Attributes:
        method: as its config has it.
        block: rows and columns that share a scale; 0 and 0 for the whole matrix, 1 and 0 for a row each.
        has_exponents: whether scales in bytes are exponents of two.
        activations: how they were meant to be rounded.
    """

    method: str
    block: tuple[int, int]
    has_exponents: bool
    activations: str

    @property
    def name(self) -> str:
        """What a start says."""
        rows, columns = self.block
        of = f"blocks of {rows} x {columns}" if columns else "channels" if rows else "whole matrices"
        return f"{self.method}, 8 bit (e4m3) in {of}"

    def layout(self, module: str, stored: StoredTensors) -> MatrixLayout | None:
        """Return how the matrix of a module is stored; see the protocol."""
        name = f"{module}.weight"
        part = stored.get(name)
        if part is None or part.dtype not in {*_UNSCALED, "I8", "U8"}:
            return None
        num_rows, num_columns = matrix_of(stored, name, ["F8_E4M3"])
        scale = next((each for each in _NAMES if f"{module}.{each}" in stored), _NAMES[not self.block[1]])
        grid = Grid(f"{module}.{scale}", self.block[0] or num_rows, self.block[1] or num_columns)
        shape = num_rows, num_columns
        allowed = [dtype for dtype in _SCALES if dtype != "U8" or self.has_exponents]
        part_of(stored, grid.name, allowed, grid.stored_shapes(shape))
        return MatrixLayout(shape, Packed(name, is_float=True), grid)


def read_fp8(fields: Mapping[str, Any]) -> Fp8:
    """Read a ``quantization_config`` of the method ``fp8``.

    Raises:
        UnsupportedModelError: it is of a kind that is not computed; says which.
    """
    form = word_of(fields, "fmt", default="e4m3")
    if form not in {"e4m3", "float8_e4m3fn", "e4m3fn"}:
        msg = f"by fp8 in {form}"
        raise refused(msg, "fp8 in e4m3")
    experts = word_of(fields, "expert_dtype", default="fp8")
    if experts != "fp8":
        msg = f"by fp8 with experts in {experts}"
        raise refused(msg, "fp8 throughout")
    exponents = word_of(fields, "scale_fmt", default="float")
    if exponents not in {"float", "ue8m0"}:
        msg = f"by fp8 with scales in {exponents}"
        raise refused(msg, "fp8 with scales in float or ue8m0")
    scheme = word_of(fields, "activation_scheme", default="dynamic")
    return Fp8("fp8", _block(fields.get("weight_block_size")), exponents == "ue8m0", f"fp8, {scheme}")


def read_fbgemm_fp8(_: Mapping[str, Any]) -> Fp8:
    """Read a ``quantization_config`` of FBGEMM's fp8: rows of a matrix have a scale each."""
    return Fp8("fbgemm_fp8", (1, 0), has_exponents=False, activations="fp8, dynamic per token")


def _block(given: Any) -> tuple[int, int]:  # noqa: ANN401 - of JSON
    """Return the rows and columns that share a scale; 0 and 0 where all do."""
    if given is None:
        return 0, 0
    is_pair = isinstance(given, list) and len(given) == 2  # noqa: PLR2004 - rows and columns
    if not is_pair or not all(type(size) is int and size > 0 for size in given):
        message = f"The config says weight_block_size = {repr(given)[:40]} of weights quantized by fp8."
        raise UnsupportedModelError(message, remedy="It must be rows and columns of a block, at least 1 each, or null.")
    return given[0], given[1]
