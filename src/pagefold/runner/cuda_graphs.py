"""Decoding steps as CUDA graphs: a card is given one graph, not some hundred kernels, for a step.

A graph is captured once for each of some batch sizes, over inputs that always lie in the same places; a step's rows are
filled up to the next size with rows of length 0, which write nothing and are not looked at. So what a graph computes
follows from those inputs alone: they are all that is copied for a step, in one piece.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from pagefold.runner.attention.cuda.columns import most_blocks_seen, seen_tables
from pagefold.runner.attention.device_columns import DeviceColumns
from pagefold.runner.inputs import fill_in
from pagefold.runner.to_device import ALIGNMENT, Packing, put

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from pagefold.kv import KeepRule
    from pagefold.runner.attention import AttentionInputs
    from pagefold.runner.inputs import StepInputs

__all__ = ["DecodeGraphs", "GraphRecorder", "Longest", "graph_sizes"]

_ALL_UP_TO, _STEP = (1, 2, 4), 8


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes that are captured, ascending: 1, 2, 4, every eighth, and ``max_num_seqs``."""
    sizes = {*_ALL_UP_TO, *range(_STEP, max_num_seqs, _STEP), max_num_seqs}
    return sorted(size for size in sizes if size <= max_num_seqs)


class GraphRecorder:
    """Makes CUDA graphs of functions; all of them find room in the same memory, as one replays at a time.

    What a graph returns stays where it is until the graph replays again: no other one is given that memory.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Capture ``compute``; return what replays it, and gives the same tensor each time.

        It runs once before, on a stream of its own: kernels are compiled and loaded then, which a capture cannot hold.
        """
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compute()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            out = compute()

        def replay() -> torch.Tensor:
            graph.replay()
            return out

        return replay


class Longest(NamedTuple):
    """The longest sequence.

    Attributes:
        num_tokens: of it.
        block_size: tokens a block.
    """

    num_tokens: int
    block_size: int

    def width_of(self, keeps: KeepRule) -> int:
        """Return how wide tables are of a group that keeps so much, filled up: a window's are short, however long."""
        num_blocks = most_blocks_seen(keeps, self.num_tokens, self.block_size)
        return num_blocks + -num_blocks % ALIGNMENT


class DecodeGraphs:
    """Replays decoding steps.

    Args:
        forward: a step's logits, on the device, from inputs that are there.
        device: the card.
        max_num_seqs: rows of the largest step.
        longest: the longest sequence.
        record: what makes a graph of a function; None for a :class:`GraphRecorder`. The tests replay on a CPU.
    """

    def __init__(
        self,
        forward: Callable[[StepInputs], torch.Tensor],
        device: torch.device,
        *,
        max_num_seqs: int,
        longest: Longest,
        record: Callable[[Callable[[], torch.Tensor]], Callable[[], torch.Tensor]] | None = None,
    ) -> None:
        self.sizes = graph_sizes(max_num_seqs)
        self._forward = forward
        self._device = device
        self._longest = longest
        self._record = record or GraphRecorder()
        self._graphs: dict[int, _Graph] = {}

    def fits(self, inputs: StepInputs) -> bool:
        """Whether it is a decoding step as they were captured: one token a row, whose logits are all asked for."""
        attention = inputs.attention
        num_rows = attention.num_seqs
        return (
            num_rows == inputs.token_ids.shape[1] == len(inputs.logit_rows)
            and num_rows <= self.sizes[-1]
            and all(  # what a window has is cut to what is seen
                group.keeps.trims or group.tables.shape[2] <= self._longest.width_of(group.keeps)
                for group in attention.groups
            )
        )

    def capture(self, like: StepInputs) -> None:
        """Capture all sizes, the largest first: the others find room in its memory.

        Args:
            like: a decoding step of one row, for what is the same in all steps.
        """
        room = None
        for size in reversed(self.sizes):
            graph = _Graph(self._forward, self._device, size, self._longest, like, self._record, room)
            self._graphs[size], room = graph, graph.room

    def logits(self, inputs: StepInputs) -> torch.Tensor:
        """Compute a step that :meth:`fits`; the logits are valid until the next one."""
        size = self.sizes[bisect_left(self.sizes, inputs.attention.num_seqs)]
        return self._graphs[size].run(inputs)


