"""A runner on a card, built without one: in what order memory is taken and given back."""

from __future__ import annotations

import gc
from dataclasses import replace
from weakref import ref

import pytest
import torch
from equivalence.tiny_models import FAMILIES, save_tiny_model

from pagefold.config import EngineConfig
from pagefold.engine import on_card
from pagefold.engine.blocks import allocate_blocks
from pagefold.engine.calibration import bound_constants
from pagefold.engine.planning import plan_engine
from pagefold.errors import ConfigError
from pagefold.kv import KEEP_ALL, KeepRule
from pagefold.memory.card import CardUse
from pagefold.runner.card import Card
from pagefold.runner.codec_slab import CODEC_ROWS_LAYOUT, CodecSlab
from pagefold.runner.codecs.constants import CodecConstants, num_ranges_of
from pagefold.runner.loader import load_model
from pagefold.runner.sealed_slab import SEALED_ROWS_LAYOUT, SealedSlab
from pagefold.runner.slab import ROWS_LAYOUT
from pagefold.runner.torch_runner import TorchRunner

CARD = Card("NVIDIA H100", (9, 0), 132, 80 * 2**30, 79 * 2**30)


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "kivi2"])
def test_blocks_of_the_measured_step_are_gone_before_all_others_come(kv_cache_dtype, tmp_path, monkeypatch):
    """On a card they might not fit beside each other. What kernels know of a slab keeps none alive."""
    pytest.importorskip("triton")
    folder = save_tiny_model("llama", tmp_path)
    monkeypatch.setattr("pagefold.runner.card.find_card", lambda: CARD)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(TorchRunner, "warm_up", lambda _: None)
    slabs, nums_of_residuals = [], []

    def measure(runner, card, **_):
        runner.decoder.kernels.blocks(runner.slab)  # as a step has them
        slabs.append(ref(runner.slab.data))
        return CardUse(0, 0, 0)

    def allocate(blueprint, num_blocks, num_residuals):
        assert not any(slab() is not None for slab in slabs)
        nums_of_residuals.append(num_residuals)
        slab = allocate_blocks(blueprint, num_blocks, num_residuals)
        slab.layout = {"auto": ROWS_LAYOUT, "int8": CODEC_ROWS_LAYOUT, "kivi2": SEALED_ROWS_LAYOUT}[kv_cache_dtype]
        return slab

    monkeypatch.setattr(on_card, "allocate_blocks", allocate)
    monkeypatch.setattr("pagefold.runner.card_profile.measure_use", measure)
    config = EngineConfig(
        model=str(folder), device="cuda", kv_cache_dtype=kv_cache_dtype, kv_cache_memory_bytes=2**20, enforce_eager=True
    )
    blueprint = replace(plan_engine(config), device="cpu")
    gc.disable()
    try:
        on_card.build_runner(blueprint, load_model(folder, torch.float32), str)
    finally:
        gc.enable()
    assert slabs
    assert nums_of_residuals == ([1, config.max_num_seqs] if kv_cache_dtype == "kivi2" else [0, 0])


@pytest.mark.parametrize("family", FAMILIES)
def test_any_family_is_planned(family, tmp_path, monkeypatch):
    """Configs say their sizes in several ways."""
    monkeypatch.setattr("pagefold.runner.card.find_card", lambda: CARD)
    blueprint = plan_engine(EngineConfig(model=str(save_tiny_model(family, tmp_path)), device="cuda"))
    assert 2**16 < on_card.bound_use_of(blueprint).num_bytes < 2**31


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "kivi2"])
def test_a_cards_sequences_go_beyond_a_models_windows(kv_cache_dtype, tmp_path, monkeypatch):
    """What it holds of a window is what it keeps, and what a step writes beside it."""
    monkeypatch.setattr("pagefold.runner.card.find_card", lambda: CARD)
    folder = str(save_tiny_model("gemma3", tmp_path))
    how = {"model": folder, "device": "cuda", "kv_cache_dtype": kv_cache_dtype, "max_num_batched_tokens": 128}
    blueprint = plan_engine(EngineConfig(max_model_len=4000, **how))
    assert [group.keeps for group in blueprint.geometry.groups] == [KeepRule(24), KEEP_ALL]
    assert blueprint.capacity.num_blocks_per_request == 250 + blueprint.geometry.groups[0].num_blocks_for(4000, 128)
    windowless = plan_engine(EngineConfig(max_model_len=24, **how))
    assert len(windowless.geometry.groups) == 1, "nothing passes a window"


def test_a_window_beside_what_streams_ends_a_cards_sequences_and_beside_a_host_tier_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr("pagefold.runner.card.find_card", lambda: CARD)
    config = EngineConfig(model=str(save_tiny_model("mistral-window", tmp_path)), device="cuda", max_model_len=25)
    assert plan_engine(config).capacity.max_model_len == 25
    assert plan_engine(replace(config, kv_offloading_size=0.1)).capacity.max_model_len == 25
    with pytest.raises(ConfigError):
        plan_engine(replace(config, kv_offloading_size=0.1, allow_streaming=True))


