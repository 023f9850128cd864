"""How a GGUF header says what positions do to queries and keys, in transformers' words (``rope_parameters``)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from pagefold.gguf.architecture import positive, refusal, shortest
from pagefold.gguf.header import GgufFormatError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from pagefold.gguf.file import GgufFile
    from pagefold.gguf.header import GgufHeader

__all__ = ["FREQUENCIES", "read_rope", "read_theta"]

FREQUENCIES = "rope_freqs.weight"
"""The tensor that divides frequencies, float32 ``[D / 2]``: what is left of Llama 3's rope in a file."""

_THETA = 10_000.0
"""Where a header has none."""
_LOW_FREQUENCY, _HIGH_FREQUENCY, _ORIGINAL_POSITIONS = 1.0, 4.0, 8192
"""Of all Llama 3's: 3.1, 3.2 and 3.3 differ in nothing but the factor. Who made one of their own kept the first two."""
_TOLERANCE = 1e-5


def read_theta(gguf: GgufHeader, default: float = _THETA, key: str = "rope.freq_base") -> float:
    """Return the base of the wavelengths; ``default`` where the header has none.

    Raises:
        GgufFormatError: it is none.
    """
    theta = shortest(gguf.value(f"{gguf.value('general.architecture', str)}.{key}", float, default))
    if not 0 < theta < math.inf:
        message = f"{gguf.path}: a rope with the base {theta}."
        raise GgufFormatError(message)
    return theta


def read_rope(gguf: GgufFile, head_dim: int, default_theta: float = _THETA) -> dict[str, Any]:
    """Return the rope of heads that are rotated whole, as ``rope_parameters`` of a ``config.json``.

    Raises:
        UnsupportedModelError: heads that are rotated in part, or a rope of another kind than default, linear, yarn
            (Peng et al. 2023, "YaRN") and Llama 3's.
        GgufFormatError: numbers that no rope has.
    """
    name = gguf.value("general.architecture", str)
    if gguf.value(f"{name}.rope.dimension_count", int, head_dim) != head_dim:
        raise refusal(gguf, "it rotates a part of each head only")
    theta, kind = read_theta(gguf, default_theta), gguf.value(f"{name}.rope.scaling.type", str, "none")
    if kind == "linear":
        found = _linear(gguf, name)
    elif kind == "yarn":
        found = _yarn(gguf, name)
    elif kind == "none":
        found = {"rope_type": "default"}
    else:
        raise refusal(gguf, f"it scales its positions by {kind!r}; known are 'linear' and 'yarn'")
    if FREQUENCIES in gguf.tensors:
        if found["rope_type"] != "default":
            raise refusal(gguf, f"it scales its positions by {kind!r} and by {FREQUENCIES} at once")
        found = _llama3(gguf, theta, head_dim)
    return {**found, "rope_theta": theta}


def _factor(gguf: GgufFile, name: str) -> float:
    factor = _finite(gguf, f"{name}.rope.scaling.factor")
    if factor < 1:
        message = f"{gguf.path}: its positions are scaled by {factor}."
        raise GgufFormatError(message)
    return factor


def _finite(gguf: GgufHeader, key: str, default: float | None = None) -> float:
    number = shortest(gguf.value(key, float, default))
    if not 0 < number < math.inf:
        message = f"{gguf.path}: {key} is {number}."
        raise GgufFormatError(message)
    return number


def _linear(gguf: GgufFile, name: str) -> dict[str, Any]:
    factor = _factor(gguf, name)
    return {"rope_type": "default"} if factor == 1 else {"rope_type": "linear", "factor": factor}


def _yarn(gguf: GgufFile, name: str) -> dict[str, Any]:
    factor = _factor(gguf, name)
    original = positive(gguf, f"{name}.rope.scaling.original_context_length")
    for key in ("yarn_ext_factor", "yarn_attn_factor"):
        if gguf.value(f"{name}.rope.scaling.{key}", float, 1.0) != 1:
            raise refusal(gguf, f"its yarn has a {key}")
    found = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    for ours, theirs in {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}.items():
        if f"{name}.rope.scaling.{theirs}" in gguf.metadata:
            found[ours] = _finite(gguf, f"{name}.rope.scaling.{theirs}", 1.0)
    # llama.cpp multiplies by it what yarn multiplies cosines and sines by.
    more = _finite(gguf, f"{name}.rope.scaling.attn_factor", 1.0)
    if more != 1:
        found["attention_factor"] = more * (0.1 * math.log(factor) + 1)
    return found


def _llama3(gguf: GgufFile, theta: float, head_dim: int) -> dict[str, Any]:
    """Return the Llama 3 rope whose divisors of frequencies the file has, or no scaling if they are all 1."""
    if gguf.tensors[FREQUENCIES].shape != (head_dim // 2,):
        message = f"{gguf.path}: {FREQUENCIES} has the shape {gguf.tensors[FREQUENCIES].shape}."
        raise GgufFormatError(message)
    divisors = gguf.read(FREQUENCIES).astype(np.float64)
    if not (np.isfinite(divisors).all() and (divisors >= 1).all()):
        raise refusal(gguf, f"{FREQUENCIES} is of no Llama 3")
    if (divisors == 1).all():
        return {"rope_type": "default"}
    factor = shortest(float(divisors.max()))
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    for original in (_ORIGINAL_POSITIONS, _original_positions(divisors, frequencies, factor)):
        if np.allclose(divisors, _llama3_divisors(frequencies, factor, original), rtol=_TOLERANCE, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": _LOW_FREQUENCY,
                "high_freq_factor": _HIGH_FREQUENCY,
                "original_max_position_embeddings": original,
            }
    raise refusal(gguf, f"{FREQUENCIES} is of no Llama 3")


def _llama3_divisors(frequencies: NDArray[np.float64], factor: float, original: int) -> NDArray[np.float64]:
    """Return what frequencies are divided by: 1 for short wavelengths, ``factor`` for long ones, else in between."""
    turns = original * frequencies / (2 * math.pi)
    share = np.clip((turns - _LOW_FREQUENCY) / (_HIGH_FREQUENCY - _LOW_FREQUENCY), 0, 1)
    found: NDArray[np.float64] = 1 / ((1 - share) / factor + share)
    return found


def _original_positions(divisors: NDArray[np.float64], frequencies: NDArray[np.float64], factor: float) -> int:
    """Return from how many positions a rope was stretched, by the first of its divisors that is in between; 1 of none.

    It is the other way round of :func:`_llama3_divisors`.
    """
    between = (divisors > 1) & (divisors < factor * (1 - _TOLERANCE))
    if not between.any():
        return 1
    share = (1 / divisors[between][0] - 1 / factor) / (1 - 1 / factor)
    turns = _LOW_FREQUENCY + share * (_HIGH_FREQUENCY - _LOW_FREQUENCY)
    return max(round(float(turns * 2 * math.pi / frequencies[between][0])), 1)
