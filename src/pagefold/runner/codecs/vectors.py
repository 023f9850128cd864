"""VectorFormat: how the K or the V of one head and token is stored. One file for each of them; this is what they share.

Encoding looks at one vector alone, and every operation of it is exact or rounds as IEEE 754 says, in one order: so the
bytes of a block follow from the K and V that were written into it, in whatever steps that happened, and whoever encoded
them. Scales and zero points are bfloat16: it has float32's range, so no vector is too small or too large for its scale,
and scales are rounded up, so that the largest element still fits.
"""

from __future__ import annotations

from typing import Protocol

import torch

__all__ = ["VectorFormat", "down_to_bfloat16", "scales_of", "up_to_bfloat16"]

_TINY = 2.0**-126
"""The least scale: that of a vector of zeros."""


class VectorFormat(Protocol):
    """One way to store vectors.

    Attributes:
        number: what the kernels know it by.
        bits: of an element's code: the fewest where they differ.
        num_scales: 16-bit numbers beside the codes: 0, 1 (a scale), or 2 (a scale, then a zero point).
    """

    number: int
    bits: int
    num_scales: int

    def encode(self, vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the codes, uint8 ``[..., D * bits / 8]``, and the scales, bfloat16 ``[..., num_scales]``.

        Args:
            vectors: float32 ``[..., D]``.
        """
        ...

    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Return the vectors, float32 ``[..., D]``, that these stand for."""
        ...

    def num_code_bytes(self, head_dim: int) -> int:
        """Return the bytes of the codes of a vector of ``head_dim``."""
        ...

    def cannot_pack(self, head_dim: int) -> str:
        """Return what a head must be, where vectors of ``head_dim`` cannot be stored; else nothing."""
        ...


def up_to_bfloat16(numbers: torch.Tensor) -> torch.Tensor:
    """Round float32 numbers of at least 0 to bfloat16, up. NaN stays NaN, of the same bits wherever it comes from."""
    bits = (numbers.contiguous().view(torch.int32) + 0xFFFF) & -0x10000
    nan = torch.tensor(torch.nan, dtype=torch.bfloat16)
    return torch.where(numbers.isnan(), nan, bits.view(torch.float32).to(torch.bfloat16))


def down_to_bfloat16(numbers: torch.Tensor) -> torch.Tensor:
    """Round float32 numbers of any sign to bfloat16, towards minus infinity. NaN stays NaN, and 0 has no sign.

    Of 0 and -0 either is the least number of a vector, by the order in which one looks.
    """
    cut = (numbers.contiguous().view(torch.int32) & -0x10000).view(torch.float32) + 0.0
    return torch.where(numbers < 0, -up_to_bfloat16(numbers.abs()), cut.to(torch.bfloat16))


def scales_of(largest: torch.Tensor, num_steps: float) -> torch.Tensor:
    """Return bfloat16 scales by which ``largest`` (at least 0) is at most ``num_steps``."""
    scales = up_to_bfloat16(largest / num_steps)
    return torch.where(scales < _TINY, torch.tensor(_TINY, dtype=torch.bfloat16), scales)
