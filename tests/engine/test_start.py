"""What a start imports: a model that the fused decoder computes needs no transformers, whose import takes seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "equivalence"))
from tiny_models import save_tiny_model

GENERATE = """
import sys
from pagefold import LLM, SamplingParams
llm = LLM({folder!r}, kv_cache_memory_bytes=2**26)
how = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
(output,) = llm.generate({prompt!r}, how, use_tqdm=False)
assert len(output.outputs[0].token_ids) == 4
if llm.engine.tokenizer is not None:
    llm.engine.tokenizer.encode_chat([{{"role": "user", "content": "Hi"}}])
print(*sorted({{name.partition(".")[0] for name in sys.modules}}))
"""
HEAVY = {"transformers", "huggingface_hub", "httpx", "sympy", "fastapi"}


def modules_of_a_start(folder: Path, prompt: object) -> set[str]:
    """Start a process that generates four tokens; return what it has imported."""
    code = GENERATE.format(folder=str(folder), prompt=prompt)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.split())


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_fused_model_is_served_without_transformers(tmp_path, family):
    modules = modules_of_a_start(save_tiny_model(family, tmp_path), {"prompt_token_ids": [5, 6, 7]})
    assert "torch" in modules
    assert not modules & HEAVY


@pytest.mark.long
def test_a_tokenizer_and_a_chat_template_need_none_either(tiny_chat_model):
    assert not modules_of_a_start(tiny_chat_model, "Hello") & HEAVY


@pytest.mark.long
def test_other_models_are_read_by_transformers(tmp_path):
    folder = save_tiny_model("gemma2", tmp_path)
    assert "transformers" in modules_of_a_start(folder, {"prompt_token_ids": [5, 6, 7]})
