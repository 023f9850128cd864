"""DiskStore: bytes come back as they were, what was used longest ago leaves first, and a restart finds all."""

from __future__ import annotations

import re
import threading
from random import Random

import pytest
from disk_blocks import checksums, count, frame_format, get, least_limit, path_of, put

from pagefold.errors import ConfigError
from pagefold.kv.transfers import MissCause, StoreError
from pagefold.store.disk import DiskStore

MIB = 2**20


@pytest.mark.parametrize("block_bytes", [1, 4095, 4096, 5000, 65_536, 737_280])
@pytest.mark.parametrize("in_line", [True, False])
def test_bytes_come_back_as_they_were_also_after_a_restart(folder, block_bytes, in_line):
    """Aligned buffers are read into directly, others through a buffer between."""
    blocks = path_of(20, block_bytes=block_bytes, in_line=in_line)
    store = DiskStore(folder, 64 * MIB, frame_format(block_bytes))
    assert put(store, blocks) == 20
    assert get(store, blocks, in_line=in_line) == checksums(blocks)
    store.close()
    again = DiskStore(folder, 64 * MIB, frame_format(block_bytes))
    assert count(again, blocks) == 20
    assert get(again, blocks, in_line=not in_line) == checksums(blocks)
    again.close()


def test_without_direct_io_it_is_the_same(folder, monkeypatch):
    monkeypatch.setattr("pagefold.store.disk.why_not_direct", lambda _: "no reason")
    for block_bytes in (4096, 5000):
        blocks = path_of(20, block_bytes=block_bytes)
        store = DiskStore(folder, 64 * MIB, frame_format(block_bytes))
        assert store.why_not_direct == "no reason"
        put(store, blocks)
        assert get(store, blocks) == checksums(blocks)
        store.close()


def test_what_is_not_there_is_absent_and_so_is_what_is_behind(store):
    blocks = path_of(5)
    put(store, [*blocks[:2], *blocks[3:]])
    assert count(store, blocks) == 2
    assert get(store, blocks) == [*checksums(blocks[:2]), *[MissCause.ABSENT] * 3]
    assert get(store, []) == []
    assert store.put([]) == 0


def test_known_blocks_count_and_are_not_written_again(store, folder):
    blocks = path_of(4)
    assert put(store, blocks[:2]) == 2
    before = (folder / next(folder.glob("*/segment-00000.frames")).relative_to(folder)).stat()
    assert put(store, [*blocks[:2], blocks[1]]) == 2
    after = next(folder.glob("*/segment-00000.frames")).stat()
    assert (after.st_mtime_ns, after.st_size) == (before.st_mtime_ns, before.st_size)
    assert put(store, blocks) == 4
    assert store.use().num_blocks == 4


def test_blocks_of_a_path_lie_one_behind_the_other(folder):
    """So that a conversation is read in few calls, in whatever order it was put."""
    from pagefold.store.disk_segments import FileCalls

    class Counted(FileCalls):
        num_reads = num_writes = 0

        def preadv(self, fd, buffers, offset):
            self.num_reads += 1
            return super().preadv(fd, buffers, offset)

        def pwritev(self, fd, buffers, offset):
            self.num_writes += 1
            return super().pwritev(fd, buffers, offset)

    calls = Counted()
    store = DiskStore(folder, 64 * MIB, frame_format(), calls=calls)
    blocks = path_of(100)
    shuffled = blocks.copy()
    Random(0).shuffle(shuffled)
    put(store, shuffled)
    assert calls.num_writes == 1
    assert get(store, blocks) == checksums(blocks)
    assert calls.num_reads == 1
    store.close()


def test_what_was_used_longest_ago_leaves_first_and_tails_before_heads(folder):
    store = DiskStore(folder, least_limit(200), frame_format())
    paths = [path_of(10, of=of) for of in range(40)]
    for path in paths:
        assert put(store, path) == 10
        assert get(store, paths[0]) == checksums(paths[0]), "it is used all the time"
    kept = [count(store, path) for path in paths]
    assert kept[0] == 10
    assert kept[1] == 0, "the first to leave"
    assert kept[-15:] == [10] * 15
    for path, num in zip(paths, kept, strict=True):
        assert get(store, path)[:num] == checksums(path[:num]), "what is left of a path is its head"
        assert not any(count(store, [block]) for block in path[num:])
    store.close()


def test_recency_outlives_a_restart(folder):
    limit = least_limit(100)
    store = DiskStore(folder, limit, frame_format())
    old, new = path_of(30, of=1), path_of(30, of=2)
    put(store, old)
    put(store, new)
    get(store, old)
    store.close()
    store = DiskStore(folder, limit, frame_format())
    put(store, path_of(60, of=3))
    assert count(store, old) == 30
    assert count(store, new) < 30
    store.close()


def test_more_at_once_than_fits_keeps_the_head(folder):
    store = DiskStore(folder, least_limit(50), frame_format())
    path = path_of(200)
    kept = put(store, path)
    assert 40 <= kept < 100
    assert count(store, path) == kept
    assert get(store, path[:kept]) == checksums(path[:kept])
    assert store.use().num_bytes <= store.limit_bytes
    store.close()


def test_delete_and_clear(store, folder):
    blocks, others = path_of(10), path_of(10, of=1)
    put(store, blocks)
    put(store, others)
    store.delete([blocks[5].name.digest, blocks[5].name.digest, b"?" * 32])
    assert count(store, blocks) == 5
    assert get(store, blocks[6:]) == checksums(blocks[6:])
    assert store.clear() == 19
    assert store.clear() == 0
    assert count(store, others) == 0
    assert store.use().num_blocks == 0
    assert not list(folder.glob("*/segment*")), "its room is the disk's again"
    assert put(store, blocks) == 10
    assert get(store, blocks) == checksums(blocks)


