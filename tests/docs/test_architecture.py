"""ARCHITECTURE.md, CONTRIBUTING.md and GLOSSARY.md name files that are there, and ask of the core what they say."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "pagefold"
_NAMED = re.compile(r"`([\w./]+)`")
_CORE = ("core", "_core")


def _files_named(text: str) -> set[str]:
    """Return what stands in backticks and is a path: it has a folder, or ends as a source file does."""
    return {name for name in _NAMED.findall(text) if re.search(r"^\w+/|\.(py|md|toml)$", name)}


def _is_there(name: str) -> bool:
    """Whether ``name`` is a file or folder of the repository, or ends the path of one of the source or the tests."""
    return (ROOT / name).exists() or any(next(tree.glob(f"**/{name}"), None) for tree in (SOURCE, ROOT / "tests"))


@pytest.mark.parametrize("page", ["ARCHITECTURE.md", "CONTRIBUTING.md", "GLOSSARY.md"])
def test_every_file_that_is_named_exists(page):
    named = _files_named((ROOT / page).read_text())
    assert sorted(name for name in named if not _is_there(name)) == []


def test_a_file_that_is_gone_is_found():
    named = _files_named("`kv/gone.py`, `lost.py`, `store/`, `kv/table.py`; but `Block.to`, `core.pins`, `/v1/x`.")
    assert named == {"kv/gone.py", "lost.py", "store/", "kv/table.py"}
    assert {name for name in named if not _is_there(name)} == {"kv/gone.py", "lost.py"}


def _dotted(node: ast.expr) -> list[str]:
    """Return the names of ``a.b.c``; none where it begins with anything else than a name."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else []


def _asked(text: str) -> set[tuple[str, str]]:
    """Return what a file asks of the core: the part, or nothing for the core itself, and the name asked for."""
    tree = ast.parse(text)
    inner = {node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    asked: set[tuple[str, str]] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or node in inner:
            continue
        names = _dotted(node)
        at = next((at for at, name in enumerate(names) if name in _CORE), len(names))
        behind = names[at + 1 :]
        if behind:
            asked.add((".".join(behind[:-1]), behind[-1]))
    return asked


def test_what_is_asked_is_read_as_it_stands():
    text = "core.match(a).b\nself._core.pins.give_up(core.now_s)\nx = core.rules\nself.core = core\nother.pool.blocks"
    assert _asked(text) == {("", "match"), ("pins", "give_up"), ("", "now_s"), ("", "rules")}


def test_the_scheduler_asks_of_the_core_what_the_list_says():
    """Both ways: nothing is asked that is not in the list, and the list has nothing that nobody asks."""
    section = (
        (ROOT / "ARCHITECTURE.md").read_text().split("## What the scheduler asks of the core\n")[1].split("\n## ")[0]
    )
    listed: set[tuple[str, str]] = set()
    for line in section.splitlines():
        if line.startswith("| ") and "`" in line:
            part, names = line.strip("| ").split(" | ")
            listed |= {(part.strip("`") if "`" in part else "", name) for name in _NAMED.findall(names)}
    asked = {one for file in sorted((SOURCE / "scheduler").rglob("*.py")) for one in _asked(file.read_text())}
    assert asked - listed == set()
    assert listed - asked == set()
