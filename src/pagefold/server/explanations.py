"""Explanations: what a request's ledger record looks like to those who may see it, and which ids it goes by.

Who asks sees the requests of his own tenant. An id that is unknown, forgotten or another tenant's is one answer.
"""

from __future__ import annotations

import json
import threading
from array import array
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from pagefold.observe.nearest_prompts import common_prefix
from pagefold.server.errors import ExplainOffError, ExplanationNotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from pagefold.engine.foresight import Foreseen
    from pagefold.observe.ledger import Ledger
    from pagefold.observe.misses import Difference, Eviction, Miss
    from pagefold.observe.request_record import RequestRecord

__all__ = ["Explanations", "Reader"]

_MOST_IDS = 4096
_MOST_REFUSALS = 256
_MOST_MESSAGE_BYTES = 4096

_WAITS = {
    "seats": "all places were taken (--max-num-seqs)",
    "memory": "others had the memory that it needed",
    "growth": "what was free was promised to those that run (--admission)",
    "kv_cap": "its tenant had as much of the cache as it may (kv_cap)",
    "prefills": "others had the places among prompts that are partly computed (--max-num-partial-prefills)",
    "tokens": "others had all tokens of the steps (--max-num-batched-tokens)",
    "apart": "a step had failed, and it was looked for whose fault that was",
    "step": "a step was running",
    "forgotten": "it waited so long that what for is forgotten",
    "tier": "a tier behind the device was asked for what it has",
}

_PREEMPTIONS = {
    "memory": "another that ran needed the memory",
    "share": "its tenant had more than its share (--scheduling-policy fair)",
}


class Reader(NamedTuple):
    """Who asks for explanations.

    Attributes:
        tenant: whose requests are his.
        is_admin: whether all are.
        sees_traffic: whether he may see numbers that hang on what all tenants do together.
    """

    tenant: str
    is_admin: bool = False
    sees_traffic: bool = False

    def may_see(self, tenant: str) -> bool:
        """Whether requests of a tenant are for him."""
        return self.is_admin or tenant == self.tenant


_NOBODY = Reader("")
_NOTHING: OrderedDict[str, Any] = OrderedDict()
_Known = TypeVar("_Known")


class _Refusal(NamedTuple):
    """A request that never came to the engine.

    Attributes:
        status: of HTTP.
        message: what it was told.
    """

    status: int
    message: str


