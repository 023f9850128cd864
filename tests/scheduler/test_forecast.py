"""Forecasts of outputs: bounds, tenants apart, what they know of kinds, and how often their intervals hold."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagefold.events import OutputForecastChecked
from pagefold.request import Request, StopRule
from pagefold.sampling import SamplingParams
from pagefold.scheduler.forecast import LONGEST, OutputForecasts
from pagefold.scheduler.lengths import LEAST_LENGTHS, Lengths

SAMPLING = SamplingParams(temperature=0.0, max_tokens=None)


def asked(max_tokens: int, prompt: tuple[int, ...] = (1, 2, 3), *, tenant: str = "") -> Request:
    """Return a request."""
    rule = StopRule(frozenset(), len(prompt) + max_tokens)
    return Request("r", prompt, SAMPLING, stop=rule, tenant=tenant)


def ended(forecasts: OutputForecasts, request: Request, num_tokens: int, reason: str = "stop") -> None:
    """End a request with so many tokens."""
    request.token_ids.extend([0] * (num_tokens - request.num_output_tokens))
    request.finish_reason = reason
    forecasts.ended(request)


def taught(lengths: list[int], max_tokens: int = 1000, *, prompt: tuple[int, ...] = (1, 2, 3), tenant: str = ""):
    """Return forecasts that have seen outputs of such lengths."""
    forecasts = OutputForecasts()
    for length in lengths:
        ended(forecasts, asked(max_tokens, prompt, tenant=tenant), length)
    return forecasts


# Lengths.


@given(st.lists(st.tuples(st.integers(1, 30), st.booleans()), max_size=40), st.integers(0, 30))
def test_quantiles_are_those_of_the_product_limit_estimate(told, beyond):
    lengths = Lengths(20)
    for length, is_cut in told:
        lengths.add(length, is_cut=is_cut)
    kept = [(length, is_cut) for length, is_cut in told[-20:] if length > beyond]
    assert len(lengths) == min(20, len(told))
    assert lengths.num_beyond(beyond) == len(kept)
    shares = (0.1, 0.5, 0.9)
    expected = []
    for share in shares:
        found = None
        for at in sorted({length for length, is_cut in kept if not is_cut}):
            surviving = 1.0
            for other in sorted({length for length, is_cut in kept if not is_cut and length <= at}):
                at_risk = sum(length >= other for length, _ in kept)
                ends = sum(length == other and not is_cut for length, is_cut in kept)
                surviving *= 1 - ends / at_risk
            if 1 - surviving >= share - 1e-9:
                found = at
                break
        expected.append(found)
    assert lengths.quantiles(shares, beyond) == expected


def test_who_was_cut_off_would_have_been_longer():
    lengths = Lengths(64)
    for _ in range(10):
        lengths.add(10, is_cut=True)
    assert lengths.quantiles((0.5,)) == [None]
    for _ in range(10):
        lengths.add(40, is_cut=False)
    assert lengths.quantiles((0.5,)) == [40]


# Forecasts.


@given(
    st.lists(st.tuples(st.integers(1, 60), st.sampled_from(["stop", "length", "abort", "timeout", "error"]))),
    st.integers(0, 50),
    st.integers(0, 50),
)
def test_no_forecast_is_beyond_what_may_be_or_below_what_is(outputs, max_tokens, so_far):
    forecasts = OutputForecasts()
    for length, reason in outputs:
        ended(forecasts, asked(64), length, reason)
    request = asked(max_tokens)
    forecast = forecasts.forecast(request)
    least = min(1, max_tokens)
    assert least <= forecast.likely_tokens <= forecast.most_tokens <= max_tokens
    if forecast.interval is not None:
        assert least <= forecast.interval[0] <= forecast.interval[1] <= max_tokens
    so_far = min(so_far, max_tokens)
    request.token_ids.extend([0] * so_far)
    assert min(so_far + 1, max_tokens) <= forecasts.renewed(request) <= max_tokens


def test_without_data_an_output_is_as_long_as_it_may_be():
    forecasts = taught([5] * (LEAST_LENGTHS - 1))
    assert forecasts.forecast(asked(1000)) == (1000, 1000, None) == LONGEST.forecast(asked(1000))
    ended(forecasts, asked(1000), 5)
    assert forecasts.forecast(asked(1000)) == (5, 5, (5, 5))


@given(st.lists(st.integers(1, 100), max_size=30), st.lists(st.integers(1, 100), min_size=1, max_size=30))
def test_a_tenant_learns_nothing_from_another(own, others):
    alone = taught(own)
    for length in others:
        ended(alone, asked(1000, tenant="other"), length)
    assert alone.forecast(asked(1000)) == taught(own).forecast(asked(1000))
    assert alone.forecast(asked(1000, tenant="third")).interval is None


def test_many_salts_push_out_nobody_elses_lengths():
    forecasts = taught([10] * 20)
    for salt in range(300):
        request = asked(1000, tenant="other")
        request.namespace = salt.to_bytes(2, "big")
        ended(forecasts, request, 1)
    assert forecasts.forecast(asked(1000)).most_tokens == 10


def test_what_begins_alike_is_forecast_by_itself():
    forecasts = taught([10] * 20, prompt=(1, 2, 3))
    for _ in range(20):
        ended(forecasts, asked(1000, (7, 8, 9)), 300)
    assert forecasts.forecast(asked(1000, (1, 2, 3))).likely_tokens == 10
    assert forecasts.forecast(asked(1000, (7, 8, 9))).likely_tokens == 300
    assert forecasts.forecast(asked(1000, (5,))).most_tokens == 300  # as all of the tenant


def test_prompts_that_come_once_do_not_push_out_those_that_come_again():
    forecasts = taught([10] * 20, prompt=(1, 2, 3))
    for place in range(500):
        ended(forecasts, asked(1000, (10_000 + place,)), 300)
    assert forecasts.forecast(asked(1000, (1, 2, 3))).likely_tokens == 10
    (tenant,) = forecasts._tenants.values()
    assert len(tenant.on_trial) + len(tenant.known) <= 64


def test_what_is_kept_of_tenants_is_bounded():
    forecasts = OutputForecasts()
    for place in range(1000):
        ended(forecasts, asked(10, tenant=str(place).encode()), 5)
    assert len(forecasts._tenants) == 256


def test_who_gets_beyond_its_forecast_is_forecast_among_those_that_did():
    forecasts = taught([10] * 30 + [100] * 20)
    request = asked(1000)
    assert forecasts.forecast(request).likely_tokens == 100
    forecasts = taught([10] * 50 + [100] * 10)
    assert forecasts.forecast(request).likely_tokens == 10
    request.token_ids.extend([0] * 11)
    assert forecasts.renewed(request) == 100
    request.token_ids.extend([0] * 100)
    assert forecasts.renewed(request) == 223  # nobody was as long: twice as many, and one


def test_faults_say_nothing():
    forecasts = taught([10] * 20)
    for _ in range(50):
        request = asked(1000)
        request.error = "3 steps failed"
        ended(forecasts, request, 900, "error")
    assert forecasts.forecast(asked(1000)).most_tokens == 10


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("drift", ["none", "slow", "jump"])
@pytest.mark.parametrize("seed", range(3))
def test_intervals_hold_8_in_10(drift, seed):
    rng, told = Random(seed), []
    forecasts = OutputForecasts(told.append)
    running = []
    for place in range(3000):
        scale = {"none": 5.0, "slow": 5.0 + place / 1500, "jump": 5.0 if place % 1000 < 500 else 4.0}[drift]
        request = asked(2000, (place,))
        forecasts.forecast(request)
        running.append((request, max(1, min(2000, round(rng.lognormvariate(scale, 1.0))))))
        if len(running) > 30:
            request, length = running.pop(rng.randrange(30))
            ended(forecasts, request, length, "length" if length == 2000 else "stop")
    assert all(isinstance(event, OutputForecastChecked) for event in told)
    assert 0.75 <= sum(event.is_within for event in told) / len(told) <= 0.85


def test_an_interval_that_was_not_stated_is_not_told_of():
    told = []
    forecasts = OutputForecasts(told.append)
    for _ in range(LEAST_LENGTHS):
        request = asked(100)
        forecasts.forecast(request)
        ended(forecasts, request, 5)
    assert not told
    request = asked(100)
    forecasts.forecast(request)
    ended(forecasts, request, 50)
    assert [event.is_within for event in told] == [False]
    request = asked(100)
    forecasts.forecast(request)
    ended(forecasts, request, 7, "abort")  # it would have been longer: nobody knows whether its interval held
    assert len(told) == 1
