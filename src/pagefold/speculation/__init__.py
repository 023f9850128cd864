"""Drafts of what a request will sample next: who guesses, and how many guesses are worth a step's while.

Standard library only, and no part of any answer: what is sampled is the same with any drafts, or none
(``scheduler/verifying.py``).
"""

from pagefold.speculation.acceptance import Acceptance
from pagefold.speculation.drafter import NO_DRAFT, Draft, Drafter
from pagefold.speculation.how_many import Chance, StepCosts, how_many
from pagefold.speculation.model_drafter import ModelDrafter
from pagefold.speculation.ngram import NgramDrafter
from pagefold.speculation.params import METHODS, SpeculativeParams
from pagefold.speculation.tree import TreeDrafter

__all__ = [
    "METHODS",
    "NO_DRAFT",
    "Acceptance",
    "Chance",
    "Draft",
    "Drafter",
    "ModelDrafter",
    "NgramDrafter",
    "SpeculativeParams",
    "StepCosts",
    "TreeDrafter",
    "how_many",
]
