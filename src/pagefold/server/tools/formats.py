"""How models write calls of tools: one entry a format, under vLLM's names of ``--tool-call-parser`` where it has them.

All of them put JSON between the same two marks, so one reader reads them (``reader.py``); what differs is what a
grammar must let through when a call is required.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from pagefold.server.tools.schemas import Tool

__all__ = ["CLOSING", "FORMATS", "OPENING", "ToolFormat", "format_of_template"]

OPENING, CLOSING = "<tool_call>", "</tool_call>"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes calls.

    Attributes:
        name: of the format.
        before, between, after: what stands around calls.
    """

    name: str
    before: str
    between: str
    after: str

    def grammar(self, tools: Sequence[Tool], *, is_parallel: bool) -> str:
        """Return, in Lark's syntax, an output that calls at least one of ``tools``, each with arguments of its schema.

        Each schema is a document of its own, so that its references stay right.
        """
        more = f" ({_quoted(self.between)} call)*" if is_parallel else ""
        heads = [_quoted(f'{{"name": {json.dumps(tool.function.name)}, "arguments": ') for tool in tools]
        rules = [
            f"start: {_quoted(self.before)} call{more} {_quoted(self.after)}",
            "call: " + " | ".join(f'{head} arguments_{at} "}}"' for at, head in enumerate(heads)),
        ]
        for at, tool in enumerate(tools):
            options = {"whitespace_pattern": " ?", "lenient": not tool.function.strict}
            schema = {**tool.function.arguments_schema(), "x-guidance": options}
            rules.append(f"arguments_{at}: %json {json.dumps(schema, ensure_ascii=False)}")
        return "\n".join(rules)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


FORMATS: Mapping[str, ToolFormat] = MappingProxyType(
    {
        "hermes": ToolFormat("hermes", f"{OPENING}\n", f"\n{CLOSING}\n{OPENING}\n", f"\n{CLOSING}"),
        "smollm2": ToolFormat("smollm2", f"{OPENING}[\n", ",\n", f"\n]{CLOSING}"),
    }
)
"""``hermes``: a mark around each call (Hermes 2, Qwen 2.5 and 3). ``smollm2``: one around the list of all."""


def format_of_template(template: str) -> ToolFormat | None:
    """Return the format that a chat template asks the model for, or None if it is none of these."""
    if f"{OPENING}[" in template:
        return FORMATS["smollm2"]
    return FORMATS["hermes"] if OPENING in template else None
