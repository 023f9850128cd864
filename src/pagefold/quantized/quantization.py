"""Quantization: how the quantized matrices of a folder are stored; a file a format says it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from pagefold.quantized.layout import MatrixLayout, StoredTensors

__all__ = ["Quantization"]


class Quantization(Protocol):
    """One folder's format. Which of its modules are quantized is seen by what is stored of them."""

    @property
    def name(self) -> str:
        """The format as a start says it, with bits and groups."""
        ...

    @property
    def activations(self) -> str:
        """How what is multiplied with the matrices was meant to be rounded, which is not done; empty for not at all."""
        ...

    def layout(self, module: str, stored: StoredTensors) -> MatrixLayout | None:
        """Return how the matrix of a module is stored; None where it is stored as it is, or there is none.

        Raises:
            UnsupportedModelError: tensors of it lack, or do not go together.
        """
        ...
