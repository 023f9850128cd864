"""PackedLinear: a linear layer whose weights lie in panels of a product format."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pagefold.runner.packed.let_go import LetGoWeight

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from pagefold.runner.packed.team import ProductTeam

__all__ = ["PackedLinear"]


class PackedLinear(torch.nn.Module):
    """A linear layer, computed by our tiles: what it says of a row is the same to the bit in any batch.

    What is added and given back has the layer's dtype; products are summed in float32, and rounded behind the bias.

    Args:
        linear: the layer as torch has it. Its weights are not kept.
        panels: they, packed, uint8 ``[1, P, bytes of a panel]``.
        team: who computes.
        name: of the layer in its model.

    Attributes:
        in_features, out_features, bias: as torch's.
        weight: what is left of it: its shape and dtype.
        panels: as above.
    """

    def __init__(self, linear: torch.nn.Linear, panels: NDArray[np.uint8], team: ProductTeam, name: str) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.bias = linear.bias
        self.weight = LetGoWeight.of(linear.weight, name)
        self.panels = panels
        self._team = team
        self._added = None if linear.bias is None else linear.bias.detach().float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x @ weight.T + bias``, ``[..., out_features]``."""
        y = self._team.multiply(x.reshape(-1, self.in_features).float(), self.panels)[:, : self.out_features]
        if self._added is not None:
            y += self._added
        return y.to(x.dtype).reshape(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Return what torch prints of it."""
        form = self._team.product_format.name
        return f"{self.in_features} -> {self.out_features}, {form}, bias={self.bias is not None}"
