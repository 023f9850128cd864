"""Rounding float32 weights to blocks of GGML's kinds: Q8_0, Q4_0 and Q4_1, in groups of 32.

``plain`` is what llama.cpp's reference does (``quantize_row_q4_0_ref`` and its like), to the bit: a group's scale is
taken from its largest number, or from its largest and its least. ``search`` tries scales around that one. For each it
rounds, then solves for the scale (and the minimum) that fit the codes best, by least squares, as ``make_qx_quants`` and
``make_qkx2_quants`` of ``ggml-quants.c`` do. Scales are then rounded to the 16 bits that they are kept in, and the
codes are chosen once more by what is kept; of all candidates the one stays whose squared error is least. So no group
loses by it. Errors may be weighted, a column each: by how large what is multiplied with it tends to be (llama.cpp's
"imatrix").
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from pagefold.kernels.block_kinds import GROUP

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["ROUNDING_METHODS", "RoundingMethod", "round_to_blocks", "squared_loss"]

RoundingMethod = Literal["plain", "search"]
ROUNDING_METHODS: tuple[RoundingMethod, ...] = ("plain", "search")
"""All methods."""

_PIECE = 1024
"""Groups that are rounded together: what is made of them stays in a cache. They lie side by side, number by number."""
_MOST_CODE, _MIDDLE = 15, 8
_INT8_MOST = 127
_STEPS_OF_SCALE: tuple[int, ...] = (-12, -8, -5, -2, 1, 5)
"""What is tried of Q4_0: how many tenths of a code the largest number lies beyond code -8."""
_STEPS_OF_RANGE: tuple[int, ...] = (-18, -12, -8, -4, 0)
"""What is tried of Q4_1: how many tenths of a code the range of a group is more than fifteen."""
_REFINED = 2
"""How often the best that was found is rounded and fitted again."""
_TENTH = np.float32(0.1)


class _Rounded(NamedTuple):
    """Groups of 4-bit codes.

    Attributes:
        codes: float32 ``[32, groups]``, whole numbers.
        scales: float16 ``[groups]``.
        minima: float16 ``[groups]``: what is added; None of Q4_0, whose codes are less by 8.
    """

    codes: NDArray[np.float32]
    scales: NDArray[np.float16]
    minima: NDArray[np.float16] | None


class _Scales(NamedTuple):
    """How codes of groups become numbers: ``code * scale + minimum``, float32 ``[groups]``."""

    scales: NDArray[np.float32]
    minima: NDArray[np.float32]


def round_to_blocks(
    kind: str,
    matrix: NDArray[np.float32],
    method: RoundingMethod = "plain",
    importance: NDArray[np.float32] | None = None,
) -> NDArray[np.uint8]:
    """Round a matrix to blocks, as a file has them.

    Args:
        kind: ``Q8_0``, which knows no search, ``Q4_0`` or ``Q4_1``.
        matrix: ``[N, K]``, finite; K is a multiple of 32.
        method: how scales are chosen.
        importance: ``[K]``, above zero: the weights of squared errors in a search; None for the same of all.

    Returns:
        ``[N, bytes of a row]``.
    """
    num, num_k = matrix.shape
    groups = matrix.reshape(-1, GROUP)
    weights = None
    if importance is not None and method == "search":
        weights = np.broadcast_to(importance.reshape(1, -1, GROUP), (num, num_k // GROUP, GROUP)).reshape(-1, GROUP)
    pieces = []
    for first in range(0, len(groups), _PIECE):
        some = np.ascontiguousarray(groups[first : first + _PIECE].T)
        if kind == "Q8_0":
            pieces.append(_q8_0(some))
            continue
        rounded = _PLAIN[kind](some)
        if method == "search":
            own = np.ones_like(some) if weights is None else np.ascontiguousarray(weights[first : first + _PIECE].T)
            rounded = _search(kind, some, own, rounded)
        pieces.append(_stored(rounded))
    return np.concatenate(pieces).reshape(num, -1)


def squared_loss(
    matrix: NDArray[np.float32], rounded: NDArray[np.float32], importance: NDArray[np.float32] | None = None
) -> float:
    """Return the sum of (weighted) squared errors of a rounded matrix over the sum of its (weighted) squares."""
    weights = np.float64(1) if importance is None else importance.astype(np.float64)
    exact = matrix.astype(np.float64)
    total = float((weights * exact**2).sum())
    return float((weights * (rounded - exact) ** 2).sum()) / total if total else 0.0


def _inverse(scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return one over each; 0 where that is beyond float32, as of a scale whose 16 bits are 0."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / scales
    return np.where(np.isfinite(inverse), inverse, np.float32(0))


def _q8_0(groups: NDArray[np.float32]) -> NDArray[np.uint8]:
    scales = np.abs(groups).max(0) / np.float32(_INT8_MOST)
    numbers = groups * _inverse(scales)
    sizes = np.abs(numbers)
    whole = np.floor(sizes)
    codes = np.sign(numbers) * (whole + np.floor(np.float32(2) * (sizes - whole)))  # halves go away from zero
    return np.concatenate([_bytes(_halves(scales)), codes.astype(np.int8).T.view(np.uint8)], axis=1)


def _plain_q4_0(groups: NDArray[np.float32]) -> _Rounded:
    scales = _largest(groups) / np.float32(-_MIDDLE)
    codes = _codes(groups * _inverse(scales) + np.float32(_MIDDLE + 0.5))
    return _Rounded(codes, _halves(scales), None)


def _plain_q4_1(groups: NDArray[np.float32]) -> _Rounded:
    most, least = groups.max(0), groups.min(0)
    scales = (most - least) / np.float32(_MOST_CODE)
    codes = _codes((groups - least) * _inverse(scales) + np.float32(0.5))
    return _Rounded(codes, _halves(scales), _halves(least))


def _largest(groups: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the number of each group that is farthest from zero, with its sign."""
    places = np.abs(groups).argmax(0)[None]
    largest: NDArray[np.float32] = np.take_along_axis(groups, places, axis=0)[0]
    return largest


