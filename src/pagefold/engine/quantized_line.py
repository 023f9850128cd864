"""What a start says of a folder whose matrices are quantized: how they are stored, and how they are computed."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagefold.engine.blueprint import Blueprint

__all__ = ["lines_of_quantized"]


def lines_of_quantized(blueprint: Blueprint) -> list[str]:
    """Return the line of a start; none where matrices are not quantized."""
    quantization = blueprint.spec.quantization
    if quantization is None:
        return []
    is_as_stored = blueprint.is_fused and blueprint.config.quantization is None and blueprint.spec.stored_kinds
    computed = "computed with as they are stored" if is_as_stored else "dequantized when they are read"
    if quantization.activations:
        how = "rounded to int8 with a scale for 32 numbers" if is_as_stored else "not rounded"
        computed += f"; activations are {how} (the config: {quantization.activations})"
    return [f"quantized  {quantization.name}: {computed}"]
