"""Several samples of one prompt through the whole engine: each is what it would be alone, with its own seed.

The reference is that of ``test_sampling``: transformers' logits of prompt and output, and the sampler, one row alone.
It knows of no samples: sample ``i`` of a request is one with ``seed + i``.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from equivalence.prompts import short_prompts
from equivalence.settings import SETTINGS, some_long
from equivalence.suite import Counts, Setting, Workload
from equivalence.test_sampling import BIAS, AskingTrial, assert_as_transformers, logits_of
from equivalence.tiny_models import VOCAB_SIZE
from pagefold.sampling import SamplingParams

__all__ = ["logits_of"]  # a fixture

pytestmark = pytest.mark.usefixtures("one_thread")

NAMES = (
    "batched, chunks of 512",
    "chunks of 17",
    "warm",
    "short of memory, cache off",
    "failed steps, chunks of 17, warm",
    "everything at once",
)
LONG_NAMES = ("batched, chunks of 512", "warm", "short of memory, cache off", "failed steps, chunks of 17, warm")
"""Of them, those that only the long form runs."""
NUM_OUTPUTS = 24
NUM_SAMPLES = 3
KINDS = (
    SamplingParams(),
    SamplingParams(presence_penalty=1.5, frequency_penalty=0.7, logprobs=3, prompt_logprobs=2),
    SamplingParams(temperature=1.8, repetition_penalty=0.8, min_p=0.02, top_p=0.95, prompt_logprobs=0),
    SamplingParams(temperature=0.7, logit_bias=BIAS, min_tokens=9, logprobs=20),
    SamplingParams(temperature=1.2, top_k=5),
)
SHORT_OF_MEMORY = Setting(
    name="a tiny budget, blocks of 4",
    block_size=4,
    spare_blocks=2,
    max_num_batched_tokens=17,
    max_num_seqs=9,
    max_prompt_tokens=80,
    num_rounds=2,
    at_least=Counts(num_preemptions=20, num_recomputed_tokens=200),
)


class SamplesTrial(AskingTrial):
    """A trial in which every prompt is sampled three times, and every other one of a kind asks for something else."""

    def sampling(self, key):
        how = KINDS[key.index % len(KINDS)]
        seed = 100 * key.index + key.sample
        return replace(how, n=NUM_SAMPLES, max_tokens=self.workload.num_outputs, seed=seed)


def run(setting, workload, folder):
    """Run the trial; every sample of every request that was not cancelled must have come to its end."""
    least = Counts(**{name: min(1, least) for name, least in vars(setting.at_least or Counts()).items()})
    trial = SamplesTrial(replace(setting, ignore_eos=False, at_least=least), workload, folder)
    trial.run()
    for key in trial.outputs:
        assert key.is_twin or key._replace(sample=NUM_SAMPLES - 1) in trial.outputs
    for key in list(trial.prompt_logprobs):
        assert key.sample == 0, "a prompt was told twice"
        for index in range(1, NUM_SAMPLES):
            trial.prompt_logprobs[key._replace(sample=index)] = trial.prompt_logprobs[key]
    return trial


@pytest.mark.quick(every=4)
@pytest.mark.parametrize(
    "setting",
    some_long([*(setting for setting in SETTINGS if setting.name in NAMES), SHORT_OF_MEMORY], LONG_NAMES),
)
def test_every_sample_is_that_of_transformers(setting, tiny_folder, logits_of):
    trial = run(setting, Workload(short_prompts(VOCAB_SIZE), NUM_OUTPUTS), tiny_folder("llama"))
    assert_as_transformers(trial, logits_of)
    distinct = {tuple(output) for output in trial.outputs.values()}
    assert len(distinct) > len(trial.workload.prompts), "samples of a prompt are the same"


@pytest.mark.long
@pytest.mark.parametrize("caching", [True, False])
def test_prompts_of_every_length_are_forked_rightly(tiny_folder, logits_of, caching):
    """From a block with one token to a full one: what is copied on write is what the prompt left there."""
    prompt = short_prompts(VOCAB_SIZE)[7]
    workload = Workload([prompt[:length] for length in range(1, 34)], NUM_OUTPUTS)
    setting = Setting(name="", block_size=16, max_num_batched_tokens=48, max_num_seqs=12, enable_prefix_caching=caching)
    assert_as_transformers(run(setting, workload, tiny_folder("llama")), logits_of)
