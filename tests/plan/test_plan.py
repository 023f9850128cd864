"""Plans: settings, parallelism, concurrency, techniques, money, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagefold.errors import ConfigError, DoesNotFitError
from pagefold.kv import CODECS, KVGeometry
from pagefold.plan import (
    Device,
    Lengths,
    PlanSettings,
    Question,
    Workload,
    draw_lengths,
    find_device,
    find_model,
    make_plan,
    nearest_settings,
)
from pagefold.plan.concurrency import Pool, Rounding, reach
from pagefold.plan.floors import decode_operations, prefill_operations, share_of_touched_experts
from pagefold.plan.memory import plan_memory
from pagefold.plan.report import figures, formula
from pagefold.plan.timing import read_weight_bytes
from pagefold.plan.workload import spread

H100 = find_device("H100")
LLAMA_8B, LLAMA_70B = find_model("meta-llama/Llama-3.1-8B"), find_model("meta-llama/Llama-3.1-70B")
FIXED = Workload(name="fixed", lengths=(Lengths(500, 200),))


def question(shape=LLAMA_8B, device=H100, *, workload=FIXED, price=None, **settings: object) -> Question:
    asked = PlanSettings(**({"max_model_len": 8192} | settings))
    return Question(shape=shape, device=device, settings=asked, workload=workload, price_per_hour=price)


@pytest.fixture(scope="module")
def plan():
    return make_plan(question(price=3.0))


# Settings.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 17}, "power of two"),
        ({"block_size": -16}, "power of two"),
        ({"block_size": 2**20}, "power of two"),
        ({"gpu_memory_utilization": 0.0}, "above 0 and at most 1"),
        ({"gpu_memory_utilization": 90.0}, "above 0 and at most 1"),
        ({"gpu_memory_utilization": float("nan")}, "above 0 and at most 1"),
        ({"kv_cache_memory_bytes": -1}, "at least 1"),
        ({"max_num_seqs": 0}, "at least 1"),
        ({"max_num_batched_tokens": -5}, "at least 1"),
        ({"max_model_len": 1}, "at least 2 tokens"),
        ({"max_model_len": "long"}, "max_model_len is 'long'"),
        ({"tensor_parallel_size": 0}, "between 1 and"),
        ({"pipeline_parallel_size": 10**6}, "between 1 and"),
        ({"dtype": "float61"}, r"nearest: float16"),
        ({"kv_cache_dtype": "int8_per_head"}, "nearest: int8_per_token_head"),
        ({"weight_dtype": "int4-g64"}, "nearest: int4-g128"),
        ({"block_size": 16.0}, "block_size is 16.0"),
    ],
)
def test_bad_settings_name_what_is_allowed(changes, message):
    with pytest.raises(ConfigError, match=message) as refusal:
        PlanSettings(**changes)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"tensor_parallel_size": 3},
            "does not divide the 64 attention heads. It must be one of 1, 2, 4, 8, 16, 32, 64",
        ),
        ({"pipeline_parallel_size": 81}, "there are 80 layers"),
        ({"max_model_len": 131_073}, "made for 131072 positions. Give at most 131072"),
    ],
)
def test_what_the_model_cannot_is_refused_before_memory_is_looked_at(changes, message):
    with pytest.raises(ConfigError, match=message) as refusal:
        make_plan(question(LLAMA_70B, **changes))
    assert not isinstance(refusal.value, DoesNotFitError)


def test_kv_heads_that_can_neither_be_divided_nor_repeated():
    shape = find_model("Qwen/Qwen2.5-0.5B")  # 14 heads, 2 of KV
    with pytest.raises(ConfigError, match="2 KV heads can be neither divided nor repeated"):
        make_plan(question(shape, tensor_parallel_size=7))
    assert make_plan(question(shape, tensor_parallel_size=2))


# Memory and parallelism.


def test_the_parts_of_a_device_s_memory_add_up(plan):
    (device,) = plan.memory.devices
    reserve = device.reserve
    parts = device.capacity.weight_bytes + device.capacity.kv_budget_bytes
    parts += (reserve.activations + reserve.outside + reserve.graphs).likely
    assert 0 <= device.usable_bytes - parts < device.shard.layout.bytes_per_block
    assert device.shard.weight_bytes == 2 * LLAMA_8B.num_parameters
    assert device.shard.extra_bytes == 2 * 131_072 * 128  # a table of ropes
    rows, hidden = 1024, LLAMA_8B.hidden_size  # vLLM's sequences on an H100, and its 132 multiprocessors
    logits = (14 * rows + 4 * 132) * LLAMA_8B.vocab_size
    assert device.activation_bytes == logits + 2 * hidden * (8192 + rows) + 40 * 2**20


def test_tensor_parallel_divides_weights_and_heads():
    one, four = (plan_memory(LLAMA_8B, H100, PlanSettings(tensor_parallel_size=n)).devices[0] for n in (1, 4))
    norms = 2 * (sum(layer.whole_parameters for layer in LLAMA_8B.layers) + LLAMA_8B.other_parameters)
    assert 4 * four.shard.weight_bytes == pytest.approx(one.shard.weight_bytes + 3 * norms, rel=1e-9)
    assert 4 * four.shard.layout.bytes_per_token == one.shard.layout.bytes_per_token


def test_projections_to_repeated_heads_are_repeated_with_them():
    settings = PlanSettings(tensor_parallel_size=16, max_model_len=1024)
    (device,) = plan_memory(LLAMA_70B, H100, settings).devices
    kv = sum(layer.kv_parameters for layer in LLAMA_70B.layers)
    whole = sum(layer.whole_parameters for layer in LLAMA_70B.layers) + LLAMA_70B.hidden_size
    divided = LLAMA_70B.num_parameters - kv - whole
    assert device.shard.weight_bytes == 2 * (divided // 16 + kv // 8 + whole)


@pytest.mark.parametrize(
    ("stages", "layers"), [(1, [80]), (2, [40, 40]), (3, [27, 27, 26]), (7, [11, 11, 11, 12, 12, 12, 11])]
)
def test_pipeline_stages_share_the_layers_and_the_tightest_binds(stages, layers):
    memory = plan_memory(
        LLAMA_70B, H100, PlanSettings(pipeline_parallel_size=stages, weight_dtype="fp8", tensor_parallel_size=2)
    )
    assert [device.shard.end_layer - device.shard.first_layer for device in memory.devices] == layers
    assert sum(device.shard.layout.bytes_per_token for device in memory.devices) == memory.layout.bytes_per_token // 2
    fewest = min(device.capacity.max_concurrency for device in memory.devices)
    assert memory.max_concurrency == fewest
    total = sum(device.shard.weight_bytes for device in memory.devices) * 2
    in_16_bit = LLAMA_70B.embedding_parameters + LLAMA_70B.head_parameters
    assert total == pytest.approx(LLAMA_70B.num_parameters + in_16_bit, rel=1e-3)


def test_a_tied_table_lies_on_the_first_and_the_last_stage():
    shape = find_model("meta-llama/Llama-3.2-1B")
    one, two = (plan_memory(shape, H100, PlanSettings(pipeline_parallel_size=n)) for n in (1, 2))
    more = sum(d.shard.weight_bytes for d in two.devices) - one.devices[0].shard.weight_bytes
    assert more == 2 * shape.vocab_size * shape.hidden_size


def test_a_checkpoint_s_own_quantization_is_taken():
    big = find_device("B200")
    oss = plan_memory(find_model("openai/gpt-oss-120b"), big, PlanSettings())
    assert oss.weight_dtype.name == "mxfp4"
    # Its files are of 65 GB, and experts are padded from 2880 x 2880 to 3072 x 3072.
    assert oss.devices[0].shard.weight_bytes == pytest.approx(65.2e9 + 0.1378 * 60.9e9, rel=0.01)
    own = plan_memory(find_model("openai/gpt-oss-120b"), big, PlanSettings(engine="pagefold"))
    assert own.devices[0].shard.weight_bytes == pytest.approx(65.2e9, rel=0.01)
    assert (
        plan_memory(find_model("deepseek-ai/DeepSeek-V3"), big, PlanSettings(tensor_parallel_size=8)).weight_dtype.name
        == "fp8"
    )


@pytest.mark.long
@pytest.mark.parametrize(
    "max_model_len", ["auto", *(pytest.param(length, marks=pytest.mark.long) for length in (None, 4096))]
)
@pytest.mark.parametrize(
    "name",
    [
        "google/gemma-3-27b-it",
        "openai/gpt-oss-20b",
        "ai21labs/Jamba-v0.1",
        "meta-llama/Llama-4-Scout-17B-16E",
        pytest.param("google/gemma-3n-E4B", marks=pytest.mark.long),
        pytest.param("mistralai/Mistral-7B-v0.1", marks=pytest.mark.long),
    ],
)
def test_every_kind_of_attention_is_planned(name, max_model_len):
    shape = find_model(name)
    made = make_plan(question(shape, find_device("MI300X"), max_model_len=max_model_len, weight_dtype="fp8"))
    device = made.memory.tightest
    layout, capacity = device.shard.layout, device.capacity
    assert capacity.num_blocks * layout.bytes_per_block == capacity.kv_budget_bytes
    per_request = layout.num_blocks_for(capacity.max_model_len, made.memory.num_new)
    assert capacity.num_blocks_per_request == per_request <= capacity.num_blocks
    assert made.load.reached.mean <= made.load.reached.peak
    assert 0 < made.load.waste < 0.2
    assert formula(made.memory.layout)
    is_estimated = "is estimated" in " ".join(figures(made)["notes"])
    assert is_estimated == made.load.is_likened == (name == "ai21labs/Jamba-v0.1")


def test_a_window_lets_long_sequences_take_no_more():
    gemma, short = find_model("google/gemma-3-27b-it"), {"weight_dtype": "fp8"}
    long = plan_memory(gemma, H100, PlanSettings(**short, max_model_len=65_536)).tightest
    without = long.capacity.kv_budget_bytes / (65_536 * long.shard.layout.bytes_per_token)
    assert long.capacity.max_concurrency > 3 * without  # vLLM holds a step's 8,192 tokens beside each window
    small = {"max_model_len": 65_536, "max_num_batched_tokens": 512, "max_num_seqs": 128}
    of_small_steps = plan_memory(gemma, H100, PlanSettings(**short, **small)).tightest.capacity.max_concurrency
    assert of_small_steps > 1.5 * long.capacity.max_concurrency


# Concurrency.


@pytest.mark.long
@given(prompt=st.integers(1, 300), output=st.integers(10, 60), num_blocks=st.integers(30, 90), sharing=st.booleans())
def test_the_reached_number_is_between_full_lengths_and_prompts(prompt, output, num_blocks, sharing):
    layout = KVGeometry(2, 2, 64, element_bytes=2).layout
    workload = Workload(name="", lengths=(Lengths(prompt, output),))
    rounding = Rounding(layout, workload)
    pool = Pool(num_blocks, 16, None, 4096)
    reached = reach(pool, workload, footprint=rounding.mean_blocks, with_sharing=sharing)
    assert reached.peak <= num_blocks // layout.num_blocks_for(prompt)
    assert reached.mean <= num_blocks / layout.num_blocks_for(prompt)
    assert reached.mean >= 0.7 * num_blocks / rounding.full_blocks - 1


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("num_blocks", [53, 62])
def test_short_outputs_do_not_end_faster_than_others_come(num_blocks):
    """One block each, ten steps long: what ends in a step must have as many behind it that wait."""
    workload = Workload(name="", lengths=(Lengths(1, 10),))
    assert reach(Pool(num_blocks, 16, None, 4096), workload, footprint=1, with_sharing=False).mean > 40


def test_a_bound_on_sequences_is_kept():
    found = reach(Pool(1000, 16, 7, 512), FIXED, footprint=38, with_sharing=False)
    assert found.peak == 7
    assert found.mean == pytest.approx(7, rel=0.05)


@pytest.mark.long
def test_a_likeness_of_a_large_pool_is_as_the_pool_itself(monkeypatch):
    pool = Pool(8000, 16, None, 8192)
    likeness = reach(pool, FIXED, footprint=38, with_sharing=False)
    monkeypatch.setattr("pagefold.plan.concurrency._MOST", 10_000)
    monkeypatch.setattr("pagefold.plan.concurrency._MAX_REQUEST_STEPS", 10**9)
    monkeypatch.setattr("pagefold.plan.concurrency._GENERATIONS", 4)
    whole = reach(pool, FIXED, footprint=38, with_sharing=False)
    assert likeness.mean == pytest.approx(whole.mean, rel=0.02)


@pytest.mark.long
def test_sharing_holds_the_prefix_once():
    shared = replace(FIXED, prefix_len=400)
    room = 20 * 10**9  # so that vLLM's 1,024 sequences are not what ends it
    made = make_plan(question(workload=shared, kv_cache_memory_bytes=room))
    assert made.load.rounding.shared_blocks == 25
    assert made.load.full_shared == pytest.approx((made.memory.tightest.capacity.num_blocks - 25) / (44 - 25))
    assert made.load.reached_shared.mean > 1.5 * made.load.reached.mean
    half = make_plan(question(workload=replace(shared, prefix_share=0.5), kv_cache_memory_bytes=room))
    assert made.load.reached_shared.mean > half.load.reached_shared.mean > half.load.reached.mean


def test_requests_that_are_too_long_are_left_out_and_counted():
    mixed = Workload(name="", lengths=(Lengths(100, 10), Lengths(9000, 10)))
    made = make_plan(question(workload=mixed))
    assert made.load.num_too_long == 1
    assert "1 requests of the workload are longer" in " ".join(figures(made)["notes"])
    with pytest.raises(ConfigError, match="give a max_model_len of that or more"):
        make_plan(question(workload=Workload(name="", lengths=(Lengths(9000, 10),))))


@pytest.mark.parametrize(
    "text", ["0", "-3", "9-3", "lognormal:9", "lognormal:9,3", "many", "", "1e3", "99999999999999"]
)
def test_lengths_that_are_none(text):
    with pytest.raises(ConfigError, match="input_len"):
        draw_lengths(text, "10")


def test_lengths_by_distribution():
    drawn = draw_lengths("lognormal:1000,4000", "20-40")
    prompts = sorted(lengths.prompt for lengths in drawn)
    assert prompts[len(prompts) // 2] == pytest.approx(1000, rel=0.2)
    assert prompts[int(0.95 * len(prompts))] == pytest.approx(4000, rel=0.3)
    assert {20, 40} <= {lengths.output for lengths in drawn} <= set(range(20, 41))
    assert draw_lengths("5", "6") == (Lengths(5, 6),)
    assert len(spread(drawn, 10)) == 10


@pytest.mark.parametrize(
    "changes",
    [{"prefix_len": 500}, {"prefix_len": -1}, {"prefix_share": 1.5}, {"turns": 0}, {"pause_s": -1.0}, {"lengths": ()}],
)
def test_bad_workloads(changes):
    with pytest.raises(ConfigError):
        replace(FIXED, **changes)


# Floors.


def test_experts_that_are_not_chosen_are_neither_computed_nor_read():
    shape = find_model("mistralai/Mixtral-8x7B-v0.1")
    memory = plan_memory(shape, find_device("H200"), PlanSettings(max_model_len=4096))
    one, many = read_weight_bytes(shape, memory, 1), read_weight_bytes(shape, memory, 1000)
    experts = 2 * sum(layer.expert_parameters for layer in shape.layers)
    assert many - one == pytest.approx(0.75 * experts)
    assert many == pytest.approx(2 * (shape.num_parameters - shape.embedding_parameters))
    assert share_of_touched_experts(0.25, 2) == pytest.approx(1 - 0.75**2)
    assert decode_operations(shape, 0) < 2 * 13e9


def test_what_is_cached_is_not_computed_but_attended_to():
    whole, half = prefill_operations(LLAMA_8B, 1000), prefill_operations(LLAMA_8B, 1000, 500)
    assert prefill_operations(LLAMA_8B, 1000, 999) < 0.002 * whole
    assert 0.5 < half / whole < 0.51  # the second half sees the first as well
    window = find_model("mistralai/Mistral-7B-v0.1")
    full = find_model("mistralai/Mistral-7B-v0.3")
    assert prefill_operations(window, 4096) == pytest.approx(prefill_operations(full, 4096), rel=1e-3)
    assert prefill_operations(window, 32_768) < 0.9 * prefill_operations(full, 32_768)


@pytest.mark.long
def test_what_binds_is_what_more_of_would_help():
    long_outputs = Workload(name="", lengths=(Lengths(50, 2000),))
    long_prompts = Workload(name="", lengths=(Lengths(7000, 10),))
    assert make_plan(question(workload=long_prompts)).timing.binds == "compute"
    tight = question(
        LLAMA_70B, workload=long_outputs, weight_dtype="fp8", gpu_memory_utilization=0.95, max_model_len=4096
    )
    assert make_plan(tight).timing.binds == "memory"
    slow = replace(find_device("H200"), bandwidth=1e11)
    assert make_plan(question(device=slow, workload=long_outputs)).timing.binds == "bandwidth"


def test_break_even_is_where_loading_takes_as_long_as_computing(plan):
    kv_bytes = 500 * LLAMA_8B.layout(CODECS["bfloat16"], block_size=16, max_len=8192).bytes_per_token
    alone = max(prefill_operations(LLAMA_8B, 500) / H100.flops_16, 2 * 8.03e9 / H100.bandwidth)
    assert plan.break_even == pytest.approx(kv_bytes / alone, rel=0.05)


@pytest.mark.long
def test_a_device_without_peaks_is_planned_without_floors():
    bare = Device(name="x", memory_bytes=80 * 10**9)
    made = make_plan(question(device=bare, price=1.0))
    assert made.timing.binds is None
    assert made.break_even is None
    assert made.cost.per_million_output_tokens is None
    assert figures(made)["decode_floor"]["seconds"] is None


# Techniques and money.


def test_techniques_are_ranked_and_priced(plan):
    worth = [technique.worth for technique in plan.techniques]
    assert worth == sorted(worth, reverse=True)
    by_name = {technique.name: technique for technique in plan.techniques}
    assert by_name["KV in fp8"].gain == pytest.approx(2, rel=1e-3)
    assert by_name["KV in int8_per_token_head"].gain == pytest.approx(256 / 130, rel=1e-3)
    assert by_name["KV in int4_per_token_head"].gain == pytest.approx(256 / 72, rel=1e-3)
    assert plan.timing.binds == "compute", "so more room for KV is worth nothing, and operations in 8 bit are"
    assert by_name["KV in fp8"].monthly_saving is None
    assert by_name["weights in fp8"].monthly_saving == pytest.approx(3 * 720 / 2, rel=0.05)  # then bandwidth is near
    assert by_name["2 devices for each layer"].gain_per_device == by_name["2 devices for each layer"].gain / 2
    assert not any(name.startswith(("sharing", "KV of idle")) for name in by_name)
    assert all(technique.flags for technique in plan.techniques)


@pytest.mark.long
def test_a_technique_gains_what_switching_it_on_gives(plan):
    technique = next(each for each in plan.techniques if each.name == "weights in int4-g128")
    with_it = make_plan(question(weight_dtype="int4-g128"))
    assert with_it.load.full / plan.load.full == pytest.approx(technique.gain, rel=1e-6)


@pytest.mark.long
def test_conversations_that_come_back_make_tiers_worth_while():
    talk = replace(FIXED, turns=5, pause_s=60.0)
    names = [technique.name for technique in make_plan(question(workload=talk)).techniques]
    assert any("RAM" in name for name in names)
    assert not any("NVMe" in name for name in names), "an H100 computes an 8B's KV sooner than a disk brings it"
    large = question(LLAMA_70B, workload=talk, weight_dtype="int4-g128")
    assert any("NVMe" in technique.name for technique in make_plan(large).techniques)


# Refusals.


@pytest.mark.parametrize(
    ("model", "device", "settings"),
    [
        ("meta-llama/Llama-3.1-70B", "H100", {}),
        ("meta-llama/Llama-3.1-70B", "A10", {"weight_dtype": "int4-g128"}),
        ("deepseek-ai/DeepSeek-V3", "H200", {"tensor_parallel_size": 4}),
        ("meta-llama/Llama-3.1-8B", "L4", {"max_model_len": None}),
        ("meta-llama/Llama-3.1-8B", "H100", {"kv_cache_memory_bytes": 10**6}),
        ("meta-llama/Llama-3.1-8B", "H100", {"kv_cache_memory_bytes": 10**12}),
        ("ai21labs/Jamba-v0.1", "A100", {}),
    ],
)
def test_a_refusal_names_settings_that_fit(model, device, settings):
    asked = question(find_model(model), find_device(device), **settings)
    with pytest.raises(DoesNotFitError) as refusal:
        make_plan(asked)
    assert refusal.value.missing_bytes > 0
    remedies = nearest_settings(asked)
    assert 1 <= len(remedies) <= 3
    for remedy in remedies:
        fitted = plan_memory(asked.shape, asked.device, remedy.settings)
        assert fitted.max_model_len == remedy.max_model_len
        assert fitted.max_concurrency == remedy.max_concurrency >= 1
        assert remedy.flags.startswith(("--", "without --"))


def test_missing_bytes_are_what_is_missing():
    device = H100.with_memory(16 * 10**9)
    asked = question(LLAMA_8B, device, gpu_memory_utilization=1.0, max_model_len=4096)
    with pytest.raises(DoesNotFitError) as refusal:
        make_plan(asked)
    enough = device.with_memory(device.memory_bytes + refusal.value.missing_bytes)
    assert plan_memory(LLAMA_8B, enough, asked.settings).max_concurrency == 1
    short = plan_memory(LLAMA_8B, device.with_memory(enough.memory_bytes - 1), asked.settings)
    assert not short.fits, "only where all is favourable"
    assert short.tightest.kv.low == 0


def test_a_cpu_is_one_device():
    with pytest.raises(ConfigError, match="A CPU is one device"):
        make_plan(question(device=Device(name="cpu", memory_bytes=10**11, is_cpu=True), tensor_parallel_size=2))
