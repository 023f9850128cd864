"""Returning: who is due comes in order, and no more than some thousand are remembered."""

from __future__ import annotations

from pagefold.scheduler.returning import MAX_EXPECTED_BYTES, Returning


def test_who_is_due_comes_in_order():
    returning = Returning()
    for due_s in (3.0, 1.0, 2.0, 2.0):
        returning.add(due_s, b"", bytes([int(due_s)]))
    assert returning.next_due_s() == 1.0
    assert returning.take(0.5, 4) == []
    assert [one.due_s for one in returning.take(2.0, 2)] == [1.0, 2.0]
    assert [one.order for one in returning.take(9.0, 4)] == [3, 0]
    assert returning.next_due_s() == float("inf")


def test_of_too_many_the_last_to_return_are_forgotten():
    returning = Returning()
    for due_s in range(3000):
        returning.add(float(-due_s), b"", b"")
    taken = returning.take(0.0, 5000)
    assert [one.due_s for one in taken] == [float(due_s) for due_s in range(-2999, -1975)]


def test_their_tokens_take_no_more_than_so_many_bytes():
    """Twenty of 8 MiB, of which eight are remembered; so it is again when they are taken, and after a reset."""
    returning = Returning()
    for _ in range(2):
        for forget in (lambda: returning.take(99.0, 99), returning.clear):
            for due_s in range(20):
                returning.add(float(due_s % 10), b"", bytes(2**23))
            assert [one.due_s for one in returning.take(1.0, 99)] == [0.0, 0.0, 1.0, 1.0]
            assert returning.next_due_s() == 2.0
            assert returning.num_bytes == 4 * 2**23 <= MAX_EXPECTED_BYTES
            forget()
            assert returning.num_bytes == 0
    returning.add(1.0, b"", bytes(2**26 + 1))
    assert returning.take(2.0, 1) == [], "it is too long itself"


def test_nobody_is_expected_after_a_reset():
    returning = Returning()
    returning.add(1.0, b"", b"")
    returning.clear()
    assert returning.take(2.0, 1) == []
