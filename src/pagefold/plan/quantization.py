"""How a checkpoint's weights are stored, as its config says it: in the words of the tools that quantize."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["quantization_of"]

_PLAIN = {"fp8": "fp8", "fbgemm_fp8": "fp8", "mxfp4": "mxfp4", "eetq": "int8"}


def quantization_of(config: Mapping[str, Any]) -> str:
    """Return the weight dtype of a checkpoint; empty where it is not quantized.

    A group of n parameters with its own scale and zero point is ``int4-gN``. What is not known is returned in the
    config's own words, which are no weight dtype.
    """
    found = config.get("quantization_config")
    if not isinstance(found, dict):
        return ""
    method = str(found.get("quant_method") or "")
    if method in _PLAIN:
        return _PLAIN[method]
    if method == "bitsandbytes":  # a scale in 32 bit for 64 parameters
        return "int4-g64" if found.get("load_in_4bit") or found.get("_load_in_4bit") else "int8"
    if method == "modelopt":
        return {"FP8": "fp8", "NVFP4": "nvfp4"}.get(str(found.get("quant_algo")), method)
    if method == "compressed-tensors":
        return _compressed(found)
    bits = found.get("bits")  # GPTQ, AWQ, MLX and their kin
    return _grouped(bits, found.get("group_size") or 128) if type(bits) is int else method or "unknown"


def _grouped(bits: int, group_size: object) -> str:
    return f"int{bits}-g{group_size}" if type(group_size) is int and group_size > 0 else f"int{bits}"


def _compressed(found: Mapping[str, Any]) -> str:
    groups = found.get("config_groups")
    first = next(iter(groups.values()), None) if isinstance(groups, dict) else None
    weights = first.get("weights") if isinstance(first, dict) else None
    if not isinstance(weights, dict):
        return "compressed-tensors"
    bits, is_float = weights.get("num_bits"), weights.get("type") == "float"
    if bits == 8:  # noqa: PLR2004 - bits
        return "fp8" if is_float else "int8"
    if bits == 4 and is_float:  # noqa: PLR2004 - bits
        return "nvfp4"
    return _grouped(bits, weights.get("group_size")) if type(bits) is int else "compressed-tensors"
