"""TextDrafter: what drafters that search texts have in common: each request's own text, and drafts of what is found."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from pagefold.kv.gram_table import GRAM_SIZES
from pagefold.speculation.drafter import NO_DRAFT, Draft, Kept
from pagefold.speculation.kinds import kind_of
from pagefold.speculation.own_text import OwnText

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.kv.continuations import Continuation
    from pagefold.request import Request

__all__ = ["TextDrafter"]


class TextDrafter:
    """A :class:`~pagefold.speculation.drafter.Drafter` of what followed before in a request's own text.

    Args:
        sizes: how many tokens must agree there, the most first.
    """

    def __init__(self, sizes: tuple[int, ...] = GRAM_SIZES) -> None:
        self._sizes = sizes
        self._texts: dict[str, OwnText] = {}

    costs = None

    def num_unread(self, request: Request) -> int | None:  # noqa: ARG002 - it reads next to nothing
        """See :class:`~pagefold.speculation.drafter.Drafter`."""
        return 0

    def kept(self) -> Kept | None:
        """See :class:`~pagefold.speculation.drafter.Drafter`."""
        return None

    def draft(self, requests: Sequence[Request], num_tokens: Sequence[int]) -> list[Draft]:
        """See :class:`~pagefold.speculation.drafter.Drafter`."""
        found = (self.after(request, most) for request, most in zip(requests, num_tokens, strict=True))
        return [NO_DRAFT if one is None else Draft(array("i", one.packed), kind_of(one.num_matched)) for one in found]

    def forget(self, request_id: str) -> None:
        """See :class:`~pagefold.speculation.drafter.Drafter`."""
        self._texts.pop(request_id, None)

    def reset(self) -> None:
        """See :class:`~pagefold.speculation.drafter.Drafter`: requests' own texts are theirs."""

    def after(self, request: Request, num_tokens: int) -> Continuation | None:
        """Return what may follow the tokens of a request, at most so many; None for no guess."""
        text = self._texts.get(request.request_id)
        if text is None:
            text = self._texts[request.request_id] = OwnText(self._sizes, request.predicted)
        return text.after(request.token_ids, num_tokens)
