"""Reading in the real engine: exact against exact is exactly equal, and what is rounded is found, where it is."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from pagefold.config import EngineConfig
from pagefold.engine.overlapped import OverlappedEngine
from pagefold.engine.planning import plan_engine
from pagefold.errors import ConfigError
from pagefold.kv import CODECS, KEEP_ALL, BlockId, BlockTable, KeepRule, KVGeometry
from pagefold.quality.contexts import cut_contexts
from pagefold.quality.evaluate import Question, _sized, evaluate
from pagefold.quality.needles import DEPTHS, hide_needles
from pagefold.quality.reading import read_side_by_side
from pagefold.quality.recommend import recommend
from pagefold.quality.rounding import RoundingRunner
from pagefold.quality.setting import EXACT, Setting
from pagefold.quality.subject import Subject
from pagefold.quality.texts import Text
from pagefold.runner.block_form import block_form
from pagefold.runner.codec_slab import CODEC_LAYOUT, CODEC_ROWS_LAYOUT, CodecSlab
from pagefold.steps import StepPlan
from pagefold.tokenizer import Tokenizer
from pagefold.transport.packing import Packing

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_LENGTH = 160


def _config(model: Path, chunk: int = 64, **settings: object) -> EngineConfig:
    return EngineConfig(
        model=str(model),
        kv_cache_memory_bytes=2**22,
        max_model_len=_LENGTH + 1,
        max_num_seqs=8,
        max_num_batched_tokens=chunk,
        **{"dtype": "float32"} | settings,
    )


@pytest.fixture
def token_ids() -> list[int]:
    return random.Random().choices(range(100, 40000), k=_LENGTH)


def _nobody(_num_tokens: int) -> None:
    pass


def _round_after_each_step(subject: Subject, mantissa: float) -> None:
    """Round what is in the blocks, as a codec would that encodes what has been attended to."""
    run: Callable[..., object] = subject.engine.runner.run
    data = subject.engine.runner.slab.data

    def rounding_run(plan: object) -> object:
        result = run(plan)
        data.copy_((data * mantissa).round() / mantissa)
        return result

    subject.engine.runner.run = rounding_run


def test_every_position_is_that_of_transformers(tiny_chat_model: Path, token_ids: list[int]) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_chat_model)
    with torch.inference_mode():
        twin = model(torch.tensor([token_ids])).logits[0].log_softmax(-1)
    subject = Subject(EXACT, _config(tiny_chat_model))
    (found,) = read_side_by_side([subject], token_ids, _nobody)
    expected = -twin[range(_LENGTH - 1), token_ids[1:]]
    np.testing.assert_allclose(found.surprise, expected.numpy(), atol=1e-4)


def test_chunks_change_nothing(tiny_chat_model: Path, token_ids: list[int]) -> None:
    """The fused decoder's logits are the same to the bit however a prompt is cut, so differences are exactly 0."""
    subjects = [Subject(EXACT, _config(tiny_chat_model, chunk)) for chunk in (64, 17, 256)]
    num_told = []
    exact, *others = read_side_by_side(subjects, token_ids, num_told.append)
    assert sum(num_told) == _LENGTH - 1
    for other in others:
        assert not other.kl.any()
        assert (other.surprise == exact.surprise).all()


def test_an_overlapped_engine_reads_the_same(tiny_chat_model: Path, token_ids: list[int]) -> None:
    """The one that a card has: its steps are launched, and their logits told when they land."""
    subjects = [Subject(EXACT, _config(tiny_chat_model)) for _ in range(2)]
    engine = subjects[1].engine
    subjects[1].engine = OverlappedEngine(
        scheduler=engine.scheduler,
        runner=engine.runner,
        tokenizer=None,
        limits=engine.limits,
        capacity=engine.capacity,
    )
    exact, overlapped = read_side_by_side(subjects, token_ids, _nobody)
    assert subjects[1].engine.num_launched >= 3
    assert not overlapped.kl.any()
    assert (overlapped.surprise == exact.surprise).all()


