"""Deadline: until when a call may take, and calls that cannot be interrupted, ended for those who wait for them."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from queue import SimpleQueue
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Deadline", "Workers"]

_T = TypeVar("_T")


class Deadline:
    """A moment, so many seconds from now. What takes several waits gives each the seconds that are left.

    Args:
        timeout_s: from now.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s

    def left_s(self) -> float:
        """Return the seconds that are left: more than none.

        Raises:
            TimeoutError: none are.
        """
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError(self.told())
        return left

    def told(self) -> str:
        """Return what to say when it has passed."""
        return f"no answer within {self.timeout_s:g} s"


class _Task(Generic[_T]):
    def __init__(self, what: Callable[[], _T]) -> None:
        self.what = what
        self.future: Future[_T] = Future()


class Workers:
    """Threads for calls that block and cannot be interrupted: name servers, native libraries.

    A caller waits for its call no longer than its deadline. The call itself goes on until it returns: whatever it reads
    or writes must belong to it until then. While calls that nobody waits for any more fill all threads, further calls
    fail at once.

    Args:
        num_threads: at most, made as they are needed.
        name: of the threads.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._most = num_threads
        self._name = name
        self._tasks: SimpleQueue[_Task[object] | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._num_threads = self._num_busy = 0
        self._closed = False

    def call(self, what: Callable[[], _T], deadline: Deadline) -> _T:
        """Return what ``what()`` returns, or raise what it raises.

        Raises:
            TimeoutError: it has not ended by the deadline, or no thread is free. A call that was begun goes on.
        """
        task = _Task(what)
        with self._lock:
            if self._closed:
                msg = "it was closed"
                raise TimeoutError(msg)
            if self._num_busy == self._most:
                msg = f"all {self._most} calls that may be under way still are"
                raise TimeoutError(msg)
            self._num_busy += 1
            if self._num_busy > self._num_threads:
                self._num_threads += 1
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
        self._tasks.put(task)  # type: ignore[arg-type]  # a task takes its own result back
        try:
            return task.future.result(deadline.left_s())
        except FutureTimeoutError:
            if task.future.done():  # what it raised itself
                raise
            raise TimeoutError(deadline.told()) from None

    def close(self) -> None:
        """End the threads once their calls have ended; waits for none. Again does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for _ in range(self._num_threads):
                self._tasks.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            result: object = None
            error: BaseException | None = None
            try:
                result = task.what()
            except BaseException as caught:  # noqa: BLE001  # the caller's to judge
                error = caught
            with self._lock:  # before the caller goes on: it may call again at once
                self._num_busy -= 1
            if error is None:
                task.future.set_result(result)
            else:
                task.future.set_exception(error)
            del task, result, error  # a thread that waits keeps nothing alive
