"""How many bytes weights take, in the form that they are stored in."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import TYPE_CHECKING

from pagefold.errors import ConfigError, UnsupportedModelError
from pagefold.files.json_object import read_json_object
from pagefold.files.weights import count_quantized, find_weight_files, num_elements, tensor_headers
from pagefold.plan.nearest import nearest_names
from pagefold.quantized import Part, count_elements, read_quantization

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from pagefold.files.weights import QuantizedTensors

__all__ = [
    "AS_IN_FILE",
    "WEIGHT_DTYPES",
    "WeightDtype",
    "as_in_file",
    "count_blocks",
    "count_parameters",
    "find_weight_dtype",
    "stored_dtype",
]


AS_IN_FILE = "the file's own kinds"
"""The weight dtype of what is computed with as a GGUF file has it."""
_KEPT_BITS = 16
"""Of what a quantized checkpoint leaves as it was."""


@dataclass(frozen=True, slots=True)
class WeightDtype:
    """How weights are stored.

    Attributes:
        name: what ``--weight-dtype`` calls it.
        bits: of one parameter, with its share of scales and zero points.
        is_of_experts: whether only routed experts are stored so.
    """

    name: str
    bits: Fraction
    is_of_experts: bool = False

    @property
    def is_quantized(self) -> bool:
        """Whether it is for matrices only, so that all else stays in 16 bit."""
        return self.bits < _KEPT_BITS

    def num_bytes(self, num_parameters: int, *, num_kept: int = 0) -> int:
        """Return the bytes of so many parameters, of which ``num_kept`` stay in 16 bit if the others have fewer."""
        kept_bits = max(self.bits, Fraction(_KEPT_BITS))
        return math.ceil(((num_parameters - num_kept) * self.bits + num_kept * kept_bits) / 8)


def _of(name: str, bits: int | Fraction) -> WeightDtype:
    return WeightDtype(name, Fraction(bits))


_ALL = (
    _of("fp64", 64),
    _of("fp32", 32),
    _of("fp16", 16),
    _of("bf16", 16),
    _of("fp8", 8),
    _of("int8", 8),
    # For 64 parameters a scale in 32 bit, and the sum of their codes in 16.
    _of("w8a8_int8", 8 + Fraction(48, 64)),
    _of("int4", 4),
    # For 128 parameters a scale and a zero point, in 16 bit each.
    _of("int4-g128", 4 + Fraction(32, 128)),
    # For 16 parameters a scale in 8 bit.
    _of("nvfp4", 4 + Fraction(8, 16)),
    # For 32 parameters a scale in 8 bit; what is no routed expert stays in 16 bit.
    WeightDtype("mxfp4", 4 + Fraction(8, 32), is_of_experts=True),
)
WEIGHT_DTYPES: Mapping[str, WeightDtype] = MappingProxyType({dtype.name: dtype for dtype in _ALL})

_GROUPED = re.compile(r"int([1-9])-g([1-9]\d{0,5})(?:-z(\d{1,2}))?")
"""Names of dtypes that keep, for each group of parameters, a scale in 16 bit and a zero point in as many bits as
stand behind ``z``; in 16 where nothing does."""

_OTHER_NAMES = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16", "half": "fp16"}


def find_weight_dtype(name: str) -> WeightDtype:
    """Return the weight dtype of that name.

    Raises:
        ConfigError: there is none.
    """
    found = WEIGHT_DTYPES.get(_OTHER_NAMES.get(name, name))
    if found is None:
        message = f"weight_dtype is {name!r}."
        nearest = nearest_names(name, WEIGHT_DTYPES)
        hint = f" (nearest: {', '.join(nearest)})" if nearest else ""
        raise ConfigError(message, remedy=f"It must be auto or one of {', '.join(WEIGHT_DTYPES)}{hint}.")
    return found


def stored_dtype(quantization: str) -> WeightDtype:
    """Return the weight dtype of a checkpoint whose config says so (``quantization.py``).

    Raises:
        ConfigError: nobody knows how many bits that is.
    """
    grouped = _GROUPED.fullmatch(quantization)
    if grouped is not None:
        zero_bits = 16 if grouped[3] is None else int(grouped[3])
        return _of(quantization, int(grouped[1]) + Fraction(16 + zero_bits, int(grouped[2])))
    if quantization not in WEIGHT_DTYPES:
        message = f"The weights are stored by {quantization!r}, of which it is not known how many bits that is."
        raise ConfigError(message, remedy=f"Give --weight-dtype: one of {', '.join(WEIGHT_DTYPES)}.")
    return WEIGHT_DTYPES[quantization]


def as_in_file(blocks: QuantizedTensors, num_parameters: int, others: WeightDtype) -> WeightDtype:
    """Return the weight dtype of a GGUF file that is computed with as it is.

    Args:
        blocks: its quantized matrices.
        num_parameters: of all weights.
        others: in which all else is.
    """
    bits = 8 * blocks.num_bytes + (num_parameters - blocks.num_elements) * others.bits
    return WeightDtype(AS_IN_FILE, Fraction(bits) / num_parameters)


def count_blocks(folder: Path) -> QuantizedTensors | None:
    """Return how much of a folder's weights is a GGUF file's quantized matrices; None where they are no such file.

    Raises:
        ModelNotFoundError: the file is not there, or not whole.
    """
    files = find_weight_files(folder)
    return count_quantized(files[0]) if files and files[0].suffix == ".gguf" else None


def count_parameters(folder: Path) -> int | None:
    """Return the elements of all tensors in a folder's safetensors or GGUF, from headers; None without such files.

    Quantized matrices have as many as they stand for; None where nobody knows how they are stored.

    Raises:
        ModelNotFoundError: a file is not there, or not whole.
    """
    files = find_weight_files(folder)
    if not files or files[0].suffix not in (".safetensors", ".gguf"):
        return None
    try:
        quantization = read_quantization(read_json_object(folder / "config.json"))
        if quantization is None:
            return sum(num_elements(file) for file in files)
        stored = {name: Part(*one) for file in files for name, one in tensor_headers(file).items()}
        return count_elements(quantization, stored)
    except UnsupportedModelError:
        return None
