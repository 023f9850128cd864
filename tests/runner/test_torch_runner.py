"""TorchRunner: ragged steps say what plain transformers says; a model that attends in another way is found out.

The larger equality runs are in ``tests/equivalence``; here, one batch is written out by hand.
"""

from __future__ import annotations

import json
import shutil
from array import array
from typing import TYPE_CHECKING

import pytest
import torch
from model_folders import SIZES, save_model

from pagefold.errors import UnsupportedModelError
from pagefold.kv import BlockId, BlockTable, CopyOp, KVGeometry
from pagefold.runner.attention import reference_attention
from pagefold.runner.loader import load_model
from pagefold.runner.models import inspect_model
from pagefold.runner.sampler import sample
from pagefold.runner.slab import Slab
from pagefold.runner.torch_runner import TorchRunner
from pagefold.runner.transformers_decoder import TransformersDecoder
from pagefold.sampling import SamplingParams
from pagefold.steps import PromptPart, StepPlan

if TYPE_CHECKING:
    from pathlib import Path

BLOCK_SIZE = 4
PROMPTS = [[5, 9, 11, 23, 40, 3], [17, 8, 61, 33, 2, 7, 12, 50, 44], [30]]


def make_runner(folder: Path, num_layers: int = 2, num_kv_heads: int = 2, max_model_len: int = 64) -> TorchRunner:
    geometry = KVGeometry(num_layers, num_kv_heads, 8, 8, BLOCK_SIZE)
    slab = Slab.allocate(geometry, 16, torch.float64)
    slab.data.fill_(float("nan"))  # whoever reads what nobody wrote is found out
    model = load_model(folder, torch.float64)
    decoder = TransformersDecoder(model, slab, reference_attention, max_model_len=max_model_len)
    return TorchRunner(decoder, geometry, slab)


def make_plan(*rows: tuple[list[int], int, list[int], bool]) -> StepPlan:
    """Make a greedy plan of rows: (tokens, start, blocks, whether it samples)."""
    plan = StepPlan(0)
    for row, (tokens, start, block_ids, samples) in enumerate(rows):
        plan.token_ids.extend(tokens)
        plan.starts.append(start)
        plan.num_tokens.append(len(tokens))
        plan.tables.append([BlockTable(map(BlockId, block_ids))])
        if samples:
            plan.sampling_rows.append(row)
            plan.sampling.append(SamplingParams(temperature=0.0))
            plan.seeds.append(0)
            plan.draws.append(0)
    return plan


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Tiny tensors gain nothing from a second thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("llama"), "LlamaConfig", SIZES)


@pytest.fixture(scope="module")
def plain(folder: Path):
    """Return plain transformers' logits of the token after ``token_ids``: no cache, one sequence, torch's attention."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa")

    def logits_after(token_ids: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            return model(torch.tensor([token_ids]), use_cache=False).logits[0, -1]

    return logits_after


def test_prefills_chunks_and_decodes_in_one_batch_say_what_plain_transformers_says(folder, plain):
    """Three steps: a prompt and half of another; its rest, a decode and a new prompt; three decodes."""
    a, b, c = (list(prompt) for prompt in PROMPTS)
    runner = make_runner(folder)
    blocks_a, blocks_b, blocks_c = [11, 2], [0, 7, 5], [15]

    (token,) = runner.run(make_plan((b[:5], 0, blocks_b, False), (a, 0, blocks_a, True))).token_ids
    assert token == plain(a).argmax()
    a.append(token)

    plan = make_plan((a[-1:], len(a) - 1, blocks_a, True), (c, 0, blocks_c, True), (b[5:], 5, blocks_b, True))
    tokens = runner.run(plan).token_ids
    assert tokens == [plain(each).argmax() for each in (a, c, b)]
    for each, token in zip((a, c, b), tokens, strict=True):
        each.append(token)

    tables = ((b, blocks_b), (c, blocks_c), (a, blocks_a))
    logits = runner.logits(make_plan(*((each[-1:], len(each) - 1, table, True) for each, table in tables)))
    expected = torch.stack([plain(each) for each, _ in tables])
    assert (logits - expected).abs().max() < 1e-12
    assert expected.abs().max() > 1, "such logits would tell nothing"


def test_a_row_may_lean_on_what_an_earlier_row_of_the_step_writes(folder, plain):
    one, other = PROMPTS[1], [*PROMPTS[1][:4], 20, 21]
    runner = make_runner(folder)
    plan = make_plan((one, 0, [3, 4, 5], True), (other[4:], 4, [3, 6], True))
    assert runner.run(plan).token_ids == [plain(one).argmax(), plain(other).argmax()]


def test_copies_come_before_the_first_write(folder, plain):
    """The copied block's third slot is written by both, each in its own block, in the same step."""
    one, other = [9, 8, 7], [9, 8, 60]
    runner = make_runner(folder)
    runner.run(make_plan((one[:2], 0, [3], False)))
    plan = make_plan((one[2:], 2, [3], True), (other[2:], 2, [6], True))
    plan.copies = [CopyOp(BlockId(3), BlockId(6), 2)]
    logits = runner.logits(plan)
    assert (logits - torch.stack([plain(one), plain(other)])).abs().max() < 1e-12


