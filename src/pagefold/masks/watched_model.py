"""The watched model: a transformers model under any mask, slow and obvious, which tells what its attention sees.

It is the twin of whoever attends to kept keys alone: every query meets all keys before it, and those that the mask
hides have a score of minus infinity. What is computed beside attention is transformers' own.

Here, and nowhere else, weights of attention exist as numbers, so they are what scorers are fitted to.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from transformers import AttentionInterface

from pagefold.errors import UnsupportedModelError
from pagefold.kv import KEEP_ALL
from pagefold.masks.rule import CHUNK
from pagefold.runner.loader import load_model, odd_arguments
from pagefold.runner.models import inspect_model

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from typing import TypeAlias

    from pagefold.kv import KeepRule
    from pagefold.runner.models import ModelSpec

__all__ = ["Entering", "Mask", "Past", "SeenRows", "WatchedModel", "Watcher", "check_plain"]

_NAME = "pagefold_watched"
_REMEDY = "Masks are for decoders with layers that attend to all tokens, such as Llama, Qwen3 or Gemma 3."

SeenRows: TypeAlias = "Callable[[int, int], torch.Tensor]"
"""From positions ``[first, last)`` of queries to what they see of keys ``[0, last)``: bool ``[Hkv or 1, n, last]``.
Causality comes on top."""


class Past(NamedTuple):
    """Tokens that were read before.

    Attributes:
        keys: of each layer, turned by rope: ``[Hkv, N, D]``.
        values: of each layer: ``[Hkv, N, D]``.
    """

    keys: tuple[torch.Tensor, ...]
    values: tuple[torch.Tensor, ...]

    @property
    def num_tokens(self) -> int:
        """How many tokens these are."""
        return self.keys[0].shape[1]


class Entering(NamedTuple):
    """What enters the attention of one layer.

    Attributes:
        layer: which.
        hidden: of the tokens that are read now, behind the norm: ``[T, hidden]``.
        keys: of these and of all before them, turned by rope: ``[Hkv, N, D]``.
    """

    layer: int
    hidden: torch.Tensor
    keys: torch.Tensor


class Mask(Protocol):
    """Says what queries see."""

    def of_layer(self, entering: Entering) -> SeenRows:
        """Return what queries of a layer see, of what it attends to without a mask."""
        ...


class Watcher(Protocol):
    """Is told what attention sees."""

    def enters(self, entering: Entering) -> None:
        """Take note of what enters a layer's attention."""
        ...

    def attends(self, layer: int, first: int, weights: torch.Tensor) -> None:
        """Take note of the weights that queries of positions ``[first, first + n)`` give to keys ``[0, first + n)``.

        Args:
            layer: which.
            first: position of the first query.
            weights: of the KV heads' groups of query heads: ``[Hkv, G, n, first + n]``. Not to be kept or changed.
        """
        ...


