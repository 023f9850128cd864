"""The outline of a transformers model: its modules, with no weights in memory. It tells what packing will take."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from pagefold.runner.packed.layers import Packable, find_packable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from pagefold.kernels.formats import ProductFormat

__all__ = ["Outline", "outline_of"]


class Outline(NamedTuple):
    """A model without weights.

    Attributes:
        model: as transformers makes it.
        packable: what of it is packed.
    """

    model: Any
    packable: Packable

    def num_bytes(self, format_of: Callable[[str], ProductFormat]) -> int:
        """Return the bytes of its weights once it is packed.

        Args:
            format_of: tells the format of a matrix by its name.
        """
        return self.packable.num_bytes(self.model, format_of)


@lru_cache(maxsize=2)  # a model, and one that drafts for it
def outline_of(folder: Path, fingerprint: str, dtype: torch.dtype) -> Outline:  # noqa: ARG001 - another content, another outline
    """Return a model's outline, as its config says.

    Args:
        folder: the model's.
        fingerprint: of its config.
        dtype: of its weights.
    """
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415 - heavy; only with such a model

    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")
    return Outline(model, find_packable(model, dtype))
