"""ModelLimits: what the engine must know of the model to judge a request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagefold.kv import Namespace

__all__ = ["ModelLimits"]


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a model can read and write.

    Attributes:
        vocab_size: token ids are in [0, vocab_size).
        eos_token_ids: each of them ends a sequence, unless ``ignore_eos``.
        namespace: model, layout and dtype of its blocks; tenant and salt are the request's.
    """

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    namespace: Namespace
