"""Sinks: one more score of each head, which takes its share of the weights and has no value."""

from __future__ import annotations

import torch

__all__ = ["softmax_with_sinks"]


def softmax_with_sinks(scores: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Return the weights of ``scores``, ``[..., G, q, n]``, beside one more score of each head, ``[..., G]``."""
    column = sinks[..., None, None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1]
