"""HookedAdapters: adapters in a model as transformers computes it, by hooks on the modules that they go to.

What kind of module that is does not matter: to what it makes of a step's rows ``[1, T, K]`` a hook adds what adapters
make of theirs, grouped by adapter.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from pagefold.adapters.modules import Place, place_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from pagefold.adapters import AdapterWeights
    from pagefold.adapters.folder import TensorAt

__all__ = ["HookedAdapter", "HookedAdapters"]


class _Halves(NamedTuple):
    """What an adapter does to one module.

    Attributes:
        down: A, ``[r, K]``.
        up: B, ``[N, r]``.
        scale: of both together.
    """

    down: torch.Tensor
    up: torch.Tensor
    scale: float


class HookedAdapter:
    """An adapter's weights, in the dtype of their file.

    Args:
        weights: as they were read.

    Attributes:
        halves: by the module that they are for.
    """

    def __init__(self, weights: AdapterWeights) -> None:
        is_short = weights.adapter.dtype == "BF16"

        def tensor(at: TensorAt) -> torch.Tensor:
            found = torch.from_numpy(np.array(weights.matrix(at)))
            return found.view(torch.bfloat16) if is_short else found

        self.halves: Mapping[Place, _Halves] = {
            part.place: _Halves(tensor(part.down), tensor(part.up), part.scale) for part in weights.adapter.parts
        }

    @property
    def num_bytes(self) -> int:
        """That it takes."""
        return sum(one.down.nbytes + one.up.nbytes for one in self.halves.values())


class HookedAdapters:
    """The adapters of a model, by slot; see :class:`~pagefold.runner.adapter_slots.AdapterSlots`.

    Args:
        model: of transformers, whose modules are hooked.
    """

    def __init__(self, model: Any) -> None:  # noqa: ANN401 - transformers' models have no common type
        self._by_slot: dict[int, HookedAdapter] = {}
        self._rows: dict[int, torch.Tensor] = {}  # of this step, by slot: which tokens have it
        for name, module in model.named_modules():
            place = place_of(name)
            if place is not None:
                module.register_forward_hook(self._hook(place))

    @staticmethod
    def pack(weights: AdapterWeights) -> HookedAdapter:
        """Return an adapter's weights as tensors of their own. Any thread may call it."""
        return HookedAdapter(weights)

    def put(self, slot: int, packed: HookedAdapter) -> None:
        """Put an adapter into a free slot, between steps."""
        assert slot not in self._by_slot, "a slot has one adapter"
        self._by_slot[slot] = packed

    def drop(self, slot: int) -> None:
        """Let go of the adapter in a slot, between steps; no request has it any more."""
        del self._by_slot[slot]

    def begin(self, slots: NDArray[np.int64] | None) -> None:
        """A step begins whose tokens have adapters in these slots, 0 for none; None where none has any."""
        present = [] if slots is None else np.unique(slots[slots > 0]).tolist()
        self._rows = {slot: torch.from_numpy(np.flatnonzero(slots == slot)) for slot in present}

    def _hook(self, place: Place) -> Callable[[object, tuple[torch.Tensor, ...], torch.Tensor], torch.Tensor | None]:
        def add(_module: object, given: tuple[torch.Tensor, ...], made: torch.Tensor) -> torch.Tensor | None:
            for slot, rows in self._rows.items():
                halves = self._by_slot[slot].halves.get(place)
                if halves is None:
                    continue
                down, up, scale = halves
                low = given[0][0, rows] @ down.to(made.dtype).T
                made[0].index_add_(0, rows, (scale * low) @ up.to(made.dtype).T)
            return made

        return add
