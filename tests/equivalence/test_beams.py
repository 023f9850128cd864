"""Beams through the whole engine: what they find is what transformers' beam search finds, in every setting.

In float64, where no two continuations are as likely as each other within rounding. Logprobs are those of
transformers' logits behind the tokens that were found.
"""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from equivalence.beam_references import BeamReferences
from equivalence.prompts import short_prompts
from equivalence.settings import SETTINGS, long_but, some_long
from equivalence.suite import Counts, Key, Setting, Trial, Workload
from equivalence.tiny_models import VOCAB_SIZE
from pagefold import LLM, BeamSearchParams
from pagefold.config import EngineConfig
from pagefold.engine.build import build_engine
from pagefold.engine.planning import plan_engine
from pagefold.errors import InvalidRequestError
from pagefold.events import FirstToken, NextTokens, OutputFinished, StepApplied
from pagefold.kv import audit
from pagefold.observe.recorder import TraceRecorder
from pagefold.sampling import SamplingParams
from pagefold.sim.replay_recording import replay_recording
from pagefold.sim.traces.read_recording import read_recording

pytestmark = pytest.mark.usefixtures("one_thread")

WIDTH = 3
NUM_OUTPUTS = 12
WORKLOAD = Workload(short_prompts(VOCAB_SIZE), NUM_OUTPUTS)
BEAMS = SamplingParams(use_beam_search=True, temperature=0.0, n=WIDTH, logprobs=2)
KINDS = (
    BEAMS,
    replace(BEAMS, length_penalty=2.0, early_stopping="never"),
    replace(BEAMS, length_penalty=-0.5, early_stopping=True),
    replace(BEAMS, ignore_eos=True, n=1, best_of=WIDTH),
    replace(BEAMS, min_tokens=5, early_stopping="never", length_penalty=0.0),
    replace(BEAMS, n=2),
)
SHORT_OF_MEMORY = Setting(
    name="a tiny budget, blocks of 4",
    block_size=4,
    spare_blocks=2,
    max_num_batched_tokens=17,
    max_num_seqs=9,
    max_prompt_tokens=80,
    num_rounds=2,
    at_least=Counts(num_preemptions=5, num_recomputed_tokens=50),
)
QUICK = {"chunks of 17", "failed steps, chunks of 17, warm", "short of memory, cache off", SHORT_OF_MEMORY.name}
IN_SETTINGS = [*(one for one in SETTINGS if one.streamed_share is None and one.max_num_seqs >= WIDTH), SHORT_OF_MEMORY]


