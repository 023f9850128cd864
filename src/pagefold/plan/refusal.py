"""When it does not fit: the nearest settings that do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

from pagefold.errors import ConfigError
from pagefold.plan.memory import plan_memory
from pagefold.plan.weights import find_weight_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pagefold.plan.memory import Memory
    from pagefold.plan.question import Question
    from pagefold.plan.settings import PlanSettings

__all__ = ["Remedy", "nearest_settings"]

_UTILIZATIONS = (0.92, 0.95)
_MAX_CHANGES = 3
_A_CHANGE = 5
"""Each change more is worth avoiding by itself."""

_SHORTEST = 1024
"""A model that serves less than so many tokens is no help, if it was made for more."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """Settings that fit.

    Attributes:
        settings: all of them.
        flags: what is changed.
        max_model_len: the length that fits then.
        max_concurrency: requests of that length at once.
    """

    settings: PlanSettings
    flags: str
    max_model_len: int
    max_concurrency: float

    @property
    def num_devices(self) -> int:
        """Devices that it takes."""
        return self.settings.num_devices


@dataclass(frozen=True, slots=True)
class _Change:
    """One setting, another value.

    Attributes:
        setting: the name of the setting.
        value: the new value of the setting.
        cost: how far from what was asked: small for what costs nothing, large for more devices.
    """

    setting: str
    value: Any
    cost: float

    @property
    def flag(self) -> str:
        return f"--{self.setting.replace('_', '-')} {self.value}"


def nearest_settings(question: Question, *, at_most: int = 3) -> list[Remedy]:
    """Return the settings that fit and change the least of what was asked; fewer where fewer exist.

    The nearest is what costs the least: few changes, and of these a larger share of the memory before shorter
    sequences, KV and weights in fewer bits, and more devices. What needs a change that is not needed is left out.
    """
    changes = sorted(_changes(question), key=lambda change: change.cost)
    candidates = sorted(
        (
            combination
            for number in range(1, _MAX_CHANGES + 1)
            for combination in combinations(changes, number)
            if len({change.setting for change in combination}) == number
        ),
        key=lambda combination: sum(_A_CHANGE + change.cost for change in combination),
    )
    found: list[tuple[frozenset[str], Remedy]] = []
    for combination in candidates:
        names = frozenset(change.flag for change in combination)
        if any(earlier <= names for earlier, _ in found):
            continue
        remedy = _try(question, combination)
        if remedy is not None:
            found.append((names, remedy))
            if len(found) == at_most:
                break
    return [remedy for _, remedy in found]


def _changes(question: Question) -> Iterator[_Change]:  # noqa: C901 - one setting after another
    settings, shape = question.settings, question.shape
    if not question.device.is_cpu:
        for share in _UTILIZATIONS:
            if share > settings.utilization_on(question.device):
                yield _Change("gpu_memory_utilization", share, 1 + share)
        for times in (2, 4, 8, 16):
            size = times * settings.tensor_parallel_size
            if shape.num_heads % size == 0:
                yield _Change("tensor_parallel_size", size, 5 + 2 * times)
    if settings.max_model_len != "auto":
        yield _Change("max_model_len", "auto", 3)
    if settings.kv_cache_memory_bytes is not None:
        yield _Change("kv_cache_memory_bytes", None, 2)
    if settings.kv_cache_dtype in {"auto", "float16", "bfloat16", "float32"}:
        yield _Change("kv_cache_dtype", "fp8", 4)
        yield _Change("kv_cache_dtype", "int4_per_token_head", 7)
    now = 16 if settings.weight_dtype == "auto" else find_weight_dtype(settings.weight_dtype).bits
    for name, cost in (("fp8", 6.0), ("int4-g128", 8.0)):
        if find_weight_dtype(name).bits < now:
            yield _Change("weight_dtype", name, cost)


def _try(question: Question, combination: tuple[_Change, ...]) -> Remedy | None:
    try:
        settings: PlanSettings = replace(question.settings, **{change.setting: change.value for change in combination})
        memory = plan_memory(question.shape, question.device, settings)
        if settings.max_model_len == "auto" and not question.device.is_cpu:
            settings = replace(settings, max_model_len=_surely_longest(memory))
            memory = plan_memory(question.shape, question.device, settings)
    except ConfigError:
        return None
    if not memory.fits or memory.max_model_len < min(_SHORTEST, question.shape.max_positions):
        return None
    shown = [
        change.flag if change.value not in {"auto", None} else _resolved(change.setting, memory.max_model_len)
        for change in combination
    ]
    return Remedy(settings, " ".join(shown), memory.max_model_len, memory.max_concurrency)


def _surely_longest(memory: Memory) -> int:
    """Return the longest sequence that fits also where all is as unfavourable as it may be; 2 where none does."""
    return max(
        2,
        min(
            device.shard.layout.longest_in(
                device.shard.layout.num_blocks(device.kv.low - device.capacity.residual_bytes),
                device.capacity.max_model_len,
                memory.num_new,
            )
            for device in memory.devices
        ),
    )


def _resolved(setting: str, max_model_len: int) -> str:
    if setting == "max_model_len":
        return f"--max-model-len {max_model_len}"
    return f"without --{setting.replace('_', '-')}"
