"""Packed layers and experts: what they compute, row by row, and what is left of the float weights."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from equivalence.tiny_models import save_tiny_model

from pagefold.errors import UnsupportedModelError
from pagefold.kernels.floats import Floats, Int8Weights
from pagefold.kernels.formats import multiply, pack
from pagefold.kernels.pairs import bfloat16_pairs
from pagefold.kernels.quads import int8_quads
from pagefold.runner.fused.pieces import TOKENS_A_TILE
from pagefold.runner.loader import load_model
from pagefold.runner.packed.embedding import PackedEmbedding
from pagefold.runner.packed.experts import register_experts
from pagefold.runner.packed.layers import find_packable, pack_layers
from pagefold.runner.packed.linear import PackedLinear
from pagefold.runner.packed.outline import outline_of
from pagefold.runner.packed.team import Groups, ProductTeam

FORMATS = [Floats(), bfloat16_pairs(), Int8Weights(), int8_quads()]
BY_NAME = {"argvalues": FORMATS, "ids": [form.name for form in FORMATS]}


def numbers(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def only(form):
    """All matrices in one format."""
    return lambda _name: form


def alone(form, x, panels):
    """Each row by itself, from Python."""
    return torch.from_numpy(np.concatenate([multiply(form, row[None].numpy(), panels) for row in x]))


@pytest.mark.parametrize("form", **BY_NAME)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_product_is_that_of_each_row_alone(form, threads):
    """To the bit: of one row, of some, and of more than a tile has."""
    team, panels = ProductTeam(form, threads), pack(form, numbers(1, 75, 100).numpy())
    x = numbers(2, TOKENS_A_TILE + 3, 100)
    expected = alone(form, x, panels)
    for num in (1, 5, len(x)):
        assert torch.equal(team.multiply(x[:num], panels[None]), expected[:num])
    assert team.multiply(x[:0], panels[None]).shape == (0, expected.shape[1])


@pytest.mark.parametrize("form", **BY_NAME)
def test_rows_of_groups_meet_the_matrix_of_their_group(form):
    """Groups of no row, of one, of some, and of more than a tile has; two groups may have the same row."""
    counts = np.array([0, 1, 4, 0, TOKENS_A_TILE + 2, 3, 0])
    panels = np.stack([pack(form, numbers(at, 40, 96).numpy()) for at in range(len(counts))])
    x = numbers(9, 50, 96)
    sources = np.random.default_rng(3).integers(0, len(x), counts.sum())
    expected = torch.cat([
        alone(form, x[sources[end - num : end]], panels[at])
        for at, (num, end) in enumerate(zip(counts, np.cumsum(counts), strict=True))
        if num
    ])  # fmt: skip
    groups, team = Groups(sources, counts), ProductTeam(form, 2)
    assert torch.equal(team.multiply(x, panels, groups), expected)
    assert torch.equal(team.multiply(x[sources], panels, groups.in_order()), expected)


def test_weighted_sums_are_chains_in_their_order():
    y, weights = numbers(1, 6, 20), numbers(2, 2, 3)
    places = np.array([[5, 0, 3], [1, 2, 4]])
    out = ProductTeam(Floats(), 1).add_weighted(y, places, weights, 17)
    for t in range(2):
        expected = y[places[t, 0], :17] * weights[t, 0]
        for at in (1, 2):
            expected = expected + y[places[t, at], :17] * weights[t, at]
        assert torch.equal(out[t], expected)


def packed_layer(linear, form):
    model = torch.nn.Sequential(linear)
    pack_layers(model, linear.weight.dtype, only(form), 2)
    return model[0]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("dtype", "form"), [(torch.float32, Floats()), (torch.bfloat16, bfloat16_pairs())], ids=str)
@torch.inference_mode()
def test_a_layer_is_torch_s_but_for_rounding(dtype, form, has_bias):
    linear = torch.nn.Linear(100, 75, bias=has_bias).to(dtype)
    x = numbers(1, 2, 3, 100).to(dtype)
    bias = linear.bias.double() if has_bias else None
    exact = torch.nn.functional.linear(x.double(), linear.weight.double(), bias)
    layer = packed_layer(linear, form)
    y = layer(x)
    assert (y.dtype, y.shape) == (dtype, (2, 3, 75))
    rounding = torch.finfo(dtype).eps
    assert (y.double() - exact).abs().max() < (4 if dtype == torch.bfloat16 else 40) * rounding
    assert torch.equal(layer(x[1, 2]), y[1, 2])
    assert torch.equal(layer(x.transpose(0, 1)), y.transpose(0, 1))
    assert layer(x[:0]).shape == (0, 3, 75)


def test_model_code_finds_what_it_reads_of_a_layer():
    linear = torch.nn.Linear(64, 32).bfloat16()
    layer = packed_layer(linear, bfloat16_pairs())
    assert isinstance(layer, PackedLinear)
    weight = layer.weight
    assert (weight.dtype, weight.device, weight.shape) == (torch.bfloat16, torch.device("cpu"), (32, 64))
    assert (layer.in_features, layer.out_features, layer.bias) == (64, 32, linear.bias)
    assert [name for name, _ in layer.named_parameters()] == ["bias"]
    assert "64 -> 32, bfloat16" in repr(layer)
    assert "layer='0'" in repr(weight)
    for compute in (weight.float, lambda: torch.nn.functional.linear(torch.ones(1, 64).bfloat16(), weight)):
        with pytest.raises(UnsupportedModelError, match=r"reads the weights of 0 itself .* packed for products"):
            compute()


class _Odd(torch.nn.Linear):
    pass


class _Model(torch.nn.Module):
    """Layers that are packed, one of them twice, and others that are not."""

    def __init__(self):
        super().__init__()
        self.plain = torch.nn.Linear(8, 40)
        self.again = self.plain
        self.odd = _Odd(8, 8)
        self.gate = torch.nn.Linear(8, 4)
        self.wide = torch.nn.Linear(8, 8).double()
        self.hooked = torch.nn.Linear(8, 8)
        self.hooked.register_forward_hook(lambda *_: None)
        self.embed = torch.nn.Embedding(40, 8)
        self.embed.weight = self.plain.weight
        self.conv = torch.nn.Conv1d(8, 8, 3)


def test_what_is_no_plain_layer_of_the_model_s_dtype_is_left_alone():
    model = _Model()
    found = find_packable(model, torch.float32)
    assert list(found.linears) == ["plain"]
    assert found.embeddings == {"embed": "plain"}
    assert found.others == ["odd.weight", "wide.weight", "hooked.weight", "conv.weight"]
    ids = torch.tensor([[0, 39], [7, 7]])
    before = model.embed(ids).detach()
    pack_layers(model, torch.float32, only(Floats()), 1)
    assert isinstance(model.plain, PackedLinear)
    assert model.again is model.plain
    assert [type(one) for one in (model.odd, model.gate, model.wide, model.hooked)] == [_Odd] + 3 * [torch.nn.Linear]
    assert isinstance(model.embed, PackedEmbedding)
    assert torch.equal(model.embed(ids), before)
    with pytest.raises(IndexError, match="between 0 and 39"):
        model.embed(torch.tensor([40]))


@pytest.mark.parametrize("form", **BY_NAME)
def test_bytes_are_told_before_and_are_those_that_lie_there(form, tmp_path):
    """Of a model with experts, and of one whose head and embedding are tied; no float matrix outlives its packing."""
    dtype = torch.bfloat16 if form.name == "bfloat16" else torch.float32
    folder = save_tiny_model("qwen3-moe", tmp_path)
    model = load_model(folder, dtype, experts=register_experts())
    told = outline_of(folder, form.name, dtype).num_bytes(only(form))
    held = [weakref.ref(one) for name, one in model.named_parameters() if "proj" in name or "lm_head" in name]
    assert len(held) == 4 * 2 + 3 + 2 + 1
    pack_layers(model, dtype, only(form), 1)
    gc.collect()
    assert not any(one() is not None for one in held)
    panels = [module.panels for module in model.modules() if isinstance(module, PackedLinear)]
    panels += [one for layer in model.model.layers[1:] for one in layer.mlp.experts._pagefold_packed.panels]
    assert sum(one.nbytes for one in panels) + sum(one.nbytes for one in model.parameters()) == told


def test_a_tied_matrix_lies_once(tmp_path):
    from transformers import AutoModelForCausalLM, LlamaConfig

    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 32, "intermediate_size": 32}
    config = LlamaConfig(**sizes, vocab_size=96, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model, plain = load_model(tmp_path, torch.float32), load_model(tmp_path, torch.float32, attention="eager")
    told = outline_of(tmp_path, "", torch.float32).num_bytes(only(Floats()))
    assert told == 4 * sum(one.numel() for one in plain.parameters())
    pack_layers(model, torch.float32, only(Floats()), 1)
    assert isinstance(model.model.embed_tokens, PackedEmbedding)
    ids = torch.tensor([[5, 95]])
    assert torch.equal(model.model.embed_tokens(ids), plain.model.embed_tokens(ids))
    assert model.get_input_embeddings().weight.dtype == torch.float32


def config_of(family):
    """Families of experts, in small: some of each token's beside one for all, with norms of all heads at once."""
    from transformers import OlmoeConfig, Qwen2MoeConfig

    sizes = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    experts = {"num_experts": 6, "num_experts_per_tok": 3}
    if family == "olmoe":
        return OlmoeConfig(**sizes, **experts, num_key_value_heads=2, intermediate_size=48)
    inner = {"moe_intermediate_size": 40, "shared_expert_intermediate_size": 56, "intermediate_size": 64}
    return Qwen2MoeConfig(**sizes, **experts, **inner, num_key_value_heads=2)


