"""Remote stores on loopback: how fast blocks come from Redis and from Mooncake, beside plain bytes over TCP.

Rows, for blocks of SmolLM2-135M-Instruct in float32 (737,280 bytes), one thread:

* tcp: another process sends the same bytes over one connection, and they are read to where they are to be;
* redis, mooncake: get and put of as many blocks, checks included, over the plain copy of the same repeat.

The servers are started for it, and share the machine's cores with who asks them: between machines it is the network
that counts. What is not installed is left out.

    python benchmarks/remote_store.py [--repeats 5] [--json FILE]
"""

from __future__ import annotations

import contextlib
import multiprocessing
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from report import Row, machine, parser, print_report
from rich.console import Console
from rich.progress import track

from pagefold.store.frame import BlockName, FrameFormat, checksum_of
from pagefold.store.protocol import Get, Put
from pagefold.store.remote import open_remote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from pagefold.store.guarded import GuardedStore

BLOCK_BYTES = 737_280  # of SmolLM2: 16 tokens, 30 layers, 3 KV heads, K and V of 64 float32 each
NUM_BLOCKS = 64
POOL_GIB = 0.25
FORM = FrameFormat(b"benchmark".ljust(32), BLOCK_BYTES, 64)


def blocks(rng: np.random.Generator) -> list[Put]:
    """Return random blocks of one path."""
    puts, parent = [], bytes(32)
    for _ in range(NUM_BLOCKS):
        payload = memoryview(rng.bytes(BLOCK_BYTES))
        name = BlockName(rng.bytes(32), parent, bytes(32), rng.bytes(64))
        puts.append(Put(name, payload, checksum_of(payload)))
        parent = name.digest
    return puts


def free_port() -> int:
    """Return a port that nobody uses now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def send_when_asked(listener: socket.socket) -> None:
    """Be the peer of the plain copy: send all blocks for each byte that comes."""
    data = np.random.default_rng(0).bytes(BLOCK_BYTES)
    connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while connection.recv(1):
        for _ in range(NUM_BLOCKS):
            connection.sendall(data)


@contextlib.contextmanager
def plain_copy() -> Iterator[Callable[[], None]]:
    """Yield a copy of all blocks from another process."""
    into = [memoryview(bytearray(BLOCK_BYTES)) for _ in range(NUM_BLOCKS)]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = multiprocessing.get_context("fork").Process(target=send_when_asked, args=(listener,), daemon=True)
        peer.start()
        with socket.create_connection(listener.getsockname()) as connection:

            def copy() -> None:
                connection.sendall(b"x")
                for part in into:
                    left = part
                    while len(left):
                        left = left[connection.recv_into(left) :]

            yield copy
        peer.join()


@contextlib.contextmanager
def serving(command: list[str], port: int) -> Iterator[None]:
    """Run a server until the end."""
    with tempfile.TemporaryDirectory() as folder:
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(command, stdout=quiet, stderr=quiet, cwd=folder)
        try:
            for _ in range(200):
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                time.sleep(0.05)
            yield
        finally:
            process.kill()
            process.wait()


@contextlib.contextmanager
def opened(url: str) -> Iterator[GuardedStore]:
    """Open a store that answers."""
    store = open_remote(url, FORM, timeout_s=30)
    try:
        store.connect()
        yield store
    finally:
        store.close()


@contextlib.contextmanager
def redis() -> Iterator[GuardedStore]:
    """Open a store in a new server."""
    program = shutil.which("redis-server") or shutil.which("valkey-server")
    if program is None:
        raise FileNotFoundError
    port = free_port()
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    with serving(command, port), opened(f"redis://127.0.0.1:{port}") as store:
        yield store


@contextlib.contextmanager
def mooncake() -> Iterator[GuardedStore]:
    """Open a store in a new cluster, whose memory is that of another process."""
    found = find_spec("mooncake")
    if found is None or not found.submodule_search_locations:
        raise FileNotFoundError
    port, metrics_port = free_port(), free_port()
    command = [str(Path(found.submodule_search_locations[0]) / "mooncake_master"), f"-rpc_port={port}"]
    command += ["-rpc_address=127.0.0.1", "-metrics_host=127.0.0.1", f"-metrics_port={metrics_port}"]
    url = f"mooncake://127.0.0.1:{port}"
    with serving(command, port), opened(f"{url}?segment_gib={POOL_GIB}"), opened(url) as store:
        yield store


def seconds(what: Callable[[], object]) -> float:
    """Return how long a call takes."""
    begin = time.perf_counter()
    what()
    return time.perf_counter() - begin


def measure(name: str, store: GuardedStore, copy: Callable[[], None], repeats: int) -> list[Row]:
    """Return the rows of a store."""
    puts = blocks(np.random.default_rng(1))
    gets = [Get(put.name, memoryview(bytearray(BLOCK_BYTES))) for put in puts]
    copied, got, kept = [], [], []
    for repeat in track(range(repeats + 1), name, console=Console(stderr=True), transient=True):
        put_s = seconds(lambda: store.put(puts))
        copy_s = seconds(copy)
        get_s = seconds(lambda: store.get(gets))
        if [get.into for get in gets] != [put.payload for put in puts]:
            msg = f"{name} did not return what was put"
            raise RuntimeError(msg)
        for get in gets:
            get.into[:] = bytes(BLOCK_BYTES)
        store.clear()
        if repeat:  # the first touches memory for the first time
            copied.append(copy_s)
            kept.append(put_s)
            got.append(get_s)
    num_bytes = NUM_BLOCKS * BLOCK_BYTES

    def row(what: str, taken: list[float]) -> Row:
        ratio = statistics.median(plain / one for plain, one in zip(copied, taken, strict=True))
        speed = num_bytes / statistics.median(taken) / 1e9
        plain = num_bytes / statistics.median(copied) / 1e9
        values = {"over_tcp": ratio, "gb_per_s": speed, "tcp_gb_per_s": plain}
        return Row(
            f"{name}: {what}, of plain TCP's speed", "", f"{ratio:.2f} ({speed:.2f} of {plain:.2f} GB/s)", None, values
        )

    return [row("get", got), row("put", kept)]


def main() -> None:
    """Measure, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("--repeats", type=int, default=5)
    args = arguments.parse_args()
    where = machine()
    rows: list[Row] = []
    with plain_copy() as copy:
        for name, make in (("redis", redis), ("mooncake", mooncake)):
            try:
                with make() as store:
                    rows += measure(name, store, copy, args.repeats)
            except FileNotFoundError:
                rows.append(Row(f"{name}: not installed", "", "-"))
    with contextlib.suppress(PackageNotFoundError):
        where["mooncake"] = version("mooncake-transfer-engine-non-cuda")
    print_report("remote_store", rows, where, args.json)


if __name__ == "__main__":
    main()
