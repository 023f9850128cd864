"""Curves of what requests used, through the real scheduler: against replays through the real cache."""

from __future__ import annotations

from array import array
from random import Random

import pytest
from ledger_house import House

from pagefold.curves.prompt_cache import PromptCache
from pagefold.events import CacheConfigured
from pagefold.kv import POLICIES, Namespace, make_policy
from pagefold.observe import block_uses
from pagefold.observe.block_uses import BlockUses
from pagefold.observe.whatif import TIMES, asked_of, ghost_ratios, lru_curve_of, other_policies

SIZE = 4


def prompts(num: int, seed: int = 0) -> list[list[int]]:
    """Prompts that share beginnings: few of them often, most of them seldom."""
    random = Random(seed)
    heads = [[random.randrange(1000) for _ in range(random.randrange(4, 30))] for _ in range(24)]
    made: list[list[int]] = []
    for _ in range(num):
        head = (
            heads[min(int(random.expovariate(0.2)), 23)] if not made or random.random() < 0.6 else random.choice(made)
        )
        made.append([*head, *(random.randrange(1000) for _ in range(random.randrange(1, 12)))][:56])
    return made


def replayed(asked: list[list[int]], policy: str, num_blocks: int, block_size: int = SIZE) -> float:
    """The share of tokens found in full blocks, with a real cache of that size: slow, and one size at a time."""
    cache = PromptCache(num_blocks, 40, block_size, make_policy(policy))
    num_found = 0
    for prompt in asked:
        num_full = len(prompt) // block_size * block_size
        num_found += cache.use(array("i", prompt[:num_full]).tobytes(), num_full)
    return num_found / sum(map(len, asked))


