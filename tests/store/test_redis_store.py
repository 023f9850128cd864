"""RedisStore, with a real server: what was put comes back to the bit, or is a miss with its cause."""

from __future__ import annotations

import contextlib
import gc
import re
import socket
import subprocess
import threading
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis
from real_servers import (
    FORM,
    NO_REDIS,
    PATIENCE_S,
    REDIS_SERVER,
    came_back,
    free_port,
    gets_of,
    path,
    redis_server,
    until,
)

from pagefold.errors import ConfigError
from pagefold.kv.transfers import MissCause, StoreError
from pagefold.store.address import RemoteAddress
from pagefold.store.frame import BlockName, FrameFormat
from pagefold.store.redis_store import RedisStore

pytestmark = pytest.mark.skipif(REDIS_SERVER is None, reason=NO_REDIS)

SECRET = "hunter2&%"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with redis_server(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
def witness(server):
    with redis.Redis(port=server.port) as client:  # to see what the server really holds
        client.flushall()
        yield client


def open_store(url: str, timeout_s: float = PATIENCE_S, form: FrameFormat = FORM) -> RedisStore:
    return RedisStore(RemoteAddress.parse(url, default_port=6379), form, timeout_s=timeout_s)


@pytest.fixture
def store(server, witness):
    opened = open_store(f"redis://127.0.0.1:{server.port}")
    yield opened
    opened.close()


def key_of(put) -> bytes:
    return b"pagefold:" + FORM.layout.hex().encode() + b":" + put.name.digest.hex().encode()


@pytest.mark.parametrize("block_bytes", [1, 12_345, 737_280, 9_000_000])
def test_bytes_come_back_as_they_were(server, witness, block_bytes):
    form = FrameFormat(b"L" * 32, block_bytes, 64)
    store = open_store(f"redis://127.0.0.1:{server.port}", form=form)
    puts = path(13 if block_bytes < 1_000_000 else 2, form=form)  # several batches
    assert store.put(puts) == len(puts)
    gets = gets_of(puts)
    assert came_back(puts, gets, store.get(gets))
    store.close()


def test_the_server_holds_frames_as_they_are_described(store, witness):
    puts = path(2)
    store.put(puts)
    assert sorted(witness.keys()) == sorted(map(key_of, puts))
    for put in puts:
        assert witness.get(key_of(put)) == FORM.header(put.name, put.checksum) + put.payload


def test_known_blocks_count_and_are_not_written_again(store, witness):
    puts = path(4)
    assert store.put(puts[:3]) == 3
    before = witness.info("stats")["total_net_input_bytes"]
    assert store.put(puts) == 4
    assert witness.info("stats")["total_net_input_bytes"] - before < 2 * FORM.frame_bytes, "only the fourth was sent"


def test_count_is_of_a_row(store):
    puts = path(5)
    store.put([puts[0], puts[1], puts[3]])
    assert store.count([put.name for put in puts]) == 2
    assert store.count([]) == 0
    assert store.put([]) == 0
    assert store.get([]) == []
    store.delete([])


def test_behind_a_miss_all_is_absent(store, witness):
    puts = path(40)
    store.put(puts)
    witness.delete(key_of(puts[1]))
    found = store.get(gets_of(puts))
    assert found[0] == puts[0].checksum
    assert found[1] is MissCause.ABSENT
    assert len(found) == len(puts)


@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        (lambda frame: flipped(frame, FORM.header_bytes + 77), MissCause.DAMAGED),
        (lambda frame: flipped(frame, 20), MissCause.DAMAGED),  # of the layout's digest: the header is not as written
        (lambda frame: flipped(frame, 8, 4), MissCause.OTHER_VERSION),
        (lambda frame: frame[:-1], MissCause.DAMAGED),
        (lambda frame: frame[: FORM.header_bytes], MissCause.DAMAGED),
        (lambda frame: frame[:100], MissCause.DAMAGED),
        (lambda frame: b"", MissCause.DAMAGED),
        (lambda frame: frame + b"x", MissCause.DAMAGED),
        (lambda frame: frame + bytes(100_000), MissCause.DAMAGED),
    ],
    ids=["payload bit", "header bit", "version", "short", "no payload", "short header", "empty", "long", "longer"],
)
def test_a_frame_that_is_wrong_is_a_miss_with_its_cause_and_dropped(store, witness, spoil, cause):
    puts = path(3)
    store.put(puts)
    witness.set(key_of(puts[1]), spoil(witness.get(key_of(puts[1]))))
    gets = gets_of(puts)
    found = store.get(gets)
    assert found[:2] == [puts[0].checksum, cause]
    assert not witness.exists(key_of(puts[1]))
    assert witness.exists(key_of(puts[0]))
    assert store.put(puts) == 3
    assert came_back(puts, gets, store.get(gets)), "the connection is where it should be"


