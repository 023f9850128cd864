"""int8 with a scale a vector, symmetric: an element is off by at most half a scale, 1/254 of the vector's largest."""

from __future__ import annotations

import torch

from pagefold.runner.codecs.vectors import scales_of

__all__ = ["Int8"]

_MAX = 127


class Int8:
    """A :class:`~pagefold.runner.codecs.vectors.VectorFormat`; vLLM's ``int8_per_token_head``.

    A code is ``round_half_even(x / scale)`` with ``scale = max |x| / 127`` rounded up to bfloat16, which is at most
    1/128 more. So ``|decoded - x| <= scale / 2``.
    """

    number = 3
    bits = 8
    num_scales = 1

    def encode(self, vectors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See :class:`~pagefold.runner.codecs.vectors.VectorFormat`."""
        scales = scales_of(vectors.abs().amax(-1, keepdim=True), _MAX)
        codes = (vectors / scales.float()).round().nan_to_num().clamp(-_MAX, _MAX).to(torch.int8)
        return codes.view(torch.uint8), scales

    def decode(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """See :class:`~pagefold.runner.codecs.vectors.VectorFormat`."""
        return codes.view(torch.int8).float() * scales.float()

    def num_code_bytes(self, head_dim: int) -> int:
        """See :class:`~pagefold.runner.codecs.vectors.VectorFormat`."""
        return head_dim * self.bits // 8

    def cannot_pack(self, head_dim: int) -> str:  # noqa: ARG002 - any
        """See :class:`~pagefold.runner.codecs.vectors.VectorFormat`."""
        return ""