class BeamsTrial(Trial):
    """A trial in which every prompt is searched, every other one of a kind differently."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.logprobs = {}
        self.sums = {}

    def sampling(self, key):
        return replace(KINDS[key.index % len(KINDS)], max_tokens=self.workload.num_outputs)

    def take(self, key, delta):
        super().take(key, delta)
        self.logprobs.setdefault(key, []).extend(delta.logprobs or ())
        self.sums[key] = delta.cumulative_logprob


@pytest.fixture(scope="session")
def beam_references(tiny_references):
    made = {}

    def make(family):
        if family not in made:
            made[family] = BeamReferences(tiny_references(family, NUM_OUTPUTS))
        return made[family]

    return make


def with_room(setting):
    """Return the setting with the blocks that beams take beside one sequence; of what must happen, once is enough."""
    least = Counts(**{name: min(2, least) for name, least in vars(setting.at_least or Counts()).items()})
    spare = setting.spare_blocks
    if spare is not None:
        spare += (WIDTH - 1) * (-(-NUM_OUTPUTS // setting.block_size) + 1)
    return replace(setting, spare_blocks=spare, at_least=least, ignore_eos=False)


def run(setting, workload, folder):
    trial = BeamsTrial(with_room(setting), workload, folder)
    trial.run()
    return trial


def assert_found(trial, references):
    """All that was not cancelled has found what transformers finds, in its order."""
    num_checked = 0
    for key in [key for key in trial.outputs if key.sample == 0 and not key.is_twin]:
        how, prompt = trial.sampling(key), trial.workload.prompts[key.index]
        for index, expected in enumerate(references.of(prompt, how)):
            one = key._replace(sample=index)
            assert trial.outputs[one] == expected.token_ids, (one, how)
            length = len(expected.token_ids)
            assert trial.sums[one] / length**how.length_penalty == pytest.approx(expected.score, abs=1e-4)
            assert len(trial.logprobs[one]) == length
            num_checked += 1
    assert num_checked >= 2 * len(trial.workload.prompts)


@pytest.mark.quick(every=4)
@pytest.mark.parametrize(
    "setting", some_long(IN_SETTINGS, {setting.name for setting in IN_SETTINGS if setting.name not in QUICK})
)
def test_they_find_what_transformers_finds(setting, tiny_folder, beam_references):
    assert_found(run(setting, WORKLOAD, tiny_folder("llama")), beam_references("llama"))


@pytest.mark.long
@pytest.mark.parametrize("family", long_but(["gemma3"], ["gemma3", "qwen3", "mistral-window", "llama4", "gpt-oss"]))
def test_families_find_what_transformers_finds(family, tiny_folder, beam_references):
    """Beyond windows, of several cache groups."""
    setting = next(setting for setting in SETTINGS if setting.name == "chunks of 17")
    assert_found(run(setting, WORKLOAD, tiny_folder(family)), beam_references(family))


def test_prompts_of_every_length_are_forked_rightly(tiny_folder, beam_references):
    """From a block with one token to a full one."""
    prompt = WORKLOAD.prompts[7]
    workload = Workload([prompt[:length] for length in range(1, 34, 2)], NUM_OUTPUTS)
    setting = Setting(name="", block_size=16, max_num_batched_tokens=48, max_num_seqs=12)
    assert_found(run(setting, workload, tiny_folder("llama")), beam_references("llama"))


def test_beams_among_samples_and_alone(tiny_folder, beam_references, tiny_references):
    """Greedy requests in their company say what they say alone, and logprobs are those of the logits."""

    class MixedTrial(BeamsTrial):
        def sampling(self, key):
            how = super().sampling(key)
            return how if key.index % 2 else SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUTS, ignore_eos=True)

    setting = next(setting for setting in SETTINGS if setting.name == "chunks of 17")
    trial = MixedTrial(replace(setting, at_least=None), WORKLOAD, tiny_folder("llama"))
    trial.run()
    references = tiny_references("llama", NUM_OUTPUTS)
    for index, prompt in enumerate(WORKLOAD.prompts):
        how = trial.sampling(Key(0, index))
        if not how.use_beam_search:
            assert trial.outputs[Key(0, index)] == references.of(prompt)
            continue
        for sample, expected in enumerate(beam_references("llama").of(prompt, how)):
            key = Key(0, index, sample=sample)
            assert trial.outputs[key] == expected.token_ids
            with torch.inference_mode():
                logits = references.model(torch.tensor([prompt + expected.token_ids]), use_cache=False).logits[0]
            logprobs = logits.log_softmax(-1)[len(prompt) - 1 :]
            for at, (token_id, told) in enumerate(zip(expected.token_ids, trial.logprobs[key], strict=True)):
                best = logprobs[at].topk(2).indices.tolist()
                assert list(told) == [token_id, *(one for one in best if one != token_id)]
                for one, logprob in told.items():
                    assert abs(logprob.logprob - float(logprobs[at][one])) < 1e-9
                    assert logprob.rank == 1 + int((logprobs[at] > logprobs[at][one]).sum())


def test_blocks_of_dropped_beams_are_given_back_in_the_same_step(tiny_folder):
    """After every step the beams hold the prompt's blocks once, and what each has beside the others."""
    llm = LLM(
        str(tiny_folder("llama")),
        kv_cache_memory_bytes=2**22,
        dtype="float64",
        attention_backend="reference",
        block_size=4,
        max_num_seqs=8,
    )
    engine, core = llm.engine, llm.engine.scheduler.core
    prompt = WORKLOAD.prompts[-1][:62]
    engine.add("a", prompt, replace(BEAMS, max_tokens=40, ignore_eos=True))
    num_steps = 0
    while engine.has_requests:
        engine.step()
        audit(core)
        held = {block for cache in core.caches for table in cache.tables for block in table.block_ids}
        assert core.num_active == len(held)
        paths = {tuple(seat.token_ids[: 4 * at]) for seat in engine.scheduler.running for at in range(1, 40)}
        whole = {path for path in paths if len(path) % 4 == 0}
        assert len(held) <= len(whole) + WIDTH
        num_steps += 1
    assert num_steps == 40
    assert core.num_active == 0


