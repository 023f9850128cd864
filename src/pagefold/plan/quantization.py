"""How a checkpoint's weights are stored, as its config says it: in the words of the tools that quantize."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["quantization_of"]

_PLAIN = {"fp8": "fp8", "fbgemm_fp8": "fp8", "mxfp4": "mxfp4", "eetq": "int8"}


def quantization_of(config: Mapping[str, Any]) -> str:
    """Return the weight dtype of a checkpoint; empty where it is not quantized.

    A group of n parameters with its own scale and zero point in 16 bit is ``int4-gN``; with a zero point of z bits
    ``int4-gN-zZ``. What is not known is returned in the config's own words, which are no weight dtype.
    """
    found = config.get("quantization_config")
    if not isinstance(found, dict):
        return ""
    method = str(found.get("quant_method") or "")
    if method in _PLAIN:
        return _PLAIN[method]
    if method == "modelopt":
        return {"FP8": "fp8", "NVFP4": "nvfp4"}.get(str(found.get("quant_algo")), method)
    if method == "compressed-tensors":
        return _compressed(found)
    return _bits_and_bytes(found) if method == "bitsandbytes" else _packed(found, method)


def _bits_and_bytes(found: Mapping[str, Any]) -> str:
    """A scale in 32 bit for 64 parameters; about 8 bit each where scales are quantized again."""
    if not (found.get("load_in_4bit") or found.get("_load_in_4bit")):
        return "int8"
    return "int4-g128-z0" if found.get("bnb_4bit_use_double_quant") else "int4-g64"


def _packed(found: Mapping[str, Any], method: str) -> str:
    """GPTQ, AWQ, MLX and their kin: GPTQ and AWQ pack zero points as weights, MLX has offsets in 16 bit."""
    bits = found.get("bits") or found.get("w_bit")
    if type(bits) is not int:
        return method or "unknown"
    zero_bits: int | None = bits if method else None
    if method == "gptq" and found.get("sym"):
        zero_bits = 0
    return _grouped(bits, found.get("group_size") or found.get("q_group_size") or 128, zero_bits)


def _grouped(bits: int, group_size: object, zero_bits: int | None) -> str:
    if type(group_size) is not int or group_size <= 0:
        return f"int{bits}"
    return f"int{bits}-g{group_size}" if zero_bits is None else f"int{bits}-g{group_size}-z{zero_bits}"


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
    if type(bits) is not int:
        return "compressed-tensors"
    return _grouped(bits, weights.get("group_size"), 0 if weights.get("symmetric") is True else bits)
