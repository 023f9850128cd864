"""Floating point of 16 or 32 bit: no scales. Rounded to the nearest, and float16 saturates instead of overflowing."""

from __future__ import annotations

import torch

__all__ = ["Float"]


class Float:
    """A :class:`~pagefold.runner.codecs.vectors.VectorFormat`: elements as numbers of a dtype.

    Args:
        number: what the kernels know it by.
        dtype: of the elements.
    """

    num_scales = 0

    def __init__(self, number: int, dtype: torch.dtype) -> None:
        self.number = number
        self.bits = 8 * dtype.itemsize
        self._dtype = dtype

    def encode(self, vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~pagefold.runner.codecs.vectors.VectorFormat`."""
        largest = torch.finfo(self._dtype).max
        stored = vectors.clamp(-largest, largest).to(self._dtype).contiguous()
        return stored.view(torch.uint8), vectors.new_empty((*vectors.shape[:-1], 0), dtype=torch.bfloat16)

    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:  # noqa: ARG002 - there are none
        """See :class:`~pagefold.runner.codecs.vectors.VectorFormat`."""
        return codes.contiguous().view(self._dtype).float()

    def num_code_bytes(self, head_dim: int) -> int:
        """See :class:`~pagefold.runner.codecs.vectors.VectorFormat`."""
        return head_dim * self.bits // 8

    def cannot_pack(self, head_dim: int) -> str:  # noqa: ARG002 - any
        """See :class:`~pagefold.runner.codecs.vectors.VectorFormat`."""
        return ""
