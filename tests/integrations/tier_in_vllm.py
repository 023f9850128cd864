"""Drives PagefoldTier inside vLLM as its scheduler does, in vLLM's own Python: python tier_in_vllm.py FOLDER CASE.

All of vLLM's is real: the specification of a tiered cache, its factories, its managers and its shared memory. Only the
transfers between a card and the host's memory are left out: the test writes rows where a worker would.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from contextlib import contextmanager
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

ROW = 8192
NUM_CHUNKS = 64
LIMIT = 16 * 2**20
NO_CONTEXT = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())
_PAGEFOLD = {"type": "PagefoldTier", "module_path": "pagefold.integrations.vllm"}


def config_of(tier, *, dtype="bfloat16", tp_size=1, num_chunks=NUM_CHUNKS, row=ROW, **extra):
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(16, ("layers.0", "layers.1"), 0),),
        worker_kv_bytes_per_block=row // tp_size,
        enable_kv_cache_events=True,
        extra_config={"cpu_bytes_to_use": num_chunks * row, "secondary_tiers": [tier], **extra},
        engine_id=f"pagefold-test-{os.getpid()}",
        model=OffloadingModelConfig("some/model", dtype),
        cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(0, tp_size, tp_size, 1, 1, 1, 0, 1, None, is_parallelism_agnostic=False),
        kv_cache_layout="LBHNC",
    )


class Engine:
    """vLLM's side of offloading, without a model."""

    def __init__(self, tier, **about):
        self.spec = TieringOffloadingSpec(config_of(tier, **about))
        self.manager = self.spec.get_manager()
        self.view = self.manager.primary_tier.get_kv_memoryview()
        self.row = self.view.strides[0]
        self.num_requests = 0
        self.counters = {}
        self.gauges = {}

    def request(self, keys):
        self.num_requests += 1
        context = ReqContext(req_id=str(self.num_requests))
        for index, key in enumerate(keys, start=1):
            context.set_offload_key_position(key, 16 * index)
        self.manager.on_new_request(context)
        return context

    def step(self):
        self.manager.on_schedule_end(NO_CONTEXT)
        stats = self.manager.get_stats()
        if stats is not None:
            for name, values in stats.data["data"].items():
                kind = stats.data["types"][name]
                for labels, value in values.items():
                    if kind == "counter":
                        self.counters[name] = self.counters.get(name, 0) + value
                    elif kind == "gauge":
                        self.gauges[name] = value
                    assert all(isinstance(label, str) for label in labels)

    def settle(self):
        """Step until nothing is under way."""
        for _ in range(100_000):
            self.step()
            if not self.manager.has_pending_work():
                return
            time.sleep(0.001)
        msg = "no end of what is under way"
        raise AssertionError(msg)

    def store(self, keys, *, settles=True):
        """Have a request fill chunks. Return how many the host's memory took."""
        context = self.request(keys)
        stored = self.manager.prepare_store(keys, context)
        num = 0
        if stored is not None:
            for key, row in zip(stored.keys_to_store, stored.store_spec.block_ids, strict=True):
                self.view[int(row) : int(row) + 1].cast("B")[:] = bytes_of(key, self.row)
            num = len(stored.keys_to_store)
            self.manager.complete_store(set(stored.keys_to_store), context)
        self.manager.on_request_finished(context)
        if settles:
            self.settle()
        return num

    def find(self, keys):
        """Have a request look chunks up until each is there or not; check the bytes of those that are. Return how many.

        Chunks behind a missing one are looked up as well.
        """
        context = self.request(keys)
        for _ in range(100_000):
            found = [self.manager.lookup(key, context) for key in keys]
            if not {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(found):
                break
            self.step()
            time.sleep(0.001)
        else:
            msg = f"no end of it: {found}"
            raise AssertionError(msg)
        hits = [key for key, result in zip(keys, found, strict=True) if result is LookupResult.HIT]
        rows = self.manager.prepare_load(hits, context).block_ids if hits else []
        self.wrong = sum(
            bytes(self.view[int(row) : int(row) + 1].cast("B")) != bytes_of(key, self.row)
            for key, row in zip(hits, rows, strict=True)
        )
        if hits:
            self.manager.complete_load(set(hits), context)
        self.manager.on_request_finished(context)
        self.step()
        return len(hits)

    def forget_host(self):
        """Empty the host's memory; the tiers keep what they have."""
        self.settle()
        self.manager.reset_cache()

    def close(self):
        self.view.release()
        self.manager.shutdown()


def bytes_of(key, num):
    digest = sha256(key).digest()
    return digest * (num // len(digest))


def keys_of(of, num):
    return [make_offload_key(sha256(b"%d %d" % (of, index)).digest(), 0) for index in range(num)]


def on_disk(folder, **about):
    return _PAGEFOLD | {"disk_path": str(folder), "limit_bytes": LIMIT, **about}


@contextmanager
def engine(tier, **about):
    made = Engine(tier, **about)
    try:
        yield made
    finally:
        made.close()


def folder_bytes(folder):
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


def refused(tier, **about):
    from pagefold.errors import ConfigError

    try:
        Engine(tier, **about)
    except ConfigError as error:
        return str(error)
    msg = "it was not refused"
    raise AssertionError(msg)


# Cases.


def case_promotion(folder):
    keys = keys_of(1, 40)
    with engine(on_disk(folder, enable_kv_events=True)) as one:
        assert one.find(keys) == 0
        assert one.store(keys) == 40
        events = [event for event in one.manager.take_events() if event.medium.value == "STORAGE"]
        assert sum(len(event.keys) for event in events) == 40
        one.forget_host()
        assert one.find(keys) == 40
        assert one.wrong == 0
        assert one.gauges["vllm:kv_offload_pagefold_chunks"] == 40
        assert 0 < one.gauges["vllm:kv_offload_pagefold_bytes"] <= LIMIT
        assert one.gauges["vllm:kv_offload_pagefold_limit_bytes"] == LIMIT
        assert "already" in (said := refused(on_disk(folder))) or "use" in said, said
    with engine(on_disk(folder)) as again:  # after a restart
        assert again.find(keys) == 40
        assert again.wrong == 0
        assert again.find(keys_of(2, 4)) == 0


def case_other_layouts(folder):
    keys = keys_of(1, 8)
    with engine(on_disk(folder)) as one:
        assert one.store(keys) == 8
    for about in ({"dtype": "float32"}, {"tp_size": 2}, {"row": 2 * ROW}):
        with engine(on_disk(folder), **about) as other:
            assert other.find(keys) == 0, about
    with engine(on_disk(folder, weights="another revision")) as other:
        assert other.find(keys) == 0
    with engine(on_disk(folder)) as one:
        assert one.find(keys) == 8


def case_damage(folder):
    """A flipped byte is a miss of that chunk alone; the request is told so once, and computes it."""
    keys = keys_of(1, 20)
    with engine(on_disk(folder)) as one:
        one.store(keys)
        one.forget_host()
        (segment,) = folder.rglob("segment-*.frames")
        raw = segment.read_bytes()
        at = raw.index(bytes_of(keys[7], ROW))
        with segment.open("r+b") as file:
            file.seek(at + 5000)
            file.write(bytes((raw[at + 5000] ^ 64,)))
        assert one.find(keys) == 19
        assert one.wrong == 0
        assert one.counters["vllm:kv_offload_pagefold_damaged"] == 1
        assert one.counters["vllm:kv_offload_tiering_promotion_job_failures"] >= 1
        assert one.store(keys) == 1, "it is written anew"
        one.forget_host()
        assert one.find(keys) == 20


def case_limit(folder):
    """Far more is stored than the limit holds."""
    with engine(on_disk(folder)) as one:
        for of in range(100):
            one.store(keys_of(of, 32))
            assert folder_bytes(folder) <= LIMIT
        assert one.counters["vllm:kv_offload_pagefold_evictions"] > 1000
        one.forget_host()
        assert one.find(keys_of(99, 32)) == 32
        assert one.find(keys_of(0, 32)) == 0


def case_store_fails(folder):
    """The folder goes while the engine runs: all is missed, nothing is raised, and the engine goes on."""
    keys = keys_of(1, 8)
    with engine(on_disk(folder)) as one:
        one.store(keys)
        one.forget_host()
        shutil.rmtree(folder)
        assert one.find(keys) == 0
        assert one.store(keys) == 8
        assert one.find(keys) == 8, "from the host's memory"
        assert one.counters["vllm:kv_offload_pagefold_errors"] > 0


def case_remote_is_not_there(folder):
    """Nobody listens: lookups are answered later, with no; nothing waits for the store."""
    tier = _PAGEFOLD | {"remote_url": "redis://127.0.0.1:9"}
    with engine(tier) as one:
        assert one.store(keys_of(1, 8)) == 8
        one.forget_host()
        assert one.find(keys_of(1, 8)) == 0
        one.step()
        assert one.gauges["vllm:kv_offload_pagefold_is_out"] == 1


def case_backpressure(folder):
    """vLLM's detector finds a tier too slow, and hands it no more for a while."""
    pressure = {
        "backpressure_cls": "EMABackpressureDetector",
        "policy_cls": "DropStorePolicy",
        "high_water_s": 1e-9,
        "low_water_s": 1e-10,
        "warmup_completions": 1,
    }
    with engine(on_disk(folder, backpressure=pressure)) as one:
        for of in range(6):
            one.store(keys_of(of, 4))
        assert one.counters["vllm:kv_offload_tiering_backpressure_stores_dropped"] >= 1
        one.forget_host()
        assert one.find(keys_of(0, 4)) == 4


def case_small_host(folder):
    """Prompts longer than what the host holds, some of them at once: all ends, and what is found is right."""
    with engine(on_disk(folder), num_chunks=16) as one:
        for of in range(20):
            for begin in range(0, 24, 8):
                one.store(keys_of(of, 24)[begin : begin + 8], settles=of % 3 == 0)
        one.settle()
        num = 0
        for of in range(20):
            num += one.find(keys_of(of, 12))
            assert one.wrong == 0
        assert num > 0


def case_options(folder):
    for tier, said in (
        (on_disk(folder, limit="3G"), "has no option limit"),
        (_PAGEFOLD, "one place"),
        (_PAGEFOLD | {"disk_path": str(folder)}, "limit_bytes"),
        (on_disk(folder, limit_bytes="3 bananas"), "3 bananas"),
        (on_disk(folder, limit_bytes=1000), "too small"),
        (_PAGEFOLD | {"remote_url": "ftp://there"}, "ftp://there"),
    ):
        assert said in refused(tier), said


def case_metrics(folder):
    """What a tier tells is what vLLM was told that it would."""
    tier = on_disk(folder)
    defined = TieringOffloadingSpec.build_metric_definitions({"cpu_bytes_to_use": 1, "secondary_tiers": [tier]})
    with engine(tier) as one:
        one.store(keys_of(1, 4))
        names = {name for name in (*one.counters, *one.gauges) if "pagefold" in name}
        assert len(names) >= 4
        assert names <= set(defined)
        assert all(defined[name].labelnames == ("store",) for name in names)


def main() -> None:
    folder, case = Path(sys.argv[1]), sys.argv[2]
    cases = {name.removeprefix("case_"): made for name, made in globals().items() if name.startswith("case_")}
    for name in cases if case == "all" else [case]:
        cases[name](folder / name)
        print(json.dumps({"case": name, "vllm": vllm.__version__}), flush=True)


if __name__ == "__main__":
    main()
