"""Who is let in when, under memory pressure, changes no token: every rule of admission, policy, limit and target.

Time is measured here, and so are steps: what a target makes of them differs from run to run, and outputs may not.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from equivalence.prompts import short_prompts
from equivalence.settings import some_long
from equivalence.suite import Counts, Load, Setting, Trial, Workload
from equivalence.tiny_models import VOCAB_SIZE

pytestmark = pytest.mark.usefixtures("one_thread")

SHORT = Workload(short_prompts(VOCAB_SIZE), num_outputs=24)

_NEVER_KEPT_MS = 0.001
"""No step is so quick: whatever the machine does, prompts are cut as small as they may be."""

PRESSED = Setting(
    name="predicted",
    block_size=4,
    spare_blocks=4,
    max_prompt_tokens=40,
    max_num_batched_tokens=48,
    max_num_seqs=16,
    num_rounds=2,
    shuffle=True,
    ignore_eos=False,
    load=Load(admission="predicted"),
    at_least=Counts(num_growth_waits=5),
)
"""The default rule, of which the first round knows nothing, and the later ones how long outputs are."""

PREFILLS = Load(
    admission="predicted", max_num_partial_prefills=2, max_long_partial_prefills=1, long_prefill_token_threshold=12
)

SETTINGS = (
    PRESSED,
    replace(PRESSED, name="max_tokens", load=Load(admission="max_tokens")),
    replace(PRESSED, name="lpm", load=Load(admission="predicted", scheduling_policy="lpm")),
    replace(
        PRESSED,
        name="fair",
        load=Load(admission="predicted", scheduling_policy="fair", num_tenants=3),
        max_prompt_tokens=80,
        max_num_seqs=3,
        spare_blocks=60,
        shuffle=False,
        arrivals="trickle",
        at_least=Counts(num_made_way=1),
    ),
    replace(
        PRESSED,
        name="prefill limits",
        load=PREFILLS,
        max_prompt_tokens=80,
        spare_blocks=40,
        at_least=Counts(num_prefill_waits=10),
    ),
    replace(
        PRESSED,
        name="a target that is never kept",
        load=Load(admission="predicted", target_itl_ms=_NEVER_KEPT_MS),
        at_least=Counts(num_capped_steps=20),
    ),
    replace(
        PRESSED,
        name="all of it, with failing steps, cancels and a host tier",
        load=replace(PREFILLS, scheduling_policy="fair", num_tenants=3, target_itl_ms=_NEVER_KEPT_MS),
        max_num_seqs=4,
        num_host_blocks=200,
        failure_rate=0.1,
        cancel_share=0.5,
        arrivals="trickle",
        at_least=Counts(num_capped_steps=20, num_failed_steps=5, num_cancelled=5),
    ),
    replace(
        PRESSED,
        name="by prompts, lpm and prefill limits",
        load=replace(PREFILLS, admission="prompt", scheduling_policy="lpm"),
        spare_blocks=2,
        at_least=Counts(num_preemptions=5),
    ),
)
QUICK = {"predicted", "all of it, with failing steps, cancels and a host tier"}
LONG = {setting.name for setting in SETTINGS} - QUICK


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("setting", some_long(SETTINGS, LONG))
def test_outputs_are_those_of_generate_whoever_is_let_in(setting, tiny_folder, tiny_references):
    trial = Trial(setting, SHORT, tiny_folder("llama"))
    trial.run()
    trial.assert_exact(tiny_references("llama", SHORT.num_outputs))
    print(setting.name, trial.counts)
