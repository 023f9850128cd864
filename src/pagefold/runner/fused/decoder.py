"""FusedDecoder: packed weights, the room they are multiplied in, and the compiled forward pass over both."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
import torch

from pagefold.kernels.compiled import specialised
from pagefold.kernels.emit import FLOAT_BYTES, LINE_BYTES
from pagefold.kernels.formats import PANEL_WIDTH, num_panels
from pagefold.kernels.rows import row_tiles
from pagefold.kernels.team import SYNC_WIDTH, ends
from pagefold.runner.attention.cpu import AttentionRoom, scoring_of
from pagefold.runner.attention.kept_work import tell_counts
from pagefold.runner.fused.adapted import NO_ADAPTERS
from pagefold.runner.fused.kernel import (
    TOKENS_A_CHUNK,
    DecoderRoom,
    DecoderStep,
    DecoderTiles,
    phases,
    run_decoder,
)
from pagefold.runner.fused.pieces import TOKENS_A_TILE
from pagefold.runner.inputs import fill_in

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagefold.runner.fused.adapted import StepAdapters
    from pagefold.runner.fused.adapters import FusedAdapters
    from pagefold.runner.fused.families import FusedConfig
    from pagefold.runner.fused.weights import PackedModel
    from pagefold.runner.inputs import StepInputs
    from pagefold.runner.slab import AnySlab
    from pagefold.runner.torch_runner import OnQueries

__all__ = ["FusedDecoder", "odd_lines"]


class FusedDecoder:
    """A :class:`~pagefold.runner.torch_runner.Decoder` that is one compiled function.

    A token's logits are the same to the bit in any batch, whatever was cached, however prompts are cut into chunks, and
    with any number of threads.

    Args:
        config: of the model.
        packed: the model.
        slab: where its KV is.
        num_threads: how many work together.
        keeps_sinks: whether any layers keep sink tokens.
        chunk_size: of chunks that are packed; 0 where none are.
        on_queries: told each layer's queries of a step, which are kept for it then; None for nobody.
        adapters: those that requests may have; None for none ever.

    Attributes:
        adapters: as given.
    """

    def __init__(  # noqa: PLR0913 - settings, by name
        self,
        config: FusedConfig,
        packed: PackedModel,
        slab: AnySlab,
        *,
        num_threads: int,
        keeps_sinks: bool = False,
        chunk_size: int = 0,
        on_queries: OnQueries | None = None,
        adapters: FusedAdapters | None = None,
    ) -> None:
        self.adapters = adapters
        self._on_queries = on_queries
        self._keeps_sinks = keeps_sinks
        self._num_threads = min(num_threads, numba.config.NUMBA_NUM_THREADS)
        self._num_heads = config.num_heads
        self._num_kv_heads = config.num_kv_heads
        self._head_dim = config.head_dim
        self._vocab_size = config.vocab_size
        self._scoring = scoring_of(config.attention_scale, config.attention_softcap)
        self._packed = packed
        self._weights = packed.weights
        self._attention = AttentionRoom(slab, self._num_heads, self._num_kv_heads, self._num_threads, chunk_size)
        by_rows = row_tiles()
        activation = by_rows.gelu if config.activation == "gelu" else by_rows.silu
        self._tiles = DecoderTiles(by_rows.norm, by_rows.cap, activation)
        self._phases = phases(config.num_layers, caps=config.logit_softcap != 0)
        self._sync = np.zeros((len(self._phases), SYNC_WIDTH), np.int64)
        self._shares = np.zeros((len(self._phases), self._num_threads), np.int64)
        self._began = 0.0
        self._num_tokens = 0  # of the last step
        self._room = self._make_room(1, 1)
        self._kernel: Callable[..., None] | None = None

    def logits(self, inputs: StepInputs) -> torch.Tensor:
        """Compute a step; return the logits of its ``logit_rows``, ``[R, vocab]``, valid until the next step."""
        work = self._attention.dealer.deal(inputs.attention)
        if inputs.moves is not None:
            inputs.moves.hold_all()
        fill_in(inputs.token_ids, inputs.late)
        step = DecoderStep(inputs.token_ids[0].numpy(), inputs.positions[0].numpy(), inputs.logit_rows.numpy())
        num_tokens, num_rows = len(step.token_ids), len(step.logit_rows)
        self._num_tokens = num_tokens
        if num_tokens > len(self._room.hidden) or num_rows > len(self._room.logits):
            most = max(num_tokens, len(self._room.hidden)), max(num_rows, len(self._room.logits))
            self._room = self._make_room(*most)
        self._sync[:] = self._shares[:] = 0
        numba.set_num_threads(self._num_threads)  # of the calling thread
        arguments = (
            self._tiles,
            self._attention.tiles,
            self._num_threads,
            self._sync,
            self._shares,
            self._weights,
            step,
            work,
            self._scoring,
            self._attention.slab_for(work),
            self._room,
            self._attention.scratch,
            self._attention.partials(work.num_slots),
            NO_ADAPTERS if self.adapters is None else self._adapters_of(inputs, step),
        )
        if self._kernel is None:
            self._kernel = specialised(run_decoder, arguments)
        self._began = time.monotonic()
        self._kernel(*arguments)
        tell_counts(work.packs, work.kept_counts, inputs.attention.packed)
        if self._on_queries is not None:
            for layer, rows in enumerate(self._room.qkv):
                queries = torch.from_numpy(rows[:num_tokens, : self._num_heads * self._head_dim])
                self._on_queries(layer, queries.reshape(num_tokens, self._num_heads, self._head_dim))
        return torch.from_numpy(self._room.logits)[:num_rows, : self._vocab_size]

    def _adapters_of(self, inputs: StepInputs, step: DecoderStep) -> StepAdapters:
        assert self.adapters is not None, "there are some"
        return self.adapters.of_step(inputs.adapters, len(step.token_ids), step.logit_rows)

    def states(self) -> torch.Tensor:
        """Return K and V of the last layer, ``[T, 2 * Hkv * D]``."""
        first, end = (num * self._head_dim for num in (self._num_heads, self._num_heads + 2 * self._num_kv_heads))
        return torch.from_numpy(self._room.qkv[-1])[: self._num_tokens, first:end]

    def profile(self) -> dict[str, float]:
        """Return how long the last step's phases took, in seconds, those of all layers together."""
        seconds: defaultdict[str, float] = defaultdict(float)
        for name, taken in zip(self._phases, np.diff(ends(self._sync), prepend=self._began), strict=True):
            seconds[name] += float(taken)
        return dict(seconds)

    def _make_room(self, num_tokens: int, num_rows: int) -> DecoderRoom:
        weights, head_dim, num_heads = self._weights, self._head_dim, self._num_heads
        hidden = weights.norms.shape[2]
        columns = weights.qkv.shape[1] * PANEL_WIDTH
        columns += -columns % head_dim  # rows of whole heads
        most = max(num_tokens, num_rows)  # a token's logits may be wanted twice
        return DecoderRoom(
            hidden=_zeros(num_tokens, num_panels(hidden) * PANEL_WIDTH),
            products=_zeros(most if weights.product_norms.size else 0, num_panels(hidden) * PANEL_WIDTH),
            normed=_zeros(
                max(most, TOKENS_A_CHUNK * self._num_threads), odd_lines(hidden * FLOAT_BYTES) // FLOAT_BYTES
            ),
            qkv=_zeros(1 if self._on_queries is None else len(weights.norms), num_tokens, columns),
            turned=_zeros(num_tokens if self._keeps_sinks else 0, num_heads, head_dim),
            attended=_zeros(num_tokens, num_heads, head_dim),
            inner=_zeros(most, odd_lines(num_panels(weights.intermediate) * PANEL_WIDTH * FLOAT_BYTES) // FLOAT_BYTES),
            last_hidden=_zeros(num_rows, num_panels(hidden) * PANEL_WIDTH),
            last_attended=_zeros(num_rows, num_heads, head_dim),
            rows=np.zeros((most if self._packed.row_bytes else 0, odd_lines(self._packed.row_bytes)), np.uint8),
            logits=_zeros(num_rows, len(weights.head) * PANEL_WIDTH),
            up=_zeros(self._num_threads, TOKENS_A_TILE, PANEL_WIDTH),
        )


def odd_lines(num_bytes: int) -> int:
    """Return the bytes of at least so many that are an odd number of cache lines.

    A tile walks along several rows side by side. Where they are a multiple of 4,096 bytes apart, the numbers that it
    reads together compete for few places of the first-level cache.
    """
    lines = -(-num_bytes // LINE_BYTES)
    return (lines + (lines % 2 == 0)) * LINE_BYTES


def _zeros(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.zeros(shape, np.float32)
