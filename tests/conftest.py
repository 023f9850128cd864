"""The built-in model, and a tiny random one that speaks its language: made once, for every folder of tests."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from statistics import fmean
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from shards import BOUND_S, Deck, function_of, parse_shard, seconds_of_functions, write_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

# Read when the first library with OpenMP is loaded, here and in what tests start. Else a thread that waits for its team
# keeps a core that another worker, or the very thread that it waits for, could use: some tests take ten times as long.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A busy machine is slow, and a seed may draw much that is filtered out: neither is wrong.
_HARMLESS = [HealthCheck.too_slow, HealthCheck.filter_too_much]
settings.register_profile("no deadlines", deadline=None, suppress_health_check=_HARMLESS)
settings.load_profile("no deadlines")

_LONGEST = (
    "equivalence/test_codec_workloads.py",  # compiles what others load then
    "server/test_serve_tiers.py",
    "equivalence/test_attention.py",
    "equivalence/test_cuda_kernels.py",  # Triton's interpreter
)


_RANK = pytest.StashKey[int]()
"""Which unit of its shard a test belongs to; -1 where it is of another shard."""


class OneShard:
    """Leaves one shard of the long tests, and keeps what belongs together on one worker (``--dist loadgroup``).

    Args:
        text: which shard, as ``2/5``.
    """

    def __init__(self, text: str) -> None:
        try:
            self._shard, self._num_shards = parse_shard(text)
        except ValueError as error:
            msg = f"--shard={text}: {error}; the second of five is 2/5"
            raise pytest.UsageError(msg) from None
        self._told = ""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
        """Before xdist's own hook, which reads the groups."""
        long = [item for item in items if item.get_closest_marker("long")]
        deck = Deck((item.nodeid for item in long), seconds_of_functions())
        units = deck.deal(self._num_shards)[self._shard - 1]
        rank = {unit: number for number, unit in enumerate(sorted(units, key=deck.place))}
        for item in long:
            item.stash[_RANK] = rank.get(deck.unit_of(item.nodeid), -1)
        here = [item for item in long if item.stash[_RANK] >= 0]
        for item in here:
            item.add_marker(pytest.mark.xdist_group(f"unit{item.stash[_RANK]}"))
        config.hook.pytest_deselected(items=[item for item in items if item.stash.get(_RANK, -1) < 0])
        items[:] = here
        takes = deck.time_of(units)
        self._told = f"shard {self._shard} of {self._num_shards}: {len(here)} tests, about {takes / 60:.0f} minutes"
        if takes > BOUND_S:
            msg = f"{self._told}, and {BOUND_S / 60:.0f} are the bound: raise SHARDS in the Makefile"
            raise pytest.UsageError(msg)
        yield
        items.sort(key=lambda item: item.stash[_RANK])  # else in the order of this run's seed

    def pytest_report_collectionfinish(self) -> str:
        return self._told


class Stopwatch:
    """Writes into the table of ``shards.py`` what a case of each long test took, of those that ran."""

    def __init__(self) -> None:
        self._taken: dict[str, list[float]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[object]:
        begin = sum(os.times()[:4])  # of this process, and of those that it has started and that have ended
        result = yield
        if item.get_closest_marker("long"):
            self._add(function_of(item.nodeid), [sum(os.times()[:4]) - begin])
        return result

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node) -> None:
        """A worker of xdist has ended."""
        for function, taken in getattr(node, "workeroutput", {}).get("long_seconds", {}).items():
            self._add(function, taken)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["long_seconds"] = self._taken
            return
        means = {function: max(0.1, round(fmean(taken), 1)) for function, taken in self._taken.items()}
        write_seconds(seconds_of_functions() | means)

    def _add(self, function: str, taken: list[float]) -> None:
        self._taken.setdefault(function, []).extend(taken)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", help="of the long tests, only this shard: 2/5 is the second of five")
    parser.addoption("--measure-long", action="store_true", help="write what long tests take into long_seconds.json")
    parser.addoption("--hostile-bodies", type=int, default=6_000, help="how many the long form of tests/hostile sends")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.measure_long:
        config.pluginmanager.register(Stopwatch())
    if config.option.shard:
        config.pluginmanager.register(OneShard(config.option.shard))


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Iterator[object]:
    """Of a function that is marked ``quick(every=3)``, the first case of each three stays quick.

    Those that are long by themselves are not counted.
    """
    made = yield
    quick = [item for item in made if not item.get_closest_marker("long")] if isinstance(made, list) else []
    for place, item in enumerate(quick):
        mark = item.get_closest_marker("quick")
        if mark and place % mark.kwargs["every"]:
            item.add_marker("long")
    return made


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Several workers share the files: those that take longest come first, and the smallest last, to end together."""
    if not hasattr(config, "workerinput") or config.option.shard:
        return
    num_tests = Counter(item.path for item in items)
    names = {path: "/".join(path.parts[-2:]) for path in num_tests}
    place = {path: _LONGEST.index(name) if name in _LONGEST else len(_LONGEST) for path, name in names.items()}
    items.sort(key=lambda item: (place[item.path], -num_tests[item.path]))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Return the folder of the model that Pagefold brings."""
    from pagefold.config import cache_dir
    from pagefold.hub.catalog import resolve

    return resolve("smollm2-135m", cache_dir())


@pytest.fixture(scope="session")
def tiny_chat_model(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Path:
    """Return the folder of a random Llama with the built-in model's tokenizer and chat template."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny")
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        eos_token_id=2,
        bos_token_id=1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    for file in smollm2.iterdir():
        if file.name.startswith(("tokenizer", "special_tokens", "vocab", "merges", "chat_template")):
            shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="session")
def windowed_chat_model(tmp_path_factory: pytest.TempPathFactory, tiny_chat_model: Path) -> Path:
    """Return the folder of a random Gemma 3 of two full and two sliding layers, with the same tokenizer."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    folder = tmp_path_factory.mktemp("windowed")
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    config = Gemma3TextConfig(
        vocab_size=49152,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        layer_types=kinds,
        sliding_window=24,
        max_position_embeddings=2048,
        eos_token_id=2,
        bos_token_id=1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        Gemma3ForCausalLM(config).save_pretrained(folder)
    for file in tiny_chat_model.iterdir():
        if file.name.startswith(("tokenizer", "special_tokens", "vocab", "merges", "chat_template")):
            shutil.copy(file, folder)
    return folder


POISON = 777
"""The token that makes NaN of whatever has it, in ``poisoned_chat_model``."""


@pytest.fixture(scope="session")
def poisoned_chat_model(tmp_path_factory: pytest.TempPathFactory, tiny_chat_model: Path) -> Path:
    """Return the folder of the same model, but for the embedding of token ``POISON``."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("poisoned") / "tiny"
    shutil.copytree(tiny_chat_model, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder
