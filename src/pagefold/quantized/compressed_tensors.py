"""compressed-tensors, as llm-compressor saves it: schemes for groups of modules, each in a format.

``pack-quantized``: ``weight_packed`` is int32 ``[N, K * bits / 32]``: a word holds codes of columns that follow each
other, the first in the lowest bits, each more by half of their range than what it stands for. ``weight_scale`` is
``[N, K / group_size]``, or ``[N, 1]``. ``weight_zero_point`` is packed likewise, along its rows. ``weight_g_idx`` is
the group of each column of the model, where columns are in the order of their activations. ``weight_shape`` is N and K.
``int-quantized``, ``float-quantized`` and ``naive-quantized``: ``weight`` is int8 or e4m3 ``[N, K]``, with scales for
matrix, rows, groups or blocks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pagefold.errors import UnsupportedModelError
from pagefold.quantized.fields import flag_of, group_size_of, number_of, refused, word_of
from pagefold.quantized.layout import (
    WORD_BITS,
    Grid,
    MatrixLayout,
    Packed,
    Part,
    StoredTensors,
    damaged,
    matrix_of,
    part_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["CompressedTensors", "Scheme", "read_compressed_tensors"]

_METHOD = "compressed-tensors"
_PLAIN = "int-quantized", "float-quantized", "naive-quantized"
_FORMATS = "pack-quantized", *_PLAIN
_STRATEGIES = "tensor", "channel", "group", "block"
_CODES = {"I8": "int", "F8_E4M3": "float"}
"""Dtypes of codes that are no words, with the type that a scheme calls them."""
_ODD = "U8", "I16", "F8_E5M2"
"""Dtypes of codes that nobody defines here."""
_FLOATS = "F16", "BF16", "F32"
_LONGEST, _MOST_REPEATS, _LONGEST_NAME = 500, 3, 200
"""Characters of an expression, what in it repeats without end, and characters of a name: more could take for ever."""
_REPEATS = re.compile(r"[*+]|\{\d*,\}")
_REPEATED_GROUP = re.compile(r"\)(?:[*+]|\{)")
"""A group that repeats: where it has something that repeats in it, that takes for ever on some names."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the modules of a group are quantized.

    Attributes:
        targets: names of modules, expressions behind ``re:``, or classes.
        bits: of a code.
        type: ``int`` or ``float``.
        is_symmetric: whether there are no zero points.
        strategy: what shares a scale: ``tensor``, ``channel``, ``group`` or ``block``.
        rows, columns: of the matrix that share one; 0 for all.
        is_ordered: whether columns are in groups by the order of their activations.
        activations: how they were meant to be rounded; empty for not at all.
    """

    targets: tuple[str, ...]
    bits: int
    type: str
    is_symmetric: bool
    strategy: str
    rows: int
    columns: int
    is_ordered: bool
    activations: str

    @property
    def name(self) -> str:
        """Bits and what shares a scale."""
        kind = "8 bit (e4m3)" if self.type == "float" else f"{self.bits} bit"
        of = {"tensor": "whole matrices", "channel": "channels", "group": f"groups of {self.columns}"}
        return f"{kind} in {of.get(self.strategy, f'blocks of {self.rows} x {self.columns}')}"


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """A folder in compressed-tensors; see :class:`~pagefold.quantized.quantization.Quantization`.

    Attributes:
        schemes: of its groups.
        ignored: modules that are not quantized, in the words of ``targets``.
    """

    schemes: tuple[Scheme, ...]
    ignored: tuple[str, ...]

    @property
    def name(self) -> str:
        """What a start says."""
        return f"compressed-tensors, {' and '.join(dict.fromkeys(scheme.name for scheme in self.schemes))}"

    @property
    def activations(self) -> str:
        """How they were meant to be rounded."""
        return " and ".join(dict.fromkeys(scheme.activations for scheme in self.schemes if scheme.activations))

    def layout(self, module: str, stored: StoredTensors) -> MatrixLayout | None:
        """Return how the matrix of a module is stored; see the protocol."""
        packed, plain = f"{module}.weight_packed", stored.get(f"{module}.weight")
        if packed in stored:
            return _packed(module, stored, self._scheme_of(module))
        if plain is not None and plain.dtype in {*_CODES, *_ODD}:
            return _plain(module, stored, plain, self._scheme_of(module))
        return None

    def _scheme_of(self, module: str) -> Scheme:
        """Return the scheme of a quantized module: by its name, then by expressions, then by its class."""
        if _matches(module, self.ignored):
            msg = f"{module} has quantized weights, and the config's ignore has it"
            raise damaged(msg)
        for is_right in (_is_named, _is_expressed, _is_of_class):
            found = next((one for one in self.schemes if any(is_right(module, each) for each in one.targets)), None)
            if found is not None:
                return found
        msg = f"{module} has quantized weights, and no group of the config is for it"
        raise damaged(msg)


def read_compressed_tensors(fields: Mapping[str, Any]) -> CompressedTensors:
    """Read a ``quantization_config`` of compressed-tensors.

    Raises:
        UnsupportedModelError: it is of a kind that is not computed; says which.
    """
    sparsity = fields.get("sparsity_config")
    sparse = word_of(sparsity, "format", default="dense") if isinstance(sparsity, dict) and sparsity else "dense"
    if sparse != "dense":
        msg = f"by {_METHOD} in the sparse format {sparse}"
        raise refused(msg, f"{_METHOD} without sparsity")
    if fields.get("transform_config"):
        msg = f"by {_METHOD} with transforms of activations"
        raise refused(msg, f"{_METHOD} without transform_config")
    groups = fields.get("config_groups")
    groups = groups if isinstance(groups, dict) else {}
    whole = word_of(fields, "format", default="dense")
    schemes = tuple(_scheme(str(name), group, whole) for name, group in groups.items() if not _is_of_rounding(group))
    if not schemes:
        msg = f"by {_METHOD} without config_groups of weights"
        raise refused(msg, f"{_METHOD} with some")
    ignored = fields.get("ignore") or []
    return CompressedTensors(schemes, _targets(ignored, "ignore"))


def _is_of_rounding(group: object) -> bool:
    """Whether a group says how activations are rounded, and has no weights: of attention, or of K and V."""
    return isinstance(group, dict) and group.get("weights") is None and isinstance(group.get("input_activations"), dict)


def _scheme(name: str, group: object, whole: str) -> Scheme:
    weights = group.get("weights") if isinstance(group, dict) else None
    if not isinstance(group, dict) or not isinstance(weights, dict):
        msg = f"by {_METHOD} with no scheme of weights in {name[:40]}"
        raise refused(msg, f"{_METHOD} with one in each group")
    form = word_of(group, "format", default=whole)
    if form not in _FORMATS:
        msg = f"by {_METHOD} in the format {form}"
        raise refused(msg, f"{_METHOD} in the format {' or '.join(_FORMATS)}")
    kind = word_of(weights, "type", default="int")
    if kind not in {"int", "float"}:
        msg = f"by {_METHOD} with numbers of type {kind}"
        raise refused(msg, f"{_METHOD} with int or float")
    bits = number_of(weights, "num_bits", 8, (8,) if kind == "float" else (4, 8), _METHOD)
    is_symmetric = flag_of(weights, "symmetric", default=True)
    if kind == "float" and not is_symmetric:
        msg = f"by {_METHOD} with zero points of floats"
        raise refused(msg, f"{_METHOD} with symmetric floats")
    strategy = _strategy(weights)
    rows, columns = 1, 0
    if strategy == "tensor":
        rows = 0
    elif strategy == "group":
        columns = group_size_of(weights, _METHOD, "group_size", default=None)
        if columns == -1:
            msg = f"by {_METHOD} in groups of -1"
            raise refused(msg, f"{_METHOD} in channels")
    elif strategy == "block":
        rows, columns = _block(weights)
    return Scheme(
        targets=_targets(group.get("targets"), "targets"),
        bits=bits,
        type=kind,
        is_symmetric=is_symmetric,
        strategy=strategy,
        rows=rows,
        columns=columns,
        is_ordered=word_of(weights, "actorder") in {"group", "dynamic", "true"},
        activations=_rounding(group),
    )


def _strategy(weights: Mapping[str, Any]) -> str:
    """Return what shares a scale; where a config does not say it, its ``group_size`` does."""
    given = word_of(weights, "strategy")
    if not given:
        size = weights.get("group_size")
        given = "tensor" if size is None else "channel" if size == -1 else "group"
    if given not in _STRATEGIES:
        msg = f"by {_METHOD} with scales by {given}"
        raise refused(msg, f"{_METHOD} with scales by {' or '.join(_STRATEGIES)}")
    return given


def _block(weights: Mapping[str, Any]) -> tuple[int, int]:
    block = weights.get("block_structure")
    if isinstance(block, str):  # as "128x128", once
        block = [int(size) if size.isdecimal() else 0 for size in block[:40].split("x")]
    if not isinstance(block, list) or len(block) != 2 or not all(type(one) is int and one > 0 for one in block):  # noqa: PLR2004
        message = f"The config says block_structure = {repr(weights.get('block_structure'))[:40]}."
        raise UnsupportedModelError(message, remedy="It must be rows and columns of a block, at least 1 each.")
    return block[0], block[1]


def _rounding(group: Mapping[str, Any]) -> str:
    """Return how a group's activations were meant to be rounded; empty for not at all."""
    found = []
    for name in ("input_activations", "output_activations"):
        args = group.get(name)
        if isinstance(args, dict):
            kind = "fp" if word_of(args, "type", default="int") == "float" else "int"
            when = "dynamic" if args.get("dynamic") else "static"
            found.append(f"{kind}{word_of(args, 'num_bits', default='8')}, {when} per {word_of(args, 'strategy')}")
    return " and ".join(dict.fromkeys(one.removesuffix(" per ") for one in found))


