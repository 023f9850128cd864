"""A tiny random model behind a server in this process, and the built-in model behind one of its own."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from local_server import LocalServer, ProcessServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from local_server import AnyServer

_LIVE: dict[str, AnyServer] = {}
"""The servers that tests share, by the name of their fixture."""


@pytest.fixture(scope="session")
def tiny_server(tiny_chat_model: Path) -> Iterator[LocalServer]:
    server = LocalServer(tiny_chat_model, kv_cache_memory_bytes=2**22, max_num_seqs=64, max_num_batched_tokens=256)
    _LIVE["tiny_server"] = server
    yield server
    del _LIVE["tiny_server"]
    server.close()


@pytest.fixture(scope="session")
def narrow_server(tiny_chat_model: Path) -> Iterator[LocalServer]:
    """One sequence at a time, computed in chunks of 16 tokens."""
    server = LocalServer(tiny_chat_model, kv_cache_memory_bytes=2**22, max_num_seqs=1, max_num_batched_tokens=16)
    _LIVE["narrow_server"] = server
    yield server
    del _LIVE["narrow_server"]
    server.close()


@pytest.fixture
def tiny(tiny_server: LocalServer) -> Iterator[LocalServer]:
    """The tiny server with an empty cache: in a full one, what a test has just computed may go for what it asks."""
    asyncio.run(tiny_server.client.reset_prefix_cache())
    yield tiny_server
    _let_go(tiny_server)


@pytest.fixture
def narrow(narrow_server: LocalServer) -> Iterator[LocalServer]:
    yield narrow_server
    _let_go(narrow_server)


@pytest.fixture(scope="session")
def smol() -> Iterator[ProcessServer]:
    """The built-in model, served as users serve it."""
    server = ProcessServer("smollm2-135m", "--kv-cache-memory-bytes", "200M", "--max-model-len", "2048")
    _LIVE["smol"] = server
    yield server
    del _LIVE["smol"]
    server.close()


@pytest.fixture(autouse=True)
def _pools_are_as_before(request: pytest.FixtureRequest) -> Iterator[None]:
    """After every test, on every server that it asked: nothing runs or waits, and no block is lost."""
    yield
    for name, server in _LIVE.items():
        if name in request.fixturenames:
            server.check_pool()


def _let_go(server: LocalServer) -> None:
    server.runner.script = None
    server.runner.fail(0)
    server.runner.allow()
