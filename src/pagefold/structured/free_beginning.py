"""FreeBeginning: text that may be anything, before the part that a grammar binds: a model's thinking.

Which tokens write its marks is a matter of the vocabulary: a mark may be a token of its own, which the library keeps
apart from text, and may be written letter by letter all the same. The grammar takes both.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

__all__ = ["FreeBeginning"]

_SPACE = r"/[ \t\r\n]{1,8}/"


@dataclass(frozen=True, slots=True)
class FreeBeginning:
    """What may come before the part of an output that a grammar binds.

    Attributes:
        starts: marks with which it begins; one of them.
        ends: marks with which it ends: the first that comes is the end.
        token_ids: ids of those marks that are tokens of their own.
        is_open: it has begun already, so it is always there; a start mark may come all the same. Otherwise it is there
            if the output begins with a start mark.
        allows_space: some white space may stand between its end and the bound part, to which it means nothing.
    """

    starts: tuple[str, ...]
    ends: tuple[str, ...]
    token_ids: tuple[tuple[str, int], ...]
    is_open: bool
    allows_space: bool

    def before(self, grammar: str, *, may_be_left_out: bool) -> str:
        """Return a grammar, as the library's JSON, of outputs that begin freely and go on as ``grammar`` says.

        Args:
            grammar: one, as Lark or as the library's JSON.
            may_be_left_out: whether the output may begin with the bound part where this is not ``is_open``.
        """
        bound = json.loads(grammar)["grammars"][0] if grammar.startswith("{") else {"lark_grammar": grammar}
        return json.dumps({"grammars": [{"lark_grammar": self._lark(may_be_left_out)}, {**bound, "name": "bound"}]})

    def _lark(self, may_be_left_out: bool) -> str:  # noqa: FBT001 - as before
        end = "|".join(re.escape(mark).replace("/", r"\/") for mark in self.ends)
        space = " SPACE?" if self.allows_space else ""
        beginning = "SPACE? mark"
        if self.is_open:
            start = f"({beginning})? free{space} @bound"
        elif may_be_left_out:
            start = f"SPACE? (mark free{space})? @bound" if self.allows_space else f"({beginning} free)? @bound"
        else:
            start = f"{beginning} free{space} @bound"
        ends = self._tokens(self.ends)
        rules = [
            f"start: {start}",
            "mark: " + " | ".join([*map(_quoted, self.starts), *self._tokens(self.starts)]),
            f"free: by_text{' | by_token' if ends else ''}",
            f"by_text[lazy]: /(?s:.*)({end})/",
            f"SPACE: {_SPACE}",
        ]
        if ends:
            rules += [
                f"by_token: TEXT? ({' | '.join(ends)})",
                f"TEXT: /(?s:.+)/ & ~/(?s:.*)({end})(?s:.*)/",
            ]
        return "\n".join(rules)

    def _tokens(self, marks: tuple[str, ...]) -> list[str]:
        return [f"<[{token_id}]>" for mark, token_id in self.token_ids if mark in marks]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