def _targets(given: object, name: str) -> tuple[str, ...]:
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        message = f"The config says {name} = {repr(given)[:60]} in quantization_config."
        raise UnsupportedModelError(message, remedy="It must be a list of modules, expressions or classes.")
    for each in given:
        if not each.startswith("re:"):
            continue
        if len(each) > _LONGEST:
            message = f"The config has an expression of {len(each)} characters in {name}."
            raise UnsupportedModelError(message, remedy=f"Expressions have at most {_LONGEST}.")
        if len(_REPEATS.findall(each)) > _MOST_REPEATS or _REPEATED_GROUP.search(each):
            message = f"The config has {each[:60]!r} in {name}, an expression that may take too long."
            raise UnsupportedModelError(message, remedy=f"Repeat no groups, and no more than {_MOST_REPEATS} others.")
        try:
            re.compile(each[3:])
        except (re.error, OverflowError, RecursionError) as error:
            message = f"The config has {each[:60]!r} in {name}, which is no expression: {error}."
            raise UnsupportedModelError(message, remedy="Mend it, or take it out.") from None
    return tuple(given)


def _matches(module: str, targets: tuple[str, ...]) -> bool:
    return any(one(module, each) for each in targets for one in (_is_named, _is_expressed, _is_of_class))


def _is_named(module: str, target: str) -> bool:
    return target == module


