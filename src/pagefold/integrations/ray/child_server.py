"""ChildServer: ``pagefold serve`` as a process of its own, which lives no longer than who has started it wants."""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import threading
from collections import deque
from typing import TYPE_CHECKING

from pagefold.config import environment_metrics_key
from pagefold.errors import PagefoldError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["ChildServer", "ServerNotStartedError"]

_READY = re.compile(r"ready on (http://\S+)")
_TIED = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG, which stays over exec
    if os.getppid() != int(sys.argv[1]):
        sys.exit("who has started this server has gone")
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""
"""Ends the server when whoever has started it is killed. (Popen's ``preexec_fn`` is not safe beside threads.)"""

_NUM_LINES = 20
"""Lines that are told of a server which has not started."""


class ServerNotStartedError(PagefoldError):
    """A replica's server has ended before it was ready."""


class ChildServer:
    """A server on a free port of this machine's loopback.

    Args:
        arguments: of ``pagefold serve``; host and port are chosen here.
        log: gets every line that it prints.

    Attributes:
        metrics_key: what its ``/metrics`` asks for; None where that is open to everybody.
    """

    def __init__(self, arguments: Sequence[str], log: Callable[[str], None]) -> None:
        self.metrics_key = _value_of("--metrics-key", arguments) or environment_metrics_key()
        if self.metrics_key is None and _value_of("--api-key-file", arguments) is not None:
            self.metrics_key = secrets.token_urlsafe(16)  # else it would be the admin's alone
        keys = {} if self.metrics_key is None else {"PAGEFOLD_METRICS_KEY": self.metrics_key}
        server = ["-m", "pagefold.cli", "serve", *arguments, "--host", "127.0.0.1", "--port", "0"]
        self._process = subprocess.Popen(  # noqa: S603 - our own server
            [sys.executable, "-c", _TIED, str(os.getpid()), *server],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **keys},
        )
        self._log = log
        self._last: deque[str] = deque(maxlen=_NUM_LINES)
        self._is_told = threading.Event()
        self._url = ""
        self._reader = threading.Thread(target=self._read, name="pagefold-server-lines", daemon=True)
        self._reader.start()

    @property
    def is_alive(self) -> bool:
        """Whether the process is there."""
        return self._process.poll() is None

    def wait_until_ready(self) -> str:
        """Return its address when it takes requests, however long that lasts.

        Raises:
            ServerNotStartedError: it has ended instead.
        """
        self._is_told.wait()
        if not self._url:
            self._process.wait()
            said = " ".join(line.strip() for line in self._last)
            msg = f"The server has ended with exit code {self._process.returncode}. It said: {said}"
            raise ServerNotStartedError(msg, remedy="Start it by itself: pagefold serve, with the same flags.")
        return self._url

    def stop(self) -> int:
        """Let it finish what it has, as long as its own ``--shutdown-timeout`` allows, and return its exit code."""
        if self.is_alive:
            self._process.send_signal(signal.SIGTERM)
        return self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._last.append(line)
                self._log(line.rstrip("\n"))
                found = _READY.search(line)
                if found and not self._url:
                    self._url = found[1]
                    self._is_told.set()
        self._is_told.set()


def _value_of(flag: str, arguments: Sequence[str]) -> str | None:
    """Return the value that a flag has among arguments; None if it is not there."""
    for place, argument in enumerate(arguments):
        name, has_value, value = argument.partition("=")
        if name == flag:
            return value if has_value else next(iter(arguments[place + 1 :]), None)
    return None
