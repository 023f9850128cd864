"""DiskStore and disks that fail: each failure ends as a miss with its cause, or as fewer blocks kept."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import sqlite3
import subprocess
from random import Random
from typing import TYPE_CHECKING

import pytest
from disk_blocks import bytes_of, checksums, count, frame_format, get, least_limit, path_of, put

from pagefold.errors import ConfigError
from pagefold.kv.transfers import MissCause, StoreError
from pagefold.store.cache_folder import look, read_frames
from pagefold.store.disk import DiskStore
from pagefold.store.disk_index import DiskIndex
from pagefold.store.disk_segments import FileCalls
from pagefold.store.frame import FrameFormat
from pagefold.store.protocol import Get

if TYPE_CHECKING:
    from pathlib import Path

MIB = 2**20
FRAME = 8192  # header and payload of 4,096 each


def reopened(store) -> DiskStore:
    store.close()
    return DiskStore(store.path, store.limit_bytes, store.frames)


def segment(folder) -> Path:
    (file,) = folder.glob("*/segment-00000.frames")
    return file


def overwrite(file, offset, raw):
    with file.open("r+b") as opened:
        opened.seek(offset)
        opened.write(raw)


# What is on the disk changes.


@pytest.mark.parametrize("restart", [False, True])
def test_any_flipped_bit_is_a_miss_and_the_block_is_dropped(store, folder, restart):
    rng = Random(0)
    blocks = path_of(8)
    for _ in range(40):
        put(store, blocks)
        at = rng.randrange(8 * FRAME)
        used_bytes = (176 + 16 + 16, FRAME)  # of a header: its fields, the tokens, the checksum
        matters = at % FRAME < used_bytes[0] or at % FRAME >= 4096
        raw = segment(folder).read_bytes()
        overwrite(segment(folder), at, bytes((raw[at] ^ (1 << rng.randrange(8)),)))
        if restart:
            store = reopened(store)
        results = get(store, blocks)
        if not matters:
            assert results == checksums(blocks)
            continue
        wrong = next(index for index, result in enumerate(results) if isinstance(result, MissCause))
        assert results[wrong] in (MissCause.DAMAGED, MissCause.OTHER_VERSION)
        assert count(store, blocks) == wrong, "it is dropped"
        assert get(store, [blocks[wrong]]) == [MissCause.ABSENT]
    store.close()


def test_a_truncated_segment_is_a_miss(store, folder):
    blocks = path_of(8)
    put(store, blocks)
    os.truncate(segment(folder), 5 * FRAME + 4096 + 100)
    assert get(store, blocks) == [*checksums(blocks[:5]), MissCause.DAMAGED, MissCause.ABSENT, MissCause.ABSENT]
    store = reopened(store)
    assert count(store, blocks) == 5
    assert put(store, blocks) == 8
    assert get(store, blocks) == checksums(blocks)
    store.close()


def test_a_torn_write_is_a_miss(store, folder):
    """The header is new and a part of the payload is what was there before."""
    blocks = path_of(8)
    put(store, blocks)
    overwrite(segment(folder), 3 * FRAME + 4096 + 512, bytes(3584))
    assert get(store, blocks)[3] == MissCause.DAMAGED
    assert get(store, blocks[4:]) == checksums(blocks[4:])


def test_a_frame_under_the_wrong_name_is_a_miss(store, folder):
    blocks, others = path_of(4), path_of(4, namespace="another tenant")
    put(store, blocks)
    put(store, others)
    raw = segment(folder).read_bytes()
    overwrite(segment(folder), 0, raw[FRAME : 2 * FRAME])
    overwrite(segment(folder), FRAME, raw[:FRAME])
    overwrite(segment(folder), 2 * FRAME, raw[6 * FRAME : 7 * FRAME])
    assert get(store, blocks[:1]) == [MissCause.OTHER_BLOCK]
    assert get(store, blocks[1:2]) == [MissCause.OTHER_BLOCK]
    assert get(store, blocks[2:]) == [MissCause.OTHER_NAMESPACE, MissCause.ABSENT]
    assert store.use().num_blocks == 4 + 1


def test_a_frame_of_an_old_version_is_a_miss(store, folder):
    blocks = path_of(2)
    put(store, blocks)
    overwrite(segment(folder), 8, b"\0")
    assert get(store, blocks) == [MissCause.OTHER_VERSION, MissCause.ABSENT]


def test_layouts_of_an_old_version_are_dropped_at_the_start(store, folder):
    put(store, path_of(2))
    store.close()
    with sqlite3.connect(folder / "index.sqlite") as index:
        index.execute("UPDATE layouts SET version = 0")
    index.close()
    again = DiskStore(folder, 64 * MIB, frame_format(model="another"))
    assert again.notes == [f"{folder} has frames of version 0: they are dropped"]
    assert not list(folder.glob("*/segment*"))
    again.close()


@pytest.mark.parametrize(
    "ruin",
    [
        lambda file: file.write_bytes(b"no index at all" * 1000),
        lambda file: overwrite(file, 4096, os.urandom(8192)),
        lambda file: overwrite(file, 60, b"\xff" * 4),  # user_version
        lambda file: file.write_bytes(file.read_bytes()[:5000]),
        lambda file: file.unlink(),
    ],
)
def test_a_ruined_index_is_an_empty_cache(store, folder, ruin):
    blocks = path_of(100)
    put(store, blocks)
    store.close()
    ruin(folder / "index.sqlite")
    again = DiskStore(folder, 64 * MIB, frame_format())
    assert again.use().num_blocks == 0
    assert put(again, blocks) == 100
    assert get(again, blocks) == checksums(blocks)
    again.close()


def test_an_index_that_lies_is_not_believed(store, folder):
    """Places that are not there, two entries of one place, an entry of nobody's."""
    blocks = path_of(10)
    put(store, blocks)
    store.close()
    with sqlite3.connect(folder / "index.sqlite") as index:
        index.execute("UPDATE frames SET place = 1000 WHERE place = 9")
        index.execute("UPDATE frames SET digest = (SELECT digest FROM frames WHERE place = 2) WHERE place = 3")
        index.execute("UPDATE frames SET digest = zeroblob(32) WHERE place = 5")
    index.close()
    again = DiskStore(folder, 64 * MIB, frame_format())
    for block in blocks:
        result = get(again, [block])[0]
        assert result in (block.checksum, MissCause.ABSENT, MissCause.OTHER_BLOCK)
    assert put(again, blocks) == 10
    assert get(again, blocks) == checksums(blocks)
    again.close()


