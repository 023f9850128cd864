"""Sessions of agents: what is kept through their pauses, what goes first, and whose they are."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagefold.events import BlockEvicted, Event, PathSuperseded, SessionClosed
from pagefold.kv import HostTier, KVCore, audit, make_policy
from pagefold.kv.block import NOBODY, Node
from pagefold.kv.expectations import ExpectedPath
from pagefold.kv.host_tier import NO_HOST
from pagefold.kv.pause_forecast import NUM_RANGES, PauseForecast, range_of, said
from pagefold.request import Request, SessionRef, StopRule, session_ref
from pagefold.sampling import SamplingParams
from pagefold.scheduler import Scheduler, SchedulerLimits
from pagefold.scheduler.compactions import Compactions
from pagefold.scheduler.pauses import Pauses, forecast_of
from pagefold.sim import NullRunner

SAMPLING = SamplingParams(temperature=0.0, max_tokens=None)
SIZE = 4
Look = Callable[[ExpectedPath, float], None]


class Server:
    """A scheduler with a runner that computes nothing, and a clock that is set."""

    def __init__(
        self, num_blocks: int = 40, *, policy: str = "lru", max_sessions: int = 100, host_blocks: int = 0
    ) -> None:
        self.events: list[Event] = []
        self.core = KVCore(
            num_blocks,
            block_size=SIZE,
            policy=make_policy(policy),
            host=HostTier(host_blocks) if host_blocks else NO_HOST,
            emit=self.events.append,
        )
        self.scheduler = Scheduler(
            self.core, SchedulerLimits(8, 64), max_sessions_per_tenant=max_sessions, emit=self.events.append
        )
        self.runner = NullRunner()
        self.now = 0.0
        self._num_requests = 0

    def add(
        self,
        tokens: list[int],
        session: str = "",
        *,
        parent: str = "",
        tenant: str = "",
        num_output: int = 1,
        num_samples: int = 1,
        returns_in_s: float | None = None,
        namespace: bytes = b"n",
    ) -> Request:
        """A request comes now."""
        self._num_requests += 1
        samples = [
            Request(
                f"r{self._num_requests}" + (f"/{index}" if index else ""),
                tokens,
                SAMPLING,
                stop=StopRule(frozenset(), len(tokens) + num_output),
                namespace=namespace,
                seed=1000 * self._num_requests + index,
                arrival_s=self.now,
                session=session_ref(tenant, session, parent) if session else None,
                returns_in_s=returns_in_s,
            )
            for index in range(num_samples)
        ]
        first, *first.forks = samples
        self.scheduler.add(first)
        return first

    def step(self) -> None:
        plan = self.scheduler.schedule(self.now)
        if plan.num_rows:
            self.scheduler.apply(self.runner.run(plan))
        audit(self.core)

    def run(self) -> None:
        while self.scheduler.has_work:
            self.step()

    def serve(self, tokens: list[int], session: str = "", **how: object) -> Request:
        """Serve a request to its end."""
        request = self.add(tokens, session, **how)  # type: ignore[arg-type]
        self.run()
        return request

    def nodes(self, tokens: list[int], namespace: bytes = b"n") -> list[Node]:
        """What of a prompt is cached."""
        return self.core.match(namespace, array("i", tokens).tobytes(), len(tokens)).nodes

    def superseded(self, tokens: list[int]) -> list[bool]:
        return [node.claim is NOBODY for node in self.nodes(tokens)]

    def end(self, session: str, tenant: str = "") -> tuple[int, int, int] | None:
        return self.scheduler.end_session(session_ref(tenant, session))

    def evict(self, num_blocks: int) -> list[str]:
        """Evict so many blocks now; return by which rules."""
        self.core.now_s = self.now
        num_before = len(self.events)
        self.core.blocks.reclaim(num_blocks)
        audit(self.core)
        return [event.rule for event in self.events[num_before:] if isinstance(event, BlockEvicted)]


def tokens_of(seed: int, num_tokens: int) -> list[int]:
    return Random(seed).choices(range(1000), k=num_tokens)


# What is edited away.


def test_what_a_client_has_edited_away_goes_first():
    server = Server()
    head, old, new = tokens_of(1, 12), tokens_of(2, 20), tokens_of(3, 8)
    server.serve(tokens_of(9, 16))  # older than all
    server.serve(head + old, "a")
    server.serve(tokens_of(8, 16))
    server.add(head + new, "a")  # it only waits, and what it has edited away has lost its value
    assert server.superseded(head + old) == [False] * 3 + [True] * 5
    assert server.evict(5) == ["superseded"] * 5
    assert len(server.nodes(head + old)) == 3, "what the new prompt still has is kept"
    server.run()
    server.now = 1.0
    assert server.evict(1) == ["policy"]
    (told,) = [event for event in server.events if isinstance(event, PathSuperseded)]
    assert (told.num_blocks, told.cause) == (5, "edited")


def test_who_goes_on_supersedes_nothing():
    server = Server()
    said_so_far = tokens_of(1, 12)
    for _ in range(4):
        request = server.serve(said_so_far, "a", num_output=5)
        said_so_far = [*request.token_ids, *tokens_of(len(said_so_far), 3)]
    assert not any(isinstance(event, PathSuperseded) for event in server.events)
    assert server.core.blocks.expectations.num_superseded == 0


def test_what_others_have_used_is_not_superseded():
    head, tail = tokens_of(1, 12), tokens_of(2, 12)
    for other in ({"session": "b"}, {}, {"session": "a", "tenant": "another"}):
        server = Server()
        server.serve(head + tail, "a")
        server.serve(head + tail[:5], **other)  # type: ignore[arg-type]
        server.serve(tokens_of(3, 9), "a")
        assert server.superseded(head + tail) == [False] * 4 + [True] * 2, other


def test_what_somebody_computed_at_the_same_time_is_not_superseded():
    server = Server()
    prompt = tokens_of(1, 24)
    server.serve(tokens_of(5, 4), "z")  # sessions are in use
    server.add(prompt, "a")
    server.add(prompt)
    server.run()
    server.serve(tokens_of(2, 9), "a")
    assert not any(server.superseded(prompt))


def test_an_edited_path_that_is_used_again_is_worth_something_again():
    server = Server()
    head, old = tokens_of(1, 12), tokens_of(2, 12)
    server.serve(head + old, "a")
    server.serve(head + tokens_of(3, 4), "a")
    assert server.core.blocks.expectations.num_superseded == 3
    server.serve([*head, *old, 5], "b")
    assert server.core.blocks.expectations.num_superseded == 0


def test_an_agent_of_two_namespaces_has_a_history_in_each():
    server = Server()
    prompt = tokens_of(1, 16)
    server.serve(prompt, "a", namespace=b"one")
    server.serve(prompt, "a", namespace=b"two")
    server.serve([*prompt, 5], "a", namespace=b"one")
    assert server.core.blocks.expectations.num_superseded == 0


# What has left the device.


def copies(server: Server) -> dict[tuple[int, ...], bool]:
    """What the host holds, by its tokens, and whether it makes room first."""
    found = server.core.host.blocks.found()
    return {tuple(memoryview(held.name.key).cast("i")): held.is_superseded for held in found}


def blocks_of(tokens: list[int]) -> list[tuple[int, ...]]:
    return [tuple(tokens[at : at + SIZE]) for at in range(0, len(tokens) - SIZE + 1, SIZE)]


def test_copies_of_what_is_edited_away_make_room_first_on_the_host():
    server = Server(60, host_blocks=60)
    head, old = tokens_of(1, 12), tokens_of(2, 20)
    server.serve(head, "b")  # others have used it
    request = server.serve(head + old, "a", returns_in_s=50.0)
    server.serve(tokens_of(7, 8), "c")
    server.evict(60)
    server.step()
    server.serve([*head, 1], "b")
    server.serve([*request.token_ids, 8, 9], "a", returns_in_s=50.0)  # its copies came back
    assert not any(copies(server).values())
    server.evict(3)
    server.serve([*head, *tokens_of(3, 5)], "a")
    told = copies(server)
    assert [told[block] for block in blocks_of(old)] == [True] * 5
    assert not any(told.get(block) for block in [*blocks_of(head), *blocks_of(tokens_of(7, 8))])


def test_copies_of_a_session_that_has_ended_make_room_first_on_the_host():
    server = Server(60, host_blocks=60)
    head, own = tokens_of(1, 12), tokens_of(2, 20)
    server.serve(head, "b")
    server.serve(head + own, "a", returns_in_s=50.0)
    server.evict(4)  # of a, which is expected last
    server.add(tokens_of(9, 4))
    server.run()
    assert not any(copies(server).values())
    server.end("a")
    told = copies(server)
    assert told
    assert all(told.values())


def test_copies_stay_as_they_are_while_a_sub_agent_may_have_use_for_them():
    server = Server(60, host_blocks=60)
    head, old = tokens_of(1, 12), tokens_of(2, 20)
    server.serve(head + old, "a", returns_in_s=5.0)
    server.serve([*head, *old[:16], 1, 2, 3, 4, 5], "child", parent="a", returns_in_s=50.0)
    server.evict(3)
    server.add(tokens_of(9, 4))
    server.run()
    server.serve([*head, 9], "a")
    assert copies(server)
    assert not any(copies(server).values())


# Samples, and several requests at once.


def test_of_several_samples_the_one_that_is_gone_on_from_stays():
    server = Server(80)
    prompt = tokens_of(1, 10)
    first = server.add(prompt, "a", num_output=12, num_samples=3)
    samples = [first, *first.forks]
    server.run()
    outputs = [list(sample.token_ids) for sample in samples]
    assert not any(any(server.superseded(output)) for output in outputs), "until the next turn all may be gone on from"
    server.serve([*outputs[1], 7, 8], "a")
    assert not any(server.superseded(outputs[1]))
    for other in (outputs[0], outputs[2]):
        assert server.superseded(other) == [False] * 2 + [True] * (len(other) // SIZE - 2 - (len(other) % SIZE == 0))


def test_requests_that_are_there_at_once_do_not_supersede_each_other():
    server = Server(80)
    head = tokens_of(1, 12)
    server.serve(head, "a")
    server.add(head + tokens_of(2, 12), "a", num_output=8)
    server.step()
    server.add(head + tokens_of(3, 12), "a", num_output=8)
    server.run()
    assert server.core.blocks.expectations.num_superseded == 0
    server.serve(head + tokens_of(2, 12) + [1], "a")
    assert all(server.superseded(head + tokens_of(3, 12))[3:])


# Cancelled ones.


def test_a_cancelled_request_leaves_its_prompt_as_the_last_path():
    server = Server(80)
    head, rest = tokens_of(1, 12), tokens_of(2, 12)
    server.serve(head, "a")
    request = server.add(head + rest, "a", num_output=50)
    for _ in range(3):
        server.step()
    server.scheduler.finish(request.request_id, "abort")
    server.run()
    assert server.scheduler.sessions.counts == (0, 1)
    server.serve(head + tokens_of(3, 4), "a")
    assert server.superseded(head + rest) == [False] * 3 + [True] * 3


def test_a_request_cancelled_while_it_waits_leaves_the_session_as_it_was():
    server = Server()
    prompt = tokens_of(1, 16)
    server.serve(prompt, "a", returns_in_s=5.0)
    request = server.add([*prompt, 1, 2], "a", num_samples=2)
    server.scheduler.finish(request.request_id, "abort")
    assert server.scheduler.sessions.counts == (0, 1)
    assert not server.scheduler.sessions._open
    server.serve(tokens_of(2, 8), "a")
    assert all(server.superseded(prompt))


# The end.


def test_a_session_ends_once_and_what_it_had_goes_first():
    server = Server(80)
    shared, own = tokens_of(1, 12), tokens_of(2, 16)
    server.serve(shared + own, "a")
    server.serve(shared + tokens_of(3, 12), "b")
    assert server.end("a", "another") is None
    assert server.end("never") is None
    assert server.end("a") == (1, 4, 0)
    assert server.end("a") is None
    assert server.superseded(shared + own) == [False] * 3 + [True] * 4
    assert server.scheduler.sessions.counts == (0, 1)
    assert [event.num_sessions for event in server.events if isinstance(event, SessionClosed)] == [1]


def test_a_session_that_ends_while_a_request_runs_lets_it_go_on():
    server = Server(80)
    prompt = tokens_of(1, 16)
    request = server.add(prompt, "a", num_output=9)
    server.step()
    assert server.end("a") == (1, 0, 1)
    server.run()
    assert request.finish_reason == "length"
    assert request.num_output_tokens == 9
    assert all(server.superseded(list(request.token_ids)))
    assert server.core.blocks.expectations.num_superseded == 6
    assert server.scheduler.sessions.counts == (0, 0)
    server.serve(prompt, "a")  # a new session of the same name
    assert server.scheduler.sessions.counts == (0, 1)


def test_a_request_of_several_samples_that_goes_on_is_one():
    server = Server(80)
    first = server.add(tokens_of(1, 10), "a", num_output=20, num_samples=4)
    sample = first.forks[0]
    server.add(tokens_of(2, 10), "a", num_output=20)
    server.step()
    server.scheduler.finish(sample.request_id, "abort")
    assert server.end("a")[2] == 2
    server.run()


def test_sub_agents_share_the_fate_of_their_parent():
    server = Server(120)
    head = tokens_of(1, 16)
    parent = list(server.serve(head, "p", num_output=5).token_ids)
    children = [parent + tokens_of(seed, 12) for seed in (2, 3)]
    for number, prompt in enumerate(children):
        server.serve(prompt, f"c{number}", parent="p")
        server.serve([*prompt, 1, 2, 3, 4, 5], f"g{number}", parent=f"c{number}")
    assert server.core.blocks.expectations.num_superseded == 0
    ended = server.end("c0")
    assert ended is not None
    assert ended[0] == 2, "with the one that it had called"
    assert not any(server.superseded(parent)), "which its parent has"
    assert all(server.superseded(children[0])[len(parent) // SIZE :])
    ended = server.end("p")
    assert ended is not None
    assert ended[0] == 3
    assert all(all(server.superseded(prompt)) for prompt in (parent, *children))
    assert server.end("c1") is None


def test_a_parent_that_edits_leaves_its_sub_agents_what_they_have():
    server = Server(40)
    head, old = tokens_of(1, 8), tokens_of(2, 12)
    server.serve(head + old, "p")
    child = head + old + tokens_of(3, 8)
    server.serve(child, "c", parent="p")
    server.serve(head + tokens_of(4, 8), "p")
    assert all(server.superseded(head + old)[2:]), "its parent has no use for them any more"
    assert server.evict(1) == ["session"], "but the sub-agent goes on there"
    assert server.end("c") == (1, 1, 0)
    assert server.evict(4) == ["superseded"] * 4
    assert len(server.nodes(head + old)) == 2


def test_a_parent_that_is_unknown_is_none():
    server = Server()
    server.serve(tokens_of(1, 8), "c", parent="never seen")
    assert server.end("never seen") is None
    assert server.end("c") is not None


def test_a_long_row_of_parents_ends_at_once():
    server = Server(40, max_sessions=3000)
    for number in range(2500):
        server.scheduler.sessions._find(session_ref("", f"s{number}", f"s{number - 1}"))
    assert server.end("s0") == (2500, 0, 0)
    assert server.scheduler.sessions.counts == (0, 0)


# Limits.


def test_a_tenant_has_so_many_sessions_and_takes_none_of_others():
    server = Server(200, max_sessions=3)
    server.serve(tokens_of(0, 8), "kept", tenant="quiet")
    for number in range(10):
        server.serve(tokens_of(number + 1, 8), f"s{number}", tenant="loud", namespace=b"%d" % number)
    assert server.scheduler.sessions.counts == (0, 4)
    assert [number for number in range(10) if server.end(f"s{number}", "loud")] == [7, 8, 9]
    assert server.end("kept", "quiet") is not None


def test_a_session_that_is_forgotten_is_not_superseded():
    server = Server(100, max_sessions=1)
    server.serve(tokens_of(1, 16), "a")
    request = server.add(tokens_of(2, 16), "b", num_output=6)
    server.step()
    server.serve(tokens_of(3, 8), "c")
    assert request.finish_reason == "length"
    assert server.core.blocks.expectations.num_superseded == 0
    assert server.scheduler.sessions.counts == (0, 1)


# Pauses.


def test_who_comes_back_last_goes_first():
    server = Server(60)
    prompts = {name: tokens_of(seed, 16) for seed, name in enumerate("abc")}
    for name, pause_s in (("a", 20.0), ("b", 60.0), ("c", 3.0)):
        server.serve(prompts[name], name, returns_in_s=pause_s)
    assert set(server.evict(8)) == {"session"}
    left = {name: len(server.nodes(prompt)) for name, prompt in prompts.items()}
    assert left == {"a": 0, "b": 0, "c": 4} or (left["c"], left["b"]) == (4, 0)


def test_who_is_overdue_by_far_is_like_all_others():
    server = Server(60)
    prompt = tokens_of(1, 16)
    server.serve(prompt, "a", returns_in_s=2.0)
    (session,) = server.scheduler.sessions._tenants[session_ref("", "a").tenant].sessions.values()
    server.now = 3.0
    server.evict(1)
    assert session.paths[0].tail is not None
    server.now = 100.0
    assert server.evict(1) == ["policy"]
    assert session.paths[0].tail is None


def test_blocks_that_nobody_has_used_for_long_go_before_a_session():
    server = Server(60)
    server.serve(tokens_of(2, 16))
    server.now = 30.0
    prompt = tokens_of(1, 16)
    server.serve(prompt, "a", returns_in_s=10.0)
    server.now = 32.0
    assert set(server.evict(4)) == {"policy"}
    assert len(server.nodes(prompt)) == 4


def test_a_session_whose_request_waits_is_kept():
    server = Server(60)
    prompts = {name: tokens_of(seed, 16) for seed, name in enumerate("ab")}
    for name in "ab":
        server.serve(prompts[name], name, returns_in_s=40.0 if name == "a" else 1.0)
    server.now = 0.5
    server.add([*prompts["a"], 1], "a")
    assert server.evict(3) == ["session"] * 3
    assert len(server.nodes(prompts["a"])) == 4


def test_pauses_that_are_alike_are_learned():
    own, others = Pauses(0.45), Pauses(0.99)
    for pause_s in (2.0, 50.0, 7.0, 20.0, 1.0) * 10:
        others.see(pause_s)
    for _ in range(5):
        own.see(30.0)
    learned = forecast_of(own, others).expected_s(0.0)
    assert learned is not None
    assert 15.0 < learned < 60.0
    for _ in range(3):
        own.see(1.5)
    learned = forecast_of(own, others).expected_s(0.0)
    assert learned is not None
    assert learned < 8.0, "it uses another tool now"


@given(
    weights=st.dictionaries(st.integers(0, NUM_RANGES - 1), st.floats(0.01, 5.0), min_size=1, max_size=6),
    age_s=st.floats(0.0, 20_000.0),
)
def test_a_pause_is_expected_to_last_as_long_as_those_last_on_average_that_can_still_come(weights, age_s):
    """A slow twin: draws every range as often as it weighs."""
    got = PauseForecast(weights).expected_s(age_s)
    left = {at: weight for at, weight in weights.items() if age_s < end_of(at)}
    if not left:
        assert got is None
        return
    mean = sum(weight * max(middle_of(at) - age_s, (end_of(at) - age_s) / 2) for at, weight in left.items())
    assert got == pytest.approx(mean / sum(left.values()))


def end_of(at: int) -> float:
    """Where a range of pauses ends: four an octave, from a quarter of a second on."""
    return 0.25 * 2 ** (at / 4)


def middle_of(at: int) -> float:
    return (end_of(at) + (end_of(at - 1) if at else 0.0)) / 2


# Compactions.


def test_how_often_histories_are_compacted_is_learned_by_their_turns():
    known = Compactions()
    assert known.risk(10) == 0.0
    known.see(10, is_cut=True)
    assert known.risk(10) == 0.5, "one proves little"
    for _ in range(20):
        known.see(10, is_cut=True)
        known.see(9, is_cut=False)
    assert known.risk(10) > 0.9
    assert known.risk(9) == 0.0
    for _ in range(400):
        known.see(10, is_cut=False)
    assert known.risk(10) < 0.1, "clients do otherwise now"


def agent(server: Server, name: str, num_turns: int, *, every: int) -> list[int]:
    """Serve an agent that compacts every few turns; return its last prompt."""
    head = tokens_of(ord(name), 16)
    said_so_far = list(head)
    for turn in range(num_turns):
        request = server.serve(said_so_far, name, returns_in_s=5.0)
        server.now += 5.0
        if turn == num_turns - 1:
            break
        if (turn + 1) % every == 0:
            said_so_far = [*head, *tokens_of(turn, 4)]
        else:
            said_so_far = [*request.token_ids, *tokens_of(turn, 7)]
    return said_so_far


def test_a_history_that_is_compacted_next_goes_before_one_that_is_gone_on_from():
    server = Server(400)
    for name in "abcdef":
        agent(server, name, 7, every=3)
        assert server.end(name)
    doomed = agent(server, "x", 3, every=3)  # three turns: it compacts now
    server.now -= 5.0
    other = server.serve(tokens_of(77, 40), "y", returns_in_s=9.0)  # later than x, and goes on
    server.evict(server.core.blocks.expectations.num_superseded)
    assert server.core.blocks.expectations.num_superseded == 0
    num_said = len(doomed) // SIZE - 16 // SIZE
    assert set(server.evict(num_said)) == {"session"}
    assert len(server.nodes(doomed)) == 16 // SIZE, "what it begins with is left, and goes on"
    assert len(server.nodes(list(other.token_ids))) == 40 // SIZE
    server.evict(1)
    assert len(server.nodes(doomed)) == 16 // SIZE, "it is expected before the other"


@settings(max_examples=30)
@given(
    paths=st.lists(
        st.tuples(st.integers(1, 6), st.integers(0, 6), st.sampled_from([0.0, 0.5, 0.9]), st.integers(1, 50)),
        min_size=1,
        max_size=6,
    )
)
def test_the_end_that_goes_first_is_the_one_that_is_expected_last(paths):
    """A slow twin ranks every end by its own due times, which hang on how deep it is."""
    core = KVCore(100, block_size=SIZE, policy=make_policy("lru"))
    scheduler = Scheduler(core, SchedulerLimits(8, 64))
    expected = {}
    for number, (num_blocks, num_sure, risk, pause_s) in enumerate(paths):
        tokens = tokens_of(number, SIZE * num_blocks + 1)
        request = Request(f"r{number}", tokens, SAMPLING, stop=StopRule(frozenset(), len(tokens) + 1))
        scheduler.add(request)
        while scheduler.has_work:
            scheduler.apply(NullRunner().run(scheduler.schedule(0.0)))
        nodes = core.match(request.namespace, array("i", tokens).tobytes(), len(tokens)).nodes
        path = ExpectedPath(number)
        core.blocks.expectations.put(path, nodes[-1])
        core.blocks.expectations.expect(path, said(float(pause_s)), 0.0, num_sure=num_sure, risk=risk)
        expected[number] = (len(nodes), num_sure, risk, pause_s)
    left = {number: how[0] for number, how in expected.items()}

    def due_s(number: int) -> float:
        _, num_sure, risk, pause_s = expected[number]
        return pause_s if left[number] - 1 < num_sure else pause_s / (1.0 - risk)

    while any(left.values()):
        latest = max(due_s(number) for number in left if left[number])
        victim = core.blocks.expectations.victim(0.0)
        assert victim is not None
        ends = {node: found[0] for node, found in core.blocks.expectations.ends()}
        number = ends[victim.node].owner
        assert due_s(number) == pytest.approx(latest)
        core.blocks.reclaim(1)
        audit(core)
        left[number] -= 1


def test_a_clock_that_jumps_back_is_no_pause():
    server = Server()
    server.now = 100.0
    request = server.serve(tokens_of(1, 8), "a")
    server.now = 3.0
    server.add([*request.token_ids, 1], "a")
    server.now = 100.0
    server.run()
    server.now = 1e12
    server.serve([*request.token_ids, 1, 2], "a")
    assert server.evict(2)


@pytest.mark.parametrize("pause_s", [0.0, 0.1, 1.0, 17.0, 3600.0, 86_400.0])
def test_what_a_client_says_is_when_it_is_expected(pause_s):
    forecast = said(pause_s)
    expected = forecast.expected_s(0.0)
    assert expected is not None
    assert expected <= 1.3 * pause_s + 0.2
    nearly = forecast.expected_s(0.9 * pause_s)
    assert nearly is not None
    assert nearly <= expected
    assert forecast.expected_s(100 * pause_s + 100_000.0) is None


def test_ranges_of_pauses_follow_each_other():
    places = [range_of(pause_s / 100) for pause_s in range(0, 2_000_000, 97)]
    assert places == sorted(places)
    assert places[0] == 0
    assert PauseForecast({range_of(10.0): 1.0}).expected_s(0.0) == pytest.approx(10.0, rel=0.15)


def test_what_an_arrival_costs_does_not_hang_on_how_many_sessions_there_are():
    """Counted, not timed: how many nodes are looked at, and how many paths it is said of when they are expected."""
    counts = []
    for num_sessions in (5, 60):
        server = Server(200, max_sessions=1000)
        for number in range(num_sessions):
            server.serve(tokens_of(number, 8), f"s{number}")
        looks = []
        look = server.core.blocks.expectations._look

        def counted(path: ExpectedPath, now_s: float, look: Look = look, looks: list[int] = looks) -> None:
            looks.append(1)
            look(path, now_s)

        server.core.blocks.expectations._look = counted  # type: ignore[method-assign]
        server.serve([*tokens_of(0, 8), 1, 2], "s0")
        counts.append(len(looks))
    assert counts == [1, 1]


def test_sessions_are_named_by_digests_of_a_tenant():
    names = {session_ref(tenant, session) for tenant in ("", "a", "ab") for session in ("a", "b", "ba")}
    assert len(names) == 9
    assert session_ref("a", "b") == SessionRef(session_ref("a", "x").tenant, session_ref("a", "b").session)
    assert all(b"secret" not in part for part in session_ref("secret", "secret", "secret"))


def test_paths_beyond_the_most_of_a_session_are_like_all_others():
    server = Server(2000)
    for seed in range(130):
        server.add(tokens_of(seed, 16), "one", num_output=1)
    server.run()
    expectations = server.core.blocks.expectations
    assert sum(len(paths) for _, paths in expectations.ends()) == 64
    server.end("one")
    assert not list(expectations.ends())


@pytest.mark.long
def test_what_ended_while_a_request_of_its_session_runs_is_not_kept_for_good():
    server = Server(2000)
    server.add(tokens_of(500, 16), "one", num_output=5000)
    for seed in range(40):
        server.add(tokens_of(seed, 16), "one")
        for _ in range(3):
            server.step()
    server.now = 5000.0
    others = tokens_of(9999, 16)
    server.add(others)
    for _ in range(3):
        server.step()
    server.now += 1.0
    assert set(server.evict(8)) == {"policy"}
    assert len(server.nodes(others)) == 4
