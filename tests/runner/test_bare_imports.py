"""The rooms that a card needs run without what only the server or the CPU's kernels need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ABSENT = (
    "numba",
    "llvmlite",
    "fastapi",
    "starlette",
    "uvicorn",
    "pydantic",
    "msgspec",
    "xxhash",
    "llguidance",
    "prometheus_client",
    "pythonjsonlogger",
    "redis",
)

PROGRAM = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {ABSENT!r}:
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Absent())
sys.path.insert(0, {str(Path(__file__).resolve().parents[1])!r})
"""

COMPLETE = """
import sys
from array import array
from pathlib import Path
import torch
from equivalence.tiny_models import save_tiny_model
import pagefold.engine.build, pagefold.engine.planning, pagefold.engine.on_card, pagefold.engine.engine
import pagefold.runner.card_profile
import pagefold.runner.attention.cuda.configs, pagefold.scheduler, pagefold.tokenizer
from pagefold.kv import BlockId, BlockTable, KVGeometry
from pagefold.sampling import SamplingParams
from pagefold.runner.card import find_card
from pagefold.runner.cuda_decoder import CudaDecoder
from pagefold.runner.loader import load_model
from pagefold.runner.models import inspect_model
from pagefold.runner.slab import ROWS_LAYOUT, Slab
from pagefold.runner.torch_runner import TorchRunner
from pagefold.steps import StepPlan

find_card()
folder = save_tiny_model("llama", Path(sys.argv[1]), dtype=torch.float32)
spec = inspect_model(folder)
geometry = KVGeometry(spec.num_layers, spec.num_kv_heads, spec.head_dim, 4)
slab = Slab(Slab.allocate(geometry, 4, torch.float32).data, spec.head_dim, ROWS_LAYOUT)
runner = TorchRunner(CudaDecoder(load_model(folder, torch.float32), slab, None, max_model_len=64), geometry, slab)
plan = StepPlan(0)
plan.token_ids, plan.starts, plan.num_tokens = array("i", [5, 6, 7]), [0], [3]
plan.tables = [[BlockTable([BlockId(2)])]]
plan.sampling_rows, plan.sampling, plan.seeds, plan.draws = [0], [SamplingParams(temperature=0.0)], [0], [0]
(token_id,) = runner.run(plan).token_ids
assert 0 <= token_id < spec.vocab_size
"""


def ran(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error::ImportWarning", "-c", program, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.long
def test_a_step_runs_without_them(tmp_path):
    ended = ran(PROGRAM + COMPLETE, str(tmp_path))
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize("name", ABSENT[:1])
def test_they_are_absent_there(name):
    ended = ran(PROGRAM + f"import {name}")
    assert f"ModuleNotFoundError: {name}" in ended.stderr