class WatchedModel:
    """A model, loaded to be watched. On CPUs.

    Args:
        folder: the model's.
        dtype: what it computes in.

    Attributes:
        spec: what the folder says of it.

    Raises:
        ModelNotFoundError: there are no weights.
        UnsupportedModelError: it cannot be loaded, no layer attends to all tokens, or one not as plain attention does.
    """

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self.spec = inspect_model(folder)
        check_plain(self.spec)
        AttentionInterface.register(_NAME, _watched_attention)
        self._model: Any = load_model(folder, dtype, attention=_NAME)
        self._hidden: dict[int, torch.Tensor] = {}
        for module in self._model.modules():
            if isinstance(getattr(module, "layer_idx", None), int) and type(module).__name__.endswith("Attention"):
                module.register_forward_pre_hook(self._note, with_kwargs=True)

    @property
    def num_features(self) -> int:
        """How many numbers a hidden state has."""
        return int(self._model.config.hidden_size)

    @torch.inference_mode()
    def read(
        self, token_ids: Sequence[int], *, mask: Mask | None = None, watcher: Watcher | None = None
    ) -> torch.Tensor:
        """Read a text; return the logits of all its positions, ``[T, vocab]``.

        Args:
            token_ids: of the text.
            mask: what queries see; None for all before them.
            watcher: is told.
        """
        watch = _Watch(self._hidden, self.spec, mask=mask, watcher=watcher)
        logits: torch.Tensor = self._model(torch.tensor([[*token_ids]]), use_cache=False, watch=watch).logits[0]
        self._check(watch)
        return logits

    @torch.inference_mode()
    def read_on(self, token_ids: Sequence[int], past: Past | None, *, watcher: Watcher | None = None) -> Past:
        """Read tokens behind ``past``, without a mask, and return both together. No logits are computed.

        Args:
            token_ids: what is read.
            past: what was read before; None where this is the beginning.
            watcher: is told.
        """
        first = 0 if past is None else past.num_tokens
        positions = torch.arange(first, first + len(token_ids))[None]
        watch = _Watch(self._hidden, self.spec, past=past, watcher=watcher)
        self._model.base_model(torch.tensor([[*token_ids]]), position_ids=positions, use_cache=False, watch=watch)
        self._check(watch)
        return Past(tuple(watch.keys), tuple(watch.values))

    def _note(self, module: torch.nn.Module, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        """Take note of the hidden states that a layer's attention is called with."""
        hidden = named["hidden_states"] if "hidden_states" in named else positional[0]
        self._hidden[int(module.layer_idx)] = hidden[0]  # type: ignore[arg-type]

    def _check(self, watch: _Watch) -> None:
        self._hidden.clear()
        if watch.layers != [*range(self.spec.num_layers)]:
            msg = f"{self.spec.model_type} attends in layers {watch.layers}, and has {self.spec.num_layers}."
            raise UnsupportedModelError(msg, remedy=_REMEDY)


def check_plain(spec: ModelSpec) -> None:
    """Refuse a model none of whose layers attends to all tokens, or that reads the K and V of others.

    Raises:
        UnsupportedModelError: it is one.
    """
    reason = ""
    if spec.sources:
        reason = "layers that read the K and V of others"
    elif not spec.full_layers:
        reason = "windows or chunks in all layers"
    if reason:
        msg = f"{spec.model_type} ({spec.folder.name}) has {reason}, whose tokens no mask can choose from."
        raise UnsupportedModelError(msg, remedy=_REMEDY)


class _Watch:
    """What attention needs in every layer of one reading; handed through the model as an argument."""

    def __init__(
        self,
        hidden: dict[int, torch.Tensor],
        spec: ModelSpec,
        *,
        mask: Mask | None = None,
        past: Past | None = None,
        watcher: Watcher | None = None,
    ) -> None:
        self.hidden = hidden
        self.keeps = spec.keeps or (KEEP_ALL,) * spec.num_layers
        self.mask = mask
        self.past = past
        self.watcher = watcher
        self.layers: list[int] = []
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []


def _watched_attention(  # noqa: PLR0913 - transformers calls it so
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    watch: _Watch | None = None,
    **arguments: object,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers' layers call it: ``[1, H, T, D]`` in, ``[1, T, H, D]`` out."""
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    if watch is None or layer not in watch.hidden:
        raise _refusal(module, "is not called as layers call their attention")
    odd = odd_arguments(arguments)
    if odd or attention_mask is not None:
        raise _refusal(module, f"asks for {' and '.join(odd) or 'a mask of its own'}, which is not plain attention")
    keys, values = key[0], value[0]
    if watch.past is not None:
        keys = torch.cat((watch.past.keys[layer], keys), 1)
        values = torch.cat((watch.past.values[layer], values), 1)
    rule = watch.keeps[layer]
    if sliding_window is not None and sliding_window != rule.window and sliding_window < keys.shape[1]:
        raise _refusal(module, f"asks for a window of {sliding_window}, of which its config says nothing")
    watch.layers.append(layer)
    watch.keys.append(keys)
    watch.values.append(values)
    entering = Entering(layer, watch.hidden[layer], keys)
    if watch.watcher is not None:
        watch.watcher.enters(entering)
    seen = watch.mask.of_layer(entering) if watch.mask is not None else None
    num_kv_heads, num_before = keys.shape[0], keys.shape[1] - query.shape[2]
    queries = query[0].reshape(num_kv_heads, -1, *query.shape[2:])  # [Hkv, G, T, D]
    queries = queries * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    out = torch.empty((*queries.shape[:3], values.shape[-1]), dtype=query.dtype)
    for begin in range(0, query.shape[2], CHUNK):
        rows = queries[:, :, begin : begin + CHUNK]
        first, last = num_before + begin, num_before + begin + rows.shape[2]
        shape = (*rows.shape[:3], last)  # [Hkv, G, n, last]
        scores = (rows.flatten(1, 2) @ keys[:, :last].mT).view(shape)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        is_seen = _in_sight(rule, first, last)
        if seen is not None:
            is_seen = (seen(first, last) & is_seen)[:, None]
        weights = scores.masked_fill_(~is_seen, -math.inf).softmax(-1)
        out[:, :, begin : begin + CHUNK] = (weights.flatten(1, 2) @ values[:, :last]).view(*shape[:3], -1)
        if watch.watcher is not None:
            watch.watcher.attends(layer, first, weights)
    return out.flatten(0, 1).transpose(0, 1)[None], None


def _in_sight(rule: KeepRule, first: int, last: int) -> torch.Tensor:
    """Return what queries of ``[first, last)`` see of keys ``[0, last)`` without a mask: bool ``[n, last]``."""
    keys, positions = torch.arange(last), range(first, last)
    firsts = torch.tensor([rule.first_seen(position) for position in positions])
    return (keys >= firsts[:, None]) & (keys <= torch.arange(first, last)[:, None])


def _refusal(module: torch.nn.Module, what: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{type(module).__name__} {what}.", remedy=_REMEDY)
