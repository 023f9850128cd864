"""fp8: floating point of 8 bits, as it is (vLLM's default, a scale of 1), or with a scale a vector. It saturates."""

from __future__ import annotations

import torch

from pagefold.runner.codecs.floats import Float
from pagefold.runner.codecs.vectors import scales_of

__all__ = ["ScaledFloat8"]

_MAX = 448


class ScaledFloat8:
    """A :class:`~pagefold.runner.codecs.vectors.VectorFormat`: e4m3 by a scale of ``max |x| / 448``, rounded up.

    An element is off by at most 1/16 of itself, or by 2^-10 of its scale.
    """

    number = 7
    bits = 8
    num_scales = 1

    def __init__(self) -> None:
        self._float = Float(5, torch.float8_e4m3fn)

    def encode(self, vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~pagefold.runner.codecs.vectors.VectorFormat`."""
        scales = scales_of(vectors.abs().amax(-1, keepdim=True), _MAX)
        return self._float.encode(vectors / scales.float())[0], scales

    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """See :class:`~pagefold.runner.codecs.vectors.VectorFormat`."""
        return self._float.decode(codes, scales) * scales.float()

    def num_code_bytes(self, head_dim: int) -> int:
        """See :class:`~pagefold.runner.codecs.vectors.VectorFormat`."""
        return head_dim * self.bits // 8

    def cannot_pack(self, head_dim: int) -> str:  # noqa: ARG002 - any
        """See :class:`~pagefold.runner.codecs.vectors.VectorFormat`."""
        return ""
