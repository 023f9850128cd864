"""LetGoWeight: what is left of a float matrix that has been packed: its shape, its dtype, an error for who reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import torch

from pagefold.errors import UnsupportedModelError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["LetGoWeight"]


class LetGoWeight(torch.Tensor):
    """A matrix whose numbers lie packed elsewhere. It has no memory.

    Model code asks weights for their dtype, their device and their shape: those it has. Whoever computes with it would
    compute something else than the layer does, and is told so.

    Attributes:
        layer: whose it was, for people.
    """

    layer: str

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # noqa: SLF001 - torch's way

    @classmethod
    def of(cls, weight: torch.Tensor, layer: str) -> Self:
        """Return what is left of ``weight``."""
        made: Self = torch.Tensor._make_wrapper_subclass(  # noqa: SLF001 - torch's way
            cls, weight.shape, dtype=weight.dtype, device=weight.device
        )
        made.layer = layer
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch says otherwise of the one that it has itself
        cls, func: object, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:  # noqa: ANN401 - torch's signature
        """Refuse any operation.

        Raises:
            UnsupportedModelError: always.
        """
        layer = next(one.layer for one in args if isinstance(one, cls)) if args else "a layer"
        msg = f"The model reads the weights of {layer} itself ({func}), and these are packed for products alone."
        raise UnsupportedModelError(msg, remedy="Use another model, or dtype=float64, which packs nothing.")

    def __repr__(self) -> str:  # type: ignore[override]  # nobody prints what is in it
        return f"LetGoWeight({tuple(self.shape)}, dtype={self.dtype}, layer={self.layer!r})"
