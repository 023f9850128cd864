"""Causes where there are tiers behind the device: what the host lost, what did not pay, what tiers could not bring."""

from __future__ import annotations

from array import array

import pytest
from ledger_house import NS, House

from pagefold.events import FetchEnded, FetchOutcome, TierMissCause, TierRead
from pagefold.kv import TOKEN_BYTES, Arbiter, HostTier, LinkModel
from pagefold.kv.names import names_behind, root_digest

TEXT = list(range(100, 120))
SIZE = 4


def evicted(**core: object) -> House:
    """A house that had a text of five blocks, and has none of it on the device."""
    house = House(num_blocks=12, block_size=SIZE, **core)
    house.ask(TEXT)
    house.ask(range(47))
    return house


def digests() -> list[bytes]:
    root = root_digest(NS)
    return [name.digest for name in names_behind(root, root, array("i", TEXT).tobytes(), SIZE * TOKEN_BYTES)]


def test_what_the_host_has_is_found() -> None:
    house = evicted(host=HostTier(40))
    name = house.ask([*TEXT, 1])
    assert house.causes(name) == [(20, 21, "never_seen")]
    (record,) = house.ledger.records(name)
    assert (record.num_hit_tokens, record.num_loaded_tokens) == (20, 20)
    house.core.forgetting.reset()
    assert house.causes(house.ask(TEXT))[0][2] == "reset"


def test_what_the_host_has_lost() -> None:
    house = evicted(host=HostTier(2))
    (miss, _) = house.misses(house.ask([*TEXT, 1]))
    assert (miss.start, miss.end, miss.cause.value) == (0, 20, "not_in_tiers")
    assert miss.eviction is not None
    assert miss.eviction.request_id == "r1"


def test_what_is_sooner_computed_than_restored() -> None:
    arbiter = Arbiter(1000, SIZE, compute_s_per_token=1e-6)
    arbiter.links["host"] = LinkModel(1.0, 1000.0)
    house = evicted(host=HostTier(40), arbiter=arbiter)
    assert house.causes(house.ask([*TEXT, 1])) == [(0, 20, "sooner_computed"), (20, 21, "never_seen")]


@pytest.mark.parametrize(
    ("outcome", "missed", "cause", "detail"),
    [
        ("slow", None, "sooner_computed", ""),
        ("no_room", None, "tier_full", ""),
        ("late", None, "tier_late", ""),
        ("absent", None, "not_in_tiers", ""),
        ("broken", "damaged", "tier_failed", "damaged"),
        ("broken", "io_error", "tier_failed", "io_error"),
        ("broken", "absent", "tier_failed", "absent"),
        ("broken", "late", "tier_late", ""),
    ],
)
def test_what_slow_tiers_did_not_bring(
    outcome: FetchOutcome, missed: TierMissCause | None, cause: str, detail: str
) -> None:
    """The first block that a tier could not bring cuts off those behind it, which it may have."""
    house = evicted(host=HostTier(2))
    house.clock.advance(3.0)
    name = house.send([*TEXT, 1])
    house.clock.advance(0.5)
    if missed is not None:
        house.emit(TierRead("disk", 0, 0, 0.1, {missed: 1}, ((digests()[0], missed),)))
    house.emit(FetchEnded(name, outcome, 20, 0.5))
    house.run()
    first, rest = house.misses(name)[0], house.misses(name)[1:]
    assert (first.start, first.end, first.cause.value, first.detail) == (0, 20, cause, detail)
    assert [one.cause.value for one in rest] == ["never_seen"]
    (record,) = house.ledger.records(name)
    assert ("tier", 0.5) in record.waits


def test_what_a_tier_could_not_bring_another_request_is_not_this_ones() -> None:
    house = evicted(host=HostTier(2))
    house.emit(TierRead("disk", 0, 0, 0.1, {"damaged": 1}, ((digests()[0], "damaged"),)))
    house.clock.advance(1.0)
    assert house.causes(house.ask([*TEXT, 1]))[0][2] == "not_in_tiers"
