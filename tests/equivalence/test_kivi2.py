"""KIVI at 2 bit: blocks that are sealed when they are full. Part 3 of the equality rule.

What a token is and what is stored depends on no chunks, no batch, nothing cached, and on no preemption or failed step:
outputs are those of each prompt alone, and blocks are equal in bits. The kernel is held to the reference, which decodes
what it gathers; slabs are equal in bytes, and whatever was never written holds NaN.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from equivalence.attention_cases import Shape
from equivalence.prompts import short_prompts
from equivalence.settings import SETTINGS
from equivalence.suite import Trial, Workload
from equivalence.tiny_models import VOCAB_SIZE
from pagefold.config import EngineConfig
from pagefold.engine.build import build_engine, plan_engine
from pagefold.kv import CODECS, KVGeometry
from pagefold.request import SamplingParams
from pagefold.runner.attention import AttentionInputs, choose_backend
from pagefold.runner.sealed_slab import SealedSlab

BOUND = 3e-5  # as in test_codecs.py
SHAPES = (
    Shape(block_size=16, head_dim=64, num_kv_heads=3, group=3),  # SmolLM2
    Shape(block_size=16, head_dim=32, num_kv_heads=4, group=1),  # MHA
    Shape(block_size=32, head_dim=128, num_kv_heads=1, group=8),  # MQA
    Shape(block_size=16, head_dim=256, num_kv_heads=2, group=2),
    Shape(block_size=8, head_dim=80, num_kv_heads=2, group=4),
    Shape(block_size=4, head_dim=48, num_kv_heads=1, group=3),
    Shape(block_size=64, head_dim=96, num_kv_heads=2, group=2),
)
SEQUENCES = st.lists(
    st.tuples(
        st.one_of(st.just(0), st.integers(0, 70), st.integers(0, 800)),
        st.one_of(st.just(1), st.integers(1, 20), st.integers(1, 150)),
        st.one_of(st.just(0), st.integers(0, 900)),
    ),
    min_size=1,
    max_size=4,
)

SHORT = Workload(short_prompts(VOCAB_SIZE), num_outputs=24)
FULL_SETTINGS = [
    replace(setting, kv_cache_dtype="kivi2")
    for setting in SETTINGS
    if 4 <= setting.block_size <= 64 and not setting.allow_streaming
]


class AloneOutputs:
    """What an engine says of each prompt alone: in one chunk, with nothing cached."""

    smallest_gap = float("inf")  # the same engine, on other ways

    def __init__(self, folder, num_outputs, **settings):
        config = EngineConfig(
            model=str(folder),
            kv_cache_dtype="kivi2",
            kv_cache_memory_bytes=2**26,
            max_num_batched_tokens=2**16,
            enable_prefix_caching=False,
            **settings,
        )
        self._engine = build_engine(plan_engine(config))
        self._num_outputs = num_outputs
        self._eos = frozenset(self._engine.limits.eos_token_ids)
        self._outputs = {}

    def of(self, prompt, *, ignore_eos=True):
        key = tuple(prompt)
        if key not in self._outputs:
            how = SamplingParams(temperature=0.0, max_tokens=self._num_outputs, ignore_eos=True)
            self._engine.add("alone", prompt, how)
            output = []
            while self._engine.has_work:
                for delta in self._engine.step():
                    output += delta.token_ids
            self._outputs[key] = output
        output = self._outputs[key]
        ends = [] if ignore_eos else [at for at, token_id in enumerate(output) if token_id in self._eos]
        return output[: ends[0] + 1] if ends else output


@pytest.fixture(scope="module")
def alone(tiny_folder):
    made = {}

    def make(family, setting):
        key = family, setting.dtype, setting.attention_backend, setting.block_size
        if key not in made:
            settings = {"dtype": key[1], "attention_backend": key[2], "block_size": key[3]}
            made[key] = AloneOutputs(tiny_folder(family), SHORT.num_outputs, **settings)
        return made[key]

    return make


@pytest.mark.parametrize("setting", FULL_SETTINGS, ids=lambda setting: setting.name)
def test_outputs_are_those_alone(setting, tiny_folder, alone):
    """Of the reference, in float64."""
    trial = Trial(setting, SHORT, tiny_folder("qwen3"))
    trial.run()
    trial.assert_exact(alone("qwen3", setting))


class Case:
    """A step of the op over a slab of two layers that holds what its sequences had before, and NaN everywhere else.

    Args:
        shape: of the op.
        sequences: of each the tokens it had, those it computes, and how many of the sequence before it shares: whole
            blocks, also some that the step fills.
        seed: of all numbers.
    """

    def __init__(self, shape, sequences, seed):
        size, heads, dim = shape.block_size, shape.num_kv_heads, shape.head_dim
        self.shape, self.random = shape, torch.Generator().manual_seed(seed)
        self.geometry = KVGeometry(2, heads, dim, 4, size, CODECS["kivi2"])
        rows, tables, num_blocks = [], [], 0
        for num_old, num_new, num_shared in sequences:
            inside = num_old % size
            num_new = min(num_new, size - inside) if inside else num_new
            end = num_old + num_new
            shared = min(num_shared, num_old) // size if rows else 0
            shared = min(shared, rows[-1][1] // size) if rows else 0
            own = range(num_blocks, num_blocks + -(-end // size) - shared)
            tables.append([*(tables[-1][:shared] if shared else ()), *own])
            rows.append((num_old, end, shared))
            num_blocks += len(own)
        order = torch.randperm(num_blocks, generator=self.random).tolist()
        tables = [[order[block] for block in table] for table in tables]
        width = max(map(len, tables))
        padded = np.array([table + [0] * (width - len(table)) for table in tables], np.int32)
        residual_ids = torch.randperm(len(rows) + 2, generator=self.random)[: len(rows)].numpy().astype(np.int32)
        centres = self.randn(2 * heads, 2, dim)
        self.slab = SealedSlab.allocate(self.geometry, num_blocks, len(rows) + 2, centres)
        self.slab.data.fill_(0xFF)
        self.slab.residuals.fill_(torch.nan)
        for (num_old, _, shared), table, residual_id in zip(rows, tables, residual_ids.tolist(), strict=True):
            for cell in range(2 * heads):
                for index in range(shared, num_old // size):
                    self.slab.seal(cell, table[index], self.randn(size, dim).half(), self.randn(size, dim).half())
                for part in self.slab.residual(cell, residual_id):
                    part[: num_old % size] = self.randn(num_old % size, dim).half()
        counts = [end - num_old for num_old, end, _ in rows]
        ends = np.array([end for _, end, _ in rows], np.int32)
        cells = np.arange(2 * heads, dtype=np.int32).reshape(1, 2, heads)
        self.inputs = AttentionInputs(
            np.cumsum([0, *counts], dtype=np.int32),
            np.broadcast_to(padded[:, None], (len(rows), heads, width)),
            np.broadcast_to(ends[:, None], (len(rows), heads)),
            np.broadcast_to(cells, (len(rows), 2, heads)),
            residual_ids,
        )
        self.query = self.randn(sum(counts), heads * shape.group, dim)
        self.key, self.value = self.randn(sum(counts), heads, dim), self.randn(sum(counts), heads, dim)

    def randn(self, *shape):
        return torch.randn(*shape, generator=self.random)

    def run(self, backend, layer=1, softcap=0.0, **changes):
        """Return the op's result, and the slab that it left."""
        slab = SealedSlab(self.slab.data.clone(), self.slab.residuals.clone(), self.geometry, self.slab.centres)
        shape = {"block_size": self.shape.block_size, "head_dim": self.shape.head_dim, "codes_a_byte": 4}
        operands = [changes.get(name, getattr(self, name)) for name in ("query", "key", "value")]
        attention = choose_backend(backend, torch.float32, **shape)
        return attention(*operands, slab, self.inputs, layer, self.shape.head_dim**-0.5, softcap), slab


