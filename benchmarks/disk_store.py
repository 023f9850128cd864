"""The disk store: how fast blocks come back from a disk, checked, beside a plain sequential read of the same disk.

Rows, for blocks of SmolLM2-135M (737,280 bytes) and for small ones (65,536 bytes), on this machine's disk:

* restore: a conversation's blocks by ``DiskStore.get`` over the same files read one piece of 4 MiB after another past
  the system's cache (O_DIRECT, an aligned buffer), in ABBA pairs: their median. What four threads that only read reach
  together is shown beside it;
* restore to memory that direct I/O cannot read into, which costs a copy more;
* write: ``DiskStore.put`` over writing a new file likewise, only to compare;
* latency: one block.

    python benchmarks/disk_store.py [--folder FOLDER] [--mib 256] [--repeats 5] [--json FILE]
"""

from __future__ import annotations

import hashlib
import os
import shutil
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from report import Row, machine, parser, print_report

from pagefold.store.disk import DiskStore
from pagefold.store.frame import BlockName, FrameFormat, checksum_of
from pagefold.store.protocol import Get, Put

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCKS = {"SmolLM2": 737_280, "small": 65_536}
KEY_BYTES = 64
RAW_BYTES = 2**22
NUM_LATENCIES = 20


def aligned(num_bytes: int) -> np.ndarray:
    """Return bytes at an address that direct I/O takes, present in memory."""
    memory = np.zeros(num_bytes + 4096, np.uint8)
    begin = -memory.ctypes.data % 4096
    memory[:] = 1
    return memory[begin : begin + num_bytes]


def seconds(what: Callable[[], object]) -> float:
    """Return how long a call takes."""
    begin = time.perf_counter()
    what()
    return time.perf_counter() - begin


