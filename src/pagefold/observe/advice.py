"""Advice: what costs most of what the last requests computed, and could be had from the cache.

What the ledger remembers of requests is added up by cause. Of prompts that differ from their nearest only what comes
again behind the difference counts (``changing_part.py``): that two questions differ is no fault of anybody's.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from pagefold.kv import TOKEN_BYTES
from pagefold.observe.changing_part import changing_part
from pagefold.observe.misses import Cause

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pagefold.observe.ledger import Ledger
    from pagefold.observe.misses import Miss
    from pagefold.observe.request_record import RequestRecord

__all__ = ["Advice", "Adviser", "Change", "Loss", "Place"]

_LEAST_SHARE = 0.01
_LEAST_REQUESTS = 2
_MOST = 10
_NEAR = 32
"""Differences so many tokens apart are one place."""
_MOST_COMPARED, _MOST_A_SECOND = 256, 20
"""Pairs of prompts that are compared at once, and in the long run: what is more is not looked at."""
_MOST_OF_ONE = 4
"""Prompts of one request that are compared when it ends: others wait meanwhile."""
_MOST_KEPT = 4096
_AROUND, _MOST_SHOWN = 8, 32
"""Tokens that are kept of a part that changes: on both sides of it, and of itself."""


class Change(NamedTuple):
    """Two prompts that differ in a part and go on alike.

    Attributes:
        token: the first that differs.
        num_common: how many tokens behind it are alike.
        is_reordered: whether the same parts stand in another order.
        section: of the request that it is in: see :class:`Adviser`.
        own_id, other_id: of both requests.
        own, other: the first tokens of the first part that differs, in both, packed.
        around: those of the one with some before and behind it, packed.
        num_before: how many of these come before it.
    """

    token: int
    num_common: int
    is_reordered: bool
    section: str
    own_id: str
    other_id: str
    own: bytes
    other: bytes
    around: bytes
    num_before: int


class Place(NamedTuple):
    """What a loss is of; equal ones are one.

    Attributes:
        tenant: whose.
        cause: why.
        fields: in which a namespace differs.
        section: of the request that changes, for ``DIFFERS``: see :class:`Adviser`.
        is_reordered: whether its parts stand in another order.
    """

    tenant: str
    cause: Cause
    fields: tuple[str, ...] = ()
    section: str = ""
    is_reordered: bool = False


@dataclass(slots=True)
class Loss:
    """Tokens that requests computed for one cause.

    Attributes:
        place: what of.
        num_tokens: how many.
        seconds: about how long that took, of those requests whose prefill's time is known.
        request_ids: whose.
        change: that of the newest request; None for other causes.
    """

    place: Place
    num_tokens: int = 0
    seconds: float = 0.0
    request_ids: set[str] = field(default_factory=set)
    change: Change | None = None

    def add(self, record: RequestRecord, num_tokens: int, seconds: float) -> None:
        """Count tokens of a request, and how long they took."""
        self.num_tokens += num_tokens
        self.seconds += seconds
        self.request_ids.add(record.request_id)


class Advice(NamedTuple):
    """What costs most, the worst first.

    Attributes:
        losses: one for each cause, and each place of a prompt that changes.
        num_requests: that were looked at.
        num_tokens: that these computed of their prompts, with what they computed twice.
        seconds: that their prefills took.
        since_s: how long ago the first of them came; None for none.
    """

    losses: tuple[Loss, ...]
    num_requests: int
    num_tokens: int
    seconds: float
    since_s: float | None

    def share(self, loss: Loss) -> float:
        """Return what share of all prompts' time a loss is; of their tokens, where no time is known."""
        if self.seconds > 0:
            return loss.seconds / self.seconds
        return loss.num_tokens / self.num_tokens if self.num_tokens else 0.0


