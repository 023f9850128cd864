"""``pagefold cache`` with real folders, and with servers' processes that use them."""

from __future__ import annotations

import json
import os
import resource
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from disk_blocks import bytes_of, checksums, count, frame_format, get, path_of, put
from typer.testing import CliRunner

from pagefold.cli import app
from pagefold.store import cache_folder
from pagefold.store.disk import DiskStore
from pagefold.store.frame import FrameFormat, checksum_of

MIB = 2**20
PATHS = {"namespace": path_of(10), "another": path_of(4, namespace="another")}
OTHERS = path_of(6, block_bytes=5000)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "cache"
    store = DiskStore(folder, 32 * MIB, frame_format(), label="tiny")
    for path in PATHS.values():
        put(store, path)
    store.close()
    store = DiskStore(folder, 32 * MIB, frame_format(5000), label="other")
    put(store, OTHERS)
    store.close()
    return folder


@pytest.fixture
def used(tmp_path):
    """A folder that another process uses."""
    folder = tmp_path / "used"
    store = DiskStore(folder, 32 * MIB, frame_format(5000))
    put(store, OTHERS)
    store.close()
    script = Path(__file__).with_name("disk_writer.py")
    command = [sys.executable, str(script), str(folder), str(32 * MIB), "0", "hold"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "open\n"
    yield folder
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()


def run(*arguments, code=0):
    result = CliRunner().invoke(app, ["cache", *map(str, arguments)], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result


def run_json(*arguments, code=0):
    return json.loads(run(*arguments, "--json", code=code).stdout)


def refused(*arguments) -> str:
    """Return the one line that a command leaves with, after those that say what it was doing."""
    *doing, said = run(*arguments, code=2).stderr.splitlines()
    assert all(line.endswith(" ...") for line in doing)
    assert said.startswith("error: ")
    return said


def flip(folder, block_bytes, offset=4096 + 100):
    layout = frame_format(block_bytes).layout.hex()[:16]
    file = folder / layout / "segment-00000.frames"
    raw = bytearray(file.read_bytes())
    raw[offset] ^= 1
    file.write_bytes(raw)


def holds(folder, blocks, block_bytes=4096, limit=32 * MIB) -> int:
    """Return how many blocks a folder holds, each compared."""
    store = DiskStore(folder, limit, frame_format(block_bytes))
    try:
        num = count(store, blocks)
        assert get(store, blocks[:num]) == checksums(blocks[:num])
        return num
    finally:
        store.close()


def test_ls_shows_what_is_there_by_model_and_namespace(folder):
    rows = run_json("ls", folder)
    assert [(row["label"], row["num_blocks"], row["num_tokens"], row["num_bytes"]) for row in rows] == [
        ("other", 6, 24, 6 * 3 * 4096),
        ("tiny", 4, 16, 4 * 8192),
        ("tiny", 10, 40, 10 * 8192),
    ]
    assert {row["namespace"] for row in rows} == {path[0].name.namespace.hex() for path in PATHS.values()}
    table = run("ls", folder).stdout
    assert "tiny" in table
    assert PATHS["another"][0].name.namespace.hex()[:12] in table


def test_stats_says_how_large_it_is(folder):
    stats = run_json("stats", folder)
    assert stats["limit_bytes"] == 32 * MIB
    assert stats["num_bytes"] == bytes_of(folder)
    assert (stats["num_blocks"], stats["num_tokens"], stats["holder"]) == (20, 80, "")
    assert [layout["block_bytes"] for layout in stats["layouts"]] == [5000, 4096]
    assert "33,554,432 bytes" in run("stats", folder).stdout


def test_looking_works_while_a_server_uses_it_and_writing_is_refused(used, tmp_path):
    assert run_json("ls", used)[0]["num_blocks"] == 6
    stats = run_json("stats", used)
    assert stats["num_blocks"] == 6
    assert stats["holder"].startswith("process ")
    assert stats["holder"] in run("stats", used).stdout
    assert run_json("export", used, tmp_path / "file")["num_blocks"] == 6
    for command in (("verify", used), ("clear", used), ("import", tmp_path / "file", used)):
        assert "is in use by process" in refused(*command)
    assert run_json("ls", used)[0]["num_blocks"] == 6


def test_verify_drops_what_is_damaged_and_says_so(folder):
    assert run_json("verify", folder) == {"num_blocks": 20, "num_dropped": 0, "causes": {}}
    assert "20 blocks read, 20 are right" in run("verify", folder).stdout
    flip(folder, 4096)
    flip(folder, 5000)
    flip(folder, 5000, offset=3 * 4096 + 8)
    found = run_json("verify", folder, code=2)
    assert (found["num_blocks"], found["num_dropped"]) == (20, 3)
    assert found["causes"] == {"damaged": 2, "other_version": 1}
    assert run_json("verify", folder) == {"num_blocks": 17, "num_dropped": 0, "causes": {}}
    assert holds(folder, PATHS["namespace"][1:]) == 9
    assert holds(folder, OTHERS[2:], 5000) == 4


def test_clear_drops_all_and_gives_the_room_back(folder):
    assert run_json("clear", folder) == {"num_dropped": 20}
    assert not list(folder.glob("*/*.frames"))
    assert run_json("stats", folder)["num_blocks"] == 0
    assert run_json("stats", folder)["limit_bytes"] == 32 * MIB
    assert holds(folder, PATHS["namespace"]) == 0


def test_a_ruined_index_is_said_and_cleared(folder):
    (folder / "index.sqlite").write_bytes(b"no index" * 1000)
    for command in ("ls", "stats", "verify"):
        assert "pagefold cache clear" in refused(command, folder)
    run("clear", folder)
    assert holds(folder, PATHS["namespace"]) == 0


def test_what_is_exported_can_be_imported_elsewhere(folder, tmp_path):
    file, there = tmp_path / "file", tmp_path / "there"
    exported = run_json("export", folder, file)
    assert exported == {"num_blocks": 20, "num_wrong": 0, "num_bytes": file.stat().st_size}
    assert "no cache folder yet" in refused("import", file, there)
    assert not there.exists()
    assert run_json("import", file, there, "--limit", "16M") == {"num_blocks": 20, "num_kept": 20, "num_wrong": 0}
    for path in PATHS.values():
        assert holds(there, path, limit=16 * MIB) == len(path)
    assert holds(there, OTHERS, 5000, limit=16 * MIB) == 6
    assert "20 blocks read, 20 are in" in run("import", file, there).stdout, "again: its limit is known"
    assert run_json("stats", there)["limit_bytes"] == 16 * MIB
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "file", "there"], "nothing is left over"


def test_damaged_frames_are_left_out_of_both(folder, tmp_path):
    flip(folder, 4096)
    file = tmp_path / "file"
    assert run_json("export", folder, file)["num_wrong"] == 1
    raw = bytearray(file.read_bytes())
    raw[4096 + 4096 + 17] ^= 1  # the payload of the first
    file.write_bytes(raw)
    result = run("import", file, tmp_path / "there", "--limit", "16M", code=2)
    assert "19 blocks read, 18 are in" in result.stdout
    assert "1 blocks of" in result.stderr
    assert "left out: 1 damaged" in result.stderr
    assert run_json("verify", tmp_path / "there")["num_blocks"] == 18


def test_a_file_that_is_not_whole_or_not_ours_is_refused_and_nothing_happens(folder, tmp_path):
    file, there = tmp_path / "file", tmp_path / "there"
    run("export", folder, file)
    raw = file.read_bytes()
    for wrong, said in (
        (raw[:-1], "is not whole"),
        (raw + b"?", "is not whole"),
        (raw[:24] + b"\xff" + raw[25:], "is not whole"),
        (b"PAGEFOLD EXPORT\0\x09" + raw[17:], "is of version 9"),
        (b"something else" * 1000, "is no exported cache"),
        (b"", "is no exported cache"),
    ):
        file.write_bytes(wrong)
        assert said in refused("import", file, there, "--limit", "16M")
        assert not there.exists()
    assert "Cannot read" in refused("import", tmp_path / "nothing", there, "--limit", "16M")
    assert "too small" in _import_whole(raw, file, there)


def _import_whole(raw, file, there) -> str:
    file.write_bytes(raw)
    return refused("import", file, there, "--limit", "1M")


def test_an_export_that_cannot_be_written_leaves_nothing(folder, tmp_path):
    assert "Cannot write" in refused("export", folder, tmp_path / "nowhere" / "file")
    (tmp_path / "there").mkdir()
    assert "Cannot write" in refused("export", folder, tmp_path / "there")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "there"]