def test_leftovers_are_dropped_and_what_is_not_ours_stays(store, folder):
    blocks = path_of(3)
    put(store, blocks)
    store.close()
    layout = segment(folder).parent
    leftover = folder / "0123456789abcdef"
    leftover.mkdir()
    (leftover / "segment-00000.frames").write_bytes(bytes(100_000))
    (folder / "self-test.tmp").mkdir()
    (folder / "self-test.tmp" / "segment-00000.frames").write_bytes(b"?")
    (layout / "probe.tmp").write_bytes(b"?")
    with (layout / "segment-00000.frames").open("ab") as file:
        file.write(b"a place that was begun")
    (folder / "mine.txt").write_text("keep")
    again = DiskStore(folder, 64 * MIB, frame_format())
    assert get(again, blocks) == checksums(blocks)
    assert segment(folder).stat().st_size == 3 * FRAME
    assert sorted(path.name for path in folder.iterdir() if "index" not in path.name) == [
        layout.name, "lock", "mine.txt",
    ]  # fmt: skip
    again.close()


def test_a_damaged_block_that_is_asked_for_twice_is_dropped_once(store, folder):
    blocks = path_of(3)
    put(store, blocks)
    overwrite(segment(folder), 4096, b"?")
    assert get(store, [blocks[0], blocks[0], blocks[1]])[0] == MissCause.DAMAGED
    assert store.use().num_blocks == 2


