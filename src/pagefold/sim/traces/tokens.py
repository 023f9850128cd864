"""Tokens for a trace's ids, and names for blocks of tokens."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagefold.sim.traces.request import TraceRequest

__all__ = ["IdTokens", "name_blocks"]


class IdTokens:
    """Tokens for a trace's ids: an id is one token, as often as it stands for tokens."""

    def __init__(self) -> None:
        self._token_of: dict[int, int] = {}

    def prompt(self, index: int, request: TraceRequest) -> array[int]:
        """Return the prompt of the trace's request ``index``; what no id speaks of is its own."""
        prompt = array("i")
        for each in request.prefix_ids:
            token = self._token_of.setdefault(each, len(self._token_of))
            prompt.extend(array("i", [token]) * request.tokens_per_id)
        prompt.extend(array("i", [-1 - index]) * (request.prompt_tokens - len(prompt)))
        del prompt[request.prompt_tokens :]
        return prompt


def name_blocks(packed: bytes, stride: int, names: dict[tuple[int, bytes], int], root: int = -1) -> list[int]:
    """Return a name for each block of a prompt; two prompts have one in common where they agree up to there.

    Args:
        packed: the prompt's tokens.
        stride: bytes of a block.
        names: those given so far, to which new ones are added.
        root: a negative number; prompts of other roots have no name in common.
    """
    path = []
    name = root
    for start in range(0, len(packed), stride):
        name = names.setdefault((name, packed[start : start + stride]), len(names))
        path.append(name)
    return path
