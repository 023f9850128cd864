"""MooncakeStore, with a real master and pool: what was put comes back to the bit, or is a miss with its cause."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from real_servers import (
    FORM,
    MOONCAKE_MASTER,
    NO_MOONCAKE,
    PATIENCE_S,
    came_back,
    free_port,
    frozen,
    gets_of,
    mooncake_master,
    path,
    until,
)

from pagefold.errors import ConfigError
from pagefold.kv.transfers import MissCause, StoreError
from pagefold.store.address import RemoteAddress
from pagefold.store.deadline import Deadline
from pagefold.store.frame import FrameFormat
from pagefold.store.guarded import GuardedStore
from pagefold.store.mooncake_store import MooncakeStore
from pagefold.store.protocol import Put, StoreUse

if TYPE_CHECKING:
    from pagefold.store.mooncake_process import MooncakeProcess

pytestmark = pytest.mark.skipif(MOONCAKE_MASTER is None, reason=NO_MOONCAKE)

POOL_GIB = 1 / 16
SHORT_LEASE = "-default_kv_lease_ttl=200"


def open_store(port: int, timeout_s: float = PATIENCE_S, form: FrameFormat = FORM, options: str = "") -> MooncakeStore:
    address = RemoteAddress.parse(f"mooncake://127.0.0.1:{port}{options}", default_port=1)
    return MooncakeStore(address, form, timeout_s=timeout_s)


def open_pool(port: int) -> MooncakeStore:
    """Return a store whose process has added memory to the pool."""
    pool = open_store(port, options=f"?segment_gib={POOL_GIB}")
    pool.use()
    return pool


@pytest.fixture(scope="module")
def master(tmp_path_factory):
    with mooncake_master(tmp_path_factory.mktemp("mooncake")) as running:
        pool = open_pool(running.port)
        yield running
        pool.close()


@pytest.fixture(scope="module")
def opened(master):
    store = open_store(master.port)
    yield store
    store.close()


@pytest.fixture
def store(opened):
    opened.clear()
    return opened


@pytest.fixture
def witness(master):
    """A process with the client alone, to see and to spoil what the pool holds."""
    code = (
        "import sys, base64\n"
        "from mooncake.store import MooncakeDistributedStore\n"
        "s = MooncakeDistributedStore()\n"
        f"assert not s.setup('127.0.0.1', 'P2PHANDSHAKE', 0, 2**26, 'tcp', '', '127.0.0.1:{master.port}')\n"
        "print('= ready', flush=True)\n"
        "for line in sys.stdin:\n"
        "    verb, key, *rest = line.split(' ')\n"
        "    if verb == 'get': r = base64.b64encode(s.get(key.strip())).decode()\n"
        "    else:\n"
        "        s.remove(key.strip(), True)\n"
        "        r = s.put(key, base64.b64decode(rest[0])) if verb == 'set' else 0\n"
        "    print('=', r, flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )

    def answer() -> str:
        while not (line := process.stdout.readline()).startswith("= "):
            assert line, "the witness ended"
        return line[2:].strip()

    answer()

    def ask(verb: str, put: Put, value: bytes = b"") -> bytes:
        import base64

        process.stdin.write(f"{verb} {key_of(put)} {base64.b64encode(value).decode()}\n".replace(" \n", "\n"))
        process.stdin.flush()
        said = answer()
        return base64.b64decode(said) if verb == "get" else said.encode()

    yield ask
    process.kill()
    process.communicate()


def key_of(put: Put) -> str:
    return f"pagefold:{FORM.layout.hex()}:{put.name.digest.hex()}"


def flipped(frame: bytes, at: int, bit: int = 1) -> bytes:
    return frame[:at] + bytes([frame[at] ^ bit]) + frame[at + 1 :]


@pytest.mark.parametrize("block_bytes", [1, 737_280, 9_000_000])
def test_bytes_come_back_as_they_were(master, block_bytes):
    form = FrameFormat(b"%032d" % block_bytes, block_bytes, 64)
    store = open_store(master.port, form=form)
    puts = path(13 if block_bytes < 1_000_000 else 2, form=form)  # several batches
    assert store.put(puts) == len(puts)
    gets = gets_of(puts)
    assert came_back(puts, gets, store.get(gets))
    assert store.clear() == len(puts)
    store.close()


def test_count_is_of_a_row_and_behind_a_miss_all_is_absent(store):
    puts = path(20)
    assert store.put([puts[0], puts[1], *puts[3:]]) == 19
    names = [put.name for put in puts]
    assert store.count(names) == 2
    found = store.get(gets_of(puts))
    assert found[:3] == [puts[0].checksum, puts[1].checksum, MissCause.ABSENT]
    assert len(found) == 20
    assert store.put(puts) == 20
    assert store.count(names * 20) == 400
    store.delete([name.digest for name in names])
    store.delete([name.digest for name in names])
    assert store.count(names) == 0
    assert (store.put([]), store.get([]), store.count([])) == (0, [], 0)


def test_known_blocks_are_not_written_again(store, witness):
    puts = path(2)
    store.put(puts)
    other = puts[1]._replace(payload=memoryview(bytes(FORM.block_bytes)))
    assert store.put([puts[0], other]) == 2
    assert witness("get", puts[1]) == FORM.header(puts[1].name, puts[1].checksum) + puts[1].payload


@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        (lambda frame: flipped(frame, FORM.header_bytes + 77), MissCause.DAMAGED),
        (lambda frame: flipped(frame, 20), MissCause.DAMAGED),
        (lambda frame: flipped(frame, 8, 4), MissCause.OTHER_VERSION),
        (lambda frame: frame[:-1], MissCause.DAMAGED),
        (lambda frame: frame[:100], MissCause.DAMAGED),
        (lambda frame: frame + b"x", MissCause.DAMAGED),
        (lambda frame: frame + bytes(100_000), MissCause.DAMAGED),
    ],
    ids=["payload bit", "header bit", "version", "short", "short header", "long", "longer"],
)
def test_a_frame_that_is_wrong_is_a_miss_with_its_cause_and_dropped(store, witness, spoil, cause):
    puts = path(3)
    store.put(puts)
    gets = gets_of(puts)
    assert came_back(puts, gets, store.get(gets)), "what lies in the lane from before is no excuse"
    assert witness("set", puts[1], spoil(witness("get", puts[1]))) == b"0"
    assert store.get(gets_of(puts))[:2] == [puts[0].checksum, cause]
    assert store.count([put.name for put in puts]) == 1, "dropped, though it had a lease"
    assert store.put(puts) == 3
    gets = gets_of(puts)
    assert came_back(puts, gets, store.get(gets))


def test_a_frame_under_a_wrong_key_is_another_block(store, witness):
    puts = path(2)
    store.put(puts)
    witness("set", puts[0], witness("get", puts[1]))
    assert store.get(gets_of(puts[:1])) == [MissCause.OTHER_BLOCK]
    elsewhere = path(1, namespace=b"M")[0]
    witness("set", puts[1], FORM.header(elsewhere.name, elsewhere.checksum) + bytes(elsewhere.payload))
    assert store.get(gets_of(puts[1:])) == [MissCause.OTHER_NAMESPACE]


def test_other_layouts_are_apart_and_outlive_a_clear(master, store):
    other = open_store(master.port, form=FrameFormat(b"M" * 32, FORM.block_bytes, FORM.key_bytes))
    puts = path(3)
    store.put(puts)
    assert other.count([puts[0].name]) == 0
    other.put(puts)
    assert store.clear() == 3
    assert store.count([puts[0].name]) == 0
    assert other.count([put.name for put in puts]) == 3
    other.close()


def test_threads_do_not_get_each_others_blocks(store):
    def work(seed: int) -> bool:
        puts, ok = path(6, seed=seed), True
        for _ in range(10):
            assert store.put(puts) == 6
            gets = gets_of(puts)
            ok = ok and came_back(puts, gets, store.get(gets)) and store.count([put.name for put in puts]) == 6
            store.delete([put.name.digest for put in puts[3:]])
        return ok

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))


def test_nothing_is_left(master):
    num_threads, num_files = threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))
    store = open_store(master.port)
    assert threading.active_count() == num_threads, "nothing is started before it is needed"
    store.put(path(2))
    process = store._process._process
    store.close()
    store.close()
    assert process.returncode is not None
    gc.collect()
    assert threading.active_count() <= num_threads
    assert len(list(Path("/proc/self/fd").iterdir())) <= num_files
    with pytest.raises(StoreError, match="closed"):
        store.put(path(1))


def test_a_pool_that_is_full_keeps_what_it_can(tmp_path):
    with mooncake_master(tmp_path, "-default_kv_lease_ttl=60000") as master:
        store = open_store(master.port)
        tested = store.self_test()
        assert not tested.ok
        assert "no process has added memory to the pool (segment_gib)" in tested.told
        pool = open_pool(master.port)
        puts = path(1_500)  # three quarters of it
        assert store.put(puts) == 1_500
        gets = gets_of(puts)
        assert came_back(puts, gets, store.get(gets))
        assert 0 < store.put(path(1_000, seed=1)) < 600, "what was just read has a lease, and is not evicted"
        assert store.count([put.name for put in puts]) == 1_500
        kill(pool)
        store.close()


def test_a_pool_makes_room_when_leases_end(tmp_path):
    with mooncake_master(tmp_path, SHORT_LEASE) as master:
        pool = open_pool(master.port)
        puts = path(2_500)
        store = open_store(master.port)
        store.put(puts)
        until(lambda: store.put(path(50, seed=1)) == 50, "room to be made")
        kill(pool)
        store.close()


def test_a_master_that_hangs_costs_the_time_limit(tmp_path):
    with mooncake_master(tmp_path) as master:
        pool, store = open_pool(master.port), open_store(master.port)
        puts = path(3)
        store.put(puts)
        store._timeout_s = 0.3
        with master.frozen():
            for call in (
                lambda: store.put(path(1, seed=1)),
                lambda: store.get(gets_of(puts)),
                lambda: store.count([puts[0].name]),
                store.use,
            ):
                begin = time.monotonic()
                with pytest.raises(StoreError, match=r"mooncake://127.0.0.1:\d+: no answer within 0.3 s"):
                    call()
                assert time.monotonic() - begin < PATIENCE_S / 4
        gets = gets_of(puts)
        until(lambda: came_back(puts, gets, quiet(store.get, gets)), "the master to answer again")
        store.close()
        kill(pool)


def kill(pool: MooncakeStore) -> None:
    """End a store whose memory need not leave the pool in order, which takes Mooncake a second or two."""
    pool._process.end(0)
    pool.close()


def quiet(call, *args):
    try:
        return call(*args)
    except StoreError as error:
        return error


def test_what_a_late_call_still_writes_goes_nowhere(tmp_path):
    """The machine that holds the blocks stops in the middle of a read, and goes on after other calls were made."""
    with mooncake_master(tmp_path) as master:
        pool, store = open_pool(master.port), open_store(master.port)
        puts, others = path(3), path(3, seed=1)
        store.put(puts)
        store.put(others)
        store._timeout_s = 0.3
        process = store._process
        with frozen(pool._process.pid):
            gets = gets_of(puts)
            with pytest.raises(StoreError, match="no answer within"):
                store.get(gets)
            assert len(process._owed) == 1
            before = [bytes(get.into) for get in gets]
            assert store.count([put.name for put in others]) == 3, "the master answers, on another lane"
        again = gets_of(others)
        until(lambda: came_back(others, again, quiet(store.get, again)), "the blocks to come")
        store._timeout_s = PATIENCE_S
        until(lambda: store.count([others[0].name]) == 1 and not waiting(process), "the late call to end")
        assert [bytes(get.into) for get in gets] == before
        assert store._process is process, "it was not lost"
        store.close()
        kill(pool)


def waiting(process: MooncakeProcess) -> bool:
    """Return whether a lane is still owed an answer; those that have it are taken back."""
    with process.lane(Deadline(PATIENCE_S)), process.lane(Deadline(PATIENCE_S)), process.lane(Deadline(PATIENCE_S)):
        return bool(process._owed) and not any(lane._connection.poll(0) for lane in process._owed)


def test_when_all_lanes_hang_the_client_is_ended_and_started_anew(tmp_path):
    with mooncake_master(tmp_path) as master:
        pool, store = open_pool(master.port), open_store(master.port)
        puts = path(2)
        store.put(puts)
        store._timeout_s = 0.2
        first = store._process
        with frozen(pool._process.pid):
            said = [str(quiet(store.get, gets_of(puts))) for _ in range(5)]
            assert "all 4 calls that may be under way hang: Mooncake's client was ended" in said[-1]
            assert first.has_ended()
        store._timeout_s = PATIENCE_S
        gets = gets_of(puts)
        assert came_back(puts, gets, store.get(gets))
        assert store._process is not first
        store.close()
        kill(pool)


def test_a_client_that_dies_is_started_anew(tmp_path):
    with mooncake_master(tmp_path) as master:
        pool, store = open_pool(master.port), open_store(master.port)
        puts = path(2)
        store.put(puts)
        os.kill(store._process.pid, signal.SIGKILL)
        gets = gets_of(puts)
        found = quiet(store.get, gets)
        assert came_back(puts, gets, found) or "the process of Mooncake's client ended (code -9)" in str(found)
        assert came_back(puts, gets, store.get(gets))
        store.close()
        kill(pool)


def test_a_server_that_dies_takes_its_client_with_it(master):
    code = (
        "import sys, time\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_mooncake_store import open_store\n"
        f"store = open_store({master.port})\n"
        "store.use()\n"
        "print(store._process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pid = int(server.stdout.readline())
    assert Path(f"/proc/{pid}/fd").exists()
    server.kill()
    server.communicate()
    until(lambda: not Path(f"/proc/{pid}/fd").exists() or not list(Path(f"/proc/{pid}/fd").iterdir()), "it to end")


def test_a_master_that_dies_and_returns_is_found_again(tmp_path):
    with mooncake_master(tmp_path) as master:
        pool, changes = open_pool(master.port), []
        guarded = GuardedStore(open_store(master.port), on_change=changes.append, first_wait_s=0.1, most_wait_s=0.5)
        puts = path(3)
        assert guarded.put(puts) == 3
        master.kill()
        assert guarded.get(gets_of(puts)) == [MissCause.IO_ERROR] * 3
        assert guarded.put(puts) == 0
        assert changes[0].is_out
        master.start()
        until(lambda: not guarded.state.is_out, "the store to come back")
        until(lambda: guarded.put(puts) == 3, "memory to be in the pool again")
        gets = gets_of(puts)
        assert came_back(puts, gets, guarded.get(gets))
        guarded.close()
        kill(pool)


def test_a_machine_of_the_pool_that_dies_loses_its_blocks_only(tmp_path):
    with mooncake_master(tmp_path, "-client_ttl=2") as master:
        pool, store = open_pool(master.port), open_store(master.port)
        puts = path(3)
        store.put(puts)
        os.kill(pool._process.pid, signal.SIGKILL)
        found = quiet(store.get, gets_of(puts))
        assert isinstance(found, StoreError) or all(isinstance(cause, MissCause) for cause in found)
        other = open_pool(master.port)
        until(lambda: quiet(store.put, puts) == 3, "the pool to be without it")
        gets = gets_of(puts)
        until(lambda: came_back(puts, gets, quiet(store.get, gets)), "blocks to come from another machine")
        store.close()
        kill(pool)
        kill(other)


def test_a_master_that_is_not_there_at_first_is_waited_for(tmp_path):
    port = free_port()
    guarded = GuardedStore(open_store(port, timeout_s=0.3), first_wait_s=0.05, most_wait_s=0.1)
    begin = time.monotonic()
    assert guarded.put(path(1)) == 0
    with pytest.raises(ConfigError, match=rf"mooncake://127.0.0.1:{port}: .*--kv-remote-required"):
        guarded.connect()
    assert time.monotonic() - begin < PATIENCE_S / 4
    assert guarded.state.is_out
    with mooncake_master(tmp_path, port=port):
        until(lambda: not guarded.state.is_out, "the store to come")
        assert guarded.put(path(1)) == 0, "no memory is in the pool"
        assert not guarded.state.is_out
    guarded.close()


def test_a_client_that_still_looks_for_its_master_is_closed_at_once():
    store = open_store(free_port(), timeout_s=0.3)
    with pytest.raises(StoreError, match=r"no answer within 0.3 s"):
        store.use()
    begin = time.monotonic()
    store.close()
    assert time.monotonic() - begin < PATIENCE_S / 4


def test_use_tells_only_that_it_answers(store):
    assert store.use() == StoreUse(-1, -1, 0)


def test_a_self_test_leaves_nothing(store):
    tested = store.self_test()
    assert tested.ok
    assert tested.read_bytes_per_s > 0 < tested.write_bytes_per_s
    assert store.clear() == 0


@pytest.mark.parametrize(
    ("rest", "said"),
    [
        ("?protocol=udp", "protocol=udp is none of tcp, rdma. Leave it out for tcp."),
        ("?segment_gib=some", "segment_gib=some is not a number"),
        ("?segment=5", "unknown options segment. There are: device, local_hostname, protocol, segment_gib."),
        ("/0", "a Mooncake master has no accounts and no databases. Write it as mooncake://127.0.0.1:7."),
    ],
)
def test_what_cannot_work_is_refused(rest, said):
    with pytest.raises(ConfigError) as refused:
        open_store(7, options=rest)
    assert said in str(refused.value)
