"""RequestRecord: what the ledger remembers of one request; and RequestRecords, the last so many."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from pagefold.kv import TOKEN_BYTES, Namespace
from pagefold.observe.nearest_prompts import NearestPrompts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagefold.events import FetchOutcome, PreemptionCause
    from pagefold.observe.misses import Miss
    from pagefold.observe.nearest_prompts import Nearest

__all__ = ["Preemption", "RequestRecord", "RequestRecords", "Wait"]


class Wait(NamedTuple):
    """How long a request waited for one thing.

    Attributes:
        cause: what for: see :data:`pagefold.events.WaitCause`; ``step`` where the step in flight had to end first,
            ``tier`` where a slow tier was asked.
        seconds: how long.
    """

    cause: str
    seconds: float


class Preemption(NamedTuple):
    """A request gave its memory to another.

    Attributes:
        at_s: when, on the ledger's clock.
        num_tokens: that it had computed.
        request_id: for whom.
        cause: why, as of :class:`~pagefold.events.RequestPreempted`.
    """

    at_s: float
    num_tokens: int
    request_id: str
    cause: PreemptionCause


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One request, with all its samples.

    Attributes:
        number: of requests, from 1.
        request_ids: the engine's names for its samples; the first is its own.
        namespace: of its blocks, by key.
        num_prompt_tokens: of its prompt.
        arrival_s: when it came, on the engine's clock.
        tokens: prompt and output, while it runs; they grow.
        text: its tokens, packed, from when it was let in: of the prompt, and of all when it has ended. Empty when they
            are not remembered any more.
        computes_all: whether all of its prompt is computed, since logprobs are asked for.
        misses: why tokens of its prompt were computed; None before it was let in.
        admins_misses: the same where other tenants' prompts count, if that is something else; for the admin alone.
        num_hit_tokens: of its prompt, that were found.
        num_loaded_tokens: those of them that came from tiers behind the device.
        lookup_s: when it was let in first.
        waits: before that, what for.
        preemptions: what it gave to whom.
        given_up: the last of those of each sample that was not let in again since.
        recomputed: what it computed again behind those.
        fetch: what became of what slow tiers might have had; None where they were not asked.
        fetch_s: how long that was waited for.
        finish_reason: why its first sample ended; None while that has not.
        queue_s, ttft_s, e2e_s: from its arrival until it was scheduled first, to its first token, and to the end of its
            first sample.
        num_output_tokens: of all its samples.
        num_open: samples that have not ended.
    """

    number: int
    request_ids: tuple[str, ...]
    namespace: bytes
    num_prompt_tokens: int
    arrival_s: float
    tokens: array[int]
    text: bytes = b""
    computes_all: bool = False
    misses: tuple[Miss, ...] | None = None
    admins_misses: tuple[Miss, ...] | None = None
    num_hit_tokens: int = 0
    num_loaded_tokens: int = 0
    lookup_s: float = 0.0
    waits: tuple[Wait, ...] = ()
    preemptions: tuple[Preemption, ...] = ()
    given_up: dict[str, Preemption] | None = None
    recomputed: tuple[Miss, ...] = ()
    fetch: FetchOutcome | None = None
    fetch_s: float = 0.0
    finish_reason: str | None = None
    queue_s: float | None = None
    ttft_s: float | None = None
    e2e_s: float | None = None
    num_output_tokens: int = 0
    num_open: int = 1

    @property
    def tenant(self) -> str:
        """Whose it is."""
        return Namespace.from_key(self.namespace).tenant

    @property
    def request_id(self) -> str:
        """The engine's name for it."""
        return self.request_ids[0]

    def goes_on_at(self, position: int) -> bool:
        """Whether whoever asked went on at a position: his prompt did, or what is behind it was changed further on."""
        return position < len(self.text) // TOKEN_BYTES and position != self.num_prompt_tokens

    @property
    def has_ended(self) -> bool:
        """Whether all its samples have."""
        return self.num_open <= 0

    @property
    def num_avoidable_tokens(self) -> int:
        """How many tokens it computed for a cause that something could be done about."""
        misses = (*(self.misses or ()), *self.recomputed)
        return sum(miss.num_tokens for miss in misses if miss.cause.is_avoidable)

    @property
    def num_missed_tokens(self) -> int:
        """How many tokens of its prompt were computed, when it was let in first."""
        return sum(miss.num_tokens for miss in self.misses or ())


_NO_TOKENS: array[int] = array("i")

_MOST_NAMESPACES = 8
"""Of each tenant so many are remembered, the last ones: a prompt may be looked for in each."""


