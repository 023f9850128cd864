"""Prints what vLLM's own code makes of hashes and events, as JSON. Its Python runs it: it imports nothing of ours."""

import json
import os

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

import msgspec
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core import kv_cache_utils

SIZE = 16
TOKENS = [(7 * i * i + 3) % 50_000 for i in range(48)]
TOKENS += [0, -1, 23, 24, 255, 256, 65_535, 65_536, 2**31 - 1, *range(7)]
LORA, SALT, OTHER_SALT = ("lora", "sql", "/adapters/sql"), ("cache_salt", "s3cret"), ("cache_salt", "ü")
KEYS = {"plain": (None, None), "salt": ((SALT,), None), "lora": ((LORA,), (LORA,))}
KEYS["both"] = ((LORA, OTHER_SALT), (LORA,))

made = {}
for seed in (None, "0", "42"):
    os.environ.pop("PYTHONHASHSEED", None)
    if seed is not None:
        os.environ["PYTHONHASHSEED"] = seed
    kv_cache_utils.init_none_hash(sha256_cbor)
    for name, (first, others) in KEYS.items():
        parent, hashes = None, []
        for begin in range(0, len(TOKENS), SIZE):
            own = TOKENS[begin : begin + SIZE]
            parent = kv_cache_utils.hash_block_tokens(sha256_cbor, parent, own, others if begin else first)
            hashes.append(parent)
        made[f"{seed}/{name}"] = {
            "none": kv_cache_utils.NONE_HASH.hex(),
            "hashes": [one.hex() for one in hashes],
            "ints": [kv_cache_utils.maybe_convert_block_hash(one) for one in hashes],
        }

plain = BlockStored(
    block_hashes=[1, 2**64 - 1],
    parent_block_hash=None,
    token_ids=[1, 2, 3, 70_000],
    block_size=2,
    lora_id=None,
    medium="GPU",
    lora_name=None,
    extra_keys=[("s3cret",), None],
    group_idx=0,
)
full = BlockStored(
    block_hashes=[b"\x01" * 32],
    parent_block_hash=b"\x02" * 32,
    token_ids=[5, 6],
    block_size=2,
    lora_id=None,
    medium="CPU",
    lora_name="sql",
    extra_keys=None,
    group_idx=1,
    kv_cache_spec_kind="sliding_window",
    kv_cache_spec_sliding_window=512,
    locality="LOCAL",
    ownership="x",
    session_id="s",
)
removed = BlockRemoved(block_hashes=[1], medium="GPU", group_idx=0)
others = [removed, BlockRemoved(block_hashes=[b"\x01" * 32], medium=None)]
batch = KVEventBatch(ts=1764417600.25, events=[AllBlocksCleared(), plain, full, *others], data_parallel_rank=0)
made["batch"] = msgspec.msgpack.Encoder().encode(batch).hex()

given = os.environ.get("EVENTS")
if given:  # of ours: what vLLM's structs read of it, and write again
    read = msgspec.msgpack.Decoder(KVEventBatch).decode(bytes.fromhex(given))
    made["again"] = msgspec.msgpack.Encoder().encode(read).hex()
    made["read"] = repr(read)
print(json.dumps(made, indent=1))
