"""The built-in model, and a tiny random one that speaks its language: made once, for every folder of tests."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
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


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Several workers share the files: those that take longest come first, and the smallest last, to end together."""
    if not hasattr(config, "workerinput"):
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
