"""On a card: the equality rule, memory as planned and given back, and a server that outlives a step without memory."""

from __future__ import annotations

import gc

import pytest
import torch
from equivalence.alone import AloneOutputs
from equivalence.beam_references import BeamReferences
from equivalence.drafted import DraftCounts, drafting_by, known_by
from equivalence.prompts import short_prompts
from equivalence.references import References
from equivalence.tiny_models import VOCAB_SIZE, save_tiny_model

from pagefold.config import EngineConfig
from pagefold.engine.build import build_engine
from pagefold.engine.calibration import find_constants
from pagefold.engine.planning import hardware_of, plan_engine
from pagefold.errors import DoesNotFitError
from pagefold.sampling import SamplingParams
from pagefold.speculation import SpeculativeParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_model("llama", tmp_path_factory.mktemp("llama"))


def make_engine(folder, emit=lambda _: None, **settings):
    plan = plan_engine(EngineConfig(model=str(folder), device="cuda", **settings))
    engine = build_engine(plan, emit=emit, say=lambda _: None)
    data = engine.runner.slab.data  # whoever reads what nobody wrote is found out
    data.fill_(float("nan") if data.is_floating_point() else 0xFF)
    return engine


def complete(engine, prompts, num_outputs, name="r"):
    for index, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=0.0, max_tokens=num_outputs, ignore_eos=True)
        engine.add(f"{name}{index}", prompt, sampling)
    outputs = {f"{name}{index}": [] for index in range(len(prompts))}
    while engine.has_work:
        for delta in engine.step():
            assert delta.error is None, delta.error
            outputs[delta.request_id] += delta.token_ids
    return list(outputs.values())


def test_float64_by_the_reference_is_generate_exactly(folder):
    prompts = [prompt[:300] for prompt in short_prompts(VOCAB_SIZE)]
    engine = make_engine(
        folder, dtype="float64", max_num_seqs=8, max_num_batched_tokens=64, kv_cache_memory_bytes=2**22
    )
    references = References(folder, 24)
    assert complete(engine, prompts, 24) == [references.of(prompt) for prompt in prompts]


@pytest.mark.parametrize("enforce_eager", [True, False])
def test_float32_by_the_kernels_says_what_generate_says(folder, enforce_eager):
    """Float32 rounds far below the gaps of this model's logits; graphs and eager steps are the same arithmetic."""
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 2**21, "max_model_len": 512}
    prompts = [prompt[:300] for prompt in short_prompts(VOCAB_SIZE)]
    engine = make_engine(folder, dtype="float32", enforce_eager=enforce_eager, **settings)
    references = References(folder, 24)
    assert complete(engine, prompts, 24) == [references.of(prompt) for prompt in prompts]
    assert engine.num_ahead > engine.num_launched / 2, "most tokens were taken where the last step had left them"


@pytest.mark.parametrize("enforce_eager", [True, False])
@pytest.mark.parametrize("family", ["gemma3", "mistral-window", "llama4", "gpt-oss", "gemma3n"])
def test_windows_are_passed_as_generate_passes_them(family, enforce_eager, tmp_path):
    """Windows of 24 tokens in some layers and in all, chunks, sinks, layers that read the K and V of others."""
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 2**22, "max_model_len": 512}
    prompts = [prompt[:300] for prompt in short_prompts(VOCAB_SIZE)]
    windowed = save_tiny_model(family, tmp_path)
    engine = make_engine(windowed, dtype="float32", enforce_eager=enforce_eager, **settings)
    assert any(rule.trims for rule in engine.scheduler.core.rules)
    references = References(windowed, 24)
    assert complete(engine, prompts, 24) == [references.of(prompt) for prompt in prompts]


@pytest.mark.parametrize("enforce_eager", [True, False])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_drafts_change_no_output(family, dtype, enforce_eager, tmp_path):
    """Right ones and wrong ones, by who knows what follows, and by what is cached; steps without one look ahead."""
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 2**22, "max_model_len": 512}
    prompts = [prompt[:300] for prompt in short_prompts(VOCAB_SIZE)]
    model, counts = save_tiny_model(family, tmp_path), DraftCounts()
    engine = make_engine(model, counts.emit, dtype=dtype, enforce_eager=enforce_eager, **settings)
    references = References(model, 24)
    expected = [references.of(prompt) for prompt in prompts]
    for round_, drafting in enumerate((known_by(references, VOCAB_SIZE), drafting_by("tree"), drafting_by("ngram"))):
        engine.drafting = drafting(engine)
        assert complete(engine, prompts, 24, name=f"{round_}-") == expected
    assert counts.num_accepted > 100
    assert counts.num_rejected > 100


