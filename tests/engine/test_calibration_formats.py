"""Calibration in number formats: what codecs know of a model is found whatever it is computed in."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.config import EngineConfig
from pagefold.engine.calibration import find_constants
from pagefold.engine.planning import hardware_of, plan_engine

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def test_blocks_of_pairs_are_measured_as_those_of_float32(
    tiny_chat_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagefold.engine.calibration.cache_dir", lambda: tmp_path)
    settings = {"device": "cpu", "kv_cache_dtype": "int4", "max_model_len": 64, "kv_cache_memory_bytes": 2**22}
    centres = []
    for dtype in ("float32", "bfloat16"):
        blueprint = plan_engine(EngineConfig(model=str(tiny_chat_model), dtype=dtype, **settings))
        assert blueprint.is_fused
        found = find_constants(blueprint, hardware_of(blueprint).decoder, lambda _: None)
        assert found is not None
        centres.append((found.key_centres, found.value_centres))
    for exact, near in zip(*centres, strict=True):
        assert (exact - near).square().mean().sqrt() < 0.02 * exact.square().mean().sqrt()
