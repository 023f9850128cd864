"""What ``pagefold simulate`` runs on: what a step takes, and which tiers are behind the device."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from pagefold import __version__
from pagefold.config import EngineConfig, available_cpus
from pagefold.errors import ConfigError
from pagefold.files.whole import write_whole
from pagefold.kv.keep import KEEP_ALL, KeepRule

if TYPE_CHECKING:
    from pathlib import Path

    from pagefold.sim.step_cost import LinearStepCost, RooflineStepCost
    from pagefold.sim.tiers import TierModel

__all__ = ["SimulatedMachine", "machine_of", "num_tokens", "tiers_of"]

_SIZE = re.compile(r"([0-9]{1,30}(?:\.[0-9]{1,6})?)\s*([kKmMgG]?)")
_TIMES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_CALIBRATED_LEN = 1024


def tiers_of(**given: float | None) -> TierModel:
    """Return the tiers that were asked for.

    Raises:
        ConfigError: something was said of tiers, and there are none; or a value is out of range.
    """
    from pagefold.sim.tiers import TierModel  # noqa: PLC0415

    known: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if known and not known.get("host_tokens"):
        msg = "Something is said of tiers, and there is no host memory."
        raise ConfigError(msg, remedy="Give --host-tokens: what is evicted goes there first.")
    return TierModel(**known)


def num_tokens(name: str, text: str) -> int:
    """Return what a size such as ``500k`` says.

    Raises:
        ConfigError: it is no size.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        msg = f"{name} is {text!r}."
        raise ConfigError(msg, remedy="It must be a number of tokens, such as 500000, 500k or 3M.")
    return round(float(match[1]) * _TIMES[match[2].lower()])


class SimulatedMachine(NamedTuple):
    """What a step takes, how many tokens of KV fit if that is known, and what each cache group of the model keeps."""

    step_cost: LinearStepCost | RooflineStepCost
    cache_tokens: tuple[int, ...] = ()
    rules: tuple[KeepRule, ...] = (KEEP_ALL,)


def machine_of(file: Path | None, model: str | None, device: str | None, calibration: Path | None) -> SimulatedMachine:
    """Return the machine that the flags name.

    Raises:
        ConfigError: they name several, or a part of one.
    """
    from pagefold.sim.step_cost import LinearStepCost, read_step_cost  # noqa: PLC0415

    if sum(each is not None for each in (file, device, calibration)) > 1:
        msg = "Several flags say what a step takes."
        raise ConfigError(msg, remedy="Give one of --step-cost, --device and --calibrate.")
    if file is not None:
        return SimulatedMachine(read_step_cost(file))
    if device is None and calibration is None:
        if model is not None:
            msg = f"A model is named, {model}, but not on what it runs."
            raise ConfigError(msg, remedy="Give --device or --calibrate with it.")
        return SimulatedMachine(LinearStepCost())
    if model is None:
        msg = "No model is named."
        raise ConfigError(msg, remedy="Give --model with --device or --calibrate.")
    return _calibrated(calibration, model) if calibration is not None else _planned(str(device), model)


def _planned(device: str, model: str) -> SimulatedMachine:
    from pagefold.cli.planned_model import planned_model  # noqa: PLC0415
    from pagefold.plan import PlanSettings, find_device  # noqa: PLC0415
    from pagefold.plan.memory import plan_memory  # noqa: PLC0415
    from pagefold.plan.step_cost import device_step_cost  # noqa: PLC0415
    from pagefold.plan.this_machine import this_cpu  # noqa: PLC0415

    shape = planned_model(model)
    found = this_cpu() if device.lower() == "cpu" else find_device(device)
    memory = plan_memory(shape, found, PlanSettings(engine="pagefold"))  # whose scheduler is simulated
    groups = memory.tightest.shard.layout.groups
    has_equal_blocks = len({group.block_size for group in groups}) == 1
    rules = tuple(group.keeps for group in groups) if has_equal_blocks else (KEEP_ALL,)
    return SimulatedMachine(device_step_cost(shape, found, memory), (memory.tightest.capacity.num_tokens,), rules)


def _calibrated(file: Path, model: str) -> SimulatedMachine:
    from pagefold.engine.build import build_engine  # noqa: PLC0415 - torch comes with it
    from pagefold.engine.planning import plan_engine  # noqa: PLC0415 - torch comes with it
    from pagefold.sim.calibration import calibrate  # noqa: PLC0415
    from pagefold.sim.step_cost import step_cost_json  # noqa: PLC0415

    config = EngineConfig(model=model, max_model_len=_CALIBRATED_LEN, enable_prefix_caching=False)
    engine = build_engine(plan_engine(config), say=lambda _: None)
    cost = calibrate(engine.scheduler, engine.runner, vocab_size=engine.limits.vocab_size)
    source = f"{model} on {available_cpus()} cores, pagefold {__version__}"
    write_whole(file, step_cost_json(cost, source))
    return SimulatedMachine(cost, rules=tuple(engine.scheduler.core.rules))
