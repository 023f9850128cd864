"""TransferThreads: carries blocks between the host arena and slow tiers, on threads of its own.

The engine's thread hands over what was decided, and collects what has happened; nothing here decides. A host block
belongs to a transfer from when it is handed over until its outcome is collected.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from pagefold.kv.transfers import Fetched, Found, MissCause, Outcome, StoreError, Written
from pagefold.store.protocol import Get, Put

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pagefold.kv import BlockName, Fetch, FetchOp, WriteOp
    from pagefold.kv.transfers import TierUse
    from pagefold.store.arena import HostArena
    from pagefold.store.protocol import BlockStore

__all__ = ["TransferThreads"]

_log = logging.getLogger(__name__)

_BATCH_BYTES = 8 * 2**20
"""Blocks are asked for in batches of about so many bytes: what arrives early tells how fast a tier is."""

_LAST_S, _POLL_S = 2.0, 0.005
"""What is begun is waited for so long at least when all is closed, and looked at so often."""

_NUM_READERS = 2
"""Threads that read from one tier: one checks what it has read while the other reads."""


class _StoreWorkers:
    """A store with the threads that read from it and write to it."""

    def __init__(self, store: BlockStore) -> None:
        self.store = store
        self.readers = ThreadPoolExecutor(_NUM_READERS, f"pagefold-{store.tier}-read")
        self.writer = ThreadPoolExecutor(1, f"pagefold-{store.tier}-write")
        self.num_reading = self.num_writing = 0

    @property
    def num_busy(self) -> int:
        """How many of its threads are in a call."""
        return self.num_reading + self.num_writing


class TransferThreads:
    """Moves blocks; see :class:`~pagefold.kv.transfers.Transfers`.

    Args:
        arena: where blocks come to and from.
        stores: the slow tiers, faster ones first.

    Attributes:
        stores: the slow tiers, as given.
        notify: called on a thread of the transfer's whenever there is something to collect.
    """

    def __init__(self, arena: HostArena, stores: Sequence[BlockStore]) -> None:
        self.stores = list(stores)
        self.notify: Callable[[], None] = lambda: None
        self._arena = arena
        self._workers = {store.tier: _StoreWorkers(store) for store in stores}
        self._outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self._lock = threading.Lock()

    @property
    def tiers(self) -> list[str]:
        """The names of the slow tiers, faster ones first."""
        return [store.tier for store in self.stores]

    def uses(self) -> dict[str, TierUse]:
        """Return what tiers have that know it at once."""
        uses = {store.tier: store.known_use() for store in self.stores}
        return {tier: use for tier, use in uses.items() if use is not None}

    def count(self, tier: str, names: Sequence[BlockName]) -> int:
        """Return how many of ``names``, from the first on, a tier that answers at once has."""
        try:
            return self._workers[tier].store.count(names)
        except StoreError as error:
            _log.warning("%s", error)
            return 0

    def look(self, tier: str, names: Sequence[BlockName], ticket: int) -> None:
        """Ask a tier that does not answer at once how much of ``names`` it has."""
        self._workers[tier].readers.submit(lambda: self._tell(Found(tier, ticket, self.count(tier, names))))

    def fetch(self, fetch: Fetch) -> None:
        """Bring what a fetch lacks. What is not begun when the fetch is over is not brought."""
        num = max(1, _BATCH_BYTES // self._arena.blocks.shape[1])
        for tier, ops in fetch.ops.items():
            workers = self._workers[tier]
            for at in range(0, len(ops), num):
                workers.readers.submit(self._read, workers, ops[at : at + num], fetch)

    def write(self, ops: Sequence[WriteOp]) -> None:
        """Give blocks to all tiers."""
        if not ops:
            return
        arena = self._arena
        puts = [Put(op.name, arena.payload(op.host_id), arena.checksum(op.host_id), op.note) for op in ops]
        left = list(self._workers.values())
        kept: dict[str, int] = {}
        seconds: dict[str, float] = {}

        def write_on() -> None:
            workers = left.pop(0)
            workers.num_writing = 1
            began, tier = time.perf_counter(), workers.store.tier
            try:
                kept[tier] = workers.store.put(puts)
                seconds[tier] = time.perf_counter() - began
            except StoreError as error:
                _log.warning("%s", error)
            except Exception:  # noqa: BLE001 - a bug of a store's: the blocks must be let go of all the same
                _log.exception("blocks were not written to the %s tier", tier)
            if left:
                with contextlib.suppress(RuntimeError):  # all is being closed
                    left[0].writer.submit(write_on)
            else:
                self._tell(Written(ops, max(kept.values(), default=0), kept, seconds))
            workers.num_writing = 0

        left[0].writer.submit(write_on)

    def collect(self, timeout_s: float = 0.0) -> list[Outcome]:
        """Return what has happened, in order; wait up to ``timeout_s`` for something to happen."""
        outcomes: list[Outcome] = []
        try:
            if timeout_s > 0:
                outcomes.append(self._outcomes.get(timeout=min(timeout_s, threading.TIMEOUT_MAX)))
            while True:
                outcomes.append(self._outcomes.get_nowait())
        except queue.Empty:
            return outcomes

    def forget(self, digests: Sequence[bytes]) -> None:
        """Have all tiers forget these blocks, behind what is being written: that goes from store to store."""
        left = list(self._workers.values())

        def forget_on() -> None:
            store = left.pop(0).store
            try:
                store.delete(digests)
            except StoreError as error:
                _log.warning("%d blocks are not to be trusted, and are still there: %s", len(digests), error)
            except Exception:  # noqa: BLE001 - as in write()
                _log.exception("blocks were not deleted from the %s tier", store.tier)
            if left:
                with contextlib.suppress(RuntimeError):  # all is being closed
                    left[0].writer.submit(forget_on)

        left[0].writer.submit(forget_on)

    def clear(self) -> None:
        """Have all tiers forget everything, also what was handed over to be written before. Blocks.

        Raises:
            StoreError: a tier could not; what it holds may be found again.
        """
        failures: list[str] = []
        for workers in self._workers.values():  # in the order of writes: what is being written goes from store to store
            try:
                workers.writer.submit(workers.store.clear).result()
            except StoreError as error:
                failures.append(f"{workers.store.tier}: {error}")
        if failures:
            raise StoreError("; ".join(failures))

    def close(self, timeout_s: float = 0.0) -> None:
        """Close all stores. What is not begun is left out; what is begun is waited for as long as ``timeout_s``."""
        end = time.monotonic() + max(timeout_s, _LAST_S)
        for workers in self._workers.values():
            workers.readers.shutdown(wait=False, cancel_futures=True)
            workers.writer.shutdown(wait=False, cancel_futures=True)
        for workers in self._workers.values():
            while workers.num_busy and time.monotonic() < end:
                time.sleep(_POLL_S)
            if not workers.num_busy:
                workers.store.close()
            else:
                _log.warning("the %s tier did not come to an end", workers.store.tier)

    # On the transfer's threads.

    def _read(self, workers: _StoreWorkers, ops: Sequence[FetchOp], fetch: Fetch) -> None:
        with self._lock:
            workers.num_reading += 1
            num_reading = workers.num_reading
        began = time.monotonic()
        found: list[bytes | MissCause] = []
        notes = [bytearray() for _ in ops]
        try:
            if fetch.is_wanted:
                gets = zip(ops, notes, strict=True)
                found = workers.store.get([Get(op.name, self._arena.payload(op.host_id), note) for op, note in gets])
            else:
                found = [MissCause.LATE] * len(ops)
        except StoreError as error:
            _log.warning("%s", error)
        except Exception:  # noqa: BLE001 - as above
            _log.exception("blocks were not read from the %s tier", workers.store.tier)
        seconds = (time.monotonic() - began) / num_reading
        with self._lock:
            workers.num_reading -= 1
        found += [MissCause.IO_ERROR] * (len(ops) - len(found))
        told = {op.host_id: bytes(note) for op, note in zip(ops, notes, strict=True) if note}
        self._tell(Fetched(workers.store.tier, ops, found, seconds, told))

    def _tell(self, outcome: Outcome) -> None:
        self._outcomes.put(outcome)
        self.notify()