def test_drafts_that_a_server_makes_change_no_output(folder):
    """Chosen by what steps take on this card."""
    settings = {"max_num_seqs": 8, "kv_cache_memory_bytes": 2**22, "max_model_len": 512}
    speculation = SpeculativeParams(method="tree", num_speculative_tokens=5)
    engine = make_engine(folder, dtype="float32", speculative_config=speculation, **settings)
    prompts = [prompt[:300] for prompt in short_prompts(VOCAB_SIZE)]
    references = References(folder, 24)
    for round_ in range(2):
        assert complete(engine, prompts, 24, name=f"{round_}-") == [references.of(prompt) for prompt in prompts]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_beams_are_those_of_transformers(folder, dtype):
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 2**22, "max_model_len": 512}
    engine = make_engine(folder, dtype=dtype, **settings)
    references = BeamReferences(References(folder, 24))
    how = SamplingParams(use_beam_search=True, temperature=0.0, n=3, max_tokens=12, length_penalty=2.0)
    for number, prompt in enumerate(short_prompts(VOCAB_SIZE)):
        name, found = str(number), {}
        engine.add(name, prompt[:300], how)
        while engine.has_work:
            for delta in engine.step():
                assert delta.error is None, delta.error
                found.setdefault(delta.index, []).extend(delta.token_ids)
        assert [found[at] for at in range(3)] == [one.token_ids for one in references.of(prompt[:300], how)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_a_damaged_token_is_noticed_though_its_chunk_samples_nothing(folder, dtype):
    engine = make_engine(folder, dtype=dtype, max_num_seqs=8, max_num_batched_tokens=64, kv_cache_memory_bytes=2**22)
    prefix, how = list(range(100, 140)), SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    (expected,) = complete(engine, [[*prefix, 7]], 8)
    engine.scheduler.core.forgetting.reset()
    engine.runner.decoder.model.model.embed_tokens.weight.data[5] = torch.nan
    engine.add("bad", [*prefix, 5, *range(6, 90)], how)
    deltas = []
    while not deltas:
        deltas = engine.step()
    assert (deltas[-1].finish_reason, list(deltas[-1].token_ids)) == ("error", [])
    while engine.has_work:
        engine.step()
    assert complete(engine, [[*prefix, 7]], 8, name="b") == [expected]


@pytest.mark.parametrize("enforce_eager", [True, False])
@pytest.mark.parametrize(
    ("name", "skipped"),
    [("int8_per_token_head", ()), ("int4_per_token_head", (0,)), ("k8v4", ()), ("fp8_e4m3", ()), ("kivi2", ())],
)
def test_codes_on_a_card_say_what_they_say_alone_on_a_cpu(folder, name, skipped, enforce_eager):
    codec = {"kv_cache_dtype": name, "kv_cache_dtype_skip_layers": skipped}
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 2**20, "max_model_len": 512}
    prompts = [prompt[:300] for prompt in short_prompts(VOCAB_SIZE)]
    engine = make_engine(folder, dtype="float32", enforce_eager=enforce_eager, **settings, **codec)
    how = {"device": "cpu", "dtype": "float32", "model_impl": "transformers", "attention_backend": "reference"}
    alone = AloneOutputs(folder, 24, **how, **codec)
    assert complete(engine, prompts, 24) == [alone.of(prompt) for prompt in prompts]


def test_a_calibration_on_a_card_is_that_of_a_cpu(tiny_chat_model, tmp_path, monkeypatch):
    """In float32; nearly, as products of matrices are summed in another order."""
    found = []
    for device in ("cpu", "cuda"):
        monkeypatch.setenv("PAGEFOLD_CACHE", str(tmp_path / device))
        how = {"device": device, "dtype": "float32", "model_impl": "transformers", "kv_cache_dtype": "int4"}
        blueprint = plan_engine(EngineConfig(model=str(tiny_chat_model), kv_cache_memory_bytes=2**22, **how))
        found.append(find_constants(blueprint, hardware_of(blueprint).decoder, str))
    for on_cpu, on_card in zip(*found, strict=True):
        torch.testing.assert_close(on_cpu, on_card, rtol=1e-2, atol=1e-2 * on_cpu.abs().max().item())


