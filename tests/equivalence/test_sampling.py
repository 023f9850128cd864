"""Sampling and logprobs through the whole engine: in every setting what transformers' logits say, row by row.

For every request the reference runs transformers once over prompt and output. From its logits, transformers' own
repetition penalty and a few lines of Python make what must be sampled from; the sampler, one row alone, draws.
"""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import replace
from functools import cache
from random import Random

import pytest
import torch

from equivalence.prompts import short_prompts
from equivalence.settings import SETTINGS, some_long
from equivalence.suite import Counts, Key, Trial, Workload
from equivalence.tiny_models import EOS_TOKEN_IDS, VOCAB_SIZE, save_tiny_model
from pagefold import LLM
from pagefold.runner.sampler import sample
from pagefold.sampling import SamplingParams

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = (
    "alone",
    "batched, chunks of 512",
    "chunks of 17",
    "warm",
    "blocks of 4",
    "short of memory, small blocks",
    "short of memory, chunks of 17",
    "short of memory, cache off",
    "failed steps, chunks of 17, warm",
    "everything at once",
)
LONG_NAMES = ("short of memory, chunks of 17", "short of memory, cache off")
"""Of them, those that only the long form runs."""
BIAS = dict.fromkeys(EOS_TOKEN_IDS, 4.0) | {100: -100.0, 101: 2.5}
KINDS = (
    SamplingParams(temperature=0.0, repetition_penalty=1.3, logprobs=0),
    SamplingParams(presence_penalty=1.5, frequency_penalty=0.7, logprobs=3, prompt_logprobs=2),
    SamplingParams(temperature=1.8, repetition_penalty=0.8, min_p=0.02, top_p=0.95, prompt_logprobs=0),
    SamplingParams(temperature=1.5, logit_bias=BIAS, min_tokens=9, logprobs=20),
    SamplingParams(temperature=0.0, frequency_penalty=-0.5, logit_bias=BIAS, min_tokens=5, top_k=5, logprobs=1),
    SamplingParams(temperature=1.2, prompt_logprobs=20),
    SamplingParams(temperature=0.0),
)


class AskingTrial(Trial):
    """A trial in which every prompt asks for something else, and all that comes is kept."""

    def __init__(self, *args):
        super().__init__(*args)
        self.logprobs: dict[Key, list] = {}
        self.prompt_logprobs: dict[Key, list] = {}

    def sampling(self, key):
        return replace(
            KINDS[key.index % len(KINDS)],
            max_tokens=self.workload.num_outputs,
            seed=key.index,
        )

    def take(self, key, delta):
        super().take(key, delta)
        if delta.logprobs is not None:
            assert len(delta.logprobs) == len(delta.token_ids)
            self.logprobs.setdefault(key, []).extend(delta.logprobs)
        if delta.prompt_logprobs is not None:
            assert key not in self.prompt_logprobs, "told twice"
            self.prompt_logprobs[key] = delta.prompt_logprobs.named()


@pytest.fixture(scope="module")
def logits_of(tiny_references):
    """Return transformers' logits after each token, ``[tokens, vocab]``."""
    model = tiny_references("llama", 24).model

    @cache
    def logits(token_ids):
        with torch.inference_mode():
            return model(torch.tensor([token_ids]), use_cache=False).logits[0].clone()

    return logits


def expected_token(logits, how, prompt, output):
    """Return what must follow ``output``, from transformers' logits ``[vocab]``."""
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = logits.clone()
    for token, bias in (how.logit_bias or {}).items():
        logits[token] += bias
    logits = RepetitionPenaltyLogitsProcessor(how.repetition_penalty)(torch.tensor([prompt + output]), logits[None])[0]
    for token, count in Counter(output).items():
        logits[token] -= how.frequency_penalty * count + how.presence_penalty
    if len(output) < how.min_tokens:
        logits[list(EOS_TOKEN_IDS)] = float("-inf")
    return sample(logits[None], [how], [how.seed], [len(output)])[0]


def assert_told(told, token_id, num_top, logprobs):
    """``told`` is what ``logprobs``, ``[vocab]``, say of a token and the most likely ones."""
    best = logprobs.topk(num_top).indices.tolist()
    assert list(told) == [token_id, *(token for token in best if token != token_id)]
    for token, logprob in told.items():
        assert abs(logprob.logprob - float(logprobs[token])) < 1e-9
        assert logprob.rank == 1 + int((logprobs > logprobs[token]).sum())


@pytest.mark.quick(every=8)
@pytest.mark.parametrize("setting", some_long([setting for setting in SETTINGS if setting.name in NAMES], LONG_NAMES))
def test_tokens_and_logprobs_are_those_of_transformers(setting, tiny_folder, logits_of):
    least = Counts(**{name: min(1, least) for name, least in vars(setting.at_least or Counts()).items()})
    workload = Workload(short_prompts(VOCAB_SIZE), num_outputs=24)
    trial = AskingTrial(replace(setting, ignore_eos=False, at_least=least), workload, tiny_folder("llama"))
    trial.run()
    assert_as_transformers(trial, logits_of)


