"""Hints in PinTable: pins that clients wish for, which yield, and never to each other's tenants."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from pagefold.kv import KVCore, PinLimits, audit
from pagefold.kv.pins import HintedBy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.kv.block import Node

NS = b"namespace"
ACME, BETA = HintedBy("acme"), HintedBy("beta")


def pack(tokens: Sequence[int]) -> bytes:
    return array("i", tokens).tobytes()


class Core(KVCore):
    """Sixteen blocks of four tokens, of which six may be pinned."""

    def __init__(self) -> None:
        self.told: list[object] = []
        super().__init__(16, block_size=4, pin_limits=PinLimits(0.375, 10.0), emit=self.told.append)

    def fill(self, tokens: Sequence[int]) -> Node:
        cache, start = self.acquire(self.match(NS, pack(tokens), len(tokens) - 1))
        assert self.extend(cache, start, len(tokens))
        promise = self.publishing.promise(cache, pack(tokens), len(tokens))
        self.moves.copies_done(self.moves.take_copies())
        if promise is not None:
            self.publishing.commit(promise)
        tail = cache.tail
        assert tail is not None
        self.release(cache)
        return tail

    def hint(self, name: str, first: int, num_blocks: int, by: HintedBy, *, now_s: float = 0.0, ttl_s: float = 9.0):
        pin = self.pins.hint(name, self.fill(range(first, first + 4 * num_blocks)), now_s, ttl_s=ttl_s, by=by)
        audit(self)
        return pin

    @property
    def pinned(self) -> list[str]:
        return [pin.pin_id for pin in self.pins]


def test_the_oldest_of_the_same_tenant_yields_and_no_more_than_needed() -> None:
    core = Core()
    core.hint("a", 0, 2, ACME)
    core.hint("b", 100, 2, ACME)
    core.hint("c", 200, 2, BETA)
    assert core.hint("d", 300, 2, ACME) is not None
    assert core.pinned == ["b", "c", "d"]
    assert not core.pins.dropped, "hints come and go without a word"


def test_what_would_not_fit_even_so_takes_nothing_away() -> None:
    core = Core()
    core.hint("a", 0, 2, ACME)
    core.hint("b", 100, 3, BETA)
    assert core.hint("c", 200, 4, ACME) is None
    assert core.hint("e", 200, 4, HintedBy("nobody")) is None
    assert core.pinned == ["a", "b"]


def test_pins_that_are_no_hints_never_yield_and_hints_yield_to_them() -> None:
    core = Core()
    core.pins.add("firm", core.fill(range(12)), 0.0)
    core.hint("a", 100, 2, ACME)
    core.hint("b", 200, 1, BETA)
    assert core.hint("c", 300, 4, ACME) is None
    assert core.pins.num_hinted() == 3
    assert core.pins.add("firm too", core.fill(range(400, 408)), 0.0) is not None
    audit(core)
    assert core.pinned == ["firm", "b", "firm too"]
    assert core.pins.add("too much", core.fill(range(500, 516)), 0.0) is None
    assert core.pinned == ["firm", "b", "firm too"]


def test_of_a_path_that_is_pinned_firmly_there_is_no_hint() -> None:
    core = Core()
    core.pins.add("firm", core.fill(range(12)), 0.0, ttl_s=100.0)
    assert core.hint("a", 0, 3, ACME) is None
    core.hint("b", 100, 1, ACME)
    assert core.hint("c", 100, 1, BETA) is None
    assert core.pinned == ["firm", "b"]


def test_a_hint_is_renewed_and_never_lives_shorter() -> None:
    core = Core()
    core.hint("a", 0, 2, ACME, ttl_s=60.0)
    pin = core.hint("b", 0, 2, ACME, now_s=10.0, ttl_s=5.0)
    assert pin.expires_at_s == 60.0
    pin = core.hint("c", 0, 2, ACME, now_s=20.0, ttl_s=50.0)
    assert pin.expires_at_s == 70.0
    assert core.pinned == ["c"]
    core.pins.expire(70.0)
    assert not core.pinned
    audit(core)


def test_what_leads_to_the_new_one_does_not_yield_to_it() -> None:
    """It would free nothing."""
    core = Core()
    core.hint("root", 0, 2, ACME)
    core.hint("other", 100, 2, ACME)
    assert core.hint("deep", 0, 5, ACME) is not None
    assert core.pinned == ["root", "deep"]


def test_memory_is_taken_from_hints_first() -> None:
    core = Core()
    core.pins.add("firm", core.fill(range(8)), 0.0, priority=0.0)
    core.hint("a", 100, 2, ACME, now_s=5.0)
    assert core.pins.give_up(5.0)
    assert core.pinned == ["firm"]


def test_of_a_session_s_own_those_go_that_are_superseded() -> None:
    core, owner = Core(), object()
    tail = core.fill(range(8))
    core.pins.hint("own", tail, 0.0, ttl_s=9.0, by=HintedBy("acme", owner))
    core.hint("other", 100, 1, HintedBy("acme", object()))
    core.pins.remove_at([tail], object())
    core.pins.remove_at([core.fill(range(100, 104))], owner)
    assert core.pinned == ["own", "other"]
    core.pins.remove_at([tail], owner)
    audit(core)
    assert core.pinned == ["other"]


def test_a_tenant_has_so_many_and_the_oldest_goes(monkeypatch) -> None:
    monkeypatch.setattr("pagefold.kv.pins._MOST_HINTS", 2)
    core = Core()
    for name, first in (("a", 0), ("b", 100), ("c", 200)):
        core.hint(name, first, 1, ACME)
    assert core.pinned == ["b", "c"]
    core.hint("d", 300, 1, BETA)
    assert core.pinned == ["b", "c", "d"]


ASKS = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 7), st.sampled_from(["acme", "beta", ""])), max_size=14)


@given(ASKS)
def test_nobody_s_pins_yield_to_another_tenant_s_hint(asks) -> None:
    core = Core()
    for number, (stream, num_blocks, tenant) in enumerate(asks):
        node = core.fill(range(100 * stream, 100 * stream + 4 * num_blocks))
        before = {pin.pin_id: pin for pin in core.pins}
        if tenant:
            core.pins.hint(f"{number}", node, float(number), ttl_s=99.0, by=HintedBy(tenant))
            gone = [pin for pin_id, pin in before.items() if core.pins.get(pin_id) is None]
            assert all(pin.by is not None and pin.by.tenant == tenant for pin in gone)
            assert not gone or core.pins.get(f"{number}") is not None
        else:
            core.pins.add(f"{number}", node, float(number))
            gone = [pin for pin_id, pin in before.items() if core.pins.get(pin_id) is None]
            assert all(pin.by is not None or pin.tail is node for pin in gone)
        audit(core)
