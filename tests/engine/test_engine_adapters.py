"""Adapters in an engine that transformers computes, in float64: outputs are those of a model with merged weights.

That holds in mixed batches, in chunks, with a warm cache and a cold one, and for requests that were preempted. What is
unloaded leaves no block behind, and no request of another adapter finds any.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from adapters.written import merge, write_adapter
from equivalence.references import References
from equivalence.tiny_models import VOCAB_SIZE, save_tiny_model
from safetensors.torch import load_file

from pagefold import LLM, LoRARequest
from pagefold.config import EngineConfig
from pagefold.engine.build import build_engine
from pagefold.engine.planning import plan_engine
from pagefold.errors import AdapterError, AdapterNotFoundError, ConfigError, InvalidRequestError
from pagefold.events import RequestPreempted
from pagefold.kv import Namespace, audit
from pagefold.kv.names import root_digest
from pagefold.request import Caller
from pagefold.sampling import SamplingParams

NUM_OUTPUTS = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUTS, ignore_eos=True)
NAMES = ("", "a", "b", "c")
SALTS = ("", "x", "y")
_random = Random(5)
_PREFIX = _random.choices(range(5, VOCAB_SIZE), k=48)
PROMPTS = [_PREFIX + _random.choices(range(5, VOCAB_SIZE), k=length) for length in (1, 20, 35)]
_ADAPTERS = {
    "a": {"seed": 1},
    "b": {"seed": 2, "rank": 8, "dtype": "BF16", "ranks": {"k_proj": 3}, "use_rslora": True},
    "c": {"seed": 3, "modules": ("q_proj", "v_proj"), "dtype": "F16", "alpha": 16},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save_tiny_model("llama", tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def folders(base, tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(root / name, base, **how) for name, how in _ADAPTERS.items()}


@pytest.fixture(scope="module")
def expected(base, folders):
    """What each prompt's output is, by adapter, of models with merged weights."""
    found = {}
    for name in NAMES:
        references = References(base, NUM_OUTPUTS)
        if name:
            merge(references.model, folders[name])
        for at, prompt in enumerate(PROMPTS):
            found[name, at] = references.of(prompt)
        assert references.smallest_gap > 1e-9
    for at in range(len(PROMPTS)):
        assert len({tuple(found[name, at]) for name in NAMES}) == len(NAMES), "adapters say something else"
    return found


class House:
    """An engine that is stepped by hand, and audited."""

    def __init__(self, base, folders, **settings):
        settings = {
            "max_num_batched_tokens": 64,
            "kv_cache_memory_bytes": 2**22,
            "max_num_seqs": 16,
            "max_model_len": 128,
        } | settings
        self.preempted = Counter()
        config = EngineConfig(
            model=str(base),
            dtype="float64",
            attention_backend="reference",
            threads=1,
            enable_lora=True,
            lora_modules=tuple(f"{name}={folder}" for name, folder in folders.items()),
            **settings,
        )
        self.engine = build_engine(plan_engine(config), emit=self._hear)

    def _hear(self, event):
        if isinstance(event, RequestPreempted):
            self.preempted[event.request_id] += 1

    def add(self, name, at, salt="", request_id=None):
        request_id = request_id or f"{name}/{at}/{salt}"
        self.engine.add(request_id, PROMPTS[at], GREEDY, Caller(adapter=name, cache_salt=salt))

    def run(self):
        """Run all that is here; return the outputs by request, and how much of each prompt was cached."""
        outputs, cached = {}, {}
        while self.engine.has_requests:
            for delta in self.engine.step():
                outputs.setdefault(delta.request_id, []).extend(delta.token_ids)
                cached[delta.request_id] = delta.num_cached_tokens
            audit(self.engine.scheduler.core)
        self.engine.idle()
        return outputs, cached

    def adapters_cached(self):
        """Fingerprints of whatever the device has anything of."""
        return {Namespace.from_key(key).adapter for key in self.engine.scheduler.core.tree.roots}

    def num_cached(self, fingerprint):
        """How many blocks device and host have of an adapter."""
        core, kind = self.engine.scheduler.core, self.engine.limits.kinds[0]
        keys = [kind.namespace_of(Caller(cache_salt=salt), fingerprint).key() for salt in SALTS]
        held = Counter(one.name.namespace for one in core.host.blocks.all())
        on_device = sum(node.root.key in keys for node in core.tree.nodes())
        return on_device + sum(held[root_digest(key)] for key in keys)


def _check(outputs, expected):
    for request_id, output in outputs.items():
        name, at, _ = request_id.split("/")
        assert output == expected[name, int(at)], request_id


