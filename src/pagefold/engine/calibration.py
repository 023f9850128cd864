"""Calibration: what codecs know of a model, found once for it and kept in the cache folder.

The first ``_NUM_TOKENS`` tokens of a text that comes with Pagefold are computed, and from their keys, values and
queries follow constants (see ``runner/codecs/constants.py``):

* Keys of one head have channels that are far from 0 for every token. A constant taken off all keys takes the same off
  all scores of a query, which softmax does not see, and what is left needs fewer steps. Likewise of values: weights sum
  up to 1, so a constant taken off all of them is missing in the output, where it is added again. The constants are the
  means over the text. KIVI (Liu et al., 2024) shows the channels of keys; that their constant can go is in
  SageAttention (Zhang et al., 2024), section 4.2, whose constant is each sequence's own.
* A sequence's first entry has constants of its own, the first K and V of that text: models attend to it whatever it is
  (an attention sink; Xiao et al., 2023), it is much the same for all tokens and far from others, and an error of its
  score is felt in every output.
* Bases of keys (``runner/codecs/basis.py``) follow from the second moments of centred keys and of queries.

They depend on no request, so what is stored depends on no request; their digest is part of a block's namespace.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from array import array
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from pagefold.config import cache_dir
from pagefold.errors import ConfigError
from pagefold.kv import BlockId, KVGeometry
from pagefold.runner import codecs
from pagefold.runner.codecs import CELL_CODECS
from pagefold.runner.codecs.basis import fitted_basis
from pagefold.runner.codecs.constants import CodecConstants
from pagefold.runner.content import content_fingerprint
from pagefold.runner.inputs import make_inputs
from pagefold.runner.slab import Slab
from pagefold.steps import StepPlan
from pagefold.whole_file import write_whole

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagefold.engine.build import Blueprint
    from pagefold.runner.slab import AnySlab
    from pagefold.runner.torch_runner import Decoder, OnQueries

__all__ = ["MakeDecoder", "digest_of", "find_constants"]

_TEXT = Path(codecs.__file__).with_name("calibration.txt")
_NUM_TOKENS, _TOKENS_A_STEP = 2048, 256
_VERSION = 2
"""Of what is measured, and how it is kept."""


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
    computed = content_fingerprint(spec.folder, cache_dir()), blueprint.is_fused, str(blueprint.dtype)
    facts = _VERSION, *computed, _NUM_TOKENS
    name = hashlib.sha256(repr(facts).encode() + text).hexdigest()[:32]
    file = cache_dir() / "calibration" / f"{name}.f32"
    kept = _read(file, geometry.num_layers * geometry.num_kv_heads, geometry.head_dim)
    if kept is not None:
        return kept
    say(f"calibrate  keys, values and queries are measured on {_NUM_TOKENS:,} tokens, once for this model")
    constants = _measure(blueprint, make_decoder, text.decode())
    with contextlib.suppress(OSError, ConfigError):  # else they are measured again next time
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, b"".join(one.numpy().tobytes() for one in constants))
    return constants


def _read(file: Path, num_cells: int, head_dim: int) -> CodecConstants | None:
    try:
        numbers = np.frombuffer(file.read_bytes(), np.float32)
    except (OSError, ValueError):
        return None
    shapes = (num_cells, 2, head_dim), (num_cells, 2, head_dim), (num_cells, head_dim, head_dim)
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    if numbers.size != ends[-1] or not np.isfinite(numbers).all():
        return None
    parts = zip(np.split(numbers, ends[:-1]), shapes, strict=True)
    return CodecConstants(*(torch.from_numpy(part.reshape(shape).copy()) for part, shape in parts))


@torch.inference_mode()
def _measure(blueprint: Blueprint, make_decoder: MakeDecoder, text: str) -> CodecConstants:
    """Compute the text, and return what follows from its keys, values and queries."""
    from pagefold.tokenizer import Tokenizer  # noqa: PLC0415 - heavy rooms are entered when they are needed

    spec = blueprint.spec
    token_ids = Tokenizer(spec.folder).encode(text)[: min(_NUM_TOKENS, spec.max_exact_len)]
    plain = KVGeometry(spec.num_layers, spec.num_kv_heads, spec.head_dim, blueprint.dtype.itemsize)
    num_blocks = plain.num_blocks_for(len(token_ids))
    slab = Slab.allocate(plain, num_blocks, blueprint.dtype)
    capacity = replace(blueprint.capacity, max_model_len=len(token_ids))
    moments = torch.zeros((plain.num_layers, plain.num_kv_heads, spec.head_dim, spec.head_dim), dtype=torch.float64)

    def on_queries(layer: int, queries: torch.Tensor) -> None:
        num_tokens, num_heads, head_dim = queries.shape
        group = num_heads // plain.num_kv_heads  # heads that share a KV head
        rows = queries.double().reshape(num_tokens, plain.num_kv_heads, group, head_dim).transpose(0, 1).flatten(1, 2)
        moments[layer] += rows.mT @ rows / (group * len(token_ids))

    decoder = make_decoder(replace(blueprint, geometry=plain, capacity=capacity), slab, on_queries)
    for start in range(0, len(token_ids), _TOKENS_A_STEP):
        plan = StepPlan(start)
        plan.token_ids = array("i", token_ids[start : start + _TOKENS_A_STEP])
        plan.starts, plan.num_tokens = [start], [len(plan.token_ids)]
        plan.block_ids = [list(map(BlockId, range(num_blocks)))]
        plan.sampling_rows = [0]
        decoder.logits(make_inputs(plan, plain))
    keys, key_centres = _centred(slab.keys, len(token_ids))
    _, value_centres = _centred(slab.values, len(token_ids))
    bases = [fitted_basis(own.mT @ own / len(own), of_queries) for own, of_queries in zip(
        keys, moments.flatten(0, 1), strict=True
    )]  # fmt: skip
    return CodecConstants(key_centres, value_centres, torch.stack(bases))


def _centred(vectors: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return vectors but the first without their mean, float64 ``[num_cells, n, D]``, and the first and that mean.

    Args:
        vectors: ``[num_blocks, num_cells, slots, D]``.
        num_tokens: how many there are.
    """
    entries = vectors.transpose(0, 1).flatten(1, 2)[:, :num_tokens].double()
    others = entries[:, 1:] if num_tokens > 1 else entries
    mean = others.mean(1, keepdim=True)
    centres = torch.cat((entries[:, :1], mean), 1).float().contiguous()
    return others - mean, centres
