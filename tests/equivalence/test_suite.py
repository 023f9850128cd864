"""The suite itself: that it notices each kind of mistake, and that its references are what they claim to be.

An equality suite that passes everything proves nothing. Here engines are broken on purpose, one way at a time.
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

import pytest
import torch

from equivalence.prompts import short_prompts
from equivalence.suite import Setting, Trial, Workload, build
from equivalence.tiny_models import EOS_TOKEN_IDS, VOCAB_SIZE

if TYPE_CHECKING:
    from equivalence.references import References

pytestmark = pytest.mark.usefixtures("one_thread")

WORKLOAD = Workload(short_prompts(VOCAB_SIZE), num_outputs=24)
WARM = Setting(name="warm", num_rounds=2)


def skip_copies(engine):
    """A partial hit reads a block that was never copied."""
    engine.runner.slab.copy = lambda ops: None


def keep_failed_promises(engine):
    """Blocks of a failed step stay known as if they were written."""
    publishing = engine.scheduler.core.publishing
    publishing.abandon = publishing.commit


def start_early(engine):
    """After a hit, positions are one too low."""
    run = engine.runner.run

    def shifted(plan):
        rows = zip(plan.starts, plan.num_tokens, strict=True)
        return run(replace(plan, starts=[start - 1 if start and num > 1 else start for start, num in rows]))

    engine.runner.run = shifted


def swap_two_blocks(engine):
    """In the tenth step two sequences hold each other's first block.

    (Two blocks of one sequence may change places: keys know their positions, and a later token sees all of them.)
    """
    run, slab = engine.runner.run, engine.runner.slab

    def swapped(plan):
        if plan.step_id == 10:
            one, other = plan.block_ids[0][0], plan.block_ids[1][0]
            slab.data[[one, other]] = slab.data[[other, one]]
        return run(plan)

    engine.runner.run = swapped


def match_all_but_one_token(engine):
    """Prefixes are matched by something weaker than their tokens."""
    core = engine.scheduler.core
    match, promise = core.match, core.publishing.promise

    def blurred(packed):
        return bytes(4) + packed[4:]

    core.match = lambda namespace, packed, max_tokens, **kinds: match(namespace, blurred(packed), max_tokens, **kinds)
    core.publishing.promise = lambda cache, packed, num_tokens: promise(cache, blurred(packed), num_tokens)


def free_too_early(engine):
    """What is released is free at once, though the tree still knows it."""
    pool, slab = engine.scheduler.core.pool, engine.runner.slab
    release = engine.scheduler.core.release

    def forgetful(cache):
        block_ids = list(cache.only_table.block_ids)
        release(cache)
        slab.data[[i for i in block_ids if not pool.blocks[i].num_table_refs]] = float("nan")

    engine.scheduler.core.release = forgetful


def forget_one_slot(engine):
    """One slot of one cached block loses its value."""
    run, slab = engine.runner.run, engine.runner.slab

    def damaged(plan):
        for node in engine.scheduler.core.tree.nodes():
            if node.committed and node.depth == 2:
                slab.values[node.blocks[0].block_id, 1, 5] = 0.0
                break
        return run(plan)

    engine.runner.run = damaged


def forget_softcap(engine):
    """Scores are not capped."""
    decoder = engine.runner.decoder
    attention = decoder._attention
    decoder._attention = lambda *operands: attention(*operands[:7], 0.0)


MISTAKES = {
    skip_copies: WARM,
    keep_failed_promises: Setting(name="failing", failure_rate=0.3, max_num_batched_tokens=32, max_num_seqs=8),
    start_early: WARM,
    swap_two_blocks: WARM,
    match_all_but_one_token: WARM,
    free_too_early: WARM,
    forget_one_slot: WARM,
    forget_softcap: WARM,
}


@pytest.mark.quick(every=8)
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_is_noticed(mistake, tiny_folder, tiny_references):
    def build_broken(*args):
        engine = build(*args)
        mistake(engine)
        return engine

    first, *rest = WORKLOAD.prompts[-1]
    workload = Workload([*WORKLOAD.prompts, [first ^ 1, *rest]], WORKLOAD.num_outputs)
    family = "gemma2" if mistake is forget_softcap else "llama"
    trial = Trial(MISTAKES[mistake], workload, tiny_folder(family), build_broken)
    # What nobody has written holds NaN: who reads it ends with an error, else it has other tokens.
    with pytest.raises(AssertionError, match=r"outputs differ|NaN or infinite"):  # noqa: PT012 - either may notice
        trial.run()
        trial.assert_exact(tiny_references(family, WORKLOAD.num_outputs))


def test_a_trial_that_tested_nothing_fails(tiny_folder):
    setting = replace(WARM, at_least=replace(Trial(WARM, WORKLOAD, tiny_folder("llama")).counts, num_preemptions=1))
    with pytest.raises(AssertionError, match="num_preemptions is below 1"):
        Trial(setting, WORKLOAD, tiny_folder("llama")).run()


def test_generate_stops_where_the_reference_is_cut(tiny_folder, tiny_references):
    """One run without end-of-sequence tokens stands for the run with them."""
    references: References = tiny_references("llama", WORKLOAD.num_outputs)
    assert references.eos_token_ids == set(EOS_TOKEN_IDS)
    cut = [prompt for prompt in WORKLOAD.prompts if references.of(prompt, ignore_eos=False) != references.of(prompt)]
    for prompt in [*cut, WORKLOAD.prompts[0]]:
        output, _ = references.generate(prompt, eos_token_ids=EOS_TOKEN_IDS)
        assert output == references.of(prompt, ignore_eos=False)
    assert cut, "no output ends early: choose more end-of-sequence tokens"


def test_a_reference_without_torchs_attention_is_transformers_own(tiny_references):
    """Gemma 2's, up to the float32 that transformers' own softmax of it rounds to."""
    references: References = tiny_references("gemma2-window-64", WORKLOAD.num_outputs)
    ids = torch.tensor([WORKLOAD.prompts[-1]])
    with torch.inference_mode():
        exact = references.model(ids).logits
        references.model.set_attn_implementation("eager")
        own = references.model(ids).logits
        references.model.set_attn_implementation("exact")
    assert 0 < (own - exact).abs().max() < 1e-4
    assert own.abs().max() > 1, "such logits would tell nothing"


def test_outputs_hang_on_single_far_tokens(tiny_references):
    """The tiny models tell mistakes: change one token of a prompt, anywhere, and the output changes."""
    references: References = tiny_references("llama", WORKLOAD.num_outputs)
    random = Random(0)
    prompt = WORKLOAD.prompts[-1]
    num_changed = 0
    for _ in range(20):
        other = array("i", prompt)
        other[random.randrange(len(prompt))] ^= 1
        num_changed += references.of(other) != references.of(prompt)
    assert num_changed >= 10
