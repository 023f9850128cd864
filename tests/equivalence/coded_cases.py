"""Cases of attention whose blocks hold codes: what the kernels of a CPU and of a card are held to."""

from __future__ import annotations

import numpy as np
import torch

from equivalence.attention_cases import make_case
from pagefold.kv import CODECS, KVGeometry
from pagefold.runner.attention import AttentionInputs
from pagefold.runner.attention.reference import reference_attention
from pagefold.runner.codec_slab import CODEC_LAYOUT, CODEC_ROWS_LAYOUT, CodecSlab
from pagefold.runner.codecs import CELL_CODECS
from pagefold.runner.codecs.basis import fitted_basis
from pagefold.runner.codecs.constants import CodecConstants

__all__ = [
    "NUM_RANGES",
    "attend_coded",
    "constants_for",
    "encode_extremes",
    "encoded",
    "hold_codes",
    "some_constants",
    "some_moments",
]

NUM_RANGES = 3
CHOOSING = CELL_CODECS["k8v4"].values.number
"""The format that takes the better of two scales."""


def some_constants(num_cells, head_dim, seed):
    """Return constants such as a model has: bases of keys and queries that differ by direction."""
    generator = torch.Generator().manual_seed(seed)
    centres = [torch.randn(num_cells, num, head_dim, generator=generator) for num in (1 + NUM_RANGES, 2)]
    bases = torch.stack([fitted_basis(*some_moments(head_dim, generator)) for _ in range(num_cells)])
    return CodecConstants(*centres, bases)


def constants_for(blueprint, _say):
    """Return constants such as a model with a tokenizer has: of each cell others. It stands in for measuring them."""
    geometry = blueprint.geometry
    return some_constants(geometry.num_layers * geometry.num_kv_heads, geometry.head_dim, 5)


def some_moments(head_dim, generator):
    """Return second moments of keys and of queries that are large in some directions, a few apart."""
    moments = []
    for _ in range(2):
        sizes = torch.rand(head_dim, generator=generator, dtype=torch.float64) + 0.5
        vectors = torch.randn(4 * head_dim, head_dim, generator=generator, dtype=torch.float64) * sizes
        moments.append(vectors.T @ vectors / len(vectors))
    return moments


def encoded(case, name, seed, layout=CODEC_LAYOUT, device="cpu"):
    """Return two equal slabs of that codec that hold what the case's slab holds, and poison where that has NaN.

    The second one is on ``device``.
    """
    slab = case.slab
    num_blocks, num_cells = slab.data.shape[:2]
    geometry = KVGeometry(1, num_cells, slab.head_dim, 4, slab.block_size, CODECS[name])
    constants = some_constants(num_cells, slab.head_dim, seed)
    data = torch.full((num_blocks, geometry.bytes_per_block), 0xFF, dtype=torch.uint8)
    made = CodecSlab(data, geometry, constants, layout)
    places = np.zeros(num_blocks, np.int64)  # of each block in its table; who shares it has it at the same place
    group = case.group
    places[group.sink_tables] = np.arange(group.sink_tables.shape[2])
    places[group.tables] = np.arange(group.tables.shape[2]) + group.firsts[:, None, None] // slab.block_size
    for cell in range(num_cells):
        blocks, slots = torch.nonzero(~slab.keys[:, cell, :, 0].isnan(), as_tuple=True)
        entries = torch.from_numpy(places)[blocks] * slab.block_size + slots
        made.write(cell, blocks, entries, slab.read(cell, blocks, entries))
    return made, CodecSlab(made.data.to(device, copy=True), geometry, constants, layout)


def hold_codes(case, expected, slab):
    """Hold what a kernel has encoded to what the reference has: the same bytes in all blocks, poison included.

    But where V takes the better of two scales, a kernel may take the other one where both leave the same error, up to
    rounding: then the V of that token is as near.
    """
    differs = expected.data != slab.data.cpu()
    for s in range(case.inputs.num_seqs):
        first, last = case.inputs.query_starts[s : s + 2].tolist()
        for h in range(case.key.shape[1]):
            cell = int(case.inputs.cells[s, case.layer, h])
            places, is_choosing = slab.places[cell], slab.codec(cell).values.number == CHOOSING
            entries = torch.arange(first - last, 0) + int(case.group.lengths[s, h])
            blocks = torch.from_numpy(case.places(s, h, entries.numpy())[0]).long()
            read = [one.read(cell, blocks, entries)[1].cpu().double() for one in (expected, slab)]
            for block, entry, value, *both in zip(blocks, entries, case.value[first:last, h], *read, strict=True):
                errors = [(one - value).square().sum().item() for one in both]
                if is_choosing and abs(errors[0] - errors[1]) <= 1e-5 * errors[0]:
                    slot, row = int(entry) % slab.block_size, (places.key_scales - places.values) // slab.block_size
                    differs[block, places.values + slot * row :][:row] = False
                    differs[block, places.value_scales + 2 * slot :][:2] = False
    assert not differs.any(), f"{int(differs.sum())} bytes are not those of the reference"


