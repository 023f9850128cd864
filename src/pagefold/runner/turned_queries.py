"""TurnedQueries: queries of transformers' layers as they look at sink tokens, which lie nearer than they were written.

Rope (Su et al., "RoFormer", 2021, section 3.2) turns pairs of a head's numbers by angles that grow with the position,
so that scores depend on distances alone. With sink tokens positions count in the cache (StreamingLLM: Xiao et al.,
2023, section 3.2): the window follows the sink tokens at once. K stays as it was written; the queries that look at sink
tokens are turned back by what lies between.

Families pair numbers in two ways, turn all of a head or its first part, and some layers turn nothing. What a model does
is not read from its config but found out: its queries of one token at two positions say it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pagefold.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagefold.kv import KeepRule

__all__ = ["NO_TURNS", "PROBED", "LayerRope", "StepTurns", "TurnedQueries", "find_turned_queries"]

PROBED = (0, 5)
"""The positions of the token by which a model is found out."""

_BOUND = 0.03
"""By how much of their size queries may be beside what is expected: bfloat16 rounds by less, another rope by more."""


class LayerRope(NamedTuple):
    """How a layer turns its queries.

    Attributes:
        frequencies: float64 ``[R / 2]``: radians a position of each pair; the first R numbers of a head are turned.
        is_interleaved: whether pairs lie side by side, rather than half of R apart.
    """

    frequencies: torch.Tensor
    is_interleaved: bool

    def turn(self, queries: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        """Return ``[T, H, D]`` turned by angles whose cosines and sines are ``[T, 1, R / 2]``."""
        num_turned = 2 * len(self.frequencies)
        turned = queries.to(cosines.dtype, copy=True)
        if self.is_interleaved:
            first, second = turned[..., 0:num_turned:2], turned[..., 1:num_turned:2]
        else:
            first, second = turned[..., : num_turned // 2], turned[..., num_turned // 2 : num_turned]
        new_first, new_second = first * cosines - second * sines, second * cosines + first * sines
        first.copy_(new_first)
        second.copy_(new_second)
        return turned.to(queries.dtype)


class StepTurns:
    """The turns of one step's queries.

    Args:
        ropes: of each layer; None where it turns nothing.
        positions: int64 ``[T]``: of the step's tokens.
    """

    def __init__(self, ropes: Sequence[LayerRope | None], positions: torch.Tensor) -> None:
        self._ropes = ropes
        self._positions = positions
        self._angles: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor] | None] = {}

    def turn(self, queries: torch.Tensor, layer: int, keeps: KeepRule) -> torch.Tensor:
        """Return a layer's queries ``[T, H, D]`` as they look at the sink tokens that ``keeps`` has."""
        assert self._ropes, "nobody found out how the model turns its queries"
        rope = self._ropes[layer]
        angles = None if rope is None else self._angles_of(rope, keeps)
        return queries if rope is None or angles is None else rope.turn(queries, *angles)

    def _angles_of(self, rope: LayerRope, keeps: KeepRule) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return cosines and sines, float64 or float32 ``[T, 1, R / 2]``; None where nothing is turned yet."""
        assert keeps.window is not None, "sink tokens are those before a window"
        last = keeps.num_sinks + keeps.window - 1  # the place of a query in the cache, once that is full
        key = id(rope), last
        if key not in self._angles:
            back = (self._positions - last).clamp(min=0).double()
            angles = -back[:, None, None] * rope.frequencies
            self._angles[key] = (angles.cos(), angles.sin()) if back.any() else None
        return self._angles[key]


NO_TURNS = StepTurns((), torch.zeros(0, dtype=torch.int64))
"""Those of models that keep no sink tokens."""


class TurnedQueries:
    """How a model's layers turn queries.

    Args:
        ropes: of each layer; None where it turns nothing. Empty where nobody asks.
    """

    def __init__(self, ropes: Sequence[LayerRope | None]) -> None:
        self.ropes = tuple(ropes)

    def at(self, positions: torch.Tensor) -> StepTurns:
        """Return the turns of a step whose tokens have these positions, int64 ``[T]``."""
        return StepTurns(self.ropes, positions) if self.ropes else NO_TURNS


def find_turned_queries(
    model: Any,  # noqa: ANN401 - transformers' models have no common type
    at_first: Sequence[torch.Tensor],
    at_second: Sequence[torch.Tensor],
) -> TurnedQueries:
    """Find out how each layer turns its queries.

    Args:
        model: whose ropes are the candidates.
        at_first: of each layer, the queries ``[1, H, D]`` of one token that sees nothing but itself, at the first of
            the positions ``PROBED``.
        at_second: the same at the second one.

    Raises:
        UnsupportedModelError: a layer turns them in no way that is known.
    """
    frequencies = [
        buffer.detach().double().cpu()
        for name, buffer in model.named_buffers()
        if name.endswith("inv_freq") and "original" not in name
    ]
    candidates = [None, *(LayerRope(each, is_interleaved=odd) for each in frequencies for odd in (False, True))]
    ropes = []
    for layer, (before, after) in enumerate(zip(at_first, at_second, strict=True)):
        errors = [_error(rope, before, after) for rope in candidates]
        best = min(range(len(errors)), key=errors.__getitem__)
        if errors[best] > _BOUND:
            msg = f"{type(model).__name__} turns the queries of layer {layer} in no way that is known here."
            raise UnsupportedModelError(msg, remedy="Leave streaming_llm out, or use another model.")
        ropes.append(candidates[best])
    return TurnedQueries(ropes)


def _error(rope: LayerRope | None, before: torch.Tensor, after: torch.Tensor) -> float:
    """Return by how much of its size ``after`` is beside what a rope makes of ``before``."""
    expected = before.double().cpu()
    if rope is not None:
        if 2 * len(rope.frequencies) > before.shape[-1]:
            return float("inf")
        angles = (PROBED[1] - PROBED[0]) * rope.frequencies.expand(len(before), 1, -1)
        expected = rope.turn(expected, angles.cos(), angles.sin())
    size = after.double().norm().item()
    return float((after.double().cpu() - expected).norm()) / size if size else 0.0
