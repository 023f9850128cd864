"""GuardedStore: a store that fails holds up nobody, and is asked again for longer and longer until it answers."""

from __future__ import annotations

import threading
import time

import pytest
from real_servers import (
    FORM,
    NO_REDIS,
    REDIS_SERVER,
    came_back,
    free_port,
    gets_of,
    num_threads_named,
    path,
    redis_server,
    until,
)

from pagefold.errors import ConfigError
from pagefold.kv.transfers import MissCause, StoreError
from pagefold.store.address import RemoteAddress
from pagefold.store.breaker import Breaker
from pagefold.store.guarded import GuardedStore
from pagefold.store.protocol import StoreUse
from pagefold.store.redis_store import RedisStore


def open_store(port: int, timeout_s: float = 60.0) -> RedisStore:
    return RedisStore(RemoteAddress.parse(f"redis://127.0.0.1:{port}", default_port=1), FORM, timeout_s=timeout_s)


def test_who_fails_again_soon_waits_longer():
    breaker = Breaker(0.0, first_wait_s=1, most_wait_s=10)
    change = breaker.failed(100.0, "gone")
    assert change == (True, "gone", 100.0)
    waits = [breaker.wait_s]
    assert breaker.failed(100.5, "gone, too") is None, "another call that was under way"
    for _ in range(5):
        breaker.asked_in_vain("still")
        waits.append(breaker.wait_s)
    assert waits == [1, 2, 4, 8, 10, 10]
    assert breaker.answered(150.0) == (False, "still", 50.0)
    assert breaker.answered(151.0) is None
    assert breaker.failed(160.0, "again").is_out
    assert breaker.wait_s == 10, "it had been in for no longer than it was left out"
    breaker.answered(170.0)
    breaker.failed(180.1, "later")
    assert breaker.wait_s == 1, "it had been in for long"
    breaker.answered(181.2)
    breaker.failed(182.0, "flaps")
    assert breaker.wait_s == 2
    assert breaker.num_failures == 10
    assert breaker.last_error == "flaps"


@pytest.mark.skipif(REDIS_SERVER is None, reason=NO_REDIS)
def test_a_store_that_hangs_goes_out_and_comes_back_by_itself(tmp_path):
    changes, now = [], [1000.0]
    with redis_server(tmp_path) as server:
        guarded = GuardedStore(
            open_store(server.port, timeout_s=0.3), on_change=changes.append, clock=lambda: now[0], first_wait_s=0.05
        )
        puts = path(3)
        until(lambda: not guarded.state.is_out and guarded.put(puts) == 3, "a first put")
        changes.clear()
        assert num_threads_named("store-probe") == 0, "a thread only while it is out"
        with server.frozen():
            now[0] = 1005.0
            assert guarded.get(gets_of(puts)) == [MissCause.IO_ERROR] * 3
            assert [change.is_out for change in changes] == [True]
            assert "no answer within 0.3 s" in changes[0].why
            state = guarded.state
            assert (state.is_out, state.since) == (True, 1005.0)
            assert "no answer" in state.last_error
            begin = time.monotonic()
            for _ in range(100):  # none waits for its time limit
                assert guarded.get(gets_of(puts)) == [MissCause.ABSENT] * 3
                assert guarded.put(puts) == 0
                assert guarded.count([put.name for put in puts]) == 0
                assert guarded.use() == StoreUse(-1, -1, 0)
            assert time.monotonic() - begin < 300 * 0.3 / 4
            for call in (guarded.clear, lambda: guarded.delete([puts[0].name.digest])):
                with pytest.raises(StoreError, match=r"redis://127.0.0.1:\d+ is out: .*no answer"):
                    call()
            until(lambda: guarded.state.num_failures >= 3, "it to be asked in vain")
            now[0] = 1017.0
        until(lambda: len(changes) == 2, "it to come back")
        assert (changes[1].is_out, changes[1].lasted_s) == (False, 12.0)
        until(lambda: num_threads_named("store-probe") == 0, "the thread to end")
        gets = gets_of(puts)
        until(lambda: came_back(puts, gets, guarded.get(gets)), "blocks to come")
        guarded.close()


@pytest.mark.skipif(REDIS_SERVER is None, reason=NO_REDIS)
def test_many_callers_see_one_outage(tmp_path):
    changes = []
    with redis_server(tmp_path) as server:
        guarded = GuardedStore(open_store(server.port, timeout_s=0.5), on_change=changes.append, first_wait_s=30)
        with server.frozen():
            callers = [threading.Thread(target=guarded.get, args=(gets_of(path(1)),)) for _ in range(6)]
            for caller in callers:
                caller.start()
            for caller in callers:
                caller.join()
            assert len(changes) == 1
            assert guarded.state.num_failures >= 1
            assert num_threads_named("store-probe") == 1
        begin = time.monotonic()
        guarded.close()
        guarded.close()
        assert time.monotonic() - begin < 20, "it does not wait until it would be asked"
        assert num_threads_named("store-probe") == 0


def test_a_store_that_is_not_there_at_first_is_tried_on():
    port = free_port()
    guarded = GuardedStore(open_store(port), first_wait_s=0.01, most_wait_s=0.02)
    assert not guarded.state.is_out, "nothing is connected before it is needed"
    tested = guarded.self_test()
    assert not tested.ok
    assert "Connection refused" in tested.told
    assert guarded.state.is_out
    until(lambda: guarded.state.num_failures > 4, "it to be tried on")
    with pytest.raises(ConfigError, match="Connection refused"):
        guarded.connect()
    guarded.close()
    assert num_threads_named("store-probe") == 0


@pytest.mark.skipif(REDIS_SERVER is None, reason=NO_REDIS)
def test_connecting_brings_it_back_at_once(tmp_path):
    with redis_server(tmp_path) as server:
        guarded = GuardedStore(open_store(server.port), first_wait_s=3600, most_wait_s=3600)
        server.kill()
        assert guarded.put(path(1)) == 0
        server.start()
        assert guarded.put(path(1)) == 0, "not before it was asked"
        guarded.connect()
        assert guarded.put(path(1)) == 1
        assert guarded.clear() == 1
        guarded.delete([path(1)[0].name.digest])
        guarded.close()
