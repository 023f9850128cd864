"""KIVI at 2 bit: blocks that are sealed when they are full. Part 3 of the equality rule.

What a token is and what is stored depends on no chunks, no batch, nothing cached, and on no preemption or failed step:
outputs are those of each prompt alone, and blocks are equal in bits. The kernel is held to the reference, which decodes
what it gathers; slabs are equal in bytes, and whatever was never written holds NaN.
"""

from __future__ import annotations

import time
from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from equivalence.alone import AloneOutputs
from equivalence.attention_cases import Shape
from equivalence.harsh_runner import HarshRunner, InjectedError
from equivalence.overlapped_loop import build_overlapped, overlapped
from equivalence.prompts import short_prompts
from equivalence.sealed_cases import SealedCase, hold_slabs
from equivalence.settings import SETTINGS, long_but
from equivalence.suite import Counts, Trial, Workload, assert_clean, cached_blocks
from equivalence.tiny_models import VOCAB_SIZE
from pagefold.config import EngineConfig
from pagefold.engine.build import build_engine
from pagefold.engine.planning import geometry_of, plan_engine
from pagefold.errors import ConfigError, PagefoldError
from pagefold.observe.recorder import TraceRecorder
from pagefold.runner.codecs.int2 import pack, quantize, unpack
from pagefold.runner.sealed_slab import to_residual
from pagefold.sampling import SamplingParams
from pagefold.sim.replay_recording import replay_recording
from pagefold.sim.traces.read_recording import read_recording

BOUND = 3e-5  # as in test_codecs.py
SHAPES = (
    Shape(block_size=16, head_dim=64, num_kv_heads=3, group=3),  # SmolLM2
    Shape(block_size=16, head_dim=32, num_kv_heads=4, group=1),  # MHA
    Shape(block_size=32, head_dim=128, num_kv_heads=1, group=8),  # MQA
    Shape(block_size=16, head_dim=256, num_kv_heads=2, group=2),
    Shape(block_size=8, head_dim=80, num_kv_heads=2, group=4),
    Shape(block_size=4, head_dim=48, num_kv_heads=1, group=3),
    Shape(block_size=64, head_dim=96, num_kv_heads=2, group=2),
)
SEQUENCES = st.lists(
    st.tuples(
        st.one_of(st.just(0), st.integers(0, 70), st.integers(0, 800)),
        st.one_of(st.just(1), st.integers(1, 20), st.integers(1, 150)),
        st.one_of(st.just(0), st.integers(0, 900)),
    ),
    min_size=1,
    max_size=4,
)

SHORT = Workload(short_prompts(VOCAB_SIZE), num_outputs=24)


def _once(counts):
    """What a setting is about must happen; how often depends on whole blocks being hit, and on who is preempted."""
    return counts and Counts(**{name: min(1, least) for name, least in vars(counts).items()})


QUICK = (
    "chunks of 17",
    "shared prefixes in one step",
    "short of memory",
    "host tier",
    "failed steps, chunks of 17, warm",
)
ALL_SETTINGS = [
    replace(setting, kv_cache_dtype="kivi2", at_least=_once(setting.at_least))
    for setting in SETTINGS
    if 4 <= setting.block_size <= 64 and setting.streamed_share is None
]


@pytest.fixture(scope="module")
def alone(tiny_folder):
    made = {}

    def make(family, setting):
        key = family, setting.dtype, setting.attention_backend, setting.block_size
        if key not in made:
            settings = {"dtype": key[1], "attention_backend": key[2], "block_size": key[3]}
            made[key] = AloneOutputs(tiny_folder(family), SHORT.num_outputs, kv_cache_dtype="kivi2", **settings)
        return made[key]

    return make


@pytest.mark.quick(every=6)
@pytest.mark.parametrize(
    "setting",
    [pytest.param(one, marks=[] if one.name in QUICK else pytest.mark.long) for one in ALL_SETTINGS],
    ids=lambda setting: setting.name,
)
def test_outputs_are_those_alone(setting, tiny_folder, alone):
    """Of the fused decoder; one thread or two."""
    trial = Trial(replace(setting, dtype="float32", attention_backend="auto"), SHORT, tiny_folder("qwen3"))
    trial.run()
    trial.assert_exact(alone("qwen3", trial.setting))