def _is_expressed(module: str, target: str) -> bool:
    if not target.startswith("re:"):
        return False
    if len(module) > _LONGEST_NAME:
        message = f"A module's name has {len(module)} characters, and the config names modules by {target[:60]!r}."
        raise UnsupportedModelError(message, remedy=f"Expressions are tried on names of {_LONGEST_NAME} at most.")
    return re.match(target[3:], module) is not None


def _is_of_class(module: str, target: str) -> bool:
    """Whether a module is of that class of torch, by its name: what has a quantized matrix is one of the two."""
    last = module.rpartition(".")[2]
    return target == ("Embedding" if "embed" in last or last == "wte" else "Linear")


def _packed(module: str, stored: StoredTensors, scheme: Scheme) -> MatrixLayout:
    name = f"{module}.weight_packed"
    words = matrix_of(stored, name, ["I32"])
    if scheme.type != "int" or scheme.strategy == "block":
        msg = f"{name} is packed, and the config says {scheme.name}"
        raise damaged(msg)
    in_a_word = WORD_BITS // scheme.bits
    num_rows, num_columns = words[0], words[1] * in_a_word
    if scheme.strategy == "group":  # the last word may not be full
        scales = part_of(stored, f"{module}.weight_scale", _FLOATS).shape
        num_columns = scales[1] * scheme.columns if len(scales) == 2 else 0  # noqa: PLR2004 - a matrix
    codes = Packed(name, scheme.bits, 1, tuple(range(in_a_word)))
    shape = num_rows, num_columns
    if codes.stored_shape(shape) != words:
        msg = f"{name} is of shape {list(words)}, and {module}.weight_scale for {num_columns} columns"
        raise damaged(msg)
    layout = _with_scales(module, stored, scheme, MatrixLayout(shape, codes, Grid("", 1, 1)))
    layout = replace(layout, zero=1 << (scheme.bits - 1))
    zeros = stored.get(f"{module}.weight_zero_point")
    if not scheme.is_symmetric and scheme.strategy != "tensor":
        packed = Packed(f"{module}.weight_zero_point", scheme.bits, 0, tuple(range(in_a_word)))
        part_of(stored, packed.name, ["I32"], [packed.stored_shape(layout.scales.shape(shape))])
        layout = replace(layout, zeros=packed, zero=0)
    elif not scheme.is_symmetric or zeros is not None:
        layout = replace(layout, zeros=_numbers(module, stored, layout))
    if f"{module}.weight_shape" in stored:
        part_of(stored, f"{module}.weight_shape", ["I64", "I32"], [(2,)])
        layout = replace(layout, shape_name=f"{module}.weight_shape")
    return layout