def flipped(frame: bytes, at: int, bit: int = 1) -> bytes:
    return frame[:at] + bytes([frame[at] ^ bit]) + frame[at + 1 :]


def test_a_frame_under_a_wrong_key_is_another_block(store, witness):
    puts = path(2)
    store.put(puts)
    witness.set(key_of(puts[0]), witness.get(key_of(puts[1])))
    assert store.get(gets_of(puts[:1])) == [MissCause.OTHER_BLOCK]
    elsewhere = path(1, namespace=b"M")
    witness.set(key_of(puts[1]), FORM.header(elsewhere[0].name, elsewhere[0].checksum) + elsewhere[0].payload)
    assert store.get(gets_of(puts[1:])) == [MissCause.OTHER_NAMESPACE]


def test_a_key_with_something_else_in_it_is_a_miss(store, witness):
    puts = path(2)
    store.put(puts)
    witness.delete(key_of(puts[0]))
    witness.lpush(key_of(puts[0]), "a list")
    assert store.get(gets_of(puts))[0] is MissCause.DAMAGED
    assert not witness.exists(key_of(puts[0]))


@pytest.mark.parametrize("kind", ["list", "set", "hash", "sorted set", "stream"])
def test_a_key_of_another_type_is_dropped_and_can_be_written_again(store, witness, kind):
    puts = path(1)
    key = key_of(puts[0])
    make = {
        "list": lambda: witness.lpush(key, "x"),
        "set": lambda: witness.sadd(key, "x"),
        "hash": lambda: witness.hset(key, "x", "y"),
        "sorted set": lambda: witness.zadd(key, {"x": 1}),
        "stream": lambda: witness.xadd(key, {"x": "y"}),
    }
    make[kind]()
    assert store.get(gets_of(puts)) == [MissCause.DAMAGED]
    assert store.put(puts) == 1
    gets = gets_of(puts)
    assert came_back(puts, gets, store.get(gets))


def test_of_a_value_that_is_far_too_long_no_more_is_fetched_than_a_frame_has(store, witness):
    puts = path(4)
    store.put(puts)
    witness.setrange(key_of(puts[0]), 200 * 2**20, b"x")
    before = witness.info("stats")["total_net_output_bytes"]
    assert store.get(gets_of(puts))[0] is MissCause.DAMAGED
    assert witness.info("stats")["total_net_output_bytes"] - before < 5 * FORM.frame_bytes + 2**16
    assert not witness.exists(key_of(puts[0]))


def test_other_layouts_are_apart_and_outlive_a_clear(server, store, witness):
    other_form = FrameFormat(b"M" * 32, FORM.block_bytes, FORM.key_bytes)
    other = open_store(f"redis://127.0.0.1:{server.port}", form=other_form)
    puts = path(3)
    store.put(puts)
    assert other.count([put.name for put in puts]) == 0
    other.put(puts)
    witness.set("somebody's", "own")
    assert store.clear() == 3
    assert store.count([puts[0].name]) == 0
    assert other.count([put.name for put in puts]) == 3
    assert witness.get("somebody's") == b"own"
    other.close()