class Explanations:
    """Tells why, for whoever may know.

    Args:
        ledger: knows.
        decode: makes a text of tokens; None where there is no tokenizer yet.
    """

    def __init__(self, ledger: Ledger, decode: Callable[[Sequence[int]], str | None]) -> None:
        self._ledger = ledger
        self._decode = decode
        self._lock = threading.Lock()
        self._ids: dict[str, OrderedDict[str, str]] = {}  # by tenant: id of HTTP -> id of the response
        self._refusals: dict[str, OrderedDict[str, _Refusal]] = {}  # by tenant, and id of HTTP

    def ensure_on(self) -> None:
        """Check that anything is remembered.

        Raises:
            ExplainOffError: nothing is.
        """
        if not self._ledger.is_on:
            msg = "This server does not remember why tokens were computed."
            raise ExplainOffError(msg, remedy="Start it without --no-enable-explain.")

    def name(self, tenant: str, http_id: str, response_id: str) -> None:
        """Note the id that a response goes by in the log, and in the header X-Request-Id."""
        with self._lock:
            _put(self._ids, tenant, http_id, response_id, _MOST_IDS)

    def refused(self, tenant: str, http_id: str, status: int, body: bytes) -> None:
        """Note that a request was refused, and what it was told: the body of an error in OpenAI's form."""
        try:
            message = str(json.loads(body)["error"]["message"])
        except (ValueError, KeyError, TypeError):
            message = ""
        with self._lock:
            _put(self._refusals, tenant, http_id, _Refusal(status, message[:_MOST_MESSAGE_BYTES]), _MOST_REFUSALS)

    def explain(self, request_id: str, reader: Reader) -> dict[str, Any]:
        """Return what became of a request and why.

        Args:
            request_id: that of its response, or the one in its header X-Request-Id.
            reader: who asks.

        Raises:
            ExplanationNotFoundError: there is none of that id for him.
        """
        with self._lock:
            refusal = self._of(self._refusals, request_id, reader)
            response_id = self._of(self._ids, request_id, reader) or request_id
        records = self._records(response_id, reader)
        reach = {"reach": self._reach(reader)}
        if records:
            return self._told(response_id, records, reader) | reach
        if refusal is not None:
            return self._told(request_id, [], reader, refusal) | reach
        msg = "No request of yours has that id, as far back as is remembered."
        raise ExplanationNotFoundError(msg, remedy="Ids are those of responses, or of the header X-Request-Id.")

    def foretell(self, token_ids: Sequence[int], foreseen: Foreseen) -> dict[str, Any]:
        """Return what a prompt would find, and why not more: as far as prompts of its own tenant and salt say.

        Args:
            token_ids: the prompt.
            foreseen: what it would find.
        """
        misses = self._ledger.foretell(
            foreseen.namespace,
            array("i", token_ids),
            num_hit_tokens=foreseen.num_hit_tokens,
            num_lost_tokens=foreseen.num_lost_tokens,
            now_s=foreseen.now_s,
            has_tiers=foreseen.has_tiers,
        )
        num_computed = sum(miss.num_tokens for miss in misses)
        by_tier = {"device": foreseen.num_hit_tokens - foreseen.num_host_tokens, "host": foreseen.num_host_tokens}
        return {
            "object": "explanation.foretold",
            "prompt_tokens": len(token_ids),
            "cached_tokens": foreseen.num_hit_tokens,
            "cached_tokens_by_tier": by_tier,
            "computed_tokens": num_computed,
            "prefill_s": _rounded(self._ledger.prefill_s(num_computed)),
            "misses": [self._miss(miss, _NOBODY, _NOBODY.tenant) for miss in misses],
        }

    def misses(self, response_id: str, tenant: str) -> list[dict[str, Any]]:
        """Return why tokens of a tenant's request were computed, one prompt behind the other; none if that is gone."""
        reader = Reader(tenant)
        records = self._records(response_id, reader)
        return [self._miss(miss, reader, tenant) for record in records for miss in record.misses or ()]

    def num_common_tokens(self, one_id: str, other_id: str, tenant: str) -> int | None:
        """Return how many first tokens two requests of a tenant have alike; None where one of them is forgotten."""
        texts = [self._text(response_id, tenant) for response_id in (one_id, other_id)]
        return common_prefix(*texts) if all(texts) else None

    def on_other_terms(self, one_id: str, other_id: str, tenant: str) -> bool:
        """Whether two requests of a tenant are remembered that share nothing, whatever they say."""
        reader = Reader(tenant)
        records = (*self._records(one_id, reader), *self._records(other_id, reader))
        return len({record.namespace for record in records}) > 1

    def worst(self, num: int, reader: Reader) -> dict[str, Any]:
        """Return those of a reader's requests that computed most tokens which need not have been."""
        records = [one for one in self._ledger.all_records() if one.misses is not None and reader.may_see(one.tenant)]
        records.sort(key=lambda one: one.num_avoidable_tokens, reverse=True)
        return self._listed(records[:num], reader)

    def last(self, num: int, reader: Reader) -> dict[str, Any]:
        """Return the last requests of a reader, the last one first."""
        records = [one for one in self._ledger.all_records() if reader.may_see(one.tenant)]
        return self._listed(records[: -num - 1 : -1], reader)

    # Inside.

    def _records(self, request_id: str, reader: Reader) -> list[RequestRecord]:
        """Return the requests of that name that a reader may see."""
        return [record for record in self._ledger.records(request_id) if reader.may_see(record.tenant)]

    def _text(self, response_id: str, tenant: str) -> bytes:
        """Return the first prompt of a tenant's request, and what came behind it, packed; empty if that is gone."""
        return next((record.text for record in self._records(response_id, Reader(tenant))), b"")

    def _listed(self, records: Iterable[RequestRecord], reader: Reader) -> dict[str, Any]:
        data = [self._told(one.request_id, [one], reader) for one in records]
        return {"object": "list", "data": data, "reach": self._reach(reader)}

    def _told(
        self, request_id: str, records: list[RequestRecord], reader: Reader, refusal: _Refusal | None = None
    ) -> dict[str, Any]:
        return {
            "object": "explanation",
            "id": request_id,
            "refused": None if refusal is None else refusal._asdict(),
            "requests": [self._request(record, reader) for record in records],
        }

    def _request(self, record: RequestRecord, reader: Reader) -> dict[str, Any]:
        misses = record.misses or ()
        if reader.is_admin and record.admins_misses is not None:
            misses = record.admins_misses
        return {
            "id": record.request_id,
            "prompt_tokens": record.num_prompt_tokens,
            "cached_tokens": record.num_hit_tokens,
            "cached_tokens_from_tiers": record.num_loaded_tokens,
            "computed_tokens": record.num_missed_tokens,
            "output_tokens": record.num_output_tokens,
            "finish_reason": record.finish_reason,
            "was_let_in": record.misses is not None,
            "queue_s": _rounded(record.queue_s),
            "ttft_s": _rounded(record.ttft_s),
            "e2e_s": _rounded(record.e2e_s),
            "misses": [self._miss(miss, reader, record.tenant) for miss in misses],
            "waits": [
                {"cause": cause, "told": _WAITS[cause], "ms": round(1e3 * seconds, 3)}
                for cause, seconds in record.waits
            ],
            "preemptions": [
                {
                    "tokens": one.num_tokens,
                    "cause": one.cause,
                    "told": _PREEMPTIONS[one.cause],
                    "for": self._visible(one.request_id, reader),
                }
                for one in record.preemptions
            ],
            "recomputed": [self._miss(miss, reader, record.tenant) for miss in record.recomputed],
        }

    def _miss(self, miss: Miss, reader: Reader, owner: str) -> dict[str, Any]:
        """Return why tokens of a tenant's request were computed. Texts are for their owner alone."""
        difference = miss.difference
        return {
            "start": miss.start,
            "end": miss.end,
            "tokens": miss.num_tokens,
            "cause": miss.cause.value,
            "told": miss.cause.told,
            "remedy": miss.cause.remedy or None,
            "fields": list(miss.fields),
            "detail": miss.detail or None,
            "difference": None
            if difference is None
            else self._difference(difference, has_texts=reader.tenant == owner),
            "eviction": None if miss.eviction is None else self._eviction(miss.eviction, reader),
        }

    def _difference(self, difference: Difference, *, has_texts: bool) -> dict[str, Any]:
        before = difference.num_before
        own, other = array("i", difference.own), array("i", difference.other)
        parts = {"text_before": own[:before], "own_text": own[before:], "nearest_text": other[before:]}
        texts = {name: self._decode(part) if has_texts else None for name, part in parts.items()}
        return {"token": difference.token, "nearest": difference.request_id, **texts}

    def _eviction(self, eviction: Eviction, reader: Reader) -> dict[str, Any]:
        return {
            "ago_s": _rounded(eviction.ago_s),
            "policy": eviction.policy or None,
            "score": eviction.score if reader.sees_traffic else None,
            "for": self._visible(eviction.request_id, reader),
        }

    def _visible(self, request_id: str, reader: Reader) -> str | None:
        """Return the id of another request, if a reader may know it."""
        return request_id if self._records(request_id, reader) else None

    def _reach(self, reader: Reader) -> dict[str, Any]:
        """Return for how many seconds back nothing was forgotten; None where nothing ever was, or he may not know."""
        return {"complete_for_s": _rounded(self._ledger.reach().paths_since_s) if reader.sees_traffic else None}

    @staticmethod
    def _of(known: dict[str, OrderedDict[str, _Known]], request_id: str, reader: Reader) -> _Known | None:
        """Return what is known of an id; for the admin of any tenant."""
        found = known.get(reader.tenant, _NOTHING).get(request_id)
        if found is None and reader.is_admin:
            found = next((of[request_id] for of in known.values() if request_id in of), None)
        return found


def _put(known: dict[str, OrderedDict[str, _Known]], tenant: str, request_id: str, what: _Known, most: int) -> None:
    """Note something of a tenant's id; of each tenant so many are remembered."""
    of = known.setdefault(tenant, OrderedDict())
    of[request_id] = what
    if len(of) > most:
        of.popitem(last=False)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