class RequestRecords:
    """The last requests, by number and by id, and their texts. Whoever calls holds a lock.

    Those that have not ended are never dropped, nor are their texts.

    Args:
        most: how many are remembered, beside those that have not ended.
        most_tokens: how many tokens of theirs are.
    """

    def __init__(self, most: int, most_tokens: int) -> None:
        self._most = most
        self._most_tokens = most_tokens
        self._by_number: dict[int, RequestRecord] = {}
        self._by_id: dict[str, RequestRecord] = {}  # samples' ids too
        self._texts: dict[bytes, NearestPrompts] = {}  # by namespace
        self._num_made = 0
        self._ended: OrderedDict[int, RequestRecord] = OrderedDict()  # the first first
        self._with_text: OrderedDict[int, RequestRecord] = OrderedDict()  # those of them that have one
        self._num_tokens = 0  # of those
        self._recent: dict[str, OrderedDict[bytes, None]] = {}  # the last namespaces of each tenant

    def __len__(self) -> int:
        return len(self._by_number)

    def __iter__(self) -> Iterator[RequestRecord]:
        return iter(self._by_number.values())

    def get(self, number: int) -> RequestRecord | None:
        """Return the request of that number, if it is remembered."""
        return self._by_number.get(number)

    def named(self, request_id: str) -> RequestRecord | None:
        """Return the request of that name, or of which that is a sample; the last one, if several had it."""
        return self._by_id.get(request_id)

    def has_others(self, tenant: str) -> bool:
        """Whether requests of other tenants were let in."""
        return len(self._recent) > (tenant in self._recent)

    def namespaces(self, tenant: str | None) -> Iterator[bytes]:
        """Yield the last namespaces of a tenant, the last first; or of each, for None."""
        of = self._recent.values() if tenant is None else (self._recent.get(tenant, OrderedDict()),)
        for recent in of:
            yield from reversed(recent)

    def nearest(self, namespace: bytes, text: bytes) -> Nearest | None:
        """Return the request whose text shares most of a packed text, in its namespace."""
        texts = self._texts.get(namespace)
        return None if texts is None else texts.nearest(text)

    def add(self, request_ids: tuple[str, ...], namespace: bytes, tokens: array[int], num_prompt: int) -> RequestRecord:
        """Remember a new request, with the names of its samples."""
        self._num_made += 1
        record = RequestRecord(
            self._num_made, request_ids, namespace, num_prompt, 0.0, tokens, num_open=len(request_ids)
        )
        self._by_number[record.number] = record
        for request_id in request_ids:
            self._by_id[request_id] = record
        return record

    def let_in(self, record: RequestRecord) -> None:
        """A request was let in: from now on its prompt may be somebody's nearest."""
        if record.text:  # it was let in before, by a step of which nothing is known any more
            return
        record.text = record.tokens[: record.num_prompt_tokens].tobytes()
        recent = self._recent.setdefault(record.tenant, OrderedDict())
        recent[record.namespace] = None
        recent.move_to_end(record.namespace)
        if len(recent) > _MOST_NAMESPACES:
            recent.popitem(last=False)
        self._texts.setdefault(record.namespace, NearestPrompts()).add(record)

    def end(self, request_id: str) -> None:
        """A sample has ended; with the last one of a request, that may be dropped when others come."""
        record = self._by_id.get(request_id)
        if record is None:
            return
        record.num_open -= 1
        if record.num_open:
            return
        if record.text:
            texts = self._texts[record.namespace]
            texts.remove(record)
            record.text = record.tokens.tobytes()
            texts.add(record)
            self._with_text[record.number] = record
            self._num_tokens += len(record.tokens)
        record.tokens = _NO_TOKENS
        self._ended[record.number] = record
        while self._num_tokens > self._most_tokens:
            self._forget_text(next(iter(self._with_text.values())))
        while len(self._ended) > self._most:
            self._drop()

    def _forget_text(self, record: RequestRecord) -> None:
        if self._with_text.pop(record.number, None) is None:
            return
        self._num_tokens -= len(record.text) // TOKEN_BYTES
        texts = self._texts[record.namespace]
        texts.remove(record)
        if not len(texts):
            del self._texts[record.namespace]
        record.text = b""

    def _drop(self) -> None:
        """Drop the first of those that have ended."""
        _, record = self._ended.popitem(last=False)
        self._forget_text(record)
        del self._by_number[record.number]
        for request_id in record.request_ids:
            if self._by_id.get(request_id) is record:
                del self._by_id[request_id]