class RawFiles:
    """Files read one piece after another, and nothing done with what was read.

    Args:
        folder: all segments below it.
        into: where to, and then again from its begin: the very memory that blocks go to, since huge pages are faster.
        direct: whether past the system's cache.
    """

    def __init__(self, folder: Path, into: np.ndarray, *, direct: bool) -> None:
        flags = os.O_RDWR | (os.O_DIRECT if direct else 0)
        self._fds = [os.open(file, flags) for file in sorted(folder.rglob("*.frames"))]
        self._pieces = [(fd, offset) for fd in self._fds for offset in range(0, os.fstat(fd).st_size, RAW_BYTES)]
        self.num_bytes = sum(os.fstat(fd).st_size for fd in self._fds)
        self._into = into

    def read(self, index: int = 0, step: int = 1) -> None:
        """Read all of it, or each so many pieces."""
        room = len(self._into) // RAW_BYTES
        for number, (fd, offset) in list(enumerate(self._pieces))[index::step]:
            at = number % room * RAW_BYTES
            os.preadv(fd, [self._into[at : at + RAW_BYTES]], offset)

    def read_by_four(self) -> None:
        """Read all of it by four threads."""
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(lambda index: self.read(index, 4), range(4)))

    def drop(self) -> None:
        """Have the system's cache forget it."""
        for fd in self._fds:
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close all files."""
        for fd in self._fds:
            os.close(fd)


def raw_write(file: Path, num_bytes: int, *, direct: bool) -> float:
    """Return bytes a second of writing a new file, one piece after another, to room that is kept for it."""
    fd = os.open(file, os.O_RDWR | os.O_CREAT | (os.O_DIRECT if direct else 0))
    piece = aligned(RAW_BYTES)
    begin = time.perf_counter()
    os.posix_fallocate(fd, 0, num_bytes)
    for offset in range(0, num_bytes, RAW_BYTES):
        os.pwritev(fd, [piece], offset)
    taken = time.perf_counter() - begin
    os.close(fd)
    file.unlink()
    return num_bytes / taken


def conversation(num: int, block_bytes: int) -> list[Put]:
    """Return random blocks of one path."""
    parent = bytes(32)
    puts = []
    memory = aligned(num * block_bytes).reshape(num, block_bytes)
    memory[:] = np.frombuffer(np.random.default_rng(0).bytes(memory.size), np.uint8).reshape(memory.shape)
    for index, payload in enumerate(memory):
        key = index.to_bytes(KEY_BYTES, "little")
        digest = hashlib.sha256(parent + key).digest()
        puts.append(Put(BlockName(digest, parent, bytes(32), key), payload.data, checksum_of(payload.data)))
        parent = digest
    return puts


def measure(name: str, folder: Path, num_mib: int, repeats: int) -> list[Row]:
    """Return the rows of one size of blocks."""
    block_bytes = BLOCKS[name]
    puts = conversation(num_mib * 2**20 // block_bytes, block_bytes)
    num_bytes = len(puts) * block_bytes
    back = aligned(num_bytes).reshape(len(puts), block_bytes)
    gets = [Get(put.name, into.data) for put, into in zip(puts, back, strict=True)]
    anywhere = aligned(num_bytes + 64)[64:].reshape(back.shape)
    gets_anywhere = [Get(put.name, into.data) for put, into in zip(puts, anywhere, strict=True)]
    wanted = [put.checksum for put in puts]
    store = DiskStore(folder / "cache", 2 * num_bytes + 2**25, FrameFormat(b"?" * 32, block_bytes, KEY_BYTES))
    direct = not store.why_not_direct
    found: dict[str, list[float]] = {
        key: [] for key in ("raw write", "put", "raw", "get", "raw by four", "unaligned", "one")
    }
    for _ in range(repeats):
        store.clear()
        raw_bytes = num_mib * 2**20 // RAW_BYTES * RAW_BYTES
        found["raw write"].append(raw_write(folder / "raw", raw_bytes, direct=direct))
        found["put"].append(num_bytes / seconds(lambda: store.put(puts)))
        raw = RawFiles(folder / "cache", back.reshape(-1), direct=direct)
        taken = {"raw": 0.0, "get": 0.0}
        for name_of in ("raw", "get", "get", "raw"):  # whatever changes meanwhile, changes for both
            raw.drop()
            taken[name_of] += seconds(raw.read if name_of == "raw" else lambda: store.get(gets))
        found["raw"].append(2 * raw.num_bytes / taken["raw"])
        found["get"].append(2 * num_bytes / taken["get"])
        raw.drop()
        found["raw by four"].append(raw.num_bytes / seconds(raw.read_by_four))
        raw.drop()
        found["unaligned"].append(num_bytes / seconds(lambda: store.get(gets_anywhere)))
        assert store.get(gets) == wanted, "blocks came back wrong"
        for get in gets[:: max(1, len(gets) * repeats // NUM_LATENCIES)]:
            raw.drop()
            found["one"].append(seconds(lambda get=get: store.get([get])))
        raw.close()
    how = f"through the cache: {store.why_not_direct}" if store.why_not_direct else "O_DIRECT"
    store.close()
    shutil.rmtree(folder / "cache")

    def median(of: str) -> float:
        return statistics.median(found[of])

    by_four = statistics.median(got / plain for got, plain in zip(found["get"], found["raw by four"], strict=True))
    restored = statistics.median(got / plain for got, plain in zip(found["get"], found["raw"], strict=True))
    written = statistics.median(got / plain for got, plain in zip(found["put"], found["raw write"], strict=True))
    said = f"{name}, {block_bytes:,} bytes a block"
    speeds = f"{median('get') / 1e9:.2f} to {median('raw') / 1e9:.2f} GB/s, {how}"
    writes = f"{median('put') / 1e9:.2f} to {median('raw write') / 1e9:.2f} GB/s"
    return [
        Row(f"{said}: restore, of a raw read", ">= 0.8", f"{restored:.2f} ({speeds})", restored >= 0.8, dict(found)),
        Row(
            f"{said}: restore, of a raw read by four threads",
            "",
            f"{by_four:.2f} ({median('raw by four') / 1e9:.2f} GB/s)",
        ),
        Row(f"{said}: restore to unaligned memory", "", f"{median('unaligned') / 1e9:.2f} GB/s"),
        Row(f"{said}: write, of a raw write", "", f"{written:.2f} ({writes})"),
        Row(f"{said}: one block", "", f"{1e3 * median('one'):.2f} ms"),
    ]


def main() -> None:
    """Measure, print, write."""
    arguments = parser(__doc__)
    arguments.add_argument("--folder", type=Path, help="on the disk to measure; a temporary one if not given")
    arguments.add_argument("--mib", type=int, default=256, help="of blocks, of each size")
    arguments.add_argument("--repeats", type=int, default=5)
    args = arguments.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for name in BLOCKS:
            rows += measure(name, Path(folder), args.mib, args.repeats)
    print_report("disk_store", rows, machine(), args.json)


if __name__ == "__main__":
    main()
