"""Centring constants: what is taken off K before it is encoded, found once for a model and kept in the cache folder.

Keys of one head have channels that are far from 0 for every token. A constant taken off all keys takes the same off all
scores of a query, which softmax does not see, and what is left needs fewer steps. The constant is the mean of the keys,
rope applied, of the first ``_NUM_TOKENS`` tokens of a text that comes with Pagefold. It depends on no request, so what
is stored depends on no request; and its digest is part of a block's namespace.

A sequence's first entry has a constant of its own, the first key of that text: models attend to it whatever it is (an
attention sink; Xiao et al., 2023), its key is much the same for all tokens and far from others', and an error of its
score is felt in every output. The kernel gives that score back what the two constants differ by.

KIVI (Liu et al., 2024) shows the channels; that a constant can go is in SageAttention (Zhang et al., 2024), section
4.2, whose constant is each sequence's own.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from array import array
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from pagefold.config import cache_dir
from pagefold.errors import ConfigError
from pagefold.kv import BlockId, KVGeometry
from pagefold.runner import codecs
from pagefold.runner.codecs import CELL_CODECS
from pagefold.runner.content import content_fingerprint
from pagefold.runner.inputs import make_inputs
from pagefold.runner.slab import Slab
from pagefold.steps import StepPlan
from pagefold.whole_file import write_whole

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagefold.engine.build import Blueprint
    from pagefold.runner.slab import AnySlab
    from pagefold.runner.torch_runner import Decoder

__all__ = ["digest_of", "find_centres"]

_TEXT = Path(codecs.__file__).with_name("calibration.txt")
_NUM_TOKENS, _TOKENS_A_STEP = 2048, 512


def digest_of(centres: torch.Tensor | None) -> str:
    """Return what a namespace says of centring constants: empty for none."""
    return "" if centres is None else hashlib.sha256(centres.numpy().tobytes()).hexdigest()[:32]


def find_centres(
    blueprint: Blueprint, make_decoder: Callable[[Blueprint, AnySlab], Decoder], say: Callable[[str], None]
) -> torch.Tensor | None:
    """Return a model's constants, float32 ``[num_cells, 2, D]``; None where its codec or its folder gives none.

    Args:
        blueprint: the model, and how its KV is stored.
        make_decoder: loads the weights into who computes the layers over a slab.
        say: is told when they must be measured.
    """
    geometry, spec = blueprint.geometry, blueprint.spec
    if geometry.codec is None or not CELL_CODECS[geometry.codec.name].centres:
        return None
    if not (spec.folder / "tokenizer_config.json").is_file():
        return None
    text = _TEXT.read_bytes()
    facts = content_fingerprint(spec.folder, cache_dir()), blueprint.is_fused, str(blueprint.dtype), _NUM_TOKENS
    name = hashlib.sha256(repr(facts).encode() + text).hexdigest()[:32]
    file = cache_dir() / "centres" / f"{name}.f32"
    shape = geometry.num_layers * geometry.num_kv_heads, 2, geometry.head_dim
    kept = _read(file, shape)
    if kept is not None:
        return kept
    say(f"centring   keys are measured on {_NUM_TOKENS:,} tokens, once for this model")
    centres = _measure(blueprint, make_decoder, text.decode())
    with contextlib.suppress(OSError, ConfigError):  # else they are measured again next time
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, centres.numpy().tobytes())
    return centres


def _read(file: Path, shape: tuple[int, int, int]) -> torch.Tensor | None:
    try:
        numbers = np.frombuffer(file.read_bytes(), np.float32)
    except (OSError, ValueError):
        return None
    if numbers.size != math.prod(shape) or not np.isfinite(numbers).all():
        return None
    return torch.from_numpy(numbers.reshape(shape).copy())


@torch.inference_mode()
def _measure(blueprint: Blueprint, make_decoder: Callable[[Blueprint, AnySlab], Decoder], text: str) -> torch.Tensor:
    """Return each cell's key of the text's first token, and the mean of its keys over all of them."""
    from pagefold.tokenizer import Tokenizer  # noqa: PLC0415 - heavy rooms are entered when they are needed

    spec = blueprint.spec
    token_ids = Tokenizer(spec.folder).encode(text)[: min(_NUM_TOKENS, spec.max_exact_len)]
    plain = KVGeometry(spec.num_layers, spec.num_kv_heads, spec.head_dim, blueprint.dtype.itemsize)
    num_blocks = plain.num_blocks_for(len(token_ids))
    slab = Slab.allocate(plain, num_blocks, blueprint.dtype)
    capacity = replace(blueprint.capacity, max_model_len=len(token_ids))
    decoder = make_decoder(replace(blueprint, geometry=plain, capacity=capacity), slab)
    for start in range(0, len(token_ids), _TOKENS_A_STEP):
        plan = StepPlan(start)
        plan.token_ids = array("i", token_ids[start : start + _TOKENS_A_STEP])
        plan.starts, plan.num_tokens = [start], [len(plan.token_ids)]
        plan.block_ids = [list(map(BlockId, range(num_blocks)))]
        plan.sampling_rows = [0]
        decoder.logits(make_inputs(plan, plain))
    keys = slab.keys.transpose(0, 1).flatten(1, 2)  # [num_cells, slots, D]
    mean = keys[:, : len(token_ids)].double().mean(1).float()
    return torch.stack((keys[:, 0].float(), mean), 1).contiguous()
