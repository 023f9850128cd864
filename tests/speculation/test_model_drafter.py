"""ModelDrafter: beside a model that reads every text from its beginning, whatever becomes of requests and memory."""

from __future__ import annotations

from array import array
from random import Random

import pytest

from pagefold.kv import KeepRule, KVCore
from pagefold.kv.audit import audit
from pagefold.kv.keep import KEEP_ALL
from pagefold.request import Request, StopRule
from pagefold.sampling import SamplingParams
from pagefold.speculation import ModelDrafter, StepCosts
from pagefold.steps import StepResult

VOCAB, MODEL_VOCAB, SIZE = 50, 52, 4
"""The draft model has two tokens that requests do not have."""
COSTS = StepCosts((1, 2), (1.0, 1.0))
PLAIN, WINDOWS = (KEEP_ALL,), (KEEP_ALL, KeepRule(6))


def read(before: int, token_id: int) -> int:
    """What is known behind a token, given what was known before it."""
    return hash((before, token_id))


def said(known: int, seed: int, draw: int) -> int:
    return hash((known, seed, draw)) % MODEL_VOCAB


class Chain:
    """A runner whose KV of a token is a number that follows from the token and from what the blocks hold before it."""

    def __init__(self, num_blocks: int, num_groups: int) -> None:
        self.slab = [[None] * SIZE for _ in range(num_blocks)]
        self.num_groups = num_groups
        self.num_read = 0
        self.fails = lambda: False
        self.is_odd = lambda _row: False

    def run(self, plan):
        for copy in plan.copies:
            self.slab[copy.dst] = list(self.slab[copy.src])
        if self.fails():
            raise RuntimeError
        at, known, places = 0, [], iter(range(len(plan.sampling_rows)))
        token_ids = []
        for row, (start, num_tokens) in enumerate(zip(plan.starts, plan.num_tokens, strict=True)):
            tables = plan.tables[row]
            assert len(tables) == self.num_groups
            for position in range(start, start + num_tokens):
                before = {self._slot(table, position - 1) for table in tables} if position else {0}
                assert len(before) == 1, "groups disagree"
                (last,) = before
                assert last is not None, "nobody has read what is before"
                for table in tables:
                    block_id = table.block_ids[position // SIZE - table.num_trimmed]
                    self.slab[block_id][position % SIZE] = read(last, plan.token_ids[at])
                at += 1
            known.append(self._slot(tables[0], start + num_tokens - 1))
        self.num_read += at
        for row in plan.sampling_rows:
            place = next(places)
            token_ids.append(said(known[row], plan.seeds[place], plan.draws[place]))
        return StepResult(token_ids, corrupted=[row for row in range(len(plan.starts)) if self.is_odd(row)])

    def _slot(self, table, position):
        return self.slab[table.block_ids[position // SIZE - table.num_trimmed]][position % SIZE]


def expected(request: Request, most: int) -> list[int]:
    """The drafts of a model that reads all tokens of a request anew."""
    known = 0
    for token_id in request.token_ids:
        known = read(known, token_id)
    found: list[int] = []
    while len(found) < most:
        token_id = said(known, request.seed, request.num_output_tokens + len(found))
        if token_id >= VOCAB:
            break
        found.append(token_id)
        known = read(known, token_id)
    return found


def request_of(name: str, token_ids, namespace: bytes = b"a", seed: int = 0) -> Request:
    stop = StopRule(frozenset(), 10_000)
    return Request(name, token_ids, SamplingParams(max_tokens=None), stop=stop, namespace=namespace, seed=seed)


def make(num_blocks: int = 64, rules=PLAIN, budget: int = 512, **how) -> tuple[ModelDrafter, Chain]:
    runner = Chain(num_blocks, len(rules))
    core = KVCore(num_blocks, block_size=SIZE, rules=rules, **how)
    drafter = ModelDrafter(
        core,
        runner,
        costs=COSTS,
        max_num_batched_tokens=budget,
        vocab_size=VOCAB,
        own_vocab_size=MODEL_VOCAB,
        block_bytes=100,
    )
    return drafter, runner


def drafts_of(drafter: ModelDrafter, *requests: Request, most: int = 5) -> list[list[int]]:
    found = drafter.draft(list(requests), [most] * len(requests))
    audit(drafter.core)
    return [list(one.token_ids) for one in found]


def test_drafts_are_what_the_model_says_and_nothing_is_read_twice():
    drafter, runner = make()
    request = request_of("one", range(10), seed=3)
    (found,) = drafts_of(drafter, request)
    assert found == expected(request, 5)
    assert runner.num_read == 10 + len(found) - 1
    request.token_ids.extend([*found[:2], (found[2] + 1) % VOCAB])  # two were right
    (again,) = drafts_of(drafter, request)
    assert again == expected(request, 5)
    assert runner.num_read == 10 + len(found) - 1 + 1 + len(again) - 1, "the two that were right are read already"


def test_a_prompt_that_was_read_is_found_by_its_tenant_alone():
    drafter, runner = make()
    for name, namespace, num_read in (("a", b"a", 12), ("again", b"a", 1), ("other", b"b", 12)):
        before = runner.num_read
        request = request_of(name, range(12), namespace)
        assert drafts_of(drafter, request, most=1) == [expected(request, 1)]
        assert runner.num_read - before == num_read, name
        drafter.forget(name)
    drafter.reset()
    before = runner.num_read
    drafts_of(drafter, request_of("behind a reset", range(12)), most=1)
    assert runner.num_read - before == 12


def test_what_a_model_draws_outside_of_a_tokenizer_ends_its_drafts():
    drafter, _ = make()
    lengths = set()
    for seed in range(200):
        request = request_of(str(seed), [1, 2, 3], seed=seed)
        (found,) = drafts_of(drafter, request)
        assert found == expected(request, 5)
        lengths.add(len(found))
        drafter.forget(str(seed))
    assert lengths == set(range(6))


def test_a_long_prompt_is_read_in_several_rounds():
    drafter, runner = make(budget=8)
    long, short = request_of("long", range(19)), request_of("short", [7, 8])
    assert drafts_of(drafter, short, long) == [expected(short, 5), []]
    assert drafts_of(drafter, long) == [[]]
    assert drafts_of(drafter, long) == [expected(long, 5)]
    assert runner.num_read == 2 + 19 + len(expected(short, 5)) - 1 + len(expected(long, 5)) - 1


def test_who_finds_no_memory_has_no_drafts_until_another_one_ends():
    drafter, runner = make(num_blocks=6)
    small, big, late = (
        request_of("small", range(20, 24)),
        request_of("big", range(15)),
        request_of("late", range(30, 46)),
    )
    assert drafts_of(drafter, small, big, late, most=1) == [expected(small, 1), expected(big, 1), []]
    before = runner.num_read
    assert drafts_of(drafter, small, big, late, most=1) == [expected(small, 1), expected(big, 1), []]
    assert runner.num_read == before, "nobody has got a token since"
    big.token_ids.append(3)
    assert drafts_of(drafter, small, big, late, most=1) == [expected(small, 1), expected(big, 1), []]
    assert runner.num_read - before == 1, "it does not try again and again"
    drafter.forget("small")
    drafter.forget("big")
    assert drafts_of(drafter, late, most=1) == [expected(late, 1)]


def test_blocks_of_requests_that_do_not_run_are_taken_first():
    drafter, _ = make(num_blocks=6)
    one, other = request_of("one", range(15)), request_of("other", range(20, 35))
    assert drafts_of(drafter, one, most=1) == [expected(one, 1)]
    assert drafts_of(drafter, other, most=1) == [expected(other, 1)]
    assert drafts_of(drafter, one, most=1) == [expected(one, 1)]


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_step_that_fails_costs_its_requests_their_drafts_and_nobody_else(at, caplog):
    drafter, runner = make()
    steps = iter(range(100))
    runner.fails = lambda: next(steps) == at
    one = request_of("one", range(9))
    assert drafts_of(drafter, one) == [[]]
    assert "the draft model failed" in caplog.text
    other = request_of("other", range(9))
    assert drafts_of(drafter, one, other) == [[], expected(other, 5)]
    drafter.forget("one")
    assert drafts_of(drafter, request_of("one", range(9)))[0] == expected(one, 5), "the name is free again"


def test_an_interrupt_is_nobodys_fault():
    drafter, runner = make()
    one = request_of("one", range(9))

    def interrupt():
        raise KeyboardInterrupt

    runner.fails = interrupt
    with pytest.raises(KeyboardInterrupt):
        drafts_of(drafter, one)
    audit(drafter.core)
    runner.fails = lambda: False
    assert drafts_of(drafter, one) == [expected(one, 5)]


def test_who_is_corrupted_leaves_nothing_behind():
    drafter, runner = make()
    is_first = iter([True])
    runner.is_odd = lambda _row: next(is_first, False)
    one, other = request_of("one", range(9)), request_of("other", range(20, 29))
    assert drafts_of(drafter, one, other) == [[], expected(other, 5)]
    before = runner.num_read
    assert drafts_of(drafter, request_of("again", range(9)), most=1) == [expected(one, 1)]
    assert runner.num_read - before == 9, "nothing of it was published"


class Machine:
    """Requests that come, sample what was drafted or something else, wait, and end; a runner that fails at times."""

    def __init__(self, seed: int, rules, num_blocks: int, *, publishes: bool) -> None:
        self.random = random = Random(seed)
        self.drafter, self.runner = make(
            num_blocks, rules, budget=random.choice((5, 16, 512)), enable_prefix_caching=publishes
        )
        if random.random() < 0.5:
            self.runner.fails = lambda: random.random() < 0.02
            self.runner.is_odd = lambda _row: random.random() < 0.01
        self.requests: dict[str, Request] = {}
        self.num_names = self.num_drafts = self.num_right = 0

    def step(self) -> None:
        random = self.random
        if len(self.requests) < 5 and random.random() < 0.4:
            begin = [random.randrange(2)] * random.randrange(1, 12)
            name = str(self.num_names % 7)  # names come again
            self.num_names += 1
            if name not in self.requests:
                tail = [random.randrange(VOCAB) for _ in range(random.randrange(6))]
                namespace = random.choice((b"a", b"b"))
                self.requests[name] = request_of(name, begin + tail, namespace, random.randrange(3))
        if random.random() < 0.02:
            self.drafter.reset()
        running = [request for request in self.requests.values() if random.random() < 0.7]
        mosts = [random.randrange(7) for _ in running]
        found = self.drafter.draft(running, mosts)
        audit(self.drafter.core)
        for request, most, draft in zip(running, mosts, found, strict=True):
            right = expected(request, most)
            assert list(draft.token_ids) == right[: len(draft.token_ids)], "it drafts what the model says, or less"
            self.num_drafts += bool(right)
            self.num_right += bool(right) and list(draft.token_ids) == right
            if random.random() < 0.1:  # its step fails
                continue
            num_taken = random.randrange(len(right) + 1)
            request.token_ids.extend(array("i", [*right[:num_taken], random.randrange(VOCAB)]))
            if request.num_tokens > 40 or random.random() < 0.05:
                self.drafter.forget(self.requests.pop(request.request_id).request_id)
                audit(self.drafter.core)


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("publishes", [True, False], ids=["", "cache off"])
@pytest.mark.parametrize("rules", [PLAIN, WINDOWS], ids=["plain", "windows"])
@pytest.mark.parametrize("num_blocks", [9, 40, 200])
@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 30), marks=pytest.mark.long)], ids=["few", "many"])
def test_whatever_happens_drafts_are_what_the_model_says(seeds, num_blocks, rules, publishes):
    num_drafts = num_right = 0
    for seed in seeds:
        machine = Machine(seed, rules, num_blocks, publishes=publishes)
        for _ in range(100):
            machine.step()
        for name in list(machine.requests):
            machine.drafter.forget(name)
        audit(machine.drafter.core)
        assert not machine.drafter.core.caches
        num_drafts += machine.num_drafts
        num_right += machine.num_right
    assert num_right > 0.03 * num_drafts
    assert num_blocks < 200 or num_right > 0.3 * num_drafts


