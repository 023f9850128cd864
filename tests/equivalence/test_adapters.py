"""Adapters in the fused decoder: near merged weights, and the same to the bit in any company."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest
import torch
from adapters.written import merge, write_adapter
from transformers import AutoModelForCausalLM

from equivalence.tiny_models import VOCAB_SIZE
from pagefold.adapters import AdapterWeights, base_shapes, read_adapter_folder
from pagefold.config import EngineConfig
from pagefold.engine.build import build_engine
from pagefold.engine.planning import plan_engine
from pagefold.events import RequestPreempted, ignore
from pagefold.kv import BlockId, BlockTable, audit
from pagefold.request import Caller
from pagefold.runner.fused.adapters import FusedAdapters, adapter_bytes
from pagefold.runner.fused.checkpoint import Checkpoint
from pagefold.runner.fused.decoder import FusedDecoder
from pagefold.sampling import SamplingParams
from pagefold.steps import AdaptedRow, StepPlan

LOGITS_BOUND = 4e-4  # float32 against float64: tiny models' logits are of size 30 and less
NAMES = ("", "a", "b", "c")
_ADAPTERS = {
    "a": {"seed": 1, "rank": 16},
    "b": {"seed": 2, "rank": 8, "dtype": "BF16", "ranks": {"k_proj": 3, "layers.0.mlp.up_proj": 5}, "use_rslora": True},
    "c": {"seed": 3, "modules": ("q_proj", "down_proj"), "dtype": "F16"},
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
_random = Random(9)
_PREFIX = _random.choices(range(5, VOCAB_SIZE), k=40)
PROMPTS = [_PREFIX + _random.choices(range(5, VOCAB_SIZE), k=length) for length in (1, 30, 70)]


@pytest.fixture(scope="session")
def adapter_folders(tiny_folder, tmp_path_factory):
    made = {}

    def make(family):
        if family not in made:
            root = tmp_path_factory.mktemp(f"adapters of {family}")
            made[family] = {
                name: write_adapter(root / name, tiny_folder(family), **how) for name, how in _ADAPTERS.items()
            }
        return made[family]

    return make


def _engine(folder, adapters, emit=ignore, **settings):
    settings = {"dtype": "float32", "kv_cache_memory_bytes": 2**26} | settings
    if adapters is not None:
        modules = tuple(f"{name}={where}" for name, where in adapters.items())
        settings |= {"enable_lora": True, "lora_modules": modules}
    config = EngineConfig(model=str(folder), model_impl="pagefold", **settings)
    return build_engine(plan_engine(config), emit=emit)


def _plan(rows):
    """A plan of rows (tokens, start, blocks, slot), all of which sample."""
    plan = StepPlan(0)
    for at, (tokens, start, blocks, slot) in enumerate(rows):
        plan.token_ids.extend(tokens)
        plan.num_tokens.append(len(tokens))
        plan.starts.append(start)
        plan.tables.append([BlockTable(map(BlockId, blocks))])
        if slot:
            plan.adapted.append(AdaptedRow(at, slot))
    plan.sampling_rows = list(range(len(rows)))
    plan.sampling = [GREEDY] * len(rows)
    plan.seeds = plan.draws = [0] * len(rows)
    return plan


def _slots(engine):
    return {"": 0} | {one.name: one.slot for one in engine.adapters.loaded}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma2"])
def test_logits_are_near_those_of_merged_weights(family, tiny_folder, adapter_folders):
    """A ragged batch of all adapters, then one token more for each of its sequences, against float64."""
    folder, adapters = tiny_folder(family), adapter_folders(family)
    engine = _engine(folder, adapters)
    assert isinstance(engine.runner.decoder, FusedDecoder)
    random = Random(7)
    slots = _slots(engine)
    lengths = (300, 1, 16, 17, 100, 2, 40, 3)
    rows = [
        ([random.randrange(VOCAB_SIZE) for _ in range(length)], 0, range(50 * at, 50 * at + 50), NAMES[at % 4])
        for at, length in enumerate(lengths)
    ]
    more = [random.randrange(VOCAB_SIZE) for _ in rows]
    first = engine.runner.logits(_plan([(*row[:3], slots[row[3]]) for row in rows])).clone()
    behind = [([one], len(row[0]), row[2], slots[row[3]]) for one, row in zip(more, rows, strict=True)]
    second = engine.runner.logits(_plan(behind)).clone()
    for name in NAMES:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
        if name:
            merge(model, adapters[name])
        for at, row in enumerate(rows):
            if row[3] != name:
                continue
            with torch.inference_mode():
                expected = model(torch.tensor([[*row[0], more[at]]])).logits[0, -2:]
            told = torch.stack([first[at], second[at]]).double()
            assert (told - expected).abs().max() < LOGITS_BOUND, (name, at)


@pytest.mark.parametrize("settings", [{}, {"quantization": "int8"}], ids=["float32", "int8"])
def test_logits_are_the_same_to_the_bit_in_any_company(settings, tiny_folder, adapter_folders):
    """Alone or among others, in one chunk or many, beside any adapter, with one thread or two."""
    random = Random(3)
    prompts = [[random.randrange(VOCAB_SIZE) for _ in range(length)] for length in (130, 3, 17, 250)]
    told = []
    for threads in (1, 2):
        engine = _engine(tiny_folder("llama"), adapter_folders("llama"), threads=threads, **settings)
        runner, slots = engine.runner, _slots(engine)
        rows = [
            (prompt, 0, range(64 * number, 64 * number + 64), slots[name])
            for number, (prompt, name) in enumerate((prompt, name) for prompt in prompts for name in NAMES)
        ]
        alone = [runner.logits(_plan([row]))[0].clone() for row in rows]
        runner.slab.data.fill_(float("nan"))
        random.shuffle(rows)
        order = [row[2].start // 64 for row in rows]
        cut = [min(len(row[0]) - 1, 50 + at) for at, row in enumerate(rows)]
        heads = [(row[0][:end], *row[1:]) for row, end in zip(rows, cut, strict=True) if end]
        runner.logits(_plan(heads))
        tails = [(row[0][end:], end, *row[2:]) for row, end in zip(rows, cut, strict=True)]
        together = runner.logits(_plan(tails)).clone()
        told.append((alone, [together[order.index(number)] for number in range(len(rows))]))
    for results in zip(*told[0], *told[1], strict=True):
        assert all(torch.equal(results[0], result) for result in results)
    distinct = [told[0][0][number] for number in range(len(NAMES))]
    assert all(not torch.equal(one, other) for one, other in pairwise(distinct))


def test_requests_without_an_adapter_are_computed_as_without_any(tiny_folder, adapter_folders):
    rows = [(prompt, 0, range(50 * at, 50 * at + 50), 0) for at, prompt in enumerate(PROMPTS)]
    without = _engine(tiny_folder("llama"), None).runner.logits(_plan(rows)).clone()
    engine = _engine(tiny_folder("llama"), adapter_folders("llama"))
    assert torch.equal(engine.runner.logits(_plan(rows)), without)
    rows.append((PROMPTS[0], 0, range(200, 250), 1))
    assert torch.equal(engine.runner.logits(_plan(rows))[:-1], without)


@pytest.mark.parametrize(
    ("settings", "is_tight"),
    [({"max_num_batched_tokens": 33}, False), ({"kv_cache_memory_bytes": 2**18, "admission": "prompt"}, True)],
    ids=["small chunks", "tight"],
)
def test_outputs_are_those_alone(settings, is_tight, tiny_folder, adapter_folders):
    """In an engine: cold and warm, preempted, cut into chunks."""
    folder, adapters = tiny_folder("llama"), adapter_folders("llama")
    alone = _engine(folder, adapters, enable_prefix_caching=False, max_model_len=192)
    expected = {(name, at): _serve(alone, [(name, at)])[name, at] for name in NAMES for at in range(len(PROMPTS))}
    assert len({tuple(output) for output in expected.values()}) == len(expected)
    heard = []
    settings = {"max_num_seqs": 12, "max_num_batched_tokens": 64} | settings
    engine = _engine(folder, adapters, heard.append, max_model_len=192, **settings)
    for _ in range(2):
        assert _serve(engine, list(expected)) == expected
    assert any(isinstance(event, RequestPreempted) for event in heard) == is_tight


def _serve(engine, wanted):
    for name, at in wanted:
        engine.add(f"{name}/{at}", PROMPTS[at], GREEDY, Caller(adapter=name))
    outputs = {}
    while engine.has_requests:
        for delta in engine.step():
            name, _, at = delta.request_id.partition("/")
            outputs.setdefault((name, int(at)), []).extend(delta.token_ids)
    audit(engine.scheduler.core)
    return outputs


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_an_adapter_takes_what_its_file_takes(name, tiny_folder, adapter_folders):
    """In the dtype of the file; of matrices as small as these what they are rounded up to counts."""
    shapes = base_shapes("llama", Checkpoint(tiny_folder("llama")).shapes())
    adapter = read_adapter_folder(adapter_folders("llama")[name], shapes, 16)
    packed = FusedAdapters.pack(AdapterWeights(adapter))
    assert packed.num_bytes == adapter_bytes(adapter)
    num_low = sum(part.rank for part in adapter.parts)
    padding = 64 * 3 * len(adapter.parts) + 64
    assert adapter.num_bytes <= packed.num_bytes <= adapter.num_bytes + 4 * num_low + padding


def test_slots_are_used_again(tiny_folder, adapter_folders):
    """What was in a slot before changes nothing: not of another adapter, which has fewer modules and smaller ranks."""
    adapters = adapter_folders("llama")
    fresh = _engine(tiny_folder("llama"), {"c": adapters["c"]})
    expected = _serve(fresh, [("c", 1)])
    engine = _engine(tiny_folder("llama"), {"a": adapters["a"]}, max_loras=1)
    _serve(engine, [("a", 1)])
    engine.begin_unload("a")
    engine.load_adapter("c", str(adapters["c"]))
    assert _serve(engine, [("c", 1)]) == expected
