"""BodyChecker: turns bodies into checked requests without holding the event loop for long, whatever is in them."""

from __future__ import annotations

import asyncio
import json
import logging
import pickle
import queue
import socket
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from fastapi.exceptions import RequestValidationError

from pagefold.errors import EngineStoppedError, InvalidRequestError
from pagefold.server.checking import ANSWER_HEAD, Answer
from pagefold.server.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Callable

    from pydantic import BaseModel

__all__ = ["BodyChecker", "UnreadableBodyError"]

_log = logging.getLogger(__name__)

_TINY_BYTES = 4 * 2**10
"""Bodies up to this size take a millisecond or two, whatever is in them; they are the most."""
_SMALL_BYTES = 64 * 2**10
"""Up to this size some 20 ms; larger ones are checked in another process."""

_NUM_PROCESSES = 2
_TIME_LIMIT_S = 20.0
"""How long a body may take to be checked: 4 MB of the worst kind take about one second."""
_START_LIMIT_S = 120.0
_MEMORY_BYTES = 2**30
_MEMORY_PER_BYTE = 64
"""What a process may take: this, and so much for a byte of a body. Objects take up to 40."""

_PROGRAM = "import sys; sys.path[:] = sys.argv[1:-1]; from pagefold.server.checking import serve; serve()"


class UnreadableBodyError(Exception):
    """The body is no UTF-8, or nests without end."""


