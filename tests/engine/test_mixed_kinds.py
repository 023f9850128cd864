"""Requests that keep all beside requests that keep a share, in a whole engine, whatever becomes of any of them.

Both ask the same prompts, in the same steps. What holds, and is compared with every logprob to the bit:

* exact outputs are those of an engine that offers no shares;
* kept ones are those of a request that is alone in an engine without a cache;
* the core's audit passes after every step, and at the end nobody holds a block but pins.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter, defaultdict
from dataclasses import replace
from random import Random
from typing import NamedTuple

import pytest
import torch
from equivalence.packing_house import keep_random_scorer
from equivalence.settings import long_but
from equivalence.tiny_models import VOCAB_SIZE, save_tiny_model

from pagefold.config import EngineConfig
from pagefold.engine.build import build_engine
from pagefold.engine.planning import plan_engine
from pagefold.engine.status import EngineStatus
from pagefold.errors import InvalidRequestError, PinQuotaError
from pagefold.events import ChunksPacked, RequestPreempted
from pagefold.kv import NO_MASK, audit
from pagefold.masks.calibration import scorer_path
from pagefold.masks.rule import CHUNK
from pagefold.request import Caller, WarmUp
from pagefold.sampling import SamplingParams

SHARE = 0.5
NUM_OUTPUTS = 40
"""So many take the longest prompt, and those that fork from it, into its next chunk."""
BLOCK_BYTES = 8256
"""That a block of the model takes, with what is noted of it."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUTS, ignore_eos=True, logprobs=2)
THREE = replace(GREEDY, temperature=1.0, seed=7, n=3)
BASE = Random(0).choices(range(5, VOCAB_SIZE), k=1511)
PROMPTS = [
    BASE,  # ends 25 tokens before a chunk does
    BASE[:900] + Random(1).choices(range(5, VOCAB_SIZE), k=300),
    BASE[: 3 * CHUNK],
    BASE[:100],
]


class Ask(NamedTuple):
    """What is asked: which prompt, how, and whether a share is kept."""

    prompt: int
    sampling: SamplingParams
    is_kept: bool

    @property
    def name(self):
        """A request id."""
        return f"{self.prompt} {'kept' if self.is_kept else 'exact'} {self.sampling.n}"

    @property
    def caller(self):
        """Who asks for such blocks."""
        return Caller(kv_keep=SHARE if self.is_kept else 1.0)


ASKS = [Ask(at, how, kept) for at in range(len(PROMPTS)) for how in (GREEDY, THREE) for kept in (False, True)]


class House:
    """An engine that is stepped by hand, and audited after each step.

    Attributes:
        seen: how often what happened: who was preempted, by kind; steps that packed.
        outputs: of each request and sample, its tokens and all that was told of them.
        in_step: called with the plan while a step runs; what it raises, the step dies of.
    """

    def __init__(self, config):
        self.seen = Counter()
        self.outputs = defaultdict(list)
        self.ends = {}
        self.in_step = lambda plan: None
        self.engine = build_engine(plan_engine(config), emit=self._on_event)
        self.core = self.engine.scheduler.core
        self._run, self.engine.runner.run = self.engine.runner.run, self._run_watched

    def _on_event(self, event):
        if isinstance(event, RequestPreempted):
            self.seen["preempted kept" if "kept" in event.request_id else "preempted exact"] += 1
        elif isinstance(event, ChunksPacked):
            self.seen["packed"] += 1

    def _run_watched(self, plan):
        result = self._run(plan)
        self.in_step(plan)
        return result

    def add(self, ask, name=None):
        self.engine.add(name or ask.name, PROMPTS[ask.prompt], ask.sampling, ask.caller)

    def step(self):
        for delta in self.engine.step():
            told = zip(delta.token_ids, delta.logprobs or (), strict=True)
            self.outputs[delta.request_id, delta.index] += told
            if delta.finish_reason is not None:
                self.ends[delta.request_id, delta.index] = delta.finish_reason
        audit(self.core)

    def finish(self):
        """Run to the end; nobody holds a block then but pins."""
        while self.engine.has_requests:
            self.step()
        pool = self.core.pool
        assert pool.num_cached + len(pool.free_ids) == pool.num_blocks
        assert pool.num_packed[NO_MASK] == 0

    def told(self, ask, name=None):
        """Return what was told of all samples of a request."""
        return [self.outputs[name or ask.name, index] for index in range(ask.sampling.n)]


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """Return the config of an engine that offers both kinds, and has room for all."""
    folder = save_tiny_model("llama", tmp_path_factory.mktemp("llama"), dtype=torch.float32)
    config = json.loads((folder / "config.json").read_text())  # a model of its own: its scorer is nobody else's
    (folder / "config.json").write_text(json.dumps({**config, "nobody_reads_this": str(folder)}))
    keep_random_scorer(folder)
    yield EngineConfig(
        model=str(folder),
        dtype="float32",
        kv_keep=(1.0, SHARE),
        kv_cache_memory_bytes=700 * BLOCK_BYTES,
        max_model_len=1600,
        max_num_batched_tokens=600,
        admission="prompt",  # so that requests are preempted
    )
    scorer_path(folder).unlink()