class Adviser:
    """Adds up what the ledger remembers.

    Args:
        ledger: of requests.
        section_of: what of a request's body differs from another's, by that one's id: ``tools``, ``tools_order``,
            ``system``, ``messages``, or nothing that is known: an empty text.
    """

    def __init__(self, ledger: Ledger, section_of: Callable[[RequestRecord, str], str]) -> None:
        self._ledger = ledger
        self._section_of = section_of
        self._changes: OrderedDict[int, Change | None] = OrderedDict()  # of requests that were compared, by number
        self._lock = threading.Lock()
        self._num_left, self._counted_s = float(_MOST_COMPARED), ledger.now_s()

    def look(self, request_id: str) -> None:
        """Look at a request that has ended, while its text and its nearest's are remembered; at its last prompts."""
        self._compare(self._ledger.records(request_id)[-_MOST_OF_ONE:])

    def advise(self, is_seen: Callable[[RequestRecord], bool], within_s: float) -> Advice:
        """Return what costs most of those requests.

        Args:
            is_seen: whether a request counts.
            within_s: those that came so long ago at most do.
        """
        now_s = self._ledger.now_s()
        records = [
            record
            for record in self._ledger.all_records()
            if record.misses is not None and now_s - record.arrival_s <= within_s and is_seen(record)
        ]
        self._compare(records)
        losses: dict[Place, Loss] = {}
        changing: dict[Place, list[tuple[RequestRecord, Change]]] = {}
        num_tokens, seconds = 0, 0.0
        for record in records:
            num_tokens += record.num_missed_tokens
            seconds += _prefill_s(record)
            for miss in record.misses or ():
                if miss.cause is not Cause.DIFFERS:
                    _count(losses, record, miss, _seconds_of(record, miss.num_tokens))
            for miss in record.recomputed:  # no part of its first prefill: as long as others took
                again_s = self._ledger.prefill_s(miss.num_tokens) or 0.0
                num_tokens += miss.num_tokens
                seconds += again_s
                _count(losses, record, miss, again_s)
            change = self._changes.get(record.number)
            if change is not None:
                place = Place(record.tenant, Cause.DIFFERS, (), change.section, change.is_reordered)
                changing.setdefault(place, []).append((record, change))
        found = [*losses.values(), *(loss for place, changes in changing.items() for loss in _by_place(place, changes))]
        since_s = now_s - min(record.arrival_s for record in records) if records else None
        advice = Advice((), len(records), num_tokens, seconds, since_s)
        worth = [
            loss for loss in found if len(loss.request_ids) >= _LEAST_REQUESTS and advice.share(loss) >= _LEAST_SHARE
        ]
        worth.sort(key=lambda loss: (advice.share(loss), loss.num_tokens), reverse=True)
        return advice._replace(losses=tuple(worth[:_MOST]))

    def _compare(self, records: Sequence[RequestRecord]) -> None:
        """Compare those with their nearest that have not been yet, the last ones first."""
        for record in reversed(records):
            miss = next((miss for miss in record.misses or () if miss.difference is not None), None)
            if miss is None or record.number in self._changes:
                continue
            if not self._may_compare():
                return
            change = self._change(record, miss)
            with self._lock:
                self._changes[record.number] = change
                while len(self._changes) > _MOST_KEPT:
                    self._changes.popitem(last=False)

    def _may_compare(self) -> bool:
        """Count another pair; whether that is not too many."""
        now_s = self._ledger.now_s()
        with self._lock:
            earned = (now_s - self._counted_s) * _MOST_A_SECOND
            self._num_left, self._counted_s = min(_MOST_COMPARED, self._num_left + earned), now_s
            if self._num_left < 1:
                return False
            self._num_left -= 1
            return True

    def _change(self, record: RequestRecord, miss: Miss) -> Change | None:
        """Return what changes between a request and its nearest; None where nothing comes again, or it is forgotten."""
        assert miss.difference is not None
        token, other_id = miss.difference.token, miss.difference.request_id
        own = record.text[: record.num_prompt_tokens * TOKEN_BYTES]  # an answer is not sent
        other = next((one.text for one in self._ledger.records(other_id)), b"")
        part = changing_part(own, other, token) if own and other else None
        if part is None:
            return None
        span = part.spans[0]
        return Change(
            token,
            part.num_common,
            part.is_reordered,
            self._section_of(record, other_id),
            record.request_id,
            other_id,
            _tokens(own, token, min(span.own_end, token + _MOST_SHOWN)),
            _tokens(other, token, min(span.other_end, token + _MOST_SHOWN)),
            _tokens(own, max(0, token - _AROUND), min(span.own_end, token + _MOST_SHOWN) + _AROUND),
            min(token, _AROUND),
        )


def _tokens(packed: bytes, start: int, end: int) -> bytes:
    return packed[start * TOKEN_BYTES : end * TOKEN_BYTES]


def _count(losses: dict[Place, Loss], record: RequestRecord, miss: Miss, seconds: float) -> None:
    """Count tokens that something could be done about."""
    if miss.cause.is_avoidable:
        place = Place(record.tenant, miss.cause, miss.fields)
        losses.setdefault(place, Loss(place)).add(record, miss.num_tokens, seconds)


def _by_place(place: Place, changes: Iterable[tuple[RequestRecord, Change]]) -> list[Loss]:
    """Return a loss for each place of prompts in which they change: tokens that lie near each other are one."""
    losses: list[Loss] = []
    first = newest = -1
    for record, change in sorted(changes, key=lambda one: one[1].token):
        if not losses or change.token - first > _NEAR:
            losses.append(Loss(place))
            first, newest = change.token, -1
        num_tokens = min(change.num_common, record.num_missed_tokens)
        losses[-1].add(record, num_tokens, _seconds_of(record, num_tokens))
        if record.number > newest:
            losses[-1].change, newest = change, record.number
    return losses


def _seconds_of(record: RequestRecord, num_tokens: int) -> float:
    """Return how long so many of the tokens took that a request computed when it was let in first."""
    return _prefill_s(record) * num_tokens / record.num_missed_tokens if record.num_missed_tokens else 0.0


def _prefill_s(record: RequestRecord) -> float:
    """Return how long a request's prompt took; 0 where that is not known."""
    return 0.0 if record.ttft_s is None else max(0.0, record.ttft_s - (record.queue_s or 0.0))