@pytest.mark.parametrize("command", ["ls", "stats", "verify", "clear"])
def test_a_folder_that_is_no_cache_is_refused_and_left_alone(command, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    for folder in (tmp_path, tmp_path / "nowhere", tmp_path / "mine.txt"):
        assert "is no cache folder" in refused(command, folder)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_import_keeps_what_was_used_last_where_not_all_fits(tmp_path):
    store = DiskStore(tmp_path / "big", 64 * MIB, frame_format())
    paths = [path_of(50, of=of) for of in range(30)]
    for path in paths:
        put(store, path)
    store.close()
    run("export", tmp_path / "big", tmp_path / "file")
    imported = run_json("import", tmp_path / "file", tmp_path / "small", "--limit", "8M")
    assert 300 < imported["num_kept"] < 1500
    assert imported["num_kept"] == run_json("stats", tmp_path / "small")["num_blocks"]
    assert bytes_of(tmp_path / "small") <= 8 * MIB
    assert holds(tmp_path / "small", paths[-1], limit=8 * MIB) == 50


def test_reading_a_folder_that_changes_gives_only_what_is_right(folder):
    """A server may evict a block, and put another in its place, while its frame is read."""
    store = DiskStore(folder, 32 * MIB, frame_format())
    seen = []
    for number, frame in enumerate(cache_folder.read_frames(folder)):
        if number == 3:
            store.clear()
            put(store, path_of(30, of=7))
        if frame.cause is None:
            assert frame.name.digest == frame.row.digest
            seen.append(frame.name.digest)
    store.close()
    assert 3 <= len(seen) <= 20


# Files that somebody made up.

_HEAD = struct.Struct("<16sIIQQ")
_FRAME_HEAD = struct.Struct("<8sII32s32s32s32sIIQ16s")


def bundle(file, num_frames, frames=b"", num_bytes=None):
    """Write a file with a right checksum, whatever it says."""
    num_bytes = 4096 + len(frames) if num_bytes is None else num_bytes
    head = _HEAD.pack(b"PAGEFOLD EXPORT\0", 1, 0, num_frames, num_bytes)
    file.touch(0o600)
    with file.open("wb") as out:
        out.write((head + checksum_of(head)).ljust(4096, b"\0") + frames)
        out.truncate(num_bytes)
    return file


def frame_head(block_bytes, key_bytes=16, layout=bytes(32)):
    header_bytes = -(-(_FRAME_HEAD.size + key_bytes + 16) // 4096) * 4096
    digests = (bytes(32),) * 3
    head = _FRAME_HEAD.pack(
        b"PAGEFOLD", 1, header_bytes % 2**32, layout, *digests, key_bytes, 0, block_bytes, bytes(16)
    )
    head += bytes(min(key_bytes, 2048))
    return (head + checksum_of(head)).ljust(4096, b"\0")


def test_a_number_of_frames_that_no_file_has_is_refused_at_once(tmp_path):
    file, there = tmp_path / "file", tmp_path / "there"
    for num_frames in (2**60, 2**64 - 1, 2):
        bundle(file, num_frames)
        assert f"says that it holds {num_frames:,} frames" in refused("import", file, there, "--limit", "16M")
        assert not there.exists()
    bundle(file, 2**30, num_bytes=2**42)  # sparse
    assert run_json("import", file, there, "--limit", "16M", code=2)["num_wrong"] == 2**30
    assert not there.exists()


@pytest.mark.quick(every=4)
@pytest.mark.parametrize(
    ("block_bytes", "key_bytes"),
    [(2**40, 16), (2**64 - 1, 16), (0, 16), (1, 2**30)],
)
def test_sizes_that_no_frame_has_are_not_believed(tmp_path, block_bytes, key_bytes):
    """Nothing of that size is read, or taken from memory."""
    file = bundle(tmp_path / "file", 1, frame_head(block_bytes, key_bytes), num_bytes=2**42)
    command = [sys.executable, "-m", "pagefold.cli", "cache", "import", str(file), str(tmp_path / "there")]
    limit = 2 * 2**30  # beyond what the program itself takes
    done = subprocess.run(
        [*command, "--limit", "16M", "--json"],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    assert done.returncode == 2
    assert json.loads(done.stdout) == {"num_blocks": 1, "num_kept": 0, "num_wrong": 1}
    assert "Traceback" not in done.stderr


def test_a_layout_has_one_size(folder, tmp_path):
    """A file with frames of a known layout and another block size changes nothing of what is there."""
    file = tmp_path / "file"
    form = frame_format()
    other = FrameFormat(form.layout, 8192, form.key_bytes)
    blocks = path_of(3, block_bytes=8192, of=7)
    frames = b"".join(other.header(block.name, block.checksum) + bytes(block.payload) for block in blocks)
    bundle(file, 3, frames)
    told = run("import", file, folder, code=2)
    assert "3 blocks of" in told.stderr
    assert "other layout" in told.stderr
    assert holds(folder, PATHS["namespace"]) == 10
    right = path_of(2, of=9)
    mixed = frames + b"".join(form.header(block.name, block.checksum) + bytes(block.payload) for block in right)
    bundle(file, 5, mixed)
    assert run_json("import", file, tmp_path / "new", "--limit", "16M", code=2)["num_wrong"] == 2
    assert run_json("import", file, folder, code=2)["num_wrong"] == 3
    assert holds(folder, right) == 2


def test_a_pipe_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "it is no file" in refused("import", tmp_path / "pipe", tmp_path / "there", "--limit", "16M")
