"""Needles: a sentence with a number is hidden at some depth of a long text, and the model is asked for the number.

The sentences are in the form of RULER's single needle (Hsieh et al., 2024). Depth 0 is the begin of the text, 1 its
end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from pagefold.errors import ConfigError

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from pagefold.tokenizer import Tokenizer

__all__ = ["DEPTHS", "Needle", "hide_needles"]

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)

_NEEDLE = "\n\nOne of the special magic numbers for {key} is: {number}.\n\n"
_QUESTION = (
    "\n\nWhat is the special magic number for {key} mentioned in the provided text? "
    "The special magic number for {key} mentioned in the provided text is"
)
_KEYS = ("amber", "basalt", "cobalt", "damson", "ebony", "fennel", "garnet", "hazel")
_NUM_DIGITS = 7
_SPARE_TOKENS = 8
"""What a model may say before and after the number."""
_LEAST_HAYSTACK = 16


class Needle(NamedTuple):
    """A prompt whose answer is known.

    Attributes:
        depth: where in the text its sentence is, 0 to 1.
        token_ids: of the prompt.
        answer: digits.
        num_tokens: in how many tokens it should have come.
    """

    depth: float
    token_ids: list[int]
    answer: str
    num_tokens: int

    def is_found_in(self, text: str) -> bool:
        """Whether a continuation says the number."""
        return self.answer in text.replace(",", "")


def hide_needles(
    haystack: Sequence[int], tokenizer: Tokenizer, rng: random.Random, *, depths: Sequence[float] = DEPTHS
) -> list[Needle]:
    """Return prompts of one haystack, one for each depth, as long as it is at most, the answer included.

    They share their text up to where the first needle is.

    Args:
        haystack: tokens, with those at its begin with which every prompt begins.
        tokenizer: of the model.
        rng: draws the numbers.
        depths: of the needles.

    Raises:
        ConfigError: the haystack is too short.
    """
    begin = tokenizer.encode("")
    hay = list(haystack[len(begin) :])
    needles = []
    for depth in depths:
        key, number = rng.choice(_KEYS), str(rng.randrange(10 ** (_NUM_DIGITS - 1), 10**_NUM_DIGITS))
        sentence = tokenizer.encode_rendered(_NEEDLE.format(key=key, number=number))
        question = tokenizer.encode_rendered(_QUESTION.format(key=key))
        num_tokens = len(tokenizer.encode_rendered(f" {number}")) + _SPARE_TOKENS
        room = len(hay) - len(sentence) - len(question) - num_tokens
        if room < _LEAST_HAYSTACK:
            short = 2 * _LEAST_HAYSTACK - room + len(haystack)  # other keys and numbers may have some tokens more
            msg = f"A context of {len(haystack)} tokens has no room to hide a needle in."
            raise ConfigError(msg, remedy=f"Give a context length of at least {short}, or no needles.")
        at = round(depth * room)
        needles.append(Needle(depth, [*begin, *hay[:at], *sentence, *hay[at:room], *question], number, num_tokens))
    return needles