class _Room:
    """Where the inputs of graphs lie: of all of them in the same memory, as one replays at a time.

    Args:
        num_bytes: of the largest one's.
        device: the card.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        # Two, in turn: the one that was filled for the step before may still be on its way.
        self._hosts = [torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda") for _ in range(2)]
        self.memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)

    def fill(self, packing: Packing, arrays: list[NDArray[Any]]) -> None:
        """Queue a copy of arrays to the card. At most one step before is in flight when the host's is written."""
        host, *others = self._hosts
        self._hosts = [*others, host]
        packed = host[: packing.num_bytes]
        packing.fill(packed, arrays)
        self.memory[: packing.num_bytes].copy_(packed, non_blocking=True)


class _Graph:
    """One batch size: where its inputs lie, and its replay."""

    def __init__(  # noqa: PLR0913, PLR0917 - made in one place
        self,
        forward: Callable[[StepInputs], torch.Tensor],
        device: torch.device,
        size: int,
        longest: Longest,
        like: StepInputs,
        record: Callable[[Callable[[], torch.Tensor]], Callable[[], torch.Tensor]],
        room: _Room | None,
    ) -> None:
        self._block_size = longest.block_size
        attention = like.attention
        self._arrays: list[NDArray[Any]] = [
            np.zeros((1, size), np.int64),  # token ids
            np.zeros((1, size), np.int64),  # positions
            np.zeros(size, np.int32),  # residuals
        ]
        for group in attention.groups:
            self._arrays += [
                np.zeros((size, 1, longest.width_of(group.keeps)), np.int32),  # tables
                np.zeros((size, 1), np.int32),  # lengths: 0 of a row that fills up
                np.zeros(size, np.int32),  # first blocks
            ]
        self._packing = packing = Packing(self._arrays)
        self.room = room or _Room(packing.num_bytes, device)
        self.room.memory.zero_()  # what another size has left there means something else here
        token_ids, positions, residual_ids, *of_groups = packing.views(self.room.memory[: packing.num_bytes])
        self._token_ids = token_ids
        rows = put(np.arange(size + 1, dtype=np.int32), device)
        cells = put(np.array(attention.cells[:1]), device)
        tiles = torch.empty((0, 2), dtype=torch.int32, device=device)
        columns = DeviceColumns.of([rows, rows[:size], cells, rows[:size], tiles, residual_ids, *of_groups])
        # Kept, since a graph has addresses alone: what lies there must not be freed, and given to others.
        self._inputs = inputs = replace(
            like,
            token_ids=token_ids,
            positions=positions,
            logit_rows=rows[:size].long(),
            attention=replace(attention, on_device=columns),
        )
        self._replay = record(lambda: forward(inputs))

    def run(self, inputs: StepInputs) -> torch.Tensor:
        """Fill in a step's rows and replay."""
        token_ids, positions, residual_ids, *of_groups = self._arrays
        attention = inputs.attention
        num_rows = attention.num_seqs
        token_ids[0, :num_rows] = inputs.token_ids[0].numpy()
        positions[0, :num_rows] = inputs.positions[0].numpy()
        if attention.residual_ids is not None:
            residual_ids[:num_rows] = attention.residual_ids
        self._fill_groups(attention, of_groups)
        self.room.fill(self._packing, self._arrays)
        fill_in(self._token_ids, inputs.late)
        return self._replay()[:num_rows]

    def _fill_groups(self, attention: AttentionInputs, of_groups: list[NDArray[Any]]) -> None:
        """Write where each cache group has the entries of a step's rows."""
        num_rows, num_new = attention.num_seqs, np.diff(attention.query_starts)
        for at, group in enumerate(attention.groups):
            tables, lengths, first_blocks = of_groups[3 * at : 3 * at + 3]
            seen, first_blocks[:num_rows] = seen_tables(group, num_new, self._block_size)
            tables[:num_rows, 0, : seen.shape[2]] = seen[:, 0]
            lengths[:num_rows, 0] = group.lengths[:, 0]
            lengths[num_rows:] = 0