def test_a_damaged_block_whose_entry_cannot_be_removed_is_not_found_again(store, folder, monkeypatch):
    """Nor is its place used again, since the index still names it."""
    blocks = path_of(3)
    put(store, blocks)
    overwrite(segment(folder), FRAME + 4096, b"?")

    def full(*_):
        message = "its index fails: database or disk is full"
        raise StoreError(message)

    with monkeypatch.context() as patch:
        patch.setattr(DiskIndex, "delete", full)
        assert get(store, blocks) == [blocks[0].checksum, MissCause.DAMAGED, MissCause.ABSENT]
    assert count(store, blocks) == 1
    others = path_of(5, of=1)
    assert put(store, others) == 5
    assert put(store, blocks) == 3
    store = reopened(store)
    assert [get(store, [block])[0] for block in others] == checksums(others)
    assert put(store, blocks) == 3
    assert get(store, blocks) == checksums(blocks)
    store.close()


# Other layouts, other limits.


def test_another_layout_misses_and_the_old_one_hits_again(store, folder):
    blocks, others = path_of(10), path_of(10, block_bytes=5000)
    put(store, blocks)
    store.close()
    other = DiskStore(folder, 64 * MIB, frame_format(5000))
    assert count(other, others) == 0
    assert get(other, others) == [MissCause.ABSENT] * 10
    assert put(other, others) == 10
    other.close()
    for made, kept in ((frame_format(), blocks), (frame_format(5000), others)):
        again = DiskStore(folder, 64 * MIB, made)
        assert get(again, kept) == checksums(kept)
        again.close()


def test_blocks_of_other_layouts_leave_before_ones_own(folder):
    limit = least_limit(100)
    for index, model in enumerate(("a", "b", "c")):
        store = DiskStore(folder, limit, frame_format(model=model))
        blocks = path_of(40 if index < 2 else 95)
        assert put(store, blocks) == len(blocks)
        assert get(store, blocks) == checksums(blocks)
        assert bytes_of(folder) <= limit
        store.close()
    for model in ("a", "b"):
        store = DiskStore(folder, limit, frame_format(model=model))
        assert store.use().num_blocks == 0
        store.close()


def test_a_smaller_limit_holds_at_once(folder):
    store = DiskStore(folder, 64 * MIB, frame_format())
    blocks = path_of(3000)
    put(store, blocks)
    store.close()
    other = DiskStore(folder, 64 * MIB, frame_format(5000))
    put(other, path_of(500, block_bytes=5000))
    other.close()
    for limit in (20 * MIB, least_limit(300), least_limit(20)):
        store = DiskStore(folder, limit, frame_format())
        assert bytes_of(folder) <= limit
        kept = [block for block in blocks if count(store, [block])]
        assert len(kept) > (limit - least_limit(20)) // 10_000
        for block in kept:
            assert get(store, [block]) == [block.checksum]
        store.close()
        assert bytes_of(folder) <= limit
    store = DiskStore(folder, 64 * MIB, frame_format())
    assert put(store, blocks) == 3000
    store.close()


def test_what_somebody_else_put_there_counts(folder):
    limit = least_limit(100)
    store = DiskStore(folder, limit, frame_format())
    put(store, path_of(100))
    store.close()
    (folder / "mine.bin").write_bytes(bytes(50 * FRAME))
    store = DiskStore(folder, limit, frame_format())
    assert 0 < store.use().num_blocks < 80
    put(store, path_of(100, of=1))
    assert bytes_of(folder) <= limit
    store.close()


# The disk fails.


class Failing(FileCalls):
    """Makes calls fail while ``fails`` says so of their name and offset."""

    def __init__(self, code=errno.EIO):
        self.code = code
        self.fails = lambda call, offset: False

    def _check(self, call, offset=0):
        if self.fails(call, offset):
            raise OSError(self.code, os.strerror(self.code))

    def open(self, path, flags):
        self._check("open")
        return super().open(path, flags)

    def preadv(self, fd, buffers, offset):
        self._check("read", range(offset, offset + sum(map(len, buffers))))
        return super().preadv(fd, buffers, offset)

    def pwritev(self, fd, buffers, offset):
        self._check("write", range(offset, offset + sum(map(len, buffers))))
        return super().pwritev(fd, buffers, offset)

    def allocate(self, fd, offset, num_bytes):
        self._check("allocate")
        super().allocate(fd, offset, num_bytes)