class BodyChecker:
    """Checks bodies: small ones here, one after another; large ones in processes that have nothing else to do.

    The processes start when the first large body comes, or with :meth:`start`. One that ends in the middle of a body is
    replaced, and the body is tried once more.

    Args:
        max_body_bytes: no body is larger.
    """

    def __init__(self, max_body_bytes: int) -> None:
        self._turns = Turns()
        self._threads = ThreadPoolExecutor(_NUM_PROCESSES, "pagefold-bodies")  # each waits for one process
        self._processes: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        self._all: list[_Process] = []
        self._is_closed = False
        for _ in range(_NUM_PROCESSES):
            self._all.append(_Process(_MEMORY_BYTES + _MEMORY_PER_BYTE * max_body_bytes))
            self._processes.put(self._all[-1])

    @property
    def pids(self) -> list[int]:
        """The ids of the processes that run."""
        return [process.pid for process in self._all if process.pid is not None]

    def start(self) -> None:
        """Start the processes before they are needed: what they take is taken from the start."""
        for _ in self._all:
            self._threads.submit(self._start_one)

    def close(self) -> None:
        """End the processes; bodies that are being checked are given up."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for process in self._all:
            process.kill()

    async def read(self, body: bytes, model: type[BaseModel]) -> Any:  # noqa: ANN401 - whatever the JSON was
        """Return a body as JSON that is still to be checked, if it is small; else as a ``model``.

        Raises:
            JSONDecodeError: it is no JSON.
            UnreadableBodyError: it is no text, or nests too deep.
            RequestValidationError, InvalidRequestError: it is no ``model``.
            EngineStoppedError: the process that should check it does not start.
        """
        if len(body) > _SMALL_BYTES:
            name = f"{model.__module__}:{model.__qualname__}"
            loop = asyncio.get_running_loop()
            pickled = await loop.run_in_executor(self._threads, self._ask, name, body)
            await self._turns.take()
            return _told(pickle.loads(pickled))  # noqa: S301 - by a process of our own
        if len(body) > _TINY_BYTES:
            await self._turns.take()
        try:
            return json.loads(body)
        except json.JSONDecodeError:
            raise
        except (ValueError, RecursionError):
            raise UnreadableBodyError from None

    def _start_one(self) -> None:
        self._renew(self._processes.get())

    def _renew(self, process: _Process) -> None:
        """Start a process that does not run, and let it be used."""
        try:
            if not self._is_closed:
                process.ensure_started()
        except (OSError, EngineStoppedError) as error:
            if not self._is_closed:
                _log.warning("%s", error)
        finally:
            process.is_worn = False
            self._processes.put(process)
            if self._is_closed:  # it may have started while it was closed
                process.kill()

    def _ask(self, name: str, body: bytes) -> bytes:
        """Have a process check a body; on a thread of ours, of which there are as many as processes."""
        process = self._processes.get()
        try:
            for _ in range(2):  # whatever ended it may have been something else
                if self._is_closed:
                    msg = "The server is shutting down."
                    raise EngineStoppedError(msg, remedy="Try another replica, or again later.")
                process.ensure_started()
                answer = process.ask(name, body)
                if answer is not None:
                    return answer
        finally:
            if process.is_worn:  # on no thread of ours: all of them may wait for it
                threading.Thread(target=self._renew, args=(process,), name="pagefold-renew", daemon=True).start()
            else:
                self._processes.put(process)
        msg = f"The body could not be read within {_TIME_LIMIT_S:g} s, or ended the process that reads it."
        raise InvalidRequestError(msg, remedy="Send less in one request.")


def _told(answer: Answer) -> BaseModel:
    """Return the checked request, or raise what is wrong with it."""
    if answer.asked is not None:
        return answer.asked
    if answer.json_error is not None:
        raise json.JSONDecodeError(answer.json_error[0], "", answer.json_error[1])
    if answer.is_unreadable:
        raise UnreadableBodyError
    if answer.invalid is not None:
        raise RequestValidationError([answer.invalid])
    if answer.refused is not None:
        raise answer.refused
    msg = f"A body could not be checked:\n{answer.fault}"
    raise RuntimeError(msg)


class _Process:
    """A process that checks, as the server sees it. One thread at a time may use it.

    Attributes:
        pid: of the process, while it runs.
        is_worn: whether it has grown so much that another should take its place.
    """

    def __init__(self, max_memory_bytes: int) -> None:
        self.pid: int | None = None
        self._max_memory_bytes = max_memory_bytes
        self._connection: socket.socket | None = None
        self._end_process: Callable[[], object] | None = None
        self.is_worn = False

    def ensure_started(self) -> None:
        """Start it if it does not run.

        Raises:
            EngineStoppedError: it does not start.
        """
        if self._connection is not None:
            return
        ours, theirs = socket.socketpair()
        with theirs:
            arguments = (*sys.path, f"{theirs.fileno()},{self._max_memory_bytes}")
            process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-c", _PROGRAM, *arguments], stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )
        self._connection, self.pid, self.is_worn = ours, process.pid, False
        self._end_process = weakref.finalize(self, _end_process, process, ours)
        ours.settimeout(_START_LIMIT_S)
        try:
            has_started = ours.recv(1) == b"\n"
        except OSError:
            has_started = False
        if not has_started:
            self._end()
            msg = "The process that checks large bodies does not start."
            raise EngineStoppedError(msg, remedy="Try again; the server's log may tell more.")

    def ask(self, name: str, body: bytes) -> bytes | None:
        """Return the answer, or None if the process has ended or takes too long."""
        assert self._connection is not None
        deadline = time.monotonic() + _TIME_LIMIT_S
        try:
            self._send(f"{name} {len(body)}\n".encode(), deadline)
            self._send(body, deadline)
            self.is_worn, num_bytes = ANSWER_HEAD.unpack(self._receive(ANSWER_HEAD.size, deadline))
            answer = self._receive(num_bytes, deadline)
        except OSError:  # it has ended, or the time is up
            self._end()
            return None
        if self.is_worn:
            self._end()
        return answer

    def kill(self) -> None:
        """End it, from any thread: who waits for its answer gets none."""
        end_process = self._end_process
        if end_process is not None:
            end_process()

    def _send(self, data: bytes, deadline: float) -> None:
        assert self._connection is not None
        self._connection.settimeout(max(0.001, deadline - time.monotonic()))
        self._connection.sendall(data)

    def _receive(self, num_bytes: int, deadline: float) -> bytes:
        assert self._connection is not None
        received = bytearray(num_bytes)
        left = memoryview(received)
        while left:
            self._connection.settimeout(max(0.001, deadline - time.monotonic()))
            num_new = self._connection.recv_into(left)
            if not num_new:
                msg = "the process has ended"
                raise ConnectionResetError(msg)
            left = left[num_new:]
        return bytes(received)

    def _end(self) -> None:
        if self._end_process is not None:
            self._end_process()
        self._connection = self._end_process = self.pid = None


def _end_process(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    process.kill()
    process.wait()
    connection.close()
