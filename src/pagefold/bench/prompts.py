"""Prompts: from a file, or made up of common words with a beginning that they share."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import TYPE_CHECKING, Any

from pagefold.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

__all__ = ["Prompt", "generate_prompts", "prefix_chains", "read_prompts"]

_CHARS_PER_ID = 128
"""Characters of a prompt that one id of its chain stands for: about 32 tokens."""

_WORDS = [
    "the",
    "of",
    "and",
    "to",
    "in",
    "a",
    "is",
    "that",
    "for",
    "it",
    "as",
    "was",
    "with",
    "be",
    "by",
    "on",
    "not",
    "he",
    "his",
    "but",
    "at",
    "are",
    "this",
    "have",
    "from",
    "or",
    "had",
    "an",
    "they",
    "which",
    "one",
    "you",
    "were",
    "all",
    "her",
    "she",
    "there",
    "would",
    "their",
    "we",
    "him",
    "been",
    "has",
    "when",
    "who",
    "will",
    "no",
    "more",
    "if",
    "out",
    "so",
    "up",
    "said",
    "what",
    "its",
    "about",
    "than",
    "into",
    "them",
    "can",
    "only",
    "other",
    "time",
    "new",
    "some",
    "could",
    "these",
    "two",
    "may",
    "first",
    "then",
    "do",
    "any",
    "like",
    "my",
    "now",
    "over",
    "such",
    "our",
    "man",
    "me",
    "even",
    "most",
    "made",
    "after",
    "also",
    "did",
    "many",
    "off",
    "before",
    "must",
    "well",
    "back",
    "through",
    "years",
    "much",
    "where",
    "your",
    "way",
    "down",
    "should",
    "because",
    "long",
    "each",
    "just",
    "state",
    "people",
    "those",
    "too",
    "mister",
    "how",
    "little",
    "good",
    "world",
    "make",
    "very",
    "year",
    "still",
    "see",
    "work",
    "life",
    "day",
    "house",
    "part",
    "small",
    "under",
    "water",
    "great",
]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request to send.

    Attributes:
        text: of the prompt.
        max_tokens: of the output, at most.
    """

    text: str
    max_tokens: int


def read_prompts(path: Path, *, num_prompts: int | None, output_len: int) -> list[Prompt]:
    """Return the prompts of a file of JSON lines: ``prompt`` (or ``messages``), and ``output_tokens`` if it says so.

    Raises:
        ConfigError: the file cannot be read, or a line is no prompt; says which.
    """
    try:
        with path.open(encoding="utf-8") as file:
            lines = (line for line in file if line.strip())
            prompts = [_read(line, n, path, output_len) for n, line in enumerate(islice(lines, num_prompts), start=1)]
    except OSError as error:
        message = f"The prompts {path} cannot be read: {error.strerror}."
        raise ConfigError(message, remedy="Name a file of JSON lines.") from None
    except UnicodeDecodeError:
        message = f"The prompts {path} are no text."
        raise ConfigError(message, remedy="Name a file of JSON lines.") from None
    if not prompts:
        message = f"The file {path} holds no prompts."
        raise ConfigError(message, remedy='Each line is an object like {"prompt": "...", "output_tokens": 128}.')
    return prompts


def _read(line: str, number: int, path: Path, output_len: int) -> Prompt:
    try:
        row = json.loads(line)
        text = _text(row)
        max_tokens = int(row.get("output_tokens") or row.get("max_tokens") or output_len)
        if max_tokens < 1:
            raise ValueError(max_tokens)  # noqa: TRY301 - said below, with the others
    except (ValueError, TypeError, KeyError, AttributeError):
        message = f"Line {number} of {path} is no prompt: {line.strip()[:80]}"
        remedy = 'Each line is an object like {"prompt": "...", "output_tokens": 128}.'
        raise ConfigError(message, remedy=remedy) from None
    return Prompt(text, max_tokens)


def _text(row: Mapping[str, Any]) -> str:
    said = row.get("messages") or ()
    text = row.get("prompt") or "\n".join(str(message["content"]) for message in said)
    if not isinstance(text, str) or not text:
        raise ValueError(text)
    return text


def generate_prompts(  # noqa: PLR0913 - what prompts are made of
    num_prompts: int,
    draw_length: Callable[[Random], int],
    draw_output: Callable[[Random], int],
    *,
    tokens_per_word: float,
    prefix_len: int = 0,
    prefix_share: float = 1.0,
    seed: int = 0,
) -> list[Prompt]:
    """Return prompts of common words, of about as many tokens as are drawn.

    Args:
        num_prompts: how many prompts.
        draw_length: draws the tokens of a prompt.
        draw_output: draws the tokens of its output, at most.
        tokens_per_word: as the server counts tokens.
        prefix_len: tokens that prompts begin with alike, a part of their length.
        prefix_share: share of the prompts that begin so.
        seed: of all draws.
    """
    rng = Random(seed)  # noqa: S311 - a workload, no secret
    shared = _words(rng, round(prefix_len / tokens_per_word))
    prompts = []
    for _ in range(num_prompts):
        num_words = max(1, round(draw_length(rng) / tokens_per_word))
        begins_alike = shared if rng.random() < prefix_share else _words(rng, len(shared))
        words = begins_alike[:num_words] + _words(rng, num_words - len(begins_alike))
        prompts.append(Prompt(" ".join(words), draw_output(rng)))
    return prompts


def _words(rng: Random, num_words: int) -> list[str]:
    return rng.choices(_WORDS, k=max(0, num_words))


def prefix_chains(prompts: Sequence[Prompt]) -> list[list[int]]:
    """Return a chain of ids for each prompt, one for 128 characters: equal ids mean equal prompts up to there."""
    known: dict[tuple[int, str], int] = {}
    chains = []
    for prompt in prompts:
        chain: list[int] = []
        for first in range(0, len(prompt.text), _CHARS_PER_ID):
            key = (chain[-1] if chain else -1, prompt.text[first : first + _CHARS_PER_ID])
            chain.append(known.setdefault(key, len(known)))
        chains.append(chain)
    return chains
