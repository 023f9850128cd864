"""Keeping: by which scores a model's entries are kept when their chunks are packed (see ``attention/packed.py``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

__all__ = ["Keeping"]


class Keeping(NamedTuple):
    """A linear map from what enters a layer's attention to one score for each KV head, and the least that masks keep.

    Attributes:
        weights: float32 ``[L, Hkv, E]``, E of the hidden size.
        thresholds: float32 ``[M, L, Hkv]``: of each of M masks; an entry is kept whose score is not below. Infinite for
            all, or for none.
        num_sinks: so many first entries are kept whatever their scores (StreamingLLM; Xiao et al., 2023).
    """

    weights: torch.Tensor
    thresholds: torch.Tensor
    num_sinks: int
