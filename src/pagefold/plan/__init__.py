"""The planner: what fits, what it costs and what to switch on, before anything is bought or loaded. No torch."""

from pagefold.plan.plan import Plan, make_plan
from pagefold.plan.question import DEFAULT_WORKLOAD, Question
from pagefold.plan.refusal import Remedy, nearest_settings
from pagefold.plan.settings import PlanSettings
from pagefold.plan.shape import ModelShape
from pagefold.plan.tables import Device, device_names, find_device, find_model, model_names
from pagefold.plan.workload import Lengths, Workload, draw_lengths

__all__ = [
    "DEFAULT_WORKLOAD",
    "Device",
    "Lengths",
    "ModelShape",
    "Plan",
    "PlanSettings",
    "Question",
    "Remedy",
    "Workload",
    "device_names",
    "draw_lengths",
    "find_device",
    "find_model",
    "make_plan",
    "model_names",
    "nearest_settings",
]
