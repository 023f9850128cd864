"""Calls that cannot be interrupted: who waits for them goes on, and what they are doing stays theirs."""

from __future__ import annotations

import threading

import pytest
from real_servers import PATIENCE_S, num_threads_named, until

from pagefold.store.deadline import Deadline, Workers


def test_results_and_errors_come_back():
    workers = Workers(2, "some")
    assert workers.call(lambda: 7, Deadline(PATIENCE_S)) == 7
    with pytest.raises(ZeroDivisionError):
        workers.call(lambda: 1 // 0, Deadline(PATIENCE_S))
    with pytest.raises(TimeoutError, match="its own"):
        workers.call(lambda: (_ for _ in ()).throw(TimeoutError("its own")), Deadline(PATIENCE_S))
    assert num_threads_named("some") == 1, "the first was free again"
    workers.close()
    workers.close()
    until(lambda: not num_threads_named("some"), "threads to end")


def test_who_waits_goes_on_and_the_call_ends_later():
    workers, go, ended = Workers(2, "stuck"), threading.Event(), []
    for _ in range(2):
        with pytest.raises(TimeoutError, match=r"no answer within 0.02 s"):
            workers.call(lambda: go.wait() and ended.append(1), Deadline(0.02))
    with pytest.raises(TimeoutError, match="all 2 calls that may be under way still are"):
        workers.call(lambda: 7, Deadline(PATIENCE_S))
    go.set()
    until(lambda: len(ended) == 2, "the calls to end")
    until(lambda: works(workers), "threads to be free")
    workers.close()
    until(lambda: not num_threads_named("stuck"), "threads to end")


def works(workers: Workers) -> bool:
    try:
        return workers.call(lambda: True, Deadline(PATIENCE_S))
    except TimeoutError:
        return False


def test_a_deadline_that_has_passed_leaves_nothing():
    with pytest.raises(TimeoutError, match="no answer within 0 s"):
        Deadline(0).left_s()
