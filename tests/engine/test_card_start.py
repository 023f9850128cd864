"""A start on a card: what cannot work is refused before weights are loaded, and the plan follows from the card's bytes.

The cards are descriptions: nothing here computes on one.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from equivalence.tiny_models import save_tiny_model

from pagefold.config import EngineConfig
from pagefold.engine.namespace import namespace_of
from pagefold.engine.planning import plan_engine
from pagefold.errors import BudgetTooSmallError, CardMemoryError, ConfigError, DoesNotFitError
from pagefold.kv import KVGeometry
from pagefold.runner.card import Card, choose_device, find_card
from pagefold.runner.slab import ROWS_LAYOUT, Slab
from pagefold.runner.torch_runner import TorchRunner

GIB = 2**30
H100 = Card("NVIDIA H100", (9, 0), 132, 80 * GIB, 79 * GIB)
OLD = Card("Tesla V100", (7, 0), 80, 32 * GIB, 31 * GIB)
NO_TRITON = replace(H100, has_triton=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_tiny_model("llama", tmp_path_factory.mktemp("llama")))


@pytest.fixture
def plan_on(monkeypatch, folder):
    """Plan an engine on a card of that description."""

    def plan(card, **settings):
        monkeypatch.setattr("pagefold.runner.card.find_card", lambda: card)
        monkeypatch.setattr("pagefold.runner.loader.load_model", lambda *_: pytest.fail("weights were loaded"))
        return plan_engine(EngineConfig(model=folder, **settings))

    return plan


def test_auto_takes_a_card_that_will_do():
    assert choose_device("auto", H100) == "cuda"
    assert [choose_device("auto", card) for card in (None, OLD, NO_TRITON)] == ["cpu"] * 3
    assert choose_device("cpu", H100) == "cpu"


@pytest.mark.parametrize(
    ("card", "why"),
    [
        (None, r"torch finds no NVIDIA card\. Install a torch that is built with CUDA.*device=cpu"),
        (OLD, r"V100 has compute capability 7\.0, and the kernels need 8\.0\. Use a newer card, or device=cpu"),
        (NO_TRITON, r"Triton is not installed.*pagefold\[gpu\]"),
    ],
)
def test_a_card_that_will_not_do_is_refused(card, why, plan_on):
    with pytest.raises(ConfigError, match=why):
        plan_on(card, device="cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_where_there_is_no_card_none_is_found(folder):
    assert find_card() is None
    with pytest.raises(ConfigError, match="device is cuda"):
        plan_engine(EngineConfig(model=folder, device="cuda"))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"attention_backend": "cpu"}, "runs on a card"),
        ({"attention_backend": "cuda", "dtype": "float64"}, "float16, bfloat16 and float32"),
        ({"quantization": "int8"}, "takes packed layers .* device=cuda"),
        ({"model_impl": "pagefold"}, "device=cuda"),
        ({"kv_offloading_size": 2.0**20}, r"kv_offloading_size is .* are free\. Give less: it is page-locked"),
    ],
)
def test_settings_that_a_card_does_not_do_are_refused(settings, why, plan_on):
    with pytest.raises(ConfigError, match=why):
        plan_on(H100, device="cuda", **settings)


def test_a_cpu_has_no_attention_of_cards(plan_on):
    with pytest.raises(ConfigError, match="runs on the CPU"):
        plan_on(None, attention_backend="cuda")


def test_the_plan_is_the_share_of_the_card(plan_on):
    blueprint = plan_on(H100, device="cuda", max_model_len=1024)
    assert (blueprint.device, blueprint.dtype, blueprint.is_fused) == ("cuda", torch.bfloat16, False)
    capacity = blueprint.capacity
    assert 0.95 * 72 * GIB < capacity.kv_budget_bytes < 72 * GIB
    assert capacity.kv_budget_bytes == capacity.num_blocks * blueprint.geometry.bytes_per_block
    half = plan_on(H100, device="cuda", max_model_len=1024, gpu_memory_utilization=0.45).capacity
    assert capacity.kv_budget_bytes - half.kv_budget_bytes == pytest.approx(36 * GIB, rel=1e-6)


def test_codecs_make_more_blocks_of_the_same_bytes(plan_on):
    exact, coded = (
        plan_on(H100, device="cuda", kv_cache_memory_bytes=GIB, kv_cache_dtype=name).capacity.num_blocks
        for name in ("auto", "int8")
    )
    assert coded > 1.7 * exact  # heads of 16 numbers have 2 bytes of scale for 16 of codes


@pytest.mark.parametrize(
    ("name", "on_card", "on_cpu"),
    [
        ("int8_per_token_head", "codec-rows-v3", "codec-panels-v3"),
        ("kivi2", "sealed-rows-v1", "sealed-panels-v1"),
    ],
)
def test_codes_of_a_card_are_never_taken_for_those_of_a_cpu(name, on_card, on_cpu, plan_on):
    blueprints = [plan_on(H100, device=device, dtype="float32", kv_cache_dtype=name) for device in ("cuda", "cpu")]
    layouts = [namespace_of(blueprint).layout for blueprint in blueprints]
    assert [layout.startswith(f"{own}/{name}/") for layout, own in zip(layouts, (on_card, on_cpu), strict=True)]


def test_residuals_are_part_of_what_a_card_has_for_kv(plan_on):
    """Also of what is refused: a budget of residuals alone holds no block."""
    settings = {"device": "cuda", "kv_cache_dtype": "kivi2", "max_num_seqs": 64, "max_model_len": 1024}
    blueprint = plan_on(H100, kv_cache_memory_bytes=2**24, **settings)
    capacity, geometry = blueprint.capacity, blueprint.geometry
    assert (capacity.num_residuals, capacity.residual_bytes) == (64, 64 * geometry.residual_bytes)
    left = 2**24 - capacity.residual_bytes
    assert capacity.num_blocks == left // geometry.bytes_per_block > 100
    with pytest.raises(BudgetTooSmallError, match="for unsealed blocks of max_num_seqs = 64"):
        plan_on(H100, kv_cache_memory_bytes=capacity.residual_bytes + 10 * geometry.bytes_per_block, **settings)


def test_the_hosts_blocks_are_no_part_of_the_card(plan_on):
    with_host = plan_on(H100, device="cuda", kv_offloading_size=2**-4).capacity
    without = plan_on(H100, device="cuda").capacity
    assert with_host.num_blocks == without.num_blocks
    assert with_host.host_bytes == 2**26


def test_a_budget_that_is_asked_for_is_planned(plan_on):
    assert plan_on(H100, device="cuda", kv_cache_memory_bytes=GIB).capacity.kv_budget_bytes == GIB
    with pytest.raises(DoesNotFitError, match="too few"):
        plan_on(H100, device="cuda", kv_cache_memory_bytes=79 * GIB)


def test_a_card_that_is_taken_is_refused(plan_on):
    with pytest.raises(DoesNotFitError, match=r"only 10\.00 GiB are free.*gpu_memory_utilization from"):
        plan_on(replace(H100, free_bytes=10 * GIB), device="cuda")
    with pytest.raises(BudgetTooSmallError):
        plan_on(replace(H100, total_bytes=GIB // 2, free_bytes=GIB // 2), device="cuda")


def test_memory_that_runs_out_in_a_step_is_told_with_a_remedy():
    class Greedy:
        def logits(self, inputs):
            raise torch.OutOfMemoryError

    geometry = KVGeometry(1, 1, 8, 4, 4)
    runner = TorchRunner(Greedy(), geometry, Slab.allocate(geometry, 2, torch.float32))
    with pytest.raises(CardMemoryError, match=r"too little memory left for a step of 1 tokens.*Start with a smaller"):
        runner.warm_up()


def test_a_slab_of_a_card_has_its_keys_in_rows():
    data = torch.arange(2 * 1 * 2 * 4 * 8).view(2, 1, 2, 32)
    slab = Slab(data, 8, ROWS_LAYOUT)
    assert slab.keys[1, 0, 2, 3] == data[1, 0, 0, 2 * 8 + 3]
    assert slab.values[1, 0, 2, 3] == data[1, 0, 1, 2 * 8 + 3]
