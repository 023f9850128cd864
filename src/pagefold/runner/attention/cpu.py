"""Attention over blocks on a CPU, compiled by Numba, float32.

One work item is one query token and one KV head; its ``G`` query heads are handled together, so that K and V are read
once for all of them. Items are dealt to threads in turn, head by head, so that both the long tail of a prompt and a
batch of unequal lengths are shared evenly, and neighbours find the same blocks in the cache.

Three passes an item, each one long loop that LLVM vectorises: scores over all blocks of K, softmax over the scores,
sum over all blocks of V. Slots that hold no entry are never read.

With soft-capping, one more such loop stands between the first two: ``tanh`` over the scores.

Kernels are compiled once for a shape (block size, head_dim, group) with or without soft-capping, and kept on disk: a
second start compiles nothing.
"""

from __future__ import annotations

import logging
import shutil
from functools import cache
from typing import TYPE_CHECKING, Any

import numba
import numpy as np
import torch

from pagefold.config import cache_dir

if TYPE_CHECKING:
    from collections.abc import Callable

    from pagefold.runner.attention.inputs import AttentionInputs
    from pagefold.runner.slab import Slab

__all__ = ["cpu_attention", "num_kernels_compiled"]

_FASTMATH = {"reassoc", "contract", "arcp", "nsz"}  # not nnan: what is NaN stays NaN, for somebody to see
_LOG2E = 1.4426950408889634
_EXP2_MIN = np.float32(-126.0)  # below, a float32 power of two is no normal number: 2^-126 is 0 here
_EXP2 = tuple(np.float32(c) for c in (1.0, 0.6931472, 0.24022651, 0.05550411, 0.009618129, 0.0013333558, 0.00015403530))
"""2^f on [-.5, .5] by its Taylor series to f^6: within 1.3e-7 of the truth, less than rounding leaves."""
_TANH_MAX = np.float32(7.9)  # beyond, tanh is within 3e-7 of 1
_TANH_ODD = (
    *(4.89352455891786e-3, 6.37261928875436e-4, 1.48572235717979e-5, 5.12229709037114e-8),
    *(-8.60467152213735e-11, 2.00018790482477e-13, -2.76076847742355e-16),
)
_TANH_EVEN = (4.89352518554385e-3, 2.26843463243900e-3, 1.18534705686654e-4, 1.19825839466702e-6)
"""tanh on [-7.9, 7.9] as the quotient of two polynomials, x^1 to x^13 over x^0 to x^6 (Eigen's): within 3.5e-7 of the
truth, relatively, also near 0, where a form in powers of two loses it; all of it vectorises."""


