"""The ledger names the right cause: each of them planted once, by a real scheduler and core."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

import pytest
from ledger_house import NS, House

from pagefold.events import EvictionPolicySwitched, PrefixLookup, RequestAdded, RequestFinished, RequestPreempted
from pagefold.kv import KeepRule, Namespace
from pagefold.kv.names import digest_of
from pagefold.observe.misses import Cause
from pagefold.observe.seen_paths import State, key_of
from pagefold.request import WarmUp, session_ref

if TYPE_CHECKING:
    from collections.abc import Sequence

TEXT = list(range(100, 140))


def other(salt: str = "", tenant: str = "", layout: str = "") -> bytes:
    return Namespace(model="m", cache_salt=salt, tenant=tenant, layout=layout).key()


def test_the_first_prompt_was_never_seen() -> None:
    house = House()
    assert house.causes(house.ask(TEXT)) == [(0, 40, "never_seen")]


def test_the_last_token_is_always_computed() -> None:
    house = House()
    house.ask(TEXT)
    assert house.causes(house.ask(TEXT)) == [(39, 40, "last_token")]
    assert house.causes(house.ask(TEXT[:30])) == [(29, 30, "last_token")]


def test_what_goes_on_behind_all_before_was_never_seen() -> None:
    house = House()
    house.ask(TEXT[:32])
    assert house.causes(house.ask([*TEXT, 7])) == [(32, 41, "never_seen")]


@pytest.mark.parametrize("at", [1, 3, 4, 13, 16, 31])
def test_a_prompt_that_differs_says_where_and_from_what(at: int) -> None:
    house = House()
    first = house.ask(TEXT)
    second = house.ask([*TEXT[:at], 7, *TEXT[at + 1 :]])
    (miss,) = house.misses(second)
    assert (miss.start, miss.end, miss.cause) == (at, 40, Cause.DIFFERS)
    assert miss.difference is not None
    assert (miss.difference.request_id, miss.difference.token) == (first, at)
    before = miss.difference.num_before
    own, others = array("i", miss.difference.own), array("i", miss.difference.other)
    assert list(own[:before]) == list(others[:before]) == TEXT[max(0, at - 12) : at]
    assert own[before] == 7
    assert others[before] == TEXT[at]


def test_a_prompt_that_shares_nothing_was_never_seen() -> None:
    house = House()
    house.ask(TEXT)
    assert house.causes(house.ask([7, *TEXT])) == [(0, 41, "never_seen")]


def test_of_several_the_nearest_is_named() -> None:
    house = House()
    house.ask([*TEXT[:6], *range(20)])
    near = house.ask([*TEXT[:10], *range(20)])
    house.ask([*TEXT[:2], *range(50, 70)])
    (miss,) = house.misses(house.ask(TEXT))
    assert miss.difference is not None
    assert (miss.start, miss.difference.request_id, miss.difference.token) == (10, near, 10)


def test_an_output_is_gone_on_from() -> None:
    """The next turn of a conversation: what was sampled last was never computed, and its block was not full."""
    house = House()
    first = house.ask(TEXT[:16], max_tokens=6)
    (record,) = house.ledger.records(first)
    said = list(array("i", record.text))
    assert len(said) == 22
    assert house.causes(house.ask([*said, 1, 2, 3])) == [(20, 22, "partial_block"), (22, 25, "never_seen")]


def test_what_was_evicted_says_for_whom_and_by_what() -> None:
    house = House(num_blocks=12)
    house.ask(TEXT[:16])
    house.clock.advance(50)
    taker = house.ask(range(47))
    house.clock.advance(7)
    (miss,) = house.misses(house.ask(TEXT[:16]))
    assert (miss.start, miss.end, miss.cause) == (0, 16, Cause.EVICTED)
    assert miss.eviction is not None
    assert miss.eviction.request_id == taker
    assert (miss.eviction.policy, miss.eviction.score) != ("", None)
    assert 7 <= miss.eviction.ago_s <= 10


def test_what_a_session_edited_away_says_so() -> None:
    house = House(num_blocks=16)
    session = session_ref("acme", "s")
    house.ask(TEXT[:16], session=session)
    house.ask([*TEXT[:4], *range(500, 512)], session=session)  # edited: twelve tokens are superseded
    house.ask(range(600, 648))
    assert house.causes(house.ask(TEXT[:16])) == [(4, 16, "superseded")]
    (miss,) = house.misses(house.ask(TEXT[:16]))
    assert miss.cause is Cause.LAST_TOKEN, "what came back has lost its mark"


def test_what_a_session_is_expected_back_for_last_says_so() -> None:
    house = House(num_blocks=12)
    house.ask(TEXT[:16], session=session_ref("acme", "s"), returns_in_s=300.0)
    house.ask(range(500, 516), session=session_ref("acme", "t"), returns_in_s=30.0)
    house.ask(range(600, 619), session=session_ref("acme", "u"), returns_in_s=30.0)
    assert {cause for _, _, cause in house.causes(house.ask(TEXT[:16]))} >= {"session"}


def test_an_eviction_is_by_whom_auto_followed_then() -> None:
    house = House(num_blocks=12, policy="auto")
    texts = [[number] * 16 for number in (1, 2, 3)]
    for number, (text, policy) in enumerate(zip(texts, ("learned", "lru", "2q"), strict=True)):
        if number:
            house.emit(EvictionPolicySwitched(policy, "learned", 0.5, 0.25))
        house.ask(text)
        house.clock.advance(5)
        house.ask(range(100 * number, 100 * number + 47))
        house.clock.advance(5)
    found = [house.misses(house.ask([*text, 9]))[0].eviction for text in texts]
    assert [None if one is None else one.policy for one in found] == ["learned", "lru", "2q"]


def test_a_tail_may_be_evicted_alone() -> None:
    house = House(num_blocks=12)
    house.ask(TEXT[:32])
    house.ask(range(24))
    causes = house.causes(house.ask([*TEXT[:32], 1]))
    assert causes[-1] == (32, 33, "never_seen")
    assert causes[0][2] == "evicted"
    assert causes[0][1] == 32
    assert len(causes) == 2


def test_a_pin_that_has_expired() -> None:
    house = House(num_blocks=12)
    house.ask(TEXT[:16], warm_up=WarmUp(pin=True, ttl_s=10.0))
    house.clock.advance(20)
    house.ask(range(47))
    assert house.causes(house.ask(TEXT[:16])) == [(0, 16, "pin_expired")]


def test_a_reset() -> None:
    house = House()
    house.ask(TEXT[:16])
    house.core.forgetting.reset()
    assert house.causes(house.ask([*TEXT[:16], 1])) == [(0, 16, "reset"), (16, 17, "never_seen")]


@pytest.mark.parametrize(
    ("namespace", "fields"),
    [(other(salt="s"), ("cache_salt",)), (other(layout="l", salt="s"), ("kv_quality", "cache_salt"))],
)
def test_other_terms_are_named(namespace: bytes, fields: Sequence[str]) -> None:
    house = House()
    house.ask(TEXT[:18], namespace)
    first, last = house.misses(house.ask(TEXT[:18]))
    assert (first.start, first.end, first.cause, first.fields) == (0, 16, Cause.OTHER_NAMESPACE, tuple(fields))
    assert (last.start, last.end, last.cause) == (16, 18, Cause.NEVER_SEEN)


def test_another_tenant_is_nobody() -> None:
    house = House()
    house.ask(TEXT[:18], other(tenant="a"))
    second = house.ask(TEXT[:18], other(tenant="b"))
    assert house.causes(second) == [(0, 18, "never_seen")]
    (record,) = house.ledger.records(second)
    assert record.admins_misses is not None, "it is the first of its tenant"
    assert record.admins_misses[0].fields == ("tenant",)
    assert house.causes(house.ask(TEXT[:18])) == [(0, 18, "never_seen")]


def test_two_at_once_compute_the_same() -> None:
    """The second may lean on what the first writes in this step, and not on what that will write in the next one."""
    house = House(max_num_batched_tokens=16)
    house.send(TEXT)
    second = house.send(TEXT)
    house.run()
    causes = house.causes(second)
    assert causes[0][2] == "computing"
    assert causes[0][1] == 40


def test_logprobs_of_a_prompt() -> None:
    house = House()
    house.ask(TEXT)
    tokens = array("i", TEXT)
    house.emit(
        RequestAdded(("x",), (tokens,), 40, 41, NS, 0.0, None, 0, has_prompt_logprobs=True, returns_in_s=None, pin=None)
    )
    house.emit(PrefixLookup("x", 40, 0, after_preemption=False))
    assert house.causes("x") == [(0, 40, "prompt_logprobs")]


def test_what_the_model_said_is_no_prompt() -> None:
    """Who asks something else behind the same text has not changed it; who changes an answer has."""
    house = House()
    first = house.ask(TEXT[:16], max_tokens=10)
    (record,) = house.ledger.records(first)
    said = list(array("i", record.text))
    assert house.causes(house.ask([*TEXT[:16], 1, 2, 3])) == [(16, 19, "never_seen")]
    assert house.causes(house.ask([*said[:21], 1, 2, 3])) == [(21, 24, "differs")]


def test_a_window_that_is_gone() -> None:
    """A layer keeps 8 tokens: behind its last window the prompt can be gone on from, and in its middle it cannot."""
    house = House(num_blocks=40, rules=(KeepRule(), KeepRule(8)))
    house.ask(TEXT[:33])
    house.ask(range(500, 560))
    causes = house.causes(house.ask([*TEXT[:20], *range(20)]))
    assert causes == [(0, 8, "window_gone"), (8, 20, "evicted"), (20, 40, "differs")]


def test_a_preempted_request_computes_again() -> None:
    house = House(num_blocks=12, max_num_batched_tokens=64)
    first = house.send(range(20), max_tokens=28)
    second = house.send(range(100, 120), max_tokens=28)
    house.run()
    records = [house.ledger.records(name)[0] for name in (first, second)]
    preempted = [record for record in records if record.preemptions]
    assert len(preempted) == 1
    (record,) = preempted
    assert record.preemptions[0].request_id == (first if record is records[1] else second)
    assert record.preemptions[0].cause == "memory"
    assert record.recomputed
    assert all(miss.cause is Cause.PREEMPTED for miss in record.recomputed)
    assert {wait.cause for wait in record.waits} >= {"memory"}


def test_who_made_way_for_anothers_share_is_told_so() -> None:
    house = House()
    name = house.send(TEXT, max_tokens=8)
    house.step()
    house.emit(RequestPreempted(name, 40, 0.5, 0.0, cause_request_id="other", cause="share"))
    (record,) = house.ledger.records(name)
    assert [(one.cause, one.request_id) for one in record.preemptions] == [("share", "other")]


def test_waits_are_told_by_what_was_waited_for() -> None:
    house = House(max_num_seqs=1)
    house.send(TEXT, max_tokens=5)
    house.step()
    second = house.send(range(10))
    house.run()
    (record,) = house.ledger.records(second)
    assert {wait.cause for wait in record.waits} == {"seats"}
    assert sum(wait.seconds for wait in record.waits) == record.lookup_s - record.arrival_s


def test_a_salt_a_request_costs_no_more_than_the_last_few() -> None:
    """A prompt is looked for in few of the namespaces that its tenant has had."""
    house = House(num_blocks=400)
    for number in range(30):
        house.ask(TEXT, other(salt=f"{number}"))
    assert len(list(house.ledger.namespaces(""))) == 8
    (first,) = house.misses(house.ask(TEXT, other(salt="new")))
    assert (first.end, first.cause, first.fields) == (40, Cause.OTHER_NAMESPACE, ("cache_salt",))


@pytest.mark.long
def test_what_has_ended_is_dropped_whole() -> None:
    """Short prompts do not use up the room for texts: they are dropped by number, and nothing of them stays."""
    house = House(num_blocks=400)
    for number in range(700):
        house.ask([number, 1, 2])
    records = house.ledger.all_records()
    assert len(records) == 256
    assert [record.request_id for record in records][-1] == "r699"
    assert len(house.ledger._records._ended) == len(house.ledger._records._with_text) == 256


def test_what_has_only_led_to_others_leaves_too() -> None:
    """Where all layers keep the last tokens, a node may leave of which no block was left: it is not cached any more."""
    house = House(num_blocks=40, rules=(KeepRule(8),))
    for number in range(60):
        house.ask(range(100 * number, 100 * number + 24))
    paths = house.ledger.paths
    tree = {key_of(digest_of(node)) for node in house.core.tree.nodes()}
    cached = {paths._keys[entry] for entry in range(paths.num_paths) if paths.state(entry) is State.CACHED}
    assert cached <= tree


def test_a_name_that_nobody_has() -> None:
    house = House()
    assert house.ledger.records("nobody") == []
    house.ask(TEXT, name="chatcmpl-1-0")
    house.ask(TEXT, name="chatcmpl-1-1")
    assert [record.request_id for record in house.ledger.records("chatcmpl-1")] == ["chatcmpl-1-0", "chatcmpl-1-1"]


def test_it_says_how_far_back_it_reaches() -> None:
    house = House(num_blocks=12)
    assert house.ledger.reach().paths_since_s is None
    for number in range(40):
        house.ask(range(100 * number, 100 * number + 40))
    reach = house.ledger.reach()
    assert reach.paths_since_s is not None
    assert reach.num_paths == reach.max_paths == 60
    assert reach.num_bytes == 60 * 64


@pytest.mark.parametrize("namespace", [NS])
def test_asking_changes_nothing(namespace: bytes) -> None:
    house = House()
    house.ask(TEXT, namespace)
    before = house.ledger.reach()
    house.ledger.records("r0")
    house.ledger.all_records()
    assert house.ledger.reach() == before


def test_a_bug_of_ours_ends_the_ledger_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    house = House()
    house.ask(TEXT)
    house.ledger(PrefixLookup("r0", 40, -7, after_preemption=False, num_lost_tokens=None))  # type: ignore[arg-type]
    assert house.ledger.has_failed
    assert "the ledger has failed at PrefixLookup" in caplog.text
    house.ledger(RequestFinished("r0", "stop", 40, 1))
    assert len(house.ledger.records("r0")) == 1