@pytest.fixture(scope="module")
def expert_folder(tmp_path_factory):
    """A folder of a tiny model of a family with experts."""

    def make(family):
        from transformers import AutoModelForCausalLM

        folder = tmp_path_factory.mktemp(family)
        if family in {"mixtral", "qwen3-moe", "gpt-oss"}:
            return save_tiny_model(family, folder)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config_of(family), dtype=torch.float64)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(0.0, parameter.shape[-1] ** -0.5)
        model.save_pretrained(folder)
        return folder

    return make


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", "gpt-oss", "qwen2-moe", "olmoe"])
@torch.inference_mode()
def test_experts_are_transformers_own_but_for_rounding(family, expert_folder):
    """Against transformers' loop over experts in float64; and a token's are the same to the bit in any company."""
    folder = expert_folder(family)
    exact = load_model(folder, torch.float64, attention="eager")
    model = load_model(folder, torch.float32, attention="eager", experts=register_experts())
    pack_layers(model, torch.float32, only(Floats()), 2)
    ids = torch.tensor([[at * at % 90 + 3 for at in range(40)]])
    logits, expected = (one(ids, use_cache=False).logits.double() for one in (model, exact))
    assert (logits - expected).abs().max() < 1e-4 * expected.std()
    experts = next(module for module in model.modules() if hasattr(module, "_pagefold_packed"))
    x = numbers(4, 30, 64)
    chosen = torch.stack([torch.randperm(experts.num_experts, generator=torch.Generator().manual_seed(at))[:2]
                          for at in range(30)])  # fmt: skip
    weights = numbers(5, 30, 2)
    together = experts(x, chosen, weights)
    for t in (0, 7, 29):
        assert torch.equal(experts(x[t : t + 1], chosen[t : t + 1], weights[t : t + 1]), together[t : t + 1])
    turned = torch.arange(29, -1, -1)
    assert torch.equal(experts(x[turned], chosen[turned], weights[turned]), together[turned])
