"""Sampler: the next token of each row, from its logits, by a race that rounding does not decide.

Every token that may come gets an exponential random number, divided by its probability; the least wins, which happens
to each token with just its probability. In logarithms: the largest ``logit / temperature - log(noise)``, the Gumbel-max
trick (Yellott, "The relationship between Luce's choice axiom, Thurstone's theory of comparative judgment, and the
double exponential distribution", 1977; Maddison, Tarlow and Minka, "A* sampling", 2014). torch.multinomial and vLLM's
sampler race too.

The noise is a function of (seed, how many tokens the request has sampled, token id): no generator carries state from
step to step, so batching, preemption and recomputation cannot change what a seeded request draws. And since the noise
of a token does not depend on the other tokens' probabilities, logits that are rounded differently, as they are in
another batch, draw the same unless the two best finish within that rounding of each other. (Where one number is looked
up in the cumulative distribution, the rounding of 49,152 tokens adds up before the token that it falls on.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from pagefold.runner.sampler.draws import make_draws
from pagefold.runner.sampler.reference import draw_tokens, race_tokens
from pagefold.runner.to_device import put

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pagefold.runner.sampler.draws import Draws
    from pagefold.sampling import SamplingParams

__all__ = ["sample", "sample_on_card"]


def sample(logits: torch.Tensor, params: list[SamplingParams], seeds: list[int], draws: list[int]) -> list[int]:
    """Choose a token for each row.

    A row that has no distribution, because a logit is NaN or plus infinity or all are minus infinity, gets what is
    taken of greedy rows: the first NaN, else the first of the largest.

    Args:
        logits: ``[R, vocab]``, any float dtype. They are drawn from as float32.
        params: of each row.
        seeds: of each row.
        draws: of each row: how many tokens its request has sampled before.
    """
    if logits.device.type != "cpu":
        return cast("list[int]", sample_on_card(logits, params, seeds, draws).tolist())
    token_ids = [-1] * len(params)
    random = [row for row, how in enumerate(params) if not how.is_greedy]
    if random:
        chosen = _draw(logits, make_draws(random, params, seeds, draws))
        for row, token_id in zip(random, chosen.tolist(), strict=True):
            token_ids[row] = token_id
    greedy = [row for row, token_id in enumerate(token_ids) if token_id < 0]
    if greedy:
        # Most steps are all greedy: no copy of the logits then.
        likeliest = _likeliest(logits if len(greedy) == len(params) else logits[greedy])
        for row, token_id in zip(greedy, likeliest, strict=True):
            token_ids[row] = token_id
    return token_ids


def sample_on_card(
    logits: torch.Tensor, params: list[SamplingParams], seeds: list[int], draws: list[int]
) -> torch.Tensor:
    """Choose a token for each row where the logits are; the host waits for nothing. See :func:`sample`.

    Returns:
        int64 ``[R]``, on the device of ``logits``.
    """
    token_ids = logits.argmax(-1)
    random = [row for row, how in enumerate(params) if not how.is_greedy]
    if random:
        asked = make_draws(random, params, seeds, draws)
        chosen = race_tokens(logits, asked)
        rows = put(asked.rows, logits.device)
        token_ids[rows] = chosen.where(chosen >= 0, token_ids[rows])
    return token_ids


def _likeliest(logits: torch.Tensor) -> list[int]:
    """Return the first of each row's largest: by NumPy on a CPU, which has no team of threads to wait for."""
    if logits.device.type == "cpu" and logits.dtype in {torch.float32, torch.float64}:
        return cast("list[int]", logits.numpy().argmax(-1).tolist())
    return cast("list[int]", logits.argmax(-1).tolist())


def _draw(logits: torch.Tensor, draws: Draws) -> NDArray[np.int64]:
    """Return a token id for each draw, -1 where the row has no distribution."""
    if logits.device.type == "cpu":
        from pagefold.runner.sampler.cpu import race  # noqa: PLC0415 - numba takes a second to import

        logits = logits.to(torch.float32)
        return race((logits if logits.stride(-1) == 1 else logits.contiguous()).numpy(), draws)
    return draw_tokens(logits, draws)
