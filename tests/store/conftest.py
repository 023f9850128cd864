"""A disk store in a folder of the test's own."""

from __future__ import annotations

import pytest
from disk_blocks import frame_format

from pagefold.store.disk import DiskStore


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def store(folder):
    made = DiskStore(folder, 64 * 2**20, frame_format())
    yield made
    made.close()
