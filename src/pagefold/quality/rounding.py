"""RoundingRunner: blocks as a pool gives them back that keeps fewer bits (``--kv-transport-codec lossy7``)."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import torch

from pagefold.config import DROPPED_BITS
from pagefold.errors import ConfigError
from pagefold.runner.block_form import block_form

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagefold.config import TransportCodec
    from pagefold.kv import KVGeometry
    from pagefold.runner.torch_runner import TorchRunner
    from pagefold.steps import StepPlan, StepResult

__all__ = ["RoundingRunner", "check_rounds"]


def check_rounds(transport: TransportCodec, geometry: KVGeometry) -> None:
    """Refuse a lossy transport of blocks in which it would round nothing.

    Raises:
        ConfigError: they hold no codes of 8 bit.
    """
    if DROPPED_BITS[transport] and not block_form(geometry).parts:
        name = "auto" if geometry.codec is None else geometry.codec.name
        if geometry.skip_layers:
            name += f", with layers {', '.join(map(str, geometry.skip_layers))} in 16 bit,"
        msg = f"kv_transport_codec {transport} rounds codes of 8 bit, and blocks of {name} have none."
        raise ConfigError(msg, remedy="Name a codec that has, as int8_per_token_head, or evaluate without it.")


class RoundingRunner:
    """A :class:`~pagefold.steps.LaunchingRunner` that rounds each block when a step has filled it.

    So a step attends exactly to the block that it is in and to those that it fills, and to all before it as to blocks
    from the pool. Rounding a block twice is rounding it once.

    Args:
        runner: the one that computes.
        transport: how blocks are packed on their way; a lossy one.
    """

    def __init__(self, runner: TorchRunner, transport: TransportCodec) -> None:
        slab = runner.slab
        parts = block_form(runner.geometry, slab.layout).parts
        assert parts, "blocks without codes of 8 bit"
        self._runner = runner
        self._blocks = slab.data.view(torch.int8)
        self._step = 1 << (DROPPED_BITS[transport] or 0)
        self._is_code = torch.zeros(slab.data.shape[1], dtype=torch.bool)
        for begin, _, num_rows, num_slots, *_ in parts:
            self._is_code[begin : begin + num_rows * num_slots] = True
        self._is_code = self._is_code.to(slab.data.device)

    def run(self, plan: StepPlan) -> StepResult:
        """Run a step; see :class:`~pagefold.steps.Runner`."""
        result = self._runner.run(plan)
        self._round(plan)
        return result

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Launch a step, and the rounding behind it; see :class:`~pagefold.steps.LaunchingRunner`."""
        wait = self._runner.launch(plan)
        self._round(plan)
        return wait

    def _round(self, plan: StepPlan) -> None:
        """Round what the step has filled: as ``Packing.coarsened`` does, where the blocks are."""
        size = self._runner.geometry.block_size
        filled = [
            table.block_ids[start // size - table.num_trimmed : (start + num) // size - table.num_trimmed]
            for start, num, tables in zip(plan.starts, plan.num_tokens, plan.tables, strict=True)
            for table in tables
        ]
        for block_id in chain.from_iterable(filled):
            block = self._blocks[block_id]
            rounded = (block.to(torch.int16) + self._step // 2).div(self._step, rounding_mode="floor") * self._step
            block.copy_(torch.where(self._is_code, rounded.clamp(max=128 - self._step).to(torch.int8), block))
