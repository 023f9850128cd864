"""ConnectorWorker: carries out what the planner decides, in the process that has vLLM's tensors.

It has the host's memory, copies blocks between it and vLLM's, compares checksums, and lets threads move blocks between
it and slow tiers. It decides nothing; but what it has seen fail, it does not build on (``StepOrders.acknowledged``).
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import numpy as np

from pagefold.integrations.vllm.connector_orders import StepOrders, StepReport
from pagefold.kv import Fetch
from pagefold.kv.missing import NOTHING_MISSING
from pagefold.kv.transfers import Fetched, MissCause, StoreError, Written
from pagefold.store.transfer_threads import TransferThreads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pagefold.integrations.vllm.connector_pages import KVPages
    from pagefold.kv.transfers import Outcome
    from pagefold.store.arena import HostArena
    from pagefold.store.protocol import BlockStore

__all__ = ["ConnectorWorker"]

_log = logging.getLogger("vllm.pagefold")

_IDLE_WAIT_S = 0.005
"""How long a step without tokens waits for slow tiers: vLLM would come back at once."""

_NOTHING = StepOrders(-1)


class ConnectorWorker:
    """The hands of one worker of vLLM.

    Args:
        pages: vLLM's blocks.
        arena: the host's memory.
        stores: slow tiers, faster ones first.
        verifies: whether what was restored is read back and compared.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        pages: KVPages,
        arena: HostArena,
        stores: Sequence[BlockStore] = (),
        *,
        verifies: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.arena = arena
        self.pages = pages
        self._transfers = TransferThreads(arena, stores) if stores else None
        self._verifies = verifies
        self._clock = clock
        self._orders = _NOTHING
        self._fetches: dict[int, Fetch] = {}
        self._ticket_at: dict[int, int] = {}  # host block on its way in -> ticket
        self._num_coming: dict[int, int] = {}  # ticket -> host blocks on their way in
        self._last_failed = -1
        self._failed_blocks: set[int] = set()
        self._began_s = 0.0
        self._report = StepReport(-1)
        self._num_writing = 0

    # A step, in this order.

    def begin(self, orders: StepOrders) -> None:
        """Take the orders of a step."""
        self._orders = orders
        self._report = StepReport(orders.step, num_tokens=orders.num_tokens, num_requests=orders.num_requests)
        if self._transfers is not None:
            self._begin_fetches(orders, self._transfers)
        self._began_s = self._clock()

    def load(self) -> None:
        """Restore blocks. What is damaged is reported, and computed anew by vLLM."""
        ops = self._orders.loads
        if not ops:
            return
        began = self._clock()
        damaged = self.pages.load(ops, self.arena)
        took_s = self._clock() - began
        self._began_s += took_s
        if damaged:
            self._last_failed = self._orders.step
            self._failed_blocks = {op.block_id for op in ops if op.host_id in damaged}
        num_differing = 0
        if self._verifies:
            for op in ops:
                if op.host_id not in damaged:
                    differs = self.pages.read(op.block_id) != self.arena.blocks[op.host_id]
                    num_differing += int(np.count_nonzero(differs))
        num_bytes = {**self._report.num_bytes, "load": len(ops) * self.pages.block_bytes}
        self._report = self._report._replace(
            damaged=damaged,
            num_differing=num_differing,
            num_bytes=num_bytes,
            busy_s={**self._report.busy_s, "load": took_s},
        )

    def save(self) -> None:
        """Store what the step has computed, and give slow tiers what was stored before."""
        orders = self._orders
        now = self._clock()
        stored = not orders.stores or self._last_failed <= orders.acknowledged
        if orders.stores and stored:
            self.pages.store(orders.stores, self.arena)
            took_s = self._clock() - now
            self._report = self._report._replace(
                seconds=now - self._began_s,
                num_bytes={**self._report.num_bytes, "store": len(orders.stores) * self.pages.block_bytes},
                busy_s={**self._report.busy_s, "store": took_s},
            )
        self._report = self._report._replace(stored=stored)
        if self._transfers is not None:
            self._num_writing += len(orders.writes)
            self._transfers.write(orders.writes)

    def failed_blocks(self) -> set[int]:
        """Return vLLM's blocks that could not be restored in this step."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def report(self) -> StepReport | None:
        """Return what became of the step; None where there is nothing to tell."""
        outcomes = self._collect(self._transfers) if self._transfers is not None else []
        report, orders = self._report, self._orders
        self._orders, self._report = _NOTHING, StepReport(-1)
        if orders.is_empty:
            report = report._replace(step=-1)
            if not outcomes:
                return None
        return report._replace(outcomes=outcomes)

    def close(self) -> None:
        """Close slow tiers; what is being written is waited for a little."""
        if self._transfers is not None:
            end = self._clock() + 5.0
            while self._num_writing and self._clock() < end:
                self._collect(self._transfers, 0.05)
            self._transfers.close()
            self._transfers = None

    # Slow tiers.

    def _begin_fetches(self, orders: StepOrders, transfers: TransferThreads) -> None:
        """Ask slow tiers while the step computes: nothing of it reads or writes where blocks come in."""
        if orders.clears:
            try:
                transfers.clear()
            except StoreError as error:
                _log.warning("not all slow tiers have forgotten everything: %s", error)
        for look in orders.looks:
            transfers.look(look.tier, look.names, look.ticket)
        for order in orders.fetches:
            fetch = self._fetches[order.ticket] = Fetch(0.0, 0.0, NOTHING_MISSING)
            fetch.ops = {order.tier: list(order.ops)}
            self._ticket_at.update({op.host_id: order.ticket for op in order.ops})
            self._num_coming[order.ticket] = len(order.ops)
            transfers.fetch(fetch)
        for ticket in orders.dropped:
            if ticket in self._fetches:
                self._fetches[ticket].is_over = True

    def _collect(self, transfers: TransferThreads, timeout_s: float = 0.0) -> list[Outcome]:
        if self._fetches and not self._orders.num_tokens:
            timeout_s = timeout_s or _IDLE_WAIT_S
        outcomes = transfers.collect(timeout_s)
        for outcome in outcomes:
            if isinstance(outcome, Fetched):
                for op, found in zip(outcome.ops, outcome.found, strict=True):
                    if not isinstance(found, MissCause):
                        self.arena.arrived(op.host_id, found)
                    self._end(op.host_id)
            elif isinstance(outcome, Written):
                self._num_writing -= len(outcome.ops)
        return outcomes

    def _end(self, host_id: int) -> None:
        ticket = self._ticket_at.pop(host_id)
        self._num_coming[ticket] -= 1
        if not self._num_coming[ticket]:
            del self._fetches[ticket], self._num_coming[ticket]
