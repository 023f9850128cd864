"""Loads a transformers model with our attention in it: through ``AttentionInterface``, with no fork of model code."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface, AutoConfig, AutoModelForCausalLM

from pagefold.errors import UnsupportedModelError
from pagefold.files.json_object import read_json_object
from pagefold.files.weights import find_weight_files
from pagefold.runner.fused.checkpoint import Checkpoint
from pagefold.runner.turned_queries import NO_TURNS, StepTurns

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from pagefold.kv import KeepRule
    from pagefold.runner.attention import AttentionBackend, AttentionInputs
    from pagefold.runner.slab import AnySlab
    from pagefold.steps import MovesInFlight

__all__ = ["AttentionContext", "load_model", "odd_arguments", "register_attention"]

_NAME = "pagefold"
_HARMLESS_ARGUMENTS = frozenset(
    {
        "cache_position", "deterministic", "dropout", "is_causal", "output_attentions", "output_hidden_states",
        "output_router_logits", "position_ids", "use_cache",
    }
)  # fmt: skip
"""What layers hand to their attention beside what ours reads, and what changes nothing of what it must compute."""
_MAX_WHY = 300
_REMEDY = "Check that config.json and the weights belong together, or download them again."


class AttentionContext:
    """What our attention needs in every layer of one forward pass; handed through the model as an argument.

    Attributes:
        max_model_len: no sequence gets longer: a sliding window of at least so many tokens never binds.
        turns: of queries that look at sink tokens.
        moves: blocks that are on their way from the host, if there are any.
        layers: which layers have attended so far: a model that skips or repeats one is found out.
        written: K and V of each layer so far that others read, as it had them: who brings its own is found out.
        last: K and V of the last such layer, ``[T, Hkv, D]`` each; nothing before that attends.
    """

    __slots__ = ("backend", "inputs", "last", "layers", "max_model_len", "moves", "slab", "turns", "written")

    def __init__(  # noqa: PLR0913 - settings, by name
        self,
        backend: AttentionBackend,
        slab: AnySlab,
        inputs: AttentionInputs,
        *,
        max_model_len: int,
        moves: MovesInFlight | None = None,
        turns: StepTurns = NO_TURNS,
    ) -> None:
        self.max_model_len = max_model_len
        self.moves = moves
        self.turns = turns
        self.backend = backend
        self.slab = slab
        self.inputs = inputs
        self.layers: list[int] = []
        self.written: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.last: tuple[torch.Tensor, ...] = ()


def register_attention() -> str:
    """Make our attention known to transformers; return the name that a model asks for it by."""
    AttentionInterface.register(_NAME, _paged_attention)
    return _NAME


def load_model(
    folder: Path, dtype: torch.dtype, device: str = "cpu", *, attention: str | None = None, experts: str | None = None
) -> Any:  # noqa: ANN401 - transformers' models have no common type
    """Load the model of ``folder`` for inference on ``device``, with paged attention.

    No mask function is registered under our name, so transformers builds no mask: causality is our attention's.
    Quantized matrices are dequantized first: transformers gets the model that they stand for.

    Args:
        folder: the model's.
        dtype: of the weights.
        device: where they go.
        attention: another attention, by the name under which transformers knows it.
        experts: likewise, what computes experts.

    Raises:
        UnsupportedModelError: the weights are not those of the config's model: transformers would make up what lacks.
            Or what is stored of a quantized matrix contradicts itself.
    """
    name = attention or register_attention()
    source = _source(folder, dtype)
    try:
        model, found = source.kind.from_pretrained(
            source.folder,
            **source.tensors,
            dtype=dtype,
            attn_implementation=name,
            output_loading_info=True,
            **_experts(dtype, experts),
        )
    except RuntimeError as error:  # shapes that differ, among others
        msg = f"transformers cannot load the weights of {folder}: {' '.join(str(error).split())[:_MAX_WHY]}"
        raise UnsupportedModelError(msg, remedy=_REMEDY) from error
    if found["missing_keys"]:
        missing = sorted(found["missing_keys"])
        msg = f"{folder} lacks {len(missing)} of the tensors that its config asks for, such as {missing[0]}."
        raise UnsupportedModelError(msg, remedy=_REMEDY)
    _check_biases(folder, source, found["unexpected_keys"])
    model.eval()
    return model.to(device)


class _Source(NamedTuple):
    """From what transformers loads a model.

    Attributes:
        kind: the class that does.
        folder: the model's; None where it gets tensors.
        tensors: arguments that hold them, as ``state_dict``, and their config; none where it gets a folder.
    """

    kind: Any
    folder: Path | None
    tensors: Mapping[str, Any]


def _check_biases(folder: Path, source: _Source, unexpected: Iterable[str]) -> None:
    """Refuse biases beside quantized matrices that the model has not. Tools write some of zeros for every model."""
    tensors = source.tensors.get("state_dict", {})
    for name in sorted(unexpected):
        if name.endswith(".bias") and name in tensors and bool(tensors[name].any()):
            msg = f"{folder} has {name}, a bias that is not zero, where its config asks for none."
            raise UnsupportedModelError(msg, remedy=_REMEDY)


def _source(folder: Path, dtype: torch.dtype) -> _Source:
    """Return the folder, or the tensors of one with files that transformers would read otherwise: dequantized.

    They are made in the dtype of the weights, so that they are there once.
    """
    is_quantized = bool(read_json_object(folder / "config.json").get("quantization_config"))
    if not is_quantized and not any(file.suffix == ".gguf" for file in find_weight_files(folder)):
        return _Source(AutoModelForCausalLM, folder, {})
    config = AutoConfig.from_pretrained(folder)
    if is_quantized:
        del config.quantization_config
    checkpoint = Checkpoint(folder)
    tensors = {name: checkpoint.tensor(name).to(dtype) for name in checkpoint.names()}
    return _Source(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], None, {"config": config, "state_dict": tensors})


def odd_arguments(arguments: Mapping[str, object]) -> list[str]:
    """Return which arguments of a layer's attention may change what it must compute, and none of ours reads."""
    return sorted(name for name in arguments.keys() - _HARMLESS_ARGUMENTS if arguments[name] is not None)


