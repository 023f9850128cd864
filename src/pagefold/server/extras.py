"""Extras: what vLLM's fields add to answers of completions and chats: token ids, logprobs of prompts, usage so far."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pagefold.server.told_prompt import prompt_logprobs

if TYPE_CHECKING:
    from pagefold.engine.outputs import OutputDelta
    from pagefold.server.generation import Generation, Output
    from pagefold.server.schemas import GenerationRequest

__all__ = ["Extras"]


class Extras:
    """What is added to one answer.

    What concerns a prompt stands in each of its choices where an answer may have several prompts, as completions' do;
    else beside the choices.

    Args:
        asked: says what.
        generation: has it.
    """

    def __init__(self, asked: GenerationRequest, generation: Generation) -> None:
        self._asked = asked
        self._generation = generation
        self._in_choices = asked.has_many_prompts
        self._begun: set[int] = set()  # choices of a stream that have been told of

    def head(self) -> dict[str, Any]:
        """Return what stands beside the choices, in the whole answer and in every chunk."""
        return self._asked.told_back()

    def whole(self) -> dict[str, Any]:
        """Return what stands beside the choices of a whole answer only."""
        return {} if self._in_choices else self._prompt(self._generation.outputs[0])

    def choice(self, output: Output) -> dict[str, Any]:
        """Return what is added to a choice."""
        told = self._prompt(output) if self._in_choices else {}
        if self._asked.return_token_ids:
            told["token_ids"] = list(output.token_ids)
        return told

    def chunk(self, index: int, delta: OutputDelta | None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return what is added to a chunk beside its choice, and to its choice; before any delta, with None."""
        beside: dict[str, Any] = {}
        choice: dict[str, Any] = {}
        output = self._generation.outputs[index]
        if self._asked.return_token_ids:
            if index not in self._begun and (self._in_choices or not self._begun):
                (choice if self._in_choices else beside)["prompt_token_ids"] = list(output.prompt_token_ids)
            if delta is not None:
                choice["token_ids"] = list(delta.token_ids)
        self._begun.add(index)
        if self._asked.continuous_usage:
            beside["usage"] = self._generation.usage_of(index)
        return beside, choice

    @property
    def tells_every_token(self) -> bool:
        """Whether a stream has something to tell of a token that has no text yet."""
        return self._asked.return_token_ids

    def _prompt(self, output: Output) -> dict[str, Any]:
        told: dict[str, Any] = {}
        if self._asked.return_token_ids:
            told["prompt_token_ids"] = list(output.prompt_token_ids)
        if self._asked.prompt_logprobs is not None and output.prompt_logprobs is not None:
            told["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs, self._asked.prompt_logprobs)
        return told
