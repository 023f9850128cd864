"""Many simulated servers: one is what a single server is, nobody is lost, and what the router knows is what is held."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from pagefold.errors import BudgetTooSmallError, ConfigError
from pagefold.kv.names import digest_of
from pagefold.routing import ROUTING_POLICIES
from pagefold.sim import ChatWorkload, SimConfig, TraceRequest, simulate
from pagefold.sim.arrivals import Arrivals
from pagefold.sim.null_runner import NullRunner
from pagefold.sim.replicas import Fleet, _Run, simulate_replicas
from pagefold.sim.step_cost import LinearStepCost
from pagefold.sim.traces import AgentSessionsWorkload

SMALL = SimConfig(num_blocks=160, block_size=16)


def chats(seed: int = 0):
    return ChatWorkload(num_chats=30, seed=seed).generate()


def nodes_of(scheduler):
    roots = list(scheduler.core.blocks.tree.roots.values())
    while roots:
        node = roots.pop()
        roots.extend(node.children.values())
        if node.parent is not None:
            yield node


@pytest.mark.parametrize("routing", ROUTING_POLICIES)
def test_one_replica_is_one_server(routing):
    fleet = Fleet(num_replicas=1, replica=SMALL, routing=routing)
    (alone,) = simulate_replicas(chats(), fleet).replicas
    assert alone == simulate(chats(), SMALL)


@pytest.mark.parametrize("routing", ROUTING_POLICIES)
def test_everybody_ends_once_wherever_he_went(routing):
    fleet = Fleet(num_replicas=4, replica=SMALL, routing=routing)
    told: list[int] = []
    report = simulate_replicas(chats(), fleet, progress=told.append)
    num_requests = len(chats())
    assert report.num_requests == sum(report.num_choices.values()) == told[-1] == num_requests
    assert sum(each.num_asked_tokens for each in report.replicas) == sum(each.prompt_tokens for each in chats())
    assert report == simulate_replicas(chats(), fleet)
    assert report.busiest_share >= 1


def test_who_returns_finds_what_he_left():
    found = {}
    for routing in ("prefix", "round_robin"):
        report = simulate_replicas(chats(), Fleet(num_replicas=4, replica=SMALL, routing=routing))
        found[routing] = report.num_hit_tokens
    assert found["prefix"] > 1.5 * found["round_robin"]


@pytest.mark.parametrize("delay_s", [0.0, 0.1, 30.0])
def test_what_the_router_knows_in_the_end_is_what_the_trees_hold(delay_s):
    fleet = Fleet(num_replicas=3, replica=replace(SMALL, num_blocks=100), event_delay_s=delay_s)
    run = _Run(Arrivals(chats(1)), fleet, LinearStepCost(), NullRunner(), None)
    report = run.to_the_end()
    assert sum(each.num_evictions.get("allocation", 0) for each in report.replicas) > 100
    for name, replica in run._replicas.items():
        held = Counter(digest_of(node) for node in nodes_of(replica.scheduler))
        assert set(run._held.holds(name)) == {int.from_bytes(digest[-8:]) for digest in held}
        assert max(held.values()) == 1
        assert not replica.scheduler.core.num_active
        assert not run._router.num_requests(name)


def test_agents_wait_for_their_answers_wherever_those_are_made():
    turns = AgentSessionsWorkload(num_sessions=6, num_turns=(5, 8), sub_agents_per_turn=0.2).generate()
    report = simulate_replicas(turns, Fleet(num_replicas=3, replica=replace(SMALL, num_blocks=2000)))
    assert report.num_requests == len(turns)
    assert report.hit_share > 0.7


def test_a_crowd_that_asks_the_same_is_spread_when_there_is_too_much_of_it():
    crowd = [TraceRequest(0.0, 512, 4, (), 512) for _ in range(40)]
    report = simulate_replicas(crowd, Fleet(num_replicas=4, replica=replace(SMALL, num_blocks=2000)))
    assert min(each.num_requests for each in report.replicas) >= 5


def test_a_request_that_fits_nowhere_is_refused_first():
    with pytest.raises(BudgetTooSmallError, match="needs"):
        simulate_replicas([TraceRequest(0.0, 16_000, 4, (), 512)], Fleet(num_replicas=4, replica=SMALL))


@pytest.mark.parametrize(
    ("change", "told"),
    [({"num_replicas": 0}, "num_replicas is 0"), ({"num_replicas": 10**6}, "1000000"), ({"routing": "magic"}, "magic")],
)
def test_what_cannot_be_is_refused(change, told):
    with pytest.raises(ConfigError, match=told):
        Fleet(**({"num_replicas": 2, "replica": SMALL} | change))
