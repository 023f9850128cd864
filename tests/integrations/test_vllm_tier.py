"""What of the tier and the policy can be tried without vLLM: options, names, threads, and ``pagefold cache``."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from pagefold.cli import app
from pagefold.errors import ConfigError
from pagefold.integrations.vllm.chunk_frames import ChunkNames, describe_layout, frames_of
from pagefold.integrations.vllm.chunk_policies import POLICY_CLASSES, policy_of
from pagefold.integrations.vllm.tier_jobs import ChunkMove, TierJobs
from pagefold.integrations.vllm.tier_lookups import LaterLookups, PromptLookups
from pagefold.integrations.vllm.tier_options import TierOptions
from pagefold.integrations.vllm.versions import KNOWN_VERSIONS, check_version, family_of, unmet
from pagefold.kv.transfers import StoreError
from pagefold.store.disk import DiskStore
from pagefold.store.protocol import StoreUse

MIB = 2**20
ROW = 8192


def spec(**about):
    """Stands for vLLM's specification: what is read of it."""
    parallel = {"rank": 0, "world_size": 1, "tp_size": 1, "pp_size": 1, "pcp_size": 1, "dcp_size": 1}
    asked = {"name": "some/model", "dtype": "bfloat16", "tokens": 16, "blocks_per_chunk": 1, "layout": "NHD"} | about
    parallel |= {name: value for name, value in about.items() if name in parallel}
    config = SimpleNamespace(
        model=SimpleNamespace(name=asked["name"], dtype=asked["dtype"]),
        cache=SimpleNamespace(tokens_per_hash=16, blocks_per_chunk=asked["blocks_per_chunk"]),
        parallel=SimpleNamespace(**parallel),
        groups=[SimpleNamespace(tokens_per_block=asked["tokens"], layer_names=("layers.0",))],
        worker_kv_bytes_per_block=ROW,
        kv_cache_layout=asked["layout"],
        canonical_layout=False,
    )
    return SimpleNamespace(config=config, replicated_layout=False)


def frames(row=ROW, *, weights="", family="0.32", device="cuda", **about):
    return frames_of(describe_layout(spec(**about), row, weights=weights, version_family=family, device=device))


def key_of(index, group=0):
    return index.to_bytes(32, "big") + group.to_bytes(4, "big")


def row_of(index):
    return memoryview(bytearray(index.to_bytes(4, "big") * (ROW // 4)))


def moves(names, indices, *, empty=False):
    return [
        ChunkMove(key_of(index), names(key_of(index)), memoryview(bytearray(ROW)) if empty else row_of(index))
        for index in indices
    ]


def run_jobs(jobs, job_moves, *, is_load):
    jobs.submit(7, job_moves, is_load=is_load)
    jobs.drain()
    (ended,) = jobs.take_ended()
    assert ended.job_id == 7
    assert ended.is_load == is_load
    return ended


@pytest.fixture
def disk(tmp_path):
    store = DiskStore(tmp_path / "cache", 16 * MIB, frames(), label="vLLM 0.32 some/model")
    yield store
    store.close()


@pytest.fixture
def jobs(disk):
    made = TierJobs(disk, 3)
    yield made
    made.close()


# Names and layouts.


@pytest.mark.parametrize(
    "other",
    [
        {"name": "another/model"},
        {"dtype": "float32"},
        {"tokens": 32},
        {"blocks_per_chunk": 2},
        {"layout": "HND"},
        {"layout": None},
        {"tp_size": 2, "world_size": 2},
        {"rank": 1},
        {"weights": "revision"},
        {"family": "0.31"},
        {"device": "xpu"},
        {"row": 2 * ROW},
    ],
)
def test_whatever_changes_the_bytes_is_another_layout(other):
    assert frames(**other).layout != frames().layout
    assert frames().layout == frames().layout


@given(st.lists(st.binary(min_size=1, max_size=300), unique=True, max_size=10))
def test_different_keys_have_different_names_that_fit_their_frames(keys):
    form = frames()
    names = [ChunkNames(form)(key) for key in keys]
    assert len({name.digest for name in names}) == len(keys)
    assert len({name.key for name in names}) == len(keys)
    assert all(len(name.key) == form.key_bytes for name in names)


def test_a_chunk_has_as_many_tokens_as_vllm_says_where_its_key_is_not_longer():
    assert frames(tokens=256).key_bytes == 1024
    assert frames(tokens=16).key_bytes == 64
    assert frames(tokens=8).key_bytes == 64


# Options.


def test_options_are_read():
    options = TierOptions.parse({"disk_path": "/var/kv", "limit_bytes": "2GiB", "num_threads": 2, "weights": "r1"})
    assert options == TierOptions("/var/kv", 2 * 2**30, "", "r1", 2)
    assert str(options.folder_of(0, 1)) == "/var/kv"
    assert str(options.folder_of(1, 2)) == "/var/kv/replica-1"
    assert TierOptions.parse({"remote_url": "redis://host"}).limit_bytes == 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "in one place"),
        ({"disk_path": "/x", "remote_url": "redis://x", "limit_bytes": 1}, "in one place"),
        ({"disk_path": "/x"}, "needs limit_bytes"),
        ({"remote_url": "redis://x", "limit_bytes": 1}, "limit_bytes is of a folder"),
        ({"disk_path": "/x", "limit_bytes": "many"}, "'many' is not a size"),
        ({"disk_path": "/x", "limit_bytes": -1}, "limit_bytes=-1"),
        ({"disk_path": "/x", "limit_bytes": True}, "limit_bytes=True"),
        ({"disk_path": 3, "limit_bytes": 1}, "disk_path=3"),
        ({"disk_path": "/x", "limit_bytes": 1, "num_threads": 0}, "num_threads=0"),
        ({"disk_path": "/x", "limit_bytes": 1, "root_dir": "/x"}, "no option root_dir"),
    ],
)
def test_options_that_cannot_work_are_refused_by_name(given, said):
    with pytest.raises(ConfigError, match=said):
        TierOptions.parse(given)


