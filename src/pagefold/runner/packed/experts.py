"""PackedExperts: the experts of a mixture, packed, and computed for their own tokens alone.

They come into a model through transformers' ``ExpertsInterface``, which hands a function the module of the experts,
rows, and which experts with what weights each row goes to. The router, which decides that, stays transformers' own; so
does whatever a family does between the two products (its gate) and behind them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pagefold.kernels.rows import row_tiles
from pagefold.runner.packed.kernel import Chosen, ExpertPanels
from pagefold.runner.packed.let_go import LetGoWeight
from pagefold.runner.packed.team import Groups

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from pagefold.runner.packed.team import ProductTeam

__all__ = ["EXPERTS", "PackedExperts", "expert_matrices", "is_experts", "register_experts"]

EXPERTS = "pagefold"
"""The name by which a model asks for our experts."""

_PACKED = "_pagefold_packed"
_GATED, _PLAIN, _LAST = "gate_up_proj", "up_proj", "down_proj"


def is_experts(module: torch.nn.Module) -> bool:
    """Whether a module computes its experts through transformers' interface."""
    return hasattr(module, "is_transposed") and hasattr(module, "has_gate") and hasattr(module, "_apply_gate")


def expert_matrices(module: torch.nn.Module) -> tuple[str, str]:
    """Return the names of an experts module's matrices: of the first product and of the second."""
    return (_GATED if module.has_gate else _PLAIN), _LAST


def matrices_of(module: torch.nn.Module, name: str) -> Iterator[torch.Tensor]:
    """Yield the matrix ``[N, K]`` of each expert."""
    for matrix in getattr(module, name):
        yield matrix.T if module.is_transposed else matrix


class PackedExperts:
    """The experts of one layer.

    Args:
        module: as transformers has them. From here on it computes with the panels, and keeps no float matrices.
        panels: of the first product's matrices and the second's, uint8 ``[experts, P, bytes of a panel]``.
        team: who computes.
        name: of the module in its model.

    Attributes:
        panels: as above.
    """

    def __init__(
        self,
        module: Any,  # noqa: ANN401 - transformers' experts have no common type
        panels: tuple[NDArray[np.uint8], NDArray[np.uint8]],
        team: ProductTeam,
        name: str,
    ) -> None:
        self.panels = panels
        self._team = team
        self._columns: list[int] = []
        self._biases: list[torch.Tensor | None] = []
        for matrices in expert_matrices(module):
            weight = getattr(module, matrices)
            self._columns.append(weight.shape[2 if module.is_transposed else 1])
            self._biases.append(getattr(module, f"{matrices}_bias").detach().float() if module.has_bias else None)
            delattr(module, matrices)
            setattr(module, matrices, LetGoWeight.of(weight, f"{name}.{matrices}"))
        self._activation = _activation_of(module)
        setattr(module, _PACKED, self)

    def compute(
        self,
        module: Any,  # noqa: ANN401 - transformers' experts have no common type
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        """Return the weighted sums of experts, ``[T, E]``; see :func:`_packed_experts`."""
        num_tokens, num_choices = expert_ids.shape
        chosen = expert_ids.reshape(-1).numpy()
        order = np.argsort(chosen, kind="stable")
        groups = Groups(order // num_choices, np.bincount(chosen, minlength=len(self.panels[0])))
        places = np.empty_like(order)
        places[order] = np.arange(len(order))
        places = places.reshape(num_tokens, num_choices)
        if self._activation:
            rows = Chosen(groups.sources, places, weights.float().contiguous().numpy())
            panels = ExpertPanels(*self.panels, num_inner=self._columns[0] // 2)
            out = self._team.compute_experts(x.float(), rows, groups.row_tiles, panels, self._activation)
            return out.to(x.dtype)
        sorted_ids = torch.from_numpy(chosen[order])
        y = self._product(x.float(), 0, groups, sorted_ids)
        y = module._apply_gate(y) if module.has_gate else module.act_fn(y)  # noqa: SLF001 - the interface's own name
        y = self._product(y, 1, groups.in_order(), sorted_ids)
        if module.has_post_expert_norm:
            y = module.post_expert_norm(y.to(x.dtype)).float()
        return self._team.add_weighted(y, places, weights.float(), self._columns[1]).to(x.dtype)

    def _product(self, x: torch.Tensor, which: int, groups: Groups, sorted_ids: torch.Tensor) -> torch.Tensor:
        y = self._team.multiply(x, self.panels[which], groups)[:, : self._columns[which]]
        bias = self._biases[which]
        return y if bias is None else y + bias[sorted_ids]


def _activation_of(module: Any) -> int:  # noqa: ANN401 - transformers' experts have no common type
    """Return the address of a gate's activation, where experts are an MLP with such a gate and nothing else; else 0."""
    from transformers.activations import ACT2FN  # noqa: PLC0415 - heavy; only with a model
    from transformers.integrations.moe import _default_apply_gate  # noqa: PLC0415

    is_plain = module.has_gate and not module.has_bias and not module.has_post_expert_norm
    if not is_plain or type(module)._apply_gate is not _default_apply_gate:  # noqa: SLF001 - the interface's own name
        return 0
    by_rows = row_tiles()
    kinds = {"silu": by_rows.silu, "gelu_pytorch_tanh": by_rows.gelu}
    kind = type(module.act_fn)
    return next((address for name, address in kinds.items() if type(ACT2FN[name]) is kind), 0)


def register_experts() -> str:
    """Make our experts known to transformers; return the name that a model asks for them by."""
    from transformers.integrations.moe import ExpertsInterface  # noqa: PLC0415 - heavy; only with a model

    ExpertsInterface.register(EXPERTS, _packed_experts)
    return EXPERTS


def _packed_experts(
    module: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Experts as transformers' modules call them.

    Args:
        module: of the experts.
        hidden_states: rows, ``[T, E]``.
        top_k_index: which experts each goes to, ``[T, k]``.
        top_k_weights: what each of these counts, ``[T, k]``.
    """
    packed = getattr(module, _PACKED, None)
    assert packed is not None, "experts that nobody has packed"
    return packed.compute(module, hidden_states, top_k_index, top_k_weights)  # type: ignore[no-any-return]