def test_a_step_that_samples_nothing_returns_nothing(folder):
    assert make_runner(folder).run(make_plan((PROMPTS[1], 0, [0, 1, 2], False))).token_ids == []


@pytest.mark.parametrize("way", ["run", "launch"])
def test_rows_of_damaged_tokens_are_told_though_they_sample_nothing(folder, way):
    """A chunk, one that samples, one of another sequence, and a step in which nobody samples."""
    runner = make_runner(folder)
    runner.decoder.model.model.embed_tokens.weight.data[5] = torch.inf

    def result(*rows):
        plan = make_plan(*rows)
        return runner.run(plan) if way == "run" else runner.launch(plan)()

    found = result(([9, 5, 7], 0, [0], False), ([30], 0, [1], True), ([8, 7], 0, [2], False), ([5], 0, [3], True))
    assert found.corrupted == [0, 3]
    assert found.token_ids[0] == result(([30], 0, [1], True)).token_ids[0]
    assert result(([9, 8, 7], 0, [4], False), ([9, 5], 0, [5], False)).corrupted == [1]
    assert result(([9, 8, 7], 0, [4], False), ([9, 6], 0, [5], False)).corrupted == []


def test_rows_sample_as_their_params_and_seeds_say(folder, plain):
    plan = make_plan((PROMPTS[0], 0, [0, 1], True), (PROMPTS[2], 0, [2], True))
    free = SamplingParams(temperature=2.0)
    plan.sampling, plan.seeds = [free, SamplingParams(temperature=2.0, top_k=1)], [1, 2]
    runner, drawn = make_runner(folder), []
    for index in range(12):
        plan.draws = [index, index]
        first, second = runner.run(plan).token_ids
        assert second == plain(PROMPTS[2]).argmax()
        drawn.append(first)
    assert drawn == [sample(plain(PROMPTS[0])[None], [free], [1], [index])[0] for index in range(12)]
    assert len(set(drawn)) > 3


def test_warming_up_writes_block_0_only(folder):
    runner = make_runner(folder)
    runner.warm_up()
    assert not runner.slab.keys[0, :, 0].isnan().any()
    assert runner.slab.data[1:].isnan().all()


# Models that attend in another way than the inspection could see: found out by the first step.


def test_layers_that_do_not_attend_are_found_out(folder):
    with pytest.raises(UnsupportedModelError, match=r"attended in layers \[0, 1\], not once in each of 3") as refused:
        make_runner(folder, num_layers=3).warm_up()
    assert refused.value.remedy


def test_kv_heads_that_are_not_the_configs_are_found_out(folder):
    with pytest.raises(UnsupportedModelError, match="LlamaAttention has 2 KV heads of 8, where the config says 1 of 8"):
        make_runner(folder, num_kv_heads=1).warm_up()


