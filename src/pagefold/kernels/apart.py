"""Compiling a kernel in a process of its own, into the cache on disk and nowhere else.

What Numba has just compiled is not, to the bit, what it keeps and loads later: it runs the functions that it compiled
on the way, and what it keeps has been optimised once more, so that sums whose order is free come out in another one. So
no process runs what it compiled itself, and a first start says to the bit what every later one says.
"""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
from typing import Any

import numba

__all__ = ["compile_apart", "main"]

_PROGRAM = "from pagefold.kernels.apart import main; main()"


def compile_apart(
    kernel: Any,  # noqa: ANN401 - Numba has no types
    signature: tuple[object, ...],
) -> str:
    """Compile ``kernel`` for arguments of Numba's types ``signature`` into the cache; return what went wrong, or "".

    Args:
        kernel: a function of a module, decorated with :func:`pagefold.kernels.kept.kernel`.
        signature: the types of its arguments.
    """
    task = pickle.dumps((kernel.py_func.__module__, kernel.py_func.__name__, signature, numba.config.CACHE_DIR))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        done = subprocess.run(  # noqa: S603 - our own module
            [sys.executable, "-P", "-c", _PROGRAM], input=task, capture_output=True, check=False, env=environment
        )
    except OSError as error:
        return str(error)
    return "" if done.returncode == 0 else done.stderr.decode(errors="replace").strip()[-500:] or "it was ended"


def main() -> None:
    """Compile what standard input asks for: see :func:`compile_apart`."""
    module, name, signature, folder = pickle.load(sys.stdin.buffer)  # noqa: S301 - our own parent wrote it
    numba.config.CACHE_DIR = folder  # read when kernels are declared: the parent's, whatever the environment says now
    getattr(importlib.import_module(module), name).compile(signature)
