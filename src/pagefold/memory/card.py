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

from pagefold.errors import BudgetTooSmallError, DoesNotFitError
from pagefold.memory.capacity import human_bytes

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


@dataclass(frozen=True, slots=True)
class _Need:
    """What of KV must fit, and what was asked for.

    Attributes:
        layout: of the model's KV.
        max_num_seqs: sequences at once.
        min_len, max_len: the longest sequence that must be served, and the longest that the model computes.
        num_new: what a step writes, beside what windows keep.
        asked: the bytes that were asked for; None for all that is left.
    """

    layout: CacheLayout
    max_num_seqs: int
    min_len: int
    max_len: int
    num_new: int
    asked: int | None

    @property
    def residual_bytes(self) -> int:
        """Bytes of all residuals; 0 where blocks are not sealed."""
        return self.max_num_seqs * self.layout.residual_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of one sequence of ``min_len`` tokens, and of all residuals."""
        num_blocks = self.layout.num_blocks_for(self.min_len, self.num_new)
        return num_blocks * self.layout.bytes_per_block + self.residual_bytes

    def longest_in(self, num_bytes: int) -> int:
        """Return the most tokens of a sequence that so many bytes hold beside all residuals; 0 for none."""
        num_blocks = self.layout.num_blocks(num_bytes - self.residual_bytes)
        return self.layout.longest_in(num_blocks, self.max_len, self.num_new)


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
    max_num_batched_tokens: int,
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
        max_num_batched_tokens: what a step writes, beside what windows keep.
        min_len: the longest sequence that must be served, in tokens.
        max_len: the longest that the model computes.

    Raises:
        DoesNotFitError: the card is taken by others, or the weights do not fit, or the KV that was asked for.
        BudgetTooSmallError: what is left does not hold one sequence of ``min_len`` tokens, beside all residuals. All
            say by how much, and which settings do.
    """
    need = _Need(layout, max_num_seqs, min_len, max_len, max_num_batched_tokens, kv_cache_memory_bytes)
    beside = f"weights of {human_bytes(use.weight_bytes)}, activations of {human_bytes(use.activation_bytes)} and "
    beside += f"{human_bytes(use.other_bytes)} for CUDA"
    left_free = budget.free_bytes - use.num_bytes
    asked = kv_cache_memory_bytes
    left = budget.num_bytes - use.num_bytes if asked is None else asked
    error: type[DoesNotFitError] = DoesNotFitError
    settings = _settings_that_do(budget, use, need)
    if asked is None and budget.num_bytes > budget.free_bytes:
        missing = budget.num_bytes - budget.free_bytes
        msg = f"gpu_memory_utilization={budget.utilization:g} is {human_bytes(budget.num_bytes)} of the card's "
        msg += f"{human_bytes(budget.total_bytes)}, and only {human_bytes(budget.free_bytes)} are free"
    elif asked is not None and asked > left_free:
        missing = asked - left_free
        msg = f"kv_cache_memory_bytes is {asked:,}, and beside {beside} the card has {max(left_free, 0):,} left"
    elif left < need.num_bytes:
        missing = need.num_bytes - left
        error = BudgetTooSmallError
        settings = [*_settings_in(left, need), *settings]
        msg = f"A request of {min_len:,} tokens needs {human_bytes(need.num_bytes)} of KV"
        if need.residual_bytes:
            msg += f", {human_bytes(need.residual_bytes)} for unsealed blocks of max_num_seqs = {max_num_seqs} requests"
        msg += f", and beside {beside} {human_bytes(max(left, 0))} are for it"
    else:
        return left
    remedy = f"Any of these does: {'; '.join(settings)}."
    msg += f": {human_bytes(missing)} too few."
    raise error(msg, missing_bytes=missing, remedy=remedy)


def _settings_that_do(budget: CardBudget, use: CardUse, need: _Need) -> list[str]:
    """Name what would work, given what is free."""
    settings = []
    lowest = math.ceil((use.num_bytes + need.num_bytes) / budget.total_bytes * 100) / 100
    highest = math.floor(budget.free_bytes / budget.total_bytes * 100) / 100
    if lowest <= highest:
        alone = "" if need.asked is None else " without kv_cache_memory_bytes"
        settings.append(f"gpu_memory_utilization from {lowest:g} to {highest:g}{alone}")
    left_free = budget.free_bytes - use.num_bytes
    most_blocks = need.layout.num_blocks(left_free - need.residual_bytes)
    most = most_blocks * need.layout.bytes_per_block + need.residual_bytes
    if most >= need.num_bytes:
        settings.append(f"kv_cache_memory_bytes from {need.num_bytes} to {most}")
    else:
        longest = need.longest_in(left_free)
        if longest > 1:
            settings.append(f"max_model_len up to {longest} with kv_cache_memory_bytes={most}")
        settings.append("a smaller max_num_batched_tokens and max_num_seqs (smaller activations)")
    settings.append("device=cpu, which takes the memory of the host")
    return settings


def _settings_in(left: int, need: _Need) -> list[str]:
    """Name what would work in the bytes that are left."""
    settings = []
    longest = need.longest_in(left)
    if longest > 1:
        settings.append(f"max_model_len up to {longest}")
    if need.residual_bytes:
        num_seqs = need.max_num_seqs - -(-(need.num_bytes - left) // need.layout.residual_bytes)
        settings += [f"max_num_seqs up to {num_seqs}"] if num_seqs > 0 else []
    return settings
