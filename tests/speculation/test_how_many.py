"""How many drafts: beside a search through all numbers, and what is learned of how often they are right."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest

from pagefold.speculation import Acceptance, StepCosts, how_many
from pagefold.speculation.how_many import Chance
from pagefold.speculation.kinds import NUM_KINDS


def expected(chances, numbers):
    return sum(sum(one.is_right**at for at in range(1, num + 1)) for one, num in zip(chances, numbers, strict=True))


@pytest.mark.parametrize("seed", range(30))
def test_no_other_numbers_bring_more_tokens_a_second(seed):
    random = Random(seed)
    chances = [Chance(random.random(), random.randrange(5)) for _ in range(random.randrange(1, 5))]
    num_others = random.randrange(4)
    sizes = (1, 2, 4, 8, 16)
    seconds, now = [], 1.0
    for _ in sizes:
        now += random.random() * random.choice((0.1, 1.0))
        seconds.append(now)
    costs = StepCosts(sizes, seconds)
    num_tokens = len(chances) + num_others
    most = random.choice((2, 5, 99))
    chosen = how_many(costs, num_tokens, len(chances), chances, most)
    assert sum(chosen) <= most

    def rate(numbers):
        return (len(chances) + expected(chances, numbers)) / costs.of(num_tokens + sum(numbers))

    every = product(*(range(one.num_drafts + 1) for one in chances))
    best, without = max(rate(numbers) for numbers in every if sum(numbers) <= most), rate([0] * len(chances))
    if best > 1.02 * without:
        assert rate(chosen) == pytest.approx(best)
    else:  # that may be an error of what was measured
        assert not any(chosen)


@pytest.mark.parametrize("seed", range(20))
def test_what_it_takes_to_make_drafts_counts(seed):
    """No number of drafts for all requests alike, made one step for each together, brings more tokens a second."""
    random = Random(seed)
    num, chance = random.randrange(1, 5), random.random()
    costs = StepCosts((1, 4, 32), (1.0, 1.0 + random.random(), 3.0 + 3 * random.random()))
    making = StepCosts((1, 4), (0.3 * random.random(), 0.3 + 0.2 * random.random()))
    chances = [Chance(chance, 6, making)] * num
    chosen = how_many(costs, num, num, chances, 99)

    def rate(numbers):
        making_s = 0.0
        for depth in range(1, 7):
            rows = sum(number >= depth for number in numbers)
            making_s += making.of(rows) if rows else 0.0
        return (num + expected(chances, numbers)) / (costs.of(num + sum(numbers)) + making_s)

    assert rate(chosen) >= max(rate([depth] * num) for depth in range(7)) / 1.02 - 1e-9
    assert not any(chosen) or rate(chosen) > 1.02 * rate([0] * num)
    for_nothing = how_many(costs, num, num, [Chance(chance, 6)] * num, 99)
    assert sum(chosen) <= sum(for_nothing)


def test_drafts_that_cost_nothing_are_all_taken_and_those_that_cost_a_token_none():
    free, dear = StepCosts((1, 100), (1.0, 1.0)), StepCosts((1, 2), (1.0, 2.0))
    chances = [Chance(0.5, 7), Chance(0.1, 3), Chance(0.9, 0)]
    assert how_many(free, 3, 3, chances, 64) == [7, 3, 0]
    assert how_many(dear, 3, 3, chances, 64) == [0, 0, 0]
    assert how_many(free, 3, 0, [], 64) == []


def test_costs_lie_on_straight_lines_and_never_fall():
    costs = StepCosts((1, 2, 4, 8), (1.0, 2.5, 1.5, 4.0))
    assert [costs.of(num) for num in (1, 2, 3, 4, 6, 8, 12)] == [1.0, 2.0, 2.0, 2.0, 3.0, 4.0, 6.0]


@pytest.mark.parametrize("seed", range(20))
def test_noise_of_what_was_measured_is_evened_out(seed):
    """No other costs that never fall are nearer to what was measured."""
    random = Random(seed)
    measured = [random.randrange(1, 6) for _ in range(5)]
    costs = StepCosts(range(5), measured)
    found = [costs.of(num) for num in range(5)]

    def distance(numbers):
        return sum((one - other) ** 2 for one, other in zip(numbers, measured, strict=True))

    assert found == sorted(found)
    rising = (numbers for numbers in product([half / 2 for half in range(2, 11)], repeat=5))
    assert distance(found) <= min(distance(numbers) for numbers in rising if list(numbers) == sorted(numbers)) + 1e-9


def test_what_is_learned_is_learned_of_a_kind_and_of_a_request_more():
    acceptance = Acceptance()
    first = acceptance.chance("a", 2)
    for _ in range(50):
        acceptance.learn("a", 2, 4, 4)
    assert acceptance.chance("a", 2) > 0.95
    assert acceptance.chance("b", 2) > first
    for _ in range(6):
        acceptance.learn("b", 2, 4, 0)
    assert acceptance.chance("b", 2) < 0.4
    assert acceptance.chance("a", 2) > 0.9
    acceptance.forget("b")
    acceptance.forget("nobody")
    assert acceptance.chance("b", 2) > 0.6
    assert all(0 < acceptance.chance("c", kind) < 1 for kind in range(NUM_KINDS))


def test_behind_a_wrong_draft_nothing_is_learned():
    one, other = Acceptance(), Acceptance()
    one.learn("a", 1, 8, 0)
    other.learn("a", 1, 1, 0)
    assert one.chance("a", 1) == other.chance("a", 1)