def test_tables_of_all_cache_groups_are_part_of_the_plan(tmp_path, monkeypatch):
    """Four bytes a block and request, in tables of a multiple of 16 blocks; twice where graphs have their own."""
    monkeypatch.setattr("pagefold.runner.card.find_card", lambda: CARD)
    how = {"model": str(save_tiny_model("gemma3", tmp_path)), "device": "cuda", "max_num_seqs": 100}
    budgets = {
        (length, is_eager): on_card.capacity_on_card(
            plan_engine(EngineConfig(max_model_len=length, enforce_eager=is_eager, **how)), CardUse(0, 0, 0)
        ).kv_budget_bytes
        for length in (24, 4096)
        for is_eager in (False, True)
    }
    assert 72 * 2**30 - budgets[4096, True] == pytest.approx(100 * 4 * (256 + 16), abs=2**14)
    assert 72 * 2**30 - budgets[4096, False] == pytest.approx(2 * 100 * 4 * (256 + 16), abs=2**14)
    assert 72 * 2**30 - budgets[24, False] == pytest.approx(2 * 100 * 4 * 16, abs=2**14)


def test_the_largest_step_fits_into_the_blocks_that_it_is_measured_with(tmp_path, monkeypatch):
    """Also where all layers have a window that is shorter than the step."""

    class Decoder:
        kernels = None

        def logits(self, inputs):
            return torch.zeros(len(inputs.logit_rows), 307)

        def states(self):
            return torch.zeros(1, 1)

    class MeasuredError(Exception):
        pass

    def measure(runner, card, *, num_tokens, num_seqs):
        TorchRunner(Decoder(), runner.geometry, runner.slab).run_largest(num_tokens, num_seqs)
        raise MeasuredError

    monkeypatch.setattr("pagefold.runner.card.find_card", lambda: CARD)
    monkeypatch.setattr("pagefold.runner.card_profile.measure_use", measure)
    config = EngineConfig(
        model=str(save_tiny_model("mistral-window", tmp_path)), device="cuda", attention_backend="reference"
    )
    blueprint = plan_engine(config)
    assert blueprint.geometry.groups[0].keeps == KeepRule(24)
    with pytest.raises(MeasuredError):
        on_card.build_runner(replace(blueprint, device="cpu"), load_model(blueprint.spec.folder, torch.float32), str)


def test_sealed_blocks_are_told_the_first_entrys_centre_and_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr("pagefold.runner.card.find_card", lambda: CARD)
    folder = str(save_tiny_model("llama", tmp_path))
    blueprint = plan_engine(EngineConfig(model=folder, device="cuda", kv_cache_dtype="kivi2"))
    num_cells, head_dim = blueprint.geometry.groups[0].num_cells, blueprint.geometry.head_dim
    unknown = CodecConstants.unknown(num_cells, head_dim, 3)
    constants = unknown._replace(key_centres=torch.randn_like(unknown.key_centres))
    slab = allocate_blocks(replace(blueprint, device="cpu", constants=constants), 4, 2)
    assert torch.equal(slab.centres, constants.key_centres[:, :2])
    assert slab.residuals.shape[:2] == (num_cells, 2)


@pytest.mark.parametrize("name", ["int4", "kivi2"])
def test_what_codecs_know_of_a_model_is_part_of_the_plan(name, tmp_path, monkeypatch):
    pytest.importorskip("triton")
    from pagefold.runner.attention.cuda.blocks import CardBlocks

    monkeypatch.setattr("pagefold.runner.card.find_card", lambda: CARD)
    folder = str(save_tiny_model("llama", tmp_path))
    exact, coded = (
        plan_engine(EngineConfig(model=folder, device="cuda", dtype="float32", kv_cache_dtype=dtype))
        for dtype in ("auto", name)
    )
    geometry, spec = coded.geometry, coded.spec
    shape = geometry.num_layers * geometry.num_kv_heads, geometry.head_dim, num_ranges_of(spec.max_exact_len)
    data = torch.empty(1, geometry.bytes_per_block, dtype=torch.uint8)
    if name == "kivi2":
        residuals = torch.empty(shape[0], 1, 2, geometry.block_size * geometry.head_dim, dtype=torch.float16)
        slab = SealedSlab(data, residuals, geometry, layout=SEALED_ROWS_LAYOUT)
    else:
        slab = CodecSlab(data, geometry, CodecConstants.unknown(*shape), CODEC_ROWS_LAYOUT)
    blocks = CardBlocks.of(slab)
    parts = [part for name in CardBlocks.__slots__ if isinstance(part := getattr(blocks, name), torch.Tensor)]
    of_slab = {blocks.data.data_ptr(), blocks.residuals.data_ptr(), blocks.places.data_ptr()}
    taken = sum({part.data_ptr(): part.nbytes for part in parts if part.data_ptr() not in of_slab}.values())
    assert bound_constants(coded) == taken
    assert on_card.bound_use_of(coded).num_bytes == on_card.bound_use_of(exact).num_bytes + taken
