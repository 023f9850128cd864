"""The router beside a model of it that remembers everything and adds up anew at each question."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pagefold.routing import ROUTING_POLICIES, Candidate, PrefixRouting, Prompt, Router
from pagefold.routing.policies import LoadRouting, RandomRouting, RoundRobinRouting

BLOCK = 4
CACHE = 100
SETTLE_S = 10.0


class Told:
    """What replicas hold, set by the test."""

    def __init__(self) -> None:
        self.held: dict[str, set[bytes]] = {}
        self.unknown: set[str] = set()

    def match(self, block_hashes):
        found = {}
        for replica, held in self.held.items():
            num_blocks = 0
            while num_blocks < len(block_hashes) and block_hashes[num_blocks] in held:
                num_blocks += 1
            if num_blocks:
                found[replica] = num_blocks
        return found

    def is_known(self, replica):
        return replica not in self.unknown


class Seen(PrefixRouting):
    """The policy, and what it was shown."""

    def __init__(self) -> None:
        super().__init__()
        self.candidates: list[Candidate] = []

    def choose(self, candidates, num_tokens):
        self.candidates = list(candidates)
        return super().choose(candidates, num_tokens)


def hashes_of(path: str) -> list[bytes]:
    """Names of the blocks of a path, a letter a block."""
    return [path[: end + 1].encode() for end in range(len(path))]


def prompt_of(path: str, rest: int = 1) -> Prompt:
    return Prompt(hashes_of(path), len(path) * BLOCK + rest)


@dataclass
class Sent:
    """A request as the model remembers it."""

    replica: str
    prompt: Prompt
    num_computed: int
    has_started: bool = False
    ended_s: float | None = None


@dataclass
class Placed:
    """Tokens that filled a cache."""

    replica: str
    num_tokens: float
    turned: float


@dataclass
class Model:
    """All that ever happened."""

    open: dict[str, bool] = field(default_factory=dict)
    sent: dict[str, Sent] = field(default_factory=dict)
    placed: list[Placed] = field(default_factory=list)
    turned: float = 0.0

    def place(self, replica: str, num_tokens: int) -> None:
        self.placed.append(Placed(replica, num_tokens, self.turned))
        self.turned += num_tokens / CACHE / len(self.open)

    def placed_at(self, replica: str) -> float:
        """Half of it is gone whenever all caches have been filled anew."""
        mine = [each for each in self.placed if each.replica == replica]
        return sum(each.num_tokens * 0.5 ** (self.turned - each.turned) for each in mine)

    def expected(self, replica: str, prompt: Prompt, now: float) -> int:
        """Blocks of a prompt that somebody who was sent there lately leaves there: of any of them, block by block."""
        there = set()
        for each in self.sent.values():
            if each.replica == replica and (each.ended_s is None or each.ended_s + SETTLE_S > now):
                there.update(each.prompt.block_hashes)
        num_blocks = 0
        while num_blocks < len(prompt.block_hashes) and prompt.block_hashes[num_blocks] in there:
            num_blocks += 1
        return num_blocks

    def candidate(self, replica: str, prompt: Prompt, told: Told, now: float) -> Candidate:
        known = told.match(prompt.block_hashes).get(replica, 0) if told.is_known(replica) else 0
        num_blocks = max(known, self.expected(replica, prompt, now))
        mine = [each for each in self.sent.values() if each.replica == replica and each.ended_s is None]
        return Candidate(
            replica,
            min(num_blocks * BLOCK, prompt.num_tokens - 1),
            sum(each.num_computed for each in mine if not each.has_started),
            sum(each.has_started for each in mine),
            pytest.approx(self.placed_at(replica), rel=1e-9, abs=1e-9),
        )


REPLICAS = st.sampled_from(["a", "b", "c"])
PATHS = st.text("xyz", max_size=5)


class RouterMachine(RuleBasedStateMachine):
    """Replicas come and go, requests start and end in any order, and events tell whatever they tell."""

    @initialize()
    def begin(self):
        self.told, self.policy, self.model = Told(), Seen(), Model()
        self.router = Router(self.policy, self.told, block_size=BLOCK, cache_tokens=CACHE, settle_s=SETTLE_S)
        self.now, self.number, self.reasons = 0.0, 0, 0

    def _active(self):
        return [name for name, each in self.model.sent.items() if each.ended_s is None]

    @rule(replica=REPLICAS)
    def add(self, replica):
        self.router.add(replica)
        self.model.open[replica] = True

    @rule(replica=REPLICAS)
    def drain(self, replica):
        self.router.drain(replica)
        if replica in self.model.open:
            self.model.open[replica] = False

    @rule(replica=REPLICAS)
    def remove(self, replica):
        lost = {name for name in self._active() if self.model.sent[name].replica == replica}
        assert set(self.router.remove(replica)) == lost
        self.model.open.pop(replica, None)
        self.model.placed = [each for each in self.model.placed if each.replica != replica]
        self.model.sent = {name: each for name, each in self.model.sent.items() if each.replica != replica}

    @rule(replica=REPLICAS, path=PATHS, is_held=st.booleans(), is_known=st.booleans())
    def tell(self, replica, path, is_held, is_known):
        held = self.told.held.setdefault(replica, set())
        (held.update if is_held else held.difference_update)(hashes_of(path))
        (self.told.unknown.discard if is_known else self.told.unknown.add)(replica)

    @rule(
        path=PATHS, rest=st.integers(1, 3), without=st.frozensets(REPLICAS, max_size=2), is_read=st.booleans(),
        is_again=st.booleans(),
    )  # fmt: skip
    def route(self, path, rest, without, is_read, is_again):
        prompt, request_id = prompt_of(path, rest), f"r{self.number}"
        if not is_read:
            prompt = Prompt((), prompt.num_tokens, is_read=False)
        self.number += 1
        names = [name for name, is_open in self.model.open.items() if is_open and name not in without]
        if not names:
            with pytest.raises(LookupError):
                self.router.route(request_id, prompt, self.now, without=without, is_again=is_again)
            return
        expected = {name: self.model.candidate(name, prompt, self.told, self.now) for name in names}
        choice = self.router.route(request_id, prompt, self.now, without=without, is_again=is_again)
        assert {each.replica: each for each in self.policy.candidates} == expected
        chosen = expected[choice.replica]
        assert choice.num_held_tokens == chosen.num_held_tokens
        most = max(each.num_held_tokens for each in expected.values())
        if not is_read:
            assert (choice.reason, most) == ("unread", 0)
        elif most:
            assert choice.reason == ("prefix" if chosen.num_held_tokens == most else "load")
        else:
            is_any_known = any(self.told.is_known(name) for name in names)
            assert choice.reason == ("nothing_held" if is_any_known else "unknown")
        num_computed = prompt.num_tokens - chosen.num_held_tokens
        self.model.sent[request_id] = Sent(choice.replica, prompt, num_computed)
        self.model.place(choice.replica, num_computed)
        self.reasons += not is_again

    @precondition(lambda self: self._active())
    @rule(data=st.data(), ends=st.booleans(), num_output_tokens=st.integers(0, 60))
    def move(self, data, ends, num_output_tokens):
        request_id = data.draw(st.sampled_from(self._active()))
        if ends:
            self.router.ended(request_id, self.now, num_output_tokens)
            self.model.sent[request_id].ended_s = self.now
            self.model.place(self.model.sent[request_id].replica, num_output_tokens)
        else:
            self.router.started(request_id)
            self.model.sent[request_id].has_started = True

    @precondition(lambda self: self._active())
    @rule(data=st.data())
    def fail(self, data):
        """Nothing was computed: what was booked is taken back, and what was expected."""
        request_id = data.draw(st.sampled_from(self._active()))
        sent = self.model.sent.pop(request_id)
        self.router.failed(request_id)
        left = self.model.placed_at(sent.replica)
        if not sent.has_started:
            left = max(0.0, left - sent.num_computed)
        self.model.placed = [each for each in self.model.placed if each.replica != sent.replica]
        self.model.placed.append(Placed(sent.replica, left, self.model.turned))

    @rule()
    def unknown_requests_are_nobody(self):
        self.router.failed("never")
        self.router.started("never")
        self.router.ended("never", self.now)

    @rule(seconds=st.floats(0, 2 * SETTLE_S))
    def wait(self, seconds):
        self.now += seconds

    @invariant()
    def counts_agree(self):
        if not hasattr(self, "router"):
            return
        assert sum(self.router.num_choices.values()) == self.reasons
        assert sorted(self.router.open_replicas) == sorted(name for name, is_open in self.model.open.items() if is_open)
        for replica in self.model.open:
            mine = [name for name in self._active() if self.model.sent[name].replica == replica]
            assert self.router.num_requests(replica) == len(mine)
        names = [name for name in self.router.open_replicas if name != "a"]
        least = self.router.least_loaded(without=frozenset("a"))
        assert (least is None) == (not names)
        if names:
            assert self.router.num_requests(least) == min(map(self.router.num_requests, names))


TestRouter = RouterMachine.TestCase
TestRouter.settings = settings(max_examples=150, stateful_step_count=40)


def of(replica: str, held: int = 0, pending: int = 0, running: int = 0, placed: int = 0) -> Candidate:
    return Candidate(replica, held, pending, running, placed)


def test_who_holds_most_gets_it_unless_he_has_too_much_to_do():
    policy = PrefixRouting()
    assert policy.choose([of("a"), of("b", held=600)], 1000).replica == "b"
    assert policy.choose([of("a"), of("b", held=600, pending=500)], 1000).replica == "b"
    assert policy.choose([of("a"), of("b", held=600, pending=700)], 1000).replica == "a"
    assert policy.choose([of("a"), of("b", held=600, running=30)], 1000).replica == "a"


def test_of_equal_ones_the_one_that_was_given_least_gets_it():
    for policy in (PrefixRouting(), LoadRouting()):
        assert policy.choose([of("a", placed=9), of("b", placed=4), of("c", placed=7)], 1000).replica == "b"


def test_what_all_prompts_begin_with_does_not_draw_them_all_to_one():
    policy = PrefixRouting()
    shared = [of("a", held=400, placed=1000), of("b")]
    assert policy.choose(shared, 500).replica == "a"
    assert policy.choose([shared[0]._replace(num_placed_tokens=3000), of("b")], 500).replica == "b"
    own = [of("a", held=4000, placed=3000), of("b")]
    assert policy.choose(own, 4500).replica == "a", "a conversation stays where it is"


def test_nearly_equal_is_equal():
    """A few tokens of somebody else's prompt do not drive a conversation from its cache."""
    assert PrefixRouting().choose([of("a"), of("b", held=100, pending=140)], 1000).replica == "b"


