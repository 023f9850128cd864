"""A server process for the examples: the tiny random model, under the name that README and docs use."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from local_server import ProcessServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def server(tiny_chat_model: Path) -> Iterator[ProcessServer]:
    """Two requests run, two more may wait: a client that sends more at once meets a full queue."""
    server = ProcessServer(
        str(tiny_chat_model),
        *("--served-model-name", "smollm2-135m", "--kv-cache-memory-bytes", "8M"),
        *("--max-num-seqs", "2", "--max-queued-requests", "2"),
    )
    yield server
    server.close()


@pytest.fixture(autouse=True)
def _pool_is_as_before(server: ProcessServer) -> Iterator[None]:
    yield
    server.check_pool()
