"""Stores chunks through vLLM's tiers while it is killed, flips bytes on the disk, and counts what that does.

It runs in vLLM's Python, with Pagefold in PYTHONPATH, and prints a line of JSON:

    PYTHONPATH=src .peers/vllm/bin/python benchmarks/integrations/tier_kill.py TIER FOLDER [--stores N] [--kills N]

TIER is ``pagefold``, or ``fs``, vLLM's own. vLLM's specification, managers and shared memory are real, driven as its
scheduler drives them. Each round is a process that stores new chunks until it is killed (SIGKILL) at a random moment;
all the while it is looked at how much the folder takes. Then a byte of each of many chunks on the disk is
changed, and all chunks are looked up and brought: what came with other bytes than were stored is counted.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import signal
import struct
import sys
import time
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import vllm
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

ROW = 4096
NUM_ROWS = 256
PER_REQUEST = 32
LIMIT_BYTES = 16 * 2**20
NUM_FLIPS = 500
STEP_END = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())


def tier_config(tier: str, folder: Path) -> dict[str, object]:
    """Return what vLLM's configuration says of the tier."""
    if tier == "fs":
        return {"type": "fs", "root_dir": str(folder)}
    module = {"type": "PagefoldTier", "module_path": "pagefold.integrations.vllm"}
    return module | {"disk_path": str(folder), "limit_bytes": LIMIT_BYTES}


def key_of(index: int) -> bytes:
    """Return what vLLM calls a chunk."""
    return make_offload_key(sha256(b"%d" % index).digest(), 0)


