"""Namespaces: blocks that were computed by one arithmetic are never taken for those of another."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

import pytest
from equivalence.tiny_models import save_tiny_model

from pagefold.config import EngineConfig
from pagefold.engine.namespace import namespace_of
from pagefold.engine.planning import plan_engine
from pagefold.kernels import floats, pairs, quads
from pagefold.kv import KeepRule
from pagefold.runner.fused import formats
from pagefold.store import FrameFormat

if TYPE_CHECKING:
    from types import ModuleType

FORMATS = list(product(("float32", "bfloat16"), (None, "int8", "w8a8_int8")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_tiny_model("llama", tmp_path_factory.mktemp("llama")))


def _blueprint(folder, dtype, quantization, **settings):
    return plan_engine(EngineConfig(model=folder, device="cpu", dtype=dtype, quantization=quantization, **settings))


@pytest.mark.parametrize("codec", ["auto", "int8_per_token_head"])
def test_every_format_has_a_namespace_and_frames_of_its_own(folder, codec):
    blueprints = [_blueprint(folder, *one, kv_cache_dtype=codec) for one in FORMATS]
    blueprints.append(_blueprint(folder, "float32", None, kv_cache_dtype=codec, model_impl="transformers"))
    namespaces = [namespace_of(blueprint) for blueprint in blueprints]
    assert len({namespace.key() for namespace in namespaces}) == len(FORMATS) + 1
    frames = [FrameFormat.of(*both) for both in zip(namespaces, [one.geometry for one in blueprints], strict=True)]
    assert len(set(frames)) == len(FORMATS) + 1


@pytest.mark.parametrize(
    ("form", "module", "constant"),
    [
        (("float32", None), floats, "MAX_STEPS"),
        (("float32", "int8"), floats, "MAX_STEPS"),
        (("bfloat16", None), pairs, "MAX_STEPS"),
        (("bfloat16", "w8a8_int8"), quads, "GROUP"),
        (("bfloat16", "w8a8_int8"), pairs, "MAX_STEPS"),  # in which attention computes
    ],
)
def test_another_order_of_sums_is_another_namespace(folder, form, module: ModuleType, constant: str, monkeypatch):
    blueprint = _blueprint(folder, *form)
    before = namespace_of(blueprint)
    monkeypatch.setattr(module, constant, getattr(module, constant) // 2)
    assert namespace_of(blueprint) != before


def test_by_which_instruction_is_no_part_of_it(folder, monkeypatch):
    """What comes out is the same: machines share what they computed."""
    blueprint = _blueprint(folder, "bfloat16", "w8a8_int8")
    told = []
    for is_native in (False, True):
        monkeypatch.setattr(formats, "bfloat16_pairs", lambda is_native=is_native: pairs.Pairs(is_native))
        monkeypatch.setattr(formats, "int8_quads", lambda is_native=is_native: quads.Quads(is_native))
        told.append((namespace_of(blueprint), blueprint.formats.products.means))
    assert told[0][0] == told[1][0]
    assert told[0][1] != told[1][1]


def test_what_layers_keep_is_a_part_of_it(folder):
    """And of a model without sinks the name is what it always was."""
    blueprint = _blueprint(folder, "float32", None)
    geometry = blueprint.geometry
    rules = (KeepRule(40), KeepRule(40, num_sinks=4), KeepRule(40, num_sinks=5), KeepRule(40, is_chunked=True))
    kept = [replace(geometry, keeps=(rule,) * geometry.num_layers) for rule in rules]
    layouts = [namespace_of(replace(blueprint, geometry=each)).layout for each in [geometry, *kept]]
    assert len(set(layouts)) == len(layouts)
    layers = tuple(range(geometry.num_layers))
    assert f"/{layers}:40:False/" in layouts[1]
    assert f"/{layers}:40:False:4/" in layouts[2]
