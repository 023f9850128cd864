"""Advices: what costs most, as sentences for those whose requests it concerns."""

from __future__ import annotations

import re
from array import array
from typing import TYPE_CHECKING, Any, NamedTuple

from pagefold.observe.advice import Adviser
from pagefold.observe.misses import Cause

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pagefold.observe.advice import Change, Loss, Place
    from pagefold.observe.ledger import Ledger
    from pagefold.observe.request_record import RequestRecord
    from pagefold.server.diagnoses import Diagnoses
    from pagefold.server.explanations import Reader

__all__ = ["Advices"]

WITHIN_S = 3600.0
"""What came in the last hour counts."""

_MOST_SHOWN = 60

_KINDS = {
    "A time": re.compile(r"\d{4}-\d{2}-\d{2}|\d{1,2}:\d{2}(?::\d{2})?|\d{1,2}/\d{1,2}/\d{2,4}|\b1[6-9]\d{8}\b"),
    "An id": re.compile(r"[0-9a-fA-F]{8}-[0-9a-fA-F]{4}|\b[0-9a-f]{12,}\b"),
}

_WHERE = {
    "tools": "the tools",
    "system": "the system prompt",
    "messages": "the messages",
}


class _Texts(NamedTuple):
    """A part that changes.

    Attributes:
        own: of the one request.
        other: of its nearest.
        around: the first with some text on both sides.
        num_before: how many characters of that come before it.
    """

    own: str
    other: str
    around: str
    num_before: int


class Advices:
    """Tells what costs most.

    Args:
        ledger: knows the requests.
        diagnoses: knows of what they consisted.
        decode: makes a text of tokens; None where there is no tokenizer yet.
    """

    def __init__(self, ledger: Ledger, diagnoses: Diagnoses, decode: Callable[[Sequence[int]], str | None]) -> None:
        self._diagnoses = diagnoses
        self._decode = decode
        self._adviser = Adviser(ledger, self._section)

    def look(self, response_id: str) -> None:
        """Look at a response that has ended."""
        self._adviser.look(response_id)

    def advise(self, reader: Reader) -> dict[str, Any]:
        """Return what costs most of the last hour's requests that a reader may see, the worst first."""

        def is_seen(record: RequestRecord) -> bool:
            return reader.may_see(record.tenant)

        advice = self._adviser.advise(is_seen, WITHIN_S)
        return {
            "object": "list",
            "data": [self._told(loss, advice.share(loss), reader) for loss in advice.losses],
            "num_requests": advice.num_requests,
            "computed_tokens": advice.num_tokens,
            "since_s": None if advice.since_s is None else round(advice.since_s, 3),
        }

    def _section(self, record: RequestRecord, other_id: str) -> str:
        """Return what differs of a request and another of its tenant's, by the engine's names for their prompts."""
        own, other = (name.rpartition("-")[0] for name in (record.request_id, other_id))
        return self._diagnoses.section(record.tenant, other, own)

    def _told(self, loss: Loss, share: float, reader: Reader) -> dict[str, Any]:
        place, change = loss.place, loss.change
        num_requests = len(loss.request_ids)
        each = round(loss.num_tokens / num_requests)
        texts = self._texts(change) if change is not None and place.tenant == reader.tenant else None
        costs = f"{each:,} tokens a request, {share:.0%} of all prompt time"
        if change is None:
            terms = f" ({', '.join(place.fields)})" if place.fields else ""
            told = f"Tokens were computed, since {place.cause.told}{terms}: {costs}."
            remedy = place.cause.remedy
        else:
            told, remedy = self._of_change(place, change, texts), _remedy(place)
            told += f" What comes behind is alike and is computed again: {costs}."
        return {
            "cause": place.cause.value,
            "tenant": place.tenant or None if reader.is_admin else None,
            "section": place.section or None,
            "told": told,
            "remedy": remedy,
            "tokens": loss.num_tokens,
            "num_requests": num_requests,
            "tokens_per_request": each,
            "share_of_prompt_time": round(share, 4),
            "token": None if change is None else change.token,
            "request": None if change is None else change.own_id,
            "nearest": None if change is None else change.other_id,
            "own_text": None if texts is None else texts.own,
            "nearest_text": None if texts is None else texts.other,
        }

    def _of_change(self, place: Place, change: Change, texts: _Texts | None) -> str:
        """Return what changes, and where, as a sentence."""
        if place.section == "tools_order":
            return f"tools are sent in changing order, from token {change.token:,} of the prompt on."
        where = f"token {change.token:,} of the prompt"
        if place.section in _WHERE:
            where += f", in {_WHERE[place.section]},"
        if place.is_reordered:
            return f"The same parts come in changing order from {where} on."
        kind = "A text" if texts is None else _kind(texts)
        shown = (
            ""
            if texts is None
            else f": {_shown(texts.own)} here, {_shown(texts.other)} before, in {_shown(texts.around)}"
        )
        return f"{kind} at {where} changes from request to request{shown}."

    def _texts(self, change: Change) -> _Texts | None:
        """Return what differs in both requests, and what it stands in; None where there is no tokenizer."""
        around = array("i", change.around)
        parts = (array("i", change.own), array("i", change.other), around, around[: change.num_before])
        own, other, text, before = (self._decode(part) for part in parts)
        if own is None or other is None or text is None or before is None:
            return None
        return _Texts(own, other, text, len(before))


def _kind(texts: _Texts) -> str:
    """Return what a text that changes seems to be, by what it lies in."""
    first, last = texts.num_before, texts.num_before + max(1, len(texts.own))
    for kind, pattern in _KINDS.items():
        if any(match.start() < last and first < match.end() for match in pattern.finditer(texts.around)):
            return kind
    return "A text"


def _shown(text: str) -> str:
    return repr(text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "...")


def _remedy(place: Place) -> str:
    """Return what would help where prompts change."""
    if place.section == "tools_order" or place.is_reordered:
        return "Send them in the same order always: sort them."
    if place.section == "tools":
        return "Send the same tools always, and say by tool_choice which may be called."
    if place.section == "system":
        return "Put it at the end of the system prompt, or into the last message."
    return Cause.DIFFERS.remedy
