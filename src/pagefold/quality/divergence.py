"""Divergence: how far next-token distributions are from those of the exact cache, row by row.

The divergence is Kullback and Leibler's (1951), KL(exact || other), in nats: what a coder of the exact distribution
pays for believing the other. It needs all of the vocabulary, which is why it is computed here from logits and not from
the few logprobs that a server tells.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.quality.statistics import Floats

__all__ = ["RowFigures", "compare_rows"]

_ROWS_AT_ONCE = 64
"""Rows normalized together: 13 MB of float32 with a vocabulary of 49,152."""


class RowFigures(NamedTuple):
    """What one setting made of N positions. All are float64 ``[N]``.

    Attributes:
        surprise: the negative logarithm of the probability of the token that came, in nats.
        kl: the divergence of the exact distribution from this one, in nats; at least 0, but for rounding.
        same_top: 1 where the likeliest token is that of the exact cache, else 0.
    """

    surprise: Floats
    kl: Floats
    same_top: Floats


@torch.inference_mode()
def compare_rows(logits: Sequence[torch.Tensor], next_ids: Sequence[int]) -> list[RowFigures]:
    """Compare every setting with the first, the exact one.

    Args:
        logits: of each setting, ``[N, vocab]``, any float dtype; not changed. Normalized in at least float32.
        next_ids: the token that came at each of the N positions.

    Returns:
        One for each of ``logits``, the exact one too.
    """
    parts = [
        _compare([rows[at : at + _ROWS_AT_ONCE] for rows in logits], next_ids[at : at + _ROWS_AT_ONCE])
        for at in range(0, len(next_ids), _ROWS_AT_ONCE)
    ]
    return [
        RowFigures(*(np.concatenate(columns) for columns in zip(*of_setting, strict=True)))
        for of_setting in zip(*parts, strict=True)
    ]


def _compare(logits: Sequence[torch.Tensor], next_ids: Sequence[int]) -> list[RowFigures]:
    came = torch.tensor(list(next_ids))[:, None]
    exact = _logprobs(logits[0])
    probabilities, top = exact.exp(), exact.argmax(-1)
    figures = []
    for rows in logits:
        logprobs = exact if rows is logits[0] else _logprobs(rows)
        # What the exact cache never says, minus infinity, has no share in the sum, whatever the other makes of it.
        lost = (exact - logprobs).mul_(probabilities).masked_fill_(probabilities == 0, 0.0)
        figures.append(
            RowFigures(
                -logprobs.gather(-1, came)[:, 0].double().numpy(),
                lost.sum(-1, dtype=torch.float64).numpy(),
                (logprobs.argmax(-1) == top).double().numpy(),
            )
        )
    return figures


def _logprobs(logits: torch.Tensor) -> torch.Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
