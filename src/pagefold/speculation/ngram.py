"""NgramDrafter: what followed the last tokens where they came before in the request's own text (prompt lookup).

As in vLLM's ``ngram`` and in transformers' prompt lookup (Saxena, 2023). Of several places the last one counts.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from pagefold.speculation.drafter import NO_DRAFT, Draft
from pagefold.speculation.kinds import kind_of
from pagefold.speculation.own_text import OwnText

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.request import Request

__all__ = ["NgramDrafter"]


class NgramDrafter:
    """A :class:`~pagefold.speculation.drafter.Drafter`.

    Args:
        min_tokens: how many tokens must agree at least: vLLM's ``prompt_lookup_min``.
        max_tokens: how many are looked for first: vLLM's ``prompt_lookup_max``.
    """

    def __init__(self, min_tokens: int, max_tokens: int) -> None:
        self._sizes = tuple(range(max_tokens, min_tokens - 1, -1))
        self._texts: dict[str, OwnText] = {}

    def draft(self, requests: Sequence[Request], num_tokens: Sequence[int]) -> list[Draft]:
        """See :class:`~pagefold.speculation.drafter.Drafter`."""
        return [self._draft(request, most) for request, most in zip(requests, num_tokens, strict=True)]

    def forget(self, request_id: str) -> None:
        """See :class:`~pagefold.speculation.drafter.Drafter`."""
        self._texts.pop(request_id, None)

    def _draft(self, request: Request, num_tokens: int) -> Draft:
        text = self._texts.get(request.request_id)
        if text is None:
            text = self._texts[request.request_id] = OwnText(self._sizes, request.predicted)
        found = text.after(request.token_ids, num_tokens)
        return NO_DRAFT if found is None else Draft(array("i", found.packed), kind_of(found.num_matched))
