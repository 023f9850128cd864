"""What the connector's worker copies, checks and hands to slow tiers: tensors as vLLM has them, and real stores."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import time
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from pagefold.errors import ConfigError
from pagefold.integrations.vllm.connector_directory import KEY_BYTES
from pagefold.integrations.vllm.connector_orders import StepOrders, WorkerFacts
from pagefold.integrations.vllm.connector_pages import PagesOnCard, PagesOnHost, page_views, pages_of
from pagefold.integrations.vllm.connector_planner import ConnectorPlanner, Progress
from pagefold.integrations.vllm.connector_settings import ConnectorSettings
from pagefold.integrations.vllm.connector_tiers import open_tiers
from pagefold.integrations.vllm.connector_worker import ConnectorWorker
from pagefold.integrations.vllm.versions import KNOWN_VERSIONS, refuse_unknown
from pagefold.kv import LoadOp, StoreOp
from pagefold.store.arena import HostArena

LAYERS, BLOCKS, HEADS, TOKENS, DIM = 3, 10, 2, 16, 8
PAGE_BYTES = HEADS * TOKENS * 2 * DIM * 4
SETTINGS = ConnectorSettings(host_bytes=2**20)


def caches() -> dict[str, torch.Tensor]:
    """KV of every layer, as vLLM has it on a CPU, with other numbers everywhere."""
    generator = torch.Generator().manual_seed(1)
    return {
        f"layers.{layer}.attn": torch.rand(BLOCKS, HEADS, TOKENS, 2 * DIM, generator=generator)
        for layer in range(LAYERS)
    }


def views(kv: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return page_views(kv, BLOCKS, dict.fromkeys(kv, PAGE_BYTES))


def pages(kv: dict[str, torch.Tensor], kind: str = "host") -> PagesOnHost | PagesOnCard:
    return pages_of(views(kv)) if kind == "host" else PagesOnCard(views(kv))


def block(kv: dict[str, torch.Tensor], block_id: int) -> list[bytes]:
    return [cache[block_id].numpy().tobytes() for cache in kv.values()]


@pytest.mark.parametrize("kind", ["host", "card"])
def test_a_block_comes_back_as_it_was_wherever_it_goes(kind):
    kv = caches()
    arena = HostArena(4, LAYERS * PAGE_BYTES)
    copies = pages(kv, kind)
    assert copies.block_bytes == LAYERS * PAGE_BYTES
    wanted, others = block(kv, 3), block(kv, 5)
    copies.store([StoreOp(3, 2), StoreOp(4, 0)], arena)
    for cache in kv.values():
        cache[3] = 0
    assert copies.load([LoadOp(2, 7), LoadOp(0, 3)], arena) == frozenset()
    assert block(kv, 7) == wanted
    assert block(kv, 5) == others
    assert copies.read(7).tobytes() == b"".join(wanted)


def test_both_ways_to_copy_write_the_same_bytes():
    kv = caches()
    arenas = [HostArena(2, LAYERS * PAGE_BYTES) for _ in range(2)]
    for kind, arena in zip(("host", "card"), arenas, strict=True):
        pages(kv, kind).store([StoreOp(1, 0), StoreOp(2, 1)], arena)
    assert np.array_equal(arenas[0].blocks, arenas[1].blocks)
    assert [arenas[0].checksum(at) for at in range(2)] == [arenas[1].checksum(at) for at in range(2)]


@pytest.mark.parametrize("kind", ["host", "card"])
def test_a_turned_bit_is_found_when_it_is_loaded(kind):
    kv = caches()
    arena = HostArena(4, LAYERS * PAGE_BYTES)
    copies = pages(kv, kind)
    copies.store([StoreOp(1, 0), StoreOp(2, 1)], arena)
    arena.blocks[1, 100] ^= 1
    assert copies.load([LoadOp(0, 3), LoadOp(1, 4)], arena) == {1}


def test_blocks_that_attention_splits_and_layers_that_share_pages_are_whole():
    plain = torch.rand(2 * BLOCKS, HEADS, TOKENS // 2, 2 * DIM)
    kv = {"a": plain, "b": plain, "c": torch.rand(BLOCKS, HEADS, TOKENS, 2 * DIM)}
    made = page_views(kv, BLOCKS, dict.fromkeys(kv, PAGE_BYTES))
    assert [tuple(view.shape) for view in made] == [(BLOCKS, PAGE_BYTES)] * 2
    assert made[0][3].numpy().tobytes() == plain[6:8].numpy().tobytes()


def test_pages_with_gaps_are_copied_without_what_lies_between():
    packed = torch.arange(BLOCKS * 2 * 64, dtype=torch.uint8).reshape(BLOCKS, 2, 64)
    kv = {"a": packed[:, 0], "b": packed[:, 1]}
    made = page_views(kv, BLOCKS, dict.fromkeys(kv, 64))
    assert made[1][4].numpy().tobytes() == packed[4, 1].numpy().tobytes()


@pytest.mark.parametrize("shape", [(2, BLOCKS + 1, 4), ()])
def test_a_layout_that_does_not_begin_with_blocks_is_refused_by_the_layers_name(shape):
    with pytest.raises(ConfigError, match=r"layers\.0"):
        page_views({"layers.0": torch.zeros(shape)}, BLOCKS, {"layers.0": 16})


# A worker and a planner together, as in vLLM's two processes.


def key(at: int) -> bytes:
    return bytes([at]) * KEY_BYTES


def path(num: int, first: int = 1) -> bytes:
    return b"".join(key(first + at) for at in range(num))


class Pair:
    """Both sides, with tensors of their own."""

    def __init__(self, num_host_blocks=8, settings=SETTINGS):
        self.kv = caches()
        block_bytes = LAYERS * PAGE_BYTES
        facts = WorkerFacts(num_host_blocks, block_bytes, b"layout")
        stores = []
        if settings.has_slow_tiers:
            tiers = open_tiers(settings, b"layout", block_bytes, label="tiny")
            stores = tiers.stores
            facts = facts._replace(links=tiers.links, on_disk=tiers.on_disk, most_on_disk=tiers.most_on_disk)
        self.arena = HostArena(num_host_blocks, block_bytes)
        self.worker = ConnectorWorker(pages(self.kv), self.arena, stores, verifies=True)
        self.planner = ConnectorPlanner(facts, TOKENS, "lru")
        self.planner.tiering.arbiter.compute_s_per_token = 1.0  # loading always pays

    def step(self, *progress, num_tokens=0):
        """Carry out a step; return its orders and its report."""
        orders = self.planner.plan_step(progress, num_tokens, len(progress))
        self.worker.begin(orders)
        self.worker.load()
        self.worker.save()
        self.failed = self.worker.failed_blocks()
        report = self.worker.report()
        if report is not None:
            self.planner.apply(report, time.monotonic())
        return orders, report

    def lookup(self, name, keys):
        """Ask until there is an answer."""
        end = time.monotonic() + 30
        while (found := self.planner.lookup(name, keys, 0, time.monotonic())) is None and time.monotonic() < end:
            self.step()
        return found

    def until_written(self, num):
        """Go on until slow tiers were given so many blocks, or had to leave them out."""
        counts = self.planner.counts
        end = time.monotonic() + 30
        while counts.num_written + counts.num_unwritten < num and time.monotonic() < end:
            self.step()
        assert counts.num_written + counts.num_unwritten == num


def test_what_one_step_stores_another_restores():
    pair = Pair()
    wanted = [block(pair.kv, at) for at in range(3)]
    _, report = pair.step(Progress("one", path(3), [0, 1, 2]))
    assert report.num_bytes == {"store": 3 * LAYERS * PAGE_BYTES}
    assert pair.lookup("two", path(3)) == 3
    pair.planner.begin_load("two", path(3), [5, 6, 7], 0, 3)
    _, report = pair.step()
    assert [block(pair.kv, at) for at in (5, 6, 7)] == wanted
    assert report.num_differing == 0
    assert pair.failed == set()


def test_behind_a_damaged_block_nothing_is_stored_until_that_is_known():
    pair = Pair()
    pair.step(Progress("one", path(2), [0, 1]))
    pair.arena.blocks[1, 7] ^= 8
    pair.planner.begin_load("two", path(2), [5, 6], 0, 2)
    planner, worker = pair.planner, pair.worker
    first = planner.plan_step([Progress("two", path(3), [5, 6, 7])])
    second = planner.plan_step([Progress("two", path(4), [5, 6, 7, 8])])
    reports = []
    for orders in (first, second):
        worker.begin(orders)
        worker.load()
        worker.save()
        reports.append(worker.report())
        if orders is first:
            assert worker.failed_blocks() == {6}
    assert [report.stored for report in reports] == [False, False]
    for report in reports:
        planner.apply(report, 0.0)
    assert pair.lookup("three", path(4)) == 0
    orders, report = pair.step(Progress("two", path(4), [5, 6, 7, 8]))
    assert report.stored
    assert len(orders.stores) == 4
    assert pair.lookup("four", path(4)) == 4


def test_a_step_without_orders_reports_nothing():
    pair = Pair()
    orders, report = pair.step()
    assert orders.is_empty
    assert report is None
    pair.worker.begin(StepOrders(-1))
    assert pair.worker.report() is None


@pytest.fixture
def on_disk(tmp_path):
    return replace(SETTINGS, disk_path=str(tmp_path / "kv"), disk_bytes=2**25)


def test_a_second_start_finds_what_is_on_the_disk(on_disk):
    pair = Pair(settings=on_disk)
    wanted = [block(pair.kv, at) for at in range(3)]
    pair.step(Progress("one", path(3), [0, 1, 2]))
    pair.until_written(3)
    pair.worker.close()
    again = Pair(settings=on_disk)
    for cache in again.kv.values():
        cache.zero_()
    assert again.lookup("two", path(4)) == 3
    again.planner.begin_load("two", path(4), [5, 6, 7, 8], 0, 3)
    assert again.planner.sources("two") == (3, "disk")
    again.step()
    assert [block(again.kv, at) for at in (5, 6, 7)] == wanted
    again.worker.close()


def test_a_damaged_frame_is_a_miss(on_disk, tmp_path):
    pair = Pair(settings=on_disk)
    pair.step(Progress("one", path(3), [0, 1, 2]))
    pair.until_written(3)
    payload = b"".join(block(pair.kv, 1))
    pair.worker.close()
    damaged = 0
    for file in (tmp_path / "kv").rglob("*"):
        if file.is_file() and (at := file.read_bytes().find(payload)) >= 0:
            with file.open("r+b") as opened:
                opened.seek(at + 11)
                opened.write(bytes([payload[11] ^ 1]))
            damaged += 1
    assert damaged == 1
    again = Pair(settings=on_disk)
    assert again.lookup("two", path(3)) == 1
    assert again.planner.counts.num_lost == 2
    again.worker.close()


def test_a_reset_empties_the_disk_too(on_disk):
    pair = Pair(settings=on_disk)
    pair.step(Progress("one", path(2), [0, 1]))
    pair.until_written(2)
    pair.planner.reset()
    assert pair.step()[0].clears
    pair.worker.close()
    again = Pair(settings=on_disk)
    assert again.lookup("two", path(2)) == 0
    again.worker.close()


@pytest.fixture
def redis(tmp_path):
    """The port of a server of this test's own."""
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("needs a redis-server")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    command = [program, "--port", str(port), "--save", "", "--bind", "127.0.0.1", "--dir", str(tmp_path)]
    with (tmp_path / "redis.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            break
        time.sleep(0.01)
    yield port
    process.kill()
    process.wait()


def test_a_remote_store_has_what_another_vllm_has_computed(redis):
    settings = replace(SETTINGS, remote_url=f"redis://127.0.0.1:{redis}")
    one, other = Pair(settings=settings), Pair(settings=settings)
    wanted = [block(one.kv, at) for at in range(3)]
    one.step(Progress("one", path(3), [0, 1, 2]))
    one.until_written(3)
    for cache in other.kv.values():
        cache.zero_()
    assert other.lookup("two", path(4)) == 3
    other.planner.begin_load("two", path(4), [5, 6, 7, 8], 0, 3)
    assert other.planner.sources("two") == (3, "remote")
    other.step()
    assert [block(other.kv, at) for at in (5, 6, 7)] == wanted
    assert other.lookup("three", path(2, first=50)) == 0
    for pair in (one, other):
        pair.worker.close()


def test_more_than_the_disk_may_hold_pushes_out_what_was_used_longest_ago(on_disk, tmp_path):
    settings = replace(on_disk, disk_bytes=2**22)
    pair = Pair(num_host_blocks=16, settings=settings)
    for at in range(30):
        pair.step(Progress(f"{at}", path(2, first=2 * at + 1), [0, 1]))
        pair.planner.finish(f"{at}")
        pair.until_written(2 * at + 2)
    assert pair.planner.counts.num_written == 60
    held = sum(file.stat().st_size for file in (tmp_path / "kv").rglob("*") if file.is_file())
    assert held <= settings.disk_bytes
    assert pair.lookup("last", path(2, first=59)) == 2
    pair.worker.close()


# Settings.


def test_settings_are_read_as_people_write_them():
    settings = ConnectorSettings.parse({"host_bytes": "1.5GiB", "disk_path": "/kv", "disk_bytes": "2GB"})
    assert settings.host_bytes == 3 * 2**29
    assert settings.disk_bytes == 2 * 10**9
    assert settings.has_slow_tiers
    assert not ConnectorSettings.parse({"host_bytes": 5}).has_slow_tiers


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "lacks host_bytes"),
        ({"host_bytes": 0}, "host_bytes is 0"),
        ({"host_bytes": "lots"}, "host_bytes is 'lots'"),
        ({"host_bytes": True}, "host_bytes is True"),
        ({"host_bytes": 5, "hots_bytes": 6}, "hots_bytes.*mean host_bytes.*There are: host_bytes, disk_path"),
        ({"host_bytes": 5, "disk_path": "/kv"}, "disk_bytes is 0"),
        ({"host_bytes": 5, "disk_bytes": 6}, "disk_path is not said"),
        ({"host_bytes": 5, "disk_path": 7}, "disk_path is 7"),
        ({"host_bytes": 5, "eviction_policy": "best"}, "eviction_policy is 'best'.*one of lru"),
        ({"host_bytes": 5, "verifies_restored": "yes"}, "verifies_restored is 'yes'"),
    ],
)
def test_settings_that_cannot_work_are_refused_by_name(given, says):
    with pytest.raises(ConfigError, match=says):
        ConnectorSettings.parse(given)


def test_only_known_versions_are_let_in():
    for version in KNOWN_VERSIONS:
        refuse_unknown(version, "it")
        refuse_unknown(f"{version}+cpu", "it")
    with pytest.raises(ConfigError, match=r"0\.30\.2.*0\.32\.0, 0\.31\.0"):
        refuse_unknown("0.30.2", "it")
    assert all(newer > older for newer, older in pairwise(KNOWN_VERSIONS))
