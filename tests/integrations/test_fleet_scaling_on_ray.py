"""Replicas come and go on a real Ray, by load and for another version, and no client notices."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from local_server import until
from ray_fleet import START_S, Clients, DeployedFleet, kept_asking, paused

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
    pytest.mark.timeout(900),
]

PROMPTS = [f"{number} things that we know of the sea and of ships" for number in range(24)]
LONG = ([7] * 40, [11] * 40)
LONG_TOKENS = 1900


@pytest.fixture(scope="module")
def fleet(tiny_chat_model, tmp_path_factory):
    made = DeployedFleet(tiny_chat_model, tmp_path_factory.mktemp("fleet"))
    yield made
    made.close()


@pytest.fixture
def clients(fleet):
    made = Clients(fleet)
    yield made
    made.close()


def test_a_second_server_comes_with_load_and_goes_without_and_its_stream_is_whole(fleet, clients):
    fleet.deploy(
        *("--served-model-name", "scaled"), min_replicas=1, max_replicas=2, upscale_delay_s=1, downscale_delay_s=1
    )
    fleet.wait_until_settled(1)
    for prompt in PROMPTS:
        clients.ask_alone(prompt, 100)
    for prompt in LONG:
        clients.ask_alone(prompt, LONG_TOKENS)
    running = {}

    def keep_all_busy(_):
        for prompt in PROMPTS:
            if prompt not in running or running[prompt].is_over:
                running[prompt] = clients.ask(prompt, 100)

    with kept_asking(keep_all_busy, 0.05):
        until(lambda: len(fleet.servers()) == 2, "a second server", START_S, 0.5)
        until(lambda: [each for each in fleet.replicas() if each["num_requests"]][1:], "both to be asked", START_S, 0.2)
    clients.wait()
    assert not clients.failures()

    streams = [clients.ask(prompt, LONG_TOKENS) for prompt in LONG]
    until(lambda: all(stream.num_events >= 3 for stream in streams), "both to stream", pause_s=0.001)
    servers = fleet.servers()
    with paused(servers):
        assert len(servers) == 2
        assert not any(stream.is_over for stream in streams)
        until(lambda: fleet.states("replicas") == {"RUNNING": 1, "STOPPING": 1}, "Ray to end one", START_S, 0.2)
        assert not any(stream.is_over for stream in streams)
    clients.wait()
    assert not clients.failures()
    fleet.wait_until_settled(1)


def test_a_new_version_takes_the_place_of_the_old_one_under_load(fleet, clients):
    fleet.deploy(*("--served-model-name", "old"), min_replicas=2, max_replicas=2)
    fleet.wait_until_settled(2)
    until(lambda: fleet.complete("x", max_tokens=1)["model"] == "old", "the old version", START_S, 0.2)
    old_names, old_servers = fleet.names(), set(fleet.servers())
    for prompt in PROMPTS:
        clients.ask_alone(prompt, 40)
    for prompt in LONG:
        clients.ask_alone(prompt, LONG_TOKENS)
    streams = [clients.ask(prompt, LONG_TOKENS) for prompt in LONG]
    until(lambda: all(stream.num_events >= 3 for stream in streams), "both to stream", pause_s=0.001)
    slow = min(old_servers)
    since = fleet.num_told()
    with (
        paused([slow]),
        kept_asking(lambda number: clients.ask(PROMPTS[number % 24], 40, is_stream=bool(number % 2)), 0.25),
    ):
        assert not all(stream.is_over for stream in streams)
        fleet.deploy(*("--served-model-name", "new"), min_replicas=2, max_replicas=2)
        until(lambda: set(fleet.servers()) & old_servers == {slow}, "the other server to end", START_S, 0.2)
        until(lambda: fleet.states("replicas") == {"RUNNING": 2, "STOPPING": 1}, "the roll to end", START_S, 0.2)
        until(lambda: clients.models()["new"] >= 20, "new servers to answer", START_S, 0.2)
        assert not all(stream.is_over for stream in streams)  # one goes through the old front, from an old server
    clients.wait()
    assert not clients.failures()
    assert clients.models()["old"] > len(LONG)
    assert fleet.least_running("front", since) >= 1  # so nobody has waited for a front
    fleet.wait_until_settled(2)
    assert not fleet.names() & old_names
    assert not set(fleet.servers()) & old_servers
