"""Real servers on loopback for the tests, ended by their own process ids; and blocks to store in them."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from pagefold.store.frame import BlockName, FrameFormat, checksum_of
from pagefold.store.protocol import Get, Put

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PATIENCE_S = 60.0
"""How long anything may take before a test gives up: for a machine that is busy, not for a measurement."""
REDIS_SERVER = shutil.which("redis-server") or shutil.which("valkey-server")
NO_REDIS = "needs redis-server or valkey-server (Debian: apt-get install redis-server)"


def until(condition: Callable[[], object], what: str) -> None:
    """Wait for something that another thread or process is about to do."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {PATIENCE_S} s for {what}"
        time.sleep(0.005)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Stop a process, all its threads, as if its machine hung; let it go on afterwards."""
    os.kill(pid, signal.SIGSTOP)
    try:
        threads = Path(f"/proc/{pid}/task")
        until(lambda: all("State:\tT" in (t / "status").read_text() for t in threads.iterdir()), "threads to stop")
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


class Server:
    """A process that listens on a port, and can be stopped for a while, killed and started again."""

    def __init__(self, command: list[str], port: int, log: Path) -> None:
        self._command, self.port, self._log = command, port, log
        self.process: subprocess.Popen | None = None
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log, cwd=self._log.parent)
        until(self._listens, f"a server to listen; {self._log} says why not")

    def _listens(self) -> bool:
        assert self.process.poll() is None, self._log.read_text(errors="replace")
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
            return True
        return False

    def frozen(self) -> contextlib.AbstractContextManager[None]:
        return frozen(self.process.pid)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def redis_server(folder: Path, *flags: str, tls: bool = False) -> Iterator[Server]:
    port = free_port()
    listen = ["--port", "0", "--tls-port", str(port)] if tls else ["--port", str(port)]
    quiet = ["--save", "", "--appendonly", "no", "--bind", "127.0.0.1"]
    server = Server([REDIS_SERVER, *listen, *quiet, *flags], port, folder / f"redis-{port}.log")
    try:
        yield server
    finally:
        server.kill()


def _mooncake_master() -> Path | None:
    """Return the program that the package brings, if its client can be loaded here."""
    found = find_spec("mooncake")
    folder = next(iter(found.submodule_search_locations or []), None) if found else None
    if folder is None:
        return None
    loads = subprocess.run([sys.executable, "-c", "import mooncake.store"], capture_output=True, check=False)
    return None if loads.returncode else Path(folder) / "mooncake_master"


MOONCAKE_MASTER = _mooncake_master()
NO_MOONCAKE = "needs the extra mooncake, and Debian's libibverbs1 librdmacm1 libnuma1"


@contextlib.contextmanager
def mooncake_master(folder: Path, *flags: str, port: int = 0) -> Iterator[Server]:
    port, metrics_port = port or free_port(), free_port()
    own = [f"-rpc_port={port}", f"-metrics_port={metrics_port}", "-rpc_address=127.0.0.1", "-metrics_host=127.0.0.1"]
    server = Server([str(MOONCAKE_MASTER), *own, *flags], port, folder / f"mooncake-{port}.log")
    try:
        yield server
    finally:
        server.kill()


FORM = FrameFormat(layout=b"L" * 32, block_bytes=30_000, key_bytes=64)


def path(num: int, *, namespace: bytes = b"N", seed: int = 0, form: FrameFormat = FORM) -> list[Put]:
    """Return the blocks of one path, of random bytes."""
    rng = np.random.default_rng(seed)
    parent, puts = namespace * 32, []
    for _ in range(num):
        name = BlockName(rng.bytes(32), parent, namespace * 32, rng.bytes(form.key_bytes))
        payload = memoryview(rng.bytes(form.block_bytes))
        puts.append(Put(name, payload, checksum_of(payload)))
        parent = name.digest
    return puts


def gets_of(puts: list[Put]) -> list[Get]:
    """Return gets for blocks, each into memory of its own full of something else."""
    return [Get(put.name, memoryview(bytearray(b"\xaa" * len(put.payload)))) for put in puts]


def came_back(puts: list[Put], gets: list[Get], found: list) -> bool:
    """Return whether all came back as they were."""
    return found == [put.checksum for put in puts] and all(g.into == p.payload for p, g in zip(puts, gets, strict=True))


def num_threads_named(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())
