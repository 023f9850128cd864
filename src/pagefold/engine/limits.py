"""ModelLimits: what the engine must know of the model to judge a request, and to read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.kv import Namespace

__all__ = ["ModelLimits"]


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a model can read and write.

    Attributes:
        vocab_size: token ids are in [0, vocab_size).
        eos_token_ids: each of them ends a sequence, unless ``ignore_eos``.
        namespace: model, layout and dtype of its blocks; tenant and salt are the request's.
        message_end_ids: each of them ends a message of a conversation.
    """

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    namespace: Namespace
    message_end_ids: frozenset[int] = frozenset()

    def message_ends(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the positions behind the messages of a prompt, ascending."""
        ends = self.message_end_ids
        return tuple(position for position, token_id in enumerate(token_ids, 1) if token_id in ends)
