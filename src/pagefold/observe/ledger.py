"""Ledger: a subscriber of events that remembers why. Whoever wants to know asks it by a request's id.

It remembers which paths of blocks the cache has had (``seen_paths.py``) and the last requests
(``request_record.py``); when a request is let in, why each token behind what was found is computed
(``classify.py``). All of it is bounded, and how far back it reaches is told.

Events come on the engine's thread; whoever asks does so on another.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict, deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from pagefold.events import (
    BlockEvicted,
    BlocksPublished,
    CacheConfigured,
    CacheReset,
    EvictionPolicySwitched,
    FetchEnded,
    FirstToken,
    OutputFinished,
    PathForgotten,
    PathsDistrusted,
    PinDropped,
    PrefixLookup,
    PrefixMissed,
    RequestAdded,
    RequestFinished,
    RequestPreempted,
    StepApplied,
    StepPlanned,
    TierRead,
    ignore,
)
from pagefold.kv import TOKEN_BYTES
from pagefold.kv.names import digest_of
from pagefold.observe.block_uses import BlockUses
from pagefold.observe.classify import Lookup, classify, keys_of
from pagefold.observe.misses import Cause, Miss
from pagefold.observe.request_record import Preemption, RequestRecord, RequestRecords, Wait
from pagefold.observe.seen_paths import BYTES_PER_PATH, Mark, SeenPaths, State, key_of
from pagefold.observe.subscriber import Subscriber

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from pagefold.events import Emit
    from pagefold.kv.block import Node
    from pagefold.observe.nearest_prompts import Nearest

__all__ = ["GHOSTS_PER_BLOCK", "MAX_BYTES_PER_ENTRY", "Ledger", "Reach"]

_log = logging.getLogger(__name__)

GHOSTS_PER_BLOCK = 4
"""Paths that are gone are remembered for so many times as many blocks as there are."""

MAX_BYTES_PER_ENTRY = 64
"""What an entry may take, a block's or a ghost's, the tokens of the last requests included."""

_LEAST_REQUESTS, _MOST_REQUESTS = 256, 4096
_TEXT_BYTES_PER_ENTRY = 11
_RECORD_BYTES = 2000
"""About what a request takes beside its text."""
_MOST_TIER_MISSES = 4096
_MOST_TURNS = 4096
_LEAST_PREFILL, _LEAST_PREFILL_A_ROW = 64, 16
"""A step of fewer tokens, or of fewer a sequence, says little of what prefills take."""
_BY_SESSION = {"superseded": Mark.SUPERSEDED, "session": Mark.SESSION}
"""Rules of evictions that sessions are the reason of, to the marks of what goes."""

_WEIGHT = 0.2
"""Of the newest measurement in the mean."""


class Reach(NamedTuple):
    """How far back a ledger reaches.

    Attributes:
        num_paths, max_paths: paths that are remembered, and how many may be.
        num_requests: that are remembered.
        num_bytes: what paths and tokens of requests take at most.
        paths_since_s: so many seconds ago what was forgotten had left the cache at the latest; None where nothing was
            forgotten.
    """

    num_paths: int
    max_paths: int
    num_requests: int
    num_bytes: int
    paths_since_s: float | None


class Ledger(Subscriber):
    """Remembers causes, from when it is told that there is a cache.

    Args:
        clock: seconds, the engine's.
        is_on: whether it notes anything.
        tell: where :class:`~pagefold.events.PrefixMissed` goes.

    Attributes:
        is_on: as above.
        paths: which paths the cache has had.
        publishes: whether anything is ever cached.
        block_size: tokens a block.
        uses: which blocks requests use, for curves; told by the ledger, since both go by keys of paths.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, is_on: bool = True, tell: Emit = ignore) -> None:
        on: dict[type, Callable[[Any], None]] = {
            BlockEvicted: self._on_block_evicted,
            BlocksPublished: self._on_blocks_published,
            CacheConfigured: self._begin,
            CacheReset: self._on_cache_reset,
            EvictionPolicySwitched: self._on_policy_switched,
            FetchEnded: self._on_fetch_ended,
            FirstToken: self._on_first_token,
            OutputFinished: self._on_output_finished,
            PathForgotten: self._on_path_forgotten,
            PathsDistrusted: self._on_paths_distrusted,
            PinDropped: self._on_pin_dropped,
            PrefixLookup: self._on_prefix_lookup,
            RequestAdded: self._on_request_added,
            RequestFinished: self._on_request_finished,
            RequestPreempted: self._on_request_preempted,
            StepApplied: self._on_step_applied,
            StepPlanned: self._on_step_planned,
            TierRead: self._on_tier_read,
        }
        failure = "the ledger has failed at %s: later requests are not explained"
        super().__init__(on if is_on else {}, _log, failure)
        self._clock = clock
        self._tell = tell
        self.is_on = is_on
        self.uses = BlockUses(clock)
        self._begin(CacheConfigured({}))
        self._tier_misses: OrderedDict[int, tuple[str, float]] = OrderedDict()  # by path: what, and when
        self._planned: StepPlanned | None = None
        self._token_s: float | None = None  # of prefills
        self._turns: deque[tuple[float, str, frozenset[str]]] = deque(  # since when the queue waits for what,
            maxlen=_MOST_TURNS  # and whose tenants for room below their caps
        )

    def _begin(self, event: CacheConfigured) -> None:
        """Begin anew, with room for a cache of that size."""
        self.uses.begin(event)
        num_entries = (1 + GHOSTS_PER_BLOCK) * max(1, event.num_blocks)
        self.paths = SeenPaths(num_entries)
        self._policy = event.eviction_policy
        self._turns_of_policies: deque[tuple[float, str]] = deque(maxlen=_MOST_TURNS)  # since when, and whose
        self.publishes = event.publishes
        self.block_size = max(1, event.block_size)
        most_tokens = num_entries * _TEXT_BYTES_PER_ENTRY // TOKEN_BYTES
        left = MAX_BYTES_PER_ENTRY - BYTES_PER_PATH - _TEXT_BYTES_PER_ENTRY
        most = num_entries * left // _RECORD_BYTES
        self._records = RequestRecords(max(_LEAST_REQUESTS, min(most, _MOST_REQUESTS)), most_tokens)

    # What is asked.

    def records(self, request_id: str) -> list[RequestRecord]:
        """Return the requests of that name: one, or all that the prompts of one HTTP request became."""
        with self._lock:
            record = self._records.named(request_id)
            if record is not None:
                return [record]
            found: list[RequestRecord] = []
            while (record := self._records.named(f"{request_id}-{len(found)}")) is not None:
                found.append(record)
            return found

    def all_records(self) -> list[RequestRecord]:
        """Return all requests that are remembered, the first first."""
        with self._lock:
            return list(self._records)

    def reach(self) -> Reach:
        """Return how far back it reaches."""
        with self._lock:
            lost = self.paths.lost_until_s
            since_s = None if lost is None else max(0.0, self._clock() - lost)
            num_bytes = self.paths.capacity * MAX_BYTES_PER_ENTRY
            return Reach(self.paths.num_paths, self.paths.capacity, len(self._records), num_bytes, since_s)

    def foretell(  # noqa: PLR0913 - a lookup, by name
        self,
        namespace: bytes,
        tokens: array[int],
        *,
        num_hit_tokens: int,
        num_lost_tokens: int,
        now_s: float,
        has_tiers: bool,
    ) -> tuple[Miss, ...]:
        """Return why tokens of a prompt would be computed if it were sent now; nothing is noted of it.

        Only prompts of the same tenant and salt count.

        Args:
            namespace: key of its namespace.
            tokens: of it.
            num_hit_tokens: that would be found.
            num_lost_tokens: of :class:`~pagefold.events.PrefixLookup`.
            now_s: the time.
            has_tiers: whether the device has tiers behind it.
        """
        record = RequestRecord(0, ("",), namespace, len(tokens), now_s, tokens)
        lookup = Lookup(
            record,
            tokens,
            len(tokens),
            num_hit_tokens,
            num_lost_tokens,
            0,
            now_s,
            has_tiers,
            self.block_size,
            sees="salt",
        )
        keys = keys_of(namespace, tokens, len(tokens), self.block_size)
        with self._lock:
            return classify(lookup, keys, self)

    def now_s(self) -> float:
        """Return the time, on the clock of its records."""
        return self._clock()

    def prefill_s(self, num_tokens: int) -> float | None:
        """Return how long so many tokens take to be computed, by what prefills took lately; None before any."""
        return None if self._token_s is None else num_tokens * self._token_s

    # What classify() asks, under the lock.

    def number(self, number: int) -> RequestRecord | None:
        """Return a request by its number, if it is remembered."""
        return self._records.get(number)

    def nearest(self, namespace: bytes, text: bytes) -> Nearest | None:
        """Return the request before whose prompt shares most of a packed text, in its namespace."""
        return self._records.nearest(namespace, text)

    def namespaces(self, tenant: str | None) -> Iterable[bytes]:
        """Return the last namespaces of a tenant, the last first; or of each, for None."""
        return self._records.namespaces(tenant)

    def policy_at(self, when_s: float) -> str:
        """Return the name of the eviction policy that chose at a time: whom ``auto`` followed then, if that is it."""
        turns = self._turns_of_policies
        return next((policy for since_s, policy in reversed(turns) if since_s <= when_s), self._policy)

    def tier_miss(self, key: int, since_s: float) -> str:
        """Return what a tier found that was asked for a path since then; empty for nothing."""
        cause, at_s = self._tier_misses.get(key, ("", 0.0))
        return cause if at_s >= since_s else ""

    # Requests.

    def _on_request_added(self, event: RequestAdded) -> None:
        record = self._records.add(event.sample_ids, event.namespace, event.token_ids[0], event.num_prompt_tokens)
        record.arrival_s = event.arrival_s
        record.computes_all = event.has_prompt_logprobs

    def _on_prefix_lookup(self, event: PrefixLookup) -> None:
        record = self._records.named(event.request_id)
        if record is None:
            return
        if event.after_preemption and record.misses is not None:
            self._note_return(record, event)
            return
        record.lookup_s = event.planned_s
        record.num_hit_tokens = event.num_hit_tokens
        record.num_loaded_tokens = event.num_loaded_tokens
        record.waits = self._waits(record)
        keys = self._keys(record, event)
        lookup = Lookup(
            record,
            record.tokens,
            event.num_tokens,
            event.num_hit_tokens,
            event.num_lost_tokens,
            event.num_declined_tokens,
            event.planned_s,
            event.has_tiers,
            self.block_size,
        )
        record.misses = classify(lookup, keys, self)
        self._tell_missed(event.request_id, record.misses)
        if self._records.has_others(record.tenant):
            of_all = classify(replace(lookup, sees="all"), keys, self)
            record.admins_misses = of_all if of_all != record.misses else None
        self._expect(record, keys, event)
        if not record.computes_all:
            self.uses.look_up(record.number, record.tenant, keys, event.num_tokens)

    def _note_return(self, record: RequestRecord, event: PrefixLookup) -> None:
        """A request is let in again that had to give its memory to another."""
        lost = None if record.given_up is None else record.given_up.pop(event.request_id, None)
        if lost is None:  # it waited again since a step had failed
            return
        record.waits += (Wait("memory", max(0.0, event.planned_s - lost.at_s)),)
        end = min(lost.num_tokens, event.num_tokens)
        if event.num_hit_tokens < end:
            again = Miss(event.num_hit_tokens, end, Cause.PREEMPTED)
            record.recomputed += (again,)
            self._tell_missed(event.request_id, (again,))

    def _tell_missed(self, request_id: str, misses: Iterable[Miss]) -> None:
        """Tell of what is noted how many tokens each cause has."""
        num_tokens: dict[str, int] = {}
        for miss in misses:
            num_tokens[miss.cause.value] = num_tokens.get(miss.cause.value, 0) + miss.num_tokens
        self._tell(PrefixMissed(request_id, num_tokens))

    def _keys(self, record: RequestRecord, event: PrefixLookup) -> list[int]:
        """Return by what the paths of a prompt's full blocks are known. What was found is digested in the tree."""
        num_found, node = event.num_hit_tokens // self.block_size, event.tail
        while node is not None and node.depth >= num_found:
            node = node.parent
        if node is None or node.depth != num_found - 1:
            return keys_of(record.namespace, record.tokens, event.num_tokens, self.block_size)
        digest = digest_of(node)
        keys = keys_of(record.namespace, record.tokens, event.num_tokens, self.block_size, digest, num_found)
        while node is not None and node.depth >= 0:
            keys[node.depth] = key_of(node.digest)
            node = node.parent
        return keys

    def _expect(self, record: RequestRecord, keys: list[int], event: PrefixLookup) -> None:
        """Note what a request that was let in will compute."""
        for key in keys[event.num_hit_tokens // self.block_size :]:
            self.paths.expect(self.paths.enter(key), record.number)
        self._records.let_in(record)

    def _on_fetch_ended(self, event: FetchEnded) -> None:
        record = self._records.named(event.request_id)
        if record is not None and record.misses is None:
            record.fetch = event.outcome
            record.fetch_s += event.waited_s

    def _on_first_token(self, event: FirstToken) -> None:
        record = self._records.named(event.request_id)
        if record is not None:
            record.ttft_s = event.ttft_s

    def _on_request_finished(self, event: RequestFinished) -> None:
        record = self._records.named(event.request_id)
        if record is not None:
            record.num_output_tokens += event.num_output_tokens
            if event.request_id == record.request_id:
                record.finish_reason = event.finish_reason
            self._records.end(event.request_id)
            if record.has_ended:
                self.uses.end(record.number)

    def _on_output_finished(self, event: OutputFinished) -> None:
        record = self._records.named(event.request_id)
        if record is None or event.request_id != record.request_id:
            return
        record.finish_reason = event.finish_reason
        record.queue_s, record.e2e_s = event.queue_s, event.e2e_s
        if record.misses is None:  # it was never let in: it has waited all its life
            record.lookup_s = record.arrival_s + event.e2e_s
            record.waits = self._waits(record)

    def _on_request_preempted(self, event: RequestPreempted) -> None:
        record = self._records.named(event.request_id)
        if record is not None:
            given_up = Preemption(self._clock(), event.num_computed_tokens, event.cause_request_id, event.cause)
            record.preemptions += (given_up,)
            record.given_up = {**(record.given_up or {}), event.request_id: given_up}

    # The queue.

    def _on_step_planned(self, event: StepPlanned) -> None:
        what = event.waits_for or "step"
        if not self._turns or self._turns[-1][1:] != (what, event.capped):
            self._turns.append((event.now_s, what, event.capped))
        self._planned = event

    def _on_step_applied(self, event: StepApplied) -> None:
        planned = self._planned
        if planned is None or planned.step_id != event.step_id or planned.num_tokens < _LEAST_PREFILL:
            return
        if planned.num_rows * _LEAST_PREFILL_A_ROW > planned.num_tokens:
            return
        token_s = max(0.0, self._clock() - planned.now_s) / planned.num_tokens
        self._token_s = token_s if self._token_s is None else self._token_s + _WEIGHT * (token_s - self._token_s)

    def _waits(self, record: RequestRecord) -> tuple[Wait, ...]:
        """Return what a request waited for until it was let in, of each thing how long."""
        seconds: dict[str, float] = {}
        left_s = record.fetch_s
        end_s = record.lookup_s
        if left_s:
            seconds["tier"] = min(left_s, end_s - record.arrival_s)
        begin_s = record.arrival_s + left_s  # blocks are brought first
        for at_s, of_all, capped in reversed(self._turns):
            what = "kv_cap" if record.tenant in capped else of_all
            from_s = max(at_s, begin_s)
            if end_s > from_s:
                seconds[what] = seconds.get(what, 0.0) + end_s - from_s
                end_s = from_s
            if at_s <= begin_s:
                break
        if end_s > begin_s:
            what = "forgotten" if len(self._turns) == _MOST_TURNS else "step"
            seconds[what] = seconds.get(what, 0.0) + end_s - begin_s
        return tuple(Wait(cause, spent_s) for cause, spent_s in seconds.items())

    # Blocks.

    def _on_blocks_published(self, event: BlocksPublished) -> None:
        paths, now_s = self.paths, self._clock()
        keys = [key_of(digest_of(node)) for node in event.nodes]
        for key in keys:
            paths.put(paths.enter(key), State.CACHED, now_s)
        record = self._records.named(event.owner)
        if record is not None and keys:
            self.uses.publish(record.number, event.owner, event.nodes[0].depth, keys)

    def _on_block_evicted(self, event: BlockEvicted) -> None:
        if event.node is None or event.cause != "allocation":
            return
        causer = self._records.named(event.asked_by)
        number = 0 if causer is None else causer.number
        entry = self.paths.find(key_of(digest_of(event.node)))
        if entry < 0:
            return
        if event.node.attached:
            self.paths.blame(entry, number)
        else:
            self.paths.evict(entry, self._clock(), number, event.score)
            if event.rule in _BY_SESSION:
                self.paths.mark(entry, _BY_SESSION[event.rule])

    def _on_policy_switched(self, event: EvictionPolicySwitched) -> None:
        self._turns_of_policies.append((self._clock(), event.policy))
        self.uses.follow(event.policy)

    def _on_path_forgotten(self, event: PathForgotten) -> None:
        causer = self._records.named(event.asked_by)
        for entry in self._entries((event.node,)):
            self.paths.evict(entry, self._clock(), 0 if causer is None else causer.number, None)

    def _on_cache_reset(self, event: CacheReset) -> None:  # noqa: ARG002 - it tells nothing but that
        self.paths.reset(self._clock())

    def _on_paths_distrusted(self, event: PathsDistrusted) -> None:
        for entry in self._entries(event.nodes):
            self.paths.put(entry, State.DISTRUSTED, self._clock())

    def _on_pin_dropped(self, event: PinDropped) -> None:
        if event.cause != "expired" or event.tail is None:
            return
        path: list[Node] = []
        node: Node | None = event.tail
        while node is not None and node.parent is not None:
            path.append(node)
            node = node.parent
        for entry in self._entries(path):
            self.paths.mark(entry, Mark.PIN_EXPIRED)

    def _on_tier_read(self, event: TierRead) -> None:
        now_s = self._clock()
        for digest, cause in event.missed:
            self._tier_misses[key_of(digest)] = (cause, now_s)
        while len(self._tier_misses) > _MOST_TIER_MISSES:
            self._tier_misses.popitem(last=False)

    def _entries(self, nodes: Sequence[Node]) -> Iterator[int]:
        """Yield the entries of those nodes whose paths are remembered."""
        for node in nodes:
            entry = self.paths.find(key_of(digest_of(node)))
            if entry >= 0:
                yield entry
