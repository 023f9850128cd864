"""A folder appears whole or not at all: interruptions, kills, two processes at once, damage afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pagefold import errors
from pagefold.errors import ConfigError
from pagefold.hub.convert import convert
from pagefold.hub.publish import MANIFEST, is_published, publish_folder

if TYPE_CHECKING:
    from collections.abc import Callable

SOURCE = Path(errors.__file__).parents[1]


def build(folder: Path, _scratch: Path) -> None:
    (folder / "weights").write_bytes(b"12345")


def never(_folder: Path, _scratch: Path) -> None:
    pytest.fail("built again")


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def start(code: str, *arguments: object) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


CONVERT = """
import sys, time
from pathlib import Path
from pagefold.hub.convert import convert
def show(what, done, total):
    print(what, done, flush=True)
    time.sleep(float(sys.argv[3]))
convert(Path(sys.argv[1]), Path(sys.argv[2]), progress=show)
"""


def test_a_folder_is_built_once(tmp_path: Path) -> None:
    target = tmp_path / "a" / "model"
    assert not is_published(target)
    assert publish_folder(target, build, about={"source": "here"}) == target
    assert is_published(target)
    manifest = json.loads((target / MANIFEST).read_bytes())
    assert manifest == {"source": "here", "files": {"weights": 5}}
    assert publish_folder(target, never, about={}) == target
    assert visible(tmp_path / "a") == ["model"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, MemoryError])
def test_an_interruption_leaves_nothing(
    tiny_gguf: Callable[..., Path], tmp_path: Path, error: type[BaseException]
) -> None:
    def interrupt(_what: str, done: int, _total: int) -> None:
        assert not (tmp_path / "models" / "tiny").exists()
        if done == 7:
            raise error

    with pytest.raises(error):
        convert(tiny_gguf(), tmp_path / "models" / "tiny", progress=interrupt)
    assert visible(tmp_path / "models") == []
    assert is_published(convert(tiny_gguf(), tmp_path / "models" / "tiny"))


def test_a_killed_process_leaves_nothing_in_the_way(tiny_gguf: Callable[..., Path], tmp_path: Path) -> None:
    source, target = tiny_gguf(), tmp_path / "models" / "tiny"
    process = start(CONVERT, source, target, 0.2)
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip().endswith(" 3"):
            break
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not target.exists()
    assert visible(target.parent) == [".tiny.work"]  # what the kill left behind
    assert is_published(convert(source, target))
    assert visible(target.parent) == ["tiny"]


def test_two_processes_at_once_do_the_work_once(tiny_gguf: Callable[..., Path], tmp_path: Path) -> None:
    source, target = tiny_gguf(), tmp_path / "models" / "tiny"
    processes = [start(CONVERT, source, target, 0.05) for _ in range(2)]
    seen: list[bool] = []
    while any(process.poll() is None for process in processes):
        if target.exists():  # whenever it is visible, it is whole
            seen.append(is_published(target))
        time.sleep(0.002)
    outputs = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert all(seen)
    assert is_published(target)
    assert sum("converting" in out for out, _ in outputs) == 1
    assert visible(target.parent) == ["tiny"]


def test_who_waits_is_told_so(tmp_path: Path) -> None:
    target, building, go_on = tmp_path / "model", threading.Event(), threading.Event()

    def slow(folder: Path, scratch: Path) -> None:
        building.set()
        assert go_on.wait(10)
        build(folder, scratch)

    def told(what: str, _done: int, _total: int) -> None:
        messages.append(what)
        go_on.set()

    messages: list[str] = []
    first = threading.Thread(target=lambda: publish_folder(target, slow, about={}))
    first.start()
    assert building.wait(10)
    assert publish_folder(target, never, about={}, progress=told) == target
    first.join()
    assert messages == ["waiting for another process"]


@pytest.mark.parametrize("damage", ["shorter", "missing", "manifest"])
def test_a_damaged_folder_is_built_again(tmp_path: Path, damage: str) -> None:
    target = publish_folder(tmp_path / "model", build, about={})
    if damage == "shorter":
        (target / "weights").write_bytes(b"123")
    elif damage == "missing":
        (target / "weights").unlink()
    else:
        (target / MANIFEST).write_text("{")
    assert not is_published(target)
    assert is_published(publish_folder(target, build, about={}))
    assert (target / "weights").read_bytes() == b"12345"
    assert visible(tmp_path) == ["model"]


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    foreign = tmp_path / "model"
    foreign.mkdir()
    (foreign / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="in the way"):
        publish_folder(foreign, build, about={})
    assert visible(foreign) == ["thesis.txt"]
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="in the way"):
        publish_folder(tmp_path / "file", build, about={})
    (tmp_path / "empty").mkdir()
    assert is_published(publish_folder(tmp_path / "empty", build, about={}))


def test_a_place_that_cannot_be_written_is_a_typed_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="cannot be made"):
        publish_folder(tmp_path / "file" / "model", never, about={})

    def full(_folder: Path, _scratch: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(ConfigError, match=r"cannot be made: .*No space left on device\. Make room"):
        publish_folder(tmp_path / "model", full, about={})
    assert visible(tmp_path) == ["file"]

    def refused(*_: Any) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(ConfigError, match="Permission denied"):
        publish_folder(tmp_path / "model", never, about={})
