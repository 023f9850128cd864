"""ModelLimits: what the engine must know of the model to judge a request, and to read it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagefold.engine.kinds import Kind, kind_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.kv import Namespace
    from pagefold.request import Caller

__all__ = ["ModelLimits"]

_OPENING_TOKENS = 32
"""What a chat template puts before an answer has fewer."""
_MOST_FIRST_ENDS, _MOST_LAST_ENDS = 4, 12
"""So many ends of messages are told of: each keeps a window, and a client may send as many as it likes."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a model can read and write.

    Attributes:
        vocab_size: token ids are in [0, vocab_size).
        eos_token_ids: each of them ends a sequence, unless ``ignore_eos``.
        namespace: model, layout and dtype of the blocks of requests that ask for nothing else; tenant and salt are the
            request's.
        message_end_ids: each of them ends a message of a conversation.
        kinds: of blocks that requests may ask for, the first for those that do not; if none are given, one that keeps
            all.
    """

    vocab_size: int
    eos_token_ids: tuple[int, ...]
    namespace: Namespace
    message_end_ids: frozenset[int] = frozenset()
    kinds: tuple[Kind, ...] = ()

    def __post_init__(self) -> None:
        if not self.kinds:
            object.__setattr__(self, "kinds", (Kind(1.0, 0, self.namespace),))

    def kind_of(self, caller: Caller) -> Kind:
        """Return of which kind the blocks of a caller's request are.

        Raises:
            InvalidRequestError: it asks for one that there is not.
        """
        return kind_of(caller, self.kinds)

    def message_ends(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """Return the positions behind the messages of a prompt, ascending: of very many the first and the last ones.

        Where text follows the last of them that is more than what opens an answer, the prompt's end is one too.
        """
        ends = self.message_end_ids
        found = [position for position, token_id in enumerate(token_ids, 1) if token_id in ends]
        if not found or len(token_ids) - found[-1] > _OPENING_TOKENS:
            found.append(len(token_ids))
        if len(found) > _MOST_FIRST_ENDS + _MOST_LAST_ENDS:
            found = found[:_MOST_FIRST_ENDS] + found[-_MOST_LAST_ENDS:]
        return tuple(found)
