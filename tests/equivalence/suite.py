"""The suite itself: a ``Setting`` is one way to run an engine, a ``Trial`` runs a workload through it.

A trial ends with nothing held and every invariant kept, and ``assert_exact`` holds its outputs to a reference. ::

    trial = Trial(setting, workload, folder)
    trial.run()
    trial.assert_exact(references)

An issue that brings a new engine (tiers, a codec, a device) passes its own ``EngineFactory``: all settings run over it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from store.memory_store import MemoryStore, always_load

from equivalence.harsh_runner import HarshRunner
from pagefold.config import EngineConfig
from pagefold.engine.build import build_engine
from pagefold.engine.planning import plan_engine
from pagefold.events import (
    HostTransfer,
    PrefixLookup,
    RequestPreempted,
    RequestStreamed,
    StepAbandoned,
    StepApplied,
    StepPlanned,
    TierRead,
    TierWritten,
)
from pagefold.kv import CODECS, KEEP_ALL, TOKEN_BYTES, KeepRule, KVGeometry, audit
from pagefold.request import Caller
from pagefold.runner.models import ModelSpec, inspect_model
from pagefold.sampling import SamplingParams
from pagefold.store import FrameFormat

if TYPE_CHECKING:
    from pathlib import Path

    from equivalence.references import References
    from pagefold.config import AttentionBackend, Dtype
    from pagefold.config.engine_config import Admission, QuantizationName, SchedulingPolicyName
    from pagefold.engine.engine import Engine
    from pagefold.engine.outputs import OutputDelta
    from pagefold.events import Emit, Event
    from pagefold.kv import WritePolicy
    from pagefold.runner.slab import AnySlab

__all__ = [
    "Budget",
    "Counts",
    "EngineFactory",
    "Key",
    "Load",
    "Setting",
    "Trial",
    "Workload",
    "assert_clean",
    "build",
    "cached_blocks",
]

_SMALLEST_GAP = 1e-9
"""Between the best two logits of a reference. In float64 rounding stays below 1e-12 here."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """Who is let in when, and what a step computes of prompts: names of ``EngineConfig``, of what changes no token.

    Attributes:
        admission, scheduling_policy, max_num_partial_prefills, max_long_partial_prefills, long_prefill_token_threshold,
            target_itl_ms: as there.
        num_tenants: prompts are of so many tenants, who share no blocks: the first ones of the first tenant, and so on.
    """

    admission: Admission = "prompt"  # so that requests are preempted
    scheduling_policy: SchedulingPolicyName = "fcfs"
    max_num_partial_prefills: int | None = None
    max_long_partial_prefills: int | None = None
    long_prefill_token_threshold: int = 0
    target_itl_ms: float | None = None
    num_tenants: int = 1


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to run an engine.

    Attributes:
        name: of the test.
        block_size, kv_cache_dtype, kv_cache_dtype_skip_layers, max_num_batched_tokens, max_num_seqs,
            enable_prefix_caching, eviction_policy, attention_backend, dtype, quantization, streaming_llm,
            streaming_llm_sinks: as in ``EngineConfig``.
        spare_blocks: the KV budget: so many blocks more than the longest request needs; None for plenty.
        streamed_share: the KV budget instead: this share of the blocks that the longest request needs, so that it
            streams; None for no streaming.
        num_host_blocks: what the host keeps of evicted blocks; 0 for no host tier. With ``streamed_share`` it is
            twice what the longest request needs, if that is more.
        damage_rate: share of the blocks that come back from there damaged.
        slow_policy: when blocks are written to a slow tier behind the host; None for no such tier.
        slow_fault_rate: share of its blocks that do not come back, or not as they were.
        arrivals: ``together`` queues all before the first step, ``alone`` one after the other has finished, ``trickle``
            up to three between two steps.
        shuffle: whether the order of the prompts is random.
        num_rounds: how often all prompts are sent to the same engine: from the second on it is warm.
        cancel_share: for so many of the prompts a twin is sent too, which is cancelled at a random moment: waiting,
            between steps, or while a step runs.
        failure_rate: share of steps that fail.
        ignore_eos: whether to go on after an end-of-sequence token.
        max_prompt_tokens: longer prompts are left out.
        load: who is let in when.
        seed: of everything random.
        at_least: what must have happened, or the setting has tested nothing.
    """

    name: str
    block_size: int = 16
    kv_cache_dtype: str = "auto"
    kv_cache_dtype_skip_layers: tuple[int, ...] = ()
    max_num_batched_tokens: int = 512
    max_num_seqs: int = 64
    spare_blocks: int | None = None
    streamed_share: float | None = None
    num_host_blocks: int = 0
    slow_policy: WritePolicy | None = None
    slow_fault_rate: float = 0.0
    damage_rate: float = 0.0
    enable_prefix_caching: bool = True
    eviction_policy: str = "lru"
    attention_backend: AttentionBackend = "reference"
    dtype: Dtype = "float64"
    quantization: QuantizationName | None = None
    streaming_llm: int | None = None
    streaming_llm_sinks: int = 4
    arrivals: Literal["together", "alone", "trickle"] = "together"
    shuffle: bool = False
    num_rounds: int = 1
    cancel_share: float = 0.0
    failure_rate: float = 0.0
    ignore_eos: bool = True
    max_prompt_tokens: int | None = None
    load: Load = Load()
    seed: int = 0
    at_least: Counts | None = None

    @property
    def knows_groups(self) -> bool:
        """Whether it runs with several cache groups: not yet with streaming."""
        return self.streamed_share is None


