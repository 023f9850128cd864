"""KeepingRunner: a runner beside another that samples: of chunks that are packed it keeps a share of their blocks."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from pagefold.errors import ConfigError
from pagefold.kv import KeepRule, Packed
from pagefold.masks.packed import PACKED
from pagefold.masks.rule import CHUNK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.steps import Runner, StepPlan, StepResult

__all__ = ["KeepingRunner", "packing_rules"]


def packing_rules(rules: Sequence[KeepRule], block_size: int) -> tuple[KeepRule, ...]:
    """Return what cache groups keep where the one that keeps all has a share of older tokens kept instead.

    Raises:
        ConfigError: not one group keeps all, or its blocks do not divide a chunk.
    """
    if sum(rule.window is None for rule in rules) != 1:
        msg = "kv_keep is set, and not one cache group of the model has layers that attend to all tokens."
        raise ConfigError(msg, remedy="Leave it out.")
    if CHUNK % block_size:
        msg = f"block_size is {block_size}, and kv_keep takes chunks of {CHUNK} tokens apart."
        raise ConfigError(msg, remedy=f"Use a block_size that divides {CHUNK}, as 16 or 32.")
    return tuple(PACKED if rule.window is None else rule for rule in rules)


class KeepingRunner:
    """See the module. Every chunk keeps as many blocks, so what follows from a prefix is the same for all who have it.

    Args:
        runner: samples.
        share: of older tokens, that is kept.
        block_size: tokens a block.
    """

    def __init__(self, runner: Runner, share: float, block_size: int) -> None:
        self._runner = runner
        self._chunk_blocks = CHUNK // block_size
        self._packed = Packed(math.ceil(share * self._chunk_blocks), None)

    def run(self, plan: StepPlan) -> StepResult:
        """Sample, and keep a share of each chunk that the step packs."""
        packed = [[self._packed] * (len(granted) // self._chunk_blocks) for granted in plan.granted]
        return replace(self._runner.run(plan), packed=packed)