def test_many_names_go_in_several_batches(store):
    names = [put.name for put in path(3)]
    store.put(path(3))
    assert store.count(names * 700) == 2100
    store.delete([name.digest for name in names * 700])
    assert store.count(names) == 0


def test_blocks_expire(server, witness):
    store = open_store(f"redis://127.0.0.1:{server.port}?ttl_s=3600")
    puts = path(2)
    assert store.put(puts) == 2
    assert all(3_500 < witness.ttl(key_of(put)) <= 3_600 for put in puts)
    gets = gets_of(puts)
    assert came_back(puts, gets, store.get(gets))
    store.close()


def test_databases_are_apart(server, store, witness):
    store.put(path(2))
    other = open_store(f"redis://127.0.0.1:{server.port}/3")
    assert other.count([path(1)[0].name]) == 0
    other.put(path(1))
    assert witness.info("keyspace")["db3"]["keys"] == 1
    other.close()


def test_threads_do_not_get_each_others_blocks(store):
    def work(seed: int) -> bool:
        puts, ok = path(6, seed=seed), True
        for _ in range(15):
            assert store.put(puts) == 6
            gets = gets_of(puts)
            ok = ok and came_back(puts, gets, store.get(gets)) and store.count([put.name for put in puts]) == 6
            store.delete([put.name.digest for put in puts[3:]])
        return ok

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_nothing_is_left_open(server, witness):
    def num_ours() -> int:
        return len(witness.client_list()) - 1

    until(lambda: num_ours() == 0, "connections of earlier tests to go")
    num_threads, num_files = threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))
    store = open_store(f"redis://127.0.0.1:{server.port}")
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda seed: store.put(path(2, seed=seed)), range(24)))
    assert 1 <= num_ours() <= 8, "some are kept"
    store.close()
    store.close()
    until(lambda: num_ours() == 0, "connections to close")
    until(lambda: threading.active_count() <= num_threads, "threads to end")
    gc.collect()
    assert len(list(Path("/proc/self/fd").iterdir())) <= num_files
    with pytest.raises(StoreError, match="closed"):
        store.put(path(1))


def test_a_full_server_keeps_what_it_can(tmp_path):
    with redis_server(tmp_path, "--maxmemory", "4mb", "--maxmemory-policy", "noeviction") as server:
        store = open_store(f"redis://127.0.0.1:{server.port}")
        puts = path(400)
        num_kept = store.put(puts)
        assert 10 < num_kept < 200
        assert store.count([put.name for put in puts]) >= num_kept - 1
        gets = gets_of(puts[: num_kept - 1])
        assert came_back(puts[: num_kept - 1], gets, store.get(gets))
        use = store.use()
        assert use.limit_bytes == 4 * 2**20
        assert use.num_bytes > num_kept * FORM.frame_bytes
        tested = store.self_test()
        assert not tested.ok
        assert "kept 0 of 4 blocks: it may be full" in tested.told
        store.clear()
        tested = store.self_test()
        assert tested.ok
        assert "maxmemory-policy is noeviction" in tested.told
        store.close()


def test_a_server_that_makes_room_keeps_the_latest(tmp_path):
    with redis_server(tmp_path, "--maxmemory", "4mb", "--maxmemory-policy", "allkeys-lru") as server:
        store = open_store(f"redis://127.0.0.1:{server.port}")
        for seed in range(60):
            assert store.put(path(4, seed=seed)) == 4
        assert "noeviction" not in store.self_test().told
        assert store.use().num_bytes <= 6 * 2**20
        store.close()