@dataclass
class Counts:
    """What happened in a trial.

    Attributes:
        num_steps: steps that ran.
        num_failed_steps: steps that did not.
        num_preemptions: of requests.
        num_made_way: those for other tenants' shares.
        num_growth_waits, num_prefill_waits: steps in which somebody waited for what others will take yet, or for a
            place among prompts.
        num_capped_steps: steps that a target held to fewer prompt tokens.
        num_streamed: admissions of requests that stream.
        num_recomputed_tokens: computed again after a preemption.
        num_hit_tokens: prefix hits of requests that had not been preempted.
        num_first_step_hit_tokens: those of requests admitted in the first step.
        num_cancelled: requests that the trial cancelled before they had ended.
        num_stored_blocks, num_loaded_blocks, num_damaged_blocks: to and from the host.
        num_written_blocks, num_fetched_blocks, num_missed_blocks: to and from a slow tier.
    """

    num_steps: int = 0
    num_failed_steps: int = 0
    num_preemptions: int = 0
    num_made_way: int = 0
    num_growth_waits: int = 0
    num_prefill_waits: int = 0
    num_capped_steps: int = 0
    num_streamed: int = 0
    num_recomputed_tokens: int = 0
    num_hit_tokens: int = 0
    num_first_step_hit_tokens: int = 0
    num_cancelled: int = 0
    num_stored_blocks: int = 0
    num_loaded_blocks: int = 0
    num_damaged_blocks: int = 0
    num_written_blocks: int = 0
    num_fetched_blocks: int = 0
    num_missed_blocks: int = 0

    def emit(self, event: Event) -> None:  # noqa: C901 - a branch for each kind of event
        """Subscribe an engine to this."""
        if isinstance(event, StepApplied):
            self.num_steps += 1
            self.num_recomputed_tokens += event.num_recomputed_tokens
        elif isinstance(event, StepAbandoned):
            self.num_failed_steps += 1
        elif isinstance(event, RequestPreempted):
            self.num_preemptions += 1
            self.num_made_way += event.cause == "share"
        elif isinstance(event, StepPlanned):
            self.num_growth_waits += event.waits_for == "growth"
            self.num_prefill_waits += event.waits_for == "prefills"
            self.num_capped_steps += event.prefill_cap_tokens is not None
        elif isinstance(event, RequestStreamed):
            self.num_streamed += 1
        elif isinstance(event, HostTransfer):
            self.num_stored_blocks += event.num_stored_blocks
            self.num_loaded_blocks += event.num_loaded_blocks
            self.num_damaged_blocks += len(event.damaged_ids)
        elif isinstance(event, TierWritten):
            self.num_written_blocks += event.num_kept
        elif isinstance(event, TierRead):
            self.num_fetched_blocks += event.num_blocks
            self.num_missed_blocks += sum(event.num_missed.values())
        elif isinstance(event, PrefixLookup) and not event.after_preemption:
            self.num_hit_tokens += event.num_hit_tokens
            if not self.num_steps:
                self.num_first_step_hit_tokens += event.num_hit_tokens


