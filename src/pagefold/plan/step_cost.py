"""What a step takes on a device at best, for the simulator: the planner's floors as three figures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagefold.errors import ConfigError
from pagefold.plan.floors import decode_operations
from pagefold.plan.timing import peaks, read_weight_bytes
from pagefold.sim.step_cost import RooflineStepCost

if TYPE_CHECKING:
    from pagefold.plan.memory import Memory
    from pagefold.plan.shape import ModelShape
    from pagefold.plan.tables import Device

__all__ = ["device_step_cost"]


def device_step_cost(shape: ModelShape, device: Device, memory: Memory) -> RooflineStepCost:
    """Return the least time of a step of a model on one device: no engine is faster.

    Args:
        shape: of the model.
        device: the device that the model runs on.
        memory: how it lies there.

    Raises:
        ConfigError: the device's peaks are not known.
    """
    flops, bandwidth = peaks(device, memory)
    if flops is None or bandwidth is None:
        msg = f"Of {device.name} it is not known how fast it computes or reads."
        raise ConfigError(msg, remedy="Name a device of pagefold plan --list that has both, or measure: --calibrate.")
    return RooflineStepCost(
        step_s=read_weight_bytes(shape, memory, 1) / bandwidth,
        token_s=decode_operations(shape, 0) / flops,
        context_token_s=memory.layout.bytes_per_token / bandwidth,
    )
