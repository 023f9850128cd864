"""The real engine on a clock of the test's: what metrics say beside what a client with a watch writes down."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random

import pytest

from pagefold.engine.engine import Engine
from pagefold.engine.limits import ModelLimits
from pagefold.engine.status import EngineStatus
from pagefold.events import Event, RequestPreempted, fan_out
from pagefold.kv import KVCore, Namespace
from pagefold.memory.capacity import Capacity
from pagefold.observe.metrics import Metrics
from pagefold.sampling import SamplingParams
from pagefold.scheduler import Scheduler, SchedulerLimits
from pagefold.sim import NullRunner, VirtualClock
from pagefold.tokenizer import Tokenizer

BLOCK_SIZE = 4
VOCAB_SIZE = 1 << 30


@dataclass
class Seen:
    """What a client wrote down about one request."""

    arrival_s: float
    num_prompt_tokens: int
    num_allowed_tokens: int = 0
    scheduled_s: float | None = None
    tokens_s: list[float] = field(default_factory=list)
    num_cached_tokens: int = 0
    end_s: float | None = None
    reason: str | None = None


class House:
    """An engine whose steps take one second each, or as long as the test says; as many as it says fail."""

    def __init__(
        self, num_blocks: int = 64, *, max_num_seqs: int = 8, budget: int = 16, timeout_s=None, tokenizer=None
    ):
        self.metrics = Metrics("m")
        self.events: list[Event] = []
        emit = fan_out(self.metrics.emit, self.events.append)
        self.clock = VirtualClock()
        self.step_s = 1.0
        self.runner = NullRunner()
        self.num_failures = 0
        self.seen: dict[str, Seen] = {}
        self.step_tokens: list[int] = []
        core = KVCore(num_blocks, block_size=BLOCK_SIZE, emit=emit)
        limits = SchedulerLimits(max_num_seqs, budget)
        self.engine = Engine(
            scheduler=Scheduler(core, limits, emit=emit),
            runner=self,
            tokenizer=tokenizer,
            limits=ModelLimits(VOCAB_SIZE, (), Namespace("m", "l", "d")),
            capacity=Capacity(0, 0, num_blocks, BLOCK_SIZE, num_blocks * BLOCK_SIZE, num_blocks),
            request_timeout_s=timeout_s,
            emit=emit,
            clock=self.clock,
        )
        self.metrics.watch(lambda: EngineStatus.of(self.engine.scheduler))

    def run(self, plan):
        for request in self.engine.scheduler.running:
            seen = self.seen[request.request_id]
            if seen.scheduled_s is None:
                seen.scheduled_s = self.clock()
        self.clock.advance(self.step_s)
        if self.num_failures:
            self.num_failures -= 1
            msg = "it died"
            raise RuntimeError(msg)
        self.step_tokens.append(len(plan.token_ids))
        return self.runner.run(plan)

    def add(self, name: str, prompt: list[int], num_new: int) -> None:
        self.seen[name] = Seen(self.clock(), len(prompt), num_new)
        self.engine.add(name, prompt, SamplingParams(temperature=0.0, max_tokens=num_new))

    def abort(self, name: str) -> None:
        if self.engine.abort(name):
            self._ended(name, "abort")

    def step(self) -> None:
        before_s = self.clock()
        for delta in self.engine.step():
            seen = self.seen[delta.request_id]
            seen.num_cached_tokens = delta.num_cached_tokens
            seen.tokens_s += [self.clock()] * len(delta.token_ids)
            if delta.finish_reason is not None:
                self._ended(delta.request_id, delta.finish_reason)
                if delta.finish_reason == "timeout":
                    seen.end_s = before_s

    def _ended(self, name: str, reason: str) -> None:
        self.seen[name].reason = reason
        self.seen[name].end_s = self.clock()

    def drain(self) -> None:
        while self.engine.has_work:
            self.step()

    def value(self, name: str, **labels: str) -> float:
        value = self.metrics.registry.get_sample_value(name, {"model_name": "m", "engine": "0", **labels})
        assert value is not None, name
        return value

    def histogram(self, name: str) -> tuple[float, float]:
        return self.value(f"{name}_count"), self.value(f"{name}_sum")

    def preemptions(self) -> list[int]:
        """How often each request was preempted."""
        counts = Counter(event.request_id for event in self.events if isinstance(event, RequestPreempted))
        return [counts[name] for name in self.seen]

    def check(self) -> None:
        """Everything that a client can know is what metrics say, exactly; to be called when nothing runs."""
        all_seen = list(self.seen.values())
        served = [seen for seen in all_seen if seen.tokens_s]
        gaps = [b - a for seen in served for a, b in zip(seen.tokens_s, seen.tokens_s[1:], strict=False)]
        lifetimes = [seen.end_s - seen.arrival_s for seen in all_seen]
        waits = [(seen.end_s if seen.scheduled_s is None else seen.scheduled_s) - seen.arrival_s for seen in all_seen]
        expected = {
            "vllm:time_to_first_token_seconds": [seen.tokens_s[0] - seen.arrival_s for seen in served],
            "vllm:inter_token_latency_seconds": gaps,
            "vllm:e2e_request_latency_seconds": lifetimes,
            "vllm:request_queue_time_seconds": waits,
            "vllm:request_prefill_time_seconds": [seen.tokens_s[0] - seen.scheduled_s for seen in served],
            "vllm:request_decode_time_seconds": [seen.tokens_s[-1] - seen.tokens_s[0] for seen in served],
            "vllm:request_inference_time_seconds": [seen.tokens_s[-1] - seen.scheduled_s for seen in served],
            "vllm:iteration_tokens_total": self.step_tokens,
            "vllm:request_prompt_tokens": [seen.num_prompt_tokens for seen in all_seen],
            "vllm:request_generation_tokens": [len(seen.tokens_s) for seen in all_seen],
            "vllm:request_max_num_generation_tokens": [len(seen.tokens_s) for seen in all_seen],
            "vllm:request_params_max_tokens": [seen.num_allowed_tokens for seen in all_seen],
            "vllm:request_params_n": [1 for _ in all_seen],
            "vllm:request_num_preemptions": self.preemptions(),
            "vllm:request_prefill_kv_computed_tokens": [
                seen.num_prompt_tokens - seen.num_cached_tokens for seen in served
            ],
        }
        for name, values in expected.items():
            assert self.histogram(name) == (len(values), pytest.approx(sum(values))), name
        num_prompt = sum(seen.num_prompt_tokens for seen in served)
        num_cached = sum(seen.num_cached_tokens for seen in served)
        counters = {
            "vllm:prompt_tokens_total": num_prompt,
            "vllm:prompt_tokens_cached_total": num_cached,
            "pagefold:prompt_tokens_copied_total": sum(seen.num_cached_tokens % BLOCK_SIZE for seen in served),
            "vllm:generation_tokens_total": sum(len(seen.tokens_s) for seen in served),
        }
        assert {name: self.value(name) for name in counters} == counters
        assert self.value("vllm:prompt_tokens_by_source_total", source="local_cache_hit") == num_cached
        assert self.value("vllm:prompt_tokens_by_source_total", source="local_compute") == num_prompt - num_cached
        reasons = Counter(seen.reason for seen in all_seen)
        for reason in ("stop", "length", "abort", "error", "timeout"):
            assert self.value("vllm:request_success_total", finished_reason=reason) == reasons[reason], reason
        assert self.value("pagefold:num_wasted_slots") == 0 == self.value("pagefold:kv_waste_perc")


def test_a_request_alone():
    house = House(budget=8)
    house.add("a", list(range(20)), 3)  # 8, 8 and 4 tokens, then two steps more
    house.drain()
    house.check()
    assert house.histogram("vllm:time_to_first_token_seconds") == (1, 3.0)
    assert house.histogram("vllm:inter_token_latency_seconds") == (2, 2.0)
    assert house.histogram("vllm:e2e_request_latency_seconds") == (1, 5.0)
    assert house.histogram("vllm:iteration_tokens_total") == (5, 22.0)


def test_waiting_in_the_queue_is_queue_time():
    house = House(max_num_seqs=1)
    house.add("a", [1] * 5, 4)
    house.add("b", [2] * 5, 1)
    house.drain()
    house.check()
    assert house.histogram("vllm:request_queue_time_seconds") == (2, 4.0)


def test_a_preempted_request_queued_once_and_its_pause_is_between_tokens():
    house = House(num_blocks=8)
    house.add("a", [1] * 11, 16)
    house.add("b", [2] * 11, 16)
    house.drain()
    assert house.value("vllm:num_preemptions_total") >= 1
    assert house.value("pagefold:tokens_recomputed_total") >= 1
    house.check()
    assert house.histogram("vllm:request_queue_time_seconds")[1] <= 1.0
    gaps = [b - a for a, b in zip(house.seen["b"].tokens_s, house.seen["b"].tokens_s[1:], strict=False)]
    assert max(gaps) > 1.0
    assert house.value("vllm:inter_token_latency_seconds_bucket", le="1.0") < house.value(
        "vllm:inter_token_latency_seconds_count"
    )


def test_a_failed_first_step_counts_no_prompt_twice():
    house = House()
    house.add("a", [1] * 10, 2)
    house.num_failures = 2
    house.drain()
    house.check()
    assert house.value("pagefold:steps_failed_total") == 2
    assert house.value("vllm:prefix_cache_queries_total") == 10
    assert house.value("vllm:prompt_tokens_total") == 10
    assert house.histogram("vllm:time_to_first_token_seconds") == (1, 3.0)
    assert house.histogram("vllm:request_queue_time_seconds") == (1, 0.0)


def test_a_request_whose_steps_all_fail_ends_with_error():
    house = House()
    house.add("a", [1] * 10, 2)
    house.num_failures = 3
    house.drain()
    house.check()
    assert house.value("vllm:request_success_total", finished_reason="error") == 1
    assert house.value("vllm:prefix_cache_queries_total") == 0 == house.value("vllm:prompt_tokens_total")


def test_time_is_up_in_the_queue_and_while_it_runs():
    house = House(max_num_seqs=1, timeout_s=2.5)
    house.add("a", [1] * 5, 10)
    house.add("b", [2] * 5, 10)
    house.drain()
    house.check()
    assert house.histogram("vllm:request_queue_time_seconds") == (2, 3.0)  # the second waited for ever
    assert house.histogram("vllm:request_prefill_time_seconds")[0] == 1


def test_leaving_while_waiting_prefilling_and_decoding():
    house = House(max_num_seqs=2, budget=8)
    for name, prompt in (("decodes", [1] * 4), ("prefills", [2] * 40), ("waits", [3] * 4)):
        house.add(name, prompt, 10)
    house.step()
    house.step()
    for name in list(house.seen):
        house.abort(name)
    house.check()
    assert house.histogram("vllm:e2e_request_latency_seconds") == (3, 6.0)
    assert house.histogram("vllm:time_to_first_token_seconds")[0] == 1


@pytest.mark.quick(every=2)
@pytest.mark.parametrize("num_steps", [0, 1], ids=["waiting", "prefilling"])
@pytest.mark.parametrize("reason", ["abort", "timeout"])
def test_samples_that_never_began_end_too(reason, num_steps):
    house = House(budget=8, timeout_s=5.0)
    how = SamplingParams(n=3, max_tokens=4)
    house.seen["a"] = Seen(0.0, 12, 4)
    house.engine.add("a", list(range(12)), how)
    for _ in range(num_steps):
        house.step()
    if reason == "abort":
        house.engine.abort("a")
    else:
        house.clock.advance(10.0)
        assert len(house.engine.step()) == 3
    assert house.value("vllm:request_success_total", finished_reason=reason) == 3
    assert house.histogram("vllm:e2e_request_latency_seconds")[0] == 3


def test_waste_is_what_rounding_costs_at_any_moment():
    house = House()
    house.add("a", [1] * 5, 4)
    assert house.value("pagefold:num_wasted_slots") == 0
    house.step()
    assert house.value("pagefold:num_wasted_slots") == 3  # 5 tokens in 2 blocks of 4
    assert house.value("pagefold:kv_waste_perc") == 3 / 8
    house.step()
    assert house.value("pagefold:num_wasted_slots") == 2
    house.abort("a")
    assert house.value("pagefold:num_wasted_slots") == 0


def test_whatever_happens_a_client_with_a_watch_agrees():
    """Shared prompts, little memory, failures, cancellations, deadlines: all sums and counts are exact."""
    happened: Counter[str] = Counter()
    for seed in range(30):
        house = _live(Random(seed))
        house.check()
        happened.update(seen.reason for seen in house.seen.values())
        happened["preemption"] += int(house.value("vllm:num_preemptions_total"))
        happened["copy"] += int(house.value("pagefold:prompt_tokens_copied_total"))
        happened["recomputed"] += int(house.value("pagefold:tokens_recomputed_total"))
        happened["never scheduled"] += sum(seen.scheduled_s is None for seen in house.seen.values())
        happened["left in prefill"] += sum(
            seen.scheduled_s is not None and not seen.tokens_s for seen in house.seen.values()
        )
    rare = {what for what in (*happened, "length", "abort", "error", "timeout") if happened[what] < 5}
    assert not rare, "this has tested little"


def _live(rng: Random) -> House:
    house = House(num_blocks=14, max_num_seqs=4, budget=rng.choice((4, 7, 16)), timeout_s=rng.choice((None, 40.0)))
    prefix = [rng.randrange(3) for _ in range(20)]
    for index in range(30):
        house.step_s = rng.choice((0.25, 1.0, 3.0))
        for _ in range(rng.randrange(3)):
            prompt = [*prefix[: rng.randrange(21)], *(rng.randrange(3) for _ in range(rng.randrange(1, 12)))]
            house.add(f"{index}-{len(house.seen)}", prompt, rng.randrange(1, 14))
        if rng.random() < 0.1:
            house.num_failures = rng.randrange(1, 4)
        if rng.random() < 0.2 and house.seen:
            house.abort(rng.choice(list(house.seen)))
        house.step()
    house.drain()
    return house


def test_a_stop_string_on_the_last_token_is_a_stop(smollm2):
    """The scheduler ends such a request for its length; metrics say what the client is told."""
    tokenizer = Tokenizer(smollm2)
    says = tokenizer.encode("one two three")
    house = House(tokenizer=tokenizer)
    house.runner = NullRunner(lambda _, draw: says[draw])
    house.seen["a"] = Seen(0.0, 3, len(says))
    house.engine.add("a", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=len(says), stop=("three",)))
    house.drain()
    assert house.seen["a"].reason == "stop"
    assert len(house.seen["a"].tokens_s) == len(says)
    house.check()
