"""What a layer's kernels are given, by group: each group is made here, under the names of its parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from pagefold.kv import KeepRule
    from pagefold.runner.attention.cuda.blocks import CardBlocks, CellFormat
    from pagefold.runner.attention.cuda.groups import Shape
    from pagefold.runner.attention.device_columns import DeviceColumns
    from pagefold.runner.attention.inputs import AttentionInputs

__all__ = ["Group", "LayerArguments", "of_sinks", "scoring", "vectors"]

_LOG2E = 1.4426950408889634

Group = dict[str, Any]
"""Arguments of kernels that belong together, by name."""


def vectors(name: str, heads: torch.Tensor) -> Group:
    """Return the group of vectors ``[T, heads, D]``, whose numbers lie side by side."""
    return {name: heads, f"{name}_stride_t": heads.stride(0), f"{name}_stride_h": heads.stride(1)}


def of_sinks(sinks: torch.Tensor | None, query: torch.Tensor) -> Group:
    """Return the group of sinks, ``[H]``; where there are none, of something that nobody reads."""
    return {"sinks": query if sinks is None else sinks, "HAS_SINKS": sinks is not None}


def scoring(scale: float, softcap: float) -> Group:
    """Return the group of what makes scores; kernels have them in powers of two."""
    return {
        "scale": scale / softcap if softcap else scale * _LOG2E,
        "softcap": softcap * _LOG2E,
        "HAS_SOFTCAP": softcap > 0.0,
    }


@dataclass(frozen=True, slots=True)
class LayerArguments:
    """What the kernels of one layer are given in a step, whatever is computed.

    Attributes:
        blocks: of the slab.
        columns: of the step.
        keeps: what the layer's cache group keeps.
        form: how the layer's K and V lie in a cell.
        shape: sizes that kernels are compiled for.
        entries: the group of where its entries lie.
    """

    blocks: CardBlocks
    columns: DeviceColumns
    keeps: KeepRule
    form: CellFormat
    shape: Shape
    entries: Group

    @classmethod
    def of(
        cls, blocks: CardBlocks, inputs: AttentionInputs, columns: DeviceColumns, layer: int, shape: Shape
    ) -> LayerArguments:
        """Return those of a layer."""
        keeps, group = inputs.group_of(layer).keeps, columns.groups[inputs.group_of_layer[layer]]
        tables, lengths, cells = group.tables, group.lengths, columns.cells
        entries = {
            "query_starts": columns.query_starts,
            "tables": tables,
            "table_stride_s": tables.stride(0),
            "table_stride_h": tables.stride(1) if tables.shape[1] > 1 else 0,
            "lengths": lengths,
            "length_stride_s": lengths.stride(0),
            "length_stride_h": int(lengths.shape[1] > 1),
            "first_blocks": group.first_blocks,
            "HAS_WINDOW": keeps.trims,
            "cells": cells,
            "cell_stride_s": cells.stride(0) if len(cells) > 1 else 0,
            "layer": layer,
        }
        form = blocks.format_of(int(inputs.cells[0, layer, 0]))  # a layer's cells are alike
        return cls(blocks, columns, keeps, form, shape, entries)

    @property
    def slab(self) -> Group:
        """The slab alone."""
        return {"slab": self.blocks.data, "block_stride": self.blocks.data.stride(0)}

    @property
    def cells(self) -> Group:
        """What those who read codes know of cells."""
        return {
            "places": self.blocks.places,
            "key_centres": self.blocks.stored_key_centres,
            "value_centres": self.blocks.output_centres,
            "num_ranges": self.blocks.num_ranges,
        }

    @property
    def encoded_cells(self) -> Group:
        """What those who encode token by token know of cells."""
        return {
            "places": self.blocks.places,
            "key_centres": self.blocks.key_centres,
            "value_centres": self.blocks.value_centres,
            "num_ranges": self.blocks.num_ranges,
            "bases": self.blocks.key_bases,
        }

    @property
    def residuals(self) -> Group:
        """Residuals and who has which, which is read where blocks are sealed only."""
        return {
            "residuals": self.blocks.residuals,
            "residual_ids": self.columns.residual_ids,
            "num_residuals": self.blocks.num_residuals,
        }

    @property
    def window(self) -> Group:
        """Which entries a token sees, where a window hides some."""
        return {"window": self.keeps.window or 0, "IS_CHUNKED": self.keeps.is_chunked}

    @property
    def constants(self) -> Group:
        """What kernels are compiled for, but for tiles."""
        return {"SHAPE": self.shape, "CELL_FORMAT": self.form}
