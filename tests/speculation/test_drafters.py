"""Drafters: what they guess of a request's own text, of what is expected, and of what its tenant has cached."""

from __future__ import annotations

from random import Random

import pytest

from pagefold.errors import InvalidRequestError
from pagefold.kv import KVCore, Namespace
from pagefold.request import Request, StopRule
from pagefold.sampling import SamplingParams
from pagefold.scheduler import Scheduler, SchedulerLimits
from pagefold.sim import NullRunner
from pagefold.speculation import NgramDrafter, SpeculativeParams, TreeDrafter
from pagefold.speculation.kinds import NUM_KINDS, OF_MODEL, kind_of
from pagefold.speculation.own_text import OwnText

NAMESPACES = {tenant: Namespace(model="m", tenant=tenant).key() for tenant in ("a", "b")}


def request_of(prompt, name="r", tenant="a", predicted=(), max_tokens=64):
    return Request(
        name,
        prompt,
        SamplingParams(max_tokens=None),
        stop=StopRule(frozenset(), len(prompt) + max_tokens),
        namespace=NAMESPACES[tenant],
        predicted=predicted,
    )


def drafts(drafter, request, num_tokens=4):
    (draft,) = drafter.draft([request], [num_tokens])
    return draft.token_ids.tolist()


def test_ngram_finds_the_last_place_of_the_longest_gram():
    drafter = NgramDrafter(2, 3)
    assert drafts(drafter, request_of([1, 2, 3, 70, 9, 2, 3, 80, 1, 2, 3])) == [70, 9, 2, 3]
    assert drafts(drafter, request_of([8, 2, 3, 70, 9, 2, 3, 80, 1, 2, 3], "other")) == [80, 1, 2, 3]
    assert drafts(drafter, request_of([1, 2, 3], "none")) == []


def test_ngram_asks_for_as_many_equal_tokens_as_it_is_told():
    text = [1, 2, 3, 70, 9, 9, 2, 3]
    assert drafts(NgramDrafter(2, 2), request_of(text)) == [70, 9, 9, 2]
    assert drafts(NgramDrafter(3, 5), request_of(text)) == []


@pytest.mark.parametrize("seed", range(3))
def test_own_text_says_what_a_search_says(seed):
    """Beside a slow search: the last earlier place of the longest gram that is there."""
    random = Random(seed)
    sizes = random.choice([(2,), (5, 2), (4, 3, 2), (1,)])
    text, tokens = OwnText(sizes), request_of([random.randrange(5)]).token_ids
    num_found = 0
    for _ in range(600):
        tokens.extend(random.choices(range(5), k=random.randrange(1, 4)))
        found = text.after(tokens, 6)
        expected = None
        for size in sizes:
            gram = tokens[-size:]
            places = [at for at in range(len(tokens) - size) if tokens[at : at + size] == gram]
            if len(gram) == size and places:
                expected = tokens[places[-1] + size : places[-1] + size + 6].tobytes()
                break
        if found is not None:
            num_found += 1
            longest = len(sizes) == 1 or found.num_matched >= sizes[0]
            assert not longest or found.packed == expected
            assert expected is not None
    assert num_found > 500


def test_what_is_expected_is_searched_too():
    predicted = (50, 51, 52, 53, 54, 55)
    for drafter in (NgramDrafter(2, 3), TreeDrafter(KVCore(8, block_size=4))):
        assert drafts(drafter, request_of([1, 51, 52], predicted=predicted)) == [53, 54, 55, 1]


def run(scheduler):
    runner = NullRunner()
    while scheduler.has_work:
        scheduler.apply(runner.run(scheduler.schedule(0.0)))


def test_tree_finds_what_the_tenant_has_cached_and_others_find_nothing():
    core = KVCore(64, block_size=4)
    drafter = TreeDrafter(core)
    scheduler = Scheduler(core, SchedulerLimits(4, 64))
    told = list(range(100, 130))
    scheduler.add(request_of(told, "first", max_tokens=1))
    run(scheduler)
    assert drafts(drafter, request_of([1, 2, *told[10:15]], "second")) == told[15:19]
    assert drafts(drafter, request_of([1, 2, *told[10:15]], "third", tenant="b")) == []
    assert drafts(drafter, request_of([*told[:3]], "fourth", tenant="b")) == []
    drafter.forget("second")
    drafter.forget("nobody")


def test_tree_goes_on_along_the_same_path_first():
    core = KVCore(64, block_size=4)
    drafter = TreeDrafter(core)
    scheduler = Scheduler(core, SchedulerLimits(4, 64))
    path = [*range(10, 18), 20, 21, 22, 23, 24, 25, 26, 27]
    scheduler.add(request_of(path, "first", max_tokens=1))
    scheduler.add(request_of([90, 91, 92, 93, 16, 17, 20, 21, 60, 61, 62, 63], "newer", max_tokens=1))
    run(scheduler)
    same = request_of(path[:10], "same")
    scheduler.add(same)
    scheduler.schedule(0.0)
    assert same.cache.num_published == 2
    assert drafts(drafter, same) == [22, 23, 24, 25]
    assert drafts(drafter, request_of([1, *path[6:10]], "other")) == [60, 61, 62, 63]


def test_kinds_ascend_with_what_agrees():
    kinds = [kind_of(num) for num in range(1, 40)]
    assert kinds == sorted(kinds)
    assert (kinds[0], kinds[-1], NUM_KINDS - 1) == (0, OF_MODEL - 1, OF_MODEL)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"method": "eagle"}, "method"),
        ({"method": 3}, "method"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens"),
        ({"num_speculative_tokens": 33}, "num_speculative_tokens"),
        ({"num_speculative_tokens": True}, "num_speculative_tokens"),
        ({"method": "ngram", "prompt_lookup_min": 0}, "prompt_lookup_min"),
        ({"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 3}, "prompt_lookup_max"),
        ({"prompt_lookup_max": 99}, "prompt_lookup_max"),
        ({"draft_tensor_parallel_size": 1}, "draft_tensor_parallel_size"),
    ],
)
def test_what_cannot_be_is_refused_with_what_works(given, field):
    with pytest.raises(InvalidRequestError, match=field) as refused:
        SpeculativeParams.of(given).over(None)
    assert refused.value.param == f"speculative_config.{field}"
    assert refused.value.remedy