def test_load_looks_at_load_alone():
    assert not LoadRouting.sees_prefixes
    assert LoadRouting().choose([of("a", pending=10), of("b", pending=9)], 1000).replica == "b"


def test_round_robin_goes_round_whoever_comes_and_goes():
    policy = RoundRobinRouting()
    assert [policy.choose([of("a"), of("b"), of("c")], 1).replica for _ in range(4)] == ["a", "b", "c", "a"]
    assert policy.choose([of("c"), of("a")], 1).replica == "c"
    assert policy.choose([of("b"), of("a")], 1).replica == "a"


def test_random_finds_everybody():
    policy = RandomRouting(seed=1)
    assert {policy.choose([of("a"), of("b"), of("c")], 1).replica for _ in range(100)} == {"a", "b", "c"}


def test_every_policy_is_there_by_name():
    assert {name: type(make()).__name__ for name, make in ROUTING_POLICIES.items()} == {
        "prefix": "PrefixRouting",
        "load": "LoadRouting",
        "round_robin": "RoundRobinRouting",
        "random": "RandomRouting",
    }


def test_a_crowd_that_begins_alike_stays_together_before_any_event():
    told = Told()
    router = Router(PrefixRouting(), told, block_size=BLOCK, cache_tokens=CACHE)
    for name in "ab":
        router.add(name)
    first = router.route("first", prompt_of("xxxxxxxxxx"), 0.0)
    assert first.reason == "nothing_held"
    router.started("first")
    second = router.route("second", prompt_of("xxxxxxxxxxy"), 0.0)
    assert second == (first.replica, "prefix", 40)


def test_a_request_that_is_sent_again_is_expected_where_it_went_last():
    router = Router(Seen(), Told(), block_size=BLOCK, cache_tokens=CACHE)
    for name in "ab":
        router.add(name)
    first = router.route("one", prompt_of("xyz"), 0.0)
    router.ended("one", 1.0)
    again = router.route("one", prompt_of("xyz"), 1.0, without=frozenset({first.replica}))
    router.started("one")
    router.ended("one", 2.0)
    third = router.route("two", prompt_of("xyz"), 3.0)
    assert third.replica == again.replica != first.replica
    assert router.route("three", prompt_of("xyz"), 2.0 + SETTLE_S).num_held_tokens, "two is there"
