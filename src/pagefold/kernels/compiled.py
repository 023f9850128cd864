"""Compiling a kernel for what it is called with, or loading it from disk."""

from __future__ import annotations

import functools
import inspect
import logging
from typing import TYPE_CHECKING, Any

import numba
from numba.extending import overload

from pagefold.kernels import KERNEL_CACHE
from pagefold.kernels.apart import compile_apart
from pagefold.kernels.kept import KernelCache, alone
from pagefold.kernels.object_code import num_modules_compiled

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FAST", "num_kernels_compiled", "part", "part_with", "specialised"]

FAST = {"reassoc", "contract", "nsz"}
"""For ``fastmath``: sums in any order, and products with them; NaN and infinity stay what they are."""
_OPTIONS = {"nogil": True, "error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
part = functools.partial(numba.njit, **_OPTIONS)
"""Decorator of what only kernels call: without the entries for Python and C, which take longest to compile."""

_log = logging.getLogger(__name__)
_COMPILED: list[str] = []
_LOADED: dict[tuple[object, ...], Any] = {}
"""Numba's results by kernel and types. They own the code, and are kept as long as the process: each is loaded once."""


def part_with(*kinds: type, **options: object) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator of a part that only some kinds of records need, and that returns nothing.

    Called with another kind it does nothing, and nothing of it is compiled. Records are told apart by their classes.

    Args:
        kinds: classes of named tuples, one of which is among the arguments where the part has something to do.
        options: of Numba.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        def called(*_arguments: object) -> None:
            raise NotImplementedError

        # Not (*arguments): a tuple of all of them would count references to every array, at each call.
        nothing = eval(f"lambda {', '.join(inspect.signature(function).parameters)}: None")  # noqa: S307

        def choose(*arguments: Any) -> Any:  # noqa: ANN401 - Numba's types
            is_needed = any(issubclass(getattr(one, "instance_class", object), kinds) for one in arguments)
            return function if is_needed else nothing

        overload(called, jit_options=_OPTIONS | {"forceinline": True} | options, strict=False)(choose)
        return functools.update_wrapper(called, function)

    return decorate


def specialised(
    kernel: Any,  # noqa: ANN401 - Numba has no types
    arguments: tuple[object, ...],
) -> Callable[..., Any]:
    """Return ``kernel`` for arguments of these types, loaded from the cache on disk, where it is put first if need be.

    It is loaded once in a process. What runs is always what was loaded: see :mod:`pagefold.kernels.apart`.
    """
    signature = tuple(numba.typeof(one) for one in arguments)
    name = kernel.py_func.__name__
    loaded = _LOADED.get((kernel, signature)) or _load(kernel, signature)
    if loaded is None:
        with alone(name, signature, lambda: _log.info("waiting for another process that compiles %s", name)):
            loaded = _load(kernel, signature) or _compile(kernel, signature)
    entry: Callable[..., Any] = _LOADED.setdefault((kernel, signature), loaded).entry_point
    return entry


def _compile(kernel: Any, signature: tuple[object, ...]) -> Any:  # noqa: ANN401 - Numba has no types
    """Compile a kernel into the cache on disk and return what was loaded from there."""
    name = kernel.py_func.__name__
    _log.info("compiling the kernel %s: this takes up to a minute, once on this machine", name)
    _COMPILED.append(name)
    why_not = compile_apart(kernel, signature)
    loaded = _load(kernel, signature)
    if loaded is None:
        _log.warning(
            "the kernel %s was not compiled into %s (%s). It is compiled here: its last bits may be others than those "
            "of another start",
            name,
            KERNEL_CACHE,
            why_not or "nothing was kept there",
        )
        kernel.compile(signature)
        loaded = kernel.overloads[signature]
    return loaded


def _load(kernel: Any, signature: tuple[object, ...]) -> Any:  # noqa: ANN401 - Numba has no types
    """Return what Numba's cache has of a kernel, or None. A damaged cache is cleared."""
    try:
        return KernelCache(kernel.py_func).load_overload(signature, kernel.targetctx)
    except Exception as error:  # noqa: BLE001 - whatever a damaged file makes unpickling raise
        _log.warning("the kernel cache %s is damaged (%r); compiling again", KERNEL_CACHE, error)
        for file in KERNEL_CACHE.rglob("*.nb[ic]"):
            file.unlink(missing_ok=True)
        return None


def num_kernels_compiled() -> int:
    """Return how many kernels and modules of tiles were compiled for this process, rather than loaded from disk."""
    return num_modules_compiled() + len(_COMPILED)
