"""Bounds of throughput, and what a saving is worth: against sums made here by hand, and against each other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pagefold.kv import CODECS, KEEP_ALL
from pagefold.plan import Lengths, PlanSettings, Question, Workload, find_device, find_model, make_plan
from pagefold.plan.concurrency import Pool, Rounding, reach
from pagefold.plan.floors import prefill_operations
from pagefold.plan.memory import plan_memory
from pagefold.plan.timing import read_weight_bytes, request_rate

H100 = find_device("H100")
LLAMA_8B, LLAMA_70B = find_model("meta-llama/Llama-3.1-8B"), find_model("meta-llama/Llama-3.1-70B")
LAYERS_8B = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336 + 2 * 4096)
OUTPUT_8B = 4096 * 128256


def planned(shape=LLAMA_8B, *, prompt: int, output: int, price=None, device=H100, workload=None, **settings):
    workload = workload or Workload(name="", lengths=(Lengths(prompt, output),))
    asked = PlanSettings(**({"max_model_len": 8192} | settings))
    return make_plan(Question(shape=shape, device=device, settings=asked, workload=workload, price_per_hour=price))


def operations_8b(prompt: int, output: int) -> float:
    """Products of all tokens but the last, an output row for each output, and causal attention over 32 layers."""
    num_tokens = prompt + output - 1
    return 2 * LAYERS_8B * num_tokens + 2 * OUTPUT_8B * output + 2 * 32 * num_tokens**2 * 4096


@pytest.mark.quick(every=3)
@pytest.mark.parametrize(("prompt", "output"), [(50, 10), (1024, 128), (4000, 2)])
def test_prompts_are_computed_together_and_decode_rides_along(prompt, output):
    """Prompts that share a step read the weights once: operations alone bound them, however short they are."""
    made = planned(prompt=prompt, output=output)
    assert made.timing.binds == "compute"
    assert made.timing.requests_per_s == pytest.approx(989.4e12 / operations_8b(prompt, output), rel=0.01)


def test_decode_of_long_outputs_reads_weights_and_kv():
    made = planned(prompt=100, output=1000)
    concurrency = made.timing.concurrency
    weights = 2 * (LAYERS_8B + OUTPUT_8B + 4096) * 999 / concurrency
    seconds = (weights + 999 * 600 * 131_072) / 3.35e12
    assert made.timing.binds == "bandwidth"
    assert made.timing.requests_per_s == pytest.approx(1 / seconds, rel=0.01)


def test_one_request_at_a_time_takes_its_steps_one_after_another():
    made = planned(prompt=100, output=1000, max_num_seqs=1)
    timing = made.timing
    alone = timing.prefill.seconds + 999 * timing.decode_alone.seconds
    assert timing.requests_per_s == pytest.approx(timing.concurrency / alone, rel=0.01)


@pytest.mark.long
def test_small_steps_read_the_weights_more_often():
    rates = [planned(prompt=1000, output=1, max_num_batched_tokens=size).timing.requests_per_s for size in (64, 8192)]
    step = 2 * (LAYERS_8B + OUTPUT_8B + 4096) / 3.35e12
    assert rates[0] == pytest.approx(64 / 1000 / step, rel=0.05)
    assert rates[1] > 3 * rates[0]


@pytest.mark.long
def test_stages_work_at_the_same_time():
    """Four devices do as many operations a second whichever way the model is cut."""
    rates = [
        planned(LLAMA_70B, prompt=1024, output=128, **{how: 4}).timing.requests_per_s
        for how in ("tensor_parallel_size", "pipeline_parallel_size")
    ]
    assert rates[1] == pytest.approx(rates[0], rel=0.01)


def test_experts_are_read_in_the_bits_that_they_are_stored_in():
    """gpt-oss-20b: 4 of 32 experts in 4.25 bits, all else but the embedding in 16."""
    shape = find_model("openai/gpt-oss-20b")
    memory = plan_memory(shape, H100, PlanSettings(max_model_len=4096))
    matrices, biases = 24 * 32 * 3 * 2880 * 2880, 24 * 32 * (5760 + 2880)
    others = shape.num_parameters - matrices - biases - 201_088 * 2880
    padded = matrices * 2944 / 2880 * 3072 / 2880  # as vLLM's kernels want them
    experts = padded * 4.25 / 8 + 2 * biases
    assert read_weight_bytes(shape, memory, 1) == pytest.approx(experts / 8 + 2 * others, rel=1e-6)


def test_chunks_attend_to_themselves_only():
    scout, n = find_model("meta-llama/Llama-4-Scout-17B-16E"), 8192 * 3
    whole = replace(
        scout,
        layers=tuple(replace(layer, kv=replace(layer.kv, keeps=KEEP_ALL)) for layer in scout.layers),
    )
    spared = prefill_operations(whole, n) - prefill_operations(scout, n)
    assert spared == pytest.approx(36 * 2 * 40 * 128 * (n**2 - 3 * 8192**2))


# What a saving is worth.


@pytest.mark.long
def test_more_room_saves_nothing_where_compute_binds():
    made = planned(prompt=1024, output=128, price=3.0)
    by_name = {each.name: each for each in made.techniques}
    assert made.timing.binds == "compute"
    assert by_name["KV in fp8"].gain == pytest.approx(2, rel=1e-2)
    assert by_name["KV in fp8"].throughput_gain == pytest.approx(1)
    assert by_name["KV in fp8"].monthly_saving is None
    assert by_name["weights in fp8"].monthly_saving == pytest.approx(3 * 720 / 2, rel=1e-2)  # twice the operations


def test_a_saving_is_what_the_same_load_costs_less():
    made = planned(prompt=100, output=1000, price=3.0)
    with_it = planned(prompt=100, output=1000, price=3.0, kv_cache_dtype="fp8")
    technique = next(each for each in made.techniques if each.name == "KV in fp8")
    times = with_it.timing.requests_per_s / made.timing.requests_per_s
    assert technique.throughput_gain == pytest.approx(times, rel=0.02)
    assert technique.monthly_saving == pytest.approx(3 * 720 * (1 - 1 / times), rel=0.05)


@pytest.mark.long
def test_without_peaks_a_saving_is_by_requests_at_once():
    bare = replace(H100, bandwidth=None, flops_16=None, flops_8=None)
    technique = next(
        each for each in planned(prompt=500, output=200, price=3.0, device=bare).techniques if each.name == "KV in fp8"
    )
    assert technique.throughput_gain is None
    assert technique.monthly_saving == pytest.approx(3 * 720 / 2, rel=1e-2)


def shares_of(**asked) -> dict[str, float]:
    made = planned(device=replace(H100, is_cpu=True), max_num_batched_tokens=512, **asked)
    assert made.memory.num_new == 512
    return {each.name: each.gain for each in made.techniques if "of older tokens" in each.name}


@pytest.mark.long
def test_a_share_of_older_tokens_is_counted_as_it_is_packed():
    """Two chunks whole, a step's tokens, and of older chunks the share; nothing where all is of the last two chunks."""
    gains = shares_of(prompt=7000, output=1000)
    num_older = 8000 // 256 - 1
    for name, share in (("50% of older tokens", 0.5), ("25% of older tokens", 0.25)):
        whole = -(-(2 * 256 - 1 + 512) // 16) + 2
        assert gains[name] == pytest.approx(500 / (whole + share * num_older * 16 + 16), rel=0.01)
    assert not shares_of(prompt=300, output=100)
    assert not [each for each in planned(prompt=7000, output=1000).techniques if "of older" in each.name], "of a card"
    assert not shares_of(prompt=7000, output=1000, kv_cache_dtype="kivi2")


@pytest.mark.long
def test_what_a_share_spares_of_a_prefix_that_is_held_once_is_spared_once():
    """Beside a long prefix that all share, requests whose own tokens are few have nothing to drop."""
    few = Workload(name="", lengths=(Lengths(7100, 100),), prefix_len=6700)
    assert max(shares_of(prompt=0, output=0, workload=few).values(), default=1.0) < 1.2
    alone = Workload(name="", lengths=(Lengths(7100, 100),))
    assert min(shares_of(prompt=0, output=0, workload=alone).values()) > 1.4


@pytest.mark.long
def test_token_eviction_gives_nothing_to_windows_that_are_full_anyway():
    mistral = find_model("mistralai/Mistral-7B-v0.1")
    made = planned(mistral, prompt=28_000, output=1000, max_model_len=32_768)
    technique = [each for each in made.techniques if each.name == "token eviction"]
    assert not technique, "a fifth of 29,000 tokens is more than the window of 4,096"
    full = planned(prompt=7000, output=1000)
    (technique,) = (each for each in full.techniques if each.name == "token eviction")
    assert technique.gain == pytest.approx(5)


@pytest.mark.long
def test_each_device_loads_its_own_part_of_a_conversation():
    talk = Workload(name="", lengths=(Lengths(4000, 200),), turns=4, pause_s=60.0)
    one, four = (
        planned(LLAMA_70B, prompt=0, output=0, workload=talk, weight_dtype="int4", tensor_parallel_size=size)
        for size in (1, 4)
    )
    latency = [
        int(next(each for each in made.techniques if "RAM" in each.name).latency_cost.split()[0])
        for made in (one, four)
    ]
    assert latency == [round(3000 * 327_680 / (0.8 * 63e9) * 1e3), round(3000 * 81_920 / (0.8 * 63e9) * 1e3)]


# Memory and concurrency.


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_auto_is_what_fits_on_every_stage(stages):
    device = find_device("H200")
    settings = PlanSettings(
        pipeline_parallel_size=stages, max_model_len="auto", gpu_memory_utilization=1.2 / (stages + 0.2)
    )
    memory = plan_memory(LLAMA_70B, device, settings)
    assert memory.max_model_len < LLAMA_70B.max_positions
    for longer, fits in ((0, True), (16, False)):
        blocks = [device.shard.layout.num_blocks_for(memory.max_model_len + longer) for device in memory.devices]
        held = [device.capacity.num_blocks for device in memory.devices]
        assert all(need <= have for need, have in zip(blocks, held, strict=True)) is fits
    assert {device.capacity.max_model_len for device in memory.devices} == {memory.max_model_len}


def test_a_prompt_shorter_than_the_prefix_spares_no_more_than_itself():
    layout = LLAMA_8B.layout(CODECS["bfloat16"], block_size=16, max_len=8192)
    lengths = (Lengths(100, 20), Lengths(1000, 20))
    rounding = Rounding(layout, Workload(name="", lengths=lengths, prefix_len=900))
    assert rounding.shared_blocks == 900 // 16
    own = [-(-120 // 16) - 99 // 16, -(-1020 // 16) - 900 // 16]
    assert rounding.full_own_blocks == sum(own) / 2


@pytest.mark.long
def test_long_outputs_are_simulated_by_shorter_ones(monkeypatch):
    long = Workload(name="", lengths=(Lengths(600, 3000),))
    pool = Pool(12_000, 16, None, 8192)
    likeness = reach(pool, long, footprint=170, with_sharing=False)
    monkeypatch.setattr("pagefold.plan.concurrency._MAX_REQUEST_STEPS", 1_200_000)  # 32 requests, 12 generations
    whole = reach(pool, long, footprint=170, with_sharing=False)
    assert likeness.mean == pytest.approx(whole.mean, rel=0.02)


@pytest.mark.long
def test_no_more_requests_decode_in_a_step_than_it_has_tokens():
    short = Workload(name="", lengths=(Lengths(20, 200),))
    found = reach(Pool(1_000_000, 16, None, 2048), short, footprint=8, with_sharing=False)
    assert found.peak <= 1.01 * 2048
    one = Workload(name="", lengths=(Lengths(100, 1),))
    assert reach(Pool(1000, 16, None, 800), one, footprint=7, with_sharing=False).mean == pytest.approx(8, rel=0.15)


def test_a_rate_is_not_known_without_peaks():
    memory = plan_memory(LLAMA_8B, H100, PlanSettings())
    bare, workload = replace(H100, flops_16=None, flops_8=None), Workload(name="", lengths=(Lengths(9, 9),))
    assert request_rate(LLAMA_8B, bare, memory, workload, concurrency=1, hit_share=0) is None
