"""Publisher and subscriber over ZeroMQ: a server's index is its tree, also when batches or the server are lost."""

from __future__ import annotations

import tempfile
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest
import zmq
from index.tree_truth import holds_of
from local_server import LocalServer, ProcessServer, until

from pagefold.config import KVEventsConfig
from pagefold.errors import ConfigError
from pagefold.index import DEFAULT_SEED, PrefixIndex, block_hashes
from pagefold.index.subscriber import KVEventSubscriber
from pagefold.index.wire import AllBlocksCleared, BlockStored, EventBatch, encode_batch
from pagefold.kv import KEEP_ALL
from pagefold.observe import kv_event_publisher
from pagefold.observe.kv_event_publisher import KVEventPublisher

if TYPE_CHECKING:
    from collections.abc import Iterator

LOOPBACK = "tcp://127.0.0.1:*"
ADMIN = {"Authorization": "Bearer sk-admin"}
SMALL = {"kv_cache_memory_bytes": 20 * 2**13, "max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64}


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A folder for sockets of this machine; their paths must be short."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


def publisher(endpoint: str = LOOPBACK, replay_endpoint: str | None = LOOPBACK, **more) -> KVEventPublisher:
    config = KVEventsConfig(
        enable_kv_cache_events=True, endpoint=endpoint, replay_endpoint=replay_endpoint, topic="kv@a", **more
    )
    return KVEventPublisher(config, seed=DEFAULT_SEED, uses_int_hashes=True)


class Lossy(KVEventSubscriber):
    """Loses what is published while ``loses`` is set."""

    loses = False

    def _take(self, frames: list[bytes]) -> None:
        if not self.loses:
            super()._take(frames)


def hear(index: PrefixIndex, source: KVEventPublisher, *, can_ask: bool = True) -> Lossy:
    replay = source.replay_endpoint if can_ask else None
    return Lossy(index, "a", source.endpoint, replay_endpoint=replay, topic="kv@", idle_s=0.3, replay_timeout_s=20.0)


def load(server: LocalServer, seed: int, num_prompts: int = 8) -> None:
    """Send prompts that share beginnings, and do not all fit."""
    random = Random(seed)
    begins = [[random.randrange(3, 40_000) for _ in range(60)] for _ in range(3)]
    for _ in range(num_prompts):
        own = [random.randrange(3, 40_000) for _ in range(random.randrange(60))]
        server.complete([*random.choice(begins), *own], max_tokens=2)
    server.check_pool()


def is_equal(index: PrefixIndex, server: LocalServer) -> bool:
    return index.replicas()["a"].is_known and index.holds("a") == holds_of(server.engine.scheduler.core)


def test_an_index_is_the_servers_tree_whatever_was_lost(tiny_chat_model):
    source = publisher(buffer_steps=6)
    index = PrefixIndex()
    server = LocalServer(tiny_chat_model, kv_events=source, door={"admin_api_key": "sk-admin"}, **SMALL)
    try:
        with hear(index, source) as heard:
            load(server, 1)
            assert server.metric("pagefold:blocks_evicted_total", "allocation") > 0
            until(lambda: is_equal(index, server), "the index")
            heard.loses = True  # few batches: they are replayed
            load(server, 2, num_prompts=1)
            heard.loses = False
            load(server, 3, num_prompts=1)
            until(lambda: is_equal(index, server), "the index, after a gap")
            heard.loses = True  # more than are kept: all is told anew
            load(server, 4)
            heard.loses = False
            load(server, 5, num_prompts=1)
            until(lambda: is_equal(index, server), "the index, after a loss")
            assert heard.counts.num_replayed
            assert heard.counts.num_lost
            server.http.post("/reset_prefix_cache", headers=ADMIN).raise_for_status()
            until(lambda: not index.holds("a") and index.replicas()["a"].is_known, "the index, after a reset")
            load(server, 6, num_prompts=2)
            until(lambda: is_equal(index, server), "the index, behind the reset")
        late = PrefixIndex()
        with hear(late, source):  # begins when nothing is sent, and most batches are kept no more
            until(lambda: "a" in late.replicas() and is_equal(late, server), "an index that came late")
        counts = server.metrics("pagefold:kv_event")
        assert counts["pagefold:kv_event_batches_sent_total", ""] == source.counts.num_sent > 0
        assert counts["pagefold:kv_event_batches_dropped_total", ""] == 0
        assert counts["pagefold:kv_events_told_anew_total", ""] >= 1
    finally:
        server.close()
        source.close()
    assert not late.replicas()["a"].is_known


def test_a_server_that_starts_anew_is_noticed(tiny_chat_model, sockets):
    endpoints = (f"ipc://{sockets}/events", f"ipc://{sockets}/replay")
    index = PrefixIndex()
    heard = None
    for seed in (1, 2):
        source = publisher(*endpoints)
        server = LocalServer(tiny_chat_model, kv_events=source, **SMALL)
        try:
            heard = heard or hear(index, source)
            load(server, seed, num_prompts=3)
            until(lambda server=server: is_equal(index, server), "the index")
        finally:
            server.close()
            source.close()
        until(lambda: not index.replicas()["a"].is_known, "the end of the server")
    assert heard.counts.num_restarts
    heard.close()


def test_hybrid_models_tell_of_every_group(windowed_chat_model):
    source = publisher()
    index = PrefixIndex()
    server = LocalServer(windowed_chat_model, kv_events=source, **SMALL | {"kv_cache_memory_bytes": 60 * 2**13})
    try:
        with hear(index, source):
            load(server, 1)
            until(lambda: is_equal(index, server), "the index")
            assert {group for groups in index.holds("a").values() for group in groups} == {0, 1}
    finally:
        server.close()
        source.close()


def test_what_is_dropped_is_counted_and_made_good():
    from observe.ledger_house import House

    source = publisher(max_queue_size=2)
    house = House(listen=source)
    for first in range(5):  # nobody takes batches yet
        house.send([first] * 9)
        house.run()
    assert source.counts.num_dropped
    index = PrefixIndex()
    with hear(index, source, can_ask=False):
        source.begin(4, tuple(house.core.rules))
        until(lambda: source.counts.num_told_anew, "the publisher to tell anew")
        house.send([77] * 9)  # the subscriber may have connected later than that
        house.run()
        source._noted.tell_all()
        until(lambda: index.holds("a") == holds_of(house.core), "the index")
    source.close()


def test_a_publisher_that_dies_keeps_nothing(caplog):
    from observe.ledger_house import House

    source = publisher()
    source._events.close()  # a bug of ours, say
    house = House(listen=source)
    for first in range(3):
        house.send([first] * 9)
        house.run()
    assert source._noted.num_waiting
    source.begin(4, tuple(house.core.rules))
    source._thread.join(60)
    assert "KV events have failed: none are sent any more" in caplog.text
    house.send([77] * 9)
    house.run()
    assert house.core.pool.num_cached
    assert not source._noted.num_waiting
    assert not source._noted._places
    source.close()


def test_whoever_asks_again_and_again_does_not_make_it_tell_all_each_time(monkeypatch):
    from observe.ledger_house import House

    monkeypatch.setattr(kv_event_publisher, "_ANEW_EVERY_S", 3600.0)
    source = publisher(buffer_steps=1)
    house = House(listen=source)
    for first in range(3):
        house.send([first] * 9)
        house.run()
    source.begin(4, tuple(house.core.rules))
    until(lambda: source.counts.num_sent > 1, "more than is kept")
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(source.replay_endpoint)
    for _ in range(20):
        socket.send_multipart([b"", number(0)])
        while True:
            assert socket.poll(60_000)
            if socket.recv_multipart()[2] == number(-1):
                break
    until(lambda: source.counts.num_told_anew, "all to be told anew")
    socket.send_multipart([b"", number(0)])
    until(lambda: source.counts.num_put_off, "the last one to be put off")
    assert source.counts.num_told_anew == 1
    monkeypatch.setattr(source, "_anew_from_s", 0.0)  # an hour later
    until(lambda: source.counts.num_told_anew == 2, "who waited to be helped")
    context.destroy(linger=0)
    source.close()


class Wire:
    """A publisher of whatever a test sends."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.XPUB)
        self.socket.bind(LOOPBACK)
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def wait(self) -> None:
        """Until somebody listens."""
        assert self.socket.poll(60_000)
        self.socket.recv()

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def close(self) -> None:
        self.context.destroy(linger=0)


def number(value: int) -> bytes:
    return value.to_bytes(8, "big", signed=value < 0)


def test_garbage_is_counted_and_ends_nothing():
    wire, index, random = Wire(), PrefixIndex(), Random(3)
    good = encode_batch(EventBatch(1.0, [AllBlocksCleared(), BlockStored([1], None, [], 0, None, "GPU", None)], 0))
    with KVEventSubscriber(index, "a", wire.endpoint) as heard:
        wire.wait()
        wire.send(b"", number(0), good)
        until(lambda: index.match([1]) == {"a": 1}, "a batch")
        frames = [(), (number(1),), (number(1), good, b""), (b"1", good), (b"", good), (number(-1), b"")]
        for bad in frames:
            wire.send(b"", *bad)
        until(lambda: heard.counts.num_bad == len(frames), "what are no batches")
        assert index.match([1]) == {"a": 1}
        payloads = [b"", b"\xc1", good[:-1], good + b"\x00", b"\x93\xc0\x90\xc0", random.randbytes(50)]
        payloads += [bytes(byte ^ (random.random() < 0.2) * random.randrange(256) for byte in good) for _ in range(60)]
        deep = b"\x93" + b"\x91" * 5000
        far = encode_batch(EventBatch(1.0, [BlockStored([1], None, [], 0, None, "GPU", None, group_idx=99)], 0))
        for place, payload in enumerate([*payloads, deep, far], 1):
            wire.send(b"", number(place), payload)
        last = len(payloads) + 3
        end = encode_batch(EventBatch(2.0, [AllBlocksCleared(), BlockStored([2], None, [], 0, None, "GPU", None)], 0))
        wire.send(b"", number(last), end)
        until(lambda: index.match([2]) == {"a": 1}, "a batch behind garbage")
        assert index.replicas()["a"] == (True, 1, 2.0)
        assert heard.counts.num_bad > len(frames)
        assert heard.is_alive
        wire.send(b"", number(2**64 - 1 - 1), good)
        wire.send(b"", number(0), good)
        until(lambda: heard.counts.num_restarts == 1, "a publisher that begins anew")
    wire.close()


def test_who_answers_nonsense_or_not_at_all_is_doubted():
    wire, index = Wire(), PrefixIndex()
    router = wire.context.socket(zmq.ROUTER)
    router.bind(LOOPBACK)
    asked = router.getsockopt_string(zmq.LAST_ENDPOINT)
    with KVEventSubscriber(index, "a", wire.endpoint, replay_endpoint=asked, replay_timeout_s=0.2, idle_s=0.1) as heard:
        wire.wait()
        until(lambda: router.poll(0), "a question")
        who = router.recv_multipart()[0]
        router.send_multipart([who, b"", b"what?"])
        until(lambda: heard.counts.num_bad, "the answer to be none")
        assert not index.replicas()["a"].is_known
        assert heard.is_alive
    wire.close()


def test_somebody_who_asks_nonsense_is_not_answered():
    source = publisher()
    source.begin(4, (KEEP_ALL,))
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(source.replay_endpoint)
    for frames in ([b"hello"], [b"", b"1"], [b"", b"", b"", b""]):
        socket.send_multipart(frames)
    socket.send_multipart([b"", number(0)])
    assert socket.poll(60_000)
    frames = socket.recv_multipart()
    while frames[2] != number(-1):
        assert frames[1:3] == [b"kv@a", number(0)]
        assert socket.poll(60_000)
        frames = socket.recv_multipart()
    context.destroy(linger=0)
    source.close()


def test_an_endpoint_that_is_taken_is_said_before_anything_else():
    source = publisher()
    with pytest.raises(ConfigError, match=r"KV events cannot listen on .*in use"):
        publisher(LOOPBACK, source.replay_endpoint)
    with pytest.raises(ConfigError, match="Cannot hear KV events at nowhere"):
        KVEventSubscriber(PrefixIndex(), "a", "nowhere")
    source.close()


@pytest.mark.long
def test_pagefold_serve_sends_them(sockets):
    import json

    endpoints = {"endpoint": f"ipc://{sockets}/events", "replay_endpoint": f"ipc://{sockets}/replay"}
    told = json.dumps({"enable_kv_cache_events": True, "topic": "t", **endpoints})
    server = ProcessServer("smollm2-135m", "--kv-events-config", told, "--max-model-len", "512")
    index = PrefixIndex()
    try:
        with KVEventSubscriber(index, "a", endpoints["endpoint"], replay_endpoint=endpoints["replay_endpoint"]):
            tokens = list(range(1000, 1100))
            server.complete(tokens, max_tokens=1)
            until(lambda: index.match(block_hashes(tokens, 16)) == {"a": 6}, "the prompt's blocks")
            assert index.replicas()["a"].is_known
            assert server.metric("pagefold:kv_event_batches_sent_total") > 0
    finally:
        server.close()
