"""Token rates: a bucket a tenant, whose clock is passed in; and what a key file gives."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagefold.config import Account
from pagefold.engine.token_rates import NO_RATES, TokenRate, TokenRates
from pagefold.errors import RateLimitError
from pagefold.server.rates import rates_of


class Clock:
    """Tells what it is set to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def refused(rates: TokenRates, tenant: str, num_tokens: int) -> RateLimitError:
    with pytest.raises(RateLimitError) as caught:
        rates.enter(tenant, num_tokens)
    return caught.value


def test_a_burst_and_then_its_rate():
    clock = Clock()
    rates = TokenRates({"a": TokenRate(10.0, 100.0)}, clock)
    rates.enter("a", 60)
    rates.enter("a", 40)
    error = refused(rates, "a", 25)
    assert error.retry_after_s == 3
    for said in ("25 tokens", "0 are left", "10 a second", "at most 100 at once", "Try again in 3 s"):
        assert said in str(error)
    clock.now += 2.4
    assert refused(rates, "a", 25).retry_after_s == 1
    clock.now += 0.2
    rates.enter("a", 25)
    rates.enter("b", 10**6)  # has no rate


def test_outputs_are_charged_when_they_are_made_and_the_next_request_waits_for_them():
    clock = Clock()
    rates = TokenRates({"a": TokenRate(10.0, 100.0)}, clock)
    rates.enter("a", 10)
    for _ in range(190):
        rates.spend("a", 1)
    assert refused(rates, "a", 1).retry_after_s == 11, "100 below 0, and one more"


def test_a_prompt_larger_than_the_burst_waits_for_a_full_bucket():
    clock = Clock()
    rates = TokenRates({"a": TokenRate(10.0, 100.0)}, clock)
    rates.enter("a", 1000)
    clock.now += 90.0
    error = refused(rates, "a", 1000)
    assert error.retry_after_s == 10
    assert "need a full bucket" in str(error)
    assert "full bucket" not in str(refused(rates, "a", 95))
    clock.now += 10.1
    rates.enter("a", 1000)


def test_nobody_is_sent_away_for_longer_than_an_hour():
    rates = TokenRates({"a": TokenRate(0.001, 1e12)}, Clock())
    rates.enter("a", 10**12)
    assert refused(rates, "a", 10**11).retry_after_s == 3600


def test_what_is_given_back_can_be_used_again():
    rates = TokenRates({"a": TokenRate(10.0, 100.0)}, Clock())
    rates.enter("a", 100)
    rates.spend("a", -100)
    rates.enter("a", 100)


@given(st.lists(st.tuples(st.floats(-1e9, 1e9), st.integers(1, 300)), max_size=40))
def test_a_clock_that_jumps_gives_no_more_than_its_way_ahead(jumps: list[tuple[float, int]]):
    """Whatever the clock does: no more than the burst at once, and behind that what time has passed forward."""
    clock = Clock()
    rate = TokenRate(10.0, 100.0)
    rates = TokenRates({"a": rate}, clock)
    num_charged, passed_s = 0.0, 0.0
    for jump_s, num_tokens in jumps:
        clock.now += jump_s
        passed_s += max(0.0, jump_s)
        try:
            rates.enter("a", num_tokens)
        except RateLimitError:
            continue
        num_charged += num_tokens
        assert (
            num_charged <= rate.burst_tokens + passed_s * rate.tokens_per_s + max(0, num_tokens - rate.burst_tokens) + 1
        )


def test_what_a_key_file_gives():
    slow = Account(key="k", tenant="a", tokens_per_s=2.0)
    assert rates_of([Account(key="j", tenant="b", weight=2.0)], Clock()) is NO_RATES
    rates = rates_of([slow, Account(key="j", tenant="b")], Clock())
    rates.enter("a", 120)
    assert refused(rates, "a", 10).retry_after_s == 5
    rates.enter("b", 10**6)