def _plain(module: str, stored: StoredTensors, part: Part, scheme: Scheme) -> MatrixLayout:
    name = f"{module}.weight"
    if _CODES.get(part.dtype) != scheme.type:
        msg = f"{name} is of {part.dtype}, where the config says {scheme.name}"
        raise damaged(msg)
    codes = Packed(name, is_float=scheme.type == "float")
    layout = MatrixLayout(matrix_of(stored, name, [part.dtype]), codes, Grid("", 1, 1))
    layout = _with_scales(module, stored, scheme, layout)
    has_zeros = not scheme.is_symmetric or f"{module}.weight_zero_point" in stored
    if has_zeros and not codes.is_float:  # floats have none, whatever is written beside them
        layout = replace(layout, zeros=_numbers(module, stored, layout))
    return layout


def _with_scales(module: str, stored: StoredTensors, scheme: Scheme, layout: MatrixLayout) -> MatrixLayout:
    """Return a layout with its scales, and with the groups of its columns."""
    num_rows, num_columns = layout.shape
    if scheme.strategy == "group" and num_columns % scheme.columns:
        msg = f"{module} has {num_columns} columns, which groups of {scheme.columns} do not divide"
        raise damaged(msg)
    scales = Grid(f"{module}.weight_scale", scheme.rows or num_rows, scheme.columns or num_columns)
    part_of(stored, scales.name, _FLOATS, scales.stored_shapes(layout.shape))
    order = f"{module}.weight_g_idx"
    if scheme.is_ordered or (order in stored and scheme.strategy == "group"):
        part_of(stored, order, ["I32", "I64"], [(num_columns,)])
        return replace(layout, scales=scales, group_of_column=order)
    return replace(layout, scales=scales)


def _numbers(module: str, stored: StoredTensors, layout: MatrixLayout) -> Packed:
    """Return zero points that are numbers of their own."""
    name = f"{module}.weight_zero_point"
    part_of(stored, name, ["I8"], layout.scales.stored_shapes(layout.shape))
    return Packed(name)
