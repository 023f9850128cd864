"""Logits: what is done to them before a token is chosen: bias, penalties, masks, tokens that must not come yet.

The order is vLLM's: bias; repetition, then frequency and presence penalties; temperature and the cuts are the
sampler's. What must not come gets minus infinity at last. All of it is a function of a plan's columns, so nothing here
remembers anything from step to step. But for masks, only the logits of tokens that are named or seen are touched: the
work follows the length of histories, not the vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from pagefold.runner.to_device import put

if TYPE_CHECKING:
    from array import array
    from collections.abc import Collection, Iterable

    from pagefold.sampling import SamplingParams
    from pagefold.steps import StepPlan

__all__ = ["adjust"]

_LARGEST_REPETITION = 1e20
"""Beyond it, and below its inverse, a penalty only overflows. Logits stay numbers, also divided by a temperature."""


def adjust(logits: torch.Tensor, plan: StepPlan) -> torch.Tensor:
    """Return the logits to sample from.

    Args:
        logits: ``[R, vocab]`` of the plan's sampling rows, any float dtype; not changed.
        plan: its columns ``adjusted``, ``histories``, ``banned``, ``masked``, ``masks``, ``sampling`` and ``draws`` say
            what to do.

    Returns:
        ``logits`` itself where no row asks; else ``[R, vocab]``, at least float32.
    """
    if not (plan.adjusted or plan.masked):
        return logits
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    if plan.adjusted:
        _adjust(logits, plan)
    if plan.masked:
        _mask(logits, plan)
    return logits


def _adjust(logits: torch.Tensor, plan: StepPlan) -> None:
    params = [plan.sampling[place] for place in plan.adjusted]
    _add_bias(logits, plan.adjusted, params)
    _penalize_repetition(logits, plan, params)
    _penalize_output(logits, plan, params)
    logits[_pairs(zip(plan.adjusted, plan.banned, strict=True), logits.device)] = float("-inf")


def _mask(logits: torch.Tensor, plan: StepPlan) -> None:
    """Leave each masked row only the tokens of its mask; a mask may be longer than the vocabulary, or shorter."""
    width = -(-logits.shape[-1] // 8)
    rows_of_bits = b"".join(mask[:width].ljust(width, b"\0") for mask in plan.masks)
    packed = np.frombuffer(rows_of_bits, dtype=np.uint8).reshape(len(plan.masks), width)
    bits = np.unpackbits(packed, axis=1, bitorder="little", count=logits.shape[-1])
    allowed = put(bits, logits.device).view(torch.bool)
    if len(plan.masked) == len(logits):
        logits.masked_fill_(~allowed, float("-inf"))
    else:
        rows = put(np.array(plan.masked), logits.device)
        logits[rows] = logits[rows].masked_fill(~allowed, float("-inf"))


def _add_bias(logits: torch.Tensor, rows: list[int], params: list[SamplingParams]) -> None:
    biases = [how.logit_bias or {} for how in params]
    at = _pairs(zip(rows, biases, strict=True), logits.device)
    added = [value for bias in biases for value in bias.values()]
    if added:
        logits[at] += put(torch.tensor(added, dtype=logits.dtype), logits.device)


def _penalize_repetition(logits: torch.Tensor, plan: StepPlan, params: list[SamplingParams]) -> None:
    """Weaken every token seen. A token seen twice is written twice, with the same value."""
    asks = [
        (place, history, how.repetition_penalty)
        for place, history, how in zip(plan.adjusted, plan.histories, params, strict=True)
        if how.repetition_penalty != 1.0
    ]
    if not asks:
        return
    at = _pairs(((place, history) for place, history, _ in asks), logits.device)
    penalties = torch.tensor([penalty for *_, penalty in asks], dtype=torch.float64)
    penalties = penalties.clamp(1 / _LARGEST_REPETITION, _LARGEST_REPETITION).to(logits.dtype)
    penalty = penalties.repeat_interleave(torch.tensor([len(history) for _, history, _ in asks]))
    penalty = put(penalty, logits.device)
    values = logits[at]
    logits[at] = torch.where(values > 0, values / penalty, values * penalty)


def _penalize_output(logits: torch.Tensor, plan: StepPlan, params: list[SamplingParams]) -> None:
    """Take from every token of the output what its presence and its frequency cost."""
    num_tokens = logits.shape[-1]
    keys, frequency, presence = [], np.zeros(len(logits)), np.zeros(len(logits))
    for place, history, how in zip(plan.adjusted, plan.histories, params, strict=True):
        num_outputs = plan.draws[place]
        if num_outputs and (how.frequency_penalty or how.presence_penalty):
            keys.append(place * num_tokens + _ids(history[-num_outputs:]))
            frequency[place], presence[place] = how.frequency_penalty, how.presence_penalty
    if not keys:
        return
    seen, counts = np.unique(np.concatenate(keys), return_counts=True)
    rows, token_ids = np.divmod(seen, num_tokens)
    costs = torch.from_numpy(counts * frequency[rows] + presence[rows]).to(logits.dtype)
    logits[put(rows, logits.device), put(token_ids, logits.device)] -= put(costs, logits.device)


def _pairs(
    tokens_of_rows: Iterable[tuple[int, Collection[int]]], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows and token ids, two int64 ``[N]``, one pair for each token of each row."""
    rows, token_ids = [], [np.empty(0, dtype=np.int64)]
    for row, tokens in tokens_of_rows:
        rows += [row] * len(tokens)
        token_ids.append(_ids(tokens))
    return put(np.array(rows, dtype=np.int64), device), put(np.concatenate(token_ids), device)


def _ids(tokens: Collection[int] | array[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Copy token ids: a view would stop a request's tokens from growing."""
    return np.fromiter(tokens, dtype=np.int64, count=len(tokens))
