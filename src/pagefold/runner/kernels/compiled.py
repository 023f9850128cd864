"""Compiling a kernel for what it is called with, or loading it from disk."""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

import numba

from pagefold.runner.kernels import KERNEL_CACHE
from pagefold.runner.kernels.object_code import num_modules_compiled

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["num_kernels_compiled", "part", "specialised"]

part = functools.partial(numba.njit, nogil=True, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
"""Decorator of what only kernels call: without the entries for Python and C, which take longest to compile."""

_log = logging.getLogger(__name__)
_KERNELS: list[Any] = []


def specialised(
    kernel: Any,  # noqa: ANN401 - Numba has no types
    arguments: tuple[object, ...],
) -> Callable[..., Any]:
    """Return ``kernel`` for arguments of these types. Out of the cache on disk if it is there and whole."""
    signature = tuple(numba.typeof(one) for one in arguments)
    name = kernel.py_func.__name__
    if not any(KERNEL_CACHE.rglob(f"*.{name}-*.nbc")):
        _log.info("compiling the kernel %s: this takes some seconds, once on this machine", name)
    _KERNELS.append(kernel)
    try:
        kernel.compile(signature)
    except Exception as error:
        if not KERNEL_CACHE.exists():
            raise
        _log.warning("the kernel cache %s is damaged (%r); compiling again", KERNEL_CACHE, error)
        for file in KERNEL_CACHE.rglob("*.nb[ic]"):
            file.unlink(missing_ok=True)
        kernel.compile(signature)
    entry: Callable[..., Any] = kernel.overloads[signature].entry_point
    return entry


def num_kernels_compiled() -> int:
    """Return how many kernels and modules of tiles this process compiled, rather than loaded from disk."""
    return num_modules_compiled() + sum(
        sum(kernel.stats.cache_misses.values()) for kernel in {id(one): one for one in _KERNELS}.values()
    )
