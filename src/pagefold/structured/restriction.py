"""Restriction: tokens that must not come, whatever an output must look like: all but some, or those that end bad words.

Masks are whole numbers here, bit ``t`` for token ``t``, so that one operation joins two of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Sequence

    from pagefold.structured.matcher import TokenMatcher

__all__ = ["RestrictedMatcher", "Restriction", "sequences_of"]


class Restriction:
    """The tokens that one request may sample; makes the matcher of each of its samples.

    Attributes:
        num_bytes: of a mask.
        num_remembered: how many of an output's last tokens decide what may come next.
        field: the request field that errors name.

    Args:
        vocab_size: of the model.
        allowed: the only tokens that may come; None for all.
        bad_words: sequences of tokens, the last of which must not come where the output ends with those before it.
    """

    def __init__(
        self, vocab_size: int, allowed: Collection[int] | None, bad_words: Iterable[Sequence[int]] = ()
    ) -> None:
        self.num_bytes = -(-vocab_size // 8)
        self.field = "allowed_token_ids" if allowed is not None else "bad_words"
        mask = (1 << vocab_size) - 1 if allowed is None else _bits(allowed, self.num_bytes)
        self._longer: dict[int, list[tuple[tuple[int, ...], int]]] = {}  # by the token before the last
        self.num_remembered = 1
        never: list[int] = []
        for *before, last in dict.fromkeys(map(tuple, bad_words)):
            if before:
                self._longer.setdefault(before[-1], []).append((tuple(before), last))
                self.num_remembered = max(self.num_remembered, len(before))
            else:
                never.append(last)
        self._always = mask & ~_bits(never, self.num_bytes)

    def matcher(self, inner: TokenMatcher | None = None) -> RestrictedMatcher:
        """Return the matcher of a new output, which must look as ``inner`` says too.

        Raises:
            InvalidRequestError: no token is left that could come first.
        """
        made = RestrictedMatcher(self, inner)
        if made.error is not None:
            msg = f"{self.field} leaves {made.error}."
            raise InvalidRequestError(msg, param=self.field, remedy="Allow more.")
        return made

    def after(self, output: Sequence[int]) -> int:
        """Return the mask of what may follow an output of which these are the last tokens."""
        if not output or output[-1] not in self._longer:
            return self._always
        ended = [last for before, last in self._longer[output[-1]] if tuple(output[-len(before) :]) == before]
        return self._always & ~_bits(ended, self.num_bytes)


class RestrictedMatcher:
    """A :class:`~pagefold.structured.matcher.TokenMatcher`: what a restriction leaves of all tokens, or of another."""

    __slots__ = ("_allowed", "_inner", "_last", "_restriction", "_stuck")

    def __init__(self, restriction: Restriction, inner: TokenMatcher | None, last: Sequence[int] = ()) -> None:
        self._restriction = restriction
        self._inner = inner
        self._last = list(last)
        self._stuck: str | None = None
        self._look()

    @property
    def is_complete(self) -> bool:
        """See :class:`~pagefold.structured.matcher.TokenMatcher`."""
        return self._inner is not None and self._inner.is_complete

    @property
    def error(self) -> str | None:
        """See :class:`~pagefold.structured.matcher.TokenMatcher`."""
        return self._stuck or (None if self._inner is None else self._inner.error)

    @property
    def field(self) -> str:
        """See :class:`~pagefold.structured.matcher.TokenMatcher`."""
        return self._restriction.field if self._inner is None or self._stuck else self._inner.field

    def mask(self, banned: Collection[int] = ()) -> bytes:
        """See :class:`~pagefold.structured.matcher.TokenMatcher`."""
        num_bytes = self._restriction.num_bytes
        rest = self._allowed & ~_bits(banned, num_bytes) if banned else self._allowed
        return (rest or self._allowed).to_bytes(num_bytes, "little")

    def copy(self) -> RestrictedMatcher:
        """See :class:`~pagefold.structured.matcher.TokenMatcher`."""
        return RestrictedMatcher(self._restriction, None if self._inner is None else self._inner.copy(), self._last)

    def accept(self, token_id: int) -> None:
        """See :class:`~pagefold.structured.matcher.TokenMatcher`."""
        self._last = [*self._last, token_id][-self._restriction.num_remembered :]
        if self._inner is not None:
            self._inner.accept(token_id)
            if self._inner.is_complete or self._inner.error is not None:
                return
        self._look()

    def _look(self) -> None:
        """Find out what may come next."""
        self._allowed = self._restriction.after(self._last)
        if self._inner is not None:
            self._allowed &= int.from_bytes(self._inner.mask(), "little")
        if not self._allowed:
            self._stuck = "no token that may come next"


def sequences_of(words: Sequence[str], encode: Callable[[list[str]], list[list[int]]]) -> list[list[int]]:
    """Return the token sequences of bad words, each as it is and with a space before it.

    Args:
        words: texts; spaces at their beginning mean nothing.
        encode: tokenizes many texts, without special tokens.
    """
    bare = [word.lstrip() for word in words]
    encoded = encode(bare + [f" {word}" for word in bare])
    found: list[list[int]] = []
    for plain, spaced in zip(encoded[: len(bare)], encoded[len(bare) :], strict=True):
        found.append(plain)
        if spaced[-len(plain) :] != plain:  # else what bans the one bans the other
            found.append(spaced)
    return [sequence for sequence in found if sequence]


def _bits(token_ids: Collection[int], num_bytes: int) -> int:
    mask = bytearray(num_bytes)
    for token_id in token_ids:
        mask[token_id >> 3] |= 1 << (token_id & 7)
    return int.from_bytes(mask, "little")
