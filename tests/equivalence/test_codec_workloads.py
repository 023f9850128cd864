"""Codecs under random workloads: whatever happens around a request, its tokens are those that it gets alone and cold.

Settings are drawn, not chosen: chunks that no block divides, few seats, little memory, a host tier that damages, steps
that fail, samples, cancels and resets. Constants are such as a model with a tokenizer has, of several ranges.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from equivalence.coded_cases import constants_for
from equivalence.harsh_runner import HarshRunner
from equivalence.suite import assert_clean
from equivalence.tiny_models import VOCAB_SIZE
from pagefold.config import EngineConfig
from pagefold.engine import build
from pagefold.engine.build import build_engine
from pagefold.engine.planning import plan_engine
from pagefold.kv import audit
from pagefold.sampling import SamplingParams

CODECS = ("kivi2", "int4_per_token_head", "k8v4", "int8_per_token_head", "fp8_e4m3")
LONGEST, MOST_OUTPUTS = 300, 38


def _draw_requests(random, block_size, max_num_seqs):
    """Return prompts that share their beginnings, a few tokens around boundaries of blocks and ranges, and how."""

    def text(length):
        return random.choices(range(8, VOCAB_SIZE), k=length)

    stems = [text(random.choice((block_size, 3 * block_size + 1, 255, 256, 257))) for _ in range(2)]
    requests = []
    for index in range(random.randrange(4, 12)):
        stem = random.choice([*stems, []])
        own = text(random.choice((1, 2, block_size - 1, block_size, random.randrange(1, LONGEST))))
        num_samples = random.randint(1, min(max_num_seqs, 3)) if random.random() < 0.4 else 1
        how = SamplingParams(
            temperature=float(num_samples > 1),
            seed=17 * index,
            n=num_samples,
            max_tokens=random.choice((1, 2, 17, MOST_OUTPUTS)),
            ignore_eos=random.random() < 0.7,
        )
        requests.append(((stem[: random.choice((len(stem), len(stem) // 2))] + own)[:LONGEST], how))
    return requests


def _step(engine, outputs):
    for delta in engine.step():
        assert delta.error is None
        outputs.setdefault((delta.request_id, delta.index), []).extend(delta.token_ids)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(40))
def test_outputs_are_those_alone_and_cold(seed, tiny_folder, monkeypatch):
    monkeypatch.setattr(build, "_constants", constants_for)
    random = Random(seed)
    plain = EngineConfig(
        model=str(tiny_folder("qwen3")),
        kv_cache_dtype=CODECS[seed % len(CODECS)],
        block_size=random.choice((8, 16, 32, 64)),
        max_model_len=LONGEST + MOST_OUTPUTS,
        max_num_seqs=1,
        kv_cache_memory_bytes=2**24,
        enable_prefix_caching=False,
        threads=1,
    )
    geometry, seats = plan_engine(plain).geometry, random.choice((1, 2, 3, 5, 8))
    least = geometry.num_blocks_for(plain.max_model_len)
    num_blocks = int(least * random.choice((1, 1.3, 2, 3))) + random.choice((1, 2, 4))
    config = replace(
        plain,
        max_num_seqs=seats,
        max_num_batched_tokens=max(seats, random.choice((1, 3, 5, 16, 17, 37, 100, 512))),
        kv_cache_memory_bytes=num_blocks * geometry.bytes_per_block + seats * geometry.residual_bytes,
        kv_offloading_size=random.choice((0, 2, 6)) * least * geometry.bytes_per_block / 2**30,
        enable_prefix_caching=True,
    )
    requests = _draw_requests(random, config.block_size, seats)
    engine = build_engine(plan_engine(config))
    rate = random.choice((0.0, 0.15, 0.4))
    engine.runner = HarshRunner(engine, failure_rate=rate, random=random, damage_rate=rate / 4)
    outputs, cancelled = {}, set()
    for turn in range(2):
        coming, sent = random.sample(range(len(requests)), len(requests)), []
        while coming or engine.has_work:
            if coming and random.random() < 0.5:
                index = coming.pop()
                sent.append(f"{index} {turn}")
                engine.add(sent[-1], *requests[index])
            if sent and random.random() < 0.03 and engine.abort(victim := random.choice(sent)):
                cancelled.add(victim)
            if random.random() < 0.02:
                engine.reset_prefix_cache()
            _step(engine, outputs)
            audit(engine.scheduler.core)
    assert_clean(engine)
    alone = build_engine(plan_engine(plain))
    for index, (prompt, how) in enumerate(requests):
        for sample in range(how.n):
            expected = {}
            alone.add("alone", prompt, replace(how, n=1, seed=how.seed + sample))
            while alone.has_work:
                _step(alone, expected)
            for turn in range(2):
                name = f"{index} {turn}"
                found = outputs.get((name, sample), [])
                whole = expected["alone", 0]
                assert found == (whole[: len(found)] if name in cancelled else whole), (name, sample)
