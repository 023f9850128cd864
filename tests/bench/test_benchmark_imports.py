"""What benchmarks import is there: also what they import only when they run, which nothing else would notice."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "benchmarks").glob("*.py"))
FOLDERS = [ROOT / "benchmarks", ROOT / "tests", *(ROOT / "tests" / name for name in ("server", "equivalence"))]
"""Where benchmarks find modules beside the package: they put these in front of ``sys.path``."""


def _imports(tree: ast.AST) -> list[tuple[str, str]]:
    """The names that are imported from modules, each with its module; of what is only for type checkers too."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return [(node.module or "", alias.name) for node in found for alias in node.names]


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_every_name_that_is_imported_is_there(script, monkeypatch):
    monkeypatch.setattr(sys, "path", [*map(str, FOLDERS), *sys.path])
    for module, name in _imports(ast.parse(script.read_text())):
        top = module.partition(".")[0]
        is_ours = top == "pagefold" or any((folder / f"{top}.py").exists() for folder in FOLDERS)
        if not is_ours or module == "__future__":
            continue
        found = importlib.import_module(module)
        is_module = hasattr(found, "__path__") and importlib.util.find_spec(f"{module}.{name}") is not None
        assert is_module or hasattr(found, name), f"{module} has no {name}"