def test_a_server_that_hangs_costs_its_time_limit(tmp_path):
    with redis_server(tmp_path) as server:
        store = open_store(f"redis://127.0.0.1:{server.port}", timeout_s=0.3)
        store.put(path(3))
        with server.frozen():
            for call in (
                lambda: store.put(path(1, seed=1)),
                lambda: store.put(path(300, seed=2)),
                lambda: store.get(gets_of(path(3))),
                lambda: store.count([path(1)[0].name]),
                store.clear,
                store.use,
            ):
                begin = time.monotonic()
                with pytest.raises(StoreError, match=r"redis://127.0.0.1:\d+: no answer within 0.3 s"):
                    call()
                assert time.monotonic() - begin < PATIENCE_S / 4
        gets = gets_of(path(3))
        until(lambda: came_back(path(3), gets, quiet(store.get, gets)), "the server to answer again")
        store.close()


def quiet(call, *args):
    try:
        return call(*args)
    except StoreError as error:
        return error


def test_an_answer_that_comes_too_late_goes_nowhere(tmp_path):
    """What the server sends after the time limit ends in no memory, and is not the answer of the next call."""
    with redis_server(tmp_path) as server:
        store = open_store(f"redis://127.0.0.1:{server.port}", timeout_s=0.3)
        puts = path(4)
        store.put(puts)
        with server.frozen():
            gets = gets_of(puts)
            with pytest.raises(StoreError):
                store.get(gets)
            before = [bytes(get.into) for get in gets]
        again = gets_of(puts[::-1])
        until(lambda: came_back(puts[::-1], again, quiet(store.get, again)), "the server to answer again")
        assert [bytes(get.into) for get in gets] == before
        store.close()


def test_a_server_that_dies_and_returns_is_found_again(tmp_path):
    with redis_server(tmp_path) as server:
        store = open_store(f"redis://127.0.0.1:{server.port}")
        puts = path(3)
        store.put(puts)
        server.kill()
        with pytest.raises(StoreError, match=r"redis://127.0.0.1:\d+: .*Connection refused$"):
            store.get(gets_of(puts))
        server.start()
        assert store.get(gets_of(puts)) == [MissCause.ABSENT] * 3, "old connections are not used, and nothing is there"
        assert store.put(puts) == 3
        server.kill()
        server.start()
        assert store.put(puts) == 3, "nor when it was never seen gone"
        store.close()


def test_what_answers_is_no_redis():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\nServer: x\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        store = open_store(f"redis://127.0.0.1:{listener.getsockname()[1]}")
        with pytest.raises(StoreError, match="Protocol Error: b'HTTP/1"):
            store.use()
        thread.join()
        store.close()


