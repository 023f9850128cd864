"""Triton's kernels in its interpreter: run by a process that has set ``TRITON_INTERPRET`` first."""

from __future__ import annotations

import os

__all__ = ["attend", "attend_padded", "attend_to_none", "begin", "complete", "tiles_taken"]


def begin() -> None:
    """Begin such a process."""
    os.environ["TRITON_INTERPRET"] = "1"
    import torch

    torch.set_num_threads(1)


def attend(shape, sequences, dtype, bound, **made):
    """Hold the kernels to the dense twin, and the slab to what had to be written; return the largest error."""
    import torch

    from equivalence.attention_cases import make_case

    num_splits = made.pop("num_splits", None)
    case = make_case(shape, sequences, **made)
    dtype = getattr(torch, dtype)
    case.round_to(dtype)
    case.poison_unseen()
    expected = case.expected()
    output, slab = _run(case, dtype, num_splits=num_splits)
    error = (output - expected).abs().max().item()
    assert not output.isnan().any(), "the kernels have read what nothing may read"
    assert error <= bound, f"off by {error:.2e}"
    _hold_writes(case, slab)
    return error


def tiles_taken(shape, lengths, rule):
    """Return how many tiles the kernels take of one sequence's entries in a step."""
    from unittest import mock

    import torch

    from equivalence.attention_cases import make_case
    from pagefold.runner.attention.cuda import kernels

    case = make_case(shape, [lengths], per_head=False, seed=1, rules=(rule,), trims=True)
    with mock.patch.object(kernels, "attend_tile", side_effect=kernels.attend_tile) as attend_tile:
        _run(case, torch.float32)
    return attend_tile.call_count


def attend_padded(shape, lengths, num_padding, **made):
    """Hold a decoding step whose last rows only fill up a batch: those give zeros and write nothing."""
    import torch

    from equivalence.attention_cases import make_case

    case = make_case(shape, lengths, per_head=False, seed=3, **made)
    num_rows = len(lengths)
    expected = case.expected()
    real = case.inputs
    case.pad(num_padding)
    output, slab = _run(case, torch.float32)
    assert (output[:num_rows] - expected).abs().max() < 8e-6
    assert not output[num_rows:].any()
    case.inputs = real
    _hold_writes(case, slab)


def attend_to_none(name, num_splits):
    """Hold a decoding step to it that a key, value or query that is no number is none in its output, and in no other.

    One sequence has nothing else, so that all that a split has seen is no number.
    """
    import torch

    from equivalence.attention_cases import Lengths, Shape, make_case
    from equivalence.coded_cases import encoded
    from pagefold.runner.attention.cuda.attention import CudaAttention, HeadShape
    from pagefold.runner.codec_slab import CODEC_ROWS_LAYOUT
    from pagefold.runner.slab import ROWS_LAYOUT

    for operand in ("query", "key", "value"):
        case = make_case(
            Shape(16, 32, 1, 2, 1), [Lengths(20, 1), Lengths(0, 1), Lengths(300, 1)], per_head=False, seed=1
        )
        getattr(case, operand)[1:] = torch.nan
        operands = list(case.to(torch.float32, ROWS_LAYOUT))
        if name is not None:
            operands[3] = encoded(case, name, 1, CODEC_ROWS_LAYOUT)[1]
        output = CudaAttention(HeadShape(torch.float32, 2, 1, 32), num_splits=num_splits)(*operands)
        assert not output[0].isnan().any()
        assert output[1:].isnan().all(), f"a {operand} that is no number is hidden"


def _run(case, dtype, *, num_splits=None):
    from pagefold.runner.attention.cuda.attention import CudaAttention, HeadShape
    from pagefold.runner.slab import ROWS_LAYOUT

    operands = case.to(dtype, ROWS_LAYOUT)
    heads = HeadShape(dtype, case.query.shape[1], case.key.shape[1], case.query.shape[2], num_processors=4)
    output = CudaAttention(heads, num_splits=num_splits)(*operands)
    assert output.dtype == dtype
    return output.double(), operands[3]