def _search(kind: str, groups: NDArray[np.float32], weights: NDArray[np.float32], plain: _Rounded) -> _Rounded:
    """Return groups by the best scales that are found; none is worse than the plain one."""
    fit = _fit_q4_0 if kind == "Q4_0" else _fit_q4_1
    best = _Scales(plain.scales.astype(np.float32), _minima(plain))
    best_error = _error(groups, weights, best)
    first = _Scales(_largest(groups) / np.float32(-_MIDDLE), best.minima)
    steps, codes = _STEPS_OF_SCALE, np.float32(_MIDDLE)
    if plain.minima is not None:
        least = groups.min(0)
        first = _Scales((groups.max(0) - least) / np.float32(_MOST_CODE), least)
        steps, codes = _STEPS_OF_RANGE, np.float32(_MOST_CODE)
    for step in (*steps, *(None,) * _REFINED):
        start = (
            best
            if step is None
            else _Scales(first.scales * (codes / (codes + _TENTH * np.float32(step))), first.minima)
        )
        found = fit(groups, weights, start)
        error = _error(groups, weights, found)
        is_better = error < best_error  # never where it is NaN
        best = _Scales(*(np.where(is_better, new, old) for new, old in zip(found, best, strict=True)))
        best_error = np.where(is_better, error, best_error)
    minima = None if plain.minima is None else _halves(best.minima)
    return _Rounded(_nearest(groups, best), _halves(best.scales), minima)


def _minima(rounded: _Rounded) -> NDArray[np.float32]:
    """Return what a code of 0 is."""
    if rounded.minima is None:
        return np.float32(-_MIDDLE) * rounded.scales.astype(np.float32)
    return rounded.minima.astype(np.float32)


def _fit_q4_0(groups: NDArray[np.float32], weights: NDArray[np.float32], start: _Scales) -> _Scales:
    """Return the scales that fit best the codes that are nearest by others, as they are kept."""
    codes = _nearest(groups, _Scales(start.scales, np.float32(-_MIDDLE) * start.scales)) - np.float32(_MIDDLE)
    weighted = weights * codes
    kept = _halves((weighted * groups).sum(0) * _inverse((weighted * codes).sum(0))).astype(np.float32)
    return _Scales(kept, np.float32(-_MIDDLE) * kept)


def _fit_q4_1(groups: NDArray[np.float32], weights: NDArray[np.float32], start: _Scales) -> _Scales:
    """Return the scales and minima that fit best the codes that are nearest by others, as they are kept."""
    codes = _nearest(groups, start)
    weighted = weights * codes
    sum_w, sum_x, sum_l = weights.sum(0), (weights * groups).sum(0), weighted.sum(0)
    sum_l2, sum_xl = (weighted * codes).sum(0), (weighted * groups).sum(0)
    inverse = _inverse(sum_w * sum_l2 - sum_l * sum_l)
    scales, minima = (sum_w * sum_xl - sum_x * sum_l) * inverse, (sum_l2 * sum_x - sum_l * sum_xl) * inverse
    return _Scales(_halves(scales).astype(np.float32), _halves(minima).astype(np.float32))


def _nearest(groups: NDArray[np.float32], by: _Scales) -> NDArray[np.float32]:
    """Return the codes that come nearest."""
    codes: NDArray[np.float32] = np.rint((groups - by.minima) * _inverse(by.scales))
    return np.clip(codes, np.float32(0), np.float32(_MOST_CODE), out=codes)


def _error(groups: NDArray[np.float32], weights: NDArray[np.float32], by: _Scales) -> NDArray[np.float32]:
    """Return the weighted squared error of each group."""
    with np.errstate(over="ignore", invalid="ignore"):
        off = _nearest(groups, by) * by.scales + by.minima - groups
        errors: NDArray[np.float32] = (weights * (off * off)).sum(0)
    return errors


def _codes(numbers: NDArray[np.float32]) -> NDArray[np.float32]:
    return np.clip(np.trunc(numbers), np.float32(0), np.float32(_MOST_CODE))


def _halves(numbers: NDArray[np.float32]) -> NDArray[np.float16]:
    with np.errstate(over="ignore"):
        return numbers.astype(np.float16)


def _bytes(numbers: NDArray[np.float16]) -> NDArray[np.uint8]:
    return numbers.view(np.uint8).reshape(-1, 2)


def _stored(rounded: _Rounded) -> NDArray[np.uint8]:
    """Return groups as a file has them."""
    codes, half = rounded.codes.astype(np.uint8), GROUP // 2
    parts = [_bytes(rounded.scales)]
    if rounded.minima is not None:
        parts.append(_bytes(rounded.minima))
    return np.concatenate([*parts, (codes[:half] | (codes[half:] << np.uint8(4))).T], axis=1)


_PLAIN = {"Q4_0": _plain_q4_0, "Q4_1": _plain_q4_1}
