"""PackedEmbedding: an embedding that reads its rows out of the panels of the head that it is tied to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from pagefold.kernels.compiled import specialised
from pagefold.kernels.formats import PANEL_WIDTH
from pagefold.runner.packed.kernel import read_columns
from pagefold.runner.packed.let_go import LetGoWeight

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from pagefold.runner.packed.team import ProductTeam

__all__ = ["PackedEmbedding"]


class PackedEmbedding(torch.nn.Module):
    """The embedding of a model whose head has the same matrix: it lies in memory once.

    Args:
        embedding: as torch has it. Its weights are not kept.
        panels: of the head, uint8 ``[1, P, bytes of a panel]``.
        team: who computes in their format.
        name: of the embedding in its model.

    Attributes:
        num_embeddings, embedding_dim, padding_idx: as torch's.
        weight: what is left of it: its shape and dtype.
    """

    def __init__(self, embedding: torch.nn.Embedding, panels: NDArray[np.uint8], team: ProductTeam, name: str) -> None:
        super().__init__()
        self.num_embeddings = embedding.num_embeddings
        self.embedding_dim = embedding.embedding_dim
        self.padding_idx = embedding.padding_idx
        self.weight = LetGoWeight.of(embedding.weight, name)
        self._panels = panels
        self._column = team.product_format.tiles().column
        self._kernel: Callable[..., None] | None = None

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of tokens, ``[..., embedding_dim]``.

        Raises:
            IndexError: a token is not in the vocabulary.
        """
        ids = token_ids.reshape(-1).numpy().astype(np.int64)
        if ids.size and not 0 <= ids.min() <= ids.max() < self.num_embeddings:
            msg = f"tokens between 0 and {self.num_embeddings - 1} have embeddings"
            raise IndexError(msg)
        out = torch.empty(len(ids), self.embedding_dim)
        arguments = self._column, self._panels, PANEL_WIDTH, ids, out.numpy()
        if self._kernel is None:
            self._kernel = specialised(read_columns, arguments)
        self._kernel(*arguments)
        return out.to(self.weight.dtype).reshape(*token_ids.shape, self.embedding_dim)
