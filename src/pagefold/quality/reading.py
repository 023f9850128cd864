"""Reading: all settings read the same texts, teacher-forced and side by side, and are compared position by position."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pagefold.quality.divergence import RowFigures, compare_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pagefold.quality.statistics import Floats
    from pagefold.quality.subject import Subject

__all__ = ["ContextFigures", "read_side_by_side", "stack"]


class ContextFigures(NamedTuple):
    """What one setting made of all contexts: float64 ``[num_contexts, length - 1]``; see ``RowFigures``."""

    surprise: Floats
    kl: Floats
    same_top: Floats


def read_side_by_side(
    subjects: Sequence[Subject], token_ids: Sequence[int], on_tokens: Callable[[int], None]
) -> list[RowFigures]:
    """Have all ``subjects`` read one text, and compare each with the first.

    Each computes a chunk at a time, so at most a chunk's logits of each are in memory at once. Chunks need not be the
    same.

    Args:
        subjects: the exact one first.
        token_ids: of the text. Position ``p`` tells how probable token ``p + 1`` is, so the last one tells nothing.
        on_tokens: told how many more tokens were compared.

    Returns:
        One for each subject, of ``len(token_ids) - 1`` positions.
    """
    for subject in subjects:
        subject.begin(token_ids)
    parts: list[list[RowFigures]] = []
    at, last = 0, len(token_ids) - 1
    while at < last:
        ready = []
        for subject in subjects:
            subject.read_on()
            assert subject.rows is not None, "a text ended early"
            assert subject.first == at, "a position was passed over, or came twice"
            ready.append(len(subject.rows))
        num = min(ready)
        logits = [subject.take(num) for subject in subjects]
        parts.append(compare_rows(logits, token_ids[at + 1 : at + 1 + num]))
        at += num
        on_tokens(num)
    for subject in subjects:
        subject.read_on()  # the token that is sampled at the end
        assert subject.rows is None, "a text has more positions than tokens"
    return [
        RowFigures(*(np.concatenate(columns) for columns in zip(*of_subject, strict=True)))
        for of_subject in zip(*parts, strict=True)
    ]


def stack(of_contexts: Sequence[RowFigures]) -> ContextFigures:
    """Put one setting's figures of all contexts together."""
    return ContextFigures(*(np.stack(columns) for columns in zip(*of_contexts, strict=True)))
