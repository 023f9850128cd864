"""Compiling a kernel for what it is called with, or loading it from disk."""

from __future__ import annotations

import logging
import shutil
from typing import TYPE_CHECKING, Any

import numba
from numba import types

from pagefold.runner.kernels import KERNEL_CACHE

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["num_kernels_compiled", "specialised"]

_log = logging.getLogger(__name__)
_KERNELS: list[Any] = []


def specialised(
    kernel: Any,  # noqa: ANN401 - Numba has no types
    constants: tuple[int, ...],
    arguments: tuple[object, ...],
) -> Callable[..., Any]:
    """Return ``kernel`` for its first parameters known to be ``constants``, and the others of these arguments' types.

    It is called with all of them. Out of the cache on disk if it is there and whole.
    """
    signature = (*(types.literal(constant) for constant in constants), *(numba.typeof(one) for one in arguments))
    _KERNELS.append(kernel)
    try:
        kernel.compile(signature)
    except Exception as error:
        if not KERNEL_CACHE.exists():
            raise
        _log.warning("the kernel cache %s is damaged (%r); compiling again", KERNEL_CACHE, error)
        shutil.rmtree(KERNEL_CACHE, ignore_errors=True)
        kernel.compile(signature)
    entry: Callable[..., Any] = kernel.overloads[signature].entry_point
    return entry


def num_kernels_compiled() -> int:
    """Return how many kernels this process compiled, rather than loaded from disk."""
    return sum(sum(kernel.stats.cache_misses.values()) for kernel in {id(one): one for one in _KERNELS}.values())
