"""The tensors of a quantized folder by the names that transformers has: matrices with their layouts, and all else."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagefold.quantized.layout import MatrixLayout, StoredTensors
    from pagefold.quantized.quantization import Quantization

__all__ = ["count_elements", "tensors_of"]

_CODES = "weight", "weight_packed", "qweight", "scales"
"""How the names of tensors end by which a module is seen to be quantized, or to be refused."""
_BESIDE = (
    "activation_scale", "input_global_scale", "input_scale", "input_scale_ub", "input_zero_point", "k_scale",
    "output_scale", "output_zero_point", "q_scale", "v_scale", "weight_zero_point", "weight_g_idx", "g_idx",
)  # fmt: skip
"""How those end that say how activations, K and V were meant to be rounded; or nothing, of a module without order."""


def tensors_of(quantization: Quantization, stored: StoredTensors) -> dict[str, MatrixLayout | None]:
    """Return all tensors that a folder stands for, with the layouts of those that are quantized matrices.

    Raises:
        UnsupportedModelError: one is not whole.
    """
    layouts: dict[str, MatrixLayout] = {}
    parts: set[str] = set()
    modules = {name.rpartition(".")[0] for name in stored if name.rpartition(".")[2] in _CODES}
    for module in sorted(modules):
        layout = quantization.layout(module, stored)
        if layout is not None:
            layouts[f"{module}.weight"] = layout
            parts.update(layout.names)
    plain = {name: None for name in stored if name not in parts and name.rpartition(".")[2] not in _BESIDE}
    return plain | layouts


def count_elements(quantization: Quantization, stored: StoredTensors) -> int:
    """Return the elements of all tensors that a folder stands for.

    Raises:
        UnsupportedModelError: a quantized matrix is not whole.
    """
    found = tensors_of(quantization, stored)
    return sum(math.prod(stored[name].shape if one is None else one.shape) for name, one in found.items())