@pytest.mark.parametrize(
    ("settings", "is_tight"),
    [
        ({}, False),
        ({"max_num_batched_tokens": 17, "block_size": 4}, False),
        ({"kv_cache_memory_bytes": 3 * 2**17, "block_size": 4, "admission": "prompt"}, True),
    ],
    ids=["plenty", "small chunks", "tight"],
)
def test_outputs_are_those_of_merged_weights_in_any_company(settings, is_tight, base, folders, expected):
    house = House(base, folders, **settings)
    for _ in range(2):  # cold, and warm
        for at in range(len(PROMPTS)):
            for name in NAMES:
                house.add(name, at)
        outputs, cached = house.run()
        assert len(outputs) == len(NAMES) * len(PROMPTS)
        _check(outputs, expected)
    assert bool(house.preempted) == is_tight
    if not is_tight:
        assert all(num > 0 for num in cached.values())


def test_adapters_share_no_blocks_and_the_same_adapter_does(base, folders, expected):
    house = House(base, folders)
    for name in NAMES:
        house.add(name, 2)
        outputs, cached = house.run()
        _check(outputs, expected)
        assert set(cached.values()) == {0}, "nobody before had this adapter"
        house.add(name, 2)
        _, cached = house.run()
        assert set(cached.values()) == {len(PROMPTS[2]) // 16 * 16}
    assert len(house.adapters_cached()) == len(NAMES)


def test_what_is_unloaded_leaves_no_block_behind(base, folders, expected):
    """Neither on the device nor in the host's memory, whatever the salt; what others have stays."""
    house = House(base, folders, kv_offloading_size=2**-7, kv_cache_memory_bytes=2**19)
    for salt in SALTS:
        for name in NAMES:
            for at in range(len(PROMPTS)):
                house.add(name, at, salt)
    outputs, _ = house.run()
    _check(outputs, expected)
    core = house.engine.scheduler.core
    fingerprints = {one.name: one.fingerprint for one in house.engine.adapters.loaded} | {"": ""}
    num_cached = {name: house.num_cached(one) for name, one in fingerprints.items()}
    assert core.host.blocks.num_held, "some were evicted"
    assert all(num_cached.values())
    for name in ("a", "b", "c"):
        house.engine.begin_unload(name)
        audit(core)
        num_cached[name] = 0
        assert {name: house.num_cached(one) for name, one in fingerprints.items()} == num_cached
        assert not house.engine.adapters.is_leaving
    with pytest.raises(AdapterNotFoundError, match="'a'"):
        house.add("a", 0)
    house.add("", 0)
    outputs, _ = house.run()
    _check(outputs, expected)


def test_requests_end_before_what_they_use_is_gone(base, folders, expected):
    """Its name is free at once; another may have it while requests of the first one run."""
    house = House(base, {"a": folders["a"]}, max_loras=2)
    house.add("a", 1)
    house.engine.step()
    first = house.engine.begin_unload("a")
    assert house.engine.adapters.is_leaving
    house.engine.load_adapter("a", str(folders["b"]))
    with pytest.raises(AdapterError, match=r"max_loras is 2.* 1 of which leave"):
        house.engine.load_adapter("c", str(folders["c"]))
    house.add("a", 1, request_id="b/1/")
    assert house.engine.adapters.status(house.engine.scheduler).running == ("a",)
    outputs, cached = house.run()
    _check(outputs, expected)
    assert set(cached.values()) == {0}
    assert not house.engine.adapters.is_here(first)
    assert house.adapters_cached() == {one.fingerprint for one in house.engine.adapters.loaded}
    house.engine.load_adapter("c", str(folders["c"]))


def test_names_of_the_same_weights_share_blocks_and_the_last_takes_them_along(base, folders):
    house = House(base, {"a": folders["a"], "again": folders["a"]})
    for name, num_cached in (("a", 0), ("again", 80)):
        house.add(name, 2)
        _, cached = house.run()
        assert set(cached.values()) == {num_cached}
    house.engine.begin_unload("a")
    assert house.adapters_cached()
    house.engine.begin_unload("again")
    assert not house.adapters_cached()


def test_drafts_and_failed_steps_keep_their_adapter(base, folders, expected):
    house = House(base, folders, speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    for name in NAMES:
        house.add(name, 1)
    run, fails = house.engine.runner.run, [True, False, False]

    def failing(plan):
        if fails and fails.pop():
            msg = "the test lets this step fail"
            raise RuntimeError(msg)
        return run(plan)

    house.engine.runner.run = failing
    outputs, _ = house.run()
    assert not fails
    assert len(outputs) == len(NAMES)
    _check(outputs, expected)


def test_an_adapter_that_is_refused_changes_nothing(base, folders, expected, tmp_path):
    house = House(base, {"a": folders["a"]}, max_loras=1)
    house.add("a", 0)
    broken = write_adapter(tmp_path / "broken", base, rank=4, r=5)
    for name, folder, what in (
        ("a", folders["b"], "already been loaded"),
        ("b", folders["b"], "max_loras is 1"),
        ("", folders["b"], "0 characters"),
        ("x" * 257, folders["b"], "257 characters"),
        ("two\nlines", folders["b"], "characters that no URL"),
    ):
        with pytest.raises(AdapterError, match=what):
            house.engine.load_adapter(name, str(folder))
    outputs, _ = house.run()
    _check(outputs, expected)
    house.engine.begin_unload("a")
    for folder in (broken, tmp_path / "nowhere"):
        with pytest.raises(AdapterError):
            house.engine.load_adapter("b", str(folder))
    house.engine.load_adapter("b", str(folders["b"]))
    house.add("b", 0)
    outputs, _ = house.run()
    _check(outputs, expected)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"lora_modules": ("a=/x",)}, "lora_modules is set, and enable_lora is not"),
        ({"enable_lora": True, "lora_modules": ("a=/x", "b=/y"), "max_loras": 1}, "names 2 adapters"),
        ({"enable_lora": True, "lora_modules": ("a=/x", "a=/y")}, "'a' twice"),
        ({"enable_lora": True, "lora_modules": ("a",)}, "names no folder"),
        ({"enable_lora": True, "lora_modules": ("=/x",)}, "0 characters"),
        ({"enable_lora": True, "lora_modules": ('{"name": "a"}',)}, "no JSON object with name and path"),
        ({"enable_lora": True, "lora_modules": ('{"name": 1, "path": "/x"}',)}, "no JSON object with name and path"),
        ({"enable_lora": True, "max_loras": 0}, "max_loras is 0"),
        ({"enable_lora": True, "max_lora_rank": 0}, "max_lora_rank is 0"),
        ({"enable_lora": True, "max_lora_rank": 513}, "max_lora_rank is 513"),
        ({"enable_lora": True, "kv_keep": (0.5,)}, "kv_keep and enable_lora"),
    ],
)
def test_settings_that_are_refused(settings, what):
    with pytest.raises(ConfigError, match=what) as refused:
        EngineConfig(model="smollm2-135m", **settings)
    assert refused.value.remedy