def test_a_place_that_cannot_be_read_is_a_miss_and_its_neighbours_are_not(folder):
    calls = Failing()
    store = DiskStore(folder, 64 * MIB, frame_format(), calls=calls)
    blocks = path_of(10)
    put(store, blocks)
    calls.fails = lambda call, where: call == "read" and 4 * FRAME in where
    assert get(store, blocks) == [*checksums(blocks[:4]), MissCause.IO_ERROR, *[MissCause.ABSENT] * 5]
    assert get(store, blocks[5:]) == checksums(blocks[5:])
    assert count(store, blocks) == 4
    store.close()


def test_writes_that_fail_keep_fewer_or_say_so(folder):
    calls = Failing()
    store = DiskStore(folder, 64 * MIB, frame_format(64 * 1024), calls=calls)
    path = path_of(100, block_bytes=64 * 1024)
    calls.fails = lambda call, where: call == "write" and 70 * 69_632 in where
    kept = put(store, path)
    assert 0 < kept <= 70
    assert get(store, path)[:kept] == checksums(path[:kept])
    calls.fails = lambda call, where: call == "write"
    with pytest.raises(StoreError, match="Input/output error"):
        put(store, path_of(3, of=1, block_bytes=64 * 1024))
    assert get(store, path)[:kept] == checksums(path[:kept])
    calls.fails = lambda call, where: False
    assert put(store, path) == 100
    store = reopened(store)
    assert get(store, path) == checksums(path)
    store.close()


def test_a_disk_that_somebody_else_filled_keeps_what_there_is(folder):
    calls = Failing(errno.ENOSPC)
    store = DiskStore(folder, 64 * MIB, frame_format(), calls=calls)
    old, new = path_of(50), path_of(20, of=1)
    put(store, old)
    calls.fails = lambda call, where: call == "allocate"
    assert put(store, new) == 20, "in the places of what was used longest ago"
    assert get(store, new) == checksums(new)
    assert get(store, old[:25]) == checksums(old[:25])
    assert segment(folder).stat().st_size == 50 * FRAME
    store.close()


def test_a_folder_that_is_removed_is_said_to_be(store, folder):
    blocks = path_of(5)
    put(store, blocks)
    shutil.rmtree(folder)
    for call in (lambda: put(store, blocks), lambda: get(store, blocks), store.use, store.clear, store.self_test):
        with pytest.raises(StoreError, match="was removed or replaced"):
            call()
    DiskStore(folder, 64 * MIB, frame_format()).close()
    with pytest.raises(StoreError, match="was removed or replaced"):
        put(store, blocks)


def test_a_segment_that_is_removed_is_a_miss(store, folder):
    blocks = path_of(5)
    put(store, blocks)
    store = reopened(store)
    segment(folder).unlink()
    assert get(store, blocks) == [MissCause.IO_ERROR, *[MissCause.ABSENT] * 4]
    store = reopened(store)
    assert store.use().num_blocks == 0
    assert put(store, blocks) == 5
    assert get(store, blocks) == checksums(blocks)
    store.close()


# Real small disks: a file system in memory, and one in a file.


def mounted(kind, target, *options):
    target.mkdir()
    ended = subprocess.run(["mount", *options, str(target)], capture_output=True, text=True, check=False)
    if ended.returncode:
        pytest.skip(f"no {kind} can be mounted here: {ended.stderr.strip()}")
    return target


@pytest.fixture
def tmpfs(tmp_path):
    target = mounted("tmpfs", tmp_path / "mnt", "-t", "tmpfs", "-o", "size=16m", "tmpfs")
    yield target
    subprocess.run(["umount", "--lazy", str(target)], check=True)


@pytest.fixture
def ext4(tmp_path):
    image = tmp_path / "image"
    image.write_bytes(b"")
    os.truncate(image, 32 * MIB)
    made = shutil.which("mkfs.ext4") and subprocess.run(["mkfs.ext4", "-q", str(image)], check=False).returncode == 0
    if not made:
        pytest.skip("no mkfs.ext4 here")
    target = mounted("ext4", tmp_path / "mnt", "-o", "loop", str(image))
    yield target
    subprocess.run(["umount", "--lazy", str(target)], check=True)


