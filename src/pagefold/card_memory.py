"""Card memory: how much of a card's memory the KV cache gets. Pure: bytes in, bytes or a refusal out.

``gpu_memory_utilization`` means what it means in vLLM: of the *whole* card so much is for this engine: weights,
activations at the largest step, what CUDA itself takes, and KV gets the rest. Before weights are loaded the parts are
bounded, and what cannot fit is refused; after, they are measured by one pass at the largest step, and what was bounded
is replaced by what was found.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagefold.capacity import human_bytes
from pagefold.errors import BudgetTooSmallError, DoesNotFitError

if TYPE_CHECKING:
    from pagefold.kv import CacheLayout

__all__ = ["CardBudget", "CardUse", "bound_use", "budget_on_card"]

_CUDA_BYTES = 512 * 2**20
"""What a process takes of a card before it computes anything: its context, loaded kernels, libraries' workspaces."""


@dataclass(frozen=True, slots=True)
class CardUse:
    """What an engine takes of a card beside its KV.

    Attributes:
        weight_bytes: its weights.
        activation_bytes: all else that torch holds at the largest step.
        other_bytes: what is not torch's: CUDA's context, kernels, libraries.
    """

    weight_bytes: int
    activation_bytes: int
    other_bytes: int

    @property
    def num_bytes(self) -> int:
        """All of it."""
        return self.weight_bytes + self.activation_bytes + self.other_bytes


@dataclass(frozen=True, slots=True)
class CardBudget:
    """What may be taken of a card.

    Attributes:
        total_bytes: the card's memory.
        free_bytes: how much of it nobody used before the engine came.
        utilization: share of ``total_bytes`` that the engine may take.
    """

    total_bytes: int
    free_bytes: int
    utilization: float

    @property
    def num_bytes(self) -> int:
        """What the engine may take."""
        return int(self.total_bytes * self.utilization)


def bound_use(*, weight_bytes: int, vocab_size: int, row_bytes: int, num_tokens: int, num_seqs: int) -> CardUse:
    """Return an upper bound of what an engine takes, before anything is measured.

    Args:
        weight_bytes: of the weights as they will be loaded.
        vocab_size: logits a row.
        row_bytes: of one token's widest activations in a layer, all that live at once.
        num_tokens: of the largest step.
        num_seqs: rows that sample in it.
    """
    # Sampling keeps logits as float32 and as float64, with noise, order and sums beside them.
    sampling_bytes = num_seqs * vocab_size * 8 * 6
    return CardUse(weight_bytes, num_tokens * row_bytes + sampling_bytes, _CUDA_BYTES)


def budget_on_card(  # noqa: PLR0913 - the facts that it weighs, by name
    budget: CardBudget,
    use: CardUse,
    layout: CacheLayout,
    *,
    kv_cache_memory_bytes: int | None,
    max_num_seqs: int,
    min_len: int,
    max_len: int,
) -> int:
    """Return the bytes that KV may take.

    Args:
        budget: of the card.
        use: what else is taken of it.
        layout: of the model's KV.
        kv_cache_memory_bytes: what was asked for, or None for all that is left.
        max_num_seqs: sequences at once: each has a residual where blocks are sealed, which is KV too.
        min_len: the longest sequence that must be served, in tokens.
        max_len: the longest that the model computes.

    Raises:
        DoesNotFitError: the card is taken by others, or the weights do not fit, or the KV that was asked for.
        BudgetTooSmallError: what is left does not hold one sequence of ``min_len`` tokens, beside all residuals. All
            say by how much, and which settings do.
    """
    residual_bytes = max_num_seqs * layout.residual_bytes
    needed = layout.num_blocks_for(min_len) * layout.bytes_per_block + residual_bytes
    beside = f"weights of {human_bytes(use.weight_bytes)}, activations of {human_bytes(use.activation_bytes)} and "
    beside += f"{human_bytes(use.other_bytes)} for CUDA"
    left_free = budget.free_bytes - use.num_bytes
    asked = kv_cache_memory_bytes
    left = budget.num_bytes - use.num_bytes if asked is None else asked
    error: type[DoesNotFitError] = DoesNotFitError
    settings = _settings_that_do(budget, use, layout, residual_bytes, needed, max_len)
    if asked is None and budget.num_bytes > budget.free_bytes:
        missing = budget.num_bytes - budget.free_bytes
        msg = f"gpu_memory_utilization={budget.utilization:g} is {human_bytes(budget.num_bytes)} of the card's "
        msg += f"{human_bytes(budget.total_bytes)}, and only {human_bytes(budget.free_bytes)} are free"
    elif asked is not None and asked > left_free:
        missing = asked - left_free
        msg = f"kv_cache_memory_bytes is {asked:,}, and beside {beside} the card has {max(left_free, 0):,} left"
    elif left < needed:
        missing = needed - left
        error = BudgetTooSmallError
        settings = [*_smaller_needs(layout, left, max_num_seqs, needed, max_len), *settings]
        msg = f"A request of {min_len:,} tokens needs {human_bytes(needed)} of KV"
        if residual_bytes:
            msg += (
                f", {human_bytes(residual_bytes)} of them for unsealed blocks of max_num_seqs = {max_num_seqs} requests"
            )
        msg += f", and beside {beside} {human_bytes(max(left, 0))} are for it"
    else:
        return left
    remedy = f"Any of these does: {'; '.join(settings)}."
    msg += f": {human_bytes(missing)} too few."
    raise error(msg, missing_bytes=missing, remedy=remedy)


def _settings_that_do(  # noqa: PLR0913, PLR0917 - as above
    budget: CardBudget, use: CardUse, layout: CacheLayout, residual_bytes: int, needed: int, max_len: int
) -> list[str]:
    """Name what would work, given what is free."""
    settings = []
    lowest = math.ceil((use.num_bytes + needed) / budget.total_bytes * 100) / 100
    highest = math.floor(budget.free_bytes / budget.total_bytes * 100) / 100
    if lowest <= highest:
        settings.append(f"gpu_memory_utilization from {lowest:g} to {highest:g}")
    most_blocks = layout.num_blocks(budget.free_bytes - use.num_bytes - residual_bytes)
    most = most_blocks * layout.bytes_per_block + residual_bytes
    if most >= needed:
        settings.append(f"kv_cache_memory_bytes from {needed} to {most}")
    longest = layout.longest_in(most_blocks, max_len)
    if most < needed and longest > 1:
        settings.append(f"max_model_len up to {longest} with kv_cache_memory_bytes={most}")
    settings += ["a smaller max_num_batched_tokens and max_num_seqs (smaller activations)"] if most < needed else []
    settings.append("device=cpu, which takes the memory of the host")
    return settings


def _smaller_needs(layout: CacheLayout, left: int, max_num_seqs: int, needed: int, max_len: int) -> list[str]:
    """Name what would work in the bytes that are left."""
    settings = []
    longest = layout.longest_in(layout.num_blocks(left - max_num_seqs * layout.residual_bytes), max_len)
    if longest > 1:
        settings.append(f"max_model_len up to {longest}")
    if layout.residual_bytes:
        most_seqs = max_num_seqs - math.ceil((needed - left) / layout.residual_bytes)
        settings += [f"max_num_seqs up to {most_seqs}"] if most_seqs > 0 else []
    return settings
