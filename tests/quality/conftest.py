"""A text that nobody has read before, and a cache folder of a test's own."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from pagefold.quality.texts import Text

if TYPE_CHECKING:
    from pathlib import Path

_WORDS = ("the", "of", "and", "whale", "ship", "captain", "sea", "union", "state", "people", "peace", "war", "old")


@pytest.fixture
def story() -> Text:
    rng = random.Random(0)
    sentences = [" ".join(rng.choices(_WORDS, k=rng.randrange(4, 14))).capitalize() + "." for _ in range(1500)]
    return Text("story", "\n".join(sentences))


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PAGEFOLD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
