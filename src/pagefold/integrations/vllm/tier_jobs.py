"""TierJobs: chunks between vLLM's host memory and a store, on threads of their own. Nobody who calls it waits.

vLLM's scheduler hands jobs over and asks now and then which have ended. A store that fails makes a job fail; nothing is
raised to the scheduler.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from pagefold.kv.transfers import MissCause
from pagefold.store.frame import checksum_of
from pagefold.store.protocol import Get, Put, StoreUse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pagefold.kv import BlockName
    from pagefold.store.protocol import BlockStore

__all__ = ["ChunkMove", "EndedJob", "TierCounts", "TierJobs"]

_log = logging.getLogger(__name__)

_PUT_AT_ONCE = 32
"""Chunks that are given to a store together: what waits to be read is not held up by a long job."""
_LOOK_EVERY_S = 1.0
"""How often it is looked at how much the store holds, at most, and only after a job."""
_SERIOUS = frozenset(MissCause) - {MissCause.ABSENT, MissCause.LATE, MissCause.IO_ERROR}
"""Causes of a miss where a frame was there and was wrong."""


class ChunkMove(NamedTuple):
    """A chunk to be moved.

    Attributes:
        key: what vLLM calls it.
        name: what the store calls it.
        row: uint8, where it is in the host's memory.
    """

    key: bytes
    name: BlockName
    row: memoryview


class EndedJob(NamedTuple):
    """A job has ended.

    Attributes:
        job_id: vLLM's.
        is_load: whether chunks were brought.
        keys: of all its chunks.
        done: those that were moved; of a store job all or none, since a store does not say which it kept.
        seconds: how long it took on its thread.
    """

    job_id: int
    is_load: bool
    keys: Sequence[bytes]
    done: Sequence[bytes]
    seconds: float


@dataclass
class TierCounts:
    """What happened since the start.

    Attributes:
        num_damaged: frames that were there and were not what was asked for; each was a miss.
        num_errors: calls that the store failed.
        use: what the store held when it was looked at last.
    """

    num_damaged: int = 0
    num_errors: int = 0
    use: StoreUse = field(default_factory=lambda: StoreUse(-1, -1, 0))


class _Job(NamedTuple):
    job_id: int
    is_load: bool
    moves: list[ChunkMove]


class TierJobs:
    """Runs jobs. Loads go first: somebody waits for them. One of several threads does loads alone.

    Args:
        store: where chunks are kept. It is not closed with this.
        num_threads: how many jobs are run at once.
        clock: seconds, monotonic.

    Attributes:
        counts: what happened so far; read by any thread.
    """

    def __init__(self, store: BlockStore, num_threads: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts = TierCounts()
        self._store = store
        self._clock = clock
        self._lock = threading.Condition()  # guards all below
        self._loads: deque[_Job] = deque()
        self._stores: deque[_Job] = deque()
        self._ended: list[EndedJob] = []
        self._num_open = 0
        self._closed = False
        self._look_at = clock()
        self._look()
        self._threads = [
            threading.Thread(
                target=self._work,
                args=(index == 0 and num_threads > 1,),
                name=f"pagefold-tier-{index}",
                daemon=True,
            )
            for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job_id: int, moves: list[ChunkMove], *, is_load: bool) -> None:
        """Hand over a job. Its rows belong to it until it has ended."""
        with self._lock:
            self._num_open += 1
            (self._loads if is_load else self._stores).append(_Job(job_id, is_load, moves))
            self._lock.notify_all()

    def take_ended(self) -> list[EndedJob]:
        """Return the jobs that have ended since the last call. Waits for nothing."""
        with self._lock:
            ended, self._ended = self._ended, []
            return ended

    def drain(self) -> None:
        """Wait until no job is open. What has ended is still to be taken."""
        with self._lock:
            self._lock.wait_for(lambda: not self._num_open)

    def close(self) -> None:
        """End: what is begun is finished, what waits has failed. Again does nothing."""
        with self._lock:
            self._closed = True
            for waiting in (self._loads, self._stores):
                while waiting:
                    self._end(waiting.popleft(), [], 0.0)
            self._lock.notify_all()
        for thread in self._threads:
            thread.join()

    # Inside.

    def _work(self, loads_alone: bool) -> None:  # noqa: FBT001 - of one caller
        while (job := self._next(loads_alone)) is not None:
            begin = self._clock()
            try:
                done = self._load(job.moves) if job.is_load else self._keep(job.moves)
            except Exception as error:  # noqa: BLE001 - whatever a store does, vLLM goes on without it
                done = []
                self._failed(error)
            with self._lock:
                self._end(job, done, self._clock() - begin)
            self._look_again()

    def _next(self, loads_alone: bool) -> _Job | None:  # noqa: FBT001 - of one caller
        with self._lock:
            while True:
                if self._loads:
                    return self._loads.popleft()
                if self._stores and not loads_alone:
                    return self._stores.popleft()
                if self._closed:
                    return None
                self._lock.wait()

    def _end(self, job: _Job, done: Sequence[bytes], seconds: float) -> None:
        """Note the end of a job; with the lock."""
        self._ended.append(EndedJob(job.job_id, job.is_load, [move.key for move in job.moves], done, seconds))
        self._num_open -= 1
        self._lock.notify_all()

    def _load(self, moves: list[ChunkMove]) -> list[bytes]:
        """Bring all that is there: what is missing in the middle does not end it."""
        done: list[bytes] = []
        begin = 0
        while begin < len(moves):
            results = self._store.get([Get(move.name, move.row) for move in moves[begin:]])
            missing = len(moves)
            for index, result in enumerate(results, start=begin):
                if isinstance(result, MissCause):
                    missing = index
                    self._missed(result)
                    break
                done.append(moves[index].key)
            begin = missing + 1
        return done

    def _keep(self, moves: list[ChunkMove]) -> list[bytes]:
        num_kept = 0
        for begin in range(0, len(moves), _PUT_AT_ONCE):
            puts = [Put(move.name, move.row, checksum_of(move.row)) for move in moves[begin : begin + _PUT_AT_ONCE]]
            num_kept += self._store.put(puts)
        return [move.key for move in moves] if num_kept == len(moves) else []

    def _missed(self, cause: MissCause) -> None:
        with self._lock:
            self.counts.num_damaged += cause in _SERIOUS
            self.counts.num_errors += cause is MissCause.IO_ERROR

    def _failed(self, error: Exception) -> None:
        with self._lock:
            self.counts.num_errors += 1
            is_first = self.counts.num_errors == 1
        (_log.warning if is_first else _log.debug)("the tier's store failed: %s", error)

    def _look_again(self) -> None:
        with self._lock:
            if self._closed or self._clock() < self._look_at:
                return
            self._look_at = self._clock() + _LOOK_EVERY_S
        self._look()

    def _look(self) -> None:
        try:
            self.counts.use = self._store.use()
        except Exception as error:  # noqa: BLE001 - as above
            self._failed(error)
