"""What vLLM's CPU tier finds of a trace with a cache policy: its own manager, driven as its scheduler drives it.

It runs in vLLM's Python, with Pagefold in PYTHONPATH, and prints a line of JSON:

    PYTHONPATH=src .peers/vllm/bin/python benchmarks/integrations/policy_replay.py TRACE POLICY CHUNKS [--requests N]

A request after another. The scheduler looks chunks up from the first on until one is missing, loads what was found,
computes the rest in steps of ``STEP_TOKENS``, and offers what each step has filled; then the request ends. Only whole
chunks are kept; outputs are not.
"""

from __future__ import annotations

import argparse
import json
import time
from hashlib import sha256
from pathlib import Path

from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

CHUNK_TOKENS = 512
STEP_TOKENS = 8192
MODULE = "pagefold.integrations.vllm"


def read_paths(trace: Path, most: int) -> tuple[list[list[bytes]], int]:
    """Return the keys of each request's whole chunks, and how many tokens all prompts have."""
    paths, num_tokens = [], 0
    with trace.open(encoding="utf-8") as lines:
        for _, line in zip(range(most), lines, strict=False):
            request = json.loads(line)
            num_tokens += request["input_length"]
            whole = request["hash_ids"][: request["input_length"] // CHUNK_TOKENS]
            paths.append([make_offload_key(sha256(b"%d" % one).digest(), 0) for one in whole])
    return paths, num_tokens


def serve(manager: CPUOffloadingManager, number: int, keys: list[bytes]) -> int:
    """Have the manager see a request from its begin to its end. Return how many chunks were found."""
    context = ReqContext(req_id=str(number))
    for index, key in enumerate(keys, start=1):
        context.set_offload_key_position(key, index * CHUNK_TOKENS)
    manager.on_new_request(context)
    num_hits = 0
    while num_hits < len(keys) and manager.lookup(keys[num_hits], context) is LookupResult.HIT:
        num_hits += 1
    if num_hits:
        manager.prepare_load(keys[:num_hits], context)
        manager.complete_load(set(keys[:num_hits]), context)
    for begin in range(num_hits, len(keys), STEP_TOKENS // CHUNK_TOKENS):
        stored = manager.prepare_store(keys[begin : begin + STEP_TOKENS // CHUNK_TOKENS], context)
        if stored is not None:
            manager.complete_store(set(stored.keys_to_store), context)
    manager.on_request_finished(context)
    return num_hits


def main() -> None:
    """Replay, and print what was found."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("trace", type=Path)
    options.add_argument("policy", help="lru, arc, or a class of Pagefold")
    options.add_argument("chunks", type=int)
    options.add_argument("--requests", type=int, default=10**9)
    args = options.parse_args()
    paths, num_tokens = read_paths(args.trace, args.requests)
    module = MODULE if args.policy.startswith("Pagefold") else None
    manager = CPUOffloadingManager(args.chunks, cache_policy=args.policy, cache_policy_module_path=module)
    taken, num_hits = [], 0
    for number, keys in enumerate(paths):
        begin = time.thread_time()
        num_hits += serve(manager, number, keys)
        taken.append(time.thread_time() - begin)
    taken.sort()
    print(
        json.dumps(
            {
                "policy": args.policy,
                "num_chunks": args.chunks,
                "hit_tokens": num_hits * CHUNK_TOKENS,
                "prompt_tokens": num_tokens,
                "p50_us": taken[len(taken) // 2] * 1e6,
                "p99_us": taken[len(taken) * 99 // 100] * 1e6,
            }
        )
    )


if __name__ == "__main__":
    main()
