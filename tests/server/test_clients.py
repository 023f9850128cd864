"""Clients that people have, each a program of its own against the built-in model: all get what plain HTTP gets.

langchain-openai and litellm come with ``pip install -e '.[clients]'``; ``vllm bench serve`` with vLLM, which is on the
PATH or where ``make peers`` puts it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from vllm_environments import python_of

pytestmark = pytest.mark.long

CLIENTS = Path(__file__).parent / "clients"
PEER = python_of("0.32.0").with_name("vllm")
VLLM = shutil.which("vllm") or (str(PEER) if PEER.exists() else None)
NOT_INSTALLED = "{} is not installed: pip install -c constraints.txt -e '.[clients]'"
QUESTION = "Name three colours."
PATIENCE_S = 900
ALONE = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false", "HF_HUB_OFFLINE": "1"}
"""Nothing is asked of any other server."""


def run(*command: str) -> str:
    """What a program wrote."""
    done = subprocess.run(
        command, env={**os.environ, **ALONE}, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    ("name", "module"), [("openai", "openai"), ("langchain", "langchain_openai"), ("litellm", "litellm")]
)
def test_it_gets_what_plain_http_gets(smol, name, module):
    if find_spec(module) is None:
        pytest.skip(NOT_INSTALLED.format(module))
    got = json.loads(run(sys.executable, str(CLIENTS / f"with_{name}.py"), f"{smol.url}/v1").splitlines()[-1])
    plain = smol.chat(QUESTION, max_tokens=16, temperature=0)
    text = plain["choices"][0]["message"]["content"]
    usage = [plain["usage"]["prompt_tokens"], plain["usage"]["completion_tokens"]]
    assert text
    assert got["text"] == got["streamed"] == text
    assert got["usage"] == got["streamed_usage"] == usage
    assert got["at_once"] == [text] * 32
    assert got["call"]["name"] == "weather"
    assert set(got["call"]["arguments"]) == {"town"}
    assert got["refused"] == "temperature"
    if "structured" in got:
        assert set(got["structured"]) == {"town"}
    if "completion" in got:
        completion = smol.complete("Once upon a time", max_tokens=8, temperature=0)
        assert got["completion"] == completion["choices"][0]["text"]
    if "models" in got:
        assert got["models"] == ["smollm2-135m"]


@pytest.mark.skipif(VLLM is None, reason="vLLM is not installed: its `vllm bench serve` is the client")
@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_vllm_bench_serve(smol, smollm2, tmp_path, backend):
    assert VLLM is not None
    path = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}[backend]
    sizes = ("--random-input-len", "64", "--random-output-len", "16", "--num-prompts", "40", "--request-rate", "20")
    result = ("--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json")
    to = ("--backend", backend, "--base-url", smol.url, "--endpoint", path)
    about = ("--model", "smollm2-135m", "--tokenizer", str(smollm2), "--dataset-name", "random", "--ignore-eos")
    run(VLLM, "bench", "serve", *to, *about, *sizes, *result)
    figures = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert figures["completed"] == 40
    assert figures["total_output_tokens"] == 40 * 16