# Policies and versions by name.


def test_policies_that_vllm_tells_too_little_are_refused_with_the_reason():
    assert policy_of("PagefoldPolicy") == "learned"
    assert {policy_of(name) for name in POLICY_CLASSES} == set(POLICY_CLASSES.values())
    with pytest.raises(ConfigError, match=r"PagefoldWeighted.*priority.*PagefoldLru"):
        policy_of("PagefoldWeighted")
    with pytest.raises(ConfigError, match="no tokens"):
        policy_of("PagefoldCostAware")
    with pytest.raises(ConfigError, match="'PagefoldTypo'"):
        policy_of("PagefoldTypo")


def test_an_unknown_version_is_named_with_those_that_are_known(caplog):
    check_version("0.32.0+cpu", "PagefoldTier")
    assert not caplog.text
    check_version("0.99.1", "PagefoldTier")
    assert "0.99.1" in caplog.text
    assert all(version in caplog.text for version in KNOWN_VERSIONS)
    assert "0.99.1" in str(unmet("0.99.1", "PagefoldTier", "rename"))
    assert family_of("0.32.1+cu130") == "0.32"


def test_importing_it_imports_no_vllm():
    script = (
        "import sys, pagefold.integrations.vllm as it; assert 'vllm' not in sys.modules; "
        "from pagefold.errors import ConfigError\n"
        "assert not hasattr(it, 'nothing')\n"
        "try: it.PagefoldPolicy\n"
        "except ConfigError as error: assert 'pip install vllm' in str(error), error\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


# Jobs.


def test_chunks_come_back_and_what_is_missing_in_the_middle_ends_nothing(disk, jobs):
    names = ChunkNames(frames())
    ended = run_jobs(jobs, moves(names, range(6)), is_load=False)
    assert list(ended.done) == list(ended.keys) == [key_of(index) for index in range(6)]
    disk.delete([names(key_of(2)).digest, names(key_of(4)).digest])
    asked = moves(names, range(6), empty=True)
    ended = run_jobs(jobs, asked, is_load=True)
    assert list(ended.done) == [key_of(index) for index in (0, 1, 3, 5)]
    assert all(asked[index].row == row_of(index) for index in (0, 1, 3, 5))
    assert jobs.counts.num_damaged == jobs.counts.num_errors == 0
    assert jobs.counts.use.limit_bytes == 16 * MIB


def test_a_damaged_frame_is_a_miss_that_is_counted(disk, jobs):
    names = ChunkNames(frames())
    run_jobs(jobs, moves(names, range(3)), is_load=False)
    (segment,) = disk.path.rglob("segment-*.frames")
    raw = segment.read_bytes()
    at = raw.index(bytes(row_of(1))) + 100
    with segment.open("r+b") as file:
        file.seek(at)
        file.write(bytes((raw[at] ^ 1,)))
    ended = run_jobs(jobs, moves(names, range(3), empty=True), is_load=True)
    assert list(ended.done) == [key_of(0), key_of(2)]
    assert jobs.counts.num_damaged == 1


class Failing:
    """A store that fails, or waits."""

    tier = "remote"
    is_out = False

    def __init__(self):
        self.go = threading.Event()
        self.go.set()

    def get(self, gets):
        self.go.wait()
        raise StoreError("gone")

    def put(self, puts):
        self.go.wait()
        raise ZeroDivisionError

    def count(self, names):
        raise StoreError("gone")

    def use(self):
        return StoreUse(-1, -1, 0)


def test_a_store_that_fails_fails_jobs_and_raises_nothing():
    names = ChunkNames(frames())
    jobs = TierJobs(Failing(), 1)
    assert not run_jobs(jobs, moves(names, [1]), is_load=True).done
    assert not run_jobs(jobs, moves(names, [1]), is_load=False).done
    assert jobs.counts.num_errors == 2
    jobs.close()


def test_what_waits_when_all_is_closed_has_failed_and_is_told():
    names = ChunkNames(frames())
    store = Failing()
    store.go.clear()
    jobs = TierJobs(store, 1)
    for number in range(5):
        jobs.submit(number, moves(names, [number]), is_load=bool(number % 2))
    assert jobs.take_ended() == []
    closing = threading.Thread(target=jobs.close)
    closing.start()
    store.go.set()
    closing.join()
    assert {job.job_id for job in jobs.take_ended()} == set(range(5))


# Lookups.


def settled(lookups, req_id, keys):
    while None in (found := [lookups.has(req_id, key) for key in keys]):
        lookups.send()
        time.sleep(0.001)
    return found


@pytest.mark.parametrize("kind", [PromptLookups, LaterLookups])
def test_each_chunk_is_answered_by_itself_and_what_failed_is_not_told_again(disk, jobs, kind):
    names = ChunkNames(frames())
    run_jobs(jobs, moves(names, [0, 1, 3]), is_load=False)
    lookups = kind(disk, names)
    keys = [key_of(index) for index in range(5)]
    assert settled(lookups, "one", keys) == [True, True, False, True, False]
    lookups.failed("one", [keys[1]])
    assert settled(lookups, "one", keys) == [True, False, False, True, False]
    assert settled(lookups, "two", keys)[1]
    lookups.forget("one")
    assert settled(lookups, "one", keys)[1], "another request of that name asks anew"
    lookups.close()


@pytest.mark.parametrize("kind", [PromptLookups, LaterLookups])
def test_a_store_that_fails_has_nothing(kind):
    lookups = kind(Failing(), ChunkNames(frames()))
    assert settled(lookups, "one", [key_of(1), key_of(2)]) == [False, False]
    lookups.close()


def test_answers_of_a_request_that_has_ended_are_dropped(disk, jobs):
    lookups = LaterLookups(disk, ChunkNames(frames()))
    assert lookups.has("one", key_of(1)) is None
    lookups.send()
    lookups.forget("one")
    assert lookups.has("one", key_of(1)) is None
    assert settled(lookups, "one", [key_of(1)]) == [False]
    lookups.close()


# ``pagefold cache`` on the tier's folder.


def run(*arguments, code=0):
    result = CliRunner().invoke(app, ["cache", *map(str, arguments)], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result.output


def test_pagefold_cache_works_on_a_tiers_folder(tmp_path):
    names, form = ChunkNames(frames()), frames()
    folder, other = tmp_path / "cache", tmp_path / "other"
    store = DiskStore(folder, 16 * MIB, form, label="vLLM 0.32 some/model")
    jobs = TierJobs(store, 1)
    run_jobs(jobs, moves(names, range(4)), is_load=False)
    jobs.close()
    store.close()
    (row,) = json.loads(run("ls", folder, "--json"))
    assert row["label"] == "vLLM 0.32 some/model"
    assert (row["num_blocks"], row["num_tokens"]) == (4, 64)
    assert json.loads(run("stats", folder, "--json"))["layouts"][0]["block_bytes"] == ROW
    assert "4 blocks read, 4 are right" in run("verify", folder)
    run("export", folder, tmp_path / "all.frames")
    assert "4 are in" in run("import", tmp_path / "all.frames", other, "--limit", "16M")
    assert "4 blocks dropped" in run("clear", folder)
    store = DiskStore(other, 16 * MIB, form)
    assert store.count([names(key_of(index)) for index in range(4)]) == 4
    store.close()
