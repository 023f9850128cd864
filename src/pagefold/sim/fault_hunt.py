"""Hunting faults: runs drawn by seed, the first that fails shrunk to as little as still fails, and printed as a test.

A. Zeller, R. Hildebrandt, "Simplifying and isolating failure-inducing input", IEEE TSE 28(2), 2002: ddmin.
"""

from __future__ import annotations

from dataclasses import fields, replace
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from pagefold.kv.policies import POLICIES
from pagefold.scheduler import SCHEDULING_POLICIES
from pagefold.sim.faults import Action, Ask, Cancel, Damage, Fault, FaultyRun, ResetCache, Shrink, Step, run_faulty

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Failure", "as_test", "draw_run", "hunt", "shrink_run"]

_FAULTS: tuple[Fault, ...] = ("none", "none", "none", "none", "none", "none", "fails", "lost", "late")


class Failure(NamedTuple):
    """A failure.

    Attributes:
        seed: of the run that failed first.
        run: the shrunk one.
        error: what it fails with.
    """

    seed: int
    run: FaultyRun
    error: str


def draw_run(seed: int, *, num_steps: int = 120) -> FaultyRun:
    """Return a random run of about so many steps, the same for the same seed: prompts share, memory is short."""
    rng = Random(seed)  # noqa: S311 - no secret
    block_size = rng.choice((1, 2, 4, 8))
    num_blocks = rng.randint(6, 40)
    num_host_blocks = rng.choice((0, 0, rng.randint(1, 8), rng.randint(8, 80)))
    max_num_seqs = rng.randint(1, 6)
    longest = num_blocks * block_size
    prompts: list[tuple[int, ...]] = [(0,)]
    actions: list[Action] = []
    number = taken = 0
    while taken < num_steps:
        kind = rng.random()
        if kind < 0.2:  # noqa: PLR2004 - shares of what happens
            base = rng.choice(prompts[-8:])
            kept = base[: rng.randint(0, len(base))]
            prompt = (*kept, *(rng.randrange(3) for _ in range(rng.randint(1, max(1, longest // 3)))))[: longest - 1]
            prompts.append(prompt)
            actions.append(_draw_ask(rng, number, prompt, min(longest - len(prompt), 1 + longest // 3), max_num_seqs))
            number += 1
        elif kind < 0.24:  # noqa: PLR2004
            actions.append(Cancel(rng.randrange(max(1, number))))
        elif kind < 0.27:  # noqa: PLR2004
            actions.append(Shrink(rng.choice((0, 0, num_blocks // 4, num_blocks // 2, num_blocks))))
        elif kind < 0.275:  # noqa: PLR2004
            actions.append(ResetCache())
        elif num_host_blocks and kind < 0.3:  # noqa: PLR2004
            actions.append(Damage(rng.randrange(num_host_blocks)))
        else:
            is_cancelled = rng.random() < 0.05  # noqa: PLR2004
            actions.append(Step(rng.choice(_FAULTS), rng.randrange(max(1, number)) if is_cancelled else None))
            taken += 1
    return FaultyRun(
        num_blocks=num_blocks,
        block_size=block_size,
        num_host_blocks=num_host_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + rng.randint(0, 40),
        eviction_policy=rng.choice(sorted(POLICIES)),
        scheduling_policy=rng.choice(sorted(SCHEDULING_POLICIES)),
        actions=tuple(actions),
    )


def _draw_ask(rng: Random, number: int, prompt: tuple[int, ...], most_output: int, max_num_seqs: int) -> Ask:
    return Ask(
        number,
        prompt,
        num_output=rng.randint(1, max(1, most_output)),
        num_samples=rng.randint(2, max_num_seqs) if max_num_seqs > 1 and rng.random() < 0.15 else 1,  # noqa: PLR2004
        namespace=rng.randrange(2) if rng.random() < 0.2 else 0,  # noqa: PLR2004
        deadline_s=float(rng.randint(1, 40)) if rng.random() < 0.15 else None,  # noqa: PLR2004
        priority=rng.randint(-1, 1) if rng.random() < 0.3 else 0,  # noqa: PLR2004
        pin_s=float(rng.randint(1, 60)) if rng.random() < 0.1 else None,  # noqa: PLR2004
    )


def hunt(num_steps: int, *, seed: int = 0, progress: Callable[[int], None] | None = None) -> Failure | None:
    """Do random runs until they have taken so many steps; return the first failure, shrunk, or None.

    Args:
        num_steps: of all runs together, at least.
        seed: of the first run; the others follow.
        progress: told how many steps are done.
    """
    taken = 0
    while taken < num_steps:
        run = draw_run(seed)
        try:
            taken += max(1, run_faulty(run))
        except Exception as error:  # noqa: BLE001 - whatever a bug raises
            shrunk = shrink_run(run, type(error))
            return Failure(seed, shrunk, _error_of(shrunk) or f"{type(error).__name__}: {error}")
        if progress is not None:
            progress(min(taken, num_steps))
        seed += 1
    return None


def shrink_run(run: FaultyRun, kind: type[Exception]) -> FaultyRun:
    """Return as little of a failing run as still fails with that kind of error."""

    def fails(candidate: FaultyRun) -> bool:
        try:
            run_faulty(candidate)
        except kind:
            return True
        except Exception:  # noqa: BLE001 - another bug, or one of the smaller run itself
            return False
        return False

    while True:
        before = run
        without_host = replace(run, num_host_blocks=0)
        run = without_host if fails(without_host) else run
        run = _fewer_actions(run, fails)
        run = _simpler_actions(run, fails)
        if run == before:
            return run


def _fewer_actions(run: FaultyRun, fails: Callable[[FaultyRun], bool]) -> FaultyRun:
    """Leave out parts of the actions, smaller and smaller ones (ddmin, complements only)."""
    size = max(1, len(run.actions) // 2)
    while True:
        start = 0
        while start < len(run.actions):
            candidate = replace(run, actions=run.actions[:start] + run.actions[start + size :])
            if fails(candidate):
                run = candidate
            else:
                start += size
        if size == 1:
            return run
        size //= 2


def _simpler_actions(run: FaultyRun, fails: Callable[[FaultyRun], bool]) -> FaultyRun:
    """Make each action as plain as it can be, and its prompt and output as short."""
    for index in range(len(run.actions)):
        again = True
        while again:
            again = False
            for simpler in _simpler(run.actions[index]):
                candidate = replace(run, actions=(*run.actions[:index], simpler, *run.actions[index + 1 :]))
                if fails(candidate):
                    run, again = candidate, True
                    break
    return run


def _simpler(action: Action) -> Sequence[Action]:
    """Return what is a little plainer than ``action``, the plainest first."""
    match action:
        case Ask():
            plain = [
                replace(action, num_samples=1),
                replace(action, namespace=0),
                replace(action, deadline_s=None),
                replace(action, priority=0),
                replace(action, pin_s=None),
            ]
            half = len(action.prompt) // 2
            shorter = [replace(action, prompt=action.prompt[:size]) for size in (half, len(action.prompt) - 1) if size]
            less = [
                replace(action, num_output=size)
                for size in (1, action.num_output // 2, action.num_output - 1)
                if 0 < size < action.num_output
            ]
            return [each for each in (*plain, *shorter, *less) if each != action]
        case Step() if action != Step():
            return [Step(), *([Step(action.fault)] if action.cancelled is not None else [])]
        case Shrink() if action.num_blocks > 1:
            return [Shrink(action.num_blocks // 2), Shrink(action.num_blocks - 1)]
        case _:
            return []


def as_test(found: Failure) -> str:
    """Return a failure as a test that can be pasted into a file."""
    run = found.run
    used = sorted({type(action).__name__ for action in run.actions} | {"FaultyRun", "run_faulty"})
    lines = [
        f"from pagefold.sim.faults import {', '.join(used)}",
        "",
        "",
        f"def test_run_{found.seed}_holds():",
        f'    """Found by seed {found.seed}: {" ".join(found.error.split())[:160]}"""'.replace("\\", "\\\\"),
        "    run_faulty(",
        "        FaultyRun(",
    ]
    for field in fields(run):
        value = getattr(run, field.name)
        if field.name != "actions" and value != field.default:
            lines.append(f"            {field.name}={value!r},")
    lines.append("            actions=(")
    lines += [f"                {_action_text(action)}," for action in run.actions]
    return "\n".join([*lines, "            ),", "        )", "    )", ""])


def _action_text(action: Action) -> str:
    """Return an action as it is written, without what is as ever."""
    told = [
        f"{field.name}={getattr(action, field.name)!r}"
        for field in fields(action)
        if getattr(action, field.name) != field.default
    ]
    return f"{type(action).__name__}({', '.join(told)})"


def _error_of(run: FaultyRun) -> str:
    try:
        run_faulty(run)
    except Exception as error:  # noqa: BLE001 - whatever a bug raises
        return f"{type(error).__name__}: {error}"
    return ""
