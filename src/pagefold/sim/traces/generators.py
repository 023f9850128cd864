"""Generated workloads: chats, shared system prompts, agent trees, retrieval, bursts; sessions are in ``agents.py``.

The same parameters make the same requests, always. Ranges are ``(least, most)``, both inclusive, drawn evenly. Arrivals
are an open loop: a request comes at its time, whether or not the answer before it is complete. Only agents' sessions
wait for their answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from random import Random
from typing import TYPE_CHECKING

from pagefold.errors import ConfigError
from pagefold.sim.size_limits import MAX_REQUESTS
from pagefold.sim.traces.agents import AgentSessionsWorkload
from pagefold.sim.traces.segments import GeneratedRequest
from pagefold.sim.traces.workload import MostOf, Workload, by_arrival, defaults_of, draw_segment, told

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "GENERATORS",
    "AgentSessionsWorkload",
    "AgentTreeWorkload",
    "BurstWorkload",
    "ChatWorkload",
    "RetrievalWorkload",
    "SharedPromptWorkload",
    "Workload",
    "parse_workload",
]

_SHOWN = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatWorkload(Workload):
    """Chats that begin with one of a few system prompts and go on for some turns.

    Each turn is a request whose prompt is all that was said so far: the system prompt, earlier questions, the answers
    that :class:`~pagefold.sim.NullRunner` gave to them, and a new question.

    Attributes:
        num_chats: how many chats there are.
        num_system_prompts: how many system prompts they choose from.
        system_prompt_tokens: length of a system prompt, range.
        num_turns: questions of a chat, range.
        question_tokens: length of a question, range.
        answer_tokens: length of an answer, range.
        chats_per_s: rate at which chats begin (exponential gaps).
        turn_gap_s: seconds from one question of a chat to its next, range.
        seed: of all draws.
    """

    name = "chat"

    num_chats: int = 160
    num_system_prompts: int = 4
    system_prompt_tokens: tuple[int, int] = (300, 700)
    num_turns: tuple[int, int] = (1, 5)
    question_tokens: tuple[int, int] = (15, 120)
    answer_tokens: tuple[int, int] = (20, 160)
    chats_per_s: float = 10.0
    turn_gap_s: tuple[float, float] = (2.0, 8.0)
    seed: int = 0

    def most(self) -> MostOf:
        """Return how large it can become."""
        turns = self.num_turns[1]
        said = self.system_prompt_tokens[1] + turns * (self.question_tokens[1] + self.answer_tokens[1])
        return MostOf(max(self.num_chats * turns, self.num_system_prompts), said)

    def generate(self) -> list[GeneratedRequest]:
        """Return the requests in order of arrival."""
        rng = Random(self.seed)  # noqa: S311 - a workload, no secret
        system_prompts = [draw_segment(rng, self.system_prompt_tokens) for _ in range(self.num_system_prompts)]
        requests: list[GeneratedRequest] = []
        began_s = 0.0
        for chat in range(self.num_chats):
            began_s += rng.expovariate(self.chats_per_s)
            said = [rng.choice(system_prompts)]
            now_s = began_s
            for turn in range(rng.randint(*self.num_turns)):
                said.append(draw_segment(rng, self.question_tokens))
                answer = draw_segment(rng, self.answer_tokens)
                requests.append(GeneratedRequest(f"chat-{chat}-turn-{turn}", now_s, tuple(said), answer))
                said.append(answer)
                now_s += rng.uniform(*self.turn_gap_s)
        return by_arrival(requests)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPromptWorkload(Workload):
    """Single questions under system prompts of which some are popular and most are not.

    Attributes:
        num_requests: how many there are.
        num_prompts: how many system prompts there are.
        prompt_tokens: length of a system prompt, range.
        popularity: exponent of Zipf's law: the k-th prompt is chosen in proportion to ``k ** -popularity``.
        question_tokens: length of a question, range.
        answer_tokens: length of an answer, range.
        requests_per_s: rate at which they come (exponential gaps).
        seed: of all draws.
    """

    name = "shared"

    num_requests: int = 1000
    num_prompts: int = 50
    prompt_tokens: tuple[int, int] = (500, 3000)
    popularity: float = 1.0
    question_tokens: tuple[int, int] = (50, 500)
    answer_tokens: tuple[int, int] = (20, 200)
    requests_per_s: float = 10.0
    seed: int = 0

    def most(self) -> MostOf:
        """Return how large it can become."""
        return MostOf(max(self.num_requests, self.num_prompts), self.prompt_tokens[1] + self.question_tokens[1])

    def generate(self) -> list[GeneratedRequest]:
        """Return the requests in order of arrival."""
        rng = Random(self.seed)  # noqa: S311 - a workload, no secret
        prompts = [draw_segment(rng, self.prompt_tokens) for _ in range(self.num_prompts)]
        weights = _zipf(self.num_prompts, self.popularity)
        requests: list[GeneratedRequest] = []
        now_s = 0.0
        for index in range(self.num_requests):
            now_s += rng.expovariate(self.requests_per_s)
            prompt = rng.choices(prompts, cum_weights=weights)[0]
            segments = (prompt, draw_segment(rng, self.question_tokens))
            requests.append(GeneratedRequest(f"shared-{index}", now_s, segments, draw_segment(rng, self.answer_tokens)))
        return requests


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTreeWorkload(Workload):
    """Agents that try several ways at each step: the prompts of a task are a tree.

    A node's prompt is its parent's, the parent's answer, and what a tool said. All tasks begin with the same
    instructions.

    Attributes:
        num_tasks: how many trees there are.
        instruction_tokens: length of what all prompts begin with, range; drawn once.
        task_tokens: length of a task's description, range.
        num_levels: how many steps deep a tree is, range.
        num_branches: how many ways a step goes on, range.
        tool_tokens: length of what a tool says, range.
        answer_tokens: length of an answer, range.
        tasks_per_s: rate at which tasks begin (exponential gaps).
        step_gap_s: seconds from a step to those that follow it, range.
        seed: of all draws.
    """

    name = "agents"

    num_tasks: int = 100
    instruction_tokens: tuple[int, int] = (1500, 1500)
    task_tokens: tuple[int, int] = (100, 600)
    num_levels: tuple[int, int] = (2, 5)
    num_branches: tuple[int, int] = (1, 3)
    tool_tokens: tuple[int, int] = (50, 800)
    answer_tokens: tuple[int, int] = (20, 150)
    tasks_per_s: float = 0.5
    step_gap_s: tuple[float, float] = (1.0, 15.0)
    seed: int = 0

    def most(self) -> MostOf:
        """Return how large it can become."""
        levels, branches = self.num_levels[1], self.num_branches[1]
        if levels > MAX_REQUESTS or (branches > 1 and levels > MAX_REQUESTS.bit_length()):
            num_nodes = MAX_REQUESTS + 1  # at least
        else:
            num_nodes = sum(branches**level for level in range(levels))
        said = self.instruction_tokens[1] + self.task_tokens[1] + levels * (self.tool_tokens[1] + self.answer_tokens[1])
        return MostOf(self.num_tasks * num_nodes, said)

    def generate(self) -> list[GeneratedRequest]:
        """Return the requests in order of arrival."""
        rng = Random(self.seed)  # noqa: S311 - a workload, no secret
        instructions = draw_segment(rng, self.instruction_tokens)
        requests: list[GeneratedRequest] = []
        began_s = 0.0
        for task in range(self.num_tasks):
            began_s += rng.expovariate(self.tasks_per_s)
            root = (instructions, draw_segment(rng, self.task_tokens))
            level = [GeneratedRequest(f"task-{task}", began_s, root, draw_segment(rng, self.answer_tokens))]
            requests += level
            for _ in range(rng.randint(*self.num_levels) - 1):
                level = [self._step(rng, node, way) for node in level for way in range(rng.randint(*self.num_branches))]
                requests += level
        return by_arrival(requests)

    def _step(self, rng: Random, before: GeneratedRequest, way: int) -> GeneratedRequest:
        segments = (*before.segments, before.answer, draw_segment(rng, self.tool_tokens))
        arrival_s = before.arrival_s + rng.uniform(*self.step_gap_s)
        return GeneratedRequest(f"{before.name}-{way}", arrival_s, segments, draw_segment(rng, self.answer_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalWorkload(Workload):
    """Questions about documents that a search found: instructions, the documents, the question.

    Attributes:
        num_requests: how many there are.
        num_documents: how many documents there are.
        document_tokens: length of a document, range.
        documents_per_request: how many a prompt holds, range; the most popular of them comes first.
        popularity: exponent of Zipf's law: the k-th document is found in proportion to ``k ** -popularity``.
        instruction_tokens: length of what all prompts begin with, range; drawn once.
        question_tokens: length of a question, range.
        answer_tokens: length of an answer, range.
        requests_per_s: rate at which they come (exponential gaps).
        seed: of all draws.
    """

    name = "retrieval"

    num_requests: int = 1000
    num_documents: int = 500
    document_tokens: tuple[int, int] = (300, 1500)
    documents_per_request: tuple[int, int] = (1, 4)
    popularity: float = 0.8
    instruction_tokens: tuple[int, int] = (300, 300)
    question_tokens: tuple[int, int] = (20, 100)
    answer_tokens: tuple[int, int] = (50, 300)
    requests_per_s: float = 5.0
    seed: int = 0

    def most(self) -> MostOf:
        """Return how large it can become."""
        found = self.documents_per_request[1] * self.document_tokens[1]
        longest = self.instruction_tokens[1] + found + self.question_tokens[1]
        return MostOf(max(self.num_requests, self.num_documents), longest)

    def generate(self) -> list[GeneratedRequest]:
        """Return the requests in order of arrival."""
        rng = Random(self.seed)  # noqa: S311 - a workload, no secret
        instructions = draw_segment(rng, self.instruction_tokens)
        documents = [draw_segment(rng, self.document_tokens) for _ in range(self.num_documents)]
        weights = _zipf(self.num_documents, self.popularity)
        requests: list[GeneratedRequest] = []
        now_s = 0.0
        for index in range(self.num_requests):
            now_s += rng.expovariate(self.requests_per_s)
            num_found = rng.randint(*self.documents_per_request)
            found = sorted(set(rng.choices(range(self.num_documents), cum_weights=weights, k=num_found)))
            segments = (instructions, *(documents[each] for each in found), draw_segment(rng, self.question_tokens))
            requests.append(
                GeneratedRequest(f"retrieval-{index}", now_s, segments, draw_segment(rng, self.answer_tokens))
            )
        return requests


@dataclass(frozen=True, slots=True, kw_only=True)
class BurstWorkload(Workload):
    """Bursts of requests that begin alike, and never again; between them requests that share nothing.

    A batch job, or a crowd that asks about the same news: what is popular for a minute is worthless after it.

    Attributes:
        num_bursts: how many there are.
        requests_per_burst: range.
        burst_s: seconds that a burst lasts, range.
        prompt_tokens: length of what the prompts of a burst begin with, range.
        question_tokens: length of what each adds to it, range.
        single_tokens: length of the prompts that share nothing, range.
        singles_per_burst: how many of them come from one burst's begin to the next, range.
        answer_tokens: length of an answer, range.
        burst_gap_s: seconds from one burst's begin to the next, range.
        seed: of all draws.
    """

    name = "bursts"

    num_bursts: int = 20
    requests_per_burst: tuple[int, int] = (10, 60)
    burst_s: tuple[float, float] = (2.0, 20.0)
    prompt_tokens: tuple[int, int] = (500, 6000)
    question_tokens: tuple[int, int] = (20, 300)
    single_tokens: tuple[int, int] = (100, 4000)
    singles_per_burst: tuple[int, int] = (5, 40)
    answer_tokens: tuple[int, int] = (20, 200)
    burst_gap_s: tuple[float, float] = (5.0, 60.0)
    seed: int = 0

    def most(self) -> MostOf:
        """Return how large it can become."""
        num_requests = self.num_bursts * (self.requests_per_burst[1] + self.singles_per_burst[1])
        return MostOf(num_requests, max(self.prompt_tokens[1] + self.question_tokens[1], self.single_tokens[1]))

    def generate(self) -> list[GeneratedRequest]:
        """Return the requests in order of arrival."""
        rng = Random(self.seed)  # noqa: S311 - a workload, no secret
        requests: list[GeneratedRequest] = []
        now_s = 0.0
        for burst in range(self.num_bursts):
            shared = draw_segment(rng, self.prompt_tokens)
            lasts_s, gap_s = rng.uniform(*self.burst_s), rng.uniform(*self.burst_gap_s)
            for index in range(rng.randint(*self.requests_per_burst)):
                segments = (shared, draw_segment(rng, self.question_tokens))
                at_s = now_s + rng.uniform(0, lasts_s)
                answer = draw_segment(rng, self.answer_tokens)
                requests.append(GeneratedRequest(f"burst-{burst}-{index}", at_s, segments, answer))
            for index in range(rng.randint(*self.singles_per_burst)):
                single = (draw_segment(rng, self.single_tokens),)
                at_s = now_s + rng.uniform(0, gap_s)
                answer = draw_segment(rng, self.answer_tokens)
                requests.append(GeneratedRequest(f"single-{burst}-{index}", at_s, single, answer))
            now_s += gap_s
        return by_arrival(requests)


GENERATORS: dict[str, type[Workload]] = {
    kind.name: kind
    for kind in (
        ChatWorkload,
        SharedPromptWorkload,
        AgentTreeWorkload,
        RetrievalWorkload,
        BurstWorkload,
        AgentSessionsWorkload,
    )
}
"""Every generator by the name that ``pagefold simulate`` takes."""


def parse_workload(text: str) -> Workload:
    """Return the workload that ``NAME`` or ``NAME:PARAMETER=VALUE,...`` means; ranges are ``LEAST-MOST``.

    Raises:
        ConfigError: there is no such generator or parameter, or a value is out of range.
    """
    name, _, rest = text.partition(":")
    if name not in GENERATORS:
        msg = f"There is no generator {name!r}."
        raise ConfigError(msg, remedy=f"There are {', '.join(GENERATORS)}.")
    kind = GENERATORS[name]
    defaults = defaults_of(kind)
    given: dict[str, object] = {}
    for part in filter(None, rest.split(",")):
        parameter, _, value = part.partition("=")
        if parameter not in defaults:
            msg = f"The generator {name} has no parameter {parameter!r}."
            raise ConfigError(msg, remedy=f"It has {', '.join(defaults)}.")
        given[parameter] = _parse(parameter, value, defaults[parameter])
    return kind(**given)


def _parse(name: str, text: str, default: object) -> object:
    """Return what ``text`` means where the default is of that type."""
    try:
        if isinstance(default, tuple):
            number = type(default[0])
            least, dash, most = text.partition("-")
            return (number(least), number(most if dash else least))
        return float(text) if isinstance(default, float) else int(text)
    except ValueError:
        what = "LEAST-MOST" if isinstance(default, tuple) else "a number"
        msg = f"{name} is {text[:_SHOWN]!r}."
        raise ConfigError(msg, remedy=f"It must be {what}, such as {told(default)}.") from None


def _zipf(count: int, exponent: float) -> Sequence[float]:
    """Return cumulative weights of Zipf's law."""
    return list(accumulate(rank**-exponent for rank in range(1, count + 1)))
