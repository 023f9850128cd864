"""Compiling a kernel in a process of its own, into the cache on disk and nowhere else.

What Numba has just compiled is not, to the bit, what it keeps and loads later: it runs the functions that it compiled
on the way, and what it keeps has been optimised once more, so that sums whose order is free come out in another one. So
no process runs what it compiled itself, and a first start says to the bit what every later one says.

A process that only compiles need not make code of every part: a part is optimised where it is linked into the kernel,
and nowhere else. Numba by itself would optimise it again at each level that it is linked into, and make code of it that
nobody calls: more than half of the time. What a call goes through once is not optimised at all: what takes a kernel's
arguments apart, and what starts its threads. Of hundreds of arrays that takes as long as the kernel itself.
"""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
from typing import Any

import numba
from numba.core.codegen import JITCodeLibrary, JITCPUCodegen

__all__ = ["compile_apart", "main"]

_RUNTIME = "nrt"
"""Numba's own: it is run while a kernel is compiled."""
_ONCE = ("_ZN7cpython", "cfunc.", "__gufunc__")
"""How Numba names what takes a call's arguments apart: that of Python, of C and of a thread."""
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
    asked = pickle.dumps((kernel.py_func.__module__, kernel.py_func.__name__, signature))
    task = pickle.dumps((numba.config.CACHE_DIR, asked))
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
    folder, asked = pickle.load(sys.stdin.buffer)  # noqa: S301 - our own parent wrote it
    # The parent's, whatever the environment says now. It is read when kernels are declared, and types are from modules
    # that declare some: so it is told before these are read.
    numba.config.CACHE_DIR = folder
    module, name, signature = pickle.loads(asked)  # noqa: S301
    kernel = getattr(importlib.import_module(module), name)
    _optimise_only(kernel.py_func.__qualname__, starts_threads=bool(kernel.targetoptions.get("parallel")))
    kernel.compile(signature)


def _optimise_only(name: str, *, starts_threads: bool) -> None:
    """Optimise the function of this name, with all that it calls, and from now on nothing else.

    What is left as it is cannot be run in this process: nothing but Numba's runtime is.

    Args:
        name: of the function.
        starts_threads: whether it does no more than start threads, each of which runs what is in its loop.
    """
    own = f"{len(name)}{name}B"  # as the names of its code have it
    whole = {name, _RUNTIME}
    tell_globals = JITCPUCodegen.set_env

    class Library(JITCodeLibrary):  # type: ignore[misc]  # Numba has no types
        """What was compiled of one function."""

        def add_llvm_module(self, ll_module: Any) -> None:  # noqa: ANN401 - LLVM has no types
            """Take code of the function. What a call goes through once is left as it is, whatever it is linked into."""
            for function in ll_module.functions:
                is_once = function.name.startswith(_ONCE) or (starts_threads and own in function.name)
                if is_once and not function.is_declaration:
                    function.add_function_attribute("noinline")
                    function.add_function_attribute("optnone")
            super().add_llvm_module(ll_module)

        def finalize(self) -> None:
            """Link what the function calls; optimise it and make code if it is one of those."""
            if self.name in whole:
                super().finalize()
                return
            for library in dict.fromkeys(self._linking_libraries):
                self._reload_init.update(library._reload_init)  # noqa: SLF001 - as Numba's own does
                self._final_module.link_in(library._get_module_for_linking(), preserve=True)  # noqa: SLF001
            self._finalize_dynamic_globals()
            self._finalized = True

    def set_env(codegen: JITCPUCodegen, env_name: str, env: object) -> None:
        """Tell code where its globals are. Where there is no code, there is nothing to tell."""
        if codegen._engine.get_global_value_address(env_name):  # noqa: SLF001
            tell_globals(codegen, env_name, env)

    JITCPUCodegen._library_class = Library  # noqa: SLF001
    JITCPUCodegen.set_env = set_env
