"""Logprobs: how likely the model found tokens, from its raw logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pagefold.runner.to_device import put
from pagefold.sampling import MAX_LOGPROBS
from pagefold.steps import TokenLogprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["token_logprobs"]

_LEAST_LOGPROB = -9999.0
"""What is less likely is told as that: JSON has no infinity, and OpenAI's clients know the number."""

_ROWS_AT_ONCE = 64
"""Rows normalized together: a long prompt's logits are large enough once."""


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_tops: Sequence[int]) -> list[TokenLogprobs]:
    """Return each row's logprobs.

    Args:
        logits: ``[N, vocab]``, any float dtype; normalized in at least float32.
        token_ids: the token of each row.
        num_tops: how many of the most likely tokens each row tells.
    """
    found: list[TokenLogprobs] = []
    for first in range(0, len(token_ids), _ROWS_AT_ONCE):
        rows = slice(first, first + _ROWS_AT_ONCE)
        found += _of_rows(logits[rows], token_ids[rows], num_tops[rows])
    return found


def _of_rows(logits: torch.Tensor, token_ids: Sequence[int], num_tops: Sequence[int]) -> list[TokenLogprobs]:
    logprobs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    chosen = logprobs.gather(-1, put(torch.tensor(list(token_ids)), logits.device)[:, None])
    ranks = (logprobs > chosen).sum(-1) + 1
    # Always as many: which of equal tokens come first must not depend on who else is in the batch.
    best, best_ids = logprobs.topk(min(MAX_LOGPROBS, logprobs.shape[-1]), dim=-1)
    chosen, best = chosen.clamp(_LEAST_LOGPROB), best.clamp(_LEAST_LOGPROB)
    columns = (chosen[:, 0].tolist(), ranks.tolist(), best_ids.tolist(), best.tolist(), num_tops)
    return [
        TokenLogprobs(logprob, rank, tuple(zip(ids[:num_top], values[:num_top], strict=True)))
        for logprob, rank, ids, values, num_top in zip(*columns, strict=True)
    ]