def test_the_curve_is_what_real_caches_find_at_every_size():
    """The pool is small and requests come one by one: found in the tree or not, each block counts."""
    house = House(num_blocks=48)
    asked = prompts(120)
    for prompt in asked:
        house.ask(prompt)
    told = house.ledger.uses.told(None)
    curve = lru_curve_of(told.uses, SIZE)
    assert told.uses.rate == 1.0
    assert asked_of(told.uses) == (sum(map(len, asked)), sum(len(prompt) // SIZE for prompt in asked))
    for num_blocks in (1, 3, 10, 30, 48, 100, 300, 1000):
        assert curve.at(num_blocks * SIZE) == pytest.approx(replayed(asked, "lru", num_blocks), abs=1e-9)
    assert curve.at(1000 * SIZE) > curve.at(30 * SIZE) > 0.05


def test_answers_are_found_by_who_goes_on_from_them():
    house = House(num_blocks=64)
    said: list[int] = []
    for turn in range(4):
        prompt = [*said, *range(100 * turn, 100 * turn + 5)]
        name = house.ask(prompt, max_tokens=9)
        (record,) = house.ledger.records(name)
        said = list(array("i", record.text))
        assert record.num_hit_tokens // SIZE == max(0, (len(prompt) - 5 - 1)) // SIZE  # the last token has no K and V
    told = house.ledger.uses.told(None)
    in_blocks = [record.num_hit_tokens // SIZE * SIZE for record in house.ledger.all_records()]
    num_tokens = sum(record.num_prompt_tokens for record in house.ledger.all_records())
    assert lru_curve_of(told.uses, SIZE).at(64 * SIZE) == pytest.approx(sum(in_blocks) / num_tokens)


def test_a_request_that_comes_back_is_not_counted_again():
    house = House(num_blocks=12, max_num_seqs=4)
    for number in range(4):
        house.send([number] * 12, max_tokens=20)
    house.run()
    assert any(record.preemptions for record in house.ledger.all_records())
    told = house.ledger.uses.told(None)
    assert asked_of(told.uses) == (48, 12)


@pytest.mark.quick(every=12)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_ghost_that_sees_all_is_the_cache_itself(policy):
    house = House(num_blocks=32)
    asked = prompts(80, seed=3)
    for prompt in asked:
        house.ask(prompt)
    uses = house.ledger.uses.told(None).uses
    got = ghost_ratios(uses, lru_curve_of(uses, SIZE), [policy], 32)[policy]
    assert got == pytest.approx([replayed(asked, policy, round(times * 32)) for times in TIMES], abs=1e-9)


@pytest.mark.long
def test_a_sampled_curve_and_its_ghosts_are_near_whole_ones(monkeypatch):
    """A sample of a sixteenth, of prompts of 60 blocks of which most are seen once."""
    monkeypatch.setattr(block_uses, "_MOST_KEYS", 12_000)
    asked = prompts(4000, seed=5)
    uses = BlockUses(lambda: 0.0)
    uses.begin(CacheConfigured({}, 8000, 1, "lru"))
    random = Random(0)
    names: dict[tuple[int, ...], int] = {}
    for number, prompt in enumerate(asked):
        keys = [names.setdefault(tuple(prompt[: end + 1]), random.randrange(2**64)) for end in range(len(prompt))]
        uses.look_up(number, "", keys, len(prompt))
        uses.end(number)
    told = uses.told(None)
    assert told.uses.rate <= 1 / 16
    assert not told.uses.num_warm
    curve = lru_curve_of(told.uses, 1)
    for num_blocks in (500, 2000, 8000, 32_000):
        assert curve.at(num_blocks) == pytest.approx(replayed(asked, "lru", num_blocks, 1), abs=0.04)
    for policy in ("lru", "s3-fifo"):
        found = ghost_ratios(told.uses, curve, [policy], 2000)[policy]
        for ratio, times in zip(found, TIMES, strict=True):
            assert ratio == pytest.approx(replayed(asked, policy, round(2000 * times), 1), abs=0.05)
            assert policy != "lru" or ratio == pytest.approx(curve.at(round(2000 * times)), abs=0.001)


def test_a_tenant_s_curve_hangs_on_its_own_requests_alone():
    def curves(of_others: list[list[int]]) -> list[object]:
        house = House(num_blocks=64)
        one, two = (Namespace(model="m", tenant=tenant).key() for tenant in ("one", "two"))
        for prompt, other in zip(prompts(60), of_others, strict=True):
            house.ask(prompt, one)
            if other:
                house.ask(other, two, max_tokens=3)
        told = house.ledger.uses.told("one").uses
        return [[list(use.keys) for use in told.uses], told.rate, told.num_warm, asked_of(told)]

    alone = curves([[]] * 60)
    assert alone == curves(prompts(60)) == curves([[7] * 50] * 60)
    assert alone[3] == asked_of_all(60)


def asked_of_all(num: int) -> tuple[int, int]:
    asked = prompts(num)
    return sum(map(len, asked)), sum(len(prompt) // SIZE for prompt in asked)


def test_the_last_tenants_are_remembered():
    uses = BlockUses(lambda: 0.0)
    uses.begin(CacheConfigured({}, 100, 4, "lru"))
    for number in range(block_uses.MOST_TENANTS + 5):
        uses.look_up(number, f"t{number}", [number], 5)
    assert len(uses.tenants()) == block_uses.MOST_TENANTS
    assert uses.tenants()[0] == f"t{block_uses.MOST_TENANTS + 4}"
    assert not uses.told("t0").uses.uses
    assert uses.told("t9").uses.uses


def test_a_failure_ends_the_curve_and_nothing_else(monkeypatch, caplog):
    house = House(num_blocks=16)
    house.ask([1] * 9)
    monkeypatch.setattr(BlockUses, "_look_up", lambda *_: 1 / 0)
    house.ask([2] * 9)
    house.ask([3] * 9)
    assert house.ledger.uses.has_failed
    assert not house.ledger.has_failed
    assert caplog.text.count("no curve is told from now on") == 1
    assert len(house.ledger.uses.told(None).uses.uses) == 1


@pytest.mark.parametrize("num_prompts", [1, 5, 40])
def test_ghosts_in_a_cache_that_is_far_too_large_find_nothing_new(num_prompts: int) -> None:
    """Of so few blocks none may be in the sample, or one where less than one was to be expected."""
    random = Random(num_prompts)
    uses = BlockUses(lambda: 0.0)
    uses.begin(CacheConfigured({}, num_blocks=32_219, block_size=16))
    for number in range(num_prompts):
        uses.look_up(number, "", [random.getrandbits(64) for _ in range(2)], 33)
    told = uses.told(None)
    curve = lru_curve_of(told.uses, 16)
    for policy, ratios in ghost_ratios(told.uses, curve, other_policies("lru"), 32_219).items():
        assert ratios == [0.0] * len(TIMES), policy
