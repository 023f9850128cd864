"""Packing the layers of a transformers model: which are packed, one after another, and what they take.

A layer's float weights are let go as soon as it is packed, so that a second copy is there of no more layers than there
are threads. What is packed is what multiplies rows by weights and nothing else: plain linear layers, and experts that
come through transformers' interface. All else stays as it is: norms, embeddings, routers (whose choice should not
depend on how weights are rounded), linear layers of another class, of another dtype than the model's, or with hooks.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pagefold.config import available_cpus
from pagefold.kernels.formats import num_panels
from pagefold.kernels.formats import pack as packed
from pagefold.runner.packed.embedding import PackedEmbedding
from pagefold.runner.packed.experts import PackedExperts, expert_matrices, is_experts, matrices_of
from pagefold.runner.packed.linear import PackedLinear
from pagefold.runner.packed.team import ProductTeam

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from pagefold.kernels.formats import ProductFormat

__all__ = ["Packable", "find_packable", "pack_layers"]

_LAST_MATRICES = "down_proj"
_ROUTERS = ("gate", "router", "shared_expert_gate")
"""Names of linear layers that decide where tokens go, or how much of an expert counts."""


@dataclass(slots=True)
class Packable:
    """What of a model is packed.

    Attributes:
        linears: plain linear layers by name; a layer that the model has twice is there once.
        experts: modules of experts by name.
        embeddings: plain embeddings by name, with the name of the linear layer that has the same matrix.
        others: names of matrices that stay as they are, and are neither embeddings nor routers.
    """

    linears: dict[str, torch.nn.Linear] = field(default_factory=dict)
    experts: dict[str, Any] = field(default_factory=dict)
    embeddings: dict[str, str] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)

    def column_sizes(self) -> dict[str, int]:
        """Return how many numbers a column of each matrix has, by its name."""
        sizes = {f"{name}.weight": linear.in_features for name, linear in self.linears.items()}
        for name, module in self.experts.items():
            sizes |= {f"{name}.{one}": _shape_of_experts(module, one)[2] for one in expert_matrices(module)}
        return sizes

    def num_bytes(self, model: torch.nn.Module, format_of: Callable[[str], ProductFormat]) -> int:
        """Return the bytes of the weights of ``model`` once all that is packed, to the byte.

        Args:
            model: the same, with or without its weights in memory.
            format_of: tells the format of a matrix by its name.
        """
        gone = {id(linear.weight) for linear in self.linears.values()}
        num_bytes = 0
        for name, linear in self.linears.items():
            panel_bytes = format_of(f"{name}.weight").panel_bytes(linear.in_features)
            num_bytes += num_panels(linear.out_features) * panel_bytes
        for name, module in self.experts.items():
            product_format = _format_of_experts(name, format_of)
            for matrices in expert_matrices(module):
                gone.add(id(getattr(module, matrices)))
                num, rows, columns = _shape_of_experts(module, matrices)
                num_bytes += num * num_panels(rows) * product_format.panel_bytes(columns)
        kept = {id(module.weight) for _, module in _embeddings(model) if not _is_plain(module)}
        stays = (one for one in model.parameters() if id(one) not in gone or id(one) in kept)
        return num_bytes + sum(one.nbytes for one in stays)


def find_packable(model: torch.nn.Module, dtype: torch.dtype) -> Packable:
    """Find what of a model is packed.

    Args:
        model: with or without its weights in memory.
        dtype: of the model.
    """
    found = Packable()
    by_weight: dict[int, str] = {}
    for name, module in model.named_modules():
        if is_experts(module) and _experts_dtype(module) == dtype:
            found.experts[name] = module
        elif _packs(name, module, dtype):
            found.linears[name] = module
            by_weight[id(module.weight)] = name
        elif isinstance(module, torch.nn.Embedding):
            continue
        elif name.rpartition(".")[2] not in _ROUTERS:
            matrices = (own for own, one in module.named_parameters(recurse=False) if one.dim() > 1)
            found.others += [f"{name}.{own}" for own in matrices]
    for name, embedding in _embeddings(model):  # they come before their heads
        if _is_plain(embedding) and id(embedding.weight) in by_weight:
            found.embeddings[name] = by_weight[id(embedding.weight)]
    return found


def pack_layers(
    model: Any,  # noqa: ANN401 - transformers' models have no common type
    dtype: torch.dtype,
    format_of: Callable[[str], ProductFormat],
    num_threads: int,
) -> None:
    """Pack a model's layers, on all cores, and let go of their float weights.

    Args:
        model: as :func:`~pagefold.runner.loader.load_model` returned it.
        dtype: of the model.
        format_of: tells the format of a matrix by its name; experts of a layer have one.
        num_threads: how many compute together.
    """
    found = find_packable(model, dtype)
    formats = {name: format_of(f"{name}.weight") for name in found.linears}
    formats |= {name: _format_of_experts(name, format_of) for name in found.experts}
    teams = {
        one: ProductTeam(one, num_threads) for one in dict.fromkeys(formats.values())
    }  # some pack with their tiles
    places = _places(model, {*found.linears.values()})

    def pack_linear(name: str) -> PackedLinear:
        linear = found.linears[name]
        panels = packed(formats[name], linear.weight.detach().float().numpy())[None]
        layer = PackedLinear(linear, panels, teams[formats[name]], name)
        for parent, child in places[id(linear)]:
            setattr(parent, child, layer)
        del found.linears[name]
        return layer

    def pack_experts(name: str) -> None:
        module = found.experts.pop(name)
        panels = [_packed_experts(module, one, formats[name]) for one in expert_matrices(module)]
        PackedExperts(module, (panels[0], panels[1]), teams[formats[name]], name)

    with torch.inference_mode(), ThreadPoolExecutor(available_cpus()) as threads:  # copying lets go of the GIL
        of_experts = threads.map(pack_experts, list(found.experts))
        heads = dict(zip(list(found.linears), threads.map(pack_linear, list(found.linears)), strict=True))
        list(of_experts)
    for name, head in found.embeddings.items():
        parent, child = _owner(model, name)
        made = PackedEmbedding(getattr(parent, child), heads[head].panels, teams[formats[head]], name)
        setattr(parent, child, made)


def _format_of_experts(name: str, format_of: Callable[[str], ProductFormat]) -> ProductFormat:
    """Return the format of a module's experts: one for both of their products."""
    return format_of(f"{name}.{_LAST_MATRICES}")