def test_what_is_rounded_is_found_behind_the_chunk_that_was_attended_exactly(
    tiny_chat_model: Path, token_ids: list[int]
) -> None:
    fine, coarse = (Subject(Setting(name), _config(tiny_chat_model)) for name in ("fine", "coarse"))
    _round_after_each_step(fine, 8.0)  # finer, and the divergence is that of float32 itself
    _round_after_each_step(coarse, 2.0)
    _, of_fine, of_coarse = read_side_by_side(
        [Subject(EXACT, _config(tiny_chat_model)), fine, coarse], token_ids, _nobody
    )
    assert not of_fine.kl[:64].any()
    assert not of_coarse.kl[:64].any()
    assert 0 < of_fine.kl[64:].mean() < of_coarse.kl[64:].mean()


@pytest.mark.parametrize("layout", [CODEC_LAYOUT, CODEC_ROWS_LAYOUT])
@pytest.mark.parametrize("bits", [1, 2])
@pytest.mark.parametrize("name", ["int8_per_token_head", "k8v4"])
def test_what_a_step_has_filled_is_as_it_comes_back_from_a_pool(name: str, bits: int, layout: str) -> None:
    """To the bit as packing rounds it; blocks that are not full yet, and others', stay as they are."""
    geometry = KVGeometry(2, 2, 32, 4, 16, CODECS[name])
    before = torch.from_numpy(np.random.default_rng().integers(0, 256, (8, geometry.bytes_per_block), np.uint8))
    slab = CodecSlab(before.clone(), geometry, layout=layout)
    runner = SimpleNamespace(slab=slab, geometry=geometry, run=lambda _: "result", launch=lambda _: lambda: "later")
    packing = Packing(block_form(geometry, layout), bits)
    plan = StepPlan(0)
    plan.starts, plan.num_tokens = [10, 0, 40], [30, 16, 8]
    plan.tables = [[BlockTable(map(BlockId, ids))] for ids in ([0, 1, 2], [3], [5, 6, 7])]
    transport = {1: "lossy7", 2: "lossy6"}[bits]
    rounding = RoundingRunner(runner, transport)
    assert rounding.run(plan) == "result"
    for block in range(8):
        expected = packing.coarsened(memoryview(before[block].numpy())) if block in {0, 1, 3, 7} else before[block]
        assert bytes(expected) == bytes(slab.as_bytes()[block])
    after = slab.data.clone()
    assert rounding.launch(plan)() == "later"
    assert torch.equal(slab.data, after), "once more rounds nothing more"


def test_blocks_of_all_cache_groups_are_rounded() -> None:
    """Those of a table that has given back its first ones too."""
    keeps = (KeepRule(16), KEEP_ALL)
    geometry = KVGeometry(2, 2, 32, 4, 16, CODECS["int8_per_token_head"], keeps=keeps)
    before = torch.from_numpy(np.random.default_rng().integers(0, 256, (8, geometry.bytes_per_block), np.uint8))
    slab = CodecSlab(before.clone(), geometry)
    runner: Any = SimpleNamespace(slab=slab, geometry=geometry, run=lambda _: "result")
    plan = StepPlan(0)
    plan.starts, plan.num_tokens = [40], [10]
    windowed, full = BlockTable(map(BlockId, [6, 7])), BlockTable(map(BlockId, [0, 1, 2, 3]))
    windowed.num_trimmed = 2
    plan.tables = [[windowed, full]]
    RoundingRunner(runner, "lossy6").run(plan)
    changed = [block for block in range(8) if not torch.equal(slab.data[block], before[block])]
    assert changed == [2, 6]