def test_what_was_deleted_stays_so_after_a_restart(folder):
    store = DiskStore(folder, 64 * MIB, frame_format())
    blocks = path_of(10)
    put(store, blocks)
    store.delete([block.name.digest for block in blocks[3:]])
    store.close()
    store = DiskStore(folder, 64 * MIB, frame_format())
    assert count(store, blocks) == store.use().num_blocks == 3
    store.clear()
    store.close()
    store = DiskStore(folder, 64 * MIB, frame_format())
    assert store.use().num_blocks == 0
    store.close()


def test_closed_is_closed(folder):
    store = DiskStore(folder, 64 * MIB, frame_format())
    store.close()
    store.close()
    for call in (store.use, store.clear, lambda: put(store, path_of(1)), lambda: get(store, path_of(1))):
        with pytest.raises(StoreError, match="closed"):
            call()


def test_many_threads(folder):
    """Readers and writers at once, in a folder that always has to make room: what is said to be there is right."""
    store = DiskStore(folder, least_limit(150), frame_format())
    paths = [path_of(12, of=of) for of in range(30)]
    failures = []

    def work(seed):
        rng = Random(seed)
        try:
            for _ in range(150):
                path = rng.choice(paths)
                what = rng.random()
                if what < 0.5:
                    get(store, path)
                elif what < 0.95:
                    put(store, path)
                elif what < 0.99:
                    store.delete([block.name.digest for block in rng.sample(path, 3)])
                else:
                    store.clear()
                assert store.use().num_bytes <= store.limit_bytes
        except BaseException as error:  # noqa: BLE001 - told below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    store.close()
    store = DiskStore(folder, store.limit_bytes, frame_format())
    for path in paths:
        kept = count(store, path)
        assert get(store, path)[:kept] == checksums(path[:kept])
    store.close()


@pytest.mark.parametrize("limit", [0, 1000, 3 * MIB])
def test_a_limit_too_small_is_refused_with_the_least(folder, limit):
    with pytest.raises(ConfigError, match=r"too small for blocks of 4,096\. Give it at least [\d,]+ bytes") as refused:
        DiskStore(folder, limit, frame_format())
    least = int(str(refused.value).rsplit(" ", 2)[1].replace(",", ""))
    store = DiskStore(folder, least, frame_format())
    assert put(store, path_of(20)) >= 8
    assert store.use().num_bytes <= least
    store.close()


def test_a_limit_beyond_the_disk_is_refused_with_what_is_missing(folder):
    with pytest.raises(ConfigError, match=r"has [\d,]+ bytes less than the 1,152,921,504,606,846,976 .*at most"):
        DiskStore(folder, 2**60, frame_format())


def test_a_folder_of_somebody_else_is_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years")
    with pytest.raises(ConfigError, match=r"is no cache folder: it holds thesis\.tex"):
        DiskStore(tmp_path, 64 * MIB, frame_format())
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_path_that_cannot_be_a_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below", "/proc/pagefold"):
        with pytest.raises(ConfigError, match="cannot be used"):
            DiskStore(path, 64 * MIB, frame_format())


@pytest.mark.parametrize("block_bytes", [1, 5000, 65_536, 737_280])
@pytest.mark.parametrize("why_not", ["", "no reason"])
def test_the_self_test_measures_and_leaves_all_blocks(folder, monkeypatch, block_bytes, why_not):
    monkeypatch.setattr("pagefold.store.disk.why_not_direct", lambda _: why_not)
    store = DiskStore(folder, 64 * MIB, frame_format(block_bytes))
    blocks = path_of(100, block_bytes=block_bytes)
    kept = put(store, blocks)
    verdict = store.self_test()
    assert verdict.ok, verdict.told
    assert min(verdict.read_bytes_per_s, verdict.write_bytes_per_s) > 0
    max_blocks = store._places.num_allowed
    assert kept <= max_blocks
    how = r"through the system's cache \(no reason\)" if why_not else "O_DIRECT"
    assert re.fullmatch(
        rf"disk       {folder}: [\d.]+ GB/s read, [\d.]+ GB/s write, {how}, "
        rf"{kept:,} blocks of {max_blocks:,} kept, 0.1 GiB limit",
        verdict.told,
    )
    assert get(store, blocks[:kept]) == checksums(blocks[:kept])
    assert sorted(path.name for path in folder.iterdir() if path.suffix == ".tmp") == []
    store.close()


def test_as_many_blocks_as_the_self_test_says_can_be_kept(folder):
    store = DiskStore(folder, 8 * MIB, frame_format())
    most = int(re.search(r"of ([\d,]+) kept", store.self_test().told)[1].replace(",", ""))
    assert put(store, path_of(most + 100)) == most
    assert store.use().num_bytes <= 8 * MIB
    store.close()


def test_a_disk_that_does_not_keep_what_it_is_given_is_off(folder, monkeypatch):
    store = DiskStore(folder, 64 * MIB, frame_format())
    monkeypatch.setattr("pagefold.store.disk_self_test._flip_a_bit", lambda *_: None)
    verdict = store.self_test()
    assert not verdict.ok
    assert verdict.told == f"disk       {folder}: off: a flipped bit was not found"
    store.close()
