"""``streaming_llm``: engines that keep sink tokens and a window say what the paper's way of computing it says.

In every setting, as for models with windows of their own; the fused decoder near it, and the same to the bit in any
company; beyond the positions that a model was made for; in a cache of its own.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from equivalence.alone import AloneOutputs
from equivalence.coded_cases import constants_for
from equivalence.prompts import short_prompts
from equivalence.settings import SETTINGS, long_but
from equivalence.streaming_twin import StreamingTwin
from equivalence.suite import Trial, Workload
from equivalence.test_fused import LOGITS_BOUND, _engine, _plan
from equivalence.test_fused_windows import _groups, _last_logits, _tokens
from equivalence.test_windows import expected_of_windows
from equivalence.tiny_models import MAX_POSITIONS, VOCAB_SIZE
from pagefold.config import EngineConfig
from pagefold.engine import build
from pagefold.engine.calibration import _num_positions
from pagefold.engine.namespace import namespace_of
from pagefold.engine.planning import _check_streaming, hardware_of, plan_engine
from pagefold.errors import ConfigError
from pagefold.kv import KeepRule
from pagefold.runner.fused.decoder import FusedDecoder

pytestmark = pytest.mark.usefixtures("one_thread")

WINDOW, NUM_SINKS = 20, 5
RULE = KeepRule(WINDOW, num_sinks=NUM_SINKS)
SINKS = {"streaming_llm": WINDOW, "streaming_llm_sinks": NUM_SINKS}
SHORT = Workload(short_prompts(VOCAB_SIZE), num_outputs=24)
FEW = Workload([prompt for prompt in SHORT.prompts if len(prompt) in {17, 45, 77, 140}], num_outputs=24)
QUICK = {"chunks of 17", "host tier"}
IN_SETTINGS = [
    pytest.param(setting, id=setting.name, marks=[] if setting.name in QUICK else [pytest.mark.long])
    for setting in SETTINGS
    if setting.knows_groups and setting.block_size <= WINDOW
]
FAMILIES = ["llama", "phi3", "qwen3", "gemma3", "cohere2", "llama4", "gpt-oss"]
"""Ropes of a whole head and of a part; of two kinds; layers without any; windows and chunks beside; learned sinks."""


@pytest.fixture(scope="module")
def twin(tiny_folder):
    made = {}

    def make(family):
        if family not in made:
            made[family] = StreamingTwin(tiny_folder(family), SHORT.num_outputs, WINDOW, NUM_SINKS)
        return made[family]

    return make


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("family", long_but(["phi3", "gemma3"], FAMILIES))
def test_families_say_what_the_paper_says(family, tiny_folder, twin):
    alone, workload = replace(SETTINGS[1], **SINKS), FEW if family in {"phi3", "gemma3"} else SHORT
    trial = Trial(alone, workload, tiny_folder(family))
    assert RULE in tuple(trial.engine.scheduler.core.rules)
    trial.run()
    trial.assert_exact(twin(family))


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("setting", IN_SETTINGS)
def test_no_setting_changes_a_token(setting, tiny_folder, twin):
    workload = FEW if setting.name in QUICK else SHORT
    at_least = expected_of_windows(setting, SHORT).at_least if workload is SHORT else None
    trial = Trial(replace(setting, at_least=at_least, **SINKS), workload, tiny_folder("llama"))
    assert tuple(trial.engine.scheduler.core.rules) == (RULE,)
    trial.run()
    trial.assert_exact(twin("llama"))
    assert trial.counts.num_loaded_blocks or not setting.num_host_blocks or setting.slow_policy is not None


@pytest.mark.parametrize("family", long_but(["llama"], ["llama", "gemma3", "qwen3"]))
def test_the_fused_decoder_is_near_the_paper(family, tiny_folder, twin):
    """A ragged batch, then one token more for each of its sequences; one is longer than the model was made for."""
    most = MAX_POSITIONS + 200
    runner = _engine(tiny_folder(family), max_model_len=most, **SINKS).runner
    assert isinstance(runner.decoder, FusedDecoder)
    lengths = (most - 2, 10 * WINDOW, 1, WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + NUM_SINKS, WINDOW + NUM_SINKS + 1, 70)
    sequences, more = [_tokens(at, length) for at, length in enumerate(lengths)], _tokens(99, len(lengths))
    ends = [*accumulate((length // runner.geometry.block_size + 1 for length in lengths), initial=0)]
    blocks = [range(begin, end) for begin, end in pairwise(ends)]
    rows = [(ids, 0, own) for ids, own in zip(sequences, blocks, strict=True)]
    first = runner.logits(_plan(rows, _groups(runner))).clone()
    rows = [([one], len(ids), own) for one, ids, own in zip(more, sequences, blocks, strict=True)]
    second = runner.logits(_plan(rows, _groups(runner))).clone()
    for at, ids in enumerate(sequences):
        with torch.inference_mode():
            expected = twin(family).model(torch.tensor([[*ids, more[at]]])).logits[0, -2:]
        told = torch.stack([first[at], second[at]]).double()
        # The paper's places are small; at position 4,000 an angle of float32 is rounded by as much as the bound.
        bound = LOGITS_BOUND if len(ids) < 1000 else 5 * LOGITS_BOUND
        assert (told - expected).abs().max() < bound


@pytest.mark.parametrize("codec", long_but(["auto"], ["auto", "int8_per_token_head", "k8v4"]))
def test_the_fused_decoder_says_the_same_in_any_company(codec, tiny_folder):
    """To the bit: alone or among others, in chunks of any size, with blocks between given back, one thread or two."""
    tails = [_tokens(50 + at, length) for at, length in enumerate((1, 24, 26, 70, 300))]
    told = []
    for threads in (1, 2):
        runner = _engine(tiny_folder("llama"), threads=threads, kv_cache_dtype=codec, **SINKS).runner
        whole = [(ids, 0, range(64 * at, 64 * at + 64)) for at, ids in enumerate(tails)]
        alone = [runner.logits(_plan([row], _groups(runner)))[0].clone() for row in whole]
        together = list(runner.logits(_plan(whole, _groups(runner))).clone())
        in_chunks = [[_last_logits(runner, ids, own, size) for ids, _, own in whole] for size in (1, 16, 17, 512)]
        told += [alone, together, *in_chunks]
    for results in zip(*told, strict=True):
        assert not results[0].isnan().any()
        assert all(torch.equal(results[0], result) for result in results)


@pytest.mark.long
@pytest.mark.parametrize("codec", ["kivi2", "int4_per_token_head"])
def test_codes_say_in_any_setting_what_they_say_alone(codec, tiny_folder, monkeypatch):
    """Sealed blocks too: those of sink tokens are sealed long before a window leaves them."""
    monkeypatch.setattr(build, "_constants", constants_for)
    how = {"dtype": "float64", "attention_backend": "reference", "max_model_len": 2048, "kv_cache_dtype": codec}
    alone = AloneOutputs(tiny_folder("llama"), SHORT.num_outputs, **how, **SINKS)
    for setting in SETTINGS:
        if setting.name in QUICK:
            trial = Trial(replace(setting, kv_cache_dtype=codec, at_least=None, **SINKS), SHORT, tiny_folder("llama"))
            trial.run()
            trial.assert_exact(alone)


def planned(tiny_folder, **settings):
    return plan_engine(EngineConfig(model=str(tiny_folder("llama")), **settings))


def test_it_is_a_cache_of_its_own(tiny_folder):
    """Whatever differs of the two, nothing is shared; where the window hides nothing, it is the exact one."""
    keys = set()
    for settings in ({}, {"streaming_llm": 64}, {"streaming_llm": 80}, {"streaming_llm": 64, "streaming_llm_sinks": 5}):
        keys.add(namespace_of(planned(tiny_folder, max_model_len=200, **settings)).key())
    assert len(keys) == 4
    hides_nothing = planned(tiny_folder, max_model_len=200, streaming_llm=196)
    assert namespace_of(hides_nothing).key() == namespace_of(planned(tiny_folder, max_model_len=200)).key()


def test_a_start_says_what_is_not_the_models(tiny_folder):
    lines = hardware_of(planned(tiny_folder, streaming_llm=64)).lines(planned(tiny_folder, streaming_llm=64))
    told = (
        "streaming  the first 4 and the last 64 tokens, in 2 of 2 layers: beyond 68 tokens outputs are not the model's"
    )
    assert told in lines
    exact = planned(tiny_folder)
    assert not any("streaming" in line for line in hardware_of(exact).lines(exact))


def test_codecs_know_the_same_of_the_model_however_long_requests_may_be(tiny_folder):
    """What is calibrated hangs on the positions that the model was made for, not on a number that is asked."""
    codec = {"kv_cache_dtype": "int8_per_token_head", "streaming_llm": 64}
    found = {_num_positions(planned(tiny_folder, max_model_len=asked, **codec)) for asked in (None, 200, 100_000)}
    assert found == {MAX_POSITIONS}


def test_cards_refuse_it_by_name(tiny_folder):
    blueprint = planned(tiny_folder, streaming_llm=64)
    with pytest.raises(ConfigError, match="streaming_llm is set, and is not computed on cuda yet"):
        _check_streaming(blueprint.config, blueprint.spec, "cuda")


def test_it_goes_beyond_the_models_positions_if_asked(tiny_folder):
    for asked, longest in ((None, MAX_POSITIONS), ("auto", MAX_POSITIONS), (10 * MAX_POSITIONS, 10 * MAX_POSITIONS)):
        capacity = planned(tiny_folder, streaming_llm=64, max_model_len=asked).capacity
        assert capacity.max_model_len == longest
    with pytest.raises(ConfigError):
        planned(tiny_folder, streaming_llm=64, max_model_len=2**20 + 1)
    with pytest.raises(ConfigError):
        planned(tiny_folder, max_model_len=10 * MAX_POSITIONS)


@pytest.mark.parametrize(
    ("family", "asked", "message"),
    [
        ("llama", MAX_POSITIONS - 3, f"were made for {MAX_POSITIONS}|was made for {MAX_POSITIONS}"),
        ("mistral-window-40", 64, "no layer of .* sees more than 40 tokens anyway"),
        ("phi3-longrope", 4090, "was made for"),
    ],
)
def test_what_does_nothing_or_too_much_is_refused(family, asked, message, tiny_folder):
    with pytest.raises(ConfigError, match=message):
        plan_engine(EngineConfig(model=str(tiny_folder(family)), streaming_llm=asked, max_model_len=100_000))


def test_models_without_rope_are_refused_before_weights_are_loaded(tmp_path):
    config = GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=128, vocab_size=300)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="has no rope"):
        plan_engine(EngineConfig(model=str(tmp_path), streaming_llm=64))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"streaming_llm": 15}, "at least a block of 16 tokens"),
        ({"streaming_llm": 64, "streaming_llm_sinks": 0}, "at least 1"),
        ({"streaming_llm_sinks": 8}, "streaming_llm is not set"),
        ({"streaming_llm": 64, "allow_streaming": True, "kv_offloading_size": 1.0}, "Leave one of them out"),
    ],
)
def test_what_cannot_be_is_refused(settings, message):
    with pytest.raises(ConfigError) as caught:
        EngineConfig(model="smollm2-135m", **settings)
    assert message in f"{caught.value}"