def bytes_of(index: int) -> bytes:
    """Return what a chunk holds."""
    return sha256(b"bytes %d" % index).digest() * (ROW // 32)


class Engine:
    """vLLM's side of offloading, without a model.

    Args:
        tier: the kind of tier.
        folder: of the tier.
    """

    def __init__(self, tier: str, folder: Path) -> None:
        config = OffloadingConfig(
            groups=(OffloadingGroupConfig(16, ("layers.0",), 0),),
            worker_kv_bytes_per_block=ROW,
            enable_kv_cache_events=False,
            extra_config={"cpu_bytes_to_use": NUM_ROWS * ROW, "secondary_tiers": [tier_config(tier, folder)]},
            engine_id=f"pagefold-kill-{os.getpid()}",
            model=OffloadingModelConfig("model", "bfloat16"),
            cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
            parallel=OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, is_parallelism_agnostic=False),
            kv_cache_layout="NHD",
        )
        self.manager = TieringOffloadingSpec(config).get_manager()
        self.view = self.manager.primary_tier.get_kv_memoryview().cast("B")
        self._num_requests = 0

    def store(self, indices: range) -> None:
        """Have a request fill chunks, and wait until its tier has them."""
        context = self._begin(indices)
        keys = [key_of(index) for index in indices]
        stored = self.manager.prepare_store(keys, context)
        assert stored is not None, "nothing else is under way"
        index_of = dict(zip(keys, indices, strict=True))
        for key, row in zip(stored.keys_to_store, stored.store_spec.block_ids, strict=True):
            self.view[int(row) * ROW : (int(row) + 1) * ROW] = bytes_of(index_of[key])
        self.manager.complete_store(set(stored.keys_to_store), context)
        self._end(context)

    def find(self, indices: range) -> tuple[int, int]:
        """Have a request look chunks up and load them; return how many it got, and how many of them were wrong."""
        context = self._begin(indices)
        keys = [key_of(index) for index in indices]
        while True:
            found = [self.manager.lookup(key, context) for key in keys]
            if not {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(found):
                break
            self.manager.on_schedule_end(STEP_END)
            time.sleep(0.0005)
        num_wrong = 0
        hits = [index for index, result in zip(indices, found, strict=True) if result is LookupResult.HIT]
        if hits:
            there = [key_of(index) for index in hits]
            rows = self.manager.prepare_load(there, context).block_ids
            num_wrong = sum(
                self.view[int(row) * ROW : (int(row) + 1) * ROW] != bytes_of(index)
                for index, row in zip(hits, rows, strict=True)
            )
            self.manager.complete_load(set(there), context)
        self._end(context)
        return len(hits), num_wrong

    def _begin(self, indices: range) -> ReqContext:
        self._num_requests += 1
        context = ReqContext(req_id=str(self._num_requests))
        for position, index in enumerate(indices, start=1):
            context.set_offload_key_position(key_of(index), 16 * position)
        self.manager.on_new_request(context)
        return context

    def _end(self, context: ReqContext) -> None:
        self.manager.on_request_finished(context)
        while True:
            self.manager.on_schedule_end(STEP_END)
            if not self.manager.has_pending_work():
                return
            time.sleep(0.0002)

    def close(self) -> None:
        """Shut all down."""
        self.view.release()
        self.manager.shutdown()


def folder_bytes(folder: Path) -> int:
    """Return the bytes of all files of a folder."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            total += path.lstat().st_size
    return total


def write(tier: str, folder: Path, said: mmap.mmap) -> None:
    """Store new chunks for ever, and say how many were."""
    engine = Engine(tier, folder)
    (num,) = struct.unpack("Q", said[:8])
    while True:
        engine.store(range(num, num + PER_REQUEST))
        num += PER_REQUEST
        said[:8] = struct.pack("Q", num)


def flip(folder: Path, rng: random.Random, num: int) -> int:
    """Change a byte of each of so many chunks on the disk; return how many were."""
    files = [path for path in folder.rglob("*") if path.suffix in {".bin", ".frames"}]
    places = [(path, place) for path in files for place in range(0, path.stat().st_size, 2 * ROW)]
    chosen = rng.sample(places, min(num, len(places)))
    for path, place in chosen:
        size = min(2 * ROW, path.stat().st_size - place)
        with path.open("r+b") as file:
            offset = place + size - 1 - rng.randrange(ROW)  # of the payload, which is the last part
            file.seek(offset)
            byte = file.read(1)[0]
            file.seek(offset)
            file.write(bytes((byte ^ 1 << rng.randrange(8),)))
    return len(chosen)


def main() -> None:
    """Run, and print what was counted."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("tier", choices=("pagefold", "fs"))
    options.add_argument("folder", type=Path)
    options.add_argument("--stores", type=int, default=100_000)
    options.add_argument("--kills", type=int, default=100)
    options.add_argument("--seed", type=int, default=0)
    args = options.parse_args()
    rng = random.Random(args.seed)
    said = mmap.mmap(-1, 8)
    most = num_kills = 0
    while num_kills < args.kills or struct.unpack("Q", said[:8])[0] < args.stores:
        pid = os.fork()
        if not pid:
            try:
                write(args.tier, args.folder, said)
            finally:
                os._exit(1)
        (begun,) = struct.unpack("Q", said[:8])
        want = begun + max(1, round(args.stores / args.kills * rng.uniform(0.5, 1.5)))
        while struct.unpack("Q", said[:8])[0] < want and os.waitpid(pid, os.WNOHANG) == (0, 0):
            most = max(most, folder_bytes(args.folder))
            time.sleep(rng.uniform(0.0, 0.05))
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)
        Path(f"/dev/shm/vllm_offload_pagefold-kill-{pid}.mmap").unlink(missing_ok=True)  # noqa: S108 - vLLM's
        if struct.unpack("Q", said[:8])[0] == begun:
            sys.exit("a writer stored nothing")
        most = max(most, folder_bytes(args.folder))
        num_kills += 1
    (num_stores,) = struct.unpack("Q", said[:8])
    recent = range(max(0, num_stores - 20_000) // PER_REQUEST * PER_REQUEST, num_stores, PER_REQUEST)
    counted = []
    num_flipped = 0
    for flips in (0, NUM_FLIPS):
        num_flipped = flip(args.folder, rng, flips)
        engine = Engine(args.tier, args.folder)
        num_found = num_wrong = 0
        for begin in recent:
            found, wrong = engine.find(range(begin, begin + PER_REQUEST))
            num_found += found
            num_wrong += wrong
        engine.close()
        counted.append((num_found, num_wrong))
    print(
        json.dumps(
            {
                "tier": args.tier,
                "vllm": vllm.__version__,
                "num_stores": num_stores,
                "num_kills": num_kills,
                "limit_bytes": LIMIT_BYTES,
                "most_bytes": most,
                "found_after_kills": counted[0][0],
                "wrong_after_kills": counted[0][1],
                "num_flipped": num_flipped,
                "found_after_flips": counted[1][0],
                "wrong_after_flips": counted[1][1],
            }
        )
    )


if __name__ == "__main__":
    main()
