"""A generated workload: chats of several turns under a few shared system prompts."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from random import Random

from pagefold.request import Request, SamplingParams, StopRule
from pagefold.sim.null_runner import hashed_token

__all__ = ["ChatWorkload"]

_VOCAB_SIZE = 50_000
_SAMPLING = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatWorkload:
    """Chats that begin with one of a few system prompts and go on for some turns.

    Each turn is a request whose prompt is all that was said so far: the system prompt, earlier questions, the answers
    that :class:`~pagefold.sim.NullRunner` gave to them, and a new question. Arrivals are an open loop: a turn comes at
    its time, whether or not the answer before it is complete. The same parameters make the same requests, always.

    Ranges are ``(least, most)``, both inclusive, drawn evenly.

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

    num_chats: int = 160
    num_system_prompts: int = 4
    system_prompt_tokens: tuple[int, int] = (300, 700)
    num_turns: tuple[int, int] = (1, 5)
    question_tokens: tuple[int, int] = (15, 120)
    answer_tokens: tuple[int, int] = (20, 160)
    chats_per_s: float = 10.0
    turn_gap_s: tuple[float, float] = (2.0, 8.0)
    seed: int = 0

    def requests(self) -> list[Request]:
        """Return the requests in order of arrival, fresh ones at each call: a replay uses them up."""
        rng = Random(self.seed)  # noqa: S311 - a workload, no secret
        system_prompts = [
            _random_tokens(rng, rng.randint(*self.system_prompt_tokens)) for _ in range(self.num_system_prompts)
        ]
        requests: list[Request] = []
        began_s = 0.0
        for chat in range(self.num_chats):
            began_s += rng.expovariate(self.chats_per_s)
            requests += self._chat(rng, chat, rng.choice(system_prompts), began_s)
        requests.sort(key=lambda request: request.arrival_s)
        return requests

    def _chat(self, rng: Random, chat: int, system_prompt: array[int], began_s: float) -> list[Request]:
        said = system_prompt[:]
        now_s = began_s
        turns: list[Request] = []
        for turn in range(rng.randint(*self.num_turns)):
            said += _random_tokens(rng, rng.randint(*self.question_tokens))
            num_answer_tokens = rng.randint(*self.answer_tokens)
            seed = rng.getrandbits(32)
            turns.append(
                Request(
                    f"chat-{chat}-turn-{turn}",
                    said,
                    _SAMPLING,
                    stop=StopRule(frozenset(), len(said) + num_answer_tokens),
                    seed=seed,
                    arrival_s=now_s,
                )
            )
            said.extend(hashed_token(seed, draw) for draw in range(num_answer_tokens))
            now_s += rng.uniform(*self.turn_gap_s)
        return turns


def _random_tokens(rng: Random, num_tokens: int) -> array[int]:
    return array("i", rng.choices(range(_VOCAB_SIZE), k=num_tokens))