def hold(case, **how):
    """Hold the kernel to the reference."""
    (expected, plain), (found, slab) = case.run("reference", **how), case.run("cpu", **how)
    assert not expected.isnan().any(), "the reference has read what nothing may read"
    error = (expected - found).abs().max().item()
    assert error <= BOUND, f"off by {error:.2e}"
    assert torch.equal(plain.data, slab.data), "blocks are not sealed alike"
    assert torch.equal(plain.residuals.view(torch.int16), slab.residuals.view(torch.int16)), "residuals differ"


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(shape=st.sampled_from(SHAPES[:2]), sequences=SEQUENCES, seed=st.integers(0, 2**32))
def test_the_kernel_reads_and_seals_what_the_reference_does(shape, sequences, seed):
    hold(Case(shape, sequences, seed))


@pytest.mark.long
@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(
    shape=st.sampled_from(SHAPES),
    sequences=SEQUENCES,
    seed=st.integers(0, 2**32),
    layer=st.integers(0, 1),
    softcap=st.sampled_from((0.0, 5.0)),
)
def test_the_kernel_does_so_in_every_shape(shape, sequences, seed, layer, softcap):
    hold(Case(shape, sequences, seed), layer=layer, softcap=softcap)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernel_does_so_at_the_ends_of_blocks_and_splits(shape):
    size = shape.block_size
    ends = [
        (255, 1),
        (256, 1),
        (256 + size, size),
        (0, 3 * size + 1),
        (size - 1, 1),
        (size + 1, size - 1),
        (0, 2 * size),
    ]
    hold(Case(shape, [(old, new, 0) for old, new in ends], 3))
    hold(Case(shape, [(0, 5 * size + 2, 0), (6 * size, size, 5 * size), (5 * size + 1, 1, 900)], 4), softcap=4.0)
