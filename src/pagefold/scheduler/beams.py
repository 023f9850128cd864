"""Beams: what a step that ran makes of the beams in it: which go on on whose blocks, which are dropped, who is done.

Beams are in one another's places: where a beam ends its search, another one's blocks are forked, and go on in its
place. The blocks of those that are dropped are given back in the same moment; what of them is published stays cached
until anybody needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.scheduler.samples import begin_fork

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pagefold.beams import BeamGroup, Move
    from pagefold.kv import KVCore, SequenceCache
    from pagefold.request import Request
    from pagefold.scheduler.growth import AdmissionRule
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
        rule: expects growth of those that go on.
    """

    def __init__(self, core: KVCore, queues: Queues, leaving: Leaving, rule: AdmissionRule) -> None:
        self._core = core
        self._queues = queues
        self._leaving = leaving
        self._rule = rule

    def advance(self, step: StepInFlight, result: StepResult) -> list[Request]:
        """Let every search in ``step``, which ran, go one token further.

        Returns whose beam, or result, has got a token; those of searches that are over have a ``finish_reason``.
        """
        got: list[Request] = []
        for group, told in self._told(step, result).items():
            if any(seat.is_aborted for seat in group.seats):
                continue
            had_begun = group.has_begun
            moves = group.take([told[seat] for seat in group.beams])
            if not had_begun:
                self._begin(group)
            if moves:
                self._move(group, moves, group.seats if had_begun else group.seats[:1])
                for seat in group.seats:  # each has another's blocks, perhaps
                    self._rule.forget(seat)
                    self._rule.note(seat, step.plan.step_id)
            else:
                self._deal(group)
            got += group.seats
        return got

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

    def _move(self, group: BeamGroup[Request], moves: list[Move], parents: list[Request]) -> None:
        """Give each seat the tokens and blocks of the beam that goes on there.

        Those that are dropped let go first, so that there are never more caches than seats. Whoever was told of a
        seat's tokens when it came reads them still: they change in their place.
        """
        going_on = {move.parent for move in moves}
        for at, parent in enumerate(parents):
            if at not in going_on:
                self._leaving.let_go(parent)
        caches: list[SequenceCache | None] = [parent.cache for parent in parents]
        outputs = [parent.token_ids[parent.num_prompt_tokens :] for parent in parents]
        taken: set[int] = set()
        for seat, move in zip(group.seats, moves, strict=True):
            cache = caches[move.parent]
            assert cache is not None
            seat.cache = self._core.fork(cache, owner=seat.request_id) if move.parent in taken else cache
            taken.add(move.parent)
            _write_output(seat, (*outputs[move.parent], move.token_id))

    def _deal(self, group: BeamGroup[Request]) -> None:
        """Give the results to the seats, the best first, and let all end.

        The best one gets what the beams have that agrees with it longest, for whoever goes on from it.
        """
        results = [[move.token_id for move in found.moves] for found in group.search.best()]
        nearest = max(group.seats, key=lambda seat: _num_equal(seat, results[0]))
        leader = group.seats[0]
        leader.cache, nearest.cache = nearest.cache, leader.cache
        for seat in group.seats[1:]:
            if seat.cache is not None:
                self._leaving.let_go(seat)
        for seat, token_ids, found in zip(group.seats, results, group.search.best(), strict=True):
            _write_output(seat, token_ids)
            for logprobs in group.logprobs_of(found):
                seat.add_logprobs(logprobs)
            seat.finish_reason = "stop" if found.is_stopped else "length"


def _write_output(seat: Request, token_ids: Iterable[int]) -> None:
    """Let the output of ``seat`` be ``token_ids``."""
    del seat.token_ids[seat.num_prompt_tokens :]
    seat.token_ids.extend(token_ids)


def _num_equal(seat: Request, token_ids: list[int]) -> int:
    """Return how many tokens the output of ``seat``, if it has blocks, has in common with ``token_ids``; else -1."""
    if seat.cache is None:
        return -1
    pairs = enumerate(zip(seat.output_token_ids, token_ids, strict=False))
    return next((at for at, (own, other) in pairs if own != other), min(seat.num_output_tokens, len(token_ids)))
