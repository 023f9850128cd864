"""Calibration: what codecs know of a model, found once for it and kept in the cache folder.

The first ``_NUM_TOKENS`` tokens of a text that comes with Pagefold are computed, and from their keys, values and
queries follow constants (see ``runner/codecs/constants.py``):

* Keys of one head have channels that are far from 0 for every token. A constant taken off all keys takes the same off
  all scores of a query, which softmax does not see, and what is left needs fewer steps. Likewise of values: weights sum
  up to 1, so a constant taken off all of them is missing in the output, where it is added again. The constants are the
  means over the text. KIVI (Liu et al., 2024) shows the channels of keys; that their constant can go is in
  SageAttention (Zhang et al., 2024), section 4.2, whose constant is each sequence's own.
* Rope turns that mean of keys with the position, fast in some channels and slowly in others. So the mean is taken of
  keys turned back to position 0, and each range of positions (``runner/codecs/constants.py``) has what comes of it
  there.
* A sequence's first entry has constants of its own, the first K and V of that text: models attend to it whatever it is
  (an attention sink; Xiao et al., 2023), it is much the same for all tokens and far from others, and an error of its
  score is felt in every output.
* Bases of keys (``runner/codecs/basis.py``) follow from the second moments of centred keys and of queries: of the
  text's own positions, and of these keys and queries turned to later ones, up to the longest that the model takes.
  Without that, positions beyond the text cost several times as much (docs/quantized-kv.md).

A model whose rope is not known here, one that only transformers computes, has one centre for all positions, and bases
for those of the text.

They depend on no request, so what is stored depends on no request; their digest is part of a block's namespace.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from array import array
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from pagefold.config import cache_dir
from pagefold.errors import ConfigError
from pagefold.files.digested import read_digested, write_digested
from pagefold.kv import BlockId, BlockTable, KVGeometry
from pagefold.runner import codecs
from pagefold.runner.codecs import CELL_CODECS
from pagefold.runner.codecs.basis import fitted_basis
from pagefold.runner.codecs.constants import RANGE, CodecConstants, num_ranges_of
from pagefold.runner.codecs.turning import Turning
from pagefold.runner.content import content_fingerprint
from pagefold.runner.inputs import make_inputs
from pagefold.runner.slab import Slab, layout_on
from pagefold.steps import StepPlan

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagefold.engine.blueprint import Blueprint
    from pagefold.runner.slab import AnySlab
    from pagefold.runner.torch_runner import Decoder, OnQueries

__all__ = ["MakeDecoder", "bound_constants", "digest_of", "find_constants"]

_TEXT = Path(codecs.__file__).with_name("calibration.txt")
_NUM_TOKENS, _TOKENS_A_STEP = 2048, 256
_NUM_STRETCHES = 4
"""Stretches of positions to which the text's keys and queries are turned."""
_MOST_POSITIONS = 131072
"""Positions that are told apart, at most: later ones have the centres of the last range before."""
_VERSION = 4
"""The version of what is measured and of how it is kept."""


class MakeDecoder(Protocol):
    """Loads the weights into who computes the layers over a slab."""

    def __call__(self, blueprint: Blueprint, slab: AnySlab, on_queries: OnQueries | None = None) -> Decoder:
        """Return who computes the layers, and tells each layer's queries to ``on_queries``."""
        ...


def digest_of(constants: CodecConstants | None) -> str:
    """Return what a namespace says of constants: empty for none."""
    if constants is None:
        return ""
    return hashlib.sha256(b"".join(one.numpy().tobytes() for one in constants)).hexdigest()[:32]


def bound_constants(blueprint: Blueprint) -> int:
    """Return how many bytes constants take at most on a card: as K and V need them, and as queries and outputs do."""
    geometry = blueprint.geometry
    if geometry.codec is None:
        return 0
    is_centred = CELL_CODECS[geometry.codec.name].centres
    num_cells = geometry.num_cells
    vector_bytes = geometry.head_dim * np.dtype(np.float32).itemsize
    if CELL_CODECS[geometry.codec.name].seals:  # what is taken off K; and, zeros, off V
        return num_cells * (2 + 2) * vector_bytes
    num_centres = 1 + (num_ranges_of(_num_positions(blueprint)) if is_centred else 1) + 2
    return 2 * num_cells * (num_centres + geometry.head_dim) * vector_bytes


