"""Sampler: the next token of each row, from its logits.

A draw is a function of (seed, how many tokens the request has sampled): no generator carries state from step to step,
so batching, preemption and recomputation cannot change what a seeded request draws.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, cast

import torch

if TYPE_CHECKING:
    from pagefold.request import SamplingParams

__all__ = ["sample", "uniform"]

_NUM_CANDIDATES = 1024
"""Tokens that top_p looks at before it sorts the whole vocabulary: nearly always enough."""


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
    token_ids = _likeliest(logits)
    random = [row for row, how in enumerate(params) if not how.is_greedy]
    if random:
        chosen = _draw(
            logits[random].to(torch.float32),
            [params[row] for row in random],
            torch.tensor([uniform(seeds[row], draws[row]) for row in random], dtype=torch.float64),
        )
        for row, token_id in zip(random, chosen.tolist(), strict=True):
            token_ids[row] = token_id
    return token_ids


def _likeliest(logits: torch.Tensor) -> list[int]:
    """Return the first of each row's largest: by NumPy on a CPU, which has no team of threads to wait for."""
    if logits.device.type == "cpu" and logits.dtype in {torch.float32, torch.float64}:
        return cast("list[int]", logits.numpy().argmax(-1).tolist())
    return cast("list[int]", logits.argmax(-1).tolist())


def _draw(logits: torch.Tensor, params: list[SamplingParams], numbers: torch.Tensor) -> torch.Tensor:
    """Invert each row's cumulative distribution at its number: ``[R, vocab]`` and ``[R]`` to ``[R]``.

    Rows without top_k and top_p need no order of tokens, so they are not sorted: sorting is most of the cost.
    """
    temperatures = torch.tensor([how.temperature for how in params])
    scaled = logits / temperatures[:, None]
    if any(how.min_p for how in params):
        scaled = _cut_unlikely(scaled, params)
    vocab_size = logits.shape[-1]
    is_cut = torch.tensor([how.top_p < 1.0 or 0 < how.top_k < vocab_size for how in params])
    chosen = torch.empty(len(params), dtype=torch.int64)
    if not is_cut.all():
        chosen[~is_cut] = _invert(scaled[~is_cut].softmax(-1), numbers[~is_cut])
    if is_cut.any():
        rows = is_cut.nonzero()[:, 0].tolist()
        chosen[is_cut] = _draw_cut(scaled[is_cut], [params[row] for row in rows], numbers[is_cut], _NUM_CANDIDATES)
    return chosen


def _cut_unlikely(scaled: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """Take out what is less than min_p times as likely as the likeliest: ``[R, vocab]`` to the same."""
    least = torch.tensor([how.min_p for how in params]).log()[:, None]  # of 0: -inf, which cuts nothing
    return scaled.masked_fill(scaled < scaled.amax(-1, keepdim=True) + least, float("-inf"))


def _draw_cut(
    scaled: torch.Tensor, params: list[SamplingParams], numbers: torch.Tensor, num_candidates: int
) -> torch.Tensor:
    """Draw where top_k, and then top_p, leave only likely tokens; looks at the ``num_candidates`` likeliest first."""
    vocab_size = scaled.shape[-1]
    top_k = torch.tensor([how.top_k if 0 < how.top_k < vocab_size else vocab_size for how in params])
    top_p = torch.tensor([how.top_p for how in params], dtype=torch.float64)
    num_candidates = min(num_candidates, vocab_size)
    ordered, order = scaled.topk(num_candidates, dim=-1)
    ordered = ordered.masked_fill(torch.arange(num_candidates)[None] >= top_k[:, None], float("-inf"))
    whole = torch.where(top_k < vocab_size, ordered.logsumexp(-1), scaled.logsumexp(-1))
    probabilities = (ordered - whole[:, None]).exp()
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    suffices = torch.where(top_k < vocab_size, top_k <= num_candidates, cumulative[:, -1] >= top_p)
    mass_before = cumulative - probabilities
    probabilities = probabilities.masked_fill(mass_before >= top_p[:, None], 0.0)  # the first always stays
    chosen = order.gather(-1, _invert(probabilities, numbers)[:, None])[:, 0]
    if num_candidates < vocab_size and not suffices.all():
        # Only the rows that need it: equal logits lie in another order when more of them are looked at, and what a row
        # draws must not depend on the batch.
        rest = ~suffices
        rows = rest.nonzero()[:, 0].tolist()
        chosen[rest] = _draw_cut(scaled[rest], [params[row] for row in rows], numbers[rest], vocab_size)
    return chosen


def _invert(probabilities: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return where the cumulative sum of ``[R, n]`` weights passes ``numbers`` times their total: ``[R]``."""
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:].contiguous()
    index = torch.searchsorted(cumulative, numbers[:, None] * total, right=True)
    # Rounding must not reach beyond the last token with weight: the first at which the total is complete.
    return torch.minimum(index, torch.searchsorted(cumulative, total))[:, 0]
