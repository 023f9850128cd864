"""DiskStore and processes that are killed, and that want the same folder."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest
from disk_blocks import bytes_of, checksums, count, frame_format, get, least_limit, path_of, put
from disk_writer import BLOCK_BYTES, NUM_PATHS, PATH

from pagefold.errors import ConfigError
from pagefold.kv.transfers import MissCause
from pagefold.store.disk import DiskStore
from pagefold.store.disk_index import DiskIndex
from pagefold.store.disk_lock import holder_of
from pagefold.store.disk_segments import FileCalls

LIMIT = least_limit(200, BLOCK_BYTES)
WRITER = Path(__file__).with_name("disk_writer.py")


def writer(folder, *more) -> subprocess.Popen:
    command = [sys.executable, str(WRITER), str(folder), str(LIMIT), *map(str, more)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "open\n"
    return process


def kill(process) -> int:
    """Kill a writer; return how many blocks it said it had put."""
    process.send_signal(signal.SIGKILL)
    said = process.stdout.read()
    process.wait()
    process.stdout.close()
    return sum(int(line.split()[1]) for line in said.splitlines() if line.count(" ") == 1 and line[-1].isdigit())


def crash_rounds(folder, num_rounds, num_puts, seed) -> None:
    """Have writers killed at random moments, at least so often, until so many blocks were put."""
    rng = Random(seed)
    paths = [path_of(PATH, of=of, block_bytes=BLOCK_BYTES) for of in range(NUM_PATHS)]
    done = rounds = 0
    while done < num_puts or rounds < num_rounds:
        process = writer(folder, rng.randrange(2**30))
        end = time.monotonic() + rng.uniform(0.0, 0.2)
        while time.monotonic() < end:
            assert bytes_of(folder) <= LIMIT
        done += kill(process)
        rounds += 1
        assert bytes_of(folder) <= LIMIT
        store = DiskStore(folder, LIMIT, frame_format(BLOCK_BYTES))
        assert not store.notes, "nothing is damaged"
        found = 0
        for path in paths:
            for block in path:
                if count(store, [block]):
                    assert get(store, [block]) == [block.checksum], "what it says it has is right"
                    found += 1
        assert found == store.use().num_blocks
        assert bytes_of(folder) <= LIMIT
        if rounds % 2:  # and go on, with something else in between
            assert put(store, paths[rounds % NUM_PATHS]) == PATH
        store.close()


def test_a_writer_that_is_killed_leaves_a_right_cache(tmp_path):
    crash_rounds(tmp_path / "cache", 5, 20, 0)


@pytest.mark.long
def test_ten_thousand_puts_with_crashes(tmp_path):
    crash_rounds(tmp_path / "cache", 100, 10_000, 1)


class Dying(BaseException):
    """The process ends here."""


class DyingCalls(FileCalls):
    """Ends the process after a call, once it is armed."""

    def __init__(self, at):
        self.at = at
        self.armed = False

    def allocate(self, fd, offset, num_bytes):
        super().allocate(fd, offset, num_bytes)
        self._end("allocate")

    def pwritev(self, fd, buffers, offset):
        if self.armed and self.at == "half a write":
            super().pwritev(fd, buffers[: len(buffers) // 2], offset)
            raise Dying
        written = super().pwritev(fd, buffers, offset)
        self._end("write")
        return written

    def _end(self, call):
        if self.armed and self.at == call:
            raise Dying


def let_go(store):
    """Let go of a lock, as a process does that dies."""
    os.close(store._lock._fd)
    store._lock._fd = -1


@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize("at", ["allocate", "write", "half a write", "insert", "delete"])
def test_between_any_two_steps_of_a_put(tmp_path, monkeypatch, at, is_full):
    """In the same process, so that the moment is exact: nothing happens after it."""
    folder, limit, calls = tmp_path / "cache", least_limit(30), DyingCalls(at)
    store = DiskStore(folder, limit, frame_format(), calls=calls)
    old, new = path_of(60 if is_full else 10), path_of(6, of=1)
    kept = put(store, old)
    calls.armed = True
    if at in ("insert", "delete"):
        real = getattr(DiskIndex, at)

        def then_die(self, *arguments):
            real(self, *arguments)
            raise Dying

        monkeypatch.setattr(DiskIndex, at, then_die)
    with pytest.raises(Dying) if at != ("allocate" if is_full else "delete") else contextlib.nullcontext():
        put(store, new)
    monkeypatch.undo()
    let_go(store)
    again = DiskStore(folder, limit, frame_format())
    assert bytes_of(folder) <= limit
    for block in [*old[:kept], *new]:
        assert get(again, [block])[0] in (block.checksum, MissCause.ABSENT)
    if not is_full:
        assert get(again, old) == checksums(old)
    assert put(again, new) == 6
    assert get(again, new) == checksums(new)
    again.close()
    store._opened.close()


def test_a_folder_in_use_is_refused_with_who_uses_it(tmp_path):
    folder = tmp_path / "cache"
    process = writer(folder, 0, "hold")
    try:
        with pytest.raises(ConfigError, match=rf"in use by process {process.pid} on \S+ since 20\d\d-"):
            DiskStore(folder, LIMIT, frame_format(BLOCK_BYTES))
        assert f"process {process.pid} on" in holder_of(folder)
    finally:
        kill(process)
    assert holder_of(folder) == ""
    store = DiskStore(folder, LIMIT, frame_format(BLOCK_BYTES))
    with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
        DiskStore(folder, LIMIT, frame_format(BLOCK_BYTES))
    store.close()
    DiskStore(folder, LIMIT, frame_format(BLOCK_BYTES)).close()
