"""Logits that are no numbers: the request ends with an error, what it has is dropped, and nobody else can tell."""

from __future__ import annotations

import math
import shutil
import time
from array import array
from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace

import pytest
from engine.test_overlapped_engine import PLAIN, LateRunner, make
from engine.test_overlapped_engine import drain as drain_shadow
from engine.test_tiering import TieredLLM
from safetensors.torch import load_file, save_file

from pagefold.config import EngineConfig
from pagefold.engine.build import build_engine
from pagefold.engine.engine import Engine
from pagefold.engine.overlapped import OverlappedEngine
from pagefold.engine.planning import plan_engine
from pagefold.events import BlockEvicted, PinDropped, RequestCorrupted, StepApplied
from pagefold.kv import audit
from pagefold.kv.names import names_behind, root_digest
from pagefold.request import Caller, WarmUp
from pagefold.sampling import SamplingParams

GREEDY = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 8}
POISON = 777  # of poisoned_chat_model
SHARED = list(range(100, 140))
BYSTANDERS = {f"b{index}": [*SHARED[: 8 * index], 300 + index, 17] for index in range(6)}


class House:
    """An engine of a model that is poisoned in a way: NaN from its weights, or infinity in one logit."""

    def __init__(self, model, way="nan", **settings):
        config = EngineConfig(
            model=str(model), kv_cache_memory_bytes=2**21, max_model_len=128, max_num_seqs=16, **settings
        )
        self.events = []
        self.engine = build_engine(plan_engine(config), emit=self.events.append)
        self.core = self.engine.scheduler.core
        if way != "nan":
            self.engine.runner = InfiniteRunner(self.engine.runner, float(way))

    def add(self, name, prompt, **how):
        caller = how.pop("caller", Caller())
        self.engine.add(name, prompt, SamplingParams(**GREEDY | how), caller)

    def drain(self):
        """Run to the end; return for each sample its tokens and its last delta."""
        found = {}
        while self.engine.has_work:
            for delta in self.engine.step():
                tokens, _ = found.get((delta.request_id, delta.index), ([], None))
                found[delta.request_id, delta.index] = ([*tokens, *delta.token_ids], delta)
            audit(self.core)
        assert self.core.num_active == 0
        return found

    def num_found(self, prompt):
        """How many tokens of a prompt the cache knows."""
        hit = self.core.match(self.engine.limits.namespace.key(), array("i", prompt).tobytes(), len(prompt))
        return len(hit.nodes) * self.core.block_size + hit.num_partial_tokens


class InfiniteRunner:
    """A runner whose decoder makes one logit infinite of each row that computes the poison."""

    def __init__(self, inner, number):
        self.inner = inner
        self.number = number
        self.logits = inner.decoder.logits
        inner.decoder = SimpleNamespace(logits=self.decode, states=inner.decoder.states)

    def run(self, plan):
        self.plan = plan
        return self.inner.run(plan)

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def decode(self, inputs):
        found = self.logits(inputs).clone()
        ends = list(accumulate(self.plan.num_tokens))
        for at, token in enumerate(inputs.logit_rows.tolist()):
            row = next(row for row, end in enumerate(ends) if token < end)
            if POISON in self.plan.token_ids[ends[row] - self.plan.num_tokens[row] : token + 1]:
                found[at, 12345] = self.number
        return found


@pytest.fixture(scope="module")
def expected(tiny_chat_model):
    house = House(tiny_chat_model)
    for name, prompt in BYSTANDERS.items():
        house.add(name, prompt)
    return {name: tokens for (name, _), (tokens, _) in house.drain().items()}


def check_bystanders(found, expected):
    for name, tokens in expected.items():
        assert found[name, 0][0] == tokens
        assert found[name, 0][1].finish_reason == "length"


def check_ended(found, name, index=0, num_tokens=0):
    tokens, last = found[name, index]
    assert len(tokens) == num_tokens
    assert last.finish_reason == "error"
    assert "NaN or infinite" in last.error


