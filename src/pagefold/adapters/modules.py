"""The modules of a decoder that adapters go to, by transformers' names, and their shapes in a model."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["MODULES", "STAGES", "BaseShapes", "Place", "base_shapes", "place_of"]

STAGES = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",))
"""The modules of a layer, those together that are multiplied with the same rows, in the order in which they are."""
MODULES = tuple(module for stage in STAGES for module in stage)

_WEIGHT = ".weight"
_PLACE = re.compile(r"(?:model\.|language_model\.)*layers\.(\d{1,4})\.(self_attn|mlp)\.([a-z]{1,6}_proj)")
_PARENTS = {module: "self_attn" if module in {*STAGES[0], *STAGES[1]} else "mlp" for module in MODULES}


class Place(NamedTuple):
    """A module of a model.

    Attributes:
        layer: counted from 0.
        module: one of :data:`MODULES`.
    """

    layer: int
    module: str

    @property
    def name(self) -> str:
        """What transformers calls it, but for what stands before ``layers``."""
        return f"layers.{self.layer}.{_PARENTS[self.module]}.{self.module}"


def place_of(name: str) -> Place | None:
    """Return the place of a module that transformers calls ``name``; None where adapters do not go to it."""
    found = _PLACE.fullmatch(name)
    if found is None or _PARENTS.get(found[3]) != found[2]:
        return None
    return Place(int(found[1]), found[3])


class BaseShapes(NamedTuple):
    """The model that adapters are for.

    Attributes:
        name: of its folder, for people.
        shapes: ``(N, K)`` of each module's matrix: from K numbers to N.
    """

    name: str
    shapes: Mapping[Place, tuple[int, int]]


def base_shapes(name: str, tensors: Mapping[str, tuple[int, ...]]) -> BaseShapes:
    """Return the modules of a model.

    Args:
        name: of its folder.
        tensors: shapes of all of its tensors, by transformers' names.
    """
    shapes: dict[Place, tuple[int, int]] = {}
    for tensor, shape in tensors.items():
        place = place_of(tensor.removesuffix(_WEIGHT)) if tensor.endswith(_WEIGHT) else None
        if place is not None and len(shape) == 2:  # noqa: PLR2004 - a matrix
            shapes[place] = shape[0], shape[1]
    return BaseShapes(name, shapes)