def test_a_real_disk_that_is_full(tmpfs):
    """Somebody else takes all that is left of it."""
    with pytest.raises(ConfigError, match=r"has [\d,]+ bytes less than"):
        DiskStore(tmpfs / "cache", 17 * MIB, frame_format())
    store = DiskStore(tmpfs / "cache", 12 * MIB, frame_format())
    old, new = path_of(200), path_of(50, of=1)
    put(store, old)
    fill(tmpfs / "fill")
    with contextlib.suppress(StoreError):  # not even the index can be written
        put(store, new)
    kept = count(store, new)
    assert get(store, new[:kept]) == checksums(new[:kept])
    rest = count(store, old)
    assert rest > 100
    assert get(store, old[:rest]) == checksums(old[:rest])
    (tmpfs / "fill").unlink()
    assert put(store, new) == 50
    store = reopened(store)
    assert get(store, new) == checksums(new)
    assert bytes_of(tmpfs / "cache") <= 12 * MIB
    store.close()


def test_starting_on_a_full_disk_is_refused(tmpfs):
    fill(tmpfs / "fill")
    with pytest.raises(ConfigError, match=r"cannot be used: .*(full|No space|fails)|bytes less than"):
        DiskStore(tmpfs / "cache", 5 * MIB, frame_format())


def test_a_disk_that_dies(ext4):
    """The kernel answers every call with EIO, as if the device were gone."""
    store = DiskStore(ext4 / "cache", 16 * MIB, frame_format())
    blocks = path_of(20)
    put(store, blocks)
    fd = os.open(ext4, os.O_RDONLY)
    shut_down, without_flush = 0x8004587D, (2).to_bytes(4, "little")
    try:
        fcntl.ioctl(fd, shut_down, without_flush)
    except OSError as error:
        pytest.skip(f"this kernel cannot shut a file system down: {error}")
    finally:
        os.close(fd)
    with contextlib.suppress(StoreError):
        assert get(store, blocks)[0] == MissCause.IO_ERROR
    for call in (lambda: put(store, path_of(20, of=1)), store.clear):
        with pytest.raises(StoreError):
            call()
    with contextlib.suppress(StoreError):
        assert not store.self_test().ok
    store.close()


def test_ext4_never_keeps_more_than_the_limit(ext4):
    limit = least_limit(500, 5000)
    store = DiskStore(ext4 / "cache", limit, frame_format(5000))
    for of in range(20):
        put(store, path_of(60, of=of, block_bytes=5000))
        assert bytes_of(ext4 / "cache") <= limit
    store.close()


def fill(file):
    with file.open("wb", buffering=0) as opened:
        for size in (MIB, 4096, 1):
            with contextlib.suppress(OSError):
                while True:
                    opened.write(bytes(size))


# The index holds what nobody wrote.

TEXT, HUGE = "'text'", str(2**63 - 1)


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("filled") / "cache"
    store = DiskStore(folder, 16 * MIB, frame_format())
    put(store, path_of(40))
    store.close()
    store = DiskStore(folder, 16 * MIB, frame_format(5000))
    put(store, path_of(5, block_bytes=5000))
    store.close()
    return folder


def goes_on(folder, least=0):
    """Open a folder whose index is damaged: what is there is right, and it keeps blocks again."""
    blocks = path_of(40)
    store = DiskStore(folder, 16 * MIB, frame_format())
    try:
        num = count(store, blocks)
        found = get(store, blocks)
        assert found[:least] == checksums(blocks)[:least]
        assert num >= least
        for block, one in zip(blocks, found, strict=True):
            assert isinstance(one, MissCause) or one == block.checksum
        assert put(store, blocks) == 40
        get(store, blocks)  # entries that lied are dropped
        assert put(store, blocks) == 40
        assert get(store, blocks) == checksums(blocks)
        assert bytes_of(folder) <= 16 * MIB
    finally:
        store.close()


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("value", [TEXT, HUGE, "0", "1.5", "CAST(x'fffe' AS TEXT)"])
@pytest.mark.parametrize(
    "column",
    [
        *(f"layouts.{name}" for name in ("digest", "version", "label", "block_bytes", "key_bytes", "used")),
        *(f"frames.{name}" for name in ("layout", "place", "digest", "parent", "namespace", "used")),
        "settings.value",
    ],
)
def test_a_value_that_cannot_be_is_no_traceback(filled, tmp_path, column, value):
    folder = shutil.copytree(filled, tmp_path / "cache")
    table, name = column.split(".")
    key = {"layouts": "id", "frames": "place", "settings": "name"}[table]
    with sqlite3.connect(folder / "index.sqlite") as index:
        index.execute(f"UPDATE OR REPLACE {table} SET {name} = {value} WHERE {key} = (SELECT max({key}) FROM {table})")
    index.close()
    with contextlib.suppress(ConfigError):  # for who only looks
        look(folder)
        assert sum(frame.cause is None for frame in read_frames(folder)) <= 45
    goes_on(folder)


