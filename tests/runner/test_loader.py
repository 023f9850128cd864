"""The attention that transformers' layers call: which arguments it takes, and whose K and V it lets a layer read."""

from __future__ import annotations

import weakref
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AttentionInterface

from pagefold.errors import UnsupportedModelError
from pagefold.kv import KVGeometry
from pagefold.runner.attention import AttentionInputs, reference_attention
from pagefold.runner.loader import AttentionContext, register_attention
from pagefold.runner.slab import Slab

NUM_TOKENS = 3


def make_context(sources: tuple[int, ...] = ()) -> AttentionContext:
    """Return a step of one sequence, for two layers of one KV head of 8."""
    cells = np.array([[[0], [0] if sources else [1]]], np.int32)
    lengths = np.array([[NUM_TOKENS]], np.int32)
    inputs = AttentionInputs.of_one_group(
        np.array([0, NUM_TOKENS], np.int32), np.array([[[1]]], np.int32), lengths, cells
    )
    slab = Slab.allocate(KVGeometry(2, 1, 8, 4, 4), 2, torch.float32)
    return AttentionContext(reference_attention, slab, replace(inputs, sources=sources), max_model_len=64)


def attend(context: AttentionContext, layer: int, *states: torch.Tensor, **arguments: object) -> torch.Tensor:
    attention = AttentionInterface()[register_attention()]
    return attention(SimpleNamespace(layer_idx=layer), *states, None, paged=context, **arguments)[0]


def states() -> tuple[torch.Tensor, ...]:
    """Return a query, a key and a value ``[1, 1, T, 8]``."""
    return tuple(torch.randn(1, 1, NUM_TOKENS, 8) for _ in range(3))


@pytest.mark.parametrize(
    "name", ["sinks", "indices", "block_indices", "position_bias", "shared_kv_states", "cu_seq_lens_q", "wishful"]
)
def test_what_it_does_not_know_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"SimpleNamespace asks for {name}") as refused:
        attend(make_context(), 0, *states(), **{name: torch.zeros(1)})
    assert refused.value.remedy


def test_an_attention_that_is_asked_to_look_ahead_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="looks at later tokens too"):
        attend(make_context(), 0, *states(), is_causal=False)


def test_what_changes_nothing_is_taken() -> None:
    own = states()
    harmless = {"dropout": 0.0, "position_ids": torch.arange(NUM_TOKENS), "use_cache": False, "sinks": None}
    plain = attend(make_context(), 0, *own)
    assert torch.equal(attend(make_context(), 0, *own, is_causal=True, **harmless), plain)


def test_what_another_layer_reads_is_held_and_so_its_address_is_nobody_elses() -> None:
    context, (query, key, value) = make_context(sources=(0, 0)), states()
    attend(context, 0, query, key, value)
    attend(context, 1, query, key, value)
    held = weakref.ref(key), weakref.ref(value)
    del key, value
    context.last = ()
    assert all(one() is not None for one in held)
    with pytest.raises(UnsupportedModelError, match=r"K and V of its own, where .* of layer 0"):
        attend(context, 1, *states())


def test_what_nobody_reads_is_not_held() -> None:
    context = make_context()
    attend(context, 0, *states())
    assert not context.written
