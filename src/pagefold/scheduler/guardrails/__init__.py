"""What keeps a server within its targets: smaller prefills, no drafts, and requests that are refused in time."""

from pagefold.scheduler.guardrails.guardrails import NO_GUARDRAILS, Guardrails, GuardrailStatus, Targets
from pagefold.scheduler.guardrails.landed_step import NO_CAP, LandedStep
from pagefold.scheduler.guardrails.pacing import GivenCap
from pagefold.scheduler.guardrails.rates import Rates
from pagefold.scheduler.guardrails.shedding import Refusal

__all__ = [
    "NO_CAP",
    "NO_GUARDRAILS",
    "GivenCap",
    "GuardrailStatus",
    "Guardrails",
    "LandedStep",
    "Rates",
    "Refusal",
    "Targets",
]