@dataclass(frozen=True)
class Workload:
    """Prompts, and how many tokens to generate after each."""

    prompts: list[list[int]]
    num_outputs: int

    def up_to(self, max_prompt_tokens: int | None) -> Workload:
        """Return it without the prompts that are longer."""
        if max_prompt_tokens is None:
            return self
        return Workload([prompt for prompt in self.prompts if len(prompt) <= max_prompt_tokens], self.num_outputs)

    @property
    def max_total_tokens(self) -> int:
        """Tokens of the longest prompt with its output."""
        return max(map(len, self.prompts)) + self.num_outputs


class Budget(NamedTuple):
    """What an engine gets that follows from setting and workload."""

    num_blocks: int
    num_host_blocks: int
    max_model_len: int


class EngineFactory(Protocol):
    """Makes the engine that a setting asks for."""

    def __call__(self, setting: Setting, folder: Path, budget: Budget, emit: Emit) -> Engine:
        """Make it, for the model of ``folder``."""


def build(setting: Setting, folder: Path, budget: Budget, emit: Emit) -> Engine:
    """Make Pagefold's own engine, as its users do: the default ``EngineFactory``."""
    spec = inspect_model(folder)
    element_bytes = {"float64": 8, "float32": 4, "bfloat16": 2}[setting.dtype]
    codec = CODECS.get(setting.kv_cache_dtype)
    shape = spec.num_layers, spec.num_kv_heads, spec.head_dim, element_bytes, setting.block_size
    geometry = KVGeometry(*shape, codec, setting.kv_cache_dtype_skip_layers, CODECS["float16"], sources=spec.sources)
    num_blocks = budget.num_blocks
    if keeps := _keeps(setting, spec, budget):
        geometry = replace(geometry, keeps=keeps)
        num_spare = num_blocks - -(-budget.max_model_len // setting.block_size)
        num_blocks = num_spare + geometry.layout.num_blocks_for(budget.max_model_len, setting.max_num_batched_tokens)
    config = EngineConfig(
        model=str(folder),
        dtype=setting.dtype,
        quantization=setting.quantization,
        streaming_llm=setting.streaming_llm,
        streaming_llm_sinks=setting.streaming_llm_sinks,
        block_size=setting.block_size,
        kv_cache_dtype=setting.kv_cache_dtype,
        kv_cache_dtype_skip_layers=setting.kv_cache_dtype_skip_layers,
        kv_cache_memory_bytes=num_blocks * geometry.bytes_per_block + setting.max_num_seqs * geometry.residual_bytes,
        kv_offloading_size=budget.num_host_blocks * geometry.bytes_per_block / 2**30,
        allow_streaming=setting.streamed_share is not None,
        max_model_len=budget.max_model_len,
        max_num_seqs=setting.max_num_seqs,
        max_num_batched_tokens=setting.max_num_batched_tokens,
        enable_prefix_caching=setting.enable_prefix_caching,
        eviction_policy=setting.eviction_policy,
        attention_backend=setting.attention_backend,
        kv_write_policy=setting.slow_policy or "write_back",
        **{name: value for name, value in vars(setting.load).items() if name != "num_tenants"},
    )
    if setting.slow_policy is None:
        return build_engine(plan_engine(config), emit=emit)
    frames = FrameFormat(bytes(32), geometry.bytes_per_block, setting.block_size * TOKEN_BYTES)
    store = MemoryStore(frames, fault_rate=setting.slow_fault_rate, seed=setting.seed)
    engine = build_engine(plan_engine(config), emit=emit, stores=[store])
    always_load(engine)
    return engine


def _keeps(setting: Setting, spec: ModelSpec, budget: Budget) -> tuple[KeepRule, ...]:
    """Return what each layer keeps; nothing where all keep all."""
    if setting.streaming_llm is not None:
        rule = KeepRule(setting.streaming_llm, num_sinks=setting.streaming_llm_sinks)
        most = setting.streaming_llm + setting.streaming_llm_sinks
        keeps = spec.keeps or (KEEP_ALL,) * spec.num_layers
        return tuple(rule if keep.window is None or keep.window > most else keep for keep in keeps)
    return spec.keeps_within(budget.max_model_len) if setting.knows_groups else ()


class Key(NamedTuple):
    """Names a request of a trial, and its samples.

    Attributes:
        round: in which it was sent.
        index: of its prompt.
        is_twin: whether it is the one that is cancelled.
        sample: which sample of the prompt; 0 stands for the request too.
    """

    round: int
    index: int
    is_twin: bool = False
    sample: int = 0

    def __str__(self) -> str:
        return f"{'twin of ' if self.is_twin else ''}prompt {self.index} in round {self.round}"


class Trial:
    """A workload on its way through one engine.

    Args:
        setting: how.
        workload: what; prompts that the setting leaves out are dropped.
        folder: the model's.
        factory: makes the engine.
        is_late: of the ``HarshRunner``, where steps are launched.

    Attributes:
        engine: has a ``HarshRunner`` around its runner from :meth:`run` on.
        outputs: token ids of every request that was sent, and of its other samples that got one.
        num_cached_tokens: of every request that got a token.
        counts: what happened.
    """

    def __init__(
        self,
        setting: Setting,
        workload: Workload,
        folder: Path,
        factory: EngineFactory = build,
        *,
        is_late: bool = True,
    ) -> None:
        self.setting = setting
        self._is_late = is_late
        self.workload = workload = workload.up_to(setting.max_prompt_tokens)
        self.counts = Counts()
        self.engine = factory(setting, folder, _budget(setting, workload), self.counts.emit)
        self.outputs: dict[Key, list[int]] = {}
        self.num_cached_tokens: dict[Key, int] = {}
        self._random = Random(setting.seed)
        self._keys: dict[str, Key] = {}
        self._twins: dict[Key, int] = {}  # live ones, and after how many tokens they are cancelled

    def run(self) -> None:
        """Send every prompt in every round, step until all have ended, and check that nothing is left behind."""
        self.engine.runner = HarshRunner(
            self.engine,
            failure_rate=self.setting.failure_rate,
            random=self._random,
            damage_rate=self.setting.damage_rate,
            during_step=lambda: self._cancel_some(0.5),
            is_late=self._is_late,
        )
        for number in range(self.setting.num_rounds):
            self._run_round(number)
        assert_clean(self.engine)
        if self.setting.at_least is not None:
            for name, least in vars(self.setting.at_least).items():
                assert getattr(self.counts, name) >= least, f"{name} is below {least}: {self.counts}"

    def assert_exact(self, references: References) -> None:
        """Every output is the reference's, token by token; of a cancelled request, as far as it came.

        Raises:
            AssertionError: with all that differ, and where.
        """
        wrong = [
            f"{key} ({len(self.workload.prompts[key.index])} tokens): {difference}"
            for key, output in self.outputs.items()
            if (difference := _difference(output, self._expected(key, len(output), references)))
        ]
        assert not wrong, f"{len(wrong)} of {len(self.outputs)} outputs differ:\n" + "\n".join(wrong)
        assert references.smallest_gap > _SMALLEST_GAP, "the references nearly have ties: rounding may decide"

    def sampling(self, key: Key) -> SamplingParams:
        """Return what is asked of a request."""
        return SamplingParams(
            temperature=0.0,
            max_tokens=self.workload.num_outputs,
            ignore_eos=self.setting.ignore_eos,
            seed=key.index,  # draws nothing, but tells a runner which prompt a row is
        )

    def take(self, key: Key, delta: OutputDelta) -> None:
        """Keep what a step added."""
        self.outputs.setdefault(key, []).extend(delta.token_ids)
        self.num_cached_tokens[key] = delta.num_cached_tokens

    def _expected(self, key: Key, num_outputs: int, references: References) -> list[int]:
        expected = references.of(self.workload.prompts[key.index], ignore_eos=self.setting.ignore_eos)
        return expected[:num_outputs] if key.is_twin else expected

    def _run_round(self, number: int) -> None:
        arriving = self._arrivals(number)
        at_once = {"together": len(arriving), "alone": 1, "trickle": 0}[self.setting.arrivals]
        num_idle = 0
        while arriving or self.engine.has_requests:
            if not arriving and not self.engine.has_work:
                self.engine.wait()
            if self.setting.arrivals == "trickle":
                at_once = self._random.randint(0, 3)
            if self.setting.arrivals != "alone" or not self.engine.has_work:
                for _ in range(min(at_once, len(arriving))):
                    self._send(arriving.popleft())
            self._cancel_some(0.5)
            before = *_progress(self.counts), len(arriving)
            for delta in self.engine.step():
                assert delta.error is None, delta.error
                key = self._keys[delta.request_id]
                self.take(key._replace(sample=delta.index), delta)
                if delta.is_last:
                    self._twins.pop(key, None)
            num_idle = num_idle + 1 if before == (*_progress(self.counts), len(arriving)) else 0
            assert num_idle < 100, (
                f"the engine does nothing, with {len(self.engine.scheduler.waiting)} requests waiting"
            )

    def _arrivals(self, number: int) -> deque[Key]:
        indices = range(len(self.workload.prompts))
        keys = [Key(number, index) for index in indices]
        twins = self._random.sample(indices, int(len(indices) * self.setting.cancel_share))
        for index in twins:
            keys.insert(self._random.randint(0, len(keys)), Key(number, index, is_twin=True))
        if self.setting.shuffle:
            self._random.shuffle(keys)
        return deque(keys)

    def _send(self, key: Key) -> None:
        self._keys[str(key)] = key
        self.outputs[key] = []
        tenant = key.index * self.setting.load.num_tenants // len(self.workload.prompts)
        caller = Caller(tenant=f"t{tenant}" if tenant else "")
        self.engine.add(str(key), self.workload.prompts[key.index], self.sampling(key), caller)
        if key.is_twin:
            self._twins[key] = self._random.choice((0, 0, self._random.randrange(self.workload.num_outputs)))

    def _cancel_some(self, share: float) -> None:
        for key, num_tokens in list(self._twins.items()):
            if len(self.outputs[key]) >= num_tokens and self._random.random() < share / 4:
                assert self.engine.abort(str(key))
                del self._twins[key]
                self.counts.num_cancelled += 1


def assert_clean(engine: Engine) -> None:
    """An engine without work holds no block, and every invariant of its core is kept."""
    core = engine.scheduler.core
    assert not engine.has_requests
    if engine.tiering.is_on:
        engine.close(lambda: 30.0)
        assert not list(core.slow.pins()), "something is kept for nobody"
    assert not core.caches, "a cache was not released"
    assert core.num_active == 0, f"{core.num_active} blocks are held by nobody"
    assert core.num_available == core.pool.num_blocks
    assert not core.moves.pending_copies
    assert not core.moves.copies_in_flight
    assert not engine._outputs.texts, "an output's text was not dropped"
    assert not engine._outputs.requests, "a request was not dropped"
    audit(core)


def cached_blocks(engine: Engine, slab: AnySlab) -> dict[tuple[int, bytes], bytes]:
    """Return the bytes of what is cached, by cache group and the tokens that lead to it."""
    found = {}
    for node in engine.scheduler.core.tree.nodes():
        path, at = [], node
        while at.parent is not None:
            path.append(at.key)
            at = at.parent
        tokens = b"".join(reversed(path))
        for block in node.blocks:
            if block is not None:
                found[block.group, tokens] = bytes(slab.as_bytes()[block.block_id])
    return found


def _budget(setting: Setting, workload: Workload) -> Budget:
    max_model_len = workload.max_total_tokens
    longest = -(-max_model_len // setting.block_size)
    if setting.streamed_share is not None:
        num_host_blocks = max(setting.num_host_blocks, 2 * longest)
        return Budget(int(longest * setting.streamed_share), num_host_blocks, max_model_len)
    if setting.spare_blocks is not None:
        return Budget(longest + setting.spare_blocks, setting.num_host_blocks, max_model_len)
    needed = sum(-(-(len(prompt) + workload.num_outputs) // setting.block_size) for prompt in workload.prompts)
    plenty = int(needed * (1.1 + setting.cancel_share)) + 2
    return Budget(plenty, setting.num_host_blocks, max_model_len)


def _difference(ours: list[int], expected: list[int]) -> str:
    """Say where ``ours`` first differs; nothing when it does not."""
    if ours == expected:
        return ""
    pairs = zip(ours, expected, strict=False)
    shorter = min(len(ours), len(expected))
    at = next((at for at, (own, theirs) in enumerate(pairs) if own != theirs), shorter)
    return f"{len(ours)} outputs, from output {at} on {ours[at : at + 3]} instead of {expected[at : at + 3]}"


def _progress(counts: Counts) -> tuple[int, int]:
    return counts.num_steps, counts.num_failed_steps