@pytest.mark.quick(every=12)
@pytest.mark.parametrize(
    "is_late", [pytest.param(True, id="late"), pytest.param(False, id="early", marks=pytest.mark.long)]
)
@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(one, id=one.name, marks=[] if number % 3 == 0 else [pytest.mark.long])
        for number, one in enumerate(one for one in ALL_SETTINGS if one.slow_policy is None)
    ],
)
def test_outputs_of_the_overlapped_loop_are_those_alone(setting, is_late, tiny_folder, alone):
    """A step is planned behind one in flight; where that one fails, what the other has begun in residuals is lost."""
    if setting.at_least is not None:
        setting = replace(setting, at_least=Counts(*(count // 2 for count in vars(setting.at_least).values())))
    how = replace(setting, dtype="float32", attention_backend="auto")
    trial = Trial(how, SHORT, tiny_folder("qwen3"), build_overlapped, is_late=is_late)
    trial.run()
    trial.assert_exact(alone("qwen3", trial.setting))
    # While it is looked for who made a step fail, none is planned behind another one.
    assert trial.engine.num_ahead > trial.engine.num_launched / (32 if setting.failure_rate else 4)


@pytest.mark.long
@pytest.mark.parametrize("setting", ALL_SETTINGS[::2], ids=lambda setting: setting.name)
def test_outputs_of_the_reference_are_those_alone(setting, tiny_folder, alone):
    """In float64, by transformers' forward pass."""
    trial = Trial(setting, SHORT, tiny_folder("qwen3"))
    trial.run()
    trial.assert_exact(alone("qwen3", setting))


def hold(case, **how):
    """Hold the kernel to the reference."""
    (expected, plain), (found, slab) = case.run("reference", **how), case.run("cpu", **how)
    assert not expected.isnan().any(), "the reference has read what nothing may read"
    error = (expected - found).abs().max().item()
    assert error <= BOUND, f"off by {error:.2e}"
    hold_slabs(plain, slab)


@pytest.mark.long
@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(shape=st.sampled_from(SHAPES[:2]), sequences=SEQUENCES, seed=st.integers(0, 2**32))
def test_the_kernel_reads_and_seals_what_the_reference_does(shape, sequences, seed):
    hold(SealedCase(shape, sequences, seed))


@pytest.mark.long
@settings(max_examples=80, suppress_health_check=list(HealthCheck))
@given(
    shape=st.sampled_from(SHAPES),
    sequences=SEQUENCES,
    seed=st.integers(0, 2**32),
    layer=st.integers(0, 1),
    softcap=st.sampled_from((0.0, 5.0)),
)
def test_the_kernel_does_so_in_every_shape(shape, sequences, seed, layer, softcap):
    hold(SealedCase(shape, sequences, seed), layer=layer, softcap=softcap)


@pytest.mark.parametrize("shape", long_but(SHAPES[:1], SHAPES), ids=str)
def test_the_kernel_does_so_at_the_ends_of_blocks_and_splits(shape):
    size = shape.block_size
    ends = [
        (255, 1),
        (256, 1),
        (256 + size, size),
        (0, 3 * size + 1),
        (size - 1, 1),
        (size + 1, size - 1),
        (0, 2 * size),
    ]
    hold(SealedCase(shape, [(old, new, 0) for old, new in ends], 3))
    hold(SealedCase(shape, [(0, 5 * size + 2, 0), (6 * size, size, 5 * size), (5 * size + 1, 1, 900)], 4), softcap=4.0)


def test_what_is_stored_does_not_depend_on_how_it_came_about(tiny_folder):
    """Chunks of 512 or of 17, cold, warm, after preemptions or failed steps: every block is equal in bits."""
    names = ("batched, chunks of 512", "chunks of 17", "warm", "failed steps, chunks of 17, warm")
    stored = []
    for setting in ALL_SETTINGS:
        if setting.name in names:
            how = replace(setting, dtype="float32", attention_backend="auto", max_num_seqs=16, ignore_eos=True)
            trial = Trial(replace(how, at_least=None), SHORT, tiny_folder("qwen3"))
            trial.run()
            stored.append(cached_blocks(trial.engine, trial.engine.runner.inner.slab))
    assert len(stored) == len(names)
    for others in stored[1:]:
        shared = stored[0].keys() & others.keys()
        assert len(shared) > 30
        assert all(stored[0][path] == others[path] for path in shared)


class FailsBeforeCopies:
    """A runner that fails, before it does anything, whenever residuals are to be copied."""

    def __init__(self, engine):
        self.inner = engine.runner
        self.num_failures = 0

    def run(self, plan):
        self._look(plan)
        return self.inner.run(plan)

    def launch(self, plan):
        self._look(plan)
        return self.inner.launch(plan)

    def _look(self, plan):
        if plan.residual_copies:
            self.num_failures += 1
            raise InjectedError


def hold_samples(config, prompts, failures, *, is_overlapped=False):
    """Hold samples that fork from a prompt to what each is alone, while steps fail."""
    how = SamplingParams(temperature=1.0, seed=50, max_tokens=40, ignore_eos=True)
    outputs = {}
    for num_samples in (1, 3):
        engine = build_engine(plan_engine(config))
        if num_samples > 1:
            engine = overlapped(engine) if is_overlapped else engine
            if failures == "of copies":
                engine.runner = FailsBeforeCopies(engine)
            else:
                engine.runner = HarshRunner(engine, failure_rate=failures, random=Random(3))
        for index, prompt in enumerate(prompts):
            for seed in range(50, 53 if num_samples == 1 else 51):
                engine.add(f"{index} {seed}", prompt, replace(how, n=num_samples, seed=seed))
        while engine.has_work:
            for delta in engine.step():
                index, seed = map(int, delta.request_id.split())
                outputs.setdefault((num_samples, index, seed + delta.index), []).extend(delta.token_ids)
        assert_clean(engine)
        assert getattr(engine.runner, "num_failures", 1)
    assert len(outputs) == 2 * 3 * len(prompts)
    for (num_samples, index, seed), output in outputs.items():
        assert output == outputs[1, index, seed], (num_samples, index, seed)


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("is_overlapped", [False, True], ids=["plain", "overlapped"])
@pytest.mark.parametrize("failures", [0.0, 0.4, "of copies"])
def test_samples_of_one_prompt_are_each_what_it_is_alone(failures, is_overlapped, tiny_folder):
    """A fork goes on from a copy of what is not sealed; one whose copy is lost with its step computes it again."""
    prompts = [prompt for prompt in SHORT.prompts if len(prompt) < 200][:6]
    config = EngineConfig(
        model=str(tiny_folder("qwen3")),
        kv_cache_dtype="kivi2",
        kv_cache_memory_bytes=2**23,
        max_model_len=256,
        max_num_seqs=9,
        max_num_batched_tokens=40,
    )
    hold_samples(config, prompts, failures, is_overlapped=is_overlapped)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kv_cache_dtype_skip_layers": (0,)}, "seals blocks in all layers"),
        ({"allow_streaming": True, "kv_offloading_size": 0.1}, "does not stream"),
        ({"block_size": 24}, "block_size is 24"),
        ({"kv_cache_memory_bytes": 2**20, "max_num_seqs": 512, "max_num_batched_tokens": 512}, "max_num_seqs = 512"),
    ],
    ids=str,
)
def test_what_does_not_go_with_it_is_refused_by_name(changes, said, tiny_folder):
    with pytest.raises(PagefoldError) as caught:
        plan_engine(EngineConfig(model=str(tiny_folder("qwen3")), kv_cache_dtype="kivi2", **changes))
    assert said in str(caught.value)


def test_heads_that_cannot_be_packed_are_refused(tiny_folder):
    config = EngineConfig(model=str(tiny_folder("qwen3")), kv_cache_dtype="kivi2")
    spec = replace(plan_engine(config).spec, head_dim=24)
    with pytest.raises(ConfigError, match="heads of 24"):
        geometry_of(config, spec, torch.float32)


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), exponent=st.integers(-140, 30), dim=st.integers(0, 1), zeros=st.booleans())
def test_an_element_is_off_by_half_a_scale_at_most(seed, exponent, dim, zeros):
    numbers = torch.randn(16, 64, generator=torch.Generator().manual_seed(seed)) * 2.0 ** (exponent / 2)
    numbers = numbers * 2.0 ** (exponent / 2) * (0.0 if zeros else 1.0)
    found = quantize(numbers, dim)
    decoded = found.codes.float() * found.scales.float() + found.zeros.float()
    assert ((decoded - numbers).abs() <= found.scales.float() / 2 * 1.001 + numbers.abs() * 1e-6).all()
    assert torch.equal(unpack(pack(found.codes)), found.codes)
    assert int(found.codes.max()) <= 3


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_is_not_hidden(bad):
    """NaN is seen in all that shares its scale. Infinity has saturated before, in 16 bit."""
    numbers = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    numbers[3, 5] = bad
    found = quantize(numbers, 0)
    assert found.scales[0].isnan().tolist() == [channel == 5 for channel in range(64)]
    assert to_residual(numbers)[3, 5].isnan() or to_residual(numbers)[3, 5] == 65504