def test_tokens_that_the_model_does_not_know_are_never_read():
    drafter, runner = make()
    odd, other = request_of("odd", [1, 2, MODEL_VOCAB]), request_of("other", [1, 2, 3])
    assert drafter.num_unread(odd) == 2
    assert drafts_of(drafter, odd, other) == [[], expected(other, 5)]
    assert drafter.num_unread(odd) is None
    other.token_ids.append(MODEL_VOCAB + 7)
    before = runner.num_read
    assert drafts_of(drafter, odd, other) == [[], []]
    assert runner.num_read == before


def test_who_can_never_fit_takes_nothing_from_others():
    drafter, runner = make(num_blocks=6)
    idle, huge = request_of("idle", range(12)), request_of("huge", range(30))
    drafts_of(drafter, idle, most=1)
    assert drafts_of(drafter, huge) == [[]]
    assert drafter.num_unread(huge) is None
    before = runner.num_read
    idle.token_ids.append(3)
    assert drafts_of(drafter, idle, most=1) == [expected(idle, 1)]
    assert runner.num_read - before == 1, "what was read of it is still there"


def test_what_is_crowded_out_leaves_room_for_those_that_were_before():
    drafter, _ = make(num_blocks=10)
    grows, waits = request_of("grows", range(24)), request_of("waits", range(20, 40))
    assert drafts_of(drafter, grows, most=1) == [expected(grows, 1)]
    assert drafts_of(drafter, grows, waits, most=1) == [expected(grows, 1), []]
    assert drafter.num_unread(waits) is None
    grows.token_ids.extend(range(20))
    assert drafts_of(drafter, grows, most=1) == [[]]
    assert drafts_of(drafter, waits, most=1) == [expected(waits, 1)]


def test_who_has_least_to_read_goes_first():
    drafter, _ = make(budget=8)
    long, short = request_of("long", range(19)), request_of("short", [7, 8])
    assert drafts_of(drafter, long, short) == [[], expected(short, 5)]


def test_what_it_keeps_is_told():
    drafter, _ = make()
    assert drafter.kept() == ("draft_model", 0, 6400)
    drafts_of(drafter, request_of("one", range(9)), most=1)
    assert drafter.kept() == ("draft_model", 300, 6400)
