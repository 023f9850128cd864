"""Who runs in the next step, and with how many tokens. Pure: time comes in, a plan goes out."""

from pagefold.scheduler.guardrails import NO_GUARDRAILS, Guardrails, GuardrailStatus, Rates, Refusal, Targets
from pagefold.scheduler.policy import SCHEDULING_POLICIES, SchedulingPolicy
from pagefold.scheduler.returning import MAX_EXPECTED_BYTES
from pagefold.scheduler.scheduler import Scheduler, SchedulerLimits
from pagefold.scheduler.tiering import NO_TIERING, Tiering

__all__ = [
    "MAX_EXPECTED_BYTES",
    "NO_GUARDRAILS",
    "NO_TIERING",
    "SCHEDULING_POLICIES",
    "GuardrailStatus",
    "Guardrails",
    "Rates",
    "Refusal",
    "Scheduler",
    "SchedulerLimits",
    "SchedulingPolicy",
    "Targets",
    "Tiering",
]
