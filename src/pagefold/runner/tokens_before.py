"""TokensBefore: how many tokens came before each one, for models that ask a cache of transformers for that."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["COUNTING_FAMILIES", "TokensBefore"]

COUNTING_FAMILIES: Sequence[str] = ("llama4_text",)
"""Families whose layers count a token's position from what their cache holds and its place in the batch: those of Llama
4 that tune the temperature. In a batch of several sequences that is another number for each token."""


class TokensBefore:
    """Stands where transformers' models expect a cache, and has nothing: K and V are in blocks.

    A model adds the places of a batch, 0 to T - 1, to what it is told of tokens before; so positions come out.

    Args:
        positions: int64 ``[1, T]``: of the step's tokens.
    """

    def __init__(self, positions: torch.Tensor) -> None:
        self._before = positions[0] - torch.arange(positions.shape[1], device=positions.device)

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor:  # noqa: ARG002 - transformers calls it so
        """Return how many tokens are before the batch, for each of its tokens, int64 ``[T]``."""
        return self._before

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,  # noqa: ARG002 - transformers calls it so
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the step's K and V as they are."""
        return key_states, value_states
