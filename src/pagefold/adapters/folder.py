"""AdapterFolder: what ``peft`` has written of a LoRA adapter, checked before anything of it is loaded.

A folder has ``adapter_config.json`` and ``adapter_model.safetensors``. Of each module that it goes to, the file
has A ``[r, K]`` and B ``[N, r]``; the module gives ``W x + s B (A x)``, where s is alpha / r, or alpha / sqrt(r) with
``use_rslora`` (Kalajdzievski, "A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA", 2023).

What would be computed wrongly is refused by name: other kinds of adapters, what they change beside those modules, and
whatever does not have the model's shapes.
"""

from __future__ import annotations

import json
import math
import re
import struct
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from pagefold.adapters.modules import MODULES, BaseShapes, Place, place_of
from pagefold.errors import AdapterError, AdapterNotFoundError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["AdapterFolder", "LowRank", "TensorAt", "read_adapter_folder"]

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_MAX_CONFIG_BYTES, _MAX_HEADER_BYTES = 2**20, 2**24
_ITEM_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")
_PATTERN = re.compile(r"\^?(?:[A-Za-z0-9_.]|\\\.)+\$?")
"""Keys of ``rank_pattern`` and ``alpha_pattern`` that are taken: ends of modules' names. ``peft`` takes any regular
expression, which could take for ever."""
_SHOWN = 80
_MAX_NUMBER = 1e6
"""Of ranks and alphas: what is larger is a mistake."""

_CHANGES_MORE = {
    "use_dora": "weights that are decomposed (DoRA)",
    "lora_bias": "biases beside its matrices",
    "modules_to_save": "whole modules of its own",
    "trainable_token_indices": "tokens of its own",
    "target_parameters": "parameters that are no modules",
    "layer_replication": "layers more than once",
    "fan_in_fan_out": "matrices that lie transposed",
    "use_qalora": "QA-LoRA",
    "use_bdlora": "block-diagonal matrices",
    "alora_invocation_tokens": "an adapter that begins behind certain tokens (aLoRA)",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "velora_config": "VeLoRA",
    "arrow_config": "Arrow, which chooses among adapters",
}
"""Fields of the config that must be false or empty, and what they ask for."""
_OTHER_BASES = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""What ``init_lora_weights`` begins with where the adapter is of a base whose weights were changed for it."""


class TensorAt(NamedTuple):
    """A matrix in the file.

    Attributes:
        begin: of its bytes, counted from the end of the header.
        shape: rows and columns.
    """

    begin: int
    shape: tuple[int, int]


class LowRank(NamedTuple):
    """What an adapter does to one module.

    Attributes:
        place: which.
        rank: of both matrices.
        scale: what their product is multiplied by.
        down: A, ``[rank, K]``.
        up: B, ``[N, rank]``.
    """

    place: Place
    rank: int
    scale: float
    down: TensorAt
    up: TensorAt


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """An adapter that goes with a model, before its weights are read.

    Attributes:
        folder: where it lies.
        dtype: of its weights, as safetensors spells it.
        parts: what it does to each module, in order.
        header: of the file.
        num_bytes: of its matrices.
    """

    folder: Path
    dtype: str
    parts: tuple[LowRank, ...]
    header: bytes
    num_bytes: int

    @property
    def file(self) -> Path:
        """Where its weights are."""
        return self.folder / _WEIGHTS


def read_adapter_folder(folder: Path, base: BaseShapes, max_rank: int) -> AdapterFolder:
    """Read config and header of an adapter, and see that it goes with a model.

    Args:
        folder: of the adapter.
        base: the model.
        max_rank: no rank may be larger.

    Raises:
        AdapterNotFoundError: there is no such folder, or no adapter in it.
        AdapterError: it does not go with the model, or its files are damaged: says what, of which module.
    """
    config = _read_config(folder)
    _check_config(folder, config)
    header, tensors = _read_header(folder / _WEIGHTS)
    dtypes = {tensor["dtype"] for tensor in tensors.values()}
    if len(dtypes) > 1 or not dtypes <= _ITEM_BYTES.keys():
        msg = f"{folder} has weights in {', '.join(sorted(dtypes))}."
        raise AdapterError(msg, remedy=f"Save it in one of {', '.join(_ITEM_BYTES)}.")
    pairs = _pairs_of(folder, tensors)
    places = sorted(pairs, key=lambda place: (place.layer, MODULES.index(place.module)))
    parts = tuple(_part_of(folder, place, pairs[place], base, config) for place in places)
    _check_ranks(folder, parts, config, max_rank)
    _check_targets(folder, parts, base, config)
    (dtype,) = dtypes
    num_bytes = _ITEM_BYTES[dtype] * sum(math.prod(one.shape) for part in parts for one in (part.down, part.up))
    return AdapterFolder(folder, dtype, parts, header, num_bytes)


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / _CONFIG
    if not _is_file(file):
        msg = f"{folder} has no {_CONFIG}."
        raise AdapterNotFoundError(msg, remedy="Name a folder that peft's save_pretrained wrote.")
    try:
        with file.open("rb") as opened:
            config = json.loads(opened.read(_MAX_CONFIG_BYTES))
    except (OSError, ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):
        msg = f"{file} is no JSON object."
        raise AdapterError(msg, remedy="Save the adapter again.")
    return config


def _is_file(file: Path) -> bool:
    """Whether there is such a file.

    Raises:
        AdapterNotFoundError: that cannot be seen: its name is too long for a file, or nobody may look.
    """
    try:
        return file.is_file()
    except OSError as error:
        msg = f"{str(file)[:_SHOWN]} cannot be read: {error.strerror}."
        raise AdapterNotFoundError(msg, remedy="Name a folder that the server may read.") from error


def _check_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Refuse what is no plain LoRA.

    Raises:
        AdapterError: with the field.
    """
    kind = config.get("peft_type")
    if kind != "LORA":
        msg = f"{folder} is an adapter of kind {str(kind)[:_SHOWN]!r}."
        raise AdapterError(msg, remedy="Only LORA is served.")
    if config.get("bias", "none") != "none":
        msg = f"{folder} has bias {str(config['bias'])[:_SHOWN]!r}: it changes biases too."
        raise AdapterError(msg, remedy="Train it with bias='none', or merge it into its base.")
    for field, what in _CHANGES_MORE.items():
        if config.get(field):
            msg = f"{folder} has {field}: {what}."
            raise AdapterError(msg, remedy="Merge it into its base, and serve that.")
    how = config.get("init_lora_weights")
    if isinstance(how, str) and how.lower().startswith(_OTHER_BASES):
        msg = f"{folder} has init_lora_weights {how[:_SHOWN]!r}: it is of a base whose weights were changed for it."
        raise AdapterError(msg, remedy="Save it with path_initial_model_for_weight_conversion, or merge it.")


