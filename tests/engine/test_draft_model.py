"""A draft model at the start: what fits beside it, what cannot be, and what requests may ask of it."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from pagefold import LLM, SamplingParams
from pagefold.config import EngineConfig
from pagefold.engine.planning import plan_engine
from pagefold.errors import BudgetTooSmallError, ConfigError, DoesNotFitError, InvalidRequestError
from pagefold.kv import KVGeometry
from pagefold.kv.audit import audit
from pagefold.memory.capacity import DraftShare
from pagefold.request import Caller
from pagefold.speculation import SpeculativeParams, StepCosts

sys.path.append(str(Path(__file__).parents[1] / "equivalence"))
from tiny_models import save_tiny_model

PROMPTS = [{"prompt_token_ids": [at, *range(5, 40)]} for at in range(6)]
SIZES = {"max_model_len": 128, "block_size": 8, "dtype": "float32"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    """Folders of a model, of one that drafts well for it (itself), and of one with other layers."""
    parent = tmp_path_factory.mktemp("drafts")
    families = {"llama": "llama", "qwen3": "qwen3", "windows": "mistral-window-40"}
    return {name: str(save_tiny_model(family, parent / name)) for name, family in families.items()}


def texts(llm: LLM, **how) -> list[list[int]]:
    found = llm.generate(PROMPTS, SamplingParams(max_tokens=20, ignore_eos=True, **how), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in found]


def make_free(llm: LLM) -> None:
    """Let drafts cost nothing: a tiny model's do not pay."""
    drafting = llm.engine.drafting
    drafting._costs = StepCosts((1, 2), (1.0, 1.0))
    drafting._drafter_for(drafting.default).costs = StepCosts((1, 2), (1e-9, 1e-9))


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("by", ["llama", "qwen3", "windows"])
@pytest.mark.parametrize("how", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 3}], ids=["greedy", "sampled"])
def test_outputs_are_those_without_and_of_the_same_model_all_drafts_are_right(folders, by, how):
    plain = texts(LLM(folders["llama"], **SIZES), **how)
    llm = LLM(folders["llama"], speculative_config={"model": folders[by]}, **SIZES)
    make_free(llm)
    steps = []
    run = llm.engine.runner.run
    llm.engine.runner.run = lambda plan: (steps.append(plan), run(plan))[1]
    assert texts(llm, **how) == plain
    assert any(plan.drafted for plan in steps)
    assert len(steps) < 12 or by != "llama"
    (kept,) = [size for size in llm.engine.cache_sizes() if size.name == "draft_model"]
    assert 0 < kept.num_bytes <= kept.max_bytes == llm.engine.capacity.draft_bytes
    llm.engine.idle()
    core = llm.engine.drafting._drafter_for(llm.engine.drafting.default).core
    audit(core)
    assert not core.caches, "who has ended holds nothing"
    llm.engine.reset_prefix_cache()
    assert core.pool.num_free == core.pool.num_blocks


def test_the_budget_is_for_both_and_each_holds_as_many_tokens(folders):
    budget = 400_000
    how = {"model": folders["llama"], "kv_cache_memory_bytes": budget, **SIZES}
    alone = plan_engine(EngineConfig(**how)).capacity
    plan = plan_engine(EngineConfig(speculative_config={"model": folders["llama"]}, **how))
    assert plan.draft is not None
    assert plan.capacity.kv_budget_bytes + plan.capacity.draft_bytes <= budget
    assert plan.capacity.num_blocks - plan.draft.capacity.num_blocks in {0, 1}
    assert plan.capacity.num_blocks + plan.draft.capacity.num_blocks == alone.num_blocks
    assert plan.draft.capacity.kv_budget_bytes == plan.capacity.draft_bytes
    asked = {"model": folders["llama"], "kv_cache_memory_bytes": 100_000}
    plan = plan_engine(EngineConfig(speculative_config=asked, **how))
    block_bytes = plan.geometry.bytes_per_block
    assert plan.capacity.draft_bytes == 100_000 // block_bytes * block_bytes
    assert plan.capacity.num_blocks == (budget - plan.capacity.draft_bytes) // block_bytes


