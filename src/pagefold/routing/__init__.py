"""Routing: which of many servers gets a request, by what each holds of its prompt and by what each has to do.

It decides only. Who tells it what replicas hold, and who sends requests there, is somebody else's
(``index/``, ``sim/replicas.py``, ``integrations/ray/``). Standard library only, and time is told.
"""

from pagefold.routing.choice import Candidate, Choice, ChoiceReason
from pagefold.routing.policies import ROUTING_POLICIES, PrefixRouting, RoutingPolicy
from pagefold.routing.router import Holdings, Prompt, Router

__all__ = [
    "ROUTING_POLICIES",
    "Candidate",
    "Choice",
    "ChoiceReason",
    "Holdings",
    "PrefixRouting",
    "Prompt",
    "Router",
    "RoutingPolicy",
]