@pytest.mark.quick(every=9)
@pytest.mark.parametrize("way", ["nan", "inf", "-inf"])
@pytest.mark.parametrize(
    "how", [{}, {"n": 3, "temperature": 0.9}, {"temperature": 0.9}, {"logprobs": 3}, {"prompt_logprobs": 2}], ids=str
)
def test_a_poisonous_prompt_ends_and_others_go_on(tiny_chat_model, poisoned_chat_model, expected, way, how):
    house = House(poisoned_chat_model if way == "nan" else tiny_chat_model, way)
    for name, prompt in BYSTANDERS.items():
        house.add(name, prompt)
    prompt = [*range(500, 540), POISON]
    house.add("bad", prompt, **how)
    found = house.drain()
    for index in range(how.get("n", 1)):
        check_ended(found, "bad", index)
    check_bystanders(found, expected)
    assert house.num_found(prompt) == 0, "never published"
    assert sum(isinstance(event, RequestCorrupted) for event in house.events) == how.get("n", 1)


def test_a_poisonous_token_that_was_sampled_ends_it_too(poisoned_chat_model, expected):
    house = House(poisoned_chat_model)
    for name, prompt in BYSTANDERS.items():
        house.add(name, prompt)
    house.add("bad", [*SHARED, 9], logit_bias={POISON: 100.0})
    found = house.drain()
    check_ended(found, "bad", num_tokens=1)
    check_bystanders(found, expected)


def test_a_part_of_a_prompt_is_enough_where_its_logprobs_are_asked_for(poisoned_chat_model):
    house = House(poisoned_chat_model, max_num_batched_tokens=16)
    house.add("bad", [5, POISON, *range(200, 260)], prompt_logprobs=0)
    check_ended(house.drain(), "bad")
    assert sum(isinstance(event, StepApplied) for event in house.events) == 1


@pytest.fixture(scope="module")
def damaged_model(tiny_chat_model, tmp_path_factory):
    """Returns a function that makes the folder of the tiny model with such a number in the embedding of POISON."""

    def make(number):
        folder = tmp_path_factory.mktemp("damaged") / "tiny"
        shutil.copytree(tiny_chat_model, folder)
        weights = load_file(folder / "model.safetensors")
        weights["model.embed_tokens.weight"][POISON, 7] = number
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        return folder

    return make


@pytest.mark.quick(every=12)
@pytest.mark.parametrize("number", [math.nan, math.inf])
@pytest.mark.parametrize(
    "how",
    [
        {"model_impl": "pagefold", "dtype": "float32"},
        {"model_impl": "pagefold", "dtype": "bfloat16"},
        {"model_impl": "pagefold", "quantization": "w8a8_int8"},
        {"model_impl": "transformers", "dtype": "float32"},
        {"model_impl": "transformers", "dtype": "bfloat16"},
    ],
    ids=lambda how: "-".join(how.values()),
)
def test_a_part_of_a_prompt_is_enough_though_it_samples_nothing(damaged_model, how, number):
    """Else others would find blocks that attention has spoilt: those of its tokens before the damaged one."""
    model = damaged_model(number)
    shared, bystander = list(range(1000, 1040)), list(range(2000, 2020))
    alone = House(model, **how)
    alone.add("b", [*shared, 5])
    alone.add("bystander", bystander)
    expected = {name: tokens for (name, _), (tokens, _) in alone.drain().items()}
    house = House(model, max_num_batched_tokens=84, **how)
    house.add("bystander", bystander)
    house.add("bad", [*shared, POISON, *range(600, 650)])
    deltas = house.engine.step()  # which computes 64 tokens of it
    num_found = house.num_found(shared)
    house.add("b", [*shared, 5])
    found = house.drain()
    assert found["b", 0][0] == expected["b"]
    assert found["bystander", 0][0] == expected["bystander"][1:]
    assert {delta.request_id: delta.finish_reason for delta in deltas} == {"bystander": None, "bad": "error"}
    assert num_found == 0
    assert sum(isinstance(event, RequestCorrupted) for event in house.events) == 1


def test_what_it_began_with_is_dropped_and_who_shares_that_goes_on(poisoned_chat_model, expected):
    house = House(poisoned_chat_model)
    first, other = [*SHARED, 1, 2, 3, 4, 5, 6, 7, 8], [900, *SHARED]
    house.add("pin", first, max_tokens=1, caller=Caller(warm_up=WarmUp(pin=True)))
    house.drain()
    assert house.num_found(first) == 48
    for name, prompt in BYSTANDERS.items():
        house.add(name, prompt)
    house.add("other", other)
    house.add("bad", [*SHARED, POISON])
    found = house.drain()
    check_ended(found, "bad")
    check_bystanders(found, expected)
    assert house.num_found(first) == 8, "a part of a block that begins otherwise"
    assert house.num_found(other) == 41, "what has another beginning stays"
    assert not list(house.core.pins)
    assert [event.cause for event in house.events if isinstance(event, PinDropped)] == ["corrupted"]
    assert {event.cause for event in house.events if isinstance(event, BlockEvicted)} <= {"corrupted"}
    house.add("again", BYSTANDERS["b5"])
    assert house.drain()["again", 0][0] == expected["b5"]


