"""Capacity: what a config, a model and a machine come to, in blocks and tokens. Decided before weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pagefold.errors import BudgetTooSmallError, ConfigError

if TYPE_CHECKING:
    from pagefold.kv import KVGeometry

__all__ = ["KV_SHARE_OF_FREE_MEMORY", "Capacity", "plan_capacity"]

KV_SHARE_OF_FREE_MEMORY = 0.5
"""Default KV budget on a CPU: this share of the memory that is free once the weights are in. The rest stays for
activations, compiled kernels, the server, and the machine's other processes, which share this memory with us, unlike a
GPU's. Slabs are touched block by block, so what is never used is never taken."""

_MIN_DEFAULT_TOKENS = 2**18
"""The default budget stops where more could not be used: at ``max_num_seqs`` requests of full length, or at so many
tokens if that is more (for prefixes to stay cached)."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """What fits.

    Attributes:
        weight_bytes: bytes of the weights in the chosen dtype.
        kv_budget_bytes: bytes of the blocks.
        num_blocks: blocks, all of equal size.
        block_size: tokens a block.
        max_model_len: the longest sequence that is served, in tokens.
    """

    weight_bytes: int
    kv_budget_bytes: int
    num_blocks: int
    block_size: int
    max_model_len: int

    @property
    def num_tokens(self) -> int:
        """Tokens that all blocks hold."""
        return self.num_blocks * self.block_size

    @property
    def max_concurrency(self) -> float:
        """How many requests of ``max_model_len`` tokens fit at once, rounded to blocks."""
        return self.num_blocks / -(-self.max_model_len // self.block_size)

    def lines(self) -> list[str]:
        """Return the three lines that a start prints."""
        blocks = f"{self.num_blocks:,} blocks of {self.block_size} tokens"
        return [
            f"weights    {_human(self.weight_bytes)}",
            f"KV budget  {_human(self.kv_budget_bytes)} = {blocks} = {self.num_tokens:,} tokens",
            f"fits       {self.max_concurrency:,.1f} requests of max_model_len = {self.max_model_len:,} tokens at once",
        ]


def plan_capacity(  # noqa: PLR0913 - the seven facts that it weighs, by name
    *,
    geometry: KVGeometry,
    weight_bytes: int,
    model_max_len: int,
    model_limit: str = "",
    max_model_len: int | Literal["auto"] | None,
    kv_cache_memory_bytes: int | None,
    max_num_seqs: int,
    available_bytes: int,
) -> Capacity:
    """Decide budget, blocks and ``max_model_len``.

    Args:
        geometry: of the model's KV.
        weight_bytes: bytes of the weights as they will be loaded.
        model_max_len: the longest sequence that is computed rightly: all that the model was made for, or less.
        model_limit: what of the model makes it less; empty where nothing does.
        max_model_len: what was asked: a number, ``auto``, or None for ``model_max_len``.
        kv_cache_memory_bytes: the budget asked for, or None for the default share.
        max_num_seqs: sequences at once; bounds the default budget.
        available_bytes: memory that is free before the weights are loaded.

    Raises:
        ConfigError: the weights alone, or with the budget, do not fit; ``max_model_len`` is beyond the model.
        BudgetTooSmallError: the budget holds less than one request of ``max_model_len``; names the smallest that works.
    """
    if isinstance(max_model_len, int) and max_model_len > model_max_len:
        why = f"the model was made for {model_max_len} positions"
        if model_limit:
            why = f"beyond {model_max_len} tokens {model_limit} is not computed yet"
        msg = f"max_model_len is {max_model_len}, but {why}."
        raise ConfigError(msg, remedy=f"Give at most {model_max_len}.")
    left = available_bytes - weight_bytes
    if left <= 0:
        msg = f"The weights need {_human(weight_bytes)}, and {_human(available_bytes)} of memory are free."
        raise ConfigError(msg, remedy="Use a smaller model or a machine with more memory.")
    budget = kv_cache_memory_bytes
    wanted_len = model_max_len if max_model_len is None or max_model_len == "auto" else max_model_len
    if budget is None:
        enough = max(max_num_seqs * geometry.num_blocks_for(wanted_len), _MIN_DEFAULT_TOKENS // geometry.block_size)
        budget = min(int(left * KV_SHARE_OF_FREE_MEMORY), enough * geometry.bytes_per_block)
    elif budget > left:
        msg = (
            f"kv_cache_memory_bytes is {budget:,}, but beside the weights ({_human(weight_bytes)}) only "
            f"{_human(left)} ({left:,} bytes) of memory are free."
        )
        raise ConfigError(msg, remedy="Give a smaller budget, or leave it out to take a share of what is free.")
    num_blocks = geometry.num_blocks(budget)
    if max_model_len == "auto":
        wanted_len = min(model_max_len, num_blocks * geometry.block_size)
    num_blocks_needed = geometry.num_blocks_for(max(wanted_len, 2))
    if num_blocks < num_blocks_needed:
        msg = (
            f"The KV budget of {budget:,} bytes is {num_blocks} blocks of {geometry.bytes_per_block:,} bytes; one "
            f"request of max_model_len = {max(wanted_len, 2)} tokens needs {num_blocks_needed}."
        )
        smallest = num_blocks_needed * geometry.bytes_per_block
        raise BudgetTooSmallError(msg, remedy=_remedy(smallest, left, num_blocks * geometry.block_size))
    return Capacity(
        weight_bytes=weight_bytes,
        kv_budget_bytes=num_blocks * geometry.bytes_per_block,
        num_blocks=num_blocks,
        block_size=geometry.block_size,
        max_model_len=wanted_len,
    )


def _remedy(smallest_bytes: int, left_bytes: int, longest: int) -> str:
    """Say which budget or which length would work; never a budget that is refused in its turn."""
    if smallest_bytes <= left_bytes:
        remedy = f"The smallest budget that works is kv_cache_memory_bytes={smallest_bytes}"
    else:
        remedy = f"No budget works: it takes {smallest_bytes:,} bytes, and beside the weights {left_bytes:,} are free"
    if longest > 1:
        remedy += f"; or give a smaller max_model_len (at most {longest} fits, which is what auto takes)"
    elif smallest_bytes > left_bytes:
        remedy += "; use a smaller model or a machine with more memory"
    return remedy + "."


def _human(num_bytes: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes} B"