def _packed_experts(module: torch.nn.Module, name: str, product_format: ProductFormat) -> NDArray[np.uint8]:
    """Return the panels of all experts of a module, ``[experts, P, bytes of a panel]``; one is packed at a time."""
    num, rows, columns = _shape_of_experts(module, name)
    panels = np.zeros((num, num_panels(rows), product_format.panel_bytes(columns)), np.uint8)
    for matrix, into in zip(matrices_of(module, name), panels, strict=True):
        product_format.pack(matrix.detach().float().contiguous().numpy(), into)
    return panels


def _shape_of_experts(module: Any, name: str) -> tuple[int, int, int]:  # noqa: ANN401 - likewise
    """Return how many matrices experts have under a name, and the rows and columns of each."""
    num, rows, columns = getattr(module, name).shape
    return (num, columns, rows) if module.is_transposed else (num, rows, columns)


def _packs(name: str, module: torch.nn.Module, dtype: torch.dtype) -> bool:
    if type(module) is not torch.nn.Linear or name.rpartition(".")[2] in _ROUTERS:
        return False
    has_hooks = module._forward_hooks or module._forward_pre_hooks  # noqa: SLF001 - torch has no other way to ask
    return not has_hooks and module.weight.dtype == dtype


def _experts_dtype(module: Any) -> torch.dtype:  # noqa: ANN401 - transformers' experts have no common type
    dtypes = {getattr(module, name).dtype for name in expert_matrices(module)}
    return dtypes.pop() if len(dtypes) == 1 else torch.bool


def _embeddings(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Embedding]]:
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Embedding):
            yield name, module


def _is_plain(embedding: torch.nn.Embedding) -> bool:
    """Whether an embedding does nothing but look up: those of some families multiply what they found."""
    return type(embedding) is torch.nn.Embedding


def _places(model: torch.nn.Module, wanted: set[torch.nn.Module]) -> dict[int, list[tuple[torch.nn.Module, str]]]:
    """Return where a model has modules: their parents, and under which names."""
    places: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    for parent in model.modules():
        for child, module in parent._modules.items():  # noqa: SLF001 - named_children names each once
            if module in wanted:
                places.setdefault(id(module), []).append((parent, child))
    return places


def _owner(model: torch.nn.Module, name: str) -> tuple[torch.nn.Module, str]:
    parent, _, child = name.rpartition(".")
    return model.get_submodule(parent), child