def cpu_attention(  # noqa: PLR0913 - the operands of the op
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    slab: Slab,
    inputs: AttentionInputs,
    layer: int,
    scale: float,
    softcap: float = 0.0,
) -> torch.Tensor:
    """See :class:`~pagefold.runner.attention.inputs.AttentionBackend`. float32 only."""
    num_heads, head_dim = query.shape[1:]
    num_kv_heads = key.shape[1]
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    kernel = _kernel(slab.block_size, head_dim, num_heads // num_kv_heads, capped=bool(softcap))
    kernel(
        query.contiguous().numpy(),
        key.contiguous().numpy(),
        value.contiguous().numpy(),
        slab.data.numpy(),
        inputs.query_starts,
        inputs.tables,
        inputs.lengths,
        inputs.cells[:, layer],
        np.float32(scale / softcap if softcap else scale * _LOG2E),
        np.float32(softcap * _LOG2E),
        out.numpy(),
        torch.get_num_threads(),
    )
    return out


def num_kernels_compiled() -> int:
    """Return how many kernels this process compiled, rather than loaded from disk."""
    return sum(sum(kernel.stats.cache_misses.values()) for kernel in _KERNELS)


_log = logging.getLogger(__name__)
_KERNELS: list[Any] = []


@cache
def _kernel(block_size: int, head_dim: int, group: int, *, capped: bool) -> Callable[..., None]:
    """Return the kernel for one shape, out of the cache on disk if it is there and whole."""
    folder = cache_dir() / "kernels"
    numba.config.CACHE_DIR = str(folder)
    try:
        return _compiled(block_size, head_dim, group, capped=capped)
    except Exception as error:  # noqa: BLE001 - unpickling what an interrupted write has left can raise anything
        _log.warning("the kernel cache %s is damaged (%r); compiling again", folder, error)
        shutil.rmtree(folder, ignore_errors=True)
        return _compiled(block_size, head_dim, group, capped=capped)


def _compiled(block_size: int, head_dim: int, group: int, *, capped: bool) -> Callable[..., None]:
    """Compile or load the kernel for one shape; the sizes are constants in it, so that LLVM unrolls and vectorises.

    So is ``capped``: a kernel without soft-capping has nothing of it in it.
    """
    exp2_min = _EXP2_MIN
    c0, c1, c2, c3, c4, c5, c6 = _EXP2
    a1, a3, a5, a7, a9, a11, a13 = (np.float32(c) for c in _TANH_ODD)
    b0, b2, b4, b6 = (np.float32(c) for c in _TANH_EVEN)
    tanh_max = _TANH_MAX
    half, one = np.float32(0.5), np.float32(1.0)
    width = 1 if capped else 0  # of the place behind the scores where the largest one is capped along with them

    def indices(ndim: int) -> Any:  # noqa: ANN401 - numba has no types
        return numba.types.Array(numba.int32, ndim, "A", readonly=True)  # broadcast: stride 0, not writable

    f32 = numba.float32
    signature = numba.void(
        f32[:, :, ::1], f32[:, :, ::1], f32[:, :, ::1], f32[:, :, :, ::1],
        indices(1), indices(3), indices(2), indices(2), f32, f32, f32[:, :, ::1], numba.int64,
    )  # fmt: skip

    @numba.njit(signature, parallel=True, cache=True, fastmath=_FASTMATH, error_model="numpy", boundscheck=False)  # type: ignore[misc,untyped-decorator,unused-ignore]
    def attend(  # type: ignore[no-untyped-def]  # noqa: ANN202, PLR0912, PLR0913 - one kernel
        query,
        key,
        value,
        slab,
        query_starts,
        tables,
        lengths,
        cells,
        scale,
        cap,
        out,
        num_threads,
    ):
        num_tokens, num_kv_heads = key.shape[0], key.shape[1]
        seq_of = np.empty(num_tokens, np.int32)
        for s in range(query_starts.shape[0] - 1):
            for t in range(query_starts[s], query_starts[s + 1]):
                seq_of[t] = s
        for worker in numba.prange(num_threads):
            for t in range(worker, num_tokens, num_threads):
                s = seq_of[t]
                for h in range(num_kv_heads):
                    entry = lengths[s, h] - (query_starts[s + 1] - t)
                    block = np.int64(tables[s, h, entry // block_size])
                    offset = entry % block_size
                    cell = cells[s, h]
                    for d in range(head_dim):
                        slab[block, cell, 0, offset * head_dim + d] = key[t, h, d]
                        slab[block, cell, 1, offset * head_dim + d] = value[t, h, d]
        max_entries = lengths.max()
        for worker in numba.prange(num_threads):
            weights = np.empty((group, max_entries + width), np.float32)
            exponents = np.empty((group, max_entries + width), np.int32)
            power_of_two = exponents.view(np.float32)
            acc = np.empty((group, head_dim), np.float32)
            top = np.empty(group, np.float32)
            for item in range(worker, num_kv_heads * num_tokens, num_threads):
                h = item // num_tokens
                t = item - h * num_tokens
                s = seq_of[t]
                num_entries = lengths[s, h] - (query_starts[s + 1] - 1 - t)
                num_blocks = (num_entries + block_size - 1) // block_size
                cell = cells[s, h]
                for g in range(group):
                    top[g] = -np.inf
                for index in range(num_blocks):
                    keys = slab[tables[s, h, index], cell, 0]
                    first = index * block_size
                    for j in range(min(block_size, num_entries - first)):
                        for g in range(group):
                            dot = np.float32(0.0)
                            for d in range(head_dim):
                                dot += query[t, h * group + g, d] * keys[j * head_dim + d]
                            dot *= scale
                            weights[g, first + j] = dot
                            top[g] = max(top[g], dot)
                if capped:
                    for g in range(group):
                        weights[g, num_entries] = top[g]
                        for e in range(num_entries + 1):
                            x = min(max(weights[g, e], -tanh_max), tanh_max)
                            y = x * x
                            odd = x * (a1 + y * (a3 + y * (a5 + y * (a7 + y * (a9 + y * (a11 + y * a13))))))
                            weights[g, e] = cap * (odd / (b0 + y * (b2 + y * (b4 + y * b6))))
                        top[g] = weights[g, num_entries]
                for g in range(group):
                    # 2^(score - top): split into whole and fraction, Horner for the one, exponent bits for the other.
                    for e in range(num_entries):
                        x = max(weights[g, e] - top[g], exp2_min)
                        whole = np.floor(x + half)
                        f = x - whole
                        exponents[g, e] = (np.int32(whole) + np.int32(127)) << np.int32(23)
                        weights[g, e] = c0 + f * (c1 + f * (c2 + f * (c3 + f * (c4 + f * (c5 + f * c6)))))
                    total = np.float32(0.0)
                    for e in range(num_entries):
                        weights[g, e] *= power_of_two[g, e]
                        total += weights[g, e]
                    top[g] = one / total
                    for d in range(head_dim):
                        acc[g, d] = 0.0
                for index in range(num_blocks):
                    values = slab[tables[s, h, index], cell, 1]
                    first = index * block_size
                    num_slots = min(block_size, num_entries - first)
                    if num_slots == block_size:
                        for g in range(group):
                            for j in range(0, block_size, 4):
                                w0, w1 = weights[g, first + j], weights[g, first + j + 1]
                                w2, w3 = weights[g, first + j + 2], weights[g, first + j + 3]
                                for d in range(head_dim):
                                    acc[g, d] += (
                                        w0 * values[j * head_dim + d]
                                        + w1 * values[(j + 1) * head_dim + d]
                                        + w2 * values[(j + 2) * head_dim + d]
                                        + w3 * values[(j + 3) * head_dim + d]
                                    )
                    else:
                        for g in range(group):
                            for j in range(num_slots):
                                w0 = weights[g, first + j]
                                for d in range(head_dim):
                                    acc[g, d] += w0 * values[j * head_dim + d]
                for g in range(group):
                    for d in range(head_dim):
                        out[t, h * group + g, d] = acc[g, d] * top[g]

    _KERNELS.append(attend)
    return attend  # type: ignore[no-any-return,unused-ignore]
