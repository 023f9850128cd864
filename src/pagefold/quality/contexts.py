"""Contexts: pieces of a text, in tokens, all of one length, spread evenly over it and never overlapping."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagefold.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.quality.texts import Text
    from pagefold.tokenizer import Tokenizer

__all__ = ["DEFAULT_NUM_CONTEXTS", "Contexts", "check_length", "cut_contexts"]

DEFAULT_NUM_CONTEXTS = 8
_LEAST_TOKENS = 32
_CHARACTERS_PER_TOKEN = 12
"""Characters that are read for each token of a long text: more than a token has in any text that people write."""


@dataclass(frozen=True, slots=True)
class Contexts:
    """What a model is read on.

    Attributes:
        token_ids: of each context, ``length`` of them, those included with which the model's prompts begin.
        length: of every context.
        source: names of the texts.
        digest: of the texts, as hexadecimal digits.
    """

    token_ids: tuple[tuple[int, ...], ...]
    length: int
    source: str
    digest: str


def check_length(length: int) -> None:
    """Refuse a context of so many tokens if that is too short to say anything.

    Raises:
        ConfigError: it is.
    """
    if length < _LEAST_TOKENS:
        msg = f"The context length is {length}."
        raise ConfigError(msg, remedy=f"Give at least {_LEAST_TOKENS} tokens.")


def cut_contexts(texts: Sequence[Text], tokenizer: Tokenizer, length: int, num_contexts: int | None) -> Contexts:
    """Cut contexts of ``length`` tokens, from each text as many.

    Args:
        texts: texts to cut from; the first ones give one more where it does not come out even.
        tokenizer: of the model.
        length: of a context, in tokens.
        num_contexts: how many contexts; None for eight, or as many as there are.

    Raises:
        ConfigError: the texts are too short, or a number is too small; says what would work.
    """
    check_length(length)
    if num_contexts is not None and num_contexts < 1:
        msg = f"The number of contexts is {num_contexts}."
        raise ConfigError(msg, remedy="Give at least 1; a standard error takes at least 2.")
    begin = tuple(tokenizer.encode(""))
    num_wanted = num_contexts or DEFAULT_NUM_CONTEXTS
    contexts: list[tuple[int, ...]] = []
    for place, text in enumerate(texts):
        num = (num_wanted - place + len(texts) - 1) // len(texts)
        if num:
            contexts += _of_text(text, tokenizer, begin, length, num, is_exact=num_contexts is not None)
    digest = "-".join(text.digest[:16] for text in texts)
    return Contexts(tuple(contexts), length, " and ".join(text.name for text in texts), digest)


def _of_text(  # noqa: PLR0913 - what is cut, from what, how
    text: Text, tokenizer: Tokenizer, begin: tuple[int, ...], length: int, num: int, *, is_exact: bool
) -> list[tuple[int, ...]]:
    """Cut ``num`` contexts of one text, or, if that is no must, as many as it has."""
    num_own = length - len(begin)
    span = len(text.content) // num
    if span > length * _CHARACTERS_PER_TOKEN:
        starts = [_line_start(text.content, place * span) for place in range(num)]
        pieces = [text.content[start : start + length * _CHARACTERS_PER_TOKEN] for start in starts]
        cut = [tuple(tokenizer.encode_rendered(piece)[:num_own]) for piece in pieces]
        if all(len(piece) == num_own for piece in cut):
            return [begin + piece for piece in cut]
    token_ids = tokenizer.encode_rendered(text.content)  # a short text, or one of very long words
    most = len(token_ids) // num_own
    if not most or (is_exact and num > most):
        what = f"{num} contexts of {length}" if is_exact and most else f"a context of {length}"
        msg = f"{text.name} has {len(token_ids):,} tokens, which is less than {what}."
        longest = len(token_ids) // (num if is_exact else 1) + len(begin)
        ways = ["Give a longer text"]
        if longest >= _LEAST_TOKENS:
            ways.append(f"a context length of at most {longest}")
        if most:
            ways.append(f"at most {most} contexts")
        raise ConfigError(msg, remedy=f"{', or '.join(ways)}.")
    num = min(num, most)
    spread = len(token_ids) // num
    return [begin + tuple(token_ids[place * spread : place * spread + num_own]) for place in range(num)]


def _line_start(content: str, at: int) -> int:
    """Return where the next line begins, or ``at`` itself at the begin of the text, or if there is no such line."""
    return (at and content.find("\n", at) + 1) or at