def _experts(dtype: torch.dtype, asked: str | None) -> dict[str, str]:
    """Return how experts are computed: as asked, or another way where transformers' own does not know the dtype."""
    if asked is not None:
        return {"experts_implementation": asked}
    return {"experts_implementation": "eager"} if dtype == torch.float64 else {}  # not by one product of all


def _paged_attention(  # noqa: PLR0913 - transformers calls it so
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    paged: AttentionContext | None = None,
    **arguments: object,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers' layers call it: ``[1, H, T, D]`` in, ``[1, T, H, D]`` out."""
    if paged is None:
        raise _refusal(module, "does not get the arguments of its model's forward")
    odd = odd_arguments(arguments)
    if odd:
        raise _refusal(module, f"asks for {' and '.join(odd)}")
    if attention_mask is not None:  # no mask function is registered under our name: the model made one itself
        raise _refusal(module, "brings a mask of its own")
    if not getattr(module, "is_causal", True) or arguments.get("is_causal") is False:
        raise _refusal(module, "looks at later tokens too: it is an encoder's")
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    group = paged.inputs.group_of(layer)
    shape = group.lengths.shape[1], paged.slab.head_dim
    for states in (key, value):
        if (states.shape[1], states.shape[3]) != shape:
            msg = f"has {states.shape[1]} KV heads of {states.shape[3]}, where the config says {shape[0]} of {shape[1]}"
            raise _refusal(module, msg)
    _hold_window(module, sliding_window, group.keeps, paged.max_model_len)
    paged.layers.append(layer)
    if paged.moves is not None:
        paged.moves.hold(paged.inputs.source_of(layer))
    keys, values = _to_write(module, layer, key, value, paged)
    queries = query[0].transpose(0, 1)
    out = paged.backend(
        queries,
        keys,
        values,
        paged.slab,
        paged.inputs,
        layer,
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        softcap or 0.0,
        s_aux,
        paged.turns.turn(queries, layer, group.keeps) if group.keeps.num_sinks else None,
    )
    return out[None], None


def _to_write(
    module: torch.nn.Module, layer: int, key: torch.Tensor, value: torch.Tensor, paged: AttentionContext
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a layer writes of its K and V, ``[T, Hkv, D]`` each: none of what another one has written.

    Where blocks are sealed it is written again, the same to the bit: what lies in 16 bit lies there for the time of a
    layer.
    """
    keys, values = key[0].transpose(0, 1), value[0].transpose(0, 1)
    source = paged.inputs.source_of(layer)
    if source == layer:
        if paged.inputs.sources.count(layer) > 1:
            paged.written[layer] = key, value
        if layer == paged.inputs.last_own_layer:
            paged.last = keys, values
        return keys, values
    held = paged.written.get(source)
    if held is None or any(own.data_ptr() != of.data_ptr() for own, of in zip((key, value), held, strict=True)):
        raise _refusal(module, f"has K and V of its own, where the config says it reads those of layer {source}")
    return (keys, values) if paged.slab.seals else (keys[:0], values[:0])


def _hold_window(module: torch.nn.Module, asked: int | None, keeps: KeepRule, max_model_len: int) -> None:
    """Refuse a layer that asks for another window than its cache group keeps, if any sequence can tell.

    A layer that attends by chunks asks for no window: its model says so by its mask, which is not made. Where sink
    tokens are kept, the window is not the model's.
    """
    if keeps.num_sinks or (keeps.is_chunked and asked is None):
        return
    if min(asked or max_model_len, max_model_len) != min(keeps.window or max_model_len, max_model_len):
        kept = f"all of up to {max_model_len} tokens" if keeps.window is None else f"a window of {keeps.window}"
        raise _refusal(module, f"asks for sliding_window={asked}, where the cache keeps {kept}")


def _refusal(module: torch.nn.Module, what: str) -> UnsupportedModelError:
    msg = f"{type(module).__name__} {what}."
    return UnsupportedModelError(msg, remedy="Pagefold does not compute that yet; use another model.")
