"""MooncakeProcess: Mooncake's client in a process of its own (``mooncake_worker.py``), seen from the server.

A call takes a *lane*: a pipe, and a part of the memory that both processes map. A call that is late is left to itself
with its lane, until its answer comes: what it may still write goes into that lane's memory, which nobody uses
meanwhile. When all lanes are lost like that, the process is ended, and its memory with it.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import subprocess
import sys
import threading
import time
from multiprocessing import Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pagefold.kv.transfers import StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from multiprocessing.connection import Connection

    from numpy.typing import NDArray

    from pagefold.store.deadline import Deadline

__all__ = ["Lane", "MooncakeProcess"]

_NUM_LANES = 4
_START_S = 60.0
"""How long it may look for its master, in the background, before it is ended and started anew."""
_END_S = 5.0


class Lane:
    """One call's way to the process.

    Attributes:
        area: uint8 ``[num_frames, frame_bytes]``: what the call puts, or where it gets.
    """

    def __init__(self, connection: Connection, area: NDArray[np.uint8]) -> None:
        self.area = area
        self._connection = connection
        self.is_owed = False

    def ask(self, verb: str, keys: Sequence[str], deadline: Deadline, sizes: Sequence[int] | None = None) -> list[int]:
        """Return what the client answers, a number a key.

        Args:
            verb: what to do.
            keys: the keys that it is asked with.
            deadline: of the answer.
            sizes: bytes of each frame that is put.

        Raises:
            TimeoutError: it has not answered in time; the lane is owed an answer.
            EOFError, OSError: the process has ended.
        """
        self._connection.send((verb, list(keys), sizes))
        self.is_owed = True
        if not self._connection.poll(deadline.left_s()):
            raise TimeoutError(deadline.told())
        answer: list[int] = self._connection.recv()
        self.is_owed = False
        return answer

    def has_answered(self) -> bool:
        """Return whether what it was owed has come, or never will; it is owed nothing then."""
        if not self._connection.poll(0):
            return False
        with contextlib.suppress(EOFError, ConnectionError):  # the next call will see it
            self._connection.recv()
        self.is_owed = False
        return True

    def close(self) -> None:
        """Close its pipe."""
        self._connection.close()


class MooncakeProcess:
    """A process that is being started, runs, or has ended. It is never started again: make another.

    Args:
        settings: for the client: ``host``, ``port``, ``local_hostname``, ``segment_bytes``, ``protocol``, ``device``.
        frame_bytes: of a frame.
        num_frames: of a lane.
    """

    def __init__(self, settings: dict[str, Any], frame_bytes: int, num_frames: int) -> None:
        self._condition = threading.Condition()
        self._starting = threading.Lock()
        self._is_ended = False
        self._started_at = time.monotonic()
        self._is_ready = False
        num_bytes = _NUM_LANES * num_frames * frame_bytes
        memory_fd = os.memfd_create("pagefold-mooncake")
        self._control, control = Pipe()
        pipes = [Pipe() for _ in range(_NUM_LANES)]
        theirs = [control, *(their for _, their in pipes)]
        try:
            os.ftruncate(memory_fd, num_bytes)
            memory = np.frombuffer(mmap.mmap(memory_fd, num_bytes), np.uint8)
            areas = memory.reshape(_NUM_LANES, num_frames, frame_bytes)
            self._lanes = [Lane(our, area) for (our, _), area in zip(pipes, areas, strict=True)]
            self._free = list(self._lanes)
            self._owed: list[Lane] = []  # their calls were late, and have not answered yet
            fds = {
                "control_fd": control.fileno(),
                "lane_fds": [their.fileno() for _, their in pipes],
                "memory_fd": memory_fd,
                "frame_bytes": frame_bytes,
            }
            script = Path(__file__).with_name("mooncake_worker.py")
            self._process = subprocess.Popen(  # noqa: S603  # our own script
                [sys.executable, "-P", str(script), json.dumps(settings | fds)],
                pass_fds=[memory_fd, *(their.fileno() for their in theirs)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # the server ends it, not the terminal
            )
        finally:
            os.close(memory_fd)
            for their in theirs:
                their.close()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def has_ended(self) -> bool:
        """Return whether another one is needed."""
        return self._process.poll() is not None

    def wait_until_ready(self, deadline: Deadline) -> None:
        """Wait until it can be asked.

        Raises:
            TimeoutError: it is not ready yet. It goes on starting, unless it has tried for long: then it was ended.
            StoreError: it cannot be, and has ended.
        """
        if self._is_ready:
            return
        if not self._starting.acquire(timeout=deadline.left_s()):
            raise TimeoutError(deadline.told())
        try:
            self._see_whether_ready(deadline)
        finally:
            self._starting.release()

    @contextlib.contextmanager
    def lane(self, deadline: Deadline) -> Iterator[Lane]:
        """Lend a lane for one call.

        Raises:
            TimeoutError: none is free.
            StoreError: the process has ended.
        """
        lane = self._take(deadline)
        try:
            yield lane
        except (EOFError, ConnectionError):
            self.end(0)
            raise StoreError(self._how_it_ended()) from None
        finally:
            with self._condition:
                (self._owed if lane.is_owed else self._free).append(lane)
                self._condition.notify()
                if self._is_ended:
                    lane.close()

    def end(self, patience_s: float = _END_S) -> None:
        """End it: kindly, unless that takes too long. Again does nothing."""
        with self._condition:
            if self._is_ended:
                return
            self._is_ended = True
            self._condition.notify_all()
        with contextlib.suppress(OSError):
            self._control.send("end")
        if self._is_ready and patience_s:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(patience_s)
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        # Whoever waits at a pipe sees it end. Only then it is closed: the number of a closed file is given out again.
        with self._starting:
            self._control.close()
        with self._condition:
            for lane in self._free + self._owed:
                lane.close()

    # Inside.

    def _see_whether_ready(self, deadline: Deadline) -> None:
        if self._is_ready:
            return
        try:
            has_told = self._control.poll(deadline.left_s())
            error = self._control.recv() if has_told else None
        except (EOFError, ConnectionError):
            error = self._how_it_ended()
        if error is None:
            if time.monotonic() - self._started_at > _START_S:
                self._process.kill()
            raise TimeoutError(deadline.told())
        if error:
            self._process.kill()
            raise StoreError(error)
        self._is_ready = True

    def _take(self, deadline: Deadline) -> Lane:
        with self._condition:
            while not self._is_ended:
                answered = [lane for lane in self._owed if lane.has_answered()]
                self._owed = [lane for lane in self._owed if lane.is_owed]
                self._free += answered
                if self._free:
                    return self._free.pop()
                if len(self._owed) == len(self._lanes):
                    break
                self._condition.wait(deadline.left_s())
        was_ended = self._is_ended
        self.end(0)
        if was_ended:
            raise StoreError(self._how_it_ended())
        msg = f"all {len(self._lanes)} calls that may be under way hang: Mooncake's client was ended"
        raise TimeoutError(msg)

    def _how_it_ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        return f"the process of Mooncake's client ended (code {self._process.returncode})"
