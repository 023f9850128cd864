"""HarshRunner: a runner around another one, in a world where everything that may go wrong does.

Memory that nothing should read holds NaN: every block that is free, from the moment it became so. Steps fail before
they compute, between two layers, or when all is written; what a failed step has written becomes NaN too. Bits turn in
the host's memory before they are loaded.
"""

from __future__ import annotations

import contextlib
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, NoReturn, TypeVar

import torch

from pagefold.runner.sealed_slab import SealedSlab
from pagefold.steps import DamagedBlocksError, StepResult

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from pagefold.engine.engine import Engine
    from pagefold.kv import KVGeometry
    from pagefold.runner.slab import AnySlab
    from pagefold.steps import StepPlan

__all__ = ["HarshRunner", "InjectedError", "poison", "poison_sealed"]

Result = TypeVar("Result")

_MAX_FAILURES_IN_A_ROW = 2  # the third may end a request, rightly


class InjectedError(Exception):
    """A step that failed because the suite wanted it to."""


class HarshRunner:
    """A :class:`~pagefold.steps.Runner` around the ``TorchRunner`` of ``engine``.

    Args:
        engine: whose runner is wrapped.
        failure_rate: share of steps that fail.
        random: decides which, and how.
        damage_rate: share of loads from the host whose bytes are not what was stored.
        during_step: called while a step is in flight.
        is_late: whether a step that is launched begins when its result is asked for, the latest that a card could be;
            else it has ended before :meth:`launch` returns, and only its result comes late.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        failure_rate: float,
        random: Random,
        damage_rate: float = 0.0,
        during_step: Callable[[], None] = lambda: None,
        is_late: bool = True,
    ) -> None:
        self.inner = engine.runner
        self._core = engine.scheduler.core
        self._scheduler = engine.scheduler
        self._damage_rate = damage_rate
        self._failure_rate = failure_rate
        self._random = random
        self._during_step = during_step
        self._is_late = is_late
        self._launched: list[int] = []  # and nobody has asked for them yet
        self._doomed: set[int] = set()  # behind a step that failed
        self._has_failed_behind = False  # a step that could not be launched, behind one that lands yet
        self._failed_early: Exception | None = None  # of a step that nobody has asked for yet
        self._num_failures_in_a_row = 0
        self._free: set[int] = set()

    def run(self, plan: StepPlan) -> StepResult:
        """Run the step, or fail."""
        return self._harshly(plan, self.inner.run)

    def launch(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Begin a step, or fail at once."""
        if self._may_fail() and self._random.random() < self._failure_rate / 2:
            self._num_failures_in_a_row += 1
            self._has_failed_behind = bool(self._launched)
            raise InjectedError("launch")
        if self._is_late:
            self._launched.append(plan.step_id)
            return partial(self._land_late, plan)
        return self._launch_early(plan)

    def _land_late(self, plan: StepPlan) -> StepResult:
        """Carry out a launched step now."""
        self._launched.remove(plan.step_id)
        if plan.step_id in self._doomed:
            return self.inner.launch(plan)()  # on what a step has left that failed; nobody looks at it
        try:
            return self._harshly(plan, lambda plan: self.inner.launch(plan)())
        except (InjectedError, DamagedBlocksError):
            self._doomed = set(self._launched)
            raise

    def _launch_early(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Carry out a step now, though its result is asked for later."""
        if self._failed_early:  # behind a step that has failed, and nobody knows yet
            with contextlib.suppress(Exception):
                self.inner.launch(plan)
            return lambda: StepResult([])
        try:
            return self._harshly(plan, self.inner.launch)
        except (InjectedError, DamagedBlocksError) as error:
            self._failed_early = error
            return self._raise_early

    def _raise_early(self) -> NoReturn:
        error, self._failed_early = self._failed_early, None
        assert error is not None
        raise error

    def _harshly(self, plan: StepPlan, carry_out: Callable[[StepPlan], Result]) -> Result:
        stores = [plan.host_ops, *self._core.host.in_flight]
        to_store = {store.block_id for ops in stores for store in ops.stores}
        free = set(self._core.pool.free_ids) - to_store
        self.inner.slab.as_bytes()[sorted(free - self._free)] = 0xFF  # NaN in every codec that has one
        self._free = free
        if self._core.residuals.is_on:
            self.inner.slab.residuals[:, self._core.residuals.free_ids] = torch.nan
        self._during_step()
        if self._core.streaming.is_on:  # then attention reads the arena
            self.inner.arena.blocks[self._core.host.blocks.free_ids()] = 0xFF  # NaN
        for host_id in sorted(plan.host_ops.ids_read):
            if self._random.random() < self._damage_rate:
                held = self.inner.arena.blocks[host_id]
                held[self._random.randrange(len(held))] ^= 1 << self._random.randrange(8)
        if self._may_fail() and self._random.random() < self._failure_rate:
            self._num_failures_in_a_row += 1
            self._fail(plan)
        self._num_failures_in_a_row = int(self._has_failed_behind)  # that step comes next
        self._has_failed_behind = False
        return carry_out(plan)

    def _may_fail(self) -> bool:
        """So that no request ends by it: it is never the last failure that would count, against one or against all."""
        counted = self._scheduler.suspicion.num_counted
        return max(self._num_failures_in_a_row, counted) < _MAX_FAILURES_IN_A_ROW

    def _fail(self, plan: StepPlan) -> None:
        how = self._random.choice(("before", "between layers", "after"))
        if how == "after":
            self.inner.run(plan)
        elif how == "between layers":
            self._run_to_second_layer(plan)
        if how != "before":
            poison(self.inner.slab, self.inner.geometry, plan)
        raise InjectedError(how)

    def _run_to_second_layer(self, plan: StepPlan) -> None:
        decoder = self.inner.decoder
        attention = decoder._attention
        if not callable(attention):  # the fused decoder's layers are one function
            self.inner.run(plan)
            return

        def trip(query, key, value, slab, inputs, layer, *scoring):  # noqa: PLR0917 - the op's own signature
            if layer:
                raise InjectedError
            return attention(query, key, value, slab, inputs, layer, *scoring)

        decoder._attention = trip
        try:
            self.inner.run(plan)
        except InjectedError:
            pass
        finally:
            decoder._attention = attention


def poison(slab: AnySlab, geometry: KVGeometry, plan: StepPlan) -> None:
    """Make NaN of every slot that the step was to write, as each cell of its cache group stores it."""
    if isinstance(slab, SealedSlab):
        poison_sealed(slab, plan)
        return
    dtype = slab.data.dtype if slab.data.dtype.is_floating_point else torch.float32
    nothing = torch.full((1, slab.head_dim), torch.nan, dtype=dtype)
    for tables, start, num_tokens in zip(plan.tables, plan.starts, plan.num_tokens, strict=True):
        for (group, table), position in product(
            zip(geometry.groups, tables, strict=True), range(start, start + num_tokens)
        ):
            block = torch.tensor([table.block_ids[position // slab.block_size - table.num_trimmed]])
            for layer, head in product(group.layers, range(group.num_kv_heads)):
                slab.write(geometry.cell(layer, head), block, torch.tensor([position]), (nothing, nothing))


def poison_sealed(slab: SealedSlab, plan: StepPlan) -> None:
    """Make NaN of every block that the step was to seal, and of what it was to write into residuals."""
    rows = zip(plan.tables, plan.starts, plan.num_tokens, plan.residual_ids, strict=True)
    for tables, start, num_tokens, residual_id in rows:
        end = start + num_tokens
        for table, index in product(tables, range(start // slab.block_size, end // slab.block_size)):
            slab.data[table.block_ids[index - table.num_trimmed]] = 0xFF
        last = (end - 1) // slab.block_size * slab.block_size
        for cell in range(len(slab.places)):
            for part in slab.residual(cell, residual_id):
                part[max(start, last) - last : end - last] = torch.nan
