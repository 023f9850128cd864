"""The watched model: transformers' own where all is seen, and a dense twin under any mask, in float64."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import torch
from dense_twin import ExplicitMask, dense_logits
from equivalence.tiny_models import VOCAB_SIZE, save_tiny_model

from pagefold.errors import UnsupportedModelError
from pagefold.masks.mask import ScoredMask, keep_bits
from pagefold.masks.rule import CHUNK, sees
from pagefold.masks.scorer import Scorer
from pagefold.masks.watched_model import WatchedModel

if TYPE_CHECKING:
    from pathlib import Path

    from pagefold.masks.watched_model import Entering

_LENGTH = 3 * CHUNK + 40
_PLAIN = ("llama", "llama-mha", "llama-mqa", "qwen3", "qwen2", "gpt-neox", "mixtral")


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory):
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = save_tiny_model(family, tmp_path_factory.mktemp(family), seed=3)
        return made[family]

    return get


@pytest.fixture
def token_ids() -> list[int]:
    return random.choices(range(100, VOCAB_SIZE), k=_LENGTH)


class _Notes:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.hidden: dict[int, torch.Tensor] = {}
        self.sums: list[float] = []

    def enters(self, entering: Entering) -> None:
        self.hidden[entering.layer] = entering.hidden
        self.keys = entering.keys.shape

    def attends(self, layer: int, first: int, weights: torch.Tensor) -> None:
        assert weights.shape[-1] == first + weights.shape[2]
        self.sums.append(float((weights.sum(-1) - 1).abs().max()))


def _transformers_logits(folder: Path, token_ids: list[int], attention: str) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    experts = {"experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, attn_implementation=attention, **experts
    ).eval()
    with torch.inference_mode():
        return model(torch.tensor([token_ids]), use_cache=False).logits[0]


def _random_bits(num_layers: int, num_kv_heads: int) -> torch.Tensor:
    """Return bits of which each query has at least its own."""
    bits = torch.rand(num_layers, num_kv_heads, _LENGTH, _LENGTH) < 0.3
    return bits | torch.eye(_LENGTH, dtype=torch.bool)


def _by_rule(kept: torch.Tensor) -> torch.Tensor:
    """Return the bits that the rule makes of ``kept`` ``[L, Hkv, T]``, pair by pair."""
    tables = [
        torch.tensor([[sees(position, key, is_kept=is_kept) for key in range(_LENGTH)] for position in range(_LENGTH)])
        for is_kept in (False, True)
    ]
    return torch.where(kept[:, :, None], tables[1], tables[0])


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("family", [*_PLAIN, "gemma3", "llama4", "cohere2"])
def test_it_is_transformers_where_all_is_seen(family: str, folder_of, token_ids: list[int]) -> None:
    found = WatchedModel(folder_of(family), torch.float64).read(token_ids)
    twin = _transformers_logits(folder_of(family), token_ids, "sdpa")  # eager rounds softmax to float32
    assert float((found - twin).abs().max()) < 1e-12 * max(1.0, float(twin.abs().max()))


@pytest.mark.parametrize("family", ["llama", "gemma2-window"])
def test_it_is_near_eager_attention_whose_softmax_is_float32(family: str, folder_of, token_ids: list[int]) -> None:
    found = WatchedModel(folder_of(family), torch.float64).read(token_ids)
    assert float((found - _transformers_logits(folder_of(family), token_ids, "eager")).abs().max()) < 1e-4


@pytest.mark.parametrize("family", ["llama", "llama-mha", "llama-mqa", "qwen3"])
def test_it_is_the_dense_twin_under_any_mask(family: str, folder_of, token_ids: list[int]) -> None:
    model = WatchedModel(folder_of(family), torch.float64)
    bits = _random_bits(model.spec.num_layers, model.spec.num_kv_heads)
    found = model.read(token_ids, mask=ExplicitMask(bits))
    twin = dense_logits(folder_of(family), token_ids, bits)
    assert float((found - twin).abs().max()) < 1e-11
    assert float((found - model.read(token_ids)).abs().max()) > 1e-3, "the mask hid nothing"


def test_a_mask_of_all_is_no_mask(folder_of, token_ids: list[int]) -> None:
    model = WatchedModel(folder_of("llama"), torch.float64)
    everything = ExplicitMask(torch.ones(2, 1, _LENGTH, _LENGTH, dtype=torch.bool))
    assert torch.equal(model.read(token_ids, mask=everything), model.read(token_ids))


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("which", ["some", "everything", "nothing", "one head"])
def test_scores_choose_what_is_seen_while_layers_are_computed(which: str, folder_of, token_ids: list[int]) -> None:
    model = WatchedModel(folder_of("llama"), torch.float64)
    sizes = model.spec.num_layers, model.spec.num_kv_heads
    scorer = Scorer(torch.randn(*sizes, model.num_features), torch.zeros(sizes), torch.zeros(2))
    thresholds = torch.full(sizes, {"some": 0.0, "everything": -torch.inf}.get(which, torch.inf))
    if which == "one head":
        thresholds[1, 1] = -torch.inf
    mask, notes = ScoredMask(scorer, thresholds), _Notes()
    found = model.read(token_ids, mask=mask, watcher=notes)
    kept = torch.stack([mask.kept[layer] for layer in range(sizes[0])])
    for layer, hidden in notes.hidden.items():  # as it was under the mask
        assert torch.equal(kept[layer], keep_bits(scorer.scores(layer, hidden), thresholds[layer]))
    if which != "some":
        assert torch.equal(kept, (thresholds < 0)[..., None].expand_as(kept))
    twin = dense_logits(folder_of("llama"), token_ids, _by_rule(kept))
    assert float((found - twin).abs().max()) < 1e-11
    if which == "everything":
        assert torch.equal(found, model.read(token_ids))


def test_it_tells_what_enters_and_what_is_attended_to(folder_of, token_ids: list[int]) -> None:
    from transformers import AutoModelForCausalLM

    model, notes = WatchedModel(folder_of("llama"), torch.float64), _Notes()
    model.read(token_ids, watcher=notes)
    assert max(notes.sums) < 1e-12
    assert notes.keys == (2, _LENGTH, 16)
    twin = AutoModelForCausalLM.from_pretrained(
        folder_of("llama"), dtype=torch.float64, attn_implementation="sdpa"
    ).eval()
    with torch.inference_mode():
        states = twin.model(torch.tensor([token_ids]), output_hidden_states=True, use_cache=False).hidden_states
        for layer, own in enumerate(twin.model.layers):
            normed = own.input_layernorm(states[layer])[0]
            torch.testing.assert_close(notes.hidden[layer], normed, atol=1e-11, rtol=0)


def test_reading_on_is_reading_at_once(folder_of, token_ids: list[int]) -> None:
    model, whole, rest = WatchedModel(folder_of("qwen3"), torch.float64), _Notes(), _Notes()
    model.read(token_ids, watcher=whole)
    past = model.read_on(token_ids[:300], None)
    past = model.read_on(token_ids[300:], past, watcher=rest)
    assert past.num_tokens == _LENGTH
    for layer, hidden in rest.hidden.items():
        torch.testing.assert_close(hidden, whole.hidden[layer][300:], atol=1e-10, rtol=0)


@pytest.mark.parametrize("family", ["gemma3n", "gpt-oss", "mistral-window"])
def test_what_is_not_plain_is_refused(family: str, folder_of, token_ids: list[int]) -> None:
    with pytest.raises(UnsupportedModelError, match="Masks are for decoders"):
        WatchedModel(folder_of(family)).read(token_ids)