@pytest.fixture(scope="module")
def expected(calibrated):
    """Return what is told to each: exact requests by an engine without shares, kept ones alone and cold."""
    found = {}
    plain = House(replace(calibrated, kv_keep=()))
    for ask in (one for one in ASKS if not one.is_kept):
        plain.engine.add(ask.name, PROMPTS[ask.prompt], ask.sampling)
    plain.finish()
    cold = House(replace(calibrated, kv_keep=(SHARE,), enable_prefix_caching=False))
    for ask in ASKS:
        if ask.is_kept:
            cold.add(ask)
            cold.finish()
        found[ask] = (cold if ask.is_kept else plain).told(ask)
    assert found[ASKS[0]] != found[ASKS[1]]
    return found


def hold(house, expected, asks=ASKS):
    """Hold what was told to whom it was asked by to what was expected."""
    for ask in asks:
        assert house.told(ask) == expected[ask], ask.name
        assert {house.ends[ask.name, index] for index in range(ask.sampling.n)} == {"length"}


@pytest.mark.long
def test_samples_of_both_kinds_part_within_a_chunk_and_each_packs_it(calibrated, expected):
    house = House(calibrated)
    for is_warm in (False, True):
        for ask in Random(is_warm).sample(ASKS, len(ASKS)):
            house.add(ask)
        house.finish()
        hold(house, expected)
        house.outputs.clear()
    assert house.seen["packed"] > 4


@pytest.mark.long
@pytest.mark.parametrize("is_during", [False, True])
@pytest.mark.parametrize("goner", [ASKS[1], ASKS[3]], ids=lambda one: one.name)
def test_who_is_cancelled_while_chunks_are_packed_leaves_others_as_they_were(calibrated, expected, goner, is_during):
    """In the midst of its prompt, or where its samples have parted: between two steps, or during one that packs."""
    assert goner.is_kept
    house = House(replace(calibrated, max_num_batched_tokens=300))
    left = [one for one in ASKS if one.prompt < 2 and one != goner]

    def end_it():
        is_cut = house.engine.abort(goner.name)
        house.seen["cut"] += is_cut
        house.seen["cut late"] += is_cut and house.engine.scheduler.get(goner.name) is not None

    def end_it_in(plan):
        names = [house.engine.scheduler.in_step[row].parent_id for row in plan.packing_rows]
        if goner.name in names and house.seen["packed"] >= enough:
            end_it()

    for num_packed in (1, 2, 4, 6):
        enough = house.seen["packed"] + num_packed
        for ask in (goner, *left):
            house.add(ask)
        house.in_step = end_it_in if is_during else lambda plan: None
        while house.engine.has_requests:
            house.step()
            if house.seen["packed"] >= enough and not is_during:
                end_it()
                audit(house.core)
        house.finish()
        hold(house, expected, left)
        house.outputs.clear()
        house.engine.reset_prefix_cache()
        audit(house.core)
    assert house.seen["cut"] >= 2
    house.in_step = lambda plan: None
    for ask in (goner, *left):
        house.add(ask)
    house.finish()
    hold(house, expected, (goner, *left))


