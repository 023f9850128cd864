"""Pacing: caps and switches that follow what steps take, settle, and do not swing.

Steps come from a model with a known answer: ``base + slope * prompt tokens``, with noise that is the same in each run.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagefold.scheduler.guardrails.gap_window import GapWindow
from pagefold.scheduler.guardrails.landed_step import NO_CAP, LandedStep
from pagefold.scheduler.guardrails.pacing import NO_PACING, ItlPacing
from pagefold.scheduler.guardrails.prefill_cap import CapLimits, PrefillCap
from pagefold.scheduler.guardrails.step_time_fit import StepTimeFit

if TYPE_CHECKING:
    from collections.abc import Callable

TARGET_S = 0.1
LIMITS = CapLimits(TARGET_S, 16, 512)


def _always(value: float) -> Callable[[int], float]:
    return lambda _: value


@dataclass
class Plant:
    """A server whose steps take what is written here, under pacing.

    Attributes:
        base_s: of a step without prompt tokens, by the number of the step.
        token_s: what each prompt token adds.
        wanted: how many there are to compute.
        noise: share by which a step takes longer, at random.
        draft_s: what drafts add.
    """

    base_s: Callable[[int], float] = field(default_factory=lambda: _always(0.02))
    token_s: Callable[[int], float] = field(default_factory=lambda: _always(5e-4))
    wanted: Callable[[int], float] = field(default_factory=lambda: _always(512))
    noise: float = 0.05
    draft_s: float = 0.0

    def run(self, num_steps: int) -> Plant:
        rng, self.pacing = Random(1), ItlPacing(LIMITS)
        self.caps, self.drafts, self.gaps = [], [], []
        for number in range(num_steps):
            cap = self.pacing.prefill_cap_tokens
            num_tokens = min(cap, int(self.wanted(number)))
            has_drafts = self.pacing.allows_drafts and self.draft_s > 0
            took_s = self.base_s(number) + self.token_s(number) * num_tokens + self.draft_s * has_drafts
            took_s *= 1 + self.noise * abs(rng.gauss(0, 1))
            self.pacing.landed(_step(took_s, num_tokens, cap, has_drafts=has_drafts))
            self.caps.append(cap)
            self.drafts.append(has_drafts)
            self.gaps.append((took_s, num_tokens))
        return self

    def num_turns(self) -> int:
        """Return how often the cap went another way than the last time."""
        ways = [after > before for before, after in pairwise(self.caps) if after != before]
        return sum(one != other for one, other in pairwise(ways))

    def share_over(self, first: int) -> float:
        """Return which share of the steps with prompt tokens took longer than the target, from step ``first`` on."""
        took = [took_s for took_s, num_tokens in self.gaps[first:] if num_tokens]
        return sum(took_s > TARGET_S for took_s in took) / len(took)


def _step(gap_s: float | None, num_tokens: int, cap: int, *, has_drafts: bool = False) -> LandedStep:
    return LandedStep(
        took_s=gap_s or 0.0, gap_s=gap_s, num_prompt_tokens=num_tokens, cap_tokens=cap, has_drafts=has_drafts
    )


def test_a_cap_is_found_within_few_steps_and_stays() -> None:
    plant = Plant().run(1500)
    assert plant.share_over(40) <= 0.05
    assert 80 <= plant.caps[-1] <= 160, "160 tokens take just the target"
    assert plant.num_turns() <= 1
    assert len(set(plant.caps[200:])) == 1


def test_a_step_response_down_ends_at_all_of_a_step() -> None:
    plant = Plant(token_s=lambda number: 5e-4 if number < 300 else 1e-4).run(1500)
    assert plant.caps[299] < 200
    assert plant.caps[-1] == 512
    grown = [after - before for before, after in pairwise(plant.caps) if after > before]
    assert max(grown) <= LIMITS.growth, "it grows slowly"
    assert plant.num_turns() <= 3


def test_a_step_response_up_settles_under_the_target() -> None:
    plant = Plant(token_s=lambda number: 1e-4 if number < 300 else 1e-3).run(1200)
    assert plant.caps[299] == 512
    assert plant.share_over(360) <= 0.05
    assert plant.num_turns() <= 3


def test_a_ramp_is_followed() -> None:
    plant = Plant(base_s=lambda number: 0.02 + 0.06 * number / 2000, token_s=_always(3e-4)).run(2000)
    assert plant.share_over(200) <= 0.05
    assert plant.num_turns() <= 4
    assert 16 <= plant.caps[-1] < plant.caps[400]


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.3])
def test_noise_does_not_make_it_swing(noise: float) -> None:
    plant = Plant(noise=noise).run(2000)
    assert plant.share_over(100) <= 0.05
    assert plant.num_turns() <= 20, "one in a hundred steps at most"


def test_what_no_cap_helps_goes_to_the_floor_and_stays_there() -> None:
    plant = Plant(base_s=_always(0.2)).run(300)
    assert plant.caps[-1] == 16
    assert plant.num_turns() == 0


def test_quiet_steps_do_not_hide_those_with_prompts() -> None:
    plant = Plant(wanted=lambda number: 512 if number % 40 == 0 else 0).run(2000)
    assert plant.share_over(1000) <= 0.1
    assert plant.caps[-1] < 200


def test_a_cap_that_nobody_uses_does_not_grow() -> None:
    plant = Plant(wanted=lambda number: 512 if number < 300 else 20).run(1500)
    assert plant.caps[-1] < 200
    assert len(set(plant.caps[400:])) == 1


def test_steps_planned_under_another_cap_are_not_counted() -> None:
    cap = PrefillCap(64)
    assert cap.measured(_step(9.0, 60, 512)) is cap
    assert len(cap.measured(_step(9.0, 60, 64)).window) == 1
    assert cap.measured(_step(9.0, 0, 64)) is cap, "no prompt tokens: a quiet step"
    assert cap.measured(_step(None, 60, 64)) is cap, "nobody decoded"


def test_drafts_go_before_prefills_are_cut() -> None:
    plant = Plant(token_s=_always(1e-4), draft_s=0.05).run(400)
    assert set(plant.caps) == {512}
    assert plant.drafts[:8] == [True] * 8
    assert not any(plant.drafts[20:])


def test_prefills_are_cut_where_it_is_not_enough_to_go_without_drafts() -> None:
    plant = Plant(draft_s=0.02).run(400)
    first_cut = next(number for number, cap in enumerate(plant.caps) if cap < 512)
    assert first_cut > plant.drafts.index(False) >= 8
    assert plant.share_over(100) <= 0.05


def test_drafts_come_back_when_all_is_well_below() -> None:
    busy = Plant(base_s=lambda number: 0.07 if number < 200 else 0.02, wanted=_always(0), draft_s=0.04).run(400)
    assert not any(busy.drafts[20:200])
    assert all(busy.drafts[300:])


def test_drafts_that_are_the_very_reason_come_back_ever_later() -> None:
    plant = Plant(base_s=_always(0.05), wanted=_always(0), draft_s=0.06).run(12000)
    changes = [number for number, (before, after) in enumerate(pairwise(plant.drafts)) if before != after]
    assert 3 <= len(changes) <= 20
    pauses = [back - gone for gone, back in zip(changes[::2], changes[1::2], strict=False)]
    assert pauses == sorted(pauses)
    assert pauses[-1] > 8 * pauses[0]


def test_one_long_gap_moves_nothing() -> None:
    pacing = ItlPacing(LIMITS)
    for number in range(64):
        gap_s = 1e9 if number == 40 else 0.05
        pacing.landed(_step(gap_s, 500, pacing.prefill_cap_tokens))
    assert pacing.prefill_cap_tokens == 512
    assert pacing.state.fit.seconds <= 64 * 4 * TARGET_S, "a clock that jumped is no measure"


def test_gaps_of_nothing_move_nothing() -> None:
    pacing = ItlPacing(LIMITS)
    for _ in range(64):
        pacing.landed(_step(0.0, 500, pacing.prefill_cap_tokens))
    assert pacing.prefill_cap_tokens == 512


def test_without_a_target_there_is_no_cap() -> None:
    NO_PACING.landed(_step(9.0, 500, NO_CAP))
    assert NO_PACING.prefill_cap_tokens == NO_CAP
    assert NO_PACING.allows_drafts
    assert NO_PACING.status() is None


@given(
    steps=st.lists(
        st.tuples(st.none() | st.floats(0, 1e12), st.integers(0, 512), st.booleans(), st.booleans()), max_size=80
    )
)
def test_a_cap_is_never_outside_its_limits(steps: list[tuple[float | None, int, bool, bool]]) -> None:
    pacing = ItlPacing(LIMITS)
    for gap_s, num_tokens, has_drafts, is_old in steps:
        before = pacing.state
        step = _step(gap_s, num_tokens, 512 if is_old else pacing.prefill_cap_tokens, has_drafts=has_drafts)
        pacing.landed(step)
        assert before.after(step, LIMITS) == pacing.state, "a step in, a state out: nothing else decides"
        assert LIMITS.floor <= pacing.prefill_cap_tokens <= LIMITS.ceiling


def test_the_percentile_needs_some_gaps_and_forgives_one() -> None:
    window = GapWindow()
    for _ in range(7):
        window = window.with_gap(1.0)
    assert window.p95_s is None
    window = window.with_gap(100.0)
    assert window.p95_s == 1.0
    for _ in range(40):
        window = window.with_gap(2.0)
    assert (len(window), window.p95_s) == (32, 2.0)


def test_a_line_is_fitted_to_what_steps_took() -> None:
    fit = StepTimeFit()
    assert fit.tokens_within(1.0) is None
    for number in range(40):
        fit = fit.with_step(number * 10, 0.02 + 5e-4 * number * 10)
    assert fit.seconds_of(100) == pytest.approx(0.07)
    assert fit.tokens_within(0.0701) == 100
    assert fit.tokens_within(0.001) == 0


def test_steps_of_one_size_tell_no_slope() -> None:
    fit = StepTimeFit()
    for number in range(40):
        fit = fit.with_step(64, 0.02 + number * 1e-3)
    assert fit.tokens_within(1.0) is None
