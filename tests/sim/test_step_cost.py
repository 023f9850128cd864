"""What a step takes: figures found again from steps that they made, files, and a calibration of a runner."""

from __future__ import annotations

import random

import pytest

from pagefold.errors import ConfigError
from pagefold.kv import KVCore
from pagefold.scheduler import Scheduler, SchedulerLimits
from pagefold.sim import LinearStepCost, NullRunner
from pagefold.sim.calibration import TimedRunner, calibrate
from pagefold.sim.step_cost import MeasuredStep, RooflineStepCost, fit_step_cost, read_step_cost, step_cost_json
from pagefold.steps import StepPlan

TRUE = LinearStepCost(step_s=0.03, token_s=4e-4, context_token_s=2e-6)


def measured(noise: float = 0.0) -> list[MeasuredStep]:
    rng = random.Random(0)
    steps = []
    for _ in range(200):
        num_computed = rng.choice([1, 4, 16, 32, 512])
        num_read = num_computed + rng.randrange(20_000)
        seconds = TRUE.step_s + num_computed * TRUE.token_s + num_read * TRUE.context_token_s
        steps.append(MeasuredStep(num_computed, num_read, seconds * rng.uniform(1 - noise, 1 + noise)))
    return steps


def test_figures_are_found_again():
    found = fit_step_cost(measured())
    assert found.step_s == pytest.approx(TRUE.step_s)
    assert found.token_s == pytest.approx(TRUE.token_s)
    assert found.context_token_s == pytest.approx(TRUE.context_token_s)


def test_noise_moves_them_little():
    found = fit_step_cost(measured(noise=0.1))
    assert found.step_s == pytest.approx(TRUE.step_s, rel=0.1)
    assert found.token_s == pytest.approx(TRUE.token_s, rel=0.1)


def test_no_figure_is_negative():
    """A device on which more context is faster does not exist: what the steps do not tell is 0."""
    found = fit_step_cost([MeasuredStep(1, 10, 0.02), MeasuredStep(1, 1000, 0.01), MeasuredStep(1, 500, 0.015)])
    assert min(found.step_s, found.token_s, found.context_token_s) == 0.0
    assert found.step_s + found.token_s == pytest.approx(0.014, rel=0.2)
    assert fit_step_cost([MeasuredStep(5, 5, 0.5)]).step_s == 0.5
    with pytest.raises(ConfigError, match="No step was measured"):
        fit_step_cost([])


def test_a_roofline_is_the_longer_of_two():
    plan = StepPlan(0, starts=[100], num_tokens=[10])
    plan.token_ids.extend(range(10))
    assert RooflineStepCost(step_s=1.0, token_s=0.01, context_token_s=0.01)(plan) == pytest.approx(1.0 + 1.1)
    assert RooflineStepCost(step_s=1.0, token_s=1.0, context_token_s=0.01)(plan) == 10.0


@pytest.mark.parametrize("cost", [TRUE, RooflineStepCost(step_s=1.0, token_s=1e-3, context_token_s=0.0)])
def test_a_file_keeps_them(tmp_path, cost):
    file = tmp_path / "cost.json"
    file.write_text(step_cost_json(cost, "a test"))
    assert read_step_cost(file) == cost


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"kind": "linear"}', '{"kind": "cubic", "step_s": 1, "token_s": 1, "context_token_s": 1}']
    + [
        f'{{"kind": "linear", "step_s": {bad}, "token_s": 0, "context_token_s": 0}}'
        for bad in ("-1", "NaN", "0", "1e9")
    ],
)
def test_what_is_none(tmp_path, content):
    file = tmp_path / "cost.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match="is no step cost"):
        read_step_cost(file)


def test_a_calibration_measures_what_steps_take(monkeypatch):
    """A runner whose clock says what the true cost says: the figures are found through the real scheduler."""
    now = 0.0

    class Runner(NullRunner):
        def run(self, plan):
            nonlocal now
            now += TRUE(plan)
            return super().run(plan)

    monkeypatch.setattr(TimedRunner.__init__, "__defaults__", (lambda: now,))
    scheduler = Scheduler(KVCore(2000, enable_prefix_caching=False), SchedulerLimits(64, 512))
    found = calibrate(scheduler, Runner(), vocab_size=100)
    assert found.step_s == pytest.approx(TRUE.step_s, rel=1e-6)
    assert found.token_s == pytest.approx(TRUE.token_s, rel=1e-6)
    assert found.context_token_s == pytest.approx(TRUE.context_token_s, rel=1e-3)
    assert not scheduler.has_work
