"""The mask: bits that say which keys were kept, from scores and thresholds, and what queries see by them.

A bit depends on a token's own hidden state, and through that on its prefix as the prefix was computed, under this very
mask. So it is found while a layer is computed, never before.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from pagefold.masks.rule import NUM_SINKS, older

if TYPE_CHECKING:
    from pagefold.masks.scorer import Scorer
    from pagefold.masks.watched_model import Entering, SeenRows

__all__ = ["KeptRows", "ScoredMask", "keep_bits", "threshold_for"]


def threshold_for(scores: torch.Tensor, keep: float) -> float:
    """Return the least of ``scores`` that is kept where a share of them is; ties with it are kept too.

    Args:
        scores: at least one, of any shape: of all layers, KV heads and tokens that share one threshold.
        keep: the share, in [0, 1].
    """
    num = round(keep * scores.numel())
    return math.inf if num == 0 else float(scores.flatten().topk(num).values[-1])


def keep_bits(scores: torch.Tensor, thresholds: torch.Tensor) -> torch.Tensor:
    """Return which keys are kept, bool ``[..., Hkv, T]``: those whose score is at least the threshold. No NaN is.

    Args:
        scores: ``[..., Hkv, T]``.
        thresholds: ``[..., Hkv]``, of the same dtype.
    """
    return scores >= thresholds[..., None]


class KeptRows:
    """What queries of one layer see, of which some keys were kept; see :func:`~pagefold.masks.rule.sees`.

    Args:
        kept: bool ``[Hkv, N]``.
    """

    def __init__(self, kept: torch.Tensor) -> None:
        self._kept = kept

    def __call__(self, first: int, last: int) -> torch.Tensor:
        """Return what queries of positions ``[first, last)`` see of keys ``[0, last)``: bool ``[Hkv, n, last]``.

        It leaves causality to who asks.
        """
        ends = torch.tensor([older(position).stop for position in range(first, last)])
        keys = torch.arange(last)
        is_whole = (keys < NUM_SINKS) | (keys >= ends[:, None])
        return is_whole | self._kept[:, None, :last]


class ScoredMask:
    """The mask of a model, found while it is read: see :class:`~pagefold.masks.watched_model.Mask`.

    Args:
        scorer: the model's.
        thresholds: ``[L, Hkv]``, the least scores that are kept.
        num_dense: so many first tokens see all that is before them: a prompt that is pruned when it has been computed.

    Attributes:
        kept: which keys were kept, bool ``[Hkv, N]`` by layer, of the text that was read last.
    """

    def __init__(self, scorer: Scorer, thresholds: torch.Tensor, *, num_dense: int = 0) -> None:
        self._scorer = scorer
        self._thresholds = thresholds
        self._num_dense = num_dense
        self.kept: dict[int, torch.Tensor] = {}

    def of_layer(self, entering: Entering) -> SeenRows:
        """Return what queries of a layer see."""
        scores = self._scorer.scores(entering.layer, entering.hidden)
        self.kept[entering.layer] = keep_bits(scores, self._thresholds[entering.layer])
        rows = KeptRows(self.kept[entering.layer])

        def seen(first: int, last: int) -> torch.Tensor:
            found = rows(first, last)
            found[:, : max(0, self._num_dense - first)] = True
            return found

        return seen
