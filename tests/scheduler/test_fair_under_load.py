"""Fair shares beside what else decides who is let in: growth that is expected, and limits of prefills."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_fair_shares import FairHouse

from pagefold.kv import audit
from pagefold.request import RequestStatus
from pagefold.scheduler import ADMISSION_RULES, PrefillLimits
from pagefold.scheduler.making_way import MOST_WAYS_MADE

GROWTH = [rule for rule in ADMISSION_RULES if rule != "prompt"]


def crowded(admission: str, asked: tuple[int, int]) -> FairHouse:
    """A house full of what one tenant's requests hold or will; another tenant asks for so many tokens, and outputs."""
    house = FairHouse(90, seqs=16, budget=128, admission=admission)
    for _ in range(12):
        house.send("a", 8, 24)
    for _ in range(4):
        house.step()
    house.send("b", *asked)
    return house


@pytest.mark.parametrize("admission", GROWTH)
@pytest.mark.parametrize("asked", [(40, 200), (100, 100), (8, 300), (200, 20), (8, 24), (30, 60)])
def test_nobody_makes_way_in_vain_beside_growth(admission, asked):
    """Who made way did so for somebody who runs then; and where not all can be found, nobody does."""
    house = crowded(admission, asked)
    (head,) = [one for one in house.scheduler.waiting if one.tenant == "b"]
    for _ in range(4):
        before = len(house.made_way)
        house.step()
        if len(house.made_way) > before:
            assert head.status is RequestStatus.RUNNING
        audit(house.core)
    house.run()


@pytest.mark.parametrize("admission", GROWTH)
def test_several_make_way_at_once_for_a_place_beside_growth(admission):
    """One alone would leave no room for what those that stay will take yet."""
    house = crowded(admission, (30, 60))
    house.step()
    assert len(house.made_way) > 1
    assert any(one.tenant == "b" for one in house.scheduler.running)


LENGTHS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=8)


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("prefills", [PrefillLimits(), PrefillLimits(2, 1, 8)], ids=["no limits", "limits"])
@pytest.mark.parametrize("admission", sorted(ADMISSION_RULES))
@settings(max_examples=10, deadline=None)
@example(lengths=[(8, 20)], num_prompt=1, num_new=1)
@given(lengths=LENGTHS, num_prompt=st.integers(1, 60), num_new=st.integers(1, 20))
def test_a_quiet_tenant_waits_for_no_more_than_one_of_a_burst(prefills, admission, lengths, num_prompt, num_new):
    """Others come without end, of any lengths. It is first as soon as it comes, and somebody ends, or makes way.

    Bound: steps until its first token are at most as many as the longest of the burst computes tokens, one at least in
    each; and as many as its own prompt takes beside the others, who leave it what is left of a step.
    """
    house = FairHouse(48, seqs=4, budget=24, prefills=prefills, admission=admission)
    num_sent, longest = 0, max(map(sum, lengths))
    for round_ in range(4):
        for _ in range(3 + round_):
            house.step()
            while len(house.scheduler.waiting) < 12:
                house.send("a", *lengths[num_sent % len(lengths)])
                num_sent += 1
        quiet = house.send("b", num_prompt, num_new)
        num_steps = 0
        while not quiet.num_output_tokens:
            house.step()
            num_steps += 1
            assert num_steps <= longest + num_prompt, house.names(house.scheduler.running)
            while len(house.scheduler.waiting) < 12:
                house.send("a", *lengths[num_sent % len(lengths)])
                num_sent += 1
        while quiet.status is not RequestStatus.FINISHED:
            house.step()
    audit(house.core)
    assert max(Counter(house.made_way).values(), default=0) <= MOST_WAYS_MADE