def test_rounded_blocks_are_found_behind_the_chunk_that_was_attended_exactly(
    tiny_chat_model: Path, token_ids: list[int]
) -> None:
    codec = {"kv_cache_dtype": "int8_per_token_head"}
    subjects = [Subject(Setting(how, codec, how), _config(tiny_chat_model, **codec)) for how in ("none", "lossy6")]
    exact, rounded = read_side_by_side(subjects, token_ids, _nobody)
    is_same = rounded.surprise == exact.surprise
    assert is_same[:64].all()
    assert not is_same[64:].all()
    with pytest.raises(ConfigError, match="blocks of fp8_e4m3 have none"):
        Subject(Setting("x", transport="lossy7"), _config(tiny_chat_model, kv_cache_dtype="fp8_e4m3"))


@pytest.mark.long
def test_an_evaluation_of_the_same_finds_nothing(tiny_chat_model: Path, story: Text) -> None:
    settings = [Setting("again"), Setting("int8", {"kv_cache_dtype": "int8_per_token_head"})]
    question = Question(settings, [story], context_len=_LENGTH, num_contexts=5, num_greedy_tokens=8, num_haystacks=1)
    done: list[tuple[str, int, int]] = []
    found = evaluate(_config(tiny_chat_model), question, progress=lambda *step: done.append(step))
    assert (found.num_contexts, found.num_tokens) == (5, 5 * (_LENGTH - 1))
    same, int8 = found.settings
    zero = (0.0, 0.0, 0.0, 0.0)
    for part in (same, *same.bins):
        for estimate, value in ((part.perplexity_change, 0.0), (part.kl, 0.0), (part.top1_agreement, 1.0)):
            assert (estimate.value, estimate.standard_error) == (value, 0.0)
    assert zero == (same.kl_99, same.kl_max, same.kl.low, same.kl.high)
    assert same.perplexity == pytest.approx(found.exact_perplexity.value)
    assert same.greedy is not None
    assert (same.greedy.same_tokens.value, same.greedy.num_never_diverged) == (8.0, 5)
    assert [needle.depth for needle in same.needles] == list(DEPTHS)
    assert same.bytes_per_token == found.exact_bytes_per_token
    assert [(part.first, part.last) for part in same.bins][-1][1] == _LENGTH - 1
    assert -1e-6 < int8.kl.value < 0.01  # of a tiny model next to nothing: as much as logits in float32 are off
    assert int8.top1_agreement.value > 0.8
    assert int8.bytes_per_token < 0.4 * found.exact_bytes_per_token
    assert {what for what, *_ in done} == {"starting engines", "reading", "looking for needles"}
    assert all(at == total for what, at, total in done if (what, total) == ("reading", at))
    assert recommend(found, 1.0, lambda _: 0.5) is int8
    assert recommend(found, 1.0, lambda _: 1.1) is None
    bound = int8.perplexity_change.value - 1e-9
    assert recommend(found, bound, lambda _: 0.5) is None


