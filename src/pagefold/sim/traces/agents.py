"""Agents' sessions: they call a tool, wait for it, and go on with what it said; they compact, and call other agents.

A closed loop: a turn comes a pause after the answer before it, however long that took (:class:`SessionTurn` says after
which, and how long). :func:`~pagefold.sim.simulate` and :func:`~pagefold.sim.replay.replay` keep to that, and end a
session when its last turn has ended. Whoever drives a server does the same::

    turns = AgentSessionsWorkload(num_sessions=40).generate()
    first = [each for each in turns if not each.turn.after]   # each comes turn.pause_s after the beginning
    then = {}                                                 # who comes turn.pause_s after the end of which request
    for each in turns:
        then.setdefault(each.turn.after, []).append(each)
    each.request().token_ids                                  # its prompt; answer.num_tokens more are asked for
    each.turn.session_id, each.turn.returns_in_s              # what its client says

What an answer says is known before (``hashed_token``, which the null runner samples). Who drives a real model puts the
answer's tokens there instead. :func:`without_returns` and :func:`without_sessions` leave out what clients say, for
comparisons; :func:`most_live_tokens` tells how much memory would keep all.

How pauses are drawn is an assumption, not a measurement: what kind of tool an agent uses changes every few turns, each
kind has its typical pause (drawn so that each octave is as likely as another), and calls of one kind take about as
long. With ``turns_per_tool=1-1`` pauses tell nothing of each other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp, log
from random import Random
from typing import TYPE_CHECKING

from pagefold.sim.traces.segments import GeneratedRequest, Segment, SessionTurn
from pagefold.sim.traces.workload import MostOf, Workload, by_arrival, draw_segment

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["AgentSessionsWorkload", "most_live_tokens", "without_returns", "without_sessions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSessionsWorkload(Workload):
    """Agents that work side by side, each in a session of its own.

    A prompt is the instructions that all share, the agent's task (with files that it works on), and what was said
    since: answers, and what tools said. Every ``compact_every`` turns the client puts a summary in the place of all
    that was said. A sub-agent begins with its parent's prompt and answer, and the parent goes on when it is done.

    Attributes:
        num_sessions: agents that have no parent.
        instruction_tokens: length of what all prompts begin with, range; drawn once.
        task_tokens: length of a task, range.
        num_turns: turns of an agent, range.
        tool_tokens: length of what a tool says, range.
        answer_tokens: length of an answer, range.
        tool_pause_s: seconds that a tool takes, range.
        turns_per_tool: turns after which another kind of tool is used, range.
        pause_spread: standard deviation of the logarithm of a pause, of tools of one kind.
        compact_every: turns after which what was said is compacted.
        summary_tokens: length of a summary, range.
        sub_agents_per_turn: how likely a turn calls a sub-agent instead of a tool, 0 to 1.
        sub_agent_task_tokens: length of what a sub-agent is told, range.
        sub_agent_turns: turns of a sub-agent, range.
        begin_within_s: seconds in which all sessions begin, range: evenly from the first to the second.
        seed: of all draws.
    """

    name = "sessions"

    num_sessions: int = 40
    instruction_tokens: tuple[int, int] = (400, 400)
    task_tokens: tuple[int, int] = (400, 1200)
    num_turns: tuple[int, int] = (25, 35)
    tool_tokens: tuple[int, int] = (40, 200)
    answer_tokens: tuple[int, int] = (10, 60)
    tool_pause_s: tuple[float, float] = (1.0, 60.0)
    turns_per_tool: tuple[int, int] = (5, 10)
    pause_spread: float = 0.15
    compact_every: int = 10
    summary_tokens: tuple[int, int] = (100, 200)
    sub_agents_per_turn: float = 0.03
    sub_agent_task_tokens: tuple[int, int] = (50, 200)
    sub_agent_turns: tuple[int, int] = (2, 4)
    begin_within_s: tuple[float, float] = (0.0, 60.0)
    seed: int = 0

    def most(self) -> MostOf:
        """Return how large it can become."""
        turns, calls = self.num_turns[1], self.sub_agent_turns[1] if self.sub_agents_per_turn else 0
        per_turn = self.tool_tokens[1] + self.answer_tokens[1]
        said = self.instruction_tokens[1] + self.task_tokens[1] + self.sub_agent_task_tokens[1] + self.summary_tokens[1]
        return MostOf(self.num_sessions * turns * (1 + calls), said + (self.compact_every + 1 + calls) * per_turn)

    def generate(self) -> list[GeneratedRequest]:
        """Return the requests in order of arrival, as if answers took no time."""
        rng = Random(self.seed)  # noqa: S311 - a workload, no secret
        instructions = draw_segment(rng, self.instruction_tokens)
        turns: list[GeneratedRequest] = []
        for number in range(self.num_sessions):
            began_s = rng.uniform(*self.begin_within_s)
            turns += self._session(rng, f"agent-{number}", instructions, began_s)
        return by_arrival(turns)

    def _session(self, rng: Random, name: str, instructions: Segment, began_s: float) -> list[GeneratedRequest]:
        head = [instructions, draw_segment(rng, self.task_tokens)]
        said = list(head)
        made: list[GeneratedRequest] = []
        pauses = _Pauses(self, rng)
        num_turns = rng.randint(*self.num_turns)
        after, pause_s, at_s = "", began_s, began_s
        for number in range(num_turns):
            answer = draw_segment(rng, self.answer_tokens)
            turn = SessionTurn(name, "", after, pause_s, is_last=number == num_turns - 1)
            request = GeneratedRequest(f"{name}-turn-{number}", at_s, tuple(said), answer, turn)
            said.append(answer)
            after, pause_s = request.name, pauses.draw()
            returns_in_s = pause_s
            if not turn.is_last and rng.random() < self.sub_agents_per_turn:
                calls = self._sub_agent(rng, request, pauses)
                made += calls
                returns_in_s = calls[-1].arrival_s - at_s + self.tool_pause_s[0]
                at_s, after, pause_s = calls[-1].arrival_s, calls[-1].name, self.tool_pause_s[0]
            if not turn.is_last:
                request = replace(request, turn=turn._replace(returns_in_s=returns_in_s))
            made.append(request)
            said.append(draw_segment(rng, self.tool_tokens))
            at_s += pause_s
            if (number + 1) % self.compact_every == 0:
                said = [*head, draw_segment(rng, self.summary_tokens)]
        return made

    def _sub_agent(self, rng: Random, caller: GeneratedRequest, pauses: _Pauses) -> list[GeneratedRequest]:
        """Return the turns of an agent that ``caller`` calls with its answer."""
        assert caller.turn is not None
        name, parent = f"{caller.name}-sub", caller.turn.session_id
        said = [*caller.segments, caller.answer, draw_segment(rng, self.sub_agent_task_tokens)]
        made: list[GeneratedRequest] = []
        num_turns = rng.randint(*self.sub_agent_turns)
        after, pause_s, at_s = caller.name, 0.0, caller.arrival_s
        for number in range(num_turns):
            answer = draw_segment(rng, self.answer_tokens)
            is_last = number == num_turns - 1
            next_s = pauses.draw()
            turn = SessionTurn(name, parent, after, pause_s, None if is_last else next_s, is_last)
            made.append(GeneratedRequest(f"{name}-{number}", at_s, tuple(said), answer, turn))
            said += (answer, draw_segment(rng, self.tool_tokens))
            after, pause_s = made[-1].name, next_s
            at_s += next_s
        return made


class _Pauses:
    """How long the tools of one agent take, one after another."""

    def __init__(self, workload: AgentSessionsWorkload, rng: Random) -> None:
        self._workload = workload
        self._rng = rng
        self._typical_s = 0.0
        self._num_left = 0

    def draw(self) -> float:
        """Return the seconds of the next one."""
        rng, (least, most) = self._rng, self._workload.tool_pause_s
        if not self._num_left:
            self._num_left = rng.randint(*self._workload.turns_per_tool)
            self._typical_s = exp(rng.uniform(log(max(least, 1e-3)), log(max(most, 1e-3))))
        self._num_left -= 1
        return min(most, max(least, self._typical_s * exp(rng.gauss(0.0, self._workload.pause_spread))))


def without_returns(turns: Iterable[GeneratedRequest]) -> list[GeneratedRequest]:
    """Return the same turns of clients that do not say when they will be back."""
    return [each if each.turn is None else replace(each, turn=each.turn._replace(returns_in_s=None)) for each in turns]


def without_sessions(turns: Iterable[GeneratedRequest]) -> list[GeneratedRequest]:
    """Return the same turns, at the same times, of clients that say nothing of sessions at all."""
    return [
        each
        if each.turn is None
        else replace(each, turn=each.turn._replace(session_id="", parent_session_id="", returns_in_s=None))
        for each in turns
    ]


def most_live_tokens(turns: Sequence[GeneratedRequest]) -> int:
    """Return the tokens of the longest prompt and answer of each session together, what all share counted once."""
    longest: dict[str, GeneratedRequest] = {}
    for each in turns:
        if each.turn is None or each.turn.parent_session_id:
            continue
        known = longest.get(each.turn.session_id)
        if known is None or known.prompt_tokens < each.prompt_tokens:
            longest[each.turn.session_id] = each
    shared = {each.segments[0] for each in longest.values()}
    own = sum(each.prompt_tokens + each.answer.num_tokens - each.segments[0].num_tokens for each in longest.values())
    return own + sum(segment.num_tokens for segment in shared)
