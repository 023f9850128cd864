"""The scorer: from what enters a layer's attention to one score for each KV head, by a linear map.

That is KVzap's (arXiv 2601.07891, section 3): the score predicts the logarithm of how much attention the token's key
will ever get. It depends on the token's hidden state, which depends on the prefix alone.
"""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from pagefold.masks.rule import NUM_SINKS
from pagefold.runner.keeping import Keeping

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Scorer"]


class Scorer(NamedTuple):
    """A model's scorer. All tensors are float32, in the host's memory.

    Attributes:
        weights: ``[L, Hkv, hidden]``.
        biases: ``[L, Hkv]``; infinite in layers with windows, of which nobody chooses: every score passes there.
        quantiles: ``[Q]``, rising: of the scores of tokens of the calibration, all other layers and KV heads together,
            the least, the greatest, and what lies between at equal shares.
    """

    weights: torch.Tensor
    biases: torch.Tensor
    quantiles: torch.Tensor

    @classmethod
    def of_layers(cls, layers: Sequence[int], num_layers: int, weights: torch.Tensor, biases: torch.Tensor) -> Scorer:
        """Return the scorer of a model of which some layers attend to all tokens; it has no quantiles yet.

        Args:
            layers: those, ascending.
            num_layers: of the model.
            weights: of those layers, ``[len(layers), Hkv, hidden]``.
            biases: of those layers, ``[len(layers), Hkv]``.
        """
        of_all = torch.zeros(num_layers, *weights.shape[1:]), torch.full((num_layers, biases.shape[1]), math.inf)
        for every, own in zip(of_all, (weights, biases), strict=True):
            every[list(layers)] = own
        return cls(*of_all, torch.empty(0))

    @property
    def digest(self) -> str:
        """What a kind of blocks says of its scorer: digits of a SHA-256 over all numbers."""
        return hashlib.sha256(b"".join(one.contiguous().numpy().tobytes() for one in self)).hexdigest()[:32]

    def scores(self, layer: int, hidden: torch.Tensor) -> torch.Tensor:
        """Return the scores of tokens in a layer, float32 ``[Hkv, T]``.

        Args:
            layer: which.
            hidden: what enters its attention, behind the norm: ``[T, hidden]``, any float dtype.
        """
        return torch.nn.functional.linear(hidden.float(), self.weights[layer], self.biases[layer]).T

    def thresholds(self, keep: float) -> torch.Tensor:
        """Return the least scores that are kept, float32 ``[L, Hkv]``, for a share of all that are older.

        They are one quantile: a head whose keys get more attention keeps more of them (KVzap; Ada-KV, Feng et al.,
        2024, shows that budgets by head should differ).

        Args:
            keep: the share that is kept, in [0, 1], over the calibration's tokens; of other texts it is near that.
        """
        assert 0 <= keep <= 1, f"a share of {keep}"
        if keep in {0, 1}:
            return torch.full_like(self.biases, -math.inf if keep else math.inf)
        place = (1 - keep) * (len(self.quantiles) - 1)
        low, high = self.quantiles[math.floor(place)], self.quantiles[math.ceil(place)]
        return torch.full_like(self.biases, float(low + (high - low) * (place - math.floor(place))))

    def keeping(self, *keeps: float) -> Keeping:
        """Return by what a runner keeps shares of all that are older, a mask for each; see :meth:`thresholds`."""
        thresholds = torch.stack([self.thresholds(keep) - self.biases for keep in keeps])
        return Keeping(self.weights, thresholds, NUM_SINKS)
