"""BeamSearch: which outputs run on, which are finished, and when that is over.

Transformers' beam search (``GenerationMixin._beam_search``), without tensors; sums are Python's floats, where
transformers rounds each to 32 bit. A step takes the likeliest continuations
of all beams together. Those of the first ``width`` that end the output are finished; the first ``width`` that do not
end it run on. An output's score is the sum of its tokens' logprobs, over its length to the power of the length penalty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

__all__ = ["BeamSearch", "EarlyStopping", "Hypothesis", "Move"]

EarlyStopping: TypeAlias = bool | Literal["never"]
"""When a search is over, as in transformers: True as soon as ``width`` outputs are finished. Else when no beam can get
better than the worst of those: by the score that it would have if it ended now (False), or by the best that any length
could give it (``never``)."""


class Move(NamedTuple):
    """How a beam comes about.

    Attributes:
        parent: which of the beams before the step it goes on from.
        token_id: its next token.
        rank: of that token behind its parent: 1 for the likeliest.
        logprob: of that token.
    """

    parent: int
    token_id: int
    rank: int
    logprob: float


class Hypothesis(NamedTuple):
    """A finished output.

    Attributes:
        score: the sum of its tokens' logprobs, over its length to the power of the length penalty.
        moves: how each of its tokens came, the first first.
        is_stopped: whether its last token ends it; else it is as long as it may be.
    """

    score: float
    moves: tuple[Move, ...]
    is_stopped: bool


class _Beam(NamedTuple):
    """An output so far: its last move, what it goes on from, and the sum of its logprobs."""

    before: _Beam | None
    move: Move | None
    total: float

    def moves(self) -> tuple[Move, ...]:
        found: list[Move] = []
        beam: _Beam | None = self
        while beam is not None and beam.move is not None:
            found.append(beam.move)
            beam = beam.before
        return tuple(reversed(found))


class _Finished(NamedTuple):
    """An output that is finished, its score, and whether its last token ends it."""

    score: float
    beam: _Beam
    is_stopped: bool


class BeamSearch:
    """One search.

    Args:
        width: beams at once, and outputs that are found.
        stop_ids: tokens that end an output.
        max_tokens: that an output has at most, at least 1.
        min_tokens: that come before any of ``stop_ids``.
        length_penalty: above 0 prefers long outputs, since sums are negative; below, short ones.
        early_stopping: when it is over.

    Attributes:
        num_tops: how many of a beam's likeliest tokens a step must know: so many that ``width`` beams run on, whichever
            of them would end their outputs.
        num_tokens: that each beam has.
        is_over: whether nothing is left to do.
    """

    def __init__(  # noqa: PLR0913 - settings, by name
        self,
        width: int,
        stop_ids: Collection[int],
        max_tokens: int,
        *,
        min_tokens: int = 0,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
    ) -> None:
        self.num_tops = width + len(stop_ids)
        self._width = width
        self._stop_ids = frozenset(stop_ids)
        self._max_tokens = max_tokens
        self._min_tokens = min_tokens
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self.begin_again()

    def begin_again(self) -> None:
        """Forget all that was found."""
        self.num_tokens = 0
        self.is_over = False
        self._beams = [_Beam(None, None, 0.0)]
        self._finished: list[_Finished] = []

    def take(self, tops: Sequence[Sequence[tuple[int, float]]]) -> list[Move]:
        """Go one token further; return how the beams that run on come about, the best first. None when it is over.

        Args:
            tops: of each beam, in order, its ``num_tops`` likeliest next tokens with their logprobs, likeliest first.
        """
        self.num_tokens += 1
        stop_ids = self._stop_ids if self.num_tokens > self._min_tokens else frozenset[int]()
        candidates = [
            _Beam(beam, Move(parent, token_id, rank, logprob), beam.total + logprob)
            for parent, (beam, top) in enumerate(zip(self._beams, tops, strict=True))
            for rank, (token_id, logprob) in enumerate(top, 1)
            if token_id not in self._stop_ids or stop_ids
        ]
        candidates.sort(key=_worst_last)  # of equal ones the first beam's likeliest comes first
        is_last = self.num_tokens >= self._max_tokens
        running: list[_Beam] = []
        for place, beam in enumerate(candidates):
            assert beam.move is not None
            is_stopped = beam.move.token_id in stop_ids
            if not (is_stopped or is_last):
                running.append(beam)
                if len(running) == self._width:
                    break
            elif place < self._width:
                self._finished.append(_Finished(self._score(beam.total, self.num_tokens), beam, is_stopped))
        self._finished.sort(key=_best_first)
        del self._finished[self._width :]
        self._beams = running
        self.is_over = not running or self._is_settled()
        return [] if self.is_over else [beam.move for beam in running if beam.move is not None]

    def best(self) -> list[Hypothesis]:
        """Return the finished outputs, the best first."""
        return [Hypothesis(score, beam.moves(), is_stopped) for score, beam, is_stopped in self._finished]

    def _is_settled(self) -> bool:
        """Whether what runs is not expected to be better than what is finished."""
        if len(self._finished) < self._width:
            return False
        if self._early_stopping is True:
            return True
        longest = self._early_stopping == "never" and self._length_penalty > 0
        hoped = self._score(self._beams[0].total, self._max_tokens if longest else self.num_tokens)
        return hoped <= self._finished[-1].score

    def _score(self, total: float, num_tokens: int) -> float:
        return total / float(num_tokens**self._length_penalty)


def _worst_last(beam: _Beam) -> float:
    return -beam.total


def _best_first(finished: _Finished) -> float:
    return -finished.score