def _hold_writes(case, slab):
    import numpy as np

    expected = case.to(slab.data.dtype, slab.layout)[3]
    for s in range(case.inputs.num_seqs):
        first, last = case.inputs.query_starts[s : s + 2].tolist()
        for h in range(case.key.shape[1]):
            blocks, slots = case.places(s, h, np.arange(first - last, 0) + case.group.lengths[s, h])
            at = blocks, case.inputs.cells[s, case.layer, h], slots
            expected.keys[at] = case.key[first:last, h].to(slab.data.dtype)
            expected.values[at] = case.value[first:last, h].to(slab.data.dtype)
    same = (slab.data == expected.data) | (slab.data.isnan() & expected.data.isnan())
    assert same.all(), "it has written elsewhere"


def complete(folder, prompts, num_outputs, *, has_graphs, is_overlapped=False, **settings):
    """Complete prompts with the engine as a card has it: its decoder, its kernels, its steps filled up as for graphs.

    Only what replays a graph is not a card's: it computes the step again, from the same memory.

    Returns:
        the tokens, how many steps were replayed, and how many were launched before the last one's tokens were known.
    """
    import torch

    from pagefold.config import EngineConfig
    from pagefold.engine.build import build_engine
    from pagefold.engine.overlapped import OverlappedEngine
    from pagefold.engine.planning import plan_engine
    from pagefold.runner.attention.cuda.attention import CudaAttention, HeadShape
    from pagefold.runner.codec_slab import CODEC_ROWS_LAYOUT, CodecSlab
    from pagefold.runner.cuda_decoder import CudaDecoder
    from pagefold.runner.loader import load_model
    from pagefold.runner.sealed_slab import SEALED_ROWS_LAYOUT, SealedSlab
    from pagefold.runner.slab import ROWS_LAYOUT, Slab
    from pagefold.runner.torch_runner import TorchRunner
    from pagefold.sampling import SamplingParams

    config = EngineConfig(
        model=str(folder),
        device="cpu",
        dtype="float32",
        model_impl="transformers",
        attention_backend="reference",
        **settings,
    )
    blueprint = plan_engine(config)
    engine = build_engine(blueprint, say=lambda _: None)
    spec, geometry = blueprint.spec, blueprint.geometry
    before = engine.runner.slab
    if geometry.codec is None:
        slab = Slab(torch.full_like(before.data, float("nan")), spec.head_dim, ROWS_LAYOUT)
    elif isinstance(before, SealedSlab):
        data, residuals = torch.full_like(before.data, 0xFF), torch.full_like(before.residuals, float("nan"))
        slab = SealedSlab(data, residuals, geometry, before.centres, SEALED_ROWS_LAYOUT)
    else:
        slab = CodecSlab(torch.full_like(before.data, 0xFF), geometry, before.constants, CODEC_ROWS_LAYOUT)
    kernels = CudaAttention(
        HeadShape(torch.float32, spec.num_heads, spec.num_kv_heads, spec.head_dim, num_processors=2)
    )
    model = load_model(folder, torch.float32)
    decoder = CudaDecoder(model, slab, kernels, max_model_len=engine.capacity.max_model_len)
    engine.runner = TorchRunner(decoder, geometry, slab)
    num_replayed = 0
    if has_graphs:

        def record(compute):
            out = compute()  # as a capture does: what was captured must not depend on what was in memory then

            def replay():
                nonlocal num_replayed
                num_replayed += 1
                return out.copy_(compute())

            return replay

        decoder.capture(engine.runner.decoding_step(), config.max_num_seqs, record=record)
    if is_overlapped:
        engine = OverlappedEngine(
            scheduler=engine.scheduler,
            runner=engine.runner,
            tokenizer=None,
            limits=engine.limits,
            capacity=engine.capacity,
        )
    for index, prompt in enumerate(prompts):
        engine.add(str(index), prompt, SamplingParams(temperature=0.0, max_tokens=num_outputs, ignore_eos=True))
    tokens = {str(index): [] for index in range(len(prompts))}
    while engine.has_work:
        for delta in engine.step():
            assert delta.error is None
            tokens[delta.request_id] += delta.token_ids
    return list(tokens.values()), num_replayed, engine.num_ahead if is_overlapped else 0
