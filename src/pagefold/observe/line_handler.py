"""LineHandler: a logging handler whose lines are written by a thread of its own.

Whoever reads the log may stop: a full pipe, a terminal where somebody selects text. Then this thread waits, and not the
event loop with everybody's streams.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from typing import Protocol

__all__ = ["LineHandler"]

_MAX_LINES = 10_000
_FLUSH_S = 1.0


class _File(Protocol):
    def write(self, data: bytes, /) -> int | None: ...


class LineHandler(logging.Handler):
    """Formats where it is called, and writes elsewhere. More lines than may wait are dropped, and counted in the log.

    Args:
        file: unbuffered, so that nobody holds a lock of it while a write waits.
    """

    def __init__(self, file: _File) -> None:
        super().__init__()
        self._file = file
        self._lines: queue.Queue[str] = queue.Queue(_MAX_LINES)
        self._num_lost = 0
        threading.Thread(target=self._write_all, name="pagefold-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record's line."""
        try:
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self._num_lost += 1
        except Exception:  # noqa: BLE001 - as the standard library's handlers: a log ends nobody's work
            self.handleError(record)

    def flush(self) -> None:
        """Wait until all is written, for a second at most; Python does this at its exit."""
        with self._lines.all_tasks_done:
            self._lines.all_tasks_done.wait_for(lambda: not self._lines.unfinished_tasks, _FLUSH_S)

    def _write_all(self) -> None:
        while True:
            self._write(self._lines.get())
            if self._num_lost:
                self._write(self._loss())
            self._lines.task_done()

    def _loss(self) -> str:
        assert self.lock is not None, "every handler has made one"
        with self.lock:  # emit() runs under it
            num_lost, self._num_lost = self._num_lost, 0
        what = "%d lines of the log are lost: they came faster than they were read"
        return self.format(logging.LogRecord(__name__, logging.WARNING, __file__, 0, what, (num_lost,), None))

    def _write(self, line: str) -> None:
        rest = f"{line}\n".encode(errors="backslashreplace")
        with contextlib.suppress(OSError, ValueError):  # nobody is there to be told
            while rest:
                rest = rest[self._file.write(rest) or 0 :]