@pytest.mark.quick(every=6)
@pytest.mark.parametrize(
    "said", [b":7\r\n", b"*1\r\n:7\r\n", b"$3\r\nabc\r\n", b"$21\r\nused_memory:a lot\r\n\r\n\r\n", b"$-1\r\n"]
)
def test_answers_of_a_wrong_kind_are_no_traceback(said):
    """Whatever comes, it is an answer without meaning or a StoreError."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with contextlib.suppress(OSError):  # until the test ends
                while True:
                    connection, _ = listener.accept()
                    with connection:
                        while connection.recv(65536):
                            connection.sendall(said)

        threading.Thread(target=answer, daemon=True).start()
        puts = path(1)
        for ask in (
            lambda store: store.get(gets_of(puts)),
            lambda store: store.use(),
            lambda store: store.self_test(),
        ):
            store = open_store(f"redis://127.0.0.1:{listener.getsockname()[1]}", 0.5)
            with contextlib.suppress(StoreError):
                found = ask(store)
                assert found != [puts[0].checksum]
            store.close()
        listener.shutdown(socket.SHUT_RDWR)


def test_passwords_are_used_and_never_shown(tmp_path):
    with redis_server(tmp_path, "--requirepass", SECRET) as server:
        quoted = "hunter2%26%25"
        store = open_store(f"redis://:{quoted}@127.0.0.1:{server.port}")
        assert store.put(path(2)) == 2
        told = store.self_test().told
        assert f"redis://:***@127.0.0.1:{server.port}: reads " in told
        shown = [told, repr(store.address), str(store.address), repr(vars(store))]
        wrong = open_store(f"redis://someone:{quoted}@127.0.0.1:{server.port}")
        with pytest.raises(StoreError, match="invalid username-password pair") as refused:
            wrong.use()
        none = open_store(f"redis://127.0.0.1:{server.port}")
        with pytest.raises(StoreError, match="Authentication required"):
            none.use()
        shown += [str(refused.value), "".join(traceback.format_exception(refused.value)), wrong.self_test().told]
        assert not [text for text in shown if SECRET in text or quoted in text]
        for opened in (store, wrong, none):
            opened.close()


def test_tls_is_spoken_and_certificates_are_checked(tmp_path):
    make = "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    subprocess.run(
        ["openssl", *make.split(), "-keyout", "key.pem", "-out", "cert.pem"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    files = ["--tls-cert-file", "cert.pem", "--tls-key-file", "key.pem", "--tls-ca-cert-file", "cert.pem"]
    with redis_server(tmp_path, *files, tls=True) as server:
        cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
        own = f"ca_file={cert}&cert_file={cert}&key_file={key}"
        store = open_store(f"rediss://localhost:{server.port}?{own}")
        puts = path(30)
        assert store.put(puts) == 30
        for _ in range(3):
            gets = gets_of(puts)
            assert came_back(puts, gets, store.get(gets))
        unknown = open_store(f"rediss://localhost:{server.port}?cert_file={cert}&key_file={key}")
        with pytest.raises(StoreError, match="certificate verify failed"):
            unknown.use()
        nameless = open_store(f"rediss://localhost:{server.port}?ca_file={cert}")
        with pytest.raises(StoreError):
            nameless.use()
        plain = open_store(f"redis://localhost:{server.port}", timeout_s=2)
        with pytest.raises(StoreError):
            plain.use()
        for opened in (store, unknown, nameless, plain):
            opened.close()


@pytest.mark.parametrize(
    ("rest", "said"),
    [
        ("127.0.0.1:6379/zero", "'zero' is not the number of a database. Write it as redis://HOST:PORT/0."),
        ("127.0.0.1?ttl=5", "unknown options ttl. There are: ca_file, cert_file, key_file, ttl_s."),
        ("127.0.0.1?ttl_s=-5", "ttl_s=-5 is not a number that is 0 or more."),
        ("127.0.0.1?ttl_s=nan", "ttl_s=nan is not a number"),
        ("127.0.0.1?ca_file=/ca.pem", "certificates are for rediss://."),
    ],
)
def test_what_cannot_work_is_refused(rest, said):
    with pytest.raises(ConfigError) as refused:
        open_store(f"redis://me:{SECRET[:7]}@{rest}")
    assert said in str(refused.value)
    assert SECRET[:7] not in str(refused.value)


@pytest.mark.parametrize("option", ["ca_file", "cert_file", "key_file"])
def test_a_certificate_that_is_not_there_is_refused(option):
    with pytest.raises(ConfigError, match=r"a certificate cannot be read: .*No such file"):
        open_store(f"rediss://127.0.0.1?{option}=/nowhere/it.pem")


def test_a_self_test_leaves_nothing(store, witness):
    tested = store.self_test()
    assert tested.ok
    assert tested.tier == "remote"
    assert tested.read_bytes_per_s > 0 < tested.write_bytes_per_s
    assert 0 < tested.latency_s < PATIENCE_S
    assert witness.dbsize() == 0


def test_a_self_test_of_what_does_not_answer_says_so():
    port = free_port()
    store = open_store(f"redis://127.0.0.1:{port}")
    tested = store.self_test()
    assert tested[:-1] == ("remote", False, 0, 0, 0)
    assert re.fullmatch(rf"redis://127.0.0.1:{port}: .*Connection refused", tested.told)
    store.close()


def test_a_host_without_an_address_is_no_hang():
    store = open_store("redis://no-such-host.invalid", timeout_s=20)
    with pytest.raises(StoreError, match=r"redis://no-such-host.invalid:6379: "):
        store.count([BlockName(b"", b"", b"", b"")])
    store.close()
