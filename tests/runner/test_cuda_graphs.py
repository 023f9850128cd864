"""What a graph reads outlives its capture: a card's graph has addresses alone, and holds nothing."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from equivalence.tiny_models import save_tiny_model

from pagefold.config import EngineConfig
from pagefold.engine.build import build_engine
from pagefold.engine.planning import plan_engine
from pagefold.runner.cuda_graphs import DecodeGraphs, Longest


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_inputs_live_as_long_as_their_graph(family, tmp_path):
    folder = save_tiny_model(family, tmp_path)
    how = {"device": "cpu", "dtype": "float32", "model_impl": "transformers", "attention_backend": "reference"}
    engine = build_engine(plan_engine(EngineConfig(model=str(folder), kv_cache_memory_bytes=2**22, **how)))
    like = engine.runner.decoding_step()
    read = []

    def forward(inputs):
        there = inputs.attention.on_device
        read.append(
            [
                *(inputs.token_ids, inputs.positions, inputs.logit_rows),
                *(there.query_starts, there.seq_of, there.cells, there.rows, there.tiles, there.residual_ids),
                *(tensor for of in there.groups for tensor in (of.tables, of.lengths, of.first_blocks)),
            ]
        )
        return torch.zeros(inputs.token_ids.shape[1], 8)

    def record(compute):
        out = compute()
        return lambda: out  # as a card's: what computes is gone

    graphs = DecodeGraphs(forward, torch.device("cpu"), max_num_seqs=4, longest=Longest(512, 16), record=record)
    graphs.capture(like)
    found = [weakref.ref(tensor.untyped_storage()) for tensors in read for tensor in tensors]
    read.clear()
    gc.collect()
    assert found
    assert [at for at, one in enumerate(found) if one() is None] == []