@pytest.mark.parametrize("codec", ["auto", "int4", "kivi2"])
@pytest.mark.parametrize("block_size", [16, 64])
def test_blocks_are_for_four_contexts_whatever_lies_beside_them(smollm2: Path, codec: str, block_size: int) -> None:
    """Room for unsealed blocks of all seats is more than four short contexts take in 2 bit."""
    config = EngineConfig(model=str(smollm2), kv_cache_dtype=codec, block_size=block_size)
    assert plan_engine(_sized(config, 64)).capacity.num_blocks == 4 * (64 // block_size + 2)


def test_needles_lie_where_they_should(tiny_chat_model: Path) -> None:
    tokenizer = Tokenizer(tiny_chat_model)
    rng = random.Random()
    haystack = tokenizer.encode("And so on it goes. " * 200)[:400]
    for needle in hide_needles(haystack, tokenizer, rng):
        text = tokenizer.decode(needle.token_ids)
        sentence = text.index(f"is: {needle.answer}.")
        assert len(needle.token_ids) + needle.num_tokens <= len(haystack)
        assert abs(sentence / text.index("\n\nWhat is") - needle.depth) < 0.25
        assert text.count(needle.answer) == 1
        assert needle.is_found_in(f" {int(needle.answer):,}.")
        assert not needle.is_found_in(needle.answer[:-1])
    with pytest.raises(ConfigError, match="no room to hide") as caught:
        hide_needles(haystack[:60], tokenizer, rng)
    least = int(caught.value.remedy.split("at least ")[1].split(",")[0])
    assert hide_needles(haystack[:least], tokenizer, rng, depths=(0.5,))


def test_contexts_are_of_one_length_and_do_not_overlap(tiny_chat_model: Path, story: Text) -> None:
    tokenizer = Tokenizer(tiny_chat_model)
    long = Text("long", story.content[::-1] * 2)
    contexts = cut_contexts([long, story], tokenizer, 48, 7)
    assert contexts.source == "long and story"
    assert [len(token_ids) for token_ids in contexts.token_ids] == [48] * 7
    assert len(set(contexts.token_ids)) > 3
    short = cut_contexts([Text("short", story.content[:2000])], tokenizer, 64, None)
    whole = tokenizer.encode(story.content[:2000])
    assert 1 < len(short.token_ids) <= 8
    assert [token_id for token_ids in short.token_ids for token_id in token_ids][:64] == whole[:64]


def test_a_text_that_is_too_short_is_refused_with_what_would_work(tiny_chat_model: Path, story: Text) -> None:
    tokenizer = Tokenizer(tiny_chat_model)
    short = Text("short", story.content[:900])
    with pytest.raises(ConfigError, match="less than a context") as caught:
        cut_contexts([short], tokenizer, 2048, None)
    longest = int(caught.value.remedy.split("at most ")[1].rstrip("."))
    assert len(cut_contexts([short], tokenizer, longest, None).token_ids) == 1
    with pytest.raises(ConfigError, match="less than 9 contexts of 64") as caught:
        cut_contexts([short], tokenizer, 64, 9)
    most = int(caught.value.remedy.split("at most ")[-1].split()[0])
    assert len(cut_contexts([short], tokenizer, 64, most).token_ids) == most
    with pytest.raises(ConfigError, match="less than a context") as caught:
        cut_contexts([Text("a line", story.content[:20])], tokenizer, 64, None)
    assert caught.value.remedy == "Give a longer text."  # no context may be as short as that
    for length, num in ((4, 1), (64, 0)):
        with pytest.raises(ConfigError, match="at least"):
            cut_contexts([story], tokenizer, length, num)


def test_what_cannot_be_asked_is_refused(tiny_chat_model: Path, story: Text) -> None:
    with pytest.raises(ConfigError, match="2048 tokens at most"):
        evaluate(_config(tiny_chat_model), Question([EXACT], [story], context_len=2048))
    with pytest.raises(ConfigError, match="twice"):
        Question([EXACT, EXACT], [story])
    with pytest.raises(ConfigError, match="No setting"):
        Question([], [story])
    with pytest.raises(ConfigError, match="at most 50"):
        Question([EXACT], [story], context_len=100, num_greedy_tokens=51)
    with pytest.raises(ConfigError, match="at least 32"):
        Question([EXACT], [story], context_len=-5)
    for name in ("seed", "no_such_field"):
        with pytest.raises(ConfigError, match="cannot be evaluated"):
            Setting("bad", {name: 1})


def test_the_built_in_model_hardly_sees_int8(smollm2: Path, story: Text) -> None:
    setting = Setting("int8", {"kv_cache_dtype": "int8_per_token_head"})
    question = Question([setting], [story], context_len=48, num_contexts=2, num_greedy_tokens=2, num_haystacks=0)
    (found,) = evaluate(_config(smollm2), question).settings
    assert 0 < found.kl.value < 0.01
    assert abs(found.perplexity_change.value) < 0.05
    assert found.top1_agreement.value > 0.9
    assert found.needles == ()
