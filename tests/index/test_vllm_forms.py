"""Hashes and events are vLLM's: fixed ones that vLLM 0.32 made, and its own code beside ours where it is installed."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from vllm_environments import python_of

from pagefold.index import DEFAULT_SEED, ExtraKeys, PrefixIndex, block_hashes, tenant_salt
from pagefold.index.block_hash import first_parent
from pagefold.index.wire import (
    AllBlocksCleared,
    BadBatchError,
    BlockRemoved,
    BlockStored,
    EventBatch,
    decode_batch,
    encode_batch,
)

HERE = Path(__file__).parent
MADE = json.loads((HERE / "vllm_0_32.json").read_text())
PEER = python_of("0.32.0")

SIZE = 16
TOKENS = [(7 * i * i + 3) % 50_000 for i in range(48)]
TOKENS += [0, -1, 23, 24, 255, 256, 65_535, 65_536, 2**31 - 1, *range(7)]
KEYS = {
    "plain": ExtraKeys(),
    "salt": ExtraKeys(cache_salt="s3cret"),
    "lora": ExtraKeys(lora_name="sql", lora_path="/adapters/sql"),
    "both": ExtraKeys(cache_salt="ü", lora_name="sql", lora_path="/adapters/sql"),
}

BATCH = EventBatch(
    1764417600.25,
    [
        AllBlocksCleared(),
        BlockStored([1, 2**64 - 1], None, [1, 2, 3, 70_000], 2, None, "GPU", None, [("s3cret",), None], 0),
        BlockStored(
            [b"\x01" * 32],
            b"\x02" * 32,
            [5, 6],
            2,
            None,
            "CPU",
            "sql",
            None,
            1,
            "sliding_window",
            512,
            "LOCAL",
            "x",
            "s",
        ),
        BlockRemoved([1], "GPU", 0),
        BlockRemoved([b"\x01" * 32], None),
    ],
    0,
)


@pytest.mark.parametrize("seed", [None, "0", "42"])
@pytest.mark.parametrize("keys", KEYS)
def test_hashes_are_those_of_vllm(seed, keys):
    made = MADE[f"{seed}/{keys}"]
    ours = block_hashes(TOKENS, SIZE, KEYS[keys], **({} if seed is None else {"seed": seed}))
    assert [one.hex() for one in ours] == made["hashes"]
    assert first_parent(DEFAULT_SEED if seed is None else seed).hex() == made["none"]
    index = PrefixIndex()
    index.apply("a", EventBatch(0.0, [BlockStored(made["ints"], None, [], 0, None, "GPU", None)]))
    assert index.match(ours) == {"a": len(ours)}  # an event may tell a hash's last 64 bits


def test_only_whole_blocks_have_hashes():
    assert block_hashes(TOKENS[: SIZE - 1], SIZE) == []
    assert block_hashes(TOKENS[: 3 * SIZE - 1], SIZE) == block_hashes(TOKENS, SIZE)[:2]


def test_batches_are_those_of_vllm():
    payload = bytes.fromhex(MADE["batch"])
    assert encode_batch(BATCH) == payload
    assert decode_batch(payload) == BATCH


def test_fields_that_are_not_known_are_passed_over():
    import msgspec

    event = {"type": "BlockRemoved", "block_hashes": [1], "medium": "GPU", "of_tomorrow": {"a": 1}}
    payload = msgspec.msgpack.encode([0.0, [event], 0, "more"])
    assert decode_batch(payload).events == [BlockRemoved([1], "GPU")]


@pytest.mark.parametrize(
    "value", [None, [], [0.0], ["now", []], [0.0, [{"type": "Else"}]], [0.0, [{"type": "BlockRemoved"}]], {"ts": 0.0}]
)
def test_what_is_no_batch_is_said_to_be_none(value):
    import msgspec

    with pytest.raises(BadBatchError, match="no batch of KV events"):
        decode_batch(msgspec.msgpack.encode(value))


def test_tenants_have_other_hashes_and_their_names_are_in_none():
    salts = [tenant_salt(*of) for of in [("", ""), ("acme", ""), ("acme", "s"), ("acm", "es"), ("other", "")]]
    assert salts[0] == ""
    assert len(set(salts)) == len(salts)
    assert not any("acme" in salt for salt in salts)
    assert tenant_salt("", "as it came") == "as it came"
    firsts = {block_hashes(TOKENS, SIZE, ExtraKeys(salt))[-1] for salt in salts}
    assert len(firsts) == len(salts)


def test_a_salt_that_is_no_text_can_be_hashed():
    salt = tenant_salt("", "\ud800")
    assert block_hashes(TOKENS, SIZE, ExtraKeys(salt)) != block_hashes(TOKENS, SIZE)
    assert tenant_salt("", "\ud801") != salt


@pytest.mark.long
@pytest.mark.skipif(not PEER.exists(), reason="make peers installs vLLM")
def test_vllm_itself_says_so_too():
    environment = {**os.environ, "EVENTS": encode_batch(BATCH).hex()}
    environment.pop("PYTHONPATH", None)
    script = [str(PEER), str(HERE / "vllm_vectors.py")]
    told = subprocess.run(script, env=environment, capture_output=True, text=True, check=True, cwd="/").stdout
    made = json.loads(told[told.index("{") :])
    assert {name: made[name] for name in MADE} == MADE
    assert bytes.fromhex(made["again"]) == encode_batch(BATCH)
