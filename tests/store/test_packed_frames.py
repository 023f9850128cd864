"""Packed frames: a frame says how its payload is packed, and older ones, and those of other servers, are still read."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np
import pytest
from real_servers import (
    MOONCAKE_MASTER,
    NO_MOONCAKE,
    NO_REDIS,
    REDIS_SERVER,
    came_back,
    gets_of,
    mooncake_master,
    path,
    redis_server,
)

from pagefold import LLM, SamplingParams
from pagefold.kv import CODECS, TOKEN_BYTES, BlockName, KVGeometry, Namespace
from pagefold.kv.transfers import MissCause
from pagefold.runner.block_form import block_form
from pagefold.store.frame import FrameFormat, checksum_of
from pagefold.store.remote import open_remote

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from pagefold.store.guarded import GuardedStore
    from pagefold.store.protocol import Put

GEOMETRY = KVGeometry(4, 2, 32, 4, 16, CODECS["int8_per_token_head"])
PLAIN = FrameFormat.of(Namespace(model="m", layout="l", dtype="d"), GEOMETRY)
READS = PLAIN.for_transport(block_form(GEOMETRY), None)
PACKS, ROUNDS = (PLAIN.for_transport(block_form(GEOMETRY), bits) for bits in (0, 2))


def _puts(num: int) -> list[Put]:
    """Return blocks that can be packed."""
    puts = []
    for put in path(num, form=PLAIN, seed=int(np.random.default_rng().integers(2**32))):
        payload = memoryview(PACKS.trial_block())
        puts.append(put._replace(payload=payload, checksum=checksum_of(payload)))
    return puts


def test_what_is_packed_is_smaller_says_so_and_comes_back() -> None:
    (put,) = _puts(1)
    header, sent = PACKS.encode(*put)
    assert len(sent) < 0.95 * len(put.payload)
    version, num_packed, num_bytes = struct.unpack_from("<I", header, 8) + struct.unpack_from("<IQ", header, 148)
    assert (version, num_packed, num_bytes) == (2, len(sent), PLAIN.block_bytes)
    for form in (PACKS, READS):
        into = bytearray(PLAIN.block_bytes)
        assert form.decode(header, sent, memoryview(into), put.name) == put.checksum
        assert into == put.payload
    assert PLAIN.read_header(header) is MissCause.OTHER_VERSION
    assert PLAIN.check(header, sent, put.name) is MissCause.OTHER_VERSION


def test_frames_that_are_not_packed_are_as_before_and_read_by_all() -> None:
    (put,) = _puts(1)
    for form in (PLAIN, READS):
        header, sent = form.encode(*put)
        assert (header, sent) == (PLAIN.header(put.name, put.checksum), put.payload)
    into = bytearray(PLAIN.block_bytes)
    assert PACKS.decode(header, put.payload, memoryview(into), put.name) == put.checksum
    assert into == put.payload


def test_what_cannot_be_packed_travels_as_it_is() -> None:
    payload = memoryview(np.random.default_rng().bytes(PLAIN.block_bytes))
    put = _puts(1)[0]._replace(payload=payload, checksum=checksum_of(payload))
    header, sent = PACKS.encode(*put)
    assert sent == payload
    assert PLAIN.check(header, sent, put.name) == put.checksum


def test_rounded_blocks_are_of_another_layout() -> None:
    (put,) = _puts(1)
    header, sent = ROUNDS.encode(*put)
    into = bytearray(PLAIN.block_bytes)
    found = ROUNDS.decode(header, sent, memoryview(into), put.name)
    assert found == checksum_of(bytes(into)) != put.checksum
    assert ROUNDS.layout != PACKS.layout == PLAIN.layout
    for form in (PACKS, READS):
        assert form.decode(header, sent, memoryview(into), put.name) is MissCause.OTHER_LAYOUT


def test_every_flipped_bit_is_found() -> None:
    (put,) = _puts(1)
    header, sent = PACKS.encode(*put)
    rng = np.random.default_rng()
    for _ in range(60):
        damaged = bytearray(header + sent)
        at = int(rng.choice([rng.integers(200), rng.integers(PLAIN.header_bytes, len(damaged))]))
        damaged[at] ^= 1 << int(rng.integers(8))
        frame, into = memoryview(damaged), memoryview(bytearray(PLAIN.block_bytes))
        end = PLAIN.header_bytes
        found = PACKS.decode(bytes(frame[:end]), frame[end:], into, put.name)
        assert isinstance(found, MissCause) or into == put.payload  # a bit that pads a stream means nothing
    for num in (0, 10, len(sent) - 1):
        into = memoryview(bytearray(PLAIN.block_bytes))
        assert PACKS.decode(header, sent[:num], into, put.name) is MissCause.DAMAGED


@pytest.fixture(
    params=[
        pytest.param("redis", marks=pytest.mark.skipif(REDIS_SERVER is None, reason=NO_REDIS)),
        pytest.param("mooncake", marks=pytest.mark.skipif(MOONCAKE_MASTER is None, reason=NO_MOONCAKE)),
    ]
)
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "redis":
        with redis_server(tmp_path) as server:
            yield f"redis://127.0.0.1:{server.port}"
    else:
        with mooncake_master(tmp_path) as server:
            yield f"mooncake://127.0.0.1:{server.port}?segment_gib=0.25"


def _open(url: str, form: FrameFormat) -> GuardedStore:
    store = open_remote(url, form, timeout_s=60.0)
    store.connect()
    return store


@pytest.mark.quick(every=2)
def test_stores_carry_both_kinds_of_frames(url: str) -> None:
    puts = _puts(6)
    store = _open(url, PACKS)
    assert store.put(puts) == 6
    gets = gets_of(puts)
    assert came_back(puts, gets, store.get(gets))
    assert store.self_test().ok
    rounds = _open(url, ROUNDS)
    assert rounds.self_test().ok
    rounds.close()
    if url.startswith("redis"):
        other = _open(url, READS)  # a server that packs nothing reads what others packed
        others = _puts(3)
        assert other.put(others) == 3
        for form, wanted in ((other, puts), (store, others)):
            gets = gets_of(wanted)
            assert came_back(wanted, gets, form.get(gets))
        other.close()
    store.close()


@pytest.mark.skipif(REDIS_SERVER is None, reason=NO_REDIS)
def test_an_engine_continues_from_packed_blocks_as_if_it_had_computed_them(
    tiny_chat_model: Path, tmp_path: Path
) -> None:
    prompt = {"prompt_token_ids": np.random.default_rng().integers(100, 40000, 300).tolist()}
    how = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    config = {
        "kv_cache_dtype": "int8_per_token_head",
        "kv_quality_floor": 0.0,
        "kv_cache_memory_bytes": 2**22,
        "max_model_len": 512,
        "kv_transport_codec": "lossless",
        "kv_write_policy": "write_through",
        "kv_remote_required": True,
    }
    with redis_server(tmp_path) as server:
        results = []
        for _ in range(2):
            llm = LLM(str(tiny_chat_model), kv_remote_url=f"redis://127.0.0.1:{server.port}", **config)
            results.append(llm.generate(prompt, how, use_tqdm=False)[0])
            llm.close()
    first, second = results
    assert second.outputs[0].token_ids == first.outputs[0].token_ids
    assert first.num_cached_tokens == 0


def test_rounding_does_not_make_damage_right() -> None:
    """A bit that turned after the checksum was taken is seen by whoever reads the block."""
    payload = bytearray(PACKS.trial_block())
    checksum = checksum_of(payload)
    payload[7] ^= 1
    name = BlockName(bytes(range(32)), bytes(32), bytes(32), bytes(GEOMETRY.block_size * TOKEN_BYTES))
    header, sent = ROUNDS.encode(name, memoryview(bytes(payload)), checksum)
    into = memoryview(bytearray(GEOMETRY.bytes_per_block))
    assert ROUNDS.decode(header, memoryview(bytes(sent)), into, name) is MissCause.DAMAGED


def test_what_a_store_is_tried_with_comes_back_as_it_is() -> None:
    for form in (PACKS, ROUNDS):
        payload = memoryview(form.trial_block())
        name = BlockName(bytes(range(32)), bytes(32), bytes(32), bytes(GEOMETRY.block_size * TOKEN_BYTES))
        header, sent = form.encode(name, payload, checksum_of(payload))
        into = memoryview(bytearray(GEOMETRY.bytes_per_block))
        assert form.decode(header, memoryview(bytes(sent)), into, name) == checksum_of(payload)
        assert into == payload