def test_adapters_are_checked_before_weights_are_loaded(base, folders):
    config = EngineConfig(
        model=str(base),
        model_impl="transformers",
        enable_lora=True,
        lora_modules=(f'{{"name": "b", "path": "{folders["b"]}"}}',),
        max_lora_rank=7,
    )
    with pytest.raises(AdapterError, match="max_lora_rank is 7"):
        plan_engine(config)
    config = replace(config, max_lora_rank=8)
    with_room, without = plan_engine(config), plan_engine(replace(config, lora_modules=()))
    num_bytes = sum(tensor.nbytes for tensor in load_file(folders["b"] / "adapter_model.safetensors").values())
    assert with_room.capacity.weight_bytes - without.capacity.weight_bytes == num_bytes


def test_without_enable_lora_no_request_may_name_any(base):
    engine = build_engine(plan_engine(EngineConfig(model=str(base), dtype="float64", attention_backend="reference")))
    assert engine.adapters.status(engine.scheduler) is None
    with pytest.raises(AdapterNotFoundError, match="without enable_lora"):
        engine.add("x", PROMPTS[0], GREEDY, Caller(adapter="a"))
    with pytest.raises(AdapterNotFoundError, match="without enable_lora"):
        engine.load_adapter("a", "/x")


def test_the_library_takes_adapters_by_name_and_with_their_folders(base, folders, expected):
    settings = {"dtype": "float64", "attention_backend": "reference", "threads": 1, "kv_cache_memory_bytes": 2**22}
    llm = LLM(str(base), enable_lora=True, max_loras=2, max_model_len=128, disable_log_stats=False, **settings)
    llm.load_adapter("a", folders["a"])
    asked = ["a", None, LoRARequest("b", 1, str(folders["b"]))]
    for _ in range(2):  # its folder says nothing once it is loaded
        results = llm.generate(
            [{"prompt_token_ids": PROMPTS[at]} for at in range(3)], GREEDY, lora_request=asked, use_tqdm=False
        )
        told = [result.outputs[0].token_ids for result in results]
        assert [list(tokens) for tokens in told] == [expected["a", 0], expected["", 1], expected["b", 2]]
    assert {family.name for family in llm.get_metrics()} >= {"vllm:lora_requests_info", "pagefold:lora_bytes"}
    with pytest.raises(AdapterError, match=r"'b' is that of .*/b, and .*/c is another folder") as error:
        llm.generate({"prompt_token_ids": [5]}, GREEDY, lora_request=LoRARequest("b", 3, str(folders["c"])))
    assert "Name it otherwise" in error.value.remedy
    for wrong in ("c", LoRARequest("c")):
        with pytest.raises(AdapterNotFoundError, match="'c' cannot be found"):
            llm.generate({"prompt_token_ids": [5]}, GREEDY, lora_request=wrong, use_tqdm=False)
    with pytest.raises(InvalidRequestError, match="2 lora_requests for 1 prompts"):
        llm.generate({"prompt_token_ids": [5]}, GREEDY, lora_request=["a", "b"], use_tqdm=False)
    llm.unload_adapter("a")
    with pytest.raises(AdapterNotFoundError):
        llm.unload_adapter("a")