def test_a_share_that_holds_no_request_is_refused(folders):
    how = {"model": folders["llama"], "kv_cache_memory_bytes": 10**6, **SIZES}
    given = {"model": folders["qwen3"], "kv_cache_memory_bytes": 5000}
    with pytest.raises(BudgetTooSmallError, match=r"is 5,000, which is \d blocks of the draft model") as error:
        plan_engine(EngineConfig(speculative_config=given, **how))
    smallest = int(error.value.remedy.split("works is ")[1].split(";")[0])
    for num_bytes, fits in ((smallest - 1, False), (smallest, True)):
        config = EngineConfig(speculative_config=given | {"kv_cache_memory_bytes": num_bytes}, **how)
        if fits:
            assert plan_engine(config).draft.capacity.max_concurrency == 1
            continue
        with pytest.raises(BudgetTooSmallError):
            plan_engine(config)
    with pytest.raises(BudgetTooSmallError) as error:
        plan_engine(EngineConfig(speculative_config=given | {"kv_cache_memory_bytes": 10**15}, **how))
    assert "A smaller speculative_config.kv_cache_memory_bytes" in error.value.remedy


def test_weights_that_do_not_fit_are_said_to_be_the_draft_models(folders, monkeypatch):
    monkeypatch.setattr("pagefold.engine.on_cpu.available_memory_bytes", lambda: 1_000_000)
    with pytest.raises(DoesNotFitError, match=r"The draft model's weights need .* KiB, and .* are free"):
        plan_engine(EngineConfig(model=folders["llama"], speculative_config={"model": folders["qwen3"]}, **SIZES))


def test_steps_that_have_no_room_for_drafts_need_no_draft_model(folders):
    config = EngineConfig(
        model=folders["llama"], speculative_config={"model": folders["qwen3"]}, max_num_seqs=1, max_num_batched_tokens=1
    )
    plan = plan_engine(config)
    assert plan.draft is None
    assert not plan.capacity.draft_bytes


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_tokens_that_only_the_model_knows_do_no_harm(tiny_chat_model, tmp_path, dtype):
    """Embeddings are padded, and not to the same number: with the same tokenizer one may take more ids."""
    from tiny_models import FAMILIES
    from transformers import AutoModelForCausalLM

    small = tmp_path / "small"
    shutil.copytree(tiny_chat_model, small)
    config = FAMILIES["llama"]()
    config.vocab_size = 49_152 - 100
    AutoModelForCausalLM.from_config(config).save_pretrained(small)
    how = {"max_model_len": 128, "dtype": dtype, "kv_cache_memory_bytes": 2**21}
    prompts = [{"prompt_token_ids": [5, 6, token_id, 7]} for token_id in (8, 49_151, 49_100)]

    def found(llm):
        how = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
        return [output.outputs[0].token_ids for output in llm.generate(prompts, how, use_tqdm=False)]

    plain = found(LLM(str(tiny_chat_model), **how))
    llm = LLM(str(tiny_chat_model), speculative_config={"model": str(small)}, **how)
    make_free(llm)
    assert found(llm) == plain


@pytest.mark.parametrize("asked", [None, 150_000])
def test_the_smallest_budget_that_is_named_works(folders, asked):
    given = {"model": folders["qwen3"], "kv_cache_memory_bytes": asked}
    given = {name: value for name, value in given.items() if value is not None}
    how = {"model": folders["llama"], "speculative_config": given, **SIZES}
    with pytest.raises(BudgetTooSmallError, match="for the draft model; one request") as error:
        plan_engine(EngineConfig(kv_cache_memory_bytes=1, **how))
    smallest = int(error.value.remedy.split("kv_cache_memory_bytes=")[1].split(";")[0].split(".")[0])
    assert plan_engine(EngineConfig(kv_cache_memory_bytes=smallest, **how)).capacity.max_concurrency >= 1
    with pytest.raises(BudgetTooSmallError):
        plan_engine(EngineConfig(kv_cache_memory_bytes=smallest - 1, **how))


def test_shares_are_of_whole_blocks():
    own, other = KVGeometry(2, 2, 16, 4, 8).layout, KVGeometry(4, 4, 32, 4, 8).layout
    share = DraftShare(own)
    for budget in range(0, 2_000_000, 3331):
        part = share.of(budget, other)
        assert part % own.bytes_per_block == 0
        assert part >= own.bytes_per_block
        left = max(0, budget - part)
        if budget > 20 * other.bytes_per_block:
            assert left / part == pytest.approx(other.bytes_per_token / own.bytes_per_token, rel=0.3)
        whole = share.around(left, other)
        assert whole - share.of(whole, other) >= left
        assert all(less - share.of(less, other) < left for less in range(max(0, whole - 3), whole))


def test_a_start_says_what_the_draft_model_has(folders):
    said: list[str] = []
    from pagefold.engine.build import build_engine

    config = EngineConfig(model=folders["llama"], speculative_config={"model": folders["qwen3"]}, **SIZES)
    build_engine(plan_engine(config), say=said.append)
    (line,) = [line for line in said if line.startswith("draft ")]
    assert line.startswith("draft      qwen3: weights ")
    assert line.endswith(" tokens")