def test_llm_searches_in_vllms_words(tiny_folder, beam_references):
    llm = LLM(str(tiny_folder("llama")), kv_cache_memory_bytes=2**22, dtype="float64", attention_backend="reference")
    params = BeamSearchParams(beam_width=WIDTH, max_tokens=NUM_OUTPUTS)
    prompts = [{"prompt_token_ids": prompt} for prompt in WORKLOAD.prompts[:4]]
    for prompt, result in zip(WORKLOAD.prompts, llm.beam_search(prompts, params, use_tqdm=False), strict=False):
        found = beam_references("llama").of(prompt, replace(BEAMS, max_tokens=NUM_OUTPUTS))
        assert [one.tokens for one in result.sequences] == [prompt + one.token_ids for one in found]
        for one, expected in zip(result.sequences, found, strict=True):
            length = len(expected.token_ids)
            assert one.cum_logprob / length == pytest.approx(expected.score, abs=1e-4)
            is_stopped = one.tokens[-1] in beam_references("llama").eos_token_ids
            assert one.finish_reason == ("stop" if is_stopped else "length")
            assert len(one.logprobs) == length
        assert result.error is None


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"beam_width": 0}, "beam_width is 0"),
        ({"beam_width": 21}, "beam_width is 21"),
        ({"beam_width": "4"}, "beam_width is '4'"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": 0.7}, "beams are not sampled"),
        ({"length_penalty": 11.0}, "length_penalty is 11"),
        ({"length_penalty": float("nan")}, "length_penalty is nan"),
        ({"early_stopping": "always"}, "early_stopping is 'always'"),
    ],
)
def test_what_cannot_be_searched_is_refused(asked, said):
    with pytest.raises(InvalidRequestError, match=said):
        BeamSearchParams(**({"beam_width": 4, "max_tokens": 8} | asked))


def test_more_beams_than_fit_are_refused_before_they_begin(tiny_folder):
    """With what is too much, and what to do; as many as fit run to their end."""
    how = {"dtype": "float64", "attention_backend": "reference", "block_size": 4, "max_num_seqs": 8}
    small = LLM(str(tiny_folder("llama")), max_model_len=60, kv_cache_memory_bytes=2**20, **how).engine.capacity
    block_bytes = small.block_bytes // small.num_blocks
    llm = LLM(str(tiny_folder("llama")), max_model_len=60, kv_cache_memory_bytes=24 * block_bytes, **how)
    prompt = {"prompt_token_ids": WORKLOAD.prompts[-1][:20]}
    with pytest.raises(
        InvalidRequestError, match="4 beams of 60 tokens take up to 45 blocks, and the KV budget has 24"
    ):
        llm.beam_search(prompt, BeamSearchParams(beam_width=4, max_tokens=40), use_tqdm=False)
    (result,) = llm.beam_search(prompt, BeamSearchParams(beam_width=4, max_tokens=16, ignore_eos=True), use_tqdm=False)
    assert len(result.sequences) == 4
    with pytest.raises(InvalidRequestError, match="n is 9, but at most 8 sequences run at once"):
        llm.beam_search(prompt, BeamSearchParams(beam_width=9, max_tokens=2), use_tqdm=False)


def test_a_search_that_found_no_numbers_ends_with_all_its_beams(tiny_folder):
    """One beam's logits are NaN: the whole search has no result, and says so once for each."""
    llm = LLM(
        str(tiny_folder("llama")),
        kv_cache_memory_bytes=2**22,
        dtype="float64",
        attention_backend="reference",
        max_num_seqs=8,
    )
    engine = llm.engine
    inner, num_steps = engine.runner.run, 0

    def run_step(plan):
        nonlocal num_steps
        num_steps += 1
        result = inner(plan)
        return replace(result, corrupted=[1]) if num_steps == 4 else result

    engine.runner.run = run_step
    engine.add("a", WORKLOAD.prompts[5], replace(BEAMS, max_tokens=12))
    ended = []
    while engine.has_requests:
        ended += [(delta.index, delta.finish_reason) for delta in engine.step() if delta.finish_reason]
        audit(engine.scheduler.core)
    assert sorted(ended) == [(index, "error") for index in range(WIDTH)]
    assert engine.scheduler.core.num_active == 0