@pytest.mark.parametrize(
    "damage",
    [
        "DROP TABLE frames",
        "DROP TABLE layouts; CREATE TABLE layouts (id INTEGER)",
        "ALTER TABLE frames ADD COLUMN more INTEGER",
        "ALTER TABLE frames RENAME COLUMN used TO was_used",
        "CREATE TRIGGER t AFTER INSERT ON frames BEGIN DELETE FROM frames; END",
        "CREATE VIEW v AS SELECT 1",
        "CREATE TABLE more (id INTEGER)",
        "DROP TABLE settings; CREATE VIEW settings AS SELECT 'limit_bytes' AS name, 1 AS value",
        "PRAGMA user_version = 7",
        "PRAGMA application_id = 7",
        "PRAGMA journal_mode = DELETE; PRAGMA page_size = 512; VACUUM",
        "INSERT INTO layouts SELECT id + 9, substr(digest, 1, 31) || x'00', version, '', 1, 16, 0 FROM layouts",
        "UPDATE layouts SET version = 7",
        "UPDATE layouts SET block_bytes = 8192",
        "UPDATE layouts SET key_bytes = 4096",
        "UPDATE frames SET place = place + 281474976710000",
    ],
)
def test_an_index_that_somebody_changed_is_no_traceback(filled, tmp_path, damage):
    folder = shutil.copytree(filled, tmp_path / "cache")
    index = sqlite3.connect(folder / "index.sqlite", isolation_level=None)
    index.executescript(damage)
    index.close()
    goes_on(folder)


@pytest.mark.parametrize("seed", range(25))
def test_an_index_with_random_bytes_is_no_traceback(filled, tmp_path, seed):
    folder = shutil.copytree(filled, tmp_path / "cache")
    rng = Random(seed)
    file = folder / "index.sqlite"
    raw = bytearray(file.read_bytes())
    for _ in range(rng.choice((1, 1, 4, 200))):
        at = rng.randrange(min(len(raw), rng.choice((100, 4096, len(raw)))))
        raw[at : at + rng.choice((1, 8, 500))] = rng.randbytes(rng.choice((1, 8, 500)))
    file.write_bytes(raw[: rng.choice((len(raw), rng.randrange(len(raw))))])
    if rng.random() < 0.3:
        (folder / "index.sqlite-wal").write_bytes(rng.randbytes(10_000))
    goes_on(folder)


def test_a_layout_of_another_block_size_is_a_miss(filled, tmp_path):
    folder = shutil.copytree(filled, tmp_path / "cache")
    other = FrameFormat(frame_format().layout, 8192, 16)
    blocks = path_of(40)
    store = DiskStore(folder, 16 * MIB, other)
    into = memoryview(bytearray(8192))
    assert store.get([Get(block.name, into) for block in blocks]) == [MissCause.ABSENT] * 40
    assert any("other sizes" in note for note in store.notes)
    longer = path_of(3, block_bytes=8192)
    assert put(store, longer) == 3
    assert get(store, longer) == checksums(longer)
    store.close()
    goes_on(folder)


def test_a_segment_of_a_number_that_no_place_can_have_is_left_alone(store, folder):
    put(store, path_of(3))
    store.close()
    name = segment(folder).parent / "segment-99999999999999.frames"
    with name.open("wb") as file:
        file.truncate(10 * FRAME)
    again = DiskStore(folder, 64 * MIB, frame_format())
    assert put(again, path_of(50)) == 50
    again.close()
