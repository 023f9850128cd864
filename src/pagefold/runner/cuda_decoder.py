"""CudaDecoder: a model of transformers on a card: inputs in one copy, decoding steps as CUDA graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from pagefold.runner.cuda_graphs import DecodeGraphs, Longest
from pagefold.runner.inputs import on_card
from pagefold.runner.transformers_decoder import TransformersDecoder, told_queries

if TYPE_CHECKING:
    from pagefold.runner.attention import AttentionBackend
    from pagefold.runner.attention.cuda.attention import CudaAttention
    from pagefold.runner.inputs import StepInputs
    from pagefold.runner.slab import AnySlab
    from pagefold.runner.torch_runner import OnQueries

__all__ = ["CudaDecoder"]


class CudaDecoder:
    """A :class:`~pagefold.runner.torch_runner.Decoder` on a card.

    Args:
        model: what :func:`~pagefold.runner.loader.load_model` returned, on the card.
        slab: its blocks, there too.
        kernels: the attention; None for the slow reference, of any dtype.
        max_model_len: no sequence gets longer.
        on_queries: told each layer's queries of a step.

    Attributes:
        model, kernels: as given to the constructor.
        graphs: the captured steps; None before there are any.
    """

    def __init__(
        self,
        model: Any,  # noqa: ANN401 - transformers' models have no common type
        slab: AnySlab,
        kernels: CudaAttention | None,
        *,
        max_model_len: int,
        on_queries: OnQueries | None = None,
    ) -> None:
        from pagefold.runner.attention.reference import reference_attention  # noqa: PLC0415 - not needed to import this module

        attention: AttentionBackend = kernels or reference_attention
        if on_queries is not None:
            attention = told_queries(attention, on_queries)
        self.model = model
        self.kernels = kernels
        self.graphs: DecodeGraphs | None = None
        self._slab = slab
        self._device = slab.data.device
        self._max_model_len = max_model_len
        self._plain = TransformersDecoder(model, slab, attention, max_model_len=max_model_len)

    @torch.inference_mode()
    def logits(self, inputs: StepInputs) -> torch.Tensor:
        """Compute a step; see :class:`~pagefold.runner.torch_runner.Decoder`. The host does not wait for the card."""
        if self.graphs is not None and self.graphs.fits(inputs):
            if inputs.moves is not None:  # a graph waits for nothing in its midst
                inputs.moves.hold_all()
            return self.graphs.logits(inputs)
        tokens_a_tile = self.kernels.shape.tokens_a_tile if self.kernels is not None else 0
        return self._plain.logits(on_card(inputs, self._device, tokens_a_tile, self._slab.block_size))

    def states(self) -> torch.Tensor:
        """Return what :class:`TransformersDecoder` does: a step that a graph replays has tokens that sample only."""
        return self._plain.states()

    @torch.inference_mode()
    def capture(self, like: StepInputs, max_num_seqs: int, **how: Any) -> None:  # noqa: ANN401 - of DecodeGraphs
        """Capture decoding steps of up to ``max_num_seqs`` rows.

        Args:
            like: a decoding step of one row.
            max_num_seqs: rows of the largest.
            how: else what :class:`~pagefold.runner.cuda_graphs.DecodeGraphs` takes.
        """
        assert self.kernels is not None, "the reference reads the host's columns, which no graph does"
        longest = Longest(self._max_model_len, self._slab.block_size)
        graphs = DecodeGraphs(self._plain.logits, self._device, max_num_seqs=max_num_seqs, longest=longest, **how)
        self.kernels.reserve(max_num_seqs, self._device)
        graphs.capture(like)
        self.graphs = graphs
