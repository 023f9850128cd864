"""Beams: what a step that ran makes of the beams in it: which go on on whose blocks, which are dropped, who is done.

Beams are in one another's places: where a beam ends its search, another one's blocks are forked, and go on in its
place. The blocks of those that are dropped are given back in the same moment; what of them is published stays cached
until anybody needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.scheduler.samples import begin_fork

if TYPE_CHECKING:
    from pagefold.beams import BeamGroup, Move
    from pagefold.kv import KVCore, SequenceCache
    from pagefold.request import Request
    from pagefold.scheduler.leaving import Leaving
    from pagefold.scheduler.queues import Queues
    from pagefold.scheduler.step_in_flight import StepInFlight
    from pagefold.steps import StepResult, TokenLogprobs

__all__ = ["Beams", "leaders"]


def leaders(requests: list[Request]) -> list[Request]:
    """Return ``requests`` with each group of beams once, as its first seat."""
    return list(dict.fromkeys(request.leader for request in requests))


class Beams:
    """Moves beams.

    Args:
        core: the KV core.
        queues: who runs.
        leaving: gives back what dropped beams have.
    """

    def __init__(self, core: KVCore, queues: Queues, leaving: Leaving) -> None:
        self._core = core
        self._queues = queues
        self._leaving = leaving

    def advance(self, step: StepInFlight, result: StepResult) -> tuple[list[Request], int]:
        """Let every search in ``step``, which ran, go one token further.

        Returns the requests of those that are over, with their results, and how many tokens were found in all.
        """
        done: list[Request] = []
        num_tokens = 0
        for group, told in self._told(step, result).items():
            if any(seat.is_aborted for seat in group.seats):
                continue
            tops = [told[seat].top for seat in group.beams]
            group.told.append([told[seat] for seat in group.beams])
            began = group.has_begun
            moves = group.search.take(tops)
            num_tokens += max(1, len(moves))
            if not began:
                self._begin(group)
            if moves:
                self._move(group, moves, began=began)
            else:
                self._deal(group)
                done += group.seats
        return done, num_tokens

    @staticmethod
    def _told(step: StepInFlight, result: StepResult) -> dict[BeamGroup[Request], dict[Request, TokenLogprobs]]:
        """Return what the step told of each beam, by its group: of all beams of a group, since all were in it."""
        found: dict[BeamGroup[Request], dict[Request, TokenLogprobs]] = {}
        for place, told in zip(step.plan.logprob_rows, result.logprobs, strict=True):
            seat = step.samples[place]
            if seat.beams is not None:
                found.setdefault(seat.beams, {})[seat] = told
        return found

    def _begin(self, group: BeamGroup[Request]) -> None:
        """The prompt is computed: let the other seats run, as yet without blocks."""
        leader = group.seats[0]
        for seat in leader.forks:
            begin_fork(seat, leader, self._queues)
        at = self._queues.running.index(leader) + 1
        self._queues.running[at:at] = leader.forks
        leader.forks = []

    def _move(self, group: BeamGroup[Request], moves: list[Move], *, began: bool) -> None:
        """Give each seat the tokens and blocks of the beam that goes on there.

        Those that are dropped let go first, so that there are never more caches than seats.
        """
        parents = group.seats if began else group.seats[:1]
        going_on = {move.parent for move in moves}
        for at, parent in enumerate(parents):
            if at not in going_on:
                self._leaving.let_go(parent)
        caches: list[SequenceCache | None] = [parent.cache for parent in parents]
        tokens = [parent.token_ids for parent in parents]
        num_computed = parents[0].num_computed_tokens
        taken: set[int] = set()
        for seat, move in zip(group.seats, moves, strict=True):
            cache = caches[move.parent]
            assert cache is not None
            seat.cache = self._core.fork(cache) if move.parent in taken else cache
            taken.add(move.parent)
            seat.token_ids = tokens[move.parent][:]
            seat.token_ids.append(move.token_id)
            seat.num_computed_tokens = num_computed

    @staticmethod
    def _deal(group: BeamGroup[Request]) -> None:
        """Give the results to the seats, the best first, and let all end."""
        for seat, hypothesis in zip(group.seats, group.search.best(), strict=True):
            del seat.token_ids[seat.num_prompt_tokens :]
            seat.token_ids.extend(move.token_id for move in hypothesis.moves)
            for logprobs in group.logprobs_of(hypothesis, seat.sampling.logprobs or 0):
                seat.add_logprobs(logprobs)
            seat.finish_reason = "stop" if hypothesis.is_stopped else "length"