def find_constants(
    blueprint: Blueprint, make_decoder: MakeDecoder, say: Callable[[str], None]
) -> CodecConstants | None:
    """Return a model's constants; None where its codec has no use for them or its folder has no tokenizer.

    Args:
        blueprint: the model, and how its KV is stored.
        make_decoder: loads the weights.
        say: is told when they must be measured.
    """
    geometry, spec = blueprint.geometry, blueprint.spec
    if geometry.codec is None or not CELL_CODECS[geometry.codec.name].centres:
        return None
    if not (spec.folder / "tokenizer_config.json").is_file():
        return None
    text = _TEXT.read_bytes()
    computed = content_fingerprint(spec.folder, cache_dir()), blueprint.arithmetic, str(blueprint.dtype)
    num_tokens, num_positions = _most_tokens(blueprint), _num_positions(blueprint)
    facts = _VERSION, *computed, num_tokens, num_positions
    name = hashlib.sha256(repr(facts).encode() + text).hexdigest()[:32]
    file = cache_dir() / "calibration" / f"{name}.f32"
    shape = geometry.num_cells, num_ranges_of(num_positions), geometry.head_dim
    kept = _read(file, *shape)
    if kept is not None:
        return kept
    say(f"calibrate  keys, values and queries are measured on {num_tokens:,} tokens, once for this model")
    constants = _measure(blueprint, make_decoder, text.decode())
    kept = _read(file, *shape)
    if kept is not None:  # another server was sooner: what both store has one name
        return kept
    with contextlib.suppress(OSError, ConfigError):  # else they are measured again next time
        file.parent.mkdir(parents=True, exist_ok=True)
        numbers = b"".join(one.numpy().tobytes() for one in constants)
        write_digested(file, numbers)
    return constants


def _most_tokens(blueprint: Blueprint) -> int:
    """Return how many tokens of the text are computed, if it has as many: as far as the model is computed rightly."""
    return min(_NUM_TOKENS, blueprint.limit.length)


def _num_positions(blueprint: Blueprint) -> int:
    """Return how many positions are told apart."""
    longest = min(blueprint.limit.length, blueprint.spec.max_positions)  # it may be served beyond these
    return 1 if blueprint.spec.fused is None else min(longest, _MOST_POSITIONS)


def _turnings(blueprint: Blueprint) -> list[Turning]:
    """Return how the model's positions turn keys and queries in each layer."""
    spec = blueprint.spec
    if spec.fused is None:
        return [Turning.none(spec.head_dim)] * spec.num_layers
    from pagefold.runner.fused.rope import rope_tables  # noqa: PLC0415 - some kinds are transformers'

    tables = torch.from_numpy(rope_tables(spec.fused, spec.folder, _num_positions(blueprint)))
    turnings = [Turning(table) for table in tables]
    return [turnings[rope] for rope in spec.fused.rope_of_layer]