def test_what_it_took_a_part_of_is_dropped(poisoned_chat_model):
    house = House(poisoned_chat_model)
    house.add("first", SHARED)
    house.drain()
    house.add("bad", [*SHARED[:9], POISON])
    check_ended(house.drain(), "bad")
    assert house.num_found(SHARED) == 0


def test_host_and_slow_tiers_forget_it_too(poisoned_chat_model):
    """And what was computed behind it before: the host knows of that."""
    llm = TieredLLM(str(poisoned_chat_model), policy="write_through")
    core, store = llm.engine.scheduler.core, llm.store
    namespace, shared = llm.engine.limits.namespace.key(), list(range(1000, 1064))
    how = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    root = root_digest(namespace)
    digests = set()
    for tail in range(3):
        packed = array("i", [*shared, *[tail] * 16]).tobytes()
        digests.update(name.digest for name in names_behind(root, root, packed, core.block_size * 4))
        llm.generate({"prompt_token_ids": [*shared, *[tail] * 20]}, how, use_tqdm=False)
    llm.generate([{"prompt_token_ids": [tail] * 100} for tail in (11, 12, 13)], how, use_tqdm=False)

    def wait_for(condition):
        end = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end
            llm.engine.idle()
            time.sleep(0.01)

    wait_for(lambda: digests <= store.kept.keys())
    assert len(digests) == 7
    num_others = len(store.kept.keys() - digests)
    assert all(core.host.blocks.get(digest) for digest in digests)
    (result,) = llm.generate({"prompt_token_ids": [*shared, POISON]}, how, use_tqdm=False)
    assert result.outputs[0].finish_reason == "error"
    assert not core.match(namespace, array("i", shared).tobytes(), 64).nodes
    assert not any(core.host.blocks.get(digest) for digest in digests)
    wait_for(lambda: digests.isdisjoint(store.kept))
    assert len(store.kept) >= num_others > 0
    audit(core)


class CorruptRunner(LateRunner):
    """Finds those corrupted whose seed is 13, from some draw on."""

    def __init__(self, scheduler, first_draw):
        super().__init__(scheduler)
        self.first_draw = first_draw

    def run(self, plan):
        places = zip(plan.sampling_rows, plan.seeds, plan.draws, strict=True)
        bad = [row for row, seed, draw in places if seed == 13 and draw >= self.first_draw]
        return replace(super().run(plan), corrupted=bad)


@pytest.mark.parametrize("kind", [Engine, OverlappedEngine])
@pytest.mark.parametrize("first_draw", range(6))
def test_with_a_step_planned_ahead(kind, first_draw):
    """It ends with the tokens that it had, its row too many is dropped, and so is what others lean on."""
    found = []
    for is_bad in (False, True):
        engine = make(kind, num_blocks=256)
        engine.runner = CorruptRunner(engine.scheduler, first_draw if is_bad else 99)
        prompt = [1, 2, 0, 1] * 3
        for index in range(4):
            engine.add(f"b{index}", [*prompt, index % 3], SamplingParams(max_tokens=12, seed=index, **PLAIN))
        engine.add("bad", [*prompt, 1], SamplingParams(max_tokens=9, seed=13, **PLAIN))
        deltas = []
        while engine.has_work:
            deltas += engine.step()
            audit(engine.scheduler.core)
        assert engine.scheduler.core.num_active == 0
        found.append({})
        for delta in deltas:
            found[-1].setdefault(delta.request_id, []).extend(delta.token_ids)
        if is_bad:
            (last,) = (delta for delta in deltas if delta.finish_reason == "error")
            assert last.request_id == "bad"
            assert "NaN" in last.error
    calm, bad = found
    assert bad.pop("bad", []) == calm.pop("bad")[:first_draw]
    assert bad == calm
    drain_shadow(engine)
