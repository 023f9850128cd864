"""The kinds of tensors that are known here: how many numbers a block of each has, in how many bytes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["OTHER_KINDS", "TENSOR_KINDS", "TensorKind"]


@dataclass(frozen=True, slots=True)
class TensorKind:
    """How the numbers of a tensor are stored.

    Attributes:
        type_id: GGML's number of it.
        name: GGML's name.
        block_size: numbers in a block.
        block_bytes: bytes in a block.
    """

    type_id: int
    name: str
    block_size: int
    block_bytes: int

    @property
    def is_quantized(self) -> bool:
        """Whether numbers have a scale beside them, which they share with others of their block."""
        return self.block_size > 1


_KINDS = (
    TensorKind(0, "F32", 1, 4),
    TensorKind(1, "F16", 1, 2),
    TensorKind(2, "Q4_0", 32, 18),
    TensorKind(3, "Q4_1", 32, 20),
    TensorKind(6, "Q5_0", 32, 22),
    TensorKind(7, "Q5_1", 32, 24),
    TensorKind(8, "Q8_0", 32, 34),
    TensorKind(12, "Q4_K", 256, 144),
    TensorKind(13, "Q5_K", 256, 176),
    TensorKind(14, "Q6_K", 256, 210),
    TensorKind(30, "BF16", 1, 2),
)
TENSOR_KINDS = {kind.type_id: kind for kind in _KINDS}

OTHER_KINDS = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip
"""Known by name only, so that the error can say it."""
