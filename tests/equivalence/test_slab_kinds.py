"""A kind of slab that nobody has heard of is one class: attention and the runner ask it, and are not touched."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from equivalence.attention_cases import Lengths, Shape, make_case
from equivalence.tiny_models import save_tiny_model
from pagefold.kv import BlockId, BlockTable, CopyOp, KVGeometry, ResidualCopy
from pagefold.quality.rounding import RoundingRunner
from pagefold.runner.attention import choose_backend
from pagefold.runner.loader import load_model
from pagefold.runner.slab import Slab, TokenSlab
from pagefold.runner.torch_runner import TorchRunner
from pagefold.runner.transformers_decoder import TransformersDecoder
from pagefold.sampling import SamplingParams
from pagefold.steps import StepPlan

if TYPE_CHECKING:
    from pathlib import Path

    from pagefold.runner.cells import SlabCells

SHAPE = Shape(block_size=16, head_dim=64, num_kv_heads=3, group=3)
SEQUENCES = [Lengths(40, 1), Lengths(70, 20, num_shared=32), Lengths(0, 33)]


class BackwardSlab(TokenSlab):
    """Float32 numbers; in each block the last cell comes first."""

    def __init__(self, plain: Slab) -> None:
        self.data = plain.data.flip(1)
        self.layout = "backward"
        self.block_size, self.head_dim = plain.block_size, plain.head_dim
        self._plain = Slab(self.data, plain.head_dim)
        self._last = self.data.shape[1] - 1

    def cells(self) -> SlabCells:
        cells = self._plain.cells()
        return replace(cells, places=cells.places[::-1])

    def write(self, cell: int, block_ids: torch.Tensor, entries: torch.Tensor, kv: tuple[torch.Tensor, ...]) -> None:
        self._plain.write(self._last - cell, block_ids, entries, kv)

    def read(self, cell: int, block_ids: torch.Tensor, entries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._plain.read(self._last - cell, block_ids, entries)


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_attention_over_it_is_that_over_plain_blocks_to_the_bit(name: str) -> None:
    case = make_case(SHAPE, SEQUENCES, per_head=True, seed=5)
    *operands, plain, inputs, layer, scale, softcap = case.to(torch.float32)
    backward = BackwardSlab(plain)
    found = []
    for slab in (plain, backward):
        attention = choose_backend(name, torch.float32, block_size=SHAPE.block_size, head_dim=SHAPE.head_dim)
        found.append(attention(*operands, slab, inputs, layer, scale, softcap))
    assert not found[0].isnan().any()
    assert torch.equal(found[0], found[1])
    assert torch.equal(backward.data.flip(1).view(torch.int32), plain.data.view(torch.int32))
    assert backward.as_bytes().shape == plain.as_bytes().shape


def test_a_runner_runs_on_it(tmp_path: Path) -> None:
    """With a copy before the step computes."""
    folder = save_tiny_model("llama", tmp_path)
    model, found = load_model(folder, torch.float32), []
    config = model.config
    geometry = KVGeometry(config.num_hidden_layers, config.num_key_value_heads, config.head_dim, 4, 4)
    for kind in (lambda plain: plain, BackwardSlab):
        plain = Slab.allocate(geometry, 4, torch.float32)
        plain.data.fill_(torch.nan)
        slab = kind(plain)
        attention = choose_backend("reference", torch.float32, block_size=4, head_dim=geometry.head_dim)
        runner = TorchRunner(TransformersDecoder(model, slab, attention, max_model_len=64), geometry, slab)
        runner.logits(_plan([5, 9, 11, 23, 40, 3], 0, [0, 1]))
        after_copy = _plan([7], 6, [0, 2])
        after_copy.copies = [CopyOp(BlockId(1), BlockId(2), 2)]
        found.append(runner.logits(after_copy))
    assert found[0].isfinite().all()
    assert torch.equal(found[0], found[1])


def test_what_it_has_not_is_not_asked_for() -> None:
    """Residuals, and codes of 8 bit to round: who asks has a bug, and is told which."""
    geometry = KVGeometry(1, 1, 32, 4, 4)
    slab = BackwardSlab(Slab.allocate(geometry, 2, torch.float32))
    with pytest.raises(AssertionError, match="where blocks are not sealed"):
        slab.copy_residuals([ResidualCopy(0, 1)])
    with pytest.raises(AssertionError, match="without codes of 8 bit"):
        RoundingRunner(TorchRunner(None, geometry, slab), "lossy7")


def _plan(token_ids: list[int], start: int, block_ids: list[int]) -> StepPlan:
    plan = StepPlan(0)
    plan.token_ids.extend(token_ids)
    plan.starts, plan.num_tokens = [start], [len(token_ids)]
    plan.tables = [[BlockTable(map(BlockId, block_ids))]]
    plan.sampling_rows, plan.sampling = [0], [SamplingParams(temperature=0.0)]
    plan.seeds, plan.draws = [0], [0]
    return plan