def attend_coded(name, shape, sequences, dtype, bound, *, card=None, **made):
    """Hold a card's kernels to the reference on a slab of a codec, and what they encode to what it does.

    The reference attends in float64 to what the kernels' slab holds. They run on ``card``; without one in Triton's
    interpreter. Returns the largest error.
    """
    from pagefold.runner.attention.cuda.attention import CudaAttention, HeadShape
    from pagefold.runner.attention.cuda.blocks import reads_of

    num_splits, num_padding = made.pop("num_splits", None), made.pop("num_padding", 0)
    case = make_case(shape, sequences, **made)
    dtype = getattr(torch, dtype)
    case.round_to(dtype)
    case.poison_unseen()
    device, *processors = ("cpu", (9, 0), 4) if card is None else ("cuda", card.capability, card.num_processors)
    slabs = encoded(case, name, made["seed"], CODEC_ROWS_LAYOUT, device)
    real, num_tokens = case.inputs, len(case.query)
    of_reference = case.query, case.key, case.value, slabs[0], real, case.layer, *case.scoring
    reference_attention(*of_reference)  # it encodes
    if num_padding:
        case.pad(num_padding)
    reads = reads_of(CELL_CODECS[name])
    heads = case.query.shape[1], case.key.shape[1], shape.head_dim
    operands = (operand.to(device, dtype) for operand in (case.query, case.key, case.value))
    attention = CudaAttention(HeadShape(dtype, *heads, *processors, reads), num_splits=num_splits)
    output = attention(*operands, slabs[1], case.inputs, case.layer, *case.scoring).cpu()
    assert output.dtype == dtype
    assert not output.isnan().any(), "the kernels have read what nothing may read"
    assert not output[num_tokens:].any(), "a row that fills up has seen something"
    case.inputs = real
    hold_codes(case, *slabs)
    slabs[0].data.copy_(slabs[1].data)  # where either scale will do, they may have taken another one
    slabs[0].write = lambda *_: None
    error = (output[:num_tokens].double() - reference_attention(*of_reference)).abs().max().item()
    assert error <= bound, f"{name} is off by {error:.2e}, {shape}, {made}"
    return error


def encode_extremes(name, *, card=None):
    """Hold a card's kernels to the reference in bits where vectors are what no model computes; and NaN is not hidden.

    Of numbers that are none, in formats of floating point, the bits are not compared.
    """
    from pagefold.runner.attention.cuda.attention import CudaAttention, HeadShape
    from pagefold.runner.attention.cuda.blocks import reads_of

    generator, head_dim = torch.Generator().manual_seed(5), 32
    some, first = torch.randn(head_dim, generator=generator), torch.arange(head_dim) == 0
    finite = [some * size for size in (0.0, 1e-40, 1e-37, 1e30)]
    finite += [some.abs() * 0, -some.abs() * 0, some.clamp(min=0), -some.abs(), torch.full_like(some, 0.3)]
    finite += [(some * 4).round(), (some * 8).round() + 0.5, some * (8 * some).exp(), first * 100.0]
    lost = [some.sign() * 3.4e38, *(torch.where(first, bad, some) for bad in (torch.inf, -torch.inf, torch.nan))]
    vectors = torch.stack([*finite, *lost, some * torch.nan])[:, None]
    num_tokens, codec = len(vectors), CELL_CODECS[name]
    geometry = KVGeometry(1, 1, head_dim, 4, num_tokens, CODECS[name])
    constants = some_constants(1, head_dim, 1)
    inputs = AttentionInputs.of_one_group(
        query_starts=np.array([0, num_tokens], np.int32),
        tables=np.zeros((1, 1, 1), np.int32),
        lengths=np.array([[num_tokens]], np.int32),
        cells=np.zeros((1, 1, 1), np.int32),
    )
    device, *processors = ("cpu", (9, 0), 4) if card is None else ("cuda", card.capability, card.num_processors)
    attention = CudaAttention(HeadShape(torch.float32, 1, 1, head_dim, *processors, reads_of(codec)))
    found = []
    for attend, where in ((reference_attention, "cpu"), (attention, device)):
        data = torch.zeros(1, geometry.bytes_per_block, dtype=torch.uint8, device=where)
        slab, operand = CodecSlab(data, geometry, constants, CODEC_ROWS_LAYOUT), vectors.to(where)
        output = attend(torch.ones_like(operand), operand, operand, slab, inputs, 0, 1.0).cpu()
        assert output[-2:].isnan().all(), "a vector that is none is hidden"
        found.append(slab)
    places, ours = found[0].places[0], found[1].data.cpu()
    for begin, form in ((places.keys, codec.keys), (places.values, codec.values)):
        row = form.num_code_bytes(head_dim)
        codes = [data[0, begin:][: num_tokens * row].view(num_tokens, row) for data in (found[0].data, ours)]
        compared = num_tokens if "int" in name or name == "k8v4" else len(finite)
        assert torch.equal(*(part[:compared] for part in codes)), "codes are not those of the reference"
    assert torch.equal(found[0].data[0, places.key_scales :], ours[0, places.key_scales :]), "nor are scales"
