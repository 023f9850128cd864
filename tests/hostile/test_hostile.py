"""Hostile bodies against ``pagefold serve``: none breaks it, and nobody else is made to wait for one.

Every body is said by its seed and its index: :func:`~hostile_bodies.hostile_body` and :func:`~raw_cases.raw_case`. The
figures are printed as JSON (``-s`` shows them).
"""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING

import pytest
from attack import ADMIN_KEY, Attack
from described_bodies import send_described
from local_server import LocalServer, ProcessServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NUM_SEEDS = 4
SEEDS = range(1, NUM_SEEDS + 1)


@pytest.fixture
def server(tiny_chat_model: Path) -> Iterator[ProcessServer]:
    """A server of its own for each attack: what it holds at rest is measured."""
    flags = ("--served-model-name", "tiny", "--admin-api-key", ADMIN_KEY, "--log-level", "warning")
    sizes = ("--kv-cache-memory-bytes", "16M", "--max-num-seqs", "32", "--max-num-batched-tokens", "256")
    server = ProcessServer(str(tiny_chat_model), *flags, *sizes)
    yield server
    server.close()


def attack(server: ProcessServer, seed: int, num_bodies: int) -> None:
    run = Attack(server, seed, num_bodies)
    try:
        figures = run.run(partial(send_described, url=server.url, number=seed))
    except BaseException:
        print("\n".join(run.failures[:40]))  # it may have died of one of them
        raise
    print(json.dumps(figures))
    server.close()
    assert not run.failures, "\n".join([*run.failures[:40], json.dumps(figures), server.output()[-3000:]])


def test_a_few_hostile_bodies(tiny_chat_model):
    """The short form: a server in this process whose answers are short, one client, and nobody who watches."""
    sizes = {"kv_cache_memory_bytes": 2**22, "max_num_seqs": 16, "max_num_batched_tokens": 64, "max_model_len": 64}
    server = LocalServer(tiny_chat_model, door={"admin_api_key": ADMIN_KEY}, **sizes)
    run = Attack(server, seed=0, num_bodies=300)
    run.run_alone()
    server.check_pool()
    server.close()
    assert not run.failures, "\n".join(run.failures)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", SEEDS)
def test_thousands_of_hostile_bodies(server, seed, pytestconfig):
    attack(server, seed, pytestconfig.option.hostile_bodies // NUM_SEEDS)
