"""Drives our cache policies and vLLM's own LRU side by side in vLLM's CPU manager: python policy_in_vllm.py NUM_STEPS.

Requests of random paths run at once. Whatever a policy keeps, it must hold what the contract says: what is held or
asked for is not evicted, and all that is asked for is evicted or nothing. And ours evicts whenever LRU can.
"""

from __future__ import annotations

import json
import random
import sys
from hashlib import sha256

import vllm
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus
from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory

from pagefold.errors import ConfigError
from pagefold.integrations.vllm.chunk_policies import POLICY_CLASSES

MODULE = "pagefold.integrations.vllm"
CAPACITY = 24


def key_of(path, group):
    return make_offload_key(sha256(repr(path).encode()).digest(), group)


def a_path(rng):
    steps = [rng.randrange(3) for _ in range(rng.randrange(1, 8))]
    return [key_of(steps[: index + 1], 0) for index in range(len(steps))]


class Requests:
    """Requests that run at once, and what each has under way."""

    def __init__(self, policy, rng):
        module = MODULE if policy.startswith("Pagefold") else None
        self.manager = CPUOffloadingManager(CAPACITY, cache_policy=policy, cache_policy_module_path=module)
        self.rng = rng
        self.num = 0
        self.running = []
        self.num_evictions = 0

    def step(self):  # noqa: C901 - one branch a call of vLLM's scheduler
        rng = self.rng
        if not self.running or (len(self.running) < 3 and rng.random() < 0.4):
            self.num += 1
            context = ReqContext(req_id=str(self.num))
            keys = a_path(rng)
            for index, key in enumerate(keys, start=1):
                context.set_offload_key_position(key, 16 * index)
            self.manager.on_new_request(context)
            num = 0
            while num < len(keys) and self.manager.lookup(keys[num], context) is LookupResult.HIT:
                num += 1
            if num:
                self.manager.prepare_load(keys[:num], context)
            self.running.append([context, keys, num, set(keys[:num]), set()])
            return
        one = rng.choice(self.running)
        context, keys, done, reading, writing = one
        if reading and rng.random() < 0.5:
            self.manager.complete_load(reading, context)
            one[3] = set()
        elif writing and rng.random() < 0.6:
            self.manager.complete_store(writing, context, success=rng.random() < 0.9)
            one[4] = set()
        elif done < len(keys) and not writing:
            offered = keys[done : done + 2]
            held = {key for other in self.running for key in (*other[3], *other[4])} | set(offered)
            stored = self.manager.prepare_store(offered, context)
            one[2] = done + len(offered)
            if stored is not None:
                self.num_evictions += len(stored.evicted_keys)
                assert not held & set(stored.evicted_keys)
                assert all(self.manager.lookup(key, context) is LookupResult.MISS for key in stored.evicted_keys)
                one[4] = set(stored.keys_to_store)
        elif not reading and not writing:
            self.manager.on_request_finished(context)
            self.running.remove(one)
        if rng.random() < 0.001:
            self.running = []
            self.manager.reset_cache()


def evicts_as_lru_can(policy, rng):  # noqa: C901 - two policies, call by call
    """The bare policies: for the same chunks and pins ours evicts whenever vLLM's LRU does, and what it may alone."""
    ours = CachePolicyFactory.get_cache_policy_cls(policy, MODULE)(CAPACITY)
    theirs = CachePolicyFactory.get_cache_policy_cls("lru")(CAPACITY)
    keys = list(dict.fromkeys(key for _ in range(8) for key in a_path(rng)))[:CAPACITY]
    free = set()
    for index, key in enumerate(keys):
        is_free = rng.random() < 0.7
        for policy_of in (ours, theirs):
            chunk = ChunkStatus(index)
            policy_of.insert(key, chunk)
            if is_free:
                chunk.ref_cnt = 0
                policy_of.mark_evictable(key)
        if is_free:
            free.add(key)
    context = ReqContext(req_id="one")
    for policy_of in (ours, theirs):
        policy_of.touch(rng.sample(keys, len(keys)), context)
    for _ in range(6):
        num, protected = rng.randrange(6), set(rng.sample(keys, 3))
        one, other = ours.evict(num, protected), theirs.evict(num, protected)
        assert (one is None) == (other is None)
        if one is not None:
            gone = {key for key, _ in one}
            assert len(gone) == len(one) == len(other) == num
            assert gone <= free - protected
            assert all(ours.get(key) is None for key in gone)
            free -= gone
            for key, _ in other:  # let both hold the same again
                if key not in gone:
                    chunk = ChunkStatus(0)
                    chunk.ref_cnt = 0
                    theirs.insert(key, chunk)
            for key in gone:
                if theirs.get(key) is not None:
                    theirs.remove(key)


def refused(name):
    try:
        CachePolicyFactory.get_cache_policy_cls(name, MODULE)
    except ConfigError as error:
        return str(error)
    return ""


def main() -> None:
    num_steps = int(sys.argv[1])
    num_evictions = 0
    for policy in ("lru", *POLICY_CLASSES):
        requests = Requests(policy, random.Random(policy))
        for _ in range(num_steps):
            requests.step()
        num_evictions += requests.num_evictions
        if policy != "lru":
            for seed in range(30):
                evicts_as_lru_can(policy, random.Random(seed))
    for name in ("PagefoldWeighted", "PagefoldTypo"):
        assert name in refused(name)
    print(json.dumps({"policies": list(POLICY_CLASSES), "num_evictions": num_evictions, "vllm": vllm.__version__}))


if __name__ == "__main__":
    main()
