"""What kernels of the CPU path are made of, compiled by Numba: matrix tiles, what is done with rows, a team of threads.

Compiled code is kept under the cache folder, in a folder named by what it was compiled from: the source of every kernel
(Numba itself looks at the outermost function's file only) and the versions of Numba and LLVM. Numba adds the processor
and its features. A second start compiles nothing.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import llvmlite
import numba

from pagefold.config import cache_dir

__all__ = ["KERNEL_CACHE"]

_PACKAGES = "kernels", "runner", "transport"
"""The packages whose source makes the key: all that have kernels."""


def _key() -> str:
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    house = Path(__file__).parent.parent
    for package in _PACKAGES:
        for file in sorted((house / package).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


KERNEL_CACHE = cache_dir() / "kernels" / _key()
numba.config.CACHE_DIR = str(KERNEL_CACHE)  # before any kernel is declared: Numba reads it then
