"""The overlapped loop says what the plain one says: the exact part of the equality rule, with results that come late.

The harsh runner computes a step only when its result is asked for, which is when the next one has been planned and
launched: the latest that a card could be. Or it computes at once and tells late: the earliest. Blocks that are free
then hold NaN, and of a token that was not known when a step was planned the real runner takes what the last one left.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
import torch
from store.late_stream import LateStream

from equivalence.overlapped_loop import build_overlapped, overlapped
from equivalence.prompts import short_prompts
from equivalence.settings import SETTINGS
from equivalence.suite import Counts, Setting, Trial, Workload, assert_clean, build
from equivalence.tiny_models import VOCAB_SIZE
from pagefold.engine.overlapped import OverlappedEngine
from pagefold.sampling import SamplingParams
from pagefold.store.card_arena import CardArena

pytestmark = pytest.mark.usefixtures("one_thread")

WORKLOAD = Workload(short_prompts(VOCAB_SIZE), num_outputs=24)


@pytest.mark.quick(every=3)
@pytest.mark.parametrize(
    ("name", "is_late"), [("short of memory", True), ("failed steps", True), ("chunks of 16", False)]
)
def test_outputs_are_those_of_generate(name, is_late, tiny_folder, tiny_references):
    (setting,) = (setting for setting in SETTINGS if setting.name == name)
    hold(setting, tiny_folder, tiny_references, is_late=is_late)


@pytest.mark.long
@pytest.mark.parametrize(
    ("setting", "is_late"),
    [
        pytest.param(setting, number % 2 == 0, id=f"{setting.name}-{'early' if number % 2 else 'late'}")
        for number, setting in enumerate(one for one in SETTINGS if one.slow_policy is None)
    ],
)
def test_outputs_are_those_of_generate_in_every_setting(setting, is_late, tiny_folder, tiny_references):
    hold(setting, tiny_folder, tiny_references, is_late=is_late)


def hold(setting, tiny_folder, tiny_references, *, is_late):
    """Outputs are exact, and at least half as much happens as in the plain loop, whose steps hold other requests."""
    if setting.at_least is not None:
        setting = replace(setting, at_least=Counts(*(count // 2 for count in vars(setting.at_least).values())))
    trial = Trial(setting, WORKLOAD, tiny_folder("llama"), build_overlapped, is_late=is_late)
    trial.run()
    engine = trial.engine
    assert isinstance(engine, OverlappedEngine)
    trial.assert_exact(tiny_references("llama", WORKLOAD.num_outputs))
    if setting.streamed_share is None:
        # While it is looked for who made a step fail, none is planned behind another one.
        assert engine.num_ahead > engine.num_launched / (32 if setting.failure_rate else 4)


@pytest.mark.parametrize("kind", ["overlapped", pytest.param("plain", marks=pytest.mark.long)])
def test_a_layer_reads_what_has_come_for_it(kind, tiny_folder, tiny_references, monkeypatch):
    """Blocks come back from the host as a card's do, a layer at a time, and as late as they may; some of them damaged.

    Until then they hold NaN. That one is damaged is found when all has been computed with it.
    """
    monkeypatch.setattr("pagefold.store.card_arena._SLICE_BYTES", 1)
    stream = LateStream(monkeypatch)

    def build_restoring(*asked):
        engine = (build_overlapped if kind == "overlapped" else build)(*asked)
        arena = engine.runner.arena
        engine.runner.arena = CardArena(arena.num_blocks, arena.blocks.shape[1], torch.device("cpu"), stream)
        return engine

    setting = Setting(
        name="restored",
        block_size=4,
        spare_blocks=6,
        num_host_blocks=300,
        damage_rate=0.02,
        max_prompt_tokens=60,
        num_rounds=2,
        at_least=Counts(num_loaded_blocks=30, num_damaged_blocks=1),
    )
    trial = Trial(setting, WORKLOAD, tiny_folder("llama"), build_restoring)
    trial.run()
    trial.assert_exact(tiny_references("llama", WORKLOAD.num_outputs))
    num_held = len([entry for entry in stream.log if entry[0] == "hold"])
    assert num_held >= stream.log.count("behind current") + 5, "a model of two layers, and each has waited"


def run(engine, *, resets: bool = False):
    """Run an engine with requests that come, and are reset, between steps; return {id: (tokens, why they ended)}."""
    random, prompts = Random(3), WORKLOAD.prompts[:10]
    outputs = {str(index): ([], []) for index in range(len(prompts))}
    coming = list(enumerate(prompts))
    while coming or engine.has_work:
        for _ in range(random.randint(0, 2)):
            if coming:
                index, prompt = coming.pop()
                how = {"temperature": 0.0} if index % 2 else {"temperature": 0.8, "seed": index, "top_p": 0.9}
                if index < 4:  # these come last: before, steps are planned ahead of tokens, and then no more
                    how |= {"logprobs": 2, "prompt_logprobs": 1 if index % 3 else None}
                sampling = SamplingParams(max_tokens=14 - index, **how)
                engine.add(str(index), prompt, sampling)
        if resets and random.random() < 0.2:
            engine.reset_prefix_cache()
        for delta in engine.step():
            outputs[delta.request_id][0].extend(delta.token_ids)
            if delta.finish_reason:
                outputs[delta.request_id][1].append(delta.finish_reason)
    assert_clean(engine)
    return outputs


def test_sampled_outputs_and_reasons_are_those_of_the_plain_loop(tiny_folder):
    from pagefold.config import EngineConfig
    from pagefold.engine.build import build_engine
    from pagefold.engine.planning import plan_engine

    config = EngineConfig(
        model=str(tiny_folder("llama")),
        dtype="float64",
        max_num_seqs=4,
        max_num_batched_tokens=32,
        kv_cache_memory_bytes=2**22,
    )
    blueprint = plan_engine(config)
    plain = run(build_engine(blueprint, say=lambda _: None))
    for resets in (False, True):
        engine = overlapped(build_engine(blueprint, say=lambda _: None))
        assert run(engine, resets=resets) == plain
        assert 0 < engine.num_ahead < engine.num_launched - 4


def test_a_request_whose_time_is_up_is_told_its_last_token_first(tiny_folder):
    from pagefold.config import EngineConfig
    from pagefold.engine.build import build_engine
    from pagefold.engine.planning import plan_engine

    blueprint = plan_engine(
        EngineConfig(model=str(tiny_folder("llama")), dtype="float64", max_model_len=64, kv_cache_memory_bytes=2**20)
    )
    plain = build_engine(blueprint, say=lambda _: None)
    now = [0.0]
    engine = OverlappedEngine(
        scheduler=plain.scheduler,
        runner=plain.runner,
        tokenizer=None,
        limits=plain.limits,
        capacity=plain.capacity,
        request_timeout_s=1.0,
        clock=lambda: now[0],
    )
    engine.add("r", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True))
    assert engine.step() == []  # launched
    (first,) = engine.step()
    assert len(first.token_ids) == 1
    now[0] = 2.0
    token, last = engine.step()
    assert (len(token.token_ids), token.finish_reason) == (1, None)
    assert (last.token_ids, last.finish_reason, last.is_last) == ((), "timeout", True)
    assert not engine.has_work
    assert_clean(engine)
