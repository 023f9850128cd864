"""The prompts of the suite: token ids, with what makes a prefix cache go wrong in them.

Shared prefixes of all lengths, prompts that end at a block boundary, one token before and one behind it, prompts that
part in the middle of a block, prompts that are the beginning of others, and identical ones.
"""

from __future__ import annotations

from random import Random

__all__ = ["full_prompts", "short_prompts"]

_FIRST_ORDINARY_ID = 8  # below are bos, eos and the like


def full_prompts(vocab_size: int, *, seed: int = 0) -> list[list[int]]:
    """Return 36 prompts of 1 to 3,000 tokens, 8 of them over 1,000."""
    text = _Text(vocab_size, seed)
    system = text.of(512)
    document = text.of(1200)
    book = text.of(2936)
    chat = text.of(740)
    prompts = [
        # 14 alone with their lengths: around the boundaries of blocks of 16, and of chunks of 16, 17 and 512.
        *(text.of(length) for length in (1, 1, 2, 15, 16, 17, 33, 34, 64, 100)),
        *(text.of(length) for length in (256, 511, 512, 513)),
        # 6 under one system prompt of whole blocks; one is that prompt itself, two are the same.
        *(system + text.of(length) for length in (1, 16, 100)),
        list(system),
        *twice(system + text.of(33)),
        # 4 that part from the system prompt inside a block.
        *(system[:cut] + text.of(length) for cut, length in ((8, 24), (250, 30), (511, 17))),
        system[:500],
        # 4 turns of one conversation: each the beginning of the next.
        *(chat[:length] for length in (60, 61, 400, 740)),
        # 4 over 1,000 under one document, two of them the same, one parting inside its last block.
        document + text.of(81),
        *twice(document + text.of(20)),
        document[:1190] + text.of(30),
        # 4 more over 1,000, up to 3,000.
        book + text.of(64),
        book[:1024],
        book[:2000],
        text.of(1025),
    ]
    assert len(prompts) == 36
    return prompts


def short_prompts(vocab_size: int, *, seed: int = 0) -> list[list[int]]:
    """Return 20 prompts of 1 to 140 tokens and one of 400: the same kinds in little."""
    text = _Text(vocab_size, seed)
    system = text.of(64)
    chat = text.of(77)
    return [
        *(text.of(length) for length in (1, 2, 15, 16, 17, 33, 48, 70)),
        *(system + text.of(length) for length in (1, 16, 40, 76)),
        list(system),
        *twice(system + text.of(7)),
        *(system[:cut] + text.of(length) for cut, length in ((8, 12), (37, 11), (63, 17))),
        *(chat[:length] for length in (45, 77)),
        text.of(400),
    ]


def twice(prompt: list[int]) -> list[list[int]]:
    """Return two equal prompts."""
    return [prompt, list(prompt)]


class _Text:
    """Random tokens, the same for the same seed."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._ids = range(_FIRST_ORDINARY_ID, vocab_size)
        self._random = Random(seed)

    def of(self, length: int) -> list[int]:
        return self._random.choices(self._ids, k=length)