def test_a_recording_of_it_is_replayed_step_by_step(tiny_folder, tmp_path):
    """The simulator's scheduler cuts chunks and leaves parts of blocks alone as the server's did."""
    config = EngineConfig(
        model=str(tiny_folder("qwen3")),
        kv_cache_dtype="kivi2",
        kv_cache_memory_bytes=2**18,
        max_model_len=256,
        max_num_seqs=6,
        max_num_batched_tokens=43,
    )
    recorder = TraceRecorder(tmp_path / "trace.jsonl", time.monotonic)
    engine = build_engine(plan_engine(config), emit=recorder)
    recorder.begin(config, engine.capacity.num_blocks, 0)
    engine.runner = HarshRunner(engine, failure_rate=0.1, random=Random(2))
    for index, prompt in enumerate(prompt for prompt in SHORT.prompts if len(prompt) < 200):
        how = SamplingParams(temperature=1.0, seed=index, n=1 + index % 2, max_tokens=30, ignore_eos=True)
        engine.add(str(index), prompt, how)
    while engine.has_work:
        engine.step()
    recorder.close()
    recording = read_recording(tmp_path / "trace.jsonl")
    assert recording.settings.seals_blocks
    report = replay_recording(recording)
    assert report.first_difference == ""
    assert report.num_equal_steps == report.num_steps > 20
    assert report.num_failed_steps
