"""The file of a scorer: what it was found on, its numbers, and a digest behind both.

A line of JSON, then float32 numbers, then the digest of all before it (``files/digested.py``).
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from pagefold.files.digested import read_digested, write_digested
from pagefold.masks.scorer import Scorer

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["FoundOn", "KeptScorer", "read_scorer", "write_scorer"]


@dataclass(frozen=True, slots=True)
class FoundOn:
    """What a scorer was found on, and how good it is there.

    Attributes:
        version: of what is measured, and of the file.
        fingerprint: of the model's config and weights.
        num_tokens: tokens of all contexts.
        context_len: of each.
        text_digest: of the texts, as hexadecimal digits.
        penalty: of the ridge.
        explained: the share of variance that scores explain in contexts that they were not fitted to, mean over layers
            and KV heads; then the least and the greatest of one.
    """

    version: int
    fingerprint: str
    num_tokens: int
    context_len: int
    text_digest: str
    penalty: float
    explained: tuple[float, float, float]


class KeptScorer(NamedTuple):
    """A scorer, and what it was found on."""

    scorer: Scorer
    found_on: FoundOn


def write_scorer(file: Path, kept: KeptScorer) -> None:
    """Write a scorer to ``file``, or leave what is there.

    Raises:
        ConfigError: the file cannot be written.
    """
    head = {"found_on": asdict(kept.found_on), "shapes": [list(one.shape) for one in kept.scorer]}
    numbers = b"".join(one.contiguous().numpy().astype("<f4").tobytes() for one in kept.scorer)
    write_digested(file, json.dumps(head).encode() + b"\n" + numbers)


def read_scorer(file: Path, version: int, fingerprint: str) -> KeptScorer | None:
    """Return the scorer in ``file``; None where there is none, not all that was written, or another's.

    Args:
        file: to read.
        version: that is understood.
        fingerprint: of the model that the scorer must be of.
    """
    whole = read_digested(file)
    if whole is None:
        return None
    line, _, numbers = whole.partition(b"\n")
    try:
        head = json.loads(line)
        about, shapes = head["found_on"], head["shapes"]
        found_on = FoundOn(**about | {"explained": tuple(about["explained"])})  # JSON knows lists alone
        sizes = [math.prod(shape) for shape in shapes]
        parts = np.split(np.frombuffer(numbers, "<f4", sum(sizes)), np.cumsum(sizes)[:-1])
        tensors = (torch.from_numpy(part.reshape(shape).copy()) for part, shape in zip(parts, shapes, strict=True))
        scorer = Scorer(*tensors)
    except (ValueError, TypeError, KeyError):  # whole, and something else
        return None
    if (found_on.version, found_on.fingerprint) != (version, fingerprint):
        return None
    return KeptScorer(scorer, found_on)