def _read_header(file: Path) -> tuple[bytes, dict[str, Any]]:
    """Return the header of a safetensors file, and its tensors; each has a shape that fits its bytes."""
    if not _is_file(file):
        msg = f"{file.parent} has no {_WEIGHTS}."
        raise AdapterNotFoundError(msg, remedy="Save the adapter with safe_serialization, as peft does.")
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = opened.read(length) if length <= min(_MAX_HEADER_BYTES, size) else b""
        tensors = {name: tensor for name, tensor in json.loads(header).items() if name != "__metadata__"}
        ends = sorted(_bounds_of(tensor) for tensor in tensors.values())
        lie_in_a_row = all(one[1] == other[0] for one, other in pairwise(ends))
        is_whole = bool(ends) and ends[0][0] == 0 and lie_in_a_row and 8 + length + ends[-1][1] == size
    except (struct.error, ValueError, OSError, AttributeError, TypeError, LookupError, RecursionError):
        is_whole = False
    if not is_whole:
        msg = f"{file} is damaged: it is not a whole safetensors file."
        raise AdapterError(msg, remedy="Download it again, or save the adapter again.")
    return header, tensors


def _bounds_of(tensor: Mapping[str, Any]) -> tuple[int, int]:
    """Return where a tensor's bytes begin and end.

    Raises:
        ValueError: they are not as many as its shape says.
        TypeError: its dtype is no text.
    """
    begin, end = tensor["data_offsets"]
    shape = tensor["shape"]
    if not all(type(number) is int and number >= 0 for number in (begin, end, *shape)):
        raise ValueError(shape)
    if not isinstance(tensor["dtype"], str):
        raise TypeError(tensor["dtype"])
    item_bytes = _ITEM_BYTES.get(tensor["dtype"])
    if item_bytes is not None and end - begin != item_bytes * math.prod(shape):
        raise ValueError(shape)
    return begin, end


def _pairs_of(folder: Path, tensors: Mapping[str, Any]) -> dict[Place, dict[str, TensorAt]]:
    """Return A and B of each module.

    Raises:
        AdapterError: there is something else, or one without the other.
    """
    pairs: dict[Place, dict[str, TensorAt]] = {}
    for name, tensor in tensors.items():
        found = _TENSOR.fullmatch(name)
        place = None if found is None else place_of(found[1])
        if found is None or place is None:
            msg = f"{folder} has {name[:_SHOWN]!r}, which is no matrix A or B of {', '.join(MODULES)}."
            raise AdapterError(msg, remedy="Train it with these target_modules only, or merge it into its base.")
        if len(tensor["shape"]) != 2 or found[2] in pairs.get(place, {}):  # noqa: PLR2004 - a matrix
            msg = f"{folder} has {name[:_SHOWN]!r} twice, or in no two dimensions."
            raise AdapterError(msg, remedy="Save the adapter again.")
        rows, columns = tensor["shape"]
        pairs.setdefault(place, {})[found[2]] = TensorAt(tensor["data_offsets"][0], (rows, columns))
    for place, pair in pairs.items():
        if len(pair) == 1:
            (only,) = pair
            msg = f"{folder} has lora_{only} of {place.name} alone: the other half is missing."
            raise AdapterError(msg, remedy="Save the adapter again.")
    return pairs


