"""int2 with a scale and a zero point a vector or channel: an element is off by at most half a scale, 1/6 of the range.

KIVI (Liu et al., 2024), section 3: what is far from 0 in K lies in some channels, for all tokens; in V it does not. So
K's elements share a scale with those of their channel, over the tokens of a block, and V's with those of their token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from pagefold.runner.codecs.vectors import down_to_bfloat16, scales_of

__all__ = ["Int2", "Quantized", "pack", "quantize", "unpack"]

_MAX = 3
_PARTS = 4
"""Codes of a byte."""


class Quantized(NamedTuple):
    """Elements as codes: ``code * scale + zero``.

    Attributes:
        codes: uint8, 0 to 3, one an element.
        scales, zeros: bfloat16, 1 long where they are shared.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor


def quantize(numbers: torch.Tensor, dim: int) -> Quantized:
    """Quantize float32 numbers; those along ``dim`` share a scale and a zero point.

    The zero point is the least of them, rounded down to bfloat16; a code is ``round_half_even((x - zero) / scale)``
    with ``scale = (max x - zero) / 3`` rounded up to bfloat16. So ``|decoded - x| <= scale / 2``. Where that has no
    finite scale, all of them are lost, and their scale is NaN.
    """
    zeros = down_to_bfloat16(numbers.amin(dim, keepdim=True))
    scales = scales_of(numbers.amax(dim, keepdim=True) - zeros.float(), _MAX)
    codes = ((numbers - zeros.float()) / scales.float()).round().nan_to_num().clamp(0, _MAX).to(torch.uint8)
    is_lost = ~scales.float().isfinite()
    return Quantized(
        torch.where(is_lost, 0, codes),
        torch.where(is_lost, torch.tensor(torch.nan, dtype=torch.bfloat16), scales),
        torch.where(is_lost, torch.tensor(0.0, dtype=torch.bfloat16), zeros),
    )


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Return codes ``[..., D]`` as bytes ``[..., D / 4]``.

    Byte ``i`` has those of elements ``i``, ``i + D / 4``, ``i + D / 2`` and ``i + 3 * D / 4``, from its lowest bits up.
    """
    a, b, c, d = codes.chunk(_PARTS, -1)
    return a | b << 2 | c << 4 | d << 6


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Return the codes of bytes ``[..., D / 4]``, ``[..., D]``."""
    return torch.cat([packed >> shift & _MAX for shift in (0, 2, 4, 6)], -1)


class Int2:
    """A :class:`~pagefold.runner.codecs.vectors.VectorFormat`, asymmetric: what V is stored as, token by token."""

    number = 10
    bits = 2
    num_scales = 2

    def encode(self, vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~pagefold.runner.codecs.vectors.VectorFormat`."""
        found = quantize(vectors, -1)
        return pack(found.codes), torch.cat((found.scales, found.zeros), -1)

    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """See :class:`~pagefold.runner.codecs.vectors.VectorFormat`."""
        scale, zero = scales.float().chunk(2, -1)
        return unpack(codes).float() * scale + zero

    def num_code_bytes(self, head_dim: int) -> int:
        """See :class:`~pagefold.runner.codecs.vectors.VectorFormat`."""
        return head_dim // _PARTS

    def cannot_pack(self, head_dim: int) -> str:
        """See :class:`~pagefold.runner.codecs.vectors.VectorFormat`."""
        return "" if head_dim % 16 == 0 else "heads of a multiple of 16 numbers"