def test_bfloat16_logits_are_near_those_of_float32(folder):
    """Teacher-forced, so that nothing adds up: 8 bits of a mantissa through two layers."""
    engines = {name: make_engine(folder, dtype=name, kv_cache_memory_bytes=2**22) for name in ("float32", "bfloat16")}
    logits = {}
    for name, engine in engines.items():
        sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
        prompt = short_prompts(VOCAB_SIZE)[-1][:400]
        engine.add("r", prompt, sampling)
        found = []
        while engine.has_work:
            for delta in engine.step():
                found = delta.prompt_logprobs.found if delta.prompt_logprobs else found
        logits[name] = torch.tensor([one.logprob for one in found])
    error = (logits["float32"] - logits["bfloat16"]).abs()
    assert error.max() < 1.0
    assert error.median() < 0.1


def test_what_is_allocated_is_what_was_planned(folder):
    engine = make_engine(folder, dtype="bfloat16", gpu_memory_utilization=0.3)
    total_bytes = torch.cuda.mem_get_info()[1]
    assert engine.runner.slab.num_bytes == engine.capacity.kv_budget_bytes
    assert torch.cuda.memory_allocated() <= 0.3 * total_bytes


def test_memory_is_given_back_after_a_thousand_requests(folder):
    engine = make_engine(folder, dtype="bfloat16", max_num_seqs=64, kv_cache_memory_bytes=2**24, max_model_len=512)
    prompts = [prompt[:100] for prompt in short_prompts(VOCAB_SIZE)]
    rounds = -(-1000 // len(prompts))
    complete(engine, prompts, 8, "first")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for index in range(rounds):
        complete(engine, prompts, 8, f"{index}-")
    torch.cuda.synchronize()
    gc.collect()
    assert torch.cuda.memory_allocated() <= before[0] + 2**20
    assert torch.cuda.memory_reserved() <= before[1] + 2**26


@pytest.mark.parametrize("group_bytes", [1, 2**18], ids=["layer by layer", "at once"])
def test_blocks_that_come_back_from_the_host_are_the_same(folder, group_bytes, monkeypatch):
    """A budget of two prompts, and a host that holds all: what is evicted is restored, and outputs stay."""
    monkeypatch.setattr("pagefold.store.card_arena._SLICE_BYTES", group_bytes)
    settings = {"dtype": "float64", "max_num_seqs": 2, "max_model_len": 512, "kv_cache_memory_bytes": 2**20}
    engine = make_engine(folder, kv_offloading_size=2**-5, **settings)
    link = engine.scheduler.core.arbiter.links["host"]
    assert link.bytes_per_s > 1e8, "it was measured"
    engine.scheduler.core.arbiter.compute_s_per_token = 1.0  # so that all is restored
    monkeypatch.setattr(engine.scheduler.core.arbiter, "learn_compute", lambda *_: None)
    measured = link.bytes_per_s
    prompts = [prompt[:300] for prompt in short_prompts(VOCAB_SIZE)]
    references = References(folder, 8)
    expected = [references.of(prompt) for prompt in prompts]
    num_loaded = 0
    for index in range(3):
        assert complete(engine, prompts, 8, f"{index}-") == expected
    for index, prompt in enumerate(prompts):
        engine.add(f"last-{index}", prompt, SamplingParams(temperature=0.0, max_tokens=1))
        while engine.has_work:
            num_loaded += sum(sum(delta.num_loaded_tokens.values()) for delta in engine.step())
    assert num_loaded > 0
    assert link.bytes_per_s != measured, "and learnt of each restore"


def test_a_step_without_memory_ends_its_request_and_no_other(folder):
    """Somebody takes all of the card while a request runs; when they let go, the next request is served."""
    engine = make_engine(folder, dtype="bfloat16", kv_cache_memory_bytes=2**24, enforce_eager=True)
    torch.cuda.empty_cache()
    taken = []
    size = 2**30
    while size >= 2**20:
        try:
            taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    sampling = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=5)
    engine.add("starved", list(range(3, 300)), sampling)
    errors = []
    while engine.has_work:
        errors += [delta.error for delta in engine.step() if delta.error]
    del taken
    torch.cuda.empty_cache()
    if errors:  # a step of so small a model may fit into what is left
        assert "too little memory" in errors[0]
        assert "Start with a smaller" in errors[0]
    assert len(complete(engine, [list(range(3, 50))], 4)[0]) == 4


def test_a_budget_that_does_not_fit_is_refused_before_weights_are_loaded(folder):
    with pytest.raises(DoesNotFitError, match="Any of these does"):
        plan_engine(EngineConfig(model=str(folder), device="cuda", kv_cache_memory_bytes=2**50))