def _offsets(num_tokens: int, num_positions: int) -> range:
    """Return by how many positions so many tokens are moved on, to be spread over all that there are."""
    stretch = max(num_tokens, num_positions // _NUM_STRETCHES)
    return range(0, max(1, num_positions - num_tokens + 1), stretch)


def _read(file: Path, num_cells: int, num_ranges: int, head_dim: int) -> CodecConstants | None:
    """Return what ``file`` keeps; None where there is no such file, or not all that was written."""
    kept = read_digested(file)
    if kept is None:
        return None
    numbers = np.frombuffer(kept, np.float32)
    shapes = (num_cells, 1 + num_ranges, head_dim), (num_cells, 2, head_dim), (num_cells, head_dim, head_dim)
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    if numbers.size != ends[-1]:
        return None
    parts = zip(np.split(numbers, ends[:-1]), shapes, strict=True)
    return CodecConstants(*(torch.from_numpy(part.reshape(shape).copy()) for part, shape in parts))


@torch.inference_mode()
def _measure(blueprint: Blueprint, make_decoder: MakeDecoder, text: str) -> CodecConstants:
    """Compute the text, and return what follows from its keys, values and queries."""
    from pagefold.tokenizer import Tokenizer  # noqa: PLC0415 - heavy; only when it is needed

    spec = blueprint.spec
    token_ids = Tokenizer(spec.folder).encode(text)[: _most_tokens(blueprint)]
    shape = spec.num_layers, spec.num_kv_heads, spec.head_dim
    keeps = spec.keeps if blueprint.computes_windows else ()  # the text may be longer than any sequence
    plain = KVGeometry(*shape, blueprint.dtype.itemsize, keeps=keeps, sources=blueprint.geometry.sources)
    tables = _whole_tables(plain, len(token_ids))
    layout = layout_on(blueprint.device, in_pairs=blueprint.computes_pairs)
    slab = Slab.allocate(plain, sum(table.end for table in tables), blueprint.dtype, blueprint.device, layout)
    capacity = replace(blueprint.capacity, max_model_len=len(token_ids))
    turnings = _turnings(blueprint)
    offsets = _offsets(len(token_ids), turnings[0].num_positions)
    moments = torch.zeros((plain.num_own_layers, plain.num_kv_heads, spec.head_dim, spec.head_dim), dtype=torch.float64)
    positions = torch.empty(0, dtype=torch.int64)  # of the step's tokens

    def on_queries(layer: int, queries: torch.Tensor) -> None:
        turning = turnings[layer]
        rows = queries.cpu().double().view(len(queries), plain.num_kv_heads, -1, spec.head_dim)
        rows = turning.turned_back(rows.permute(1, 2, 0, 3), positions)  # [KV head, its heads, token, D]
        for offset in offsets:
            turned = turning.turned(rows, positions + offset).flatten(1, 2)
            moments[plain.source_of(layer)] += turned.mT @ turned / (rows.shape[1] * len(token_ids) * len(offsets))

    decoder = make_decoder(replace(blueprint, geometry=plain, capacity=capacity, mask=None), slab, on_queries)
    for start in range(0, len(token_ids), _TOKENS_A_STEP):
        plan = StepPlan(start)
        plan.token_ids = array("i", token_ids[start : start + _TOKENS_A_STEP])
        plan.starts, plan.num_tokens = [start], [len(plan.token_ids)]
        plan.tables = [tables]
        plan.sampling_rows = [0]
        positions = torch.arange(start, start + len(plan.token_ids))
        decoder.logits(make_inputs(plan, plain))
    key_centres, bases = [], []
    cells = slab.data.shape[0], plain.groups[0].num_cells, plain.block_size, spec.head_dim  # whatever the layout
    keys, values = (
        _by_cell(vectors.reshape(cells), plain, tables, len(token_ids)) for vectors in (slab.keys, slab.values)
    )
    for cell, (own, of_queries) in enumerate(zip(keys, moments.flatten(0, 1), strict=True)):
        centres, moment = _of_keys(own.double(), turnings[cell // plain.num_kv_heads], offsets)
        key_centres.append(torch.cat((own[:1], centres.float())))
        bases.append(fitted_basis(moment, of_queries))
    means = values[:, min(1, len(token_ids) - 1) :].double().mean(1, keepdim=True).float()
    value_centres = torch.cat((values[:, :1], means), 1)
    return CodecConstants(torch.stack(key_centres), value_centres, torch.stack(bases))


def _whole_tables(geometry: KVGeometry, num_tokens: int) -> list[BlockTable]:
    """Return a table for each cache group that has all of so many tokens, also where it need not keep them."""
    num_blocks = -(-num_tokens // geometry.block_size)
    firsts = range(0, len(geometry.groups) * num_blocks, num_blocks)
    return [BlockTable(map(BlockId, range(first, first + num_blocks))) for first in firsts]


def _by_cell(vectors: torch.Tensor, geometry: KVGeometry, tables: list[BlockTable], num_tokens: int) -> torch.Tensor:
    """Return a slab's vectors ``[num_blocks, cells, slots, D]`` as float32 ``[cells, num_tokens, D]``, here."""
    found = []
    for layer, head in product(range(geometry.num_own_layers), range(geometry.num_kv_heads)):
        block_ids = tables[geometry.group_of_layer[layer]].block_ids
        found.append(vectors[block_ids, geometry.cell(layer, head)].flatten(0, 1)[:num_tokens].float().cpu())
    return torch.stack(found)


def _of_keys(keys: torch.Tensor, turning: Turning, offsets: range) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the centre of each range, ``[R, D]``, and the second moment ``[D, D]`` of centred keys, all but the first.

    Args:
        keys: float64 ``[n, D]``, of positions 0 to n - 1.
        turning: how the model's positions turn them.
        offsets: to what positions they are moved on.
    """
    positions = torch.arange(min(1, len(keys) - 1), len(keys))
    still = turning.turned_back(keys[positions], positions)
    centres = turning.over_ranges(still.mean(0))
    moment = torch.zeros((keys.shape[1],) * 2, dtype=torch.float64)
    for offset in offsets:
        ranges = ((positions + offset) // RANGE).clamp(max=len(centres) - 1)
        rest = turning.turned(still, positions + offset) - centres[ranges]
        moment += rest.mT @ rest / (len(rest) * len(offsets))
    return centres, moment