def _part_of(
    folder: Path, place: Place, pair: Mapping[str, TensorAt], base: BaseShapes, config: Mapping[str, Any]
) -> LowRank:
    """Return what an adapter does to a module.

    Raises:
        AdapterError: the model has no such module, or one of another shape; or both halves differ in their rank.
    """
    down, up = pair["A"], pair["B"]
    rank, num_in = down.shape
    shape = base.shapes.get(place)
    if shape is None:
        msg = f"{folder} has weights of {place.name}, and {base.name} has no such module."
        raise AdapterError(msg, remedy="It is an adapter of another base: serve it with that one.")
    if (up.shape[0], num_in) != shape:
        msg = (
            f"{folder} goes from {num_in} numbers to {up.shape[0]} in {place.name}, and {base.name} from {shape[1]} to "
            f"{shape[0]}."
        )
        raise AdapterError(msg, remedy="It is an adapter of another base: serve it with that one.")
    if up.shape[1] != rank:
        msg = f"{folder} has lora_A of rank {rank} and lora_B of rank {up.shape[1]} in {place.name}."
        raise AdapterError(msg, remedy="Save the adapter again.")
    alpha = _number(folder, config, "lora_alpha", place)
    if not rank:
        return LowRank(place, 0, 0.0, down, up)
    return LowRank(place, rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank), down, up)


def _check_ranks(folder: Path, parts: tuple[LowRank, ...], config: Mapping[str, Any], max_rank: int) -> None:
    """See that all ranks are those of the config, and none is 0 or too large.

    Raises:
        AdapterError: with the module and its rank.
    """
    for part in parts:
        said = _number(folder, config, "r", part.place)
        if part.rank < 1 or said < 1:
            msg = f"{folder} has rank {min(part.rank, said):g} in {part.place.name}, which does nothing."
            raise AdapterError(msg, remedy="Train it with a rank of at least 1.")
        if part.rank > max_rank:
            msg = f"{folder} has rank {part.rank} in {part.place.name}, and max_lora_rank is {max_rank}."
            raise AdapterError(msg, remedy=f"Start with --max-lora-rank {part.rank}.")
        if part.rank != said:
            msg = f"{folder} has weights of rank {part.rank} in {part.place.name}, and its config says {said:g}."
            raise AdapterError(msg, remedy="Save the adapter again.")


def _check_targets(folder: Path, parts: tuple[LowRank, ...], base: BaseShapes, config: Mapping[str, Any]) -> None:
    """See that weights are there of whatever the config names.

    Raises:
        AdapterError: some are missing.
    """
    targets = config.get("target_modules")
    if not isinstance(targets, list):
        return
    names = [part.place.name for part in parts]
    for target in targets:
        if not isinstance(target, str) or not any(_is_end_of(target, name) for name in names):
            msg = f"{folder} has no weights of {str(target)[:_SHOWN]!r}, which its target_modules name."
            raise AdapterError(msg, remedy=f"Save the adapter again; {', '.join(MODULES)} are served.")
    if config.get("layers_to_transform") is not None or config.get("exclude_modules"):
        return
    there = {part.place for part in parts}
    modules = {place.module for place in there}
    for place in base.shapes:
        if place.module in modules and place.module in targets and place not in there:
            msg = f"{folder} has no weights of {place.name}, which its target_modules name, and {base.name} has it."
            raise AdapterError(msg, remedy="It is an adapter of another base, or was not saved whole.")


def _number(folder: Path, config: Mapping[str, Any], field: str, place: Place) -> float:
    """Return the rank or alpha of a module, as the config says it, with the pattern that goes with it."""
    patterns = config.get({"r": "rank_pattern", "lora_alpha": "alpha_pattern"}[field]) or {}
    said: Any = config.get(field)
    if isinstance(patterns, dict):
        for pattern, number in patterns.items():
            if not _PATTERN.fullmatch(pattern):
                msg = f"{folder} has a pattern {pattern[:_SHOWN]!r}, which is no end of a module's name."
                raise AdapterError(msg, remedy="Write it as q_proj or layers.0.self_attn.q_proj.")
            if _is_end_of(pattern.removeprefix("^").removesuffix("$").replace("\\.", "."), place.name):
                said = number
                break
    if type(said) not in (int, float) or not abs(said) <= _MAX_NUMBER:
        msg = f"{folder} has {field} {str(said)[:_SHOWN]!r} for {place.name}."
        raise AdapterError(msg, remedy=f"It must be a number, of {_MAX_NUMBER:,.0f} at most.")
    return float(said)


def _is_end_of(end: str, name: str) -> bool:
    """Whether a module's whole name may be ``end``, or end with it behind a dot; ``name`` begins with ``layers``."""
    if len(end) > len(name):
        head, _, tail = end.rpartition("layers.")
        return bool(tail) and "layers." + tail == name and head.rstrip(".") in {"model", "base_model.model.model"}
    return name == end or name.endswith("." + end)
