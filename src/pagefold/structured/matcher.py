"""TokenMatcher: where one output is in what it must look like. Whoever plans asks it what may come next."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["TokenMatcher"]


class TokenMatcher(Protocol):
    """Tells which tokens may come next in one output. It belongs to one request, and only that one's tokens advance it.

    What drafts of tokens would lead to is asked of copies.

    Attributes:
        is_complete: nothing can follow any more.
        error: why it cannot go on, though the output is not complete.
        field: the request field that this is about.
    """

    @property
    def is_complete(self) -> bool: ...  # noqa: D102 - above

    @property
    def error(self) -> str | None: ...  # noqa: D102 - above

    @property
    def field(self) -> str: ...  # noqa: D102 - above

    def mask(self, banned: Collection[int] = ()) -> bytes:
        """Return which tokens may come next: bit ``t % 8`` of byte ``t // 8`` is token ``t``. At least one may.

        ``banned`` ones may only if nothing else may.
        """

    def copy(self) -> TokenMatcher:
        """Return another one that is where this one is, and is advanced by itself. Not of one that has ended."""

    def accept(self, token_id: int) -> None:
        """Advance by a token of the mask; after that ask ``is_complete`` and ``error`` before the next mask."""
