"""Which format a ``quantization_config`` names; what is not computed is refused by name, before a weight is read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pagefold.errors import UnsupportedModelError
from pagefold.quantized.awq import read_awq
from pagefold.quantized.compressed_tensors import read_compressed_tensors
from pagefold.quantized.fields import refused
from pagefold.quantized.fp8 import read_fbgemm_fp8, read_fp8
from pagefold.quantized.gptq import read_gptq

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pagefold.quantized.quantization import Quantization

__all__ = ["METHODS", "read_quantization"]

_READERS: dict[str, Callable[[Mapping[str, Any]], Quantization]] = {
    "awq": read_awq,
    "compressed-tensors": read_compressed_tensors,
    "fbgemm_fp8": read_fbgemm_fp8,
    "fp8": read_fp8,
    "gptq": read_gptq,
}
METHODS = tuple(_READERS)
"""Values of ``quant_method`` that are computed."""


def read_quantization(config: Mapping[str, Any]) -> Quantization | None:
    """Return how a folder's matrices are stored; None where they are not quantized.

    Args:
        config: of the model, as ``config.json`` has it.

    Raises:
        UnsupportedModelError: they are quantized in a way that is not computed.
    """
    fields = config.get("quantization_config")
    if not fields:
        return None
    if not isinstance(fields, dict):
        message = f"The config says quantization_config = {repr(fields)[:60]}."
        raise UnsupportedModelError(message, remedy="It must be an object, or null.")
    method = str(fields.get("quant_method") or "")
    read = _READERS.get(method)
    if read is None:
        known = f"{', '.join(METHODS[:-1])} or {METHODS[-1]}"
        msg = f"by {method[:60] or 'a method that it does not name'}"
        raise refused(msg, known)
    return read(fields)
