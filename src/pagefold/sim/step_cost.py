"""What a step would take: virtual seconds for a plan, by three figures, and the file that keeps them."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Protocol

from pagefold.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pagefold.steps import StepPlan

__all__ = [
    "LinearStepCost",
    "MeasuredStep",
    "RooflineStepCost",
    "StepCost",
    "fit_step_cost",
    "read_step_cost",
    "step_cost_json",
]

_MOST_S = 3600.0


class StepCost(Protocol):
    """Virtual seconds that a plan takes."""

    def __call__(self, plan: StepPlan) -> float:
        """Return the seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearStepCost:
    """A step reads the weights once, computes its tokens, and reads the KV of its sequences, one after another.

    Attributes:
        step_s: seconds that every step takes: weights are read, kernels started.
        token_s: seconds for each token that is computed.
        context_token_s: seconds for each token of KV that is read.
    """

    step_s: float = 8e-3
    token_s: float = 20e-6
    context_token_s: float = 20e-9

    def __call__(self, plan: StepPlan) -> float:
        """Return the seconds that ``plan`` takes."""
        num_computed = len(plan.token_ids)
        num_read = sum(plan.starts) + num_computed
        return self.step_s + num_computed * self.token_s + num_read * self.context_token_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineStepCost:
    """A step computes while it reads: it takes as long as the longer of the two. A floor, which no engine beats.

    Attributes:
        step_s: seconds to read the weights once.
        token_s: seconds to compute a token.
        context_token_s: seconds to read the KV of a token.
    """

    step_s: float
    token_s: float
    context_token_s: float

    def __call__(self, plan: StepPlan) -> float:
        """Return the seconds that ``plan`` takes."""
        num_computed = len(plan.token_ids)
        read_s = self.step_s + (sum(plan.starts) + num_computed) * self.context_token_s
        return max(read_s, num_computed * self.token_s)


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step that somebody timed.

    Attributes:
        num_computed: tokens.
        num_read: tokens of KV that it read: those before, and those computed.
        seconds: how long the step took.
    """

    num_computed: int
    num_read: int
    seconds: float


def fit_step_cost(steps: Sequence[MeasuredStep]) -> LinearStepCost:
    """Return the cost whose relative errors on measured steps are least, squared and added up; no figure is negative.

    Relative ones, since a long prefill must not outweigh a thousand steps of decoding. Three unknowns: the normal
    equations are solved by elimination for every set of figures that may be other than 0, and the best is taken.

    Raises:
        ConfigError: there are no steps.
    """
    rows = [
        ((1 / step.seconds, step.num_computed / step.seconds, step.num_read / step.seconds))
        for step in steps
        if step.seconds > 0
    ]
    if not rows:
        msg = "No step was measured."
        raise ConfigError(msg, remedy="Measure a server that has something to do.")
    best, least = (0.0, 0.0, 0.0), math.inf
    for subset in ((0, 1, 2), (0, 1), (0, 2), (1, 2), (0,), (1,), (2,)):
        figures = _least_squares([[row[index] for index in subset] for row in rows])
        if figures is None or min(figures) < 0:
            continue
        full = [0.0, 0.0, 0.0]
        for index, figure in zip(subset, figures, strict=True):
            full[index] = figure
        error = sum((sum(a * b for a, b in zip(row, full, strict=True)) - 1) ** 2 for row in rows)
        if error < least:
            best, least = (full[0], full[1], full[2]), error
    return LinearStepCost(step_s=best[0], token_s=best[1], context_token_s=best[2])


def _least_squares(rows: list[list[float]]) -> list[float] | None:
    """Return x with the least ``|rows @ x - 1|``; None where the rows do not tell."""
    size = len(rows[0])
    scale = [max(abs(row[column]) for row in rows) or 1.0 for column in range(size)]
    rows = [[value / scale[column] for column, value in enumerate(row)] for row in rows]
    matrix = [
        [sum(row[i] * row[j] for row in rows) for j in range(size)] + [sum(row[i] for row in rows)] for i in range(size)
    ]
    for i in range(size):
        pivot = max(range(i, size), key=lambda row, column=i: abs(matrix[row][column]))  # type: ignore[misc]
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        if abs(matrix[i][i]) < 1e-12 * len(rows):
            return None
        for j in range(size):
            if j != i:
                factor = matrix[j][i] / matrix[i][i]
                matrix[j] = [a - factor * b for a, b in zip(matrix[j], matrix[i], strict=True)]
    return [matrix[i][size] / matrix[i][i] / scale[i] for i in range(size)]


_KINDS: dict[str, type[LinearStepCost | RooflineStepCost]] = {
    "linear": LinearStepCost,
    "roofline": RooflineStepCost,
}
_FIGURES = ("step_s", "token_s", "context_token_s")


def step_cost_json(cost: LinearStepCost | RooflineStepCost, source: str) -> str:
    """Return the file of a cost, with a word on where its figures are from."""
    kind = next(name for name, made in _KINDS.items() if isinstance(cost, made))
    return json.dumps({"kind": kind, **asdict(cost), "source": source}, indent=2) + "\n"


def read_step_cost(path: Path) -> LinearStepCost | RooflineStepCost:
    """Return the cost that a file holds: ``kind`` (``linear`` or ``roofline``) and its three figures in seconds.

    Raises:
        ConfigError: it cannot be read, or holds none.
    """
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
        kind = _KINDS[loaded["kind"]]
        figures = {name: float(loaded[name]) for name in _FIGURES}
    except OSError as error:
        msg = f"The step cost {path} cannot be read: {error.strerror}."
        raise ConfigError(msg, remedy="Name a file that --calibrate wrote.") from None
    except (ValueError, TypeError, KeyError, RecursionError):
        figures = {}
    if not figures or not all(0 <= value < _MOST_S for value in figures.values()) or not any(figures.values()):
        msg = f"{path} is no step cost."
        raise ConfigError(msg, remedy=f"It must hold kind, linear or roofline, and {', '.join(_FIGURES)} in seconds.")
    return kind(**figures)
