"""Cache folders, exports, recordings and verdicts are their owner's alone: prompts can be read from them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
from disk_blocks import frame_format, path_of, put
from permissions import NOBODY, mode, umask
from typer.testing import CliRunner

from pagefold.cli import app
from pagefold.cli.permissions import tell_of_served
from pagefold.engine.verdicts import Verdict, write_verdict
from pagefold.errors import ConfigError
from pagefold.observe.recorder import TraceRecorder
from pagefold.store.disk import DiskStore
from pagefold.store.export import export_frames

if TYPE_CHECKING:
    from pathlib import Path

MIB = 2**20


def exposed(folder) -> list[str]:
    """Return what has other permissions than it should have."""
    found = [folder, *folder.rglob("*")]
    return [f"{path} {mode(path):o}" for path in found if mode(path) != (0o700 if path.is_dir() else 0o600)]


def widen(folder):
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def run(*arguments, code=0):
    result = CliRunner().invoke(app, ["cache", *map(str, arguments)], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result


@pytest.mark.parametrize("mask", [0, 0o022, 0o777])
def test_all_that_a_store_writes_is_its_owners_alone(folder, tmp_path, mask, monkeypatch):
    there: list[Path] = []
    opened = os.open

    def watched(path, flags, *rest, **named):
        """Look at what there is whenever a file is opened: also at what does not stay."""
        fd = opened(path, flags, *rest, **named)
        if folder.exists():
            there.extend(path for path in (folder, *folder.rglob("*")) if mode(path) & 0o077)
        return fd

    with umask(mask):
        monkeypatch.setattr(os, "open", watched)
        store = DiskStore(folder, 64 * MIB, frame_format())
        assert put(store, path_of(20)) == 20
        assert store.self_test().ok
        names = {path.name for path in folder.rglob("*")}
        assert {"lock", "index.sqlite", "index.sqlite-wal", "segment-00000.frames"} <= names
        assert exposed(folder) == []
        store.close()
        parts: list[int] = []
        export_frames(folder, tmp_path / "file", lambda *_: parts.extend(map(mode, tmp_path.glob("file.*"))))
    assert exposed(folder) == []
    assert there == []
    assert parts
    assert {*parts, mode(tmp_path / "file")} == {0o600}
    assert store.notes == []


def test_an_import_and_what_others_left_open(folder, tmp_path):
    store = DiskStore(folder, 64 * MIB, frame_format())
    put(store, path_of(20))
    store.close()
    file, there = tmp_path / "file", tmp_path / "there"
    run("export", folder, file)
    with umask(0):
        assert run("import", file, there, "--limit", "16M").stderr.count("warning") == 0
    assert exposed(there) == []
    widen(there)
    file.chmod(0o644)
    told = run("stats", there).stderr
    assert f"{there} (mode 0755) and" in told
    assert f"chmod -R go= {there}" in told
    again = DiskStore(there, 16 * MIB, frame_format())
    again.close()
    assert len(again.notes) == 1
    assert f"{there} (mode 0755)" in again.notes[0]
    told = run("import", file, there).stderr
    assert f"{file} (mode 0644)" in told
    assert exposed(there), "nothing is changed unasked"
    run("import", file, there, "--fix-permissions")
    assert exposed(there) == []
    assert mode(file) == 0o600
    for command in ("verify", "clear"):
        widen(there)
        run(command, there, "--fix-permissions")
        assert exposed(there) == []


def test_what_is_no_cache_folder_is_not_mended(tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "letter").touch()
    mine.chmod(0o755)
    (mine / "letter").chmod(0o644)
    run("verify", mine, "--fix-permissions", code=2)
    with pytest.raises(ConfigError, match="is no cache folder"):
        tell_of_served(mine, None, None, fix=True)
    assert (mode(mine), mode(mine / "letter")) == (0o755, 0o644)


def test_a_strangers_file_in_a_cache_folder_keeps_its_permissions(folder):
    DiskStore(folder, 64 * MIB, frame_format()).close()
    (folder / "notes.txt").touch()
    widen(folder)
    run("verify", folder, "--fix-permissions")
    assert mode(folder / "notes.txt") == 0o644
    assert mode(folder / "index.sqlite") == 0o600


def layout_folder(folder):
    (found,) = (path for path in folder.iterdir() if path.is_dir())
    return found


@pytest.mark.parametrize("what", ["layout", "segment", "index", "lock"])
def test_a_link_in_a_cache_folder_is_refused_and_what_is_behind_it_stays(folder, tmp_path, what):
    store = DiskStore(folder, 64 * MIB, frame_format())
    put(store, path_of(20))
    store.close()
    layout = layout_folder(folder)
    paths = {"layout": layout, "segment": layout / "segment-00000.frames"}
    path = paths.get(what, folder / {"index": "index.sqlite", "lock": "lock"}.get(what, ""))
    moved = tmp_path / "elsewhere"
    path.rename(moved)
    path.symlink_to(moved)
    for file in (moved, *moved.rglob("*")):
        file.chmod(0o755)
    before = {file: (mode(file), file.read_bytes()) for file in (moved, *moved.rglob("*")) if file.is_file()}
    with pytest.raises(ConfigError, match="is a link"):
        DiskStore(folder, 64 * MIB, frame_format())
    run("import", tmp_path / "nothing", folder, "--limit", "16M", "--fix-permissions", code=2)
    assert before == {file: (mode(file), file.read_bytes()) for file in before}


def test_an_import_does_not_follow_a_link(folder, tmp_path):
    store = DiskStore(folder, 64 * MIB, frame_format())
    put(store, path_of(20))
    store.close()
    run("export", folder, tmp_path / "file")
    link, there = tmp_path / "link", tmp_path / "there"
    there.mkdir()
    link.symlink_to(there)
    told = run("import", tmp_path / "file", link, "--limit", "16M", code=2).stderr
    assert f"{link} is a link" in told
    assert str(there) in told
    assert list(there.iterdir()) == []


def test_recordings_verdicts_and_what_a_server_says_of_them(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PAGEFOLD_CACHE", str(tmp_path / "cache"))
    recording, key_file = tmp_path / "trace", tmp_path / "keys"
    verdict = Verdict("m", "f", {}, 1.0, None, 0.0, 0.0, 1, 1, "t", "d", "2026-01-01", "1")
    with umask(0):
        recorder = TraceRecorder(recording, lambda: 0.0)
        assert mode(recording) == 0o600
        recorder.close()
        file = write_verdict(verdict, tmp_path / "cache")
    key_file.touch(0o600)
    assert (mode(file), mode(file.parent)) == (0o600, 0o700)
    tell_of_served(None, recording, key_file, fix=False)
    assert capsys.readouterr().err == ""
    wide = {recording: 0o644, file: 0o644, file.parent: 0o755, key_file: 0o640}
    for path, permissions in wide.items():
        path.chmod(permissions)
    tell_of_served(None, recording, key_file, fix=False)
    told = capsys.readouterr().err
    assert f"{recording} (mode 0644)" in told
    assert f"{file.parent} (mode 0755) and 1 more" in told
    assert {path: mode(path) for path in wide} == wide
    tell_of_served(None, recording, key_file, fix=True)
    assert {mode(path) for path in wide} == {0o600, 0o700}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_folder_of_another_user_is_a_line(folder, tmp_path):
    for parent in (tmp_path, *tmp_path.parents[:3]):
        parent.chmod(parent.stat().st_mode | 0o011)
    store = DiskStore(folder, 64 * MIB, frame_format())
    put(store, path_of(20))
    store.close()

    def as_nobody(*arguments):
        os.seteuid(NOBODY)
        try:
            return run(*arguments, code=2).stderr
        finally:
            os.seteuid(0)

    flags = ("--limit", "16M", "--fix-permissions")
    for wide in (False, True):
        if wide:
            widen(folder)
        for arguments in (("verify", folder), ("clear", folder), ("import", tmp_path / "no", folder, *flags)):
            said = as_nobody(*arguments)
            assert "Traceback" not in said
            assert said.splitlines()[-1].startswith("error: ")
        os.seteuid(NOBODY)
        try:
            with pytest.raises(ConfigError):
                DiskStore(folder, 64 * MIB, frame_format())
        finally:
            os.seteuid(0)
    assert mode(folder) == 0o755
