"""Where the code of a kernel is kept, by what it was compiled from.

Numba keeps code by the path of its source, and looks at that one file's content. Ours is kept in a folder that is named
by the content of all of them (see :mod:`pagefold.kernels`), so that two installations of one version share it, and two
versions never do.
"""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numba
from numba.core.caching import CompileResultCacheImpl, FunctionCache, UserProvidedCacheLocator

from pagefold.files.lock import locked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["KernelCache", "alone", "kernel"]


class _ByModule(UserProvidedCacheLocator):  # type: ignore[misc]  # Numba has no types
    """Names a kernel's folder by its module."""

    def __init__(self, py_func: Callable[..., None], py_file: str) -> None:
        super().__init__(py_func, py_file)
        self._cache_path = str(Path(numba.config.CACHE_DIR) / py_func.__module__)

    def get_source_stamp(self) -> str:
        """Nothing: the folder's name tells what the code was compiled from."""
        return ""


class _Kept(CompileResultCacheImpl):  # type: ignore[misc]
    _locator_classes = (_ByModule, *CompileResultCacheImpl._locator_classes)  # noqa: SLF001 - Numba's way to say where


class KernelCache(FunctionCache):  # type: ignore[misc]
    """What the disk has of a kernel."""

    _impl_class = _Kept

    def save_overload(self, sig: object, data: object) -> None:
        """Keep code. Numba reads the index, adds a line and writes it: of two processes at once, one would be lost."""
        with _locked_if_possible(Path(self.cache_path) / "index.lock"):
            super().save_overload(sig, data)


def kernel(**options: object) -> Callable[[Callable[..., None]], Any]:
    """Return a decorator of a kernel: what Python calls, through :func:`pagefold.kernels.compiled.specialised`.

    Args:
        options: of ``numba.njit``.
    """

    def decorate(function: Callable[..., None]) -> Any:  # noqa: ANN401 - Numba has no types
        made = numba.njit(nogil=True, **options)(function)
        made._cache = KernelCache(function)  # noqa: SLF001 - as Numba's own enable_caching does with its class
        return made

    return decorate


@contextlib.contextmanager
def alone(name: str, signature: tuple[object, ...], waiting: Callable[[], object]) -> Iterator[None]:
    """Compile a kernel while no other process compiles it for the same types: who comes second finds it on the disk.

    Args:
        name: of the kernel.
        signature: the types of its arguments.
        waiting: called once if another process compiles it.
    """
    digest = hashlib.sha256(repr(signature).encode()).hexdigest()[:16]
    with _locked_if_possible(Path(numba.config.CACHE_DIR) / f"{name}-{digest}.lock", waiting):
        yield


@contextlib.contextmanager
def _locked_if_possible(file: Path, waiting: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Hold a file of the cache. Where none can be made, nothing can be kept either, and nobody is waited for."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            file.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(file, waiting))
        yield
