"""The overview counts what a real scheduler and core did: as their events, counted one by one, say."""

from __future__ import annotations

from collections import Counter
from random import Random
from typing import TYPE_CHECKING

import pytest
from ledger_house import House

from pagefold.engine.status import EngineStatus
from pagefold.events import BlockEvicted, CacheConfigured, OutputFinished, PrefixLookup, TierRead, TierWritten
from pagefold.kv import Namespace
from pagefold.observe.hot_prefixes import HotPrefixes
from pagefold.observe.misses import Cause
from pagefold.observe.overview import Overview
from pagefold.observe.timeline import BlockUse
from pagefold.request import WarmUp

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.events import Event
    from pagefold.observe.overview import Seen

TEXT = list(range(100, 140))


class Watched(House):
    """With an overview behind the ledger."""

    def __init__(self, num_blocks: int = 64, block_size: int = 4, **settings: object) -> None:
        self.overview: Overview | None = None
        super().__init__(num_blocks, block_size, listen=self.listen, **settings)  # type: ignore[arg-type]
        self.overview = Overview(self.ledger, lambda: self.clock.now_s)
        self.overview(CacheConfigured({}, num_blocks, block_size, "lru"))
        self.overview.watch(lambda: EngineStatus.of(self.scheduler))

    def listen(self, event: Event) -> None:
        if self.overview is not None:
            self.overview(event)

    def seen(self) -> Seen:
        assert self.overview is not None
        assert not self.overview.has_failed
        seen = self.overview.see()
        assert seen is not None
        return seen

    def end(self, name: str, **what: object) -> None:
        """Tell what an engine tells of a request that has ended."""
        fields = {"prefill_s": 2.0, "decode_s": 3.0, "queue_s": 1.0, "e2e_s": 6.0} | what
        self.emit(OutputFinished(name, "length", 40, 0, 7, **fields))  # type: ignore[arg-type]


def total(counts: Sequence[float]) -> int:
    return int(sum(counts))


def sums(series: dict[str, list[float]]) -> dict[str, int]:
    return {label: total(counts) for label, counts in series.items()}


@pytest.mark.parametrize("seed", range(5))
def test_it_counts_what_happened(seed: int) -> None:
    random = Random(seed)
    house = Watched(num_blocks=40)
    prompts = [[*range(random.choice((100, 200)), 300 + random.randrange(9), 7)] for _ in range(12)]
    for _ in range(60):
        house.send([*random.choice(prompts)][: random.randint(5, 25)], max_tokens=random.randint(1, 6))
        for _ in range(random.randint(0, 3)):
            house.step()
    house.run()
    seen = house.seen()
    lookups = [event for event in house.events if isinstance(event, PrefixLookup) and not event.after_preemption]
    hits = sum(event.num_hit_tokens for event in lookups)
    computed = sum(event.num_tokens for event in lookups) - hits
    assert sums(seen.series["lookups"]) == {"device": hits, "computed": computed}
    assert sum(sums(seen.series["misses"]).values()) == computed
    misses: Counter[str] = Counter()
    for record in house.ledger.all_records():
        for miss in record.misses or ():
            misses[miss.cause.value] += miss.num_tokens
    assert sums(seen.series["misses"]) == misses
    evicted = [event for event in house.events if isinstance(event, BlockEvicted)]
    assert evicted
    assert sums(seen.series["evictions"]) == Counter(event.rule for event in evicted)
    pool = house.core.pool
    assert seen.uses[-1] == BlockUse(0, 0, pool.num_cached, 0)
    assert all(use is None or sum(use[:3]) <= pool.num_blocks for use in seen.uses)
    assert max(use.num_held for use in seen.uses if use is not None) > 0


def test_who_has_the_blocks_is_known_while_nothing_runs() -> None:
    house = Watched()
    house.ask(TEXT[:32], warm_up=WarmUp(pin=True, ttl_s=1e6))
    house.ask(TEXT[::-1])
    house.clock.advance(40.0)
    uses = house.seen().uses
    assert uses[-1] == uses[-5] == BlockUse(0, 8, house.core.pool.num_cached - 8, 0)
    house.clock.advance(2000.0)
    assert all(use == uses[-1] for use in house.seen().uses)


def test_requests_say_where_their_time_went() -> None:
    house = Watched()
    first = house.ask(TEXT)
    house.end(first)
    house.clock.advance(4.0)
    second = house.ask([*TEXT[:30], *range(10)])
    house.end(second, prefill_s=None, decode_s=None)
    newest, oldest = house.seen().requests
    assert (oldest.request_id, oldest.worst, oldest.num_worst_tokens) == (first, Cause.NEVER_SEEN, 40)
    assert (oldest.queue_s, oldest.fetch_s, oldest.prefill_s, oldest.decode_s) == (1.0, 0.0, 2.0, 3.0)
    assert (newest.request_id, newest.worst, newest.prefill_s) == (second, Cause.DIFFERS, 0.0)
    assert (newest.num_device_tokens, newest.num_worst_tokens, newest.num_output_tokens) == (30, 10, 7)
    assert newest.ended_s - oldest.ended_s > 4.0
    for _ in range(50):
        house.end(second)
    assert len(house.seen().requests) == 20


