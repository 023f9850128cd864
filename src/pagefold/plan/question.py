"""Question: all that a plan is asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagefold.plan.workload import Lengths, Workload

if TYPE_CHECKING:
    from pagefold.plan.settings import PlanSettings
    from pagefold.plan.shape import ModelShape
    from pagefold.plan.tables import Device

__all__ = ["DEFAULT_WORKLOAD", "Question"]

DEFAULT_WORKLOAD = Workload(name="1,024 tokens in, 128 out (the default)", lengths=(Lengths(1024, 128),))
"""vLLM's random benchmark."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """All that a plan is asked.

    Attributes:
        shape: the model.
        device: the device that it is to run on.
        settings: the settings that it is to run with.
        workload: the requests that are to be served.
        price_per_hour: of one device; None where nobody said.
    """

    shape: ModelShape
    device: Device
    settings: PlanSettings
    workload: Workload = DEFAULT_WORKLOAD
    price_per_hour: float | None = None