@pytest.mark.parametrize(
    ("num_blocks", "seed", "kinds"),
    [
        (250, 2, {"exact", "kept"}),
        pytest.param(300, 0, {"exact", "kept"}, marks=pytest.mark.long),
        pytest.param(350, 2, {"exact", "kept"}, marks=pytest.mark.long),
        pytest.param(160, 0, {"kept"}, marks=pytest.mark.long),
        pytest.param(160, 2, {"exact"}, marks=pytest.mark.long),
    ],
)
def test_who_is_preempted_goes_on_as_if_nothing_had_been(calibrated, expected, num_blocks, seed, kinds):
    house = House(replace(calibrated, kv_cache_memory_bytes=num_blocks * BLOCK_BYTES))
    for ask in Random(seed).sample(ASKS, len(ASKS)):
        house.add(ask)
    house.finish()
    hold(house, expected)
    assert {kind for kind in ("exact", "kept") if house.seen[f"preempted {kind}"]} == kinds


def test_pins_of_each_kind_are_of_that_kind_and_are_given_up_for_either(calibrated, expected):
    house = House(replace(calibrated, max_pinned_share=1.0, kv_cache_memory_bytes=220 * BLOCK_BYTES))
    core, warm = house.core, SamplingParams(max_tokens=0)
    for is_kept in (False, True):
        caller = Caller(kv_keep=SHARE if is_kept else 1.0, warm_up=WarmUp(pin=True))
        house.engine.add(f"pin {is_kept}", BASE, warm, caller)
        while house.engine.has_requests:
            house.engine.step()
            audit(core)
    pins = house.engine.pins().pins
    exact, kept = (core.pins.get(f"pin {is_kept}") for is_kept in (False, True))
    assert [pin.num_tokens for pin in pins] == [len(BASE) // 16 * 16] * 2
    assert exact.num_blocks == len(BASE) // 16
    assert not set(exact.blocks) & set(kept.blocks)
    assert kept.num_blocks < 0.9 * exact.num_blocks
    status = EngineStatus.of(house.engine.scheduler, kinds=house.engine.limits.kinds)
    counts = [(one.name, one.codec, one.num_pinned, one.num_packed > 0) for one in status.kinds]
    expected_counts = [("exact", "", exact.num_blocks, False), (f"keep {SHARE}", "", kept.num_blocks, True)]
    assert counts == expected_counts
    longest = [one for one in ASKS if not one.prompt and one.sampling.n == 1]
    for ask in longest:
        caller = ask.caller
        found = house.engine.foresee(PROMPTS[ask.prompt], caller)
        assert found.num_hit_tokens >= 1280
        house.add(ask)
        house.finish()
    hold(house, expected, longest)
    for ask in ASKS:
        house.add(ask) if ask not in longest else None
    house.finish()
    hold(house, expected)
    assert {gone.cause for gone in core.pins.dropped} == {"memory"}


@pytest.mark.parametrize("num_blocks", [700, pytest.param(200, marks=pytest.mark.long)])
def test_beams_that_keep_all_find_what_they_find_without_shares(calibrated, expected, num_blocks):
    """Beside requests of both kinds on the same prompts, whose chunks are packed in the same steps."""
    beams = SamplingParams(use_beam_search=True, n=3, temperature=0.0, max_tokens=NUM_OUTPUTS, ignore_eos=True)
    searches = [Ask(at, replace(beams, logprobs=2, length_penalty=at), is_kept=False) for at in (0, 1, 3)]
    found = []
    for shares, others in (((), []), (calibrated.kv_keep, ASKS)):
        house = House(replace(calibrated, kv_keep=shares, kv_cache_memory_bytes=num_blocks * BLOCK_BYTES))
        for ask in others:
            house.add(ask)
        for search in searches:
            house.add(search, f"search {search.prompt}")
        house.finish()
        hold(house, expected, others)
        found.append([house.told(search, f"search {search.prompt}") for search in searches])
    assert found[0] == found[1]
    assert house.seen["packed"]
    for caller in (Caller(kv_keep=SHARE), Caller(kv_quality=f"keep {SHARE}")):
        with pytest.raises(InvalidRequestError, match=r"a share of 0\.5 is kept") as caught:
            house.engine.check(BASE, beams, caller)
        assert "kv_quality 'exact' (kv_keep 1.0)" in caught.value.remedy
        assert caught.value.param == "use_beam_search"


class _Interrupted(BaseException):
    """Ends a step, and is no fault of its requests."""


class Machine:
    """Operations on a house, by chance, and what became of whom.

    Attributes:
        asked: who is here, by name, and what it asked.
        seen: how often what happened; of what came during a step, whether the step packed.
        num_held: whose outputs were as expected.
    """

    def __init__(self, house, expected, seed):
        self.house, self.expected, self.rng = house, expected, Random(seed)
        self.asked = {}
        self.seen = Counter()
        self.num_held = self.num_added = 0
        house.in_step = self._during

    def _during(self, plan):
        fate, packs = self.rng.random(), bool(plan.packing_rows)
        if fate < 0.08:
            self._cut(self.rng.choice(self.house.engine.scheduler.in_step).parent_id)
            self.seen["cut", packs] += 1
        if 0.04 < fate < 0.12:
            self.seen["failed", packs] += 1
            raise _Interrupted
        if 0.12 < fate < 0.2 and not self.seen["blamed"]:
            self.seen["blamed"] += 1
            msg = "once"
            raise RuntimeError(msg)

    def _cut(self, name):
        self.house.engine.abort(name)
        self.asked.pop(name, None)

    def act(self):
        """Do something, and then a step."""
        house, rng, fate = self.house, self.rng, self.rng.random()
        self.num_added += 1
        if fate < 0.3 and len(house.engine.scheduler.waiting) < 4:
            ask = rng.choice(ASKS)
            name = f"{ask.name} #{self.num_added}"
            self.asked[name] = ask
            house.add(ask, name)
        elif fate < 0.32 and self.asked:
            self._cut(rng.choice(list(self.asked)))
        elif fate < 0.35:
            warm = Caller(kv_keep=rng.choice([SHARE, 1.0]), warm_up=WarmUp(pin=True))
            with contextlib.suppress(PinQuotaError):
                house.engine.add(f"pin {self.num_added}", rng.choice(PROMPTS), SamplingParams(max_tokens=0), warm)
        elif fate < 0.355:
            house.engine.reset_prefix_cache()
        with contextlib.suppress(_Interrupted):
            house.step()
        self.hold()

    def hold(self):
        """Hold those that have ended to what was expected."""
        for name, ask in list(self.asked.items()):
            if all((name, index) in self.house.ends for index in range(ask.sampling.n)):
                assert self.house.told(ask, name) == self.expected[ask], name
                del self.asked[name]
                self.num_held += 1


@pytest.mark.long
@pytest.mark.parametrize("seed", long_but([1], range(10)))
def test_whatever_becomes_of_any_of_them(calibrated, expected, seed):
    """They come, are cancelled between steps and during them, pinned, preempted; steps fail; the cache is reset."""
    house = House(replace(calibrated, kv_cache_memory_bytes=260 * BLOCK_BYTES, max_num_batched_tokens=400))
    machine = Machine(house, expected, seed)
    for _ in range(350):
        machine.act()
    house.in_step = lambda plan: None
    house.finish()
    machine.hold()
    assert not machine.asked
    assert "error" not in house.ends.values()
    assert machine.num_held > 10
    assert machine.seen["failed", True]
    assert machine.seen["cut", False] + machine.seen["cut", True]
    assert house.seen["packed"] > 10
