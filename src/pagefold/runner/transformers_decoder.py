"""TransformersDecoder: a model as transformers computes it, with our attention in it. Any family."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from pagefold.errors import UnsupportedModelError
from pagefold.runner.inputs import fill_in
from pagefold.runner.loader import AttentionContext
from pagefold.runner.tokens_before import COUNTING_FAMILIES, TokensBefore
from pagefold.runner.turned_queries import PROBED, TurnedQueries, find_turned_queries

if TYPE_CHECKING:
    from pagefold.runner.attention import AttentionBackend, AttentionInputs
    from pagefold.runner.hooked_adapters import HookedAdapters
    from pagefold.runner.inputs import StepInputs
    from pagefold.runner.slab import AnySlab
    from pagefold.runner.torch_runner import OnQueries

__all__ = ["TransformersDecoder", "told_queries"]


class TransformersDecoder:
    """A :class:`~pagefold.runner.torch_runner.Decoder` over a transformers model.

    Args:
        model: what :func:`~pagefold.runner.loader.load_model` returned.
        slab: its blocks.
        attention: the implementation.
        max_model_len: no sequence gets longer.
        adapters: those that requests may have, in this model; None for none ever.

    Attributes:
        model, adapters: as given.
    """

    def __init__(
        self,
        model: Any,  # noqa: ANN401 - transformers' models have no common type
        slab: AnySlab,
        attention: AttentionBackend,
        *,
        max_model_len: int,
        adapters: HookedAdapters | None = None,
    ) -> None:
        self.adapters = adapters
        self.model = model
        self._slab = slab
        self._attention = attention
        self._max_model_len = max_model_len
        self._counts = model.config.model_type in COUNTING_FAMILIES
        self._last: tuple[torch.Tensor, ...] = ()
        self._turned = TurnedQueries(())

    def learn_turns(self, inputs: StepInputs) -> None:
        """Find out how the model turns its queries, from steps of one token at two positions.

        Args:
            inputs: of a step of one token that sees nothing but itself; it is written.

        Raises:
            UnsupportedModelError: a layer turns them in no way that is known.
        """
        attention, queries = self._attention, []
        self._turned = TurnedQueries([None] * inputs.attention.cells.shape[1])  # a token alone looks at no sink tokens
        self._attention = told_queries(attention, lambda _layer, query: queries.append(query.clone()))
        for position in PROBED:
            self.logits(replace(inputs, positions=torch.full_like(inputs.positions, position)))
        self._attention = attention
        num_layers = len(queries) // len(PROBED)
        self._turned = find_turned_queries(self.model, queries[:num_layers], queries[num_layers:])

    @torch.inference_mode()
    def logits(self, inputs: StepInputs) -> torch.Tensor:
        """Compute a step; see :class:`~pagefold.runner.torch_runner.Decoder`."""
        self._last = ()  # before the step takes memory
        fill_in(inputs.token_ids, inputs.late)
        context = AttentionContext(
            self._attention,
            self._slab,
            inputs.attention,
            max_model_len=self._max_model_len,
            moves=inputs.moves,
            turns=self._turned.at(inputs.positions[0]),
        )
        if self.adapters is not None:
            self.adapters.begin(inputs.adapters)
        output = self.model(
            input_ids=inputs.token_ids,
            position_ids=inputs.positions,
            past_key_values=TokensBefore(inputs.positions) if self._counts else None,
            use_cache=False,
            logits_to_keep=inputs.logit_rows,
            paged=context,
        )
        num_layers = inputs.attention.cells.shape[1]
        if context.layers != list(range(num_layers)):
            msg = f"The model attended in layers {context.layers}, not once in each of {num_layers}."
            raise UnsupportedModelError(msg, remedy="Use a model with one plain attention a layer.")
        self._last = context.last
        logits: torch.Tensor = output.logits[0]
        return logits

    def states(self) -> torch.Tensor:
        """Return K and V of the last layer that has its own, ``[T, 2 * Hkv * D]``."""
        assert self._last, "no step has run"
        return torch.cat([each.flatten(1) for each in self._last], dim=1)


def told_queries(attention: AttentionBackend, on_queries: OnQueries) -> AttentionBackend:
    """Return an attention that tells its queries first."""

    def attend(  # noqa: PLR0913, PLR0917 - the operands of the op
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        slab: AnySlab,
        inputs: AttentionInputs,
        layer: int,
        scale: float,
        softcap: float = 0.0,
        sinks: torch.Tensor | None = None,
        turned: torch.Tensor | None = None,
    ) -> torch.Tensor:
        on_queries(layer, query)
        return attention(query, key, value, slab, inputs, layer, scale, softcap, sinks, turned)

    return attend
