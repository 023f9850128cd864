"""From a URL to a store: what cannot work is refused in words, without its password."""

from __future__ import annotations

import sys

import pytest
from real_servers import FORM, NO_REDIS, REDIS_SERVER, came_back, free_port, gets_of, path, redis_server, until

from pagefold.errors import ConfigError
from pagefold.store.address import RemoteAddress
from pagefold.store.remote import open_remote

SECRET = "pa55"


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("memcached://me:pa55@host:1", "'memcached://me:***@host:1' is no remote store. Begin it with one of redis://"),
        ("host:6379", "'host:6379' is no remote store."),
        ("me:pa55@host:6379", "'***host:6379' is no remote store."),
        ("", "'' is no remote store."),
        ("redis://", "'redis://' names no host. Write it as redis://HOST:PORT."),
        ("redis://:pa55@", "'redis://:***@' names no host."),
        ("redis://host:port", "'redis://host:port' is not a URL of a remote store: Port could not be cast"),
        ("redis://:pa55@host:65536", "'redis://:***@host:65536' is not a URL of a remote store: Port out of range"),
        ("redis://me:pa55@[::1", "'redis://me:***@[::1' is not a URL of a remote store: Invalid IPv6 URL"),
        ("redis://me:p@55pa55@host:x", "'redis://me:***@host:x' is not a URL"),
        ("redis://me:/pa55@host:x", "'redis://me:***@host:x' is not a URL of a remote store: of a password, the"),
        ("redis://host/pa55?zeit=1", "redis://host:6379/pa55: unknown options zeit."),
    ],
)
def test_what_cannot_work_is_refused_in_words(url, said):
    with pytest.raises(ConfigError) as refused:
        open_remote(url, FORM)
    assert said in str(refused.value)
    if "pa55@" in url:
        assert SECRET not in str(refused.value)


def test_without_its_client_redis_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigError, match=r"redis://:\*\*\*@host:6379: redis-py .* pip install 'pagefold\[redis\]'"):
        open_remote("redis://:pa55@host", FORM)


def test_an_address_shows_no_password():
    address = RemoteAddress.parse("rediss://me:pa55@[::1]:7000/2?ttl_s=5", default_port=1)
    assert str(address) == "rediss://me:***@[::1]:7000/2"
    assert SECRET not in repr(address)
    assert address.password == SECRET
    assert address.without_secrets("AUTH pa55 failed") == "AUTH *** failed"
    assert str(RemoteAddress.parse("redis://me@host", default_port=1)) == "redis://me@host:1"
    assert str(RemoteAddress.parse("redis://host", default_port=1)) == "redis://host:1"


def test_a_remote_that_is_not_there_is_an_error_only_to_who_needs_it():
    port = free_port()
    store = open_remote(f"redis://:pa55@127.0.0.1:{port}", FORM)
    assert store.put(path(2)) == 0
    assert store.state.is_out
    with pytest.raises(ConfigError) as refused:
        store.connect()
    assert str(refused.value).startswith(f"redis://:***@127.0.0.1:{port}: ")
    assert str(refused.value).endswith(
        "Connection refused. Start it, correct the address, or leave out --kv-remote-required to begin without it."
    )
    store.close()


@pytest.mark.skipif(REDIS_SERVER is None, reason=NO_REDIS)
def test_blocks_go_there_and_back(tmp_path):
    with redis_server(tmp_path) as server:
        store = open_remote(f"redis://127.0.0.1:{server.port}", FORM, timeout_s=60)
        store.connect()
        assert store.self_test().ok
        puts = path(3)
        assert store.put(puts) == 3
        gets = gets_of(puts)
        assert came_back(puts, gets, store.get(gets))
        store.close()


@pytest.mark.skipif(REDIS_SERVER is None, reason=NO_REDIS)
def test_a_remote_that_dies_goes_out_and_comes_back_by_itself(tmp_path):
    changes = []
    with redis_server(tmp_path) as server:
        store = open_remote(f"redis://127.0.0.1:{server.port}", FORM, on_change=changes.append)
        until(lambda: store.put(path(3)) == 3, "a first put")
        server.kill()
        assert store.count([path(3)[0].name]) == 0
        assert [change.is_out for change in changes][-1:] == [True]
        server.start()
        until(lambda: not store.state.is_out, "the store to come back")
        until(lambda: store.put(path(3)) == 3, "blocks to be kept again")
        store.close()
    assert changes[0].is_out
    assert "Connection refused" in changes[-1].why or "no answer" in changes[-1].why
