"""Tiers in the simulator: the server's decisions, modelled bandwidth, seeded faults."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from pagefold.cli import app
from pagefold.errors import ConfigError
from pagefold.sim import SimConfig, simulate
from pagefold.sim.step_cost import LinearStepCost
from pagefold.sim.tiers import TierModel
from pagefold.sim.traces import parse_workload

SLOW_COMPUTE = LinearStepCost(step_s=5e-3, token_s=6e-4)
"""A CPU: a block of 16 tokens takes 10 ms to compute, and 0.4 ms to read from the disk."""
MANY = 10**6


def run(tiers, *, cost=SLOW_COMPUTE, num_chats=100, num_blocks=320, admission="predicted"):
    requests = parse_workload(f"chat:num_chats={num_chats}").generate()
    config = SimConfig(num_blocks=num_blocks, max_num_seqs=16, eviction_policy="lru", tiers=tiers, admission=admission)
    return simulate(requests, config, step_cost=cost)


def test_each_tier_finds_more_and_answers_sooner():
    none, host, disk = (run(TierModel(host_tokens=h, disk_tokens=d)) for h, d in ((0, 0), (12_000, 0), (12_000, MANY)))
    assert none.num_hit_tokens < host.num_hit_tokens < disk.num_hit_tokens
    assert none.num_host_loaded == none.num_disk_read == host.num_disk_read == 0
    assert disk.num_disk_read > 100
    assert disk.ttft_p50_s < none.ttft_p50_s
    assert none.num_output_tokens == host.num_output_tokens == disk.num_output_tokens


def test_nothing_that_the_disk_has_room_for_is_lost():
    """What leaves the host's memory was written before, whatever was used again meanwhile."""
    report = run(TierModel(host_tokens=12_000, disk_tokens=MANY))
    assert report.num_disk_written >= report.num_host_stored - 12_000 // 16
    assert report.num_host_stored > 2_000


@pytest.mark.long
def test_the_same_seed_gives_the_same_and_another_other_faults():
    one, same, other = (run(TierModel(host_tokens=8_000, disk_tokens=MANY, fault_rate=0.1, seed=s)) for s in (1, 1, 2))
    assert one == same
    assert one.num_disk_missed > 0
    assert (one.num_disk_missed, one.duration_s) != (other.num_disk_missed, other.duration_s)


@pytest.mark.long
def test_faults_cost_hits_and_nothing_else():
    right, wrong, none = (
        run(TierModel(host_tokens=8_000, disk_tokens=MANY, fault_rate=rate)) for rate in (0.0, 0.3, 1.0)
    )
    assert right.num_hit_tokens > wrong.num_hit_tokens > none.num_hit_tokens
    assert right.num_output_tokens == wrong.num_output_tokens == none.num_output_tokens
    assert not none.num_disk_read


def test_a_disk_that_is_slower_than_computing_is_left_alone():
    report = run(TierModel(host_tokens=8_000, disk_tokens=MANY, disk_bytes_per_s=5e7))
    assert report.num_disk_read < report.num_disk_written / 20, "it is tried again from time to time, and no more"
    assert report.num_disk_written


@pytest.mark.long
def test_preempted_requests_wait_as_they_did():
    tiers = TierModel(host_tokens=20_000, disk_tokens=MANY, fault_rate=0.2)
    report = run(tiers, num_chats=150, num_blocks=200, admission="prompt")
    assert report.num_preemptions > 10
    assert report.num_disk_read > 100
    assert report.num_requests > 400


def test_moving_blocks_takes_time():
    fast, slow = (run(TierModel(host_tokens=30_000, host_bytes_per_s=speed)) for speed in (1e12, 1e9))
    assert slow.duration_s > fast.duration_s


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"disk_tokens": 10}, "no host memory"),
        ({"host_tokens": -1}, "host_tokens is -1"),
        ({"host_tokens": 100, "fault_rate": 1.5}, "fault_rate is 1.5"),
        ({"host_tokens": 100, "disk_bytes_per_s": 0.0}, "disk_bytes_per_s is 0.0"),
        ({"host_tokens": 100, "disk_latency_s": float("inf")}, "disk_latency_s is inf"),
        ({"host_tokens": 100, "token_bytes": 0}, "token_bytes is 0"),
    ],
)
def test_models_that_cannot_be_are_refused(given, told):
    with pytest.raises(ConfigError, match=told):
        TierModel(**given)


def test_a_host_smaller_than_a_block_is_refused():
    with pytest.raises(ConfigError, match="host_tokens is 5"):
        run(TierModel(host_tokens=5))


SMALL = ["simulate", "chat:num_chats=40", "--cache-tokens", "5k"]


def test_the_command_tells_tiers():
    result = CliRunner().invoke(app, [*SMALL, "--host-tokens", "8k", "--disk-tokens", "1M", "--json"])
    told = json.loads(result.stdout)
    assert told["num_host_stored"] > 0
    assert told["num_disk_written"] > 0
    table = CliRunner().invoke(app, [*SMALL, "--host-tokens", "8k"], env={"COLUMNS": "200"}).stdout
    assert "from host" in table


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--disk-tokens", "1M"], "there is no host memory"),
        (["--host-tokens", "8k", "--cache-only"], "Tiers take time"),
        (["--host-tokens", "many"], "host_tokens is 'many'"),
    ],
)
def test_the_command_refuses_what_cannot_be(flags, told):
    result = CliRunner().invoke(app, [*SMALL, *flags])
    assert result.exit_code
    assert told in result.output
