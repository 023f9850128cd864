"""How models mark their thinking: one entry a format, under vLLM's names of ``--reasoning-parser``."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["FORMATS", "ReasoningFormat"]


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a family of models marks its thinking, which comes first in an answer.

    Whether the chat template opens or closes it is read off the prompt. What is said here holds where it does neither.

    Attributes:
        name: of the format.
        starts: marks before thinking; any one of them.
        ends: marks after it; the first that comes ends it.
        is_assumed: whether a text without marks is thinking that was cut off. Otherwise it is the answer.
    """

    name: str
    starts: tuple[str, ...]
    ends: tuple[str, ...]
    is_assumed: bool = False


_THINK = (("<think>",), ("</think>",))

FORMATS: Mapping[str, ReasoningFormat] = MappingProxyType(
    {
        one.name: one
        for one in (
            ReasoningFormat("deepseek_r1", *_THINK, is_assumed=True),
            ReasoningFormat("deepseek_v3", *_THINK),
            ReasoningFormat("glm45", *_THINK),
            ReasoningFormat(
                "granite",
                ("Here is my thought process:", "Here's my thought process:"),
                ("Here is my response:", "Here's my response:"),
            ),
            ReasoningFormat("mistral", ("[THINK]",), ("[/THINK]",)),
            ReasoningFormat("qwen3", *_THINK),
            ReasoningFormat("seed_oss", ("<seed:think>",), ("</seed:think>",)),
        )
    }
)