def test_a_warm_up_is_no_request() -> None:
    house = Watched()
    house.end(house.ask(TEXT, warm_up=WarmUp(pin=False)), is_warm_up=True)
    assert house.seen().requests == []


def test_tiers_are_counted_by_name() -> None:
    house = Watched()
    house.emit(TierRead("disk", 3, 3000, 0.5, {"absent": 2, "late": 1}))
    house.emit(TierRead("disk", 1, 1000, 0.5, {}))
    house.emit(TierWritten(9, 7))
    series = house.seen().series
    assert sums(series["read"]) == {"disk": 4}
    assert sums(series["read_bytes"]) == {"disk": 4000}
    assert sums(series["unread"]) == {"disk": 3}
    assert sums(series["written"]) == {"kept": 7}


def test_the_hottest_prefix_is_what_all_share() -> None:
    """A system prompt of eight blocks; conversations behind it."""
    house = Watched(num_blocks=200)
    for number in range(6):
        house.ask([*TEXT[:32], *range(1000 * number, 1000 * number + 20)])
    house.ask([*TEXT[:32], *range(3000, 3020), 5, 6])
    shared, conversation = house.seen().prefixes
    assert (shared.num_blocks, shared.num_finds, shared.is_cached) == (8, 6, True)
    assert (conversation.num_blocks, conversation.num_finds) == (13, 1)
    assert shared.tenant == ""
    house.core.forgetting.reset()
    assert not any(prefix.is_cached for prefix in house.seen().prefixes)
    house.ask(TEXT[:33])
    assert [prefix.is_cached for prefix in house.seen().prefixes] == [True, False]


@pytest.mark.parametrize("seed", range(4))
def test_prefixes_are_found_as_often_as_their_texts_were(seed: int) -> None:
    """The slow twin: all texts at which a find has ended, and every find compared with each of them."""
    random = Random(seed)
    house = Watched(num_blocks=1000, max_num_batched_tokens=4096)
    heads = [[random.randrange(99) for _ in range(4 * random.randint(1, 6))] for _ in range(3)]
    finds: dict[tuple[int, ...], int] = {}
    for _ in range(12):
        together = [
            [*random.choice(heads), *random.choice(heads), *random.choices(range(3), k=random.randint(1, 9))]
            for _ in range(random.randint(1, 5))
        ]
        names = [house.send(tokens) for tokens in together]
        house.run()
        for name, tokens in zip(names, together, strict=True):
            (record,) = house.ledger.records(name)
            found = tuple(tokens[: record.num_hit_tokens // 4 * 4])
            if found:
                finds.setdefault(found, 0)
            for known in finds:
                finds[known] += found[: len(known)] == known
    best = [(num * len(known) // 4, num) for known, num in finds.items()]
    best = sorted(best, key=lambda one: one[0], reverse=True)[:10]
    assert [(one.num_saved_blocks, one.num_finds) for one in house.seen().prefixes] == best
    assert len(best) > 5


def test_prefixes_that_leave_the_cache_are_told_as_gone() -> None:
    house = Watched(num_blocks=20)
    for _ in range(3):
        house.ask(TEXT)
    for number in range(6):
        house.ask(range(1000 * number, 1000 * number + 60))
    assert [prefix.is_cached for prefix in house.seen().prefixes] == [False]


def test_prefixes_are_bounded_and_the_best_stay() -> None:
    house = Watched(num_blocks=900, max_num_batched_tokens=4096, max_num_seqs=400)
    house.ask(TEXT)
    for _ in range(2):
        for number in range(300):
            house.send(range(1000 * number, 1000 * number + 9))
        for _ in range(30):
            house.send(TEXT)
        house.run()
    assert house.overview is not None
    assert len(house.overview._prefixes._found) <= 256
    best = house.seen().prefixes[0]
    assert (best.num_blocks, best.num_finds) == (9, 60)


def test_a_tenant_is_named() -> None:
    house = Watched()
    namespace = Namespace(model="m", tenant="acme").key()
    for _ in range(2):
        name = house.ask(TEXT, namespace)
    house.end(name)
    seen = house.seen()
    assert (seen.prefixes[0].tenant, seen.requests[0].tenant) == ("acme", "acme")


def test_an_overview_that_fails_ends_alone(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    house = Watched()

    def fail(*_: object) -> None:
        raise KeyError

    monkeypatch.setattr(HotPrefixes, "find", fail)
    house.ask(TEXT)
    assert house.seen().is_whole
    house.ask(TEXT)
    assert house.overview is not None
    assert house.overview.has_failed
    assert "the dashboard ends here" in caplog.text
    seen = house.overview.see()
    assert seen is not None
    assert not seen.is_whole
    house.ask(TEXT)


def test_before_there_is_an_engine_nothing_is_known() -> None:
    house = House()
    overview = Overview(house.ledger, lambda: house.clock.now_s)
    assert overview.see() is None
    overview.watch(EngineStatus)
    seen = overview.see()
    assert seen is not None
    assert seen.uses == [None] * 120
