"""Seeded faults: nothing is found where nothing is wrong, and a bug that somebody plants is found and shrunk."""

from __future__ import annotations

from collections import Counter

import pytest

from pagefold.kv import DEFAULT_POLICY, make_policy
from pagefold.kv import tree as tree_module
from pagefold.kv.publishing import Publishing
from pagefold.scheduler.leaving import Leaving
from pagefold.sim import faults, shadow_runner
from pagefold.sim.fault_hunt import Failure, as_test, draw_run, hunt
from pagefold.sim.faults import Ask, Cancel, Damage, FaultyRun, ResetCache, Shrink, Step, run_faulty


@pytest.mark.long
def test_every_invariant_holds():
    assert hunt(3_000, seed=0) is None


@pytest.mark.long
def test_every_invariant_holds_for_long():
    assert hunt(40_000, seed=1_000) is None


def test_runs_are_what_their_seeds_say():
    assert draw_run(5) == draw_run(5)
    assert draw_run(5) != draw_run(6)
    assert run_faulty(draw_run(5)) == run_faulty(draw_run(5))


@pytest.mark.long
def test_everything_that_can_go_wrong_does(monkeypatch):
    """In a few dozen runs: preemption, hits inside a block, timeouts, pins, forks, loads, damage, and every fault."""
    seen: Counter[str] = Counter()
    machines = []
    real = faults.Scheduler

    def watched(core, limits, **settings):
        core.uses._emit = core.forgetting._emit = core.pins._emit = core.blocks._emit = core.moves._emit = count
        machines.append(core)
        return real(core, limits, **settings, emit=count)

    def count(event):
        seen[type(event).__name__] += 1
        if type(event).__name__ == "PrefixLookup" and event.num_hit_tokens % machines[-1].block_size:
            seen["partial"] += 1
        if type(event).__name__ == "HostTransfer":
            seen["loaded"] += event.num_loaded_blocks > 0
            seen["damaged"] += len(event.damaged_ids) > 0
        if type(event).__name__ == "RequestFinished":
            seen[event.finish_reason] += 1

    monkeypatch.setattr(faults, "Scheduler", watched)
    for seed in (*range(25), 57):  # in the last one damage is found: few blocks come back from the host
        run_faulty(draw_run(seed, num_steps=80))
    for what in ("RequestPreempted", "BlockEvicted", "PinDropped", "StepAbandoned", "CacheReset", "partial"):
        assert seen[what] > 5, what
    assert seen["loaded"] > 5
    assert seen["damaged"] > 0
    for reason in ("length", "abort", "timeout", "error"):
        assert seen[reason], reason
    drawn = Counter(type(action) for seed in range(40) for action in draw_run(seed).actions)
    assert min(drawn[kind] for kind in (Ask, Cancel, Damage, ResetCache, Shrink, Step)) > 5


def test_a_run_is_of_the_servers_default_policy_if_nothing_is_said():
    assert type(make_policy(FaultyRun(num_blocks=8).eviction_policy)) is type(make_policy(DEFAULT_POLICY))


# Bugs that somebody plants.


def forget_to_take_back(monkeypatch) -> None:
    """A failed step's blocks stay published, though nothing was written."""

    def abandon(self, promise):
        promise.cache.promise = None
        node = promise.cache.tail
        while node is not None and node is not promise.tail:
            node.committed = True
            node = node.parent

    monkeypatch.setattr(Publishing, "abandon", abandon)


def lean_on_what_is_not_written(monkeypatch) -> None:
    """A partial match counts a token more than agree."""
    real = tree_module._best_partial

    def wrong(parent, rest):
        node, num_tokens = real(parent, rest)
        return node, num_tokens + (node is not None and (num_tokens + 1) * 4 <= len(rest))

    monkeypatch.setattr(tree_module, "_best_partial", wrong)


def lose_a_block(monkeypatch) -> None:
    """Who is cancelled during a step keeps its blocks."""
    real = Leaving.finish

    def leak(self, request, reason):
        if reason == "abort" and request.cache is not None and request.is_aborted:
            self._core.fork(request.cache)
        real(self, request, reason)

    monkeypatch.setattr(Leaving, "finish", leak)


def trust_what_comes_back(monkeypatch) -> None:
    """A host block is loaded as it is, whatever was stored in it."""
    monkeypatch.setattr(shadow_runner._Stored, "is_damaged", False)


@pytest.mark.long
@pytest.mark.parametrize(
    "plant",
    [
        forget_to_take_back,
        lean_on_what_is_not_written,
        lose_a_block,
        pytest.param(trust_what_comes_back, marks=pytest.mark.long),
    ],
)
def test_a_bug_is_found_and_shrunk_to_a_test(plant):
    with pytest.MonkeyPatch.context() as monkeypatch:
        plant(monkeypatch)
        seed = 0 if plant is trust_what_comes_back else 1000
        found = hunt(20_000, seed=seed)
        assert found is not None
        most = 40 if plant is trust_what_comes_back else 10  # to evict, damage and load again takes some steps
        assert len(found.run.actions) < most < len(draw_run(found.seed).actions)
        test = as_test(found)
        with pytest.raises(Exception, match=r".+") as raised:
            run_test(test, found.seed)
        assert found.error.startswith(type(raised.value).__name__)
        if plant is forget_to_take_back:
            assert hunt(20_000, seed=seed) == found  # the same, always
    run_test(test, found.seed)  # and without the bug it passes


def run_test(text: str, seed: int) -> None:
    """Do what somebody does who pastes the text into a file."""
    names: dict[str, object] = {}
    exec(compile(text, "pasted.py", "exec"), names)
    test = names[f"test_run_{seed}_holds"]
    assert callable(test)
    test()


def test_a_test_reads_well():
    run = FaultyRun(num_blocks=8, actions=(Ask(0, (1, 2), num_output=3), Step("lost"), Cancel(0)))
    text = as_test(Failure(7, run, "RunError: blocks were lost"))
    assert (
        text
        == '''from pagefold.sim.faults import Ask, Cancel, FaultyRun, Step, run_faulty


def test_run_7_holds():
    """Found by seed 7: RunError: blocks were lost"""
    run_faulty(
        FaultyRun(
            num_blocks=8,
            actions=(
                Ask(number=0, prompt=(1, 2), num_output=3),
                Step(fault='lost'),
                Cancel(number=0),
            ),
        )
    )
'''
    )
