"""The settings in which outputs must be exact. One list for every engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from equivalence.suite import Counts, Setting

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

__all__ = ["SETTINGS", "deal", "deal_one_each", "long_but", "pairs_but", "some_long"]

SETTINGS = (
    Setting(name="alone", arrivals="alone", at_least=Counts(num_hit_tokens=100)),
    Setting(name="alone, cache off", arrivals="alone", enable_prefix_caching=False),
    Setting(name="batched, chunks of 512", at_least=Counts(num_hit_tokens=100)),
    Setting(name="batched, cache off", enable_prefix_caching=False),
    Setting(name="chunks of 1", max_num_batched_tokens=1, max_num_seqs=1, max_prompt_tokens=130),
    Setting(name="chunks of 16", max_num_batched_tokens=16, max_num_seqs=16, at_least=Counts(num_hit_tokens=100)),
    Setting(name="chunks of 17", max_num_batched_tokens=17, max_num_seqs=5, at_least=Counts(num_hit_tokens=100)),
    Setting(name="chunks of 17, cache off", max_num_batched_tokens=17, max_num_seqs=17, enable_prefix_caching=False),
    Setting(
        name="shared prefixes in one step",
        max_num_batched_tokens=65536,
        max_num_seqs=128,
        at_least=Counts(num_first_step_hit_tokens=200),
    ),
    Setting(name="warm", num_rounds=2, at_least=Counts(num_hit_tokens=1200)),
    Setting(name="warm, alone, chunks of 17", num_rounds=2, arrivals="alone", max_num_batched_tokens=64),
    Setting(name="random order", shuffle=True, arrivals="trickle", max_num_batched_tokens=64, num_rounds=2),
    Setting(name="blocks of 1", block_size=1, max_num_batched_tokens=64, num_rounds=2),
    Setting(name="blocks of 4", block_size=4, max_num_batched_tokens=100, num_rounds=2),
    Setting(name="blocks of 64", block_size=64, max_num_batched_tokens=100, num_rounds=2, shuffle=True),
    Setting(name="blocks of 256", block_size=256, num_rounds=2),
    Setting(name="short of memory", spare_blocks=2, num_rounds=2, at_least=Counts(num_preemptions=4)),
    Setting(
        name="short of memory, small blocks",
        block_size=4,
        spare_blocks=2,
        max_prompt_tokens=80,
        num_rounds=3,
        shuffle=True,
        at_least=Counts(num_preemptions=20, num_recomputed_tokens=200),
    ),
    Setting(
        name="short of memory, chunks of 17",
        block_size=1,
        spare_blocks=2,
        max_num_batched_tokens=17,
        max_num_seqs=16,
        max_prompt_tokens=140,
        num_rounds=2,
        at_least=Counts(num_preemptions=15, num_recomputed_tokens=200),
    ),
    Setting(
        name="short of memory, cache off",
        spare_blocks=2,
        max_prompt_tokens=80,
        num_rounds=3,
        enable_prefix_caching=False,
        at_least=Counts(num_preemptions=20, num_recomputed_tokens=1000),
    ),
    Setting(
        name="short of memory, lfu",
        spare_blocks=4,
        eviction_policy="lfu",
        shuffle=True,
        num_rounds=2,
        block_size=4,
        at_least=Counts(num_preemptions=4),
    ),
    Setting(
        name="short of memory, fifo",
        spare_blocks=4,
        eviction_policy="fifo",
        shuffle=True,
        num_rounds=2,
        block_size=8,
        at_least=Counts(num_preemptions=4),
    ),
    Setting(
        name="host tier",
        spare_blocks=2,
        num_host_blocks=2000,
        num_rounds=2,
        at_least=Counts(num_stored_blocks=40, num_loaded_blocks=50, num_hit_tokens=1200),
    ),
    Setting(
        name="host tier with little room, chunks of 17",
        block_size=8,
        spare_blocks=2,
        num_host_blocks=60,
        max_num_batched_tokens=17,
        max_num_seqs=16,
        num_rounds=3,
        shuffle=True,
        at_least=Counts(num_stored_blocks=40, num_loaded_blocks=5),
    ),
    Setting(
        name="host tier whose bits turn, with failing steps",
        block_size=4,
        spare_blocks=6,
        num_host_blocks=700,
        damage_rate=0.03,
        failure_rate=0.1,
        cancel_share=0.5,
        arrivals="trickle",
        shuffle=True,
        max_num_batched_tokens=64,
        num_rounds=3,
        at_least=Counts(num_stored_blocks=40, num_loaded_blocks=40, num_damaged_blocks=5, num_failed_steps=10),
    ),
    Setting(
        name="slow tier, little host",
        spare_blocks=2,
        num_host_blocks=48,
        slow_policy="write_back",
        num_rounds=4,
        at_least=Counts(num_written_blocks=20, num_fetched_blocks=5, num_loaded_blocks=5),
    ),
    Setting(
        name="slow tier that goes wrong, with failing steps and cancels",
        block_size=4,
        spare_blocks=6,
        num_host_blocks=140,
        slow_policy="write_through",
        slow_fault_rate=0.02,
        damage_rate=0.02,
        failure_rate=0.1,
        cancel_share=0.5,
        arrivals="trickle",
        shuffle=True,
        max_num_batched_tokens=64,
        num_rounds=3,
        at_least=Counts(num_written_blocks=40, num_fetched_blocks=10, num_failed_steps=10),
    ),
    Setting(
        name="streamed",
        streamed_share=0.26,
        num_host_blocks=200,
        num_rounds=2,
        at_least=Counts(num_streamed=6, num_hit_tokens=1000),
    ),
    Setting(
        name="streamed in a few blocks, chunks of 64, with others",
        block_size=4,
        streamed_share=0.06,
        num_host_blocks=240,
        max_num_batched_tokens=64,
        max_num_seqs=16,
        arrivals="trickle",
        shuffle=True,
        num_rounds=2,
        at_least=Counts(num_streamed=10, num_preemptions=2),
    ),
    Setting(
        name="streamed, with bits that turn, failing steps, cancels and a slow tier that goes wrong",
        block_size=8,
        streamed_share=0.36,
        num_host_blocks=120,
        slow_policy="write_through",
        slow_fault_rate=0.02,
        damage_rate=0.02,
        failure_rate=0.1,
        cancel_share=0.2,
        arrivals="trickle",
        shuffle=True,
        max_num_batched_tokens=128,
        num_rounds=2,
        max_prompt_tokens=600,  # of hundreds of blocks some are always damaged
        at_least=Counts(num_streamed=4, num_failed_steps=10, num_cancelled=1),
    ),
    Setting(name="cancels", cancel_share=1.0, at_least=Counts(num_cancelled=8)),
    Setting(
        name="cancels, chunks of 64, random order",
        cancel_share=1.0,
        shuffle=True,
        max_num_batched_tokens=64,
        arrivals="trickle",
        num_rounds=2,
        at_least=Counts(num_cancelled=8),
    ),
    Setting(name="failed steps", failure_rate=0.3, at_least=Counts(num_failed_steps=5)),
    Setting(
        name="failed steps, chunks of 17, warm",
        failure_rate=0.2,
        max_num_batched_tokens=17,
        max_num_seqs=8,
        num_rounds=2,
        at_least=Counts(num_failed_steps=20),
    ),
    Setting(name="end-of-sequence tokens", ignore_eos=False, num_rounds=2),
    Setting(
        name="everything at once",
        max_prompt_tokens=400,  # longer ones leave the others too much room
        block_size=8,
        max_num_batched_tokens=48,
        max_num_seqs=16,
        spare_blocks=6,
        arrivals="trickle",
        shuffle=True,
        num_rounds=4,
        cancel_share=0.5,
        failure_rate=0.1,
        ignore_eos=False,
        at_least=Counts(num_preemptions=5, num_failed_steps=20, num_cancelled=8, num_hit_tokens=100),
    ),
    Setting(
        name="everything at once, long prompts too",
        block_size=8,
        max_num_batched_tokens=48,
        max_num_seqs=16,
        spare_blocks=6,
        arrivals="trickle",
        shuffle=True,
        num_rounds=3,
        cancel_share=0.5,
        failure_rate=0.1,
        ignore_eos=False,
        at_least=Counts(num_failed_steps=20, num_cancelled=8, num_hit_tokens=100),
    ),
)


def deal(families: Iterable[str], settings: Iterable[Setting] = SETTINGS, *, every: int = 3) -> list:
    """Return pairs of a family and a setting for pytest: the first family in every setting, the others in some each.

    Those get one of ``every`` settings, each family others.

    A setting tries the cache and a family tries the model's code: what is wrong in either shows without every pair.
    """
    settings = list(settings)
    return [
        pytest.param(family, setting, id=f"{family}-{setting.name}")
        for place, family in enumerate(families)
        for number, setting in enumerate(settings)
        if place == 0 or (place + number) % every == 0
    ]


def long_but(quick: Collection[object], cases: Iterable[object]) -> list:
    """Return cases for pytest; those that are not in ``quick`` only the long form runs."""
    return [pytest.param(case, marks=[] if case in quick else [pytest.mark.long]) for case in cases]


def pairs_but(quick: Mapping[str, Collection[str]], others: Iterable[str], settings: Iterable[Setting]) -> list:
    """Return every pair of something else and a setting for pytest.

    Only those of ``quick``, which has the names of settings for each of the others, are not long.
    """
    settings = list(settings)
    return [
        pytest.param(
            other,
            setting,
            id=f"{other}-{setting.name}",
            marks=[] if setting.name in quick.get(other, ()) else [pytest.mark.long],
        )
        for other in others
        for setting in settings
    ]


def some_long(settings: Iterable[Setting], long_names: Collection[str]) -> list:
    """Return settings for pytest; those of ``long_names`` only the long form runs."""
    return [
        pytest.param(setting, id=setting.name, marks=[pytest.mark.long] if setting.name in long_names else [])
        for setting in settings
    ]


def deal_one_each(settings: Iterable[Setting], quick: Mapping[str, object], others: Sequence[object]) -> list:
    """Return pairs of a setting and something else for pytest: what ``quick`` says, else one of ``others`` in turn.

    Only those of ``quick``, by name, are not long.
    """
    return [
        pytest.param(
            setting,
            quick.get(setting.name, others[number % len(others)]),
            id=setting.name,
            marks=[] if setting.name in quick else [pytest.mark.long],
        )
        for number, setting in enumerate(settings)
    ]