BIGCODE = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "vocab_size": 64}
ODD = {
    "sliding window": (
        "MistralConfig",
        SIZES | {"sliding_window": 63},
        "asks for sliding_window=63, where the cache keeps all of up to 64 tokens",
    ),
    "windows in some layers": (
        "Gemma2Config",
        SIZES | {"sliding_window": 63},
        "Gemma2Attention asks for sliding_window=63",
    ),
    "an encoder": ("BertConfig", SIZES, "BertSelfAttention looks at later tokens too"),
    "its own mask": ("DogeConfig", SIZES, "DogeAttention brings a mask"),
    "two attentions a layer": ("DiffLlamaConfig", SIZES, "attended in layers"),
    "another number of KV heads": ("GPTBigCodeConfig", BIGCODE, "GPTBigCodeAttention has 1 KV heads"),
}


@pytest.mark.parametrize("kind", ODD)
def test_an_attention_that_ours_is_not_is_refused_by_name(tmp_path, kind):
    config, settings, message = ODD[kind]
    runner = make_runner(save_model(tmp_path, config, settings), num_kv_heads=4 if config == "BertConfig" else 2)
    with pytest.raises(UnsupportedModelError, match=message) as refused:
        runner.warm_up()
    assert refused.value.remedy


def test_a_bert_that_is_a_decoder_is_taken(tmp_path):
    folder = save_model(tmp_path, "BertConfig", SIZES | {"is_decoder": True})
    make_runner(folder, num_kv_heads=4).warm_up()


def test_a_model_called_without_its_step_is_refused(folder):
    with pytest.raises(UnsupportedModelError, match="LlamaAttention does not get the arguments"):
        load_model(folder, torch.float64)(torch.tensor([[1, 2, 3]]), use_cache=False)


@pytest.mark.parametrize(
    ("field", "says"),
    [
        ({"num_hidden_layers": 3}, "lacks 9 of the tensors that its config asks for, such as model.layers.2"),
        ({"intermediate_size": 56}, "cannot load the weights"),
        ({"vocab_size": 80}, "cannot load the weights"),
    ],
    ids=str,
)
def test_weights_that_are_not_the_configs_are_refused(folder, tmp_path, field, says):
    """transformers would make up what lacks: a model that answers at random."""
    other = shutil.copytree(folder, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | field))
    with pytest.raises(UnsupportedModelError, match=says) as refused:
        load_model(other, torch.float64)
    assert refused.value.remedy


def test_an_inspected_folder_has_the_geometry_that_runs(folder):
    spec = inspect_model(folder)
    make_runner(folder, spec.num_layers, spec.num_kv_heads).warm_up()


def test_a_row_that_is_sampled_several_times_brings_its_logits_to_each(folder, plain):
    """And those of prompt parts stay where they are, behind them."""
    a, b, c = PROMPTS
    runner = make_runner(folder)
    plan = make_plan((a, 0, [11, 2], True), (b, 0, [0, 7, 5], True), (c, 0, [15], True))
    plan.sampling_rows = [0, 1, 1, 1, 2]
    plan.sampling = [SamplingParams(logprobs=0)] * 5
    plan.seeds, plan.draws, plan.logprob_rows, plan.logprob_tops = [3, 4, 5, 6, 7], [0] * 5, [0, 1, 2, 3, 4], [0] * 5
    plan.prompt_parts = [PromptPart(1, 2, array("i", b[3:5]), 0)]
    expected = torch.stack([plain(prompt) for prompt in (a, b, b, b, c)])
    torch.testing.assert_close(runner.logits(plan), expected, rtol=1e-9, atol=1e-9)
    result = runner.run(plan)
    assert result.token_ids == sample(expected, plan.sampling, plan.seeds, plan.draws)
    for token_id, told, logits in zip(result.token_ids, result.logprobs, expected, strict=True):
        assert told.logprob == pytest.approx(float(logits.log_softmax(-1)[token_id]))
    of_prompt = [float(plain(b[:length]).log_softmax(-1)[b[length]]) for length in (3, 4)]
    assert [told.logprob for told in result.prompt_logprobs[0]] == pytest.approx(of_prompt)