def test_prompts_that_are_preempted_half_way_are_told_once_and_whole(tiny_folder, logits_of):
    """Whoever runs last is preempted before every third step, whatever it is at."""
    setting = next(setting for setting in SETTINGS if setting.name == "failed steps, chunks of 17, warm")
    setting = replace(setting, num_rounds=1, ignore_eos=False, at_least=Counts(num_preemptions=10, num_failed_steps=10))
    trial = AskingTrial(setting, Workload(short_prompts(VOCAB_SIZE), num_outputs=24), tiny_folder("llama"))
    scheduler, random = trial.engine.scheduler, Random(1)
    schedule, num_half_way = scheduler.schedule, 0

    def harsh_schedule(now):
        nonlocal num_half_way
        if scheduler.running and random.random() < 0.3:
            victim = scheduler.running.pop()
            if victim.sampling.prompt_logprobs is not None:
                num_half_way += 0 < len(victim.prompt_logprobs) < victim.num_prompt_tokens - 1
            scheduler._rows._relief.preempt(victim, victim, "memory")
        return schedule(now)

    scheduler.schedule = harsh_schedule
    trial.run()
    assert num_half_way >= 3
    assert_as_transformers(trial, logits_of)


def assert_as_transformers(trial, logits_of):
    """All that came is what transformers' logits say."""
    assert set(trial.outputs) >= {Key(0, index) for index in range(len(trial.workload.prompts))}
    for key, output in trial.outputs.items():
        prompt, how = trial.workload.prompts[key.index], trial.sampling(key)
        logits = logits_of(tuple(prompt + output))
        after = logits[len(prompt) - 1 :]
        expected = [expected_token(after[at], how, prompt, output[:at]) for at in range(len(output))]
        assert output == expected, key
        if not key.is_twin:
            assert len(output) == 24 or (output[-1] in EOS_TOKEN_IDS and len(output) > how.min_tokens)
        logprobs = logits.log_softmax(-1)
        if how.logprobs is None or not output:
            assert key not in trial.logprobs
        else:
            told = trial.logprobs[key]
            assert len(told) == len(output)
            for at, token_id in enumerate(output):
                assert_told(told[at], token_id, how.logprobs, logprobs[len(prompt) - 1 + at])
        if how.prompt_logprobs is None or not output:
            assert key not in trial.prompt_logprobs
        else:
            assert trial.num_cached_tokens[key] == 0 or len(prompt) == 1
            first, *rest = trial.prompt_logprobs[key]
            assert first is None
            assert len(rest) == len(prompt) - 1
            for at, token_id in enumerate(prompt[1:]):
                assert_told(rest[at], token_id, how.prompt_logprobs, logprobs[at])


@pytest.mark.long
def test_the_workload_tells_what_is_asked_from_what_is_not(tiny_folder):
    """Each kind changes what its prompts say; stop tokens do end outputs, and would end some too early."""
    workload = Workload(short_prompts(VOCAB_SIZE), num_outputs=24)
    setting = replace(next(setting for setting in SETTINGS if setting.name == "warm"), ignore_eos=False, at_least=None)

    class PlainTrial(AskingTrial):
        def sampling(self, key):
            how = super().sampling(key)
            return SamplingParams(temperature=how.temperature, seed=how.seed, max_tokens=how.max_tokens)

    class HastyTrial(AskingTrial):
        def sampling(self, key):
            return replace(super().sampling(key), min_tokens=0)

    asking, plain, hasty = (
        kind(setting, workload, tiny_folder("llama")) for kind in (AskingTrial, PlainTrial, HastyTrial)
    )
    for trial in (asking, plain, hasty):
        trial.run()
    for kind in range(5):
        keys = [key for key in asking.outputs if key.index % len(KINDS) == kind]
        assert any(asking.outputs[key] != plain.outputs[key] for key in keys), KINDS[kind]
    too_early = [key for key, output in hasty.outputs.items() if len(output) <= asking.sampling(key).min_tokens]
    assert too_early
    assert array("i", asking.outputs[too_early[0]]) != array("i", hasty.outputs[too_early[0]])
    some = [key for key in asking.outputs if asking.sampling(key).min_tokens and len(asking.outputs[key]) < 24]
    assert some, "no output ends by a stop token"


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("family", ["gemma2", "gpt-neox"])
def test_a_seed_draws_the_same_alone_and_in_a_batch_where_rounding_differs(family, tmp_path):
    """Families that transformers computes, in float32: a row's logits depend on the batch, its tokens do not.

    Flat distributions over 49,152 tokens; logits are of size 1 and differ by up to 1e-5 between the batches.
    """
    folder = save_tiny_model(family, tmp_path, dtype=torch.float32, vocab_size=49_152)
    llm = LLM(str(folder), dtype="float32", kv_cache_memory_bytes=2**22, max_model_len=160, enable_prefix_caching=False)
    random = Random(3)
    prompts = [{"prompt_token_ids": [random.randrange(100, 49_152) for _ in range(3 + 9 * i)]} for i in range(5)]
    how = [SamplingParams(temperature=1.5, seed=i, max_tokens=50, ignore_eos=True) for i in range(5)]
    together = [result.outputs[0].token_ids for result in llm.generate(prompts, how, use_tqdm=False)]
    for at in range(5):
        (alone,) = llm.generate(prompts[at], how[at], use_tqdm=False)
        assert alone.outputs[0].token_ids == together[at], at
