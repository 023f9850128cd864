"""Engines of the suite whose loop is the overlapped one."""

from __future__ import annotations

from equivalence.suite import build
from pagefold.engine.overlapped import OverlappedEngine

__all__ = ["build_overlapped", "overlapped"]


def build_overlapped(setting, folder, budget, emit):
    """Build one for a trial."""
    engine = build(setting, folder, budget, emit)
    return overlapped(engine, emit)


def overlapped(engine, emit=None) -> OverlappedEngine:
    """Return the same parts in the overlapped loop."""
    parts = {"emit": emit} if emit is not None else {}
    return OverlappedEngine(
        scheduler=engine.scheduler,
        runner=engine.runner,
        tokenizer=engine.tokenizer,
        limits=engine.limits,
        capacity=engine.capacity,
        **parts,
    )