def test_tokens_are_counted_and_timed_as_they_are_found(tiny_folder):
    """Each beam's in each step: the first tells how long the prompt took, and the others how long steps take."""
    events = []
    llm = LLM(str(tiny_folder("llama")), kv_cache_memory_bytes=2**22, dtype="float64", attention_backend="reference")
    llm.engine.scheduler._emit = llm.engine._emit = llm.engine._outputs._emit = events.append
    llm.generate({"prompt_token_ids": [5, 6, 7]}, replace(BEAMS, max_tokens=6, ignore_eos=True), use_tqdm=False)
    assert [one.num_output_tokens for one in events if isinstance(one, StepApplied)] == [WIDTH] * 6
    assert sum(isinstance(one, FirstToken) for one in events) == 1
    gaps = [one.gaps for one in events if isinstance(one, NextTokens)]
    assert [sum(each.values()) for each in gaps] == [WIDTH] * 5
    ended = [one for one in events if isinstance(one, OutputFinished)]
    assert len(ended) == WIDTH
    assert all(0 < one.decode_s < one.e2e_s for one in ended)


def test_what_is_told_of_a_prompt_is_told_of_its_first_result(tiny_folder, tiny_references):
    llm = LLM(str(tiny_folder("llama")), kv_cache_memory_bytes=2**22, dtype="float64", attention_backend="reference")
    prompt = WORKLOAD.prompts[4]
    how = replace(BEAMS, max_tokens=4, prompt_logprobs=1, truncate_prompt_tokens=9)
    (result,) = llm.generate({"prompt_token_ids": prompt}, how, use_tqdm=False)
    kept = prompt[-9:]
    model = tiny_references("llama", NUM_OUTPUTS).model
    with torch.inference_mode():
        logprobs = model(torch.tensor([kept]), use_cache=False).logits[0].log_softmax(-1)
    assert result.prompt_token_ids == kept
    for at, told in enumerate(result.prompt_logprobs[1:]):
        assert abs(told[kept[at + 1]].logprob - float(logprobs[at][kept[at + 1]])) < 1e-9


def test_who_is_late_ends_with_all_its_beams(tiny_folder):
    """In the midst of a search; all blocks are free then."""
    now = 0.0
    llm = LLM(str(tiny_folder("llama")), kv_cache_memory_bytes=2**22, dtype="float64", attention_backend="reference")
    engine = llm.engine
    engine._clock, engine._request_timeout_s = (lambda: now), 5.0
    engine.add("a", WORKLOAD.prompts[5], replace(BEAMS, max_tokens=12, ignore_eos=True))
    ended = []
    while engine.has_requests:
        ended += [(delta.index, delta.finish_reason) for delta in engine.step()]
        now += 1.0
        audit(engine.scheduler.core)
    assert sorted(ended) == [(index, "timeout") for index in range(WIDTH)]
    assert engine.scheduler.core.num_active == 0


def test_a_recording_holds_what_was_found_and_is_replayed_up_to_it(tiny_folder, tmp_path):
    """What simulations need of a recording, prompts and how long outputs are, is there."""
    file = tmp_path / "recording.jsonl"
    config = EngineConfig(
        model=str(tiny_folder("llama")), kv_cache_memory_bytes=2**22, dtype="float64", attention_backend="reference"
    )
    recorder = TraceRecorder(file, time.monotonic)
    engine = build_engine(plan_engine(config), emit=recorder)
    recorder.begin(config, engine.capacity.num_blocks, 0)
    prompt, found = WORKLOAD.prompts[5], [[] for _ in range(WIDTH)]
    engine.add("one", prompt, SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True))
    engine.add("search", prompt, replace(BEAMS, max_tokens=7))
    while engine.has_requests:
        for delta in engine.step():
            if delta.request_id == "search":
                found[delta.index] += delta.token_ids
    recorder.close()
    recording = read_recording(file)
    lengths = [len(recording.tokens[number]) - len(prompt) for number in range(1, 1 + WIDTH)]
    assert lengths == [len(output) for output in found]
    report = replay_recording(recording)
    assert report.first_difference == "request 1 searches beams, and which there were is not recorded"
