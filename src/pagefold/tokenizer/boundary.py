"""Boundary: how much of a text's tokens stays the same, whatever follows the text.

The last tokens of a text are not those that it has within a longer one: ``help`` and ``ful`` may be one token, spaces
wait for the word that they belong to, ``<|im_st`` may become a special token, and an accent may change the letter
before it. To cache a prefix of prompts that are not known yet, its tokens must be cut where none of that reaches.

A tokenizer finds added tokens first, normalizes what lies between them, splits that into words by a regular expression,
and makes tokens of each word by merges. A cut at character ``p`` is *firm*, whatever the tokenizer's rules are, if

* no entry of the vocabulary, nor an added token, holds the characters on both sides of ``p`` beside each other: then no
  token ever lies across ``p``, and the tokens on its left do not depend on those on its right; and
* the words on the left are decided without looking beyond the text: ``p`` is where a run of spaces begins, with
  something else behind it, or lies between a letter and a mark that ends words in every language model's expression.

Beside an added token that no longer one contains, a cut is firm at once: tokenizers cut there first. Those that are
looked for in normalized text are found behind the others, also where no text is normalized, and do not count.

What rules of this kind cannot be sure of is tried out: some continuations are tokenized, and must leave it unchanged.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple
from unicodedata import category

from pagefold.tokenizer.pieces import letter_of_byte

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["Boundary", "Encoded", "StablePrefix"]

_SPACES = " \n\t\r"
_ENDS_OF_WORDS = frozenset(",.;:!?)]}»”，。、；：！？）」』】》")  # noqa: RUF001 - just these
"""No apostrophe, hyphen or underscore: expressions take those into words."""

_TRIED = ("s", " a", "\n\n", "\u0301.")
_MAX_TRIES = 16


class Encoded(NamedTuple):
    """A text's tokens.

    Attributes:
        token_ids: those tokens.
        offsets: (first character, last and one) of each; (0, 0) for what the tokenizer puts around a text.
    """

    token_ids: list[int]
    offsets: Sequence[tuple[int, int]]


class StablePrefix(NamedTuple):
    """The tokens of a text that stay the same whatever follows it.

    Attributes:
        token_ids: those tokens.
        num_tokens: how many the text has.
    """

    token_ids: list[int]
    num_tokens: int


class Boundary:
    """Finds firm cuts for one tokenizer.

    Args:
        backend: a ``tokenizers.Tokenizer``.
    """

    def __init__(self, backend: Any) -> None:  # noqa: ANN401 - the library has no types
        added = backend.get_added_tokens_decoder()
        contents = [token.content for token in added.values()]
        self._pieces = "\0".join([*backend.get_vocab(with_added_tokens=True), *contents])
        self._sealing = {
            token_id: token.content
            for token_id, token in added.items()
            if sum(token.content in other for other in contents) == 1
            and not token.single_word
            and not token.normalized  # found last: a token behind it may take its spaces, or what it ends with
        }

    def stable_prefix(self, text: str, encode: Callable[[str], Encoded]) -> StablePrefix:
        """Return the first tokens of ``text`` that stay the same whatever follows it; none if nothing is certain.

        Args:
            text: the text.
            encode: tokenizes it, always in the same way.
        """
        encoded = encode(text)
        num_stable = self._num_stable(text, encoded, encode)
        return StablePrefix(encoded.token_ids[:num_stable], len(encoded.token_ids))

    def _num_stable(self, text: str, encoded: Encoded, encode: Callable[[str], Encoded]) -> int:
        token_ids = encoded.token_ids
        for num_tokens, cut in islice(self._sealed_cuts(text, encoded), _MAX_TRIES):
            kept = token_ids[:num_tokens]
            if encode(text[:cut]).token_ids[:num_tokens] == kept and all(
                encode(text + more).token_ids[:num_tokens] == kept for more in _TRIED
            ):
                return num_tokens
        return 0

    def _sealed_cuts(self, text: str, encoded: Encoded) -> Iterator[tuple[int, int]]:
        """Yield (number of tokens, character) of each firm cut, the last one first."""
        token_ids, offsets = encoded
        end = len(token_ids)
        while end and not offsets[end - 1][1]:  # what the tokenizer puts behind a text
            end -= 1
        num_tokens = end
        while num_tokens:
            cut = offsets[num_tokens - 1][1]
            if not cut:
                return
            begins_next = num_tokens == end or offsets[num_tokens][0] >= cut
            if begins_next and (
                self._is_beside_added(text, encoded, num_tokens, end) or self._is_between_words(text, cut)
            ):
                yield num_tokens, cut
            num_tokens -= 1

    def _is_beside_added(self, text: str, encoded: Encoded, num_tokens: int, end: int) -> bool:
        for index in (num_tokens - 1, num_tokens):
            if index < end:
                content = self._sealing.get(encoded.token_ids[index])
                first, last = encoded.offsets[index]
                if content is not None and text[first:last] == content:
                    return True
        return False

    def _is_between_words(self, text: str, cut: int) -> bool:
        if cut >= len(text):
            return False
        before, after = text[cut - 1], text[cut]
        if after in _SPACES:
            rest = text[cut:].lstrip()
            is_decided = not before.isspace() and bool(rest) and category(rest[0])[0] in "LNPS"
        else:
            is_decided = after in _ENDS_OF_WORDS and category(before)[0] == "L"
        return is_decided and not self._can_lie_across(before, after)

    def _can_lie_across(self, before: str, after: str) -> bool:
        """Whether any entry of the vocabulary holds the two characters, or bytes of them, beside each other."""
        pieces = self._pieces
        in_bytes = letter_of_byte(before.encode()[-1]) + letter_of_byte(after.encode()[0])
        return before + after in pieces or before + after.replace(" ", "▁") in pieces or in_bytes in pieces
