"""Who runs in the next step, and with how many tokens. Pure: time comes in, a plan goes out."""

from pagefold.scheduler.expected_growth import ADMISSION_RULES
from pagefold.scheduler.guardrails import NO_GUARDRAILS, Guardrails, GuardrailStatus, Rates, Refusal, Targets
from pagefold.scheduler.limits import SchedulerLimits
from pagefold.scheduler.policy import SCHEDULING_POLICIES, SchedulingPolicy
from pagefold.scheduler.prefill_limits import PrefillLimits
from pagefold.scheduler.returning import MAX_EXPECTED_BYTES
from pagefold.scheduler.scheduler import Scheduler
from pagefold.scheduler.tiering import NO_TIERING, Tiering

__all__ = [
    "ADMISSION_RULES",
    "MAX_EXPECTED_BYTES",
    "NO_GUARDRAILS",
    "NO_TIERING",
    "SCHEDULING_POLICIES",
    "GuardrailStatus",
    "Guardrails",
    "PrefillLimits",
    "Rates",
    "Refusal",
    "Scheduler",
    "SchedulerLimits",
    "SchedulingPolicy",
    "Targets",
    "Tiering",
]
