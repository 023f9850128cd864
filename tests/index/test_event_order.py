"""Batches that are lost, repeated, replayed or another publisher's: the index never says more than is so, and heals."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pagefold.index import PrefixIndex
from pagefold.index.order import EventOrder, Numbered
from pagefold.index.wire import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, encode_batch


class Publisher:
    """Sends what has changed of a set of blocks, and keeps the last batches."""

    def __init__(self, number: int, num_kept: int) -> None:
        self.number = number
        self.num_kept = num_kept
        self.held: set[int] = set()
        self.sent: list[Numbered] = []
        self.is_up = True
        self.next = 0

    def send(self, *events) -> Numbered:
        payload = encode_batch(EventBatch(self.number * 1000.0 + self.next, list(events), 0))
        self.sent.append(Numbered(self.next, payload))
        self.next += 1
        return self.sent[-1]

    def change(self, block: int) -> Numbered:
        if block in self.held:
            self.held.remove(block)
            return self.send(BlockRemoved([block], "GPU", 0))
        self.held.add(block)
        return self.send(BlockStored([block], None, [], 0, None, "GPU", None, group_idx=0))

    def tell_anew(self) -> Numbered:
        one = [BlockStored(sorted(self.held), None, [], 0, None, "GPU", None, group_idx=0)] if self.held else []
        return self.send(AllBlocksCleared(), *one)

    def kept(self) -> list[Numbered]:
        return self.sent[-self.num_kept :]


class OrderMachine(RuleBasedStateMachine):
    """A publisher and a subscriber, with a wire between them that loses what it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex()
        self.num_publishers = 0
        self.publisher = Publisher(0, 4)
        self.wanted_anew = self.has_dropped = False
        self.order = EventOrder(self.index, "a", self._ask)
        self.is_up_to_date = False  # what was sent last has come
        self.is_unseen = False  # nothing of the publisher has come, and nobody noticed that it is another one

    def _ask(self, first: int) -> list[Numbered] | None:
        if not self.publisher.is_up:
            return None
        kept = self.publisher.kept()
        self.wanted_anew |= bool(kept) and first < kept[0].number
        return [one for one in kept if one.number >= first]

    def _deliver(self, batch: Numbered, comes: bool) -> None:
        self.is_up_to_date = False
        if comes:
            if self.is_unseen and batch.number == self.order._next:
                self.order.disconnect()  # the very number that was next of the one before: its connection tells
            self.is_unseen = False
            self.order.take(batch)
            self.is_up_to_date = True

    @rule(block=st.integers(1, 6), comes=st.booleans())
    def change(self, block, comes) -> None:
        self._deliver(self.publisher.change(block), comes)

    @rule(comes=st.booleans())
    def clear(self, comes) -> None:
        self.publisher.held.clear()
        self._deliver(self.publisher.send(AllBlocksCleared()), comes)

    @rule()
    def drop_before_sending(self) -> None:
        """The queue is full: a number is missing, and all is told anew later."""
        self.publisher.next += 1
        self.publisher.held ^= {1}
        self.has_dropped = True
        self.is_up_to_date = False

    @rule(comes=st.booleans())
    def tell_anew(self, comes) -> None:
        if self.wanted_anew or self.has_dropped:
            self.wanted_anew = self.has_dropped = False
            self._deliver(self.publisher.tell_anew(), comes)

    @rule(num_kept=st.integers(1, 5), tells=st.booleans(), notices=st.booleans(), num_unheard=st.integers(0, 4))
    def restart(self, num_kept, tells, notices, num_unheard) -> None:
        """Another publisher takes its place; its first batches nobody hears. vLLM's does not say that it is empty."""
        if notices:
            self.order.disconnect()
        before = self.publisher
        self.num_publishers += 1
        self.publisher = Publisher(self.num_publishers, num_kept)
        if tells:
            self.publisher.send(AllBlocksCleared())
        for block in range(1, num_unheard + 1):
            self.publisher.change(block)
        if not notices and self.publisher.next > before.next - 1:
            self.order.disconnect()  # a publisher that has sent as many is only known by its connection
        self.is_unseen = not notices
        self.is_up_to_date = self.wanted_anew = self.has_dropped = False

    @rule()
    def check(self) -> None:
        self.order.check()
        self.is_up_to_date = self.publisher.is_up
        self.is_unseen &= not self.publisher.is_up

    @rule()
    def bad_payload(self) -> None:
        batch = Numbered(self.publisher.next, b"\xc1 no batch")
        self.publisher.sent.append(batch)
        self.publisher.next += 1
        self.is_unseen = False
        self.order.take(batch)
        assert not self.index.replicas()["a"].is_known

    @rule(is_up=st.booleans())
    def answer_or_not(self, is_up) -> None:
        self.publisher.is_up = is_up

    @invariant()
    def it_never_says_what_is_not_so(self) -> None:
        if self.is_up_to_date and not self.has_dropped and self.index.replicas()["a"].is_known:
            assert set(self.index.holds("a")) == self.publisher.held

    def teardown(self) -> None:
        """When the publisher answers, and tells all anew where that was wanted, the index is right."""
        self.publisher.is_up = True
        self.order.check()
        if self.has_dropped or not self.index.replicas()["a"].is_known:
            self.order.take(self.publisher.tell_anew())
        assert self.index.replicas()["a"].is_known
        assert set(self.index.holds("a")) == self.publisher.held


TestOrder = OrderMachine.TestCase
TestOrder.settings = settings(max_examples=60, stateful_step_count=25)


def test_what_is_missed_is_asked_for():
    machine = OrderMachine()
    for block in range(1, 4):
        machine.change(block, comes=block != 2)
    assert set(machine.index.holds("a")) == {1, 2, 3}
    assert machine.index.replicas()["a"].is_known
    assert (machine.order.counts.num_gaps, machine.order.counts.num_lost) == (1, 0)


def test_what_cannot_be_had_is_forgotten_until_all_is_told_anew():
    machine = OrderMachine()
    machine.change(1, comes=True)
    machine.publisher.is_up = False
    machine.change(2, comes=False)
    machine.change(3, comes=True)
    assert set(machine.index.holds("a")) == {3}
    assert not machine.index.replicas()["a"].is_known
    machine.publisher.is_up = True
    machine.order.take(machine.publisher.tell_anew())
    assert set(machine.index.holds("a")) == {1, 2, 3}
    assert machine.index.replicas()["a"].is_known


def test_a_publisher_that_begins_anew_is_noticed():
    machine = OrderMachine()
    for block in range(1, 5):
        machine.change(block, comes=True)
    machine.restart(5, tells=False, notices=False, num_unheard=2)
    machine.change(6, comes=True)
    assert set(machine.index.holds("a")) == {1, 2, 6}
    assert machine.order.counts.num_restarts == 1


def test_who_falls_silent_is_doubted_and_believed_again():
    machine = OrderMachine()
    machine.change(1, comes=True)
    machine.publisher.is_up = False
    machine.order.check()
    assert machine.index.replicas()["a"] == (False, 1, 0.0)
    machine.publisher.is_up = True
    machine.change(2, comes=False)
    machine.order.check()
    assert machine.index.replicas()["a"] == (True, 2, 1.0)


def test_a_publisher_that_goes_on_with_the_next_number_is_known_by_its_connection():
    machine = OrderMachine()
    machine.change(1, comes=False)
    machine.check()
    machine.restart(1, tells=False, notices=False, num_unheard=0)
    machine.clear(comes=False)
    machine.change(2, comes=True)
    assert set(machine.index.holds("a")) == {2}
