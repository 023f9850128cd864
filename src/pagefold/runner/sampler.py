"""Sampler: the next token of each row, from its logits.

A draw is a function of (seed, how many tokens the request has sampled): no generator carries state from step to step,
so batching, preemption and recomputation cannot change what a seeded request draws.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pagefold.request import SamplingParams

__all__ = ["sample", "uniform"]


def uniform(seed: int, draw: int) -> float:
    """Return the draw's number in [0, 1): 53 bits of BLAKE2b of (seed, draw)."""
    digest = hashlib.blake2b(f"{seed}:{draw}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def sample(logits: torch.Tensor, params: list[SamplingParams], seeds: list[int], draws: list[int]) -> list[int]:
    """Choose a token for each row.

    Args:
        logits: ``[R, vocab]``, any float dtype.
        params: of each row.
        seeds: of each row: see :func:`uniform`.
        draws: of each row.
    """
    token_ids = logits.argmax(-1)
    random = [row for row, how in enumerate(params) if not how.is_greedy]
    if random:
        chosen = _draw(
            logits[random].double(),
            [params[row] for row in random],
            torch.tensor([uniform(seeds[row], draws[row]) for row in random], dtype=torch.float64),
        )
        token_ids[random] = chosen
    return [int(token_id) for token_id in token_ids.tolist()]


def _draw(logits: torch.Tensor, params: list[SamplingParams], numbers: torch.Tensor) -> torch.Tensor:
    """Invert the cumulative distribution at ``numbers``: tokens in order of probability, ties by token id."""
    temperatures = torch.tensor([how.temperature for how in params], dtype=torch.float64)
    ordered, order = torch.sort(logits / temperatures[:, None], dim=-1, descending=True, stable=True)
    vocab_size = logits.shape[-1]
    top_k = torch.tensor([how.top_k if how.top_k > 0 else vocab_size for how in params])
    ordered = ordered.masked_fill(torch.arange(vocab_size)[None] >= top_k[:, None], float("-inf"))
    probabilities = ordered.softmax(-1)
    top_p = torch.tensor([how.top_p for how in params], dtype=torch.float64)
    mass_before = probabilities.cumsum(-1) - probabilities
    probabilities = probabilities.masked_fill(mass_before >= top_p[:, None], 0.0)  # the first always stays
    cumulative = probabilities.cumsum(-1)
    index = torch.searchsorted(cumulative, numbers[:, None] * cumulative[:, -1:], right=True)
    last_kept = (probabilities > 0).sum(-1, keepdim=True) - 1  # rounding must not reach a token that was cut off
    return order.gather(-1, torch.minimum(index, last_kept))[:, 0]