def _with(folder: str, to: Path, **fields) -> str:
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | fields))
    return str(to)


def test_what_cannot_draft_is_refused_before_weights_are_loaded(folders, tmp_path, tiny_chat_model):
    how = {"model": folders["llama"], **SIZES}

    def refused(remedy: str, said: str, **given) -> None:
        with pytest.raises(ConfigError, match=said) as error:
            plan_engine(EngineConfig(**{**how, "speculative_config": given}))
        assert remedy in error.value.remedy

    other = save_tiny_model("llama", tmp_path / "other", vocab_size=300)
    refused("same tokens", "has 300 tokens, and llama 307", model=str(other))
    refused("same tokens", "another tokenizer than llama: one of them has none", model=str(tiny_chat_model))
    short = _with(folders["llama"], tmp_path / "short", max_position_embeddings=100)
    refused("max_model_len=100", "max_model_len is 128, and short, the draft model, ends at 100", model=short)
    refused("speculative_config.model", "method is draft_model", method="draft_model")
    refused("leave it out", "quantization is 'int8'", quantization="int8")
    refused("leave it out", "kv_cache_memory_bytes is 5", kv_cache_memory_bytes=5)
    neox = str(save_tiny_model("gpt-neox", tmp_path / "neox"))
    how["dtype"] = "float64"
    refused("Leave quantization out", "speculative_config: quantization takes", model=neox, quantization="int8")
    how["dtype"] = "float32"
    how["max_model_len"] = "auto"
    refused("max_model_len=100", r"llama goes up to \d+ tokens, and short, the draft model, ends at 100", model=short)
    how["max_model_len"] = 128
    refused("at least 1", "kv_cache_memory_bytes is 0", kv_cache_memory_bytes=0, model=short)
    refused("none, int4, int8, w8a8_int8", "quantization is 'int3'", quantization="int3", model=short)
    refused("left out", "model is empty", model="")
    refused("between 0 and 32", "num_speculative_tokens is 33", model=short, num_speculative_tokens=33)
    chat = _with(str(tiny_chat_model), tmp_path / "chat")
    tokenizer = json.loads((Path(chat) / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    one, two = list(vocab)[1000:1002]
    vocab[one], vocab[two] = vocab[two], vocab[one]
    (Path(chat) / "tokenizer.json").write_text(json.dumps(tokenizer))
    how["model"] = str(tiny_chat_model)
    refused("same family", "another tokenizer than tiny0: .* is token 100., and token 100. there", model=chat)


def test_requests_ask_for_whoever_is_there(folders):
    plain = LLM(folders["llama"], speculative_config={"method": "tree"}, **SIZES).engine
    both = LLM(folders["llama"], speculative_config={"method": "tree", "model": folders["qwen3"]}, **SIZES).engine
    how = SamplingParams(max_tokens=4)
    by_model = Caller(speculation=SpeculativeParams.of({"method": "draft_model"}))
    both.check([1, 2], how, by_model)
    with pytest.raises(InvalidRequestError, match="this server has no draft model"):
        plain.check([1, 2], how, by_model)
    for engine in (plain, both):
        with pytest.raises(InvalidRequestError, match="a draft model is loaded when the server starts"):
            engine.check([1, 2], how, Caller(speculation=SpeculativeParams.of({"model": "another"})))
    assert both.drafting.default == SpeculativeParams(model=folders["qwen3"])


def test_quantized_weights_draft_for_those_that_are_not(tmp_path):
    """The same model in less precision: nearly always right."""
    folder = str(save_tiny_model("llama", tmp_path / "one"))
    plain = texts(LLM(folder, **SIZES), temperature=0.0)
    llm = LLM(folder, speculative_config={"model": folder, "quantization": "int8"}, **SIZES)
    make_free(llm)
    assert texts(llm, temperature=0.0) == plain


def test_a_draft_model_that_fails_costs_no_request_anything(folders, caplog):
    plain = texts(LLM(folders["llama"], **SIZES), temperature=0.0)
    llm = LLM(folders["llama"], speculative_config={"model": folders["llama"]}, **SIZES)
    make_free(llm)
    drafter = llm.engine.drafting._drafter_for(llm.engine.drafting.default)

    class Failing:
        def run(self, plan):
            raise MemoryError

    drafter._runner = Failing()
    assert texts(llm, temperature=0.0) == plain
    assert "the draft model failed" in caplog.text
