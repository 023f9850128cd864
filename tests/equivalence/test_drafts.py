"""Drafts change no output: with right ones, wrong ones, and right ones and then wrong ones, in all settings.

Part 1 of the equality rule in float64, against transformers' ``generate``; to the bit where the fused decoder computes;
part 3 where codes are kept, against what each prompt gets alone. What is cached behind drafts is read by others, whose
outputs show whether anything of it was rejected.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from equivalence.alone import AloneOutputs
from equivalence.coded_cases import constants_for
from equivalence.drafted import DraftCounts, RandomDrafting, drafted, drafting_by, drafting_by_model, known_by
from equivalence.overlapped_loop import build_overlapped
from equivalence.prompts import short_prompts
from equivalence.settings import SETTINGS, pairs_but, some_long
from equivalence.suite import Setting, Trial, Workload, cached_blocks
from equivalence.test_structured import Run, requests_of
from equivalence.tiny_models import VOCAB_SIZE
from pagefold.engine import build

pytestmark = pytest.mark.usefixtures("one_thread")

SHORT = Workload(short_prompts(VOCAB_SIZE), num_outputs=24)
ALL = [replace(setting, at_least=None) for setting in SETTINGS]  # drafts make steps fewer
QUICK = {
    "warm",
    "chunks of 17",
    "blocks of 4",
    "short of memory, small blocks",
    "host tier whose bits turn, with failing steps",
    "everything at once",
}
BY_MODEL = {"warm", "everything at once"}
SOME = [setting for number, setting in enumerate(ALL) if number % 3 == 0 or setting.name in BY_MODEL]
FEW = [setting for setting in ALL if setting.name in {"warm", "failed steps, chunks of 17, warm", "everything at once"}]


CODES = {
    "kivi2": {"kv_cache_dtype": "kivi2"},
    "int8": {"kv_cache_dtype": "int8_per_token_head"},
    "streaming_llm": {"streaming_llm": 40},
    "kivi2-streaming_llm": {"kv_cache_dtype": "kivi2", "streaming_llm": 40},
}


def run(trial: Trial, references, counts: DraftCounts) -> None:
    trial.run()
    trial.assert_exact(references)
    assert counts.num_accepted > 100, "nothing was drafted"
    assert counts.num_rejected > 100, "nothing was rejected"


@pytest.mark.quick(every=6)
@pytest.mark.parametrize("setting", some_long(ALL, {setting.name for setting in ALL} - QUICK))
def test_outputs_are_those_of_generate(setting, tiny_folder, tiny_references):
    references, counts = tiny_references("llama", SHORT.num_outputs), DraftCounts()
    factory = drafted(known_by(references, VOCAB_SIZE), counts)
    trial = Trial(setting, SHORT, tiny_folder("llama"), factory)
    if setting.name in QUICK:
        run(trial, references, counts)
    else:  # some have no room for drafts, or requests that stream
        trial.run()
        trial.assert_exact(references)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "setting"),
    pairs_but(
        {"gemma3": ["everything at once"], "mistral-window-40": ["failed steps, chunks of 17, warm"]},
        ["gemma3", "mistral-window-40", "qwen3", "mixtral"],
        FEW,
    ),
)
def test_outputs_of_other_families_are_those_of_generate(family, setting, tiny_folder, tiny_references):
    """Windows give blocks back as the accepted tokens leave them."""
    references, counts = tiny_references(family, SHORT.num_outputs), DraftCounts()
    run(
        Trial(setting, SHORT, tiny_folder(family), drafted(known_by(references, VOCAB_SIZE), counts)),
        references,
        counts,
    )


@pytest.mark.quick(every=4)
@pytest.mark.parametrize(
    ("method", "setting"),
    pairs_but(
        {"tree": ["warm", "everything at once"], "ngram": ["warm", "failed steps, chunks of 17, warm"]},
        ["tree", "ngram"],
        FEW,
    ),
)
def test_outputs_with_a_drafter_are_those_of_generate(method, setting, tiny_folder, tiny_references):
    references, counts = tiny_references("llama", SHORT.num_outputs), DraftCounts()
    workload = SHORT if method == "tree" else Workload([[*prompt, *prompt] for prompt in SHORT.prompts], 24)
    trial = Trial(setting, workload, tiny_folder("llama"), drafted(drafting_by(method), counts))
    trial.run()
    trial.assert_exact(references)
    assert counts.num_drafts > 20  # few: of these next to none is right, and soon next to none is made
    if method == "tree" and setting.num_rounds > 1:  # a model of random weights repeats nothing within one text
        assert counts.num_accepted > 40


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("setting", some_long(SOME, {one.name for one in SOME} - BY_MODEL))
def test_outputs_with_a_draft_model_are_those_of_generate(setting, tiny_folder, tiny_references):
    """It is the same model, so its drafts are right where it is not made to fail."""
    references, counts = tiny_references("llama", SHORT.num_outputs), DraftCounts()
    factory = drafted(drafting_by_model(tiny_folder("llama"), VOCAB_SIZE), counts)
    trial = Trial(setting, SHORT, tiny_folder("llama"), factory)
    trial.run()
    trial.assert_exact(references)
    if setting.streamed_share is None:  # those that stream have none
        assert counts.num_accepted > 100
        assert counts.num_rejected > 50


@pytest.mark.long
@pytest.mark.parametrize("setting", FEW[:1], ids=lambda setting: setting.name)
@pytest.mark.parametrize("by", ["qwen3", pytest.param("gemma3", marks=pytest.mark.long)])
def test_outputs_with_any_draft_model_are_those_of_generate(by, setting, tiny_folder, tiny_references):
    """One that says something else, and one that has windows of its own."""
    references, counts = tiny_references("llama", SHORT.num_outputs), DraftCounts()
    factory = drafted(drafting_by_model(tiny_folder(by), VOCAB_SIZE), counts)
    trial = Trial(setting, SHORT, tiny_folder("llama"), factory)
    trial.run()
    trial.assert_exact(references)
    assert counts.num_rejected > 100


@pytest.mark.quick(every=3)
@pytest.mark.parametrize("setting", FEW, ids=lambda setting: setting.name)
def test_the_fused_decoder_says_the_same_to_the_bit(setting, tiny_folder):
    alone = AloneOutputs(tiny_folder("llama"), SHORT.num_outputs, model_impl="pagefold", threads=1)
    setting = replace(setting, dtype="float32", attention_backend="auto", block_size=16)
    counts = DraftCounts()
    run(Trial(setting, SHORT, tiny_folder("llama"), drafted(known_by(alone, VOCAB_SIZE), counts)), alone, counts)


@pytest.mark.parametrize("is_late", [True, pytest.param(False, marks=pytest.mark.long)], ids=["late", "early"])
def test_outputs_of_the_overlapped_loop_are_those_of_generate(is_late, tiny_folder, tiny_references):
    """A step behind one with drafts waits until these are verified, and others are planned ahead."""
    references, counts = tiny_references("llama", SHORT.num_outputs), DraftCounts()
    (setting,) = (one for one in ALL if one.name == "failed steps, chunks of 17, warm")
    factory = drafted(known_by(references, VOCAB_SIZE), counts, build_overlapped)
    trial = Trial(setting, SHORT, tiny_folder("llama"), factory, is_late=is_late)
    run(trial, references, counts)
    assert trial.engine.num_ahead


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "setting"),
    pairs_but({"kivi2": ["warm"], "streaming_llm": ["failed steps, chunks of 17, warm"]}, CODES, FEW),
)
def test_outputs_and_blocks_of_codes_are_those_alone(how, setting, tiny_folder, monkeypatch):
    """What is sealed, and what windows keep, follows what was accepted: also what is cached in the end."""
    monkeypatch.setattr(build, "_constants", constants_for)
    exact = {"dtype": "float64", "attention_backend": "reference", "block_size": setting.block_size}
    alone = AloneOutputs(tiny_folder("llama"), SHORT.num_outputs, max_model_len=2048, **exact, **CODES[how])
    counts = DraftCounts()
    trial = Trial(
        replace(setting, **CODES[how]), SHORT, tiny_folder("llama"), drafted(known_by(alone, VOCAB_SIZE), counts)
    )
    run(trial, alone, counts)


def test_what_is_cached_is_the_same_to_the_bit(tiny_folder):
    """Blocks that drafts have filled hold what they would hold without: K and V of accepted tokens, and no others."""
    folder = tiny_folder("llama")
    setting = Setting(name="cached", dtype="float32", attention_backend="auto", arrivals="alone")
    plain = Trial(setting, SHORT, folder)
    plain.run()
    alone = AloneOutputs(folder, SHORT.num_outputs, model_impl="pagefold", threads=1)
    counts = DraftCounts()
    trial = Trial(setting, SHORT, folder, drafted(known_by(alone, VOCAB_SIZE), counts))
    run(trial, alone, counts)
    with_drafts = cached_blocks(trial.engine, trial.engine.runner.inner.slab)
    without = cached_blocks(plain.engine, plain.engine.runner.inner.slab)
    assert with_drafts == without


def told(run: Run) -> list[float]:
    """All logprobs of a run, in order."""
    of_tokens = [one for at in sorted(run.logprobs) for one in run.logprobs[at]]
    return [logprob.logprob for one in of_tokens for _, logprob in sorted(one.items())]


@pytest.mark.long
@pytest.mark.parametrize("harsh", [False, True], ids=["calm", "harsh"])
@pytest.mark.parametrize("is_overlapped", [False, pytest.param(True, marks=pytest.mark.long)], ids=["", "overlapped"])
def test_whatever_is_asked_of_an_output_drafts_do_not_change_it(tiny_chat_model, harsh, is_overlapped):
    """Sampled and greedy, with penalties, bias, cuts, grammars, bad words, least lengths and logprobs."""
    calm = Run(tiny_chat_model)
    requests = requests_of(calm.engine.tokenizer)
    calm.run(requests)
    counts = DraftCounts()
    again = Run(tiny_chat_model, is_harsh=harsh, is_overlapped=is_overlapped, emit=counts.emit)

    def coming(request):
        return calm.tokens[int(request.request_id)]

    again.engine.drafting = RandomDrafting(again.engine, coming, 49152)
    again.run(requests)
    assert again.tokens == calm.tokens
    assert again.texts == calm.texts
    assert again.reasons == calm.reasons
    assert told(again) == pytest.approx(told(calm), abs=1e-9)  # in transformers' path they depend on the batch
    assert counts.num_accepted > 300
    assert counts.num_rejected > 150
