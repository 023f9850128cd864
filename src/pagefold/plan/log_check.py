"""LogCheck: what the planner says of a start, beside what the start itself found, and why the two differ."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from pagefold.errors import ConfigError, DoesNotFitError
from pagefold.plan.engine import find_engine
from pagefold.plan.memory import Memory, plan_memory
from pagefold.plan.settings import CACHE_DTYPES, DTYPES, PlanSettings
from pagefold.plan.span import GIB, Span

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pagefold.plan.shape import ModelShape
    from pagefold.plan.start_log import Outcome, StartLog
    from pagefold.plan.tables import Device

__all__ = ["LogCheck", "LogRow", "check_log", "named_model", "settings_of"]

_ALIKE = 0.01
"""By which share two sizes may differ and be told as one."""
_SMALL = GIB // 50
"""Bytes that logs round away."""
_AMPLE_BYTES = 2**50
_ONLINE = {"fp8": "fp8", "bitsandbytes": "int4-g64"}
"""What ``--quantization`` makes of a checkpoint in 16 bit, in the words of a quantized one."""
_LARGEST_BLOCK = 256
"""Tokens of a block: where an engine has more of them, or no power of two, the planner counts in blocks of its own."""


@dataclass(frozen=True, slots=True)
class LogRow:
    """One thing, predicted and logged.

    Attributes:
        what: it is.
        predicted: as far as it is known.
        logged: what the start said.
        is_bytes: whether it is a size.
        cause: why they differ; empty where they do not.
    """

    what: str
    predicted: Span | float
    logged: float
    is_bytes: bool
    cause: str

    @property
    def likely(self) -> float:
        """What is planned with."""
        return self.predicted.likely if isinstance(self.predicted, Span) else self.predicted

    @property
    def ratio(self) -> float | None:
        """Predicted over logged; None where nothing was logged."""
        return self.likely / self.logged if self.logged else None

    def figures(self) -> dict[str, Any]:
        """Return the row by names, ready for JSON."""
        ends = {}
        if isinstance(self.predicted, Span):
            ends = {"low": self.predicted.low, "high": self.predicted.high}
        return {
            "what": self.what,
            "predicted": self.likely,
            **ends,
            "logged": self.logged,
            "ratio": self.ratio,
            "cause": self.cause,
        }


@dataclass(frozen=True, slots=True)
class LogCheck:
    """A start and its plan.

    Attributes:
        engine: that was started.
        model, device: what it was started with.
        settings: the settings of the plan.
        verdict: what the planner says: ``fits``, ``may not fit`` or ``does not fit``.
        outcome: what came of the start.
        rows: each thing that both say.
        max_model_len: the longest sequence that is planned; None where nothing fits.
        max_concurrency: how many of that length at once.
    """

    engine: str
    model: str
    device: str
    settings: PlanSettings
    verdict: str
    outcome: Outcome
    rows: tuple[LogRow, ...]
    max_model_len: int | None = None
    max_concurrency: float | None = None

    @property
    def agrees(self) -> bool | None:
        """Whether the verdict is right: nothing that failed was said to fit, nothing that ran was refused.

        None where the start does not tell: it was cut off, or failed for a reason of another kind.
        """
        if self.outcome.state == "runs":
            return self.verdict != "does not fit"
        return self.verdict != "fits" if self.outcome.is_of_memory else None

    def figures(self) -> dict[str, Any]:
        """Return the check by names, ready for JSON."""
        return {
            "engine": self.engine,
            "model": self.model,
            "device": self.device,
            "verdict": self.verdict,
            "outcome": self.outcome.state,
            "failure": self.outcome.failure or None,
            "agrees": self.agrees,
            "max_model_len": self.max_model_len,
            "max_concurrency": self.max_concurrency,
            "rows": [row.figures() for row in self.rows],
        }


def settings_of(log: StartLog, given: Mapping[str, Any] = MappingProxyType({})) -> PlanSettings:
    """Return the settings that a log says the start had; what it does not say is left to the engine.

    Args:
        log: of the start.
        given: settings that a user gave; they go before what the log says.

    Raises:
        ConfigError: one of them is none that is planned for.
    """
    options = log.options
    asked: dict[str, Any] = {"engine": given.get("engine") or _engine_of(log)}
    for name in (
        "max_model_len", "tensor_parallel_size", "pipeline_parallel_size", "max_num_batched_tokens", "max_num_seqs",
    ):  # fmt: skip
        if name in options:
            asked[name] = int(options[name])
    if "gpu_memory_utilization" in options:
        asked["gpu_memory_utilization"] = float(options["gpu_memory_utilization"])
    asked["enforce_eager"] = options.get("enforce_eager") == "True"
    if options.get("dtype") in DTYPES:
        asked["dtype"] = options["dtype"]
    if log.is_ours and "kv" in log.sizes:
        asked["kv_cache_memory_bytes"] = log.sizes["kv"]
    block_size = int(options.get("block_size", 0))
    if 1 <= block_size <= _LARGEST_BLOCK and not block_size & (block_size - 1):
        asked["block_size"] = block_size
    if "kv_cache_dtype" in options and "kv_cache_dtype" not in given:
        asked["kv_cache_dtype"] = _cache_dtype_of(log)
    return PlanSettings(**(asked | dict(given)))


def _engine_of(log: StartLog) -> str:
    """Return the engine of a log, in the words of ``--engine``."""
    try:
        find_engine(log.engine)
    except ConfigError as error:
        raise ConfigError(error.message, remedy=f"Give the --engine that it is like: {error.remedy}") from None
    return log.engine


def _cache_dtype_of(log: StartLog) -> str:
    """Return how a log says that K and V are stored."""
    said = log.options["kv_cache_dtype"]
    known = next((name for name in (said, said.split("_e")[0]) if name in CACHE_DTYPES), None)
    if known is None:
        message = f"{log.name} has kv_cache_dtype {said!r}, of which it is not known how many bits that is."
        raise ConfigError(message, remedy="Give --kv-cache-dtype: the one that takes as many.")
    return known


def _stored(log: StartLog, shape: ModelShape, settings: PlanSettings) -> ModelShape:
    """Return the shape with its weights stored as the start stores them."""
    asked = log.options.get("quantization")
    if asked is None or shape.quantization or settings.weight_dtype != "auto":
        return shape
    if asked not in _ONLINE:
        message = f"{log.name} has quantization {asked!r}, and the config of {shape.name} does not say how."
        raise ConfigError(message, remedy="Give --weight-dtype, such as int4-g128, or name the quantized config.json.")
    return replace(shape, quantization=_ONLINE[asked])


def check_log(log: StartLog, shape: ModelShape, device: Device, settings: PlanSettings) -> LogCheck:
    """Return what ``settings`` come to beside what the log has.

    Raises:
        ConfigError: what was started cannot be planned for.
    """
    if "memory" in log.sizes and device.memory_ends is not None:
        device = device.with_memory(log.sizes["memory"])
    if log.is_ours and device.is_cpu:
        device = device.with_memory(_AMPLE_BYTES)  # there was enough then: it runs
        settings = replace(settings, kv_cache_memory_bytes=_own_budget(log, shape, device, settings))
    shape = _stored(log, shape, settings)
    engine = settings.engine_on(device).label
    try:
        memory = plan_memory(shape, device, settings)
    except DoesNotFitError:
        return LogCheck(engine, shape.name, device.name, settings, "does not fit", log.outcome, ())
    return LogCheck(
        engine,
        shape.name,
        device.name,
        settings,
        "fits" if memory.fits else "may not fit",
        log.outcome,
        tuple(_rows(log, memory)),
        memory.max_model_len,
        memory.max_concurrency,
    )


def _own_budget(log: StartLog, shape: ModelShape, device: Device, settings: PlanSettings) -> int | None:
    """Return the KV budget of our own server, by its blocks: by default it is a share of what was free at its start."""
    num_blocks = log.counts.get("num_blocks")
    if settings.kv_cache_memory_bytes is not None or num_blocks is None:
        return settings.kv_cache_memory_bytes
    capacity = plan_memory(shape, device, settings).tightest.capacity
    return capacity.block_bytes // capacity.num_blocks * int(num_blocks) + capacity.residual_bytes


def _rows(log: StartLog, memory: Memory) -> list[LogRow]:
    device = memory.tightest
    predicted = device.spans
    if memory.engine.is_ours and log.is_ours:
        predicted["kv"] = Span.exactly(device.capacity.kv_budget_bytes)
    rows = []
    for part, span in predicted.items():
        logged = log.sizes.get(part)
        if logged is not None:
            rows.append(LogRow(part, span, logged, is_bytes=True, cause=_cause(part, span, logged, predicted, log)))
    block_size = int(log.options.get("block_size", device.capacity.block_size))
    counts = {
        "num_blocks": device.capacity.num_blocks * device.capacity.block_size / block_size,
        "num_tokens": float(memory.num_tokens),
        "concurrency": memory.max_concurrency,
    }
    of_kv = predicted["kv"].likely / log.sizes["kv"] if log.sizes.get("kv") else None
    for name, value in counts.items():
        logged_count = log.counts.get(name)
        if logged_count is not None:
            cause = _count_cause(value, logged_count, of_kv)
            rows.append(LogRow(name, value, logged_count, is_bytes=False, cause=cause))
    return rows


_CAUSES = {
    "weights": "an allocator rounds; or the checkpoint has modules or a padding that its config does not say",
    "activations": "the largest step holds other buffers than are known: another sampler, backend, or tower",
    "outside": "kernels that were loaded, and buffers of communication: they differ by driver and library",
    "graphs": "a line through logs by layers; how many sizes are captured is not in it",
}


def _cause(part: str, span: Span, logged: int, predicted: Mapping[str, Span], log: StartLog) -> str:
    """Say why a size differs; of KV, which of the others it comes from."""
    if abs(span.likely - logged) <= max(_SMALL, _ALIKE * logged):
        return ""
    if part != "kv":
        return _CAUSES[part]
    differences = {
        each: log.sizes[each] - predicted[each].likely
        for each in ("weights", "activations", "outside")
        if each in log.sizes
    }
    told = [f"{each} {bytes_ / GIB:+.2f} GiB" for each, bytes_ in differences.items() if abs(bytes_) > _SMALL]
    if told:
        return f"what is logged has {', '.join(told)}, and KV gets the rest"
    return "the log does not say what the rest went to: another share of the memory, or a KV size that was given"


def _count_cause(predicted: float, logged: float, of_kv: float | None) -> str:
    if not logged or abs(predicted / logged - 1) <= _ALIKE:
        return ""
    if of_kv is not None and abs(predicted / logged / of_kv - 1) <= _ALIKE:
        return "as KV differs"
    return "a request takes other blocks than is known: groups of layers, windows, or a block size of its own"


def named_model(log: StartLog, given: str | None) -> str:
    """Return the model that a log is of.

    Raises:
        ConfigError: neither the log nor the user names one.
    """
    model = given or log.options.get("model")
    if not model:
        message = f"{log.name} does not say of which model it is."
        raise ConfigError(message, remedy="Name it: pagefold plan MODEL, and the rest as it is.")
    return model
