"""A text that nobody has read before, and a cache folder of a test's own."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

_WORDS = ("the", "of", "and", "whale", "ship", "captain", "sea", "union", "state", "people", "peace", "war", "old")


@pytest.fixture
def story() -> str:
    draw = random.Random(1)  # of few words many scores are nearly equal: here they differ
    sentences = [" ".join(draw.choices(_WORDS, k=draw.randrange(4, 14))).capitalize() + "." for _ in range(700)]
    return "\n".join(sentences)


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PAGEFOLD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
