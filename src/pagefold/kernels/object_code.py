"""From a module of LLVM's language to functions in memory, by way of a file: what was compiled once is only loaded."""

from __future__ import annotations

import hashlib
import logging
from typing import TYPE_CHECKING

import llvmlite.binding as llvm

from pagefold.errors import ConfigError
from pagefold.files.whole import write_whole
from pagefold.kernels import KERNEL_CACHE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from llvmlite import ir

__all__ = ["addresses_in", "num_modules_compiled"]

_log = logging.getLogger(__name__)
_DIGEST_BYTES = 32
_ENGINES: list[llvm.ExecutionEngine] = []  # they own the code: kept as long as the process
_compiled = 0


def num_modules_compiled() -> int:
    """Return how many modules this process compiled, rather than loaded from disk."""
    return _compiled


def addresses_in(name: str, build: Callable[[], ir.Module], functions: Iterable[str]) -> dict[str, int]:
    """Return where ``functions`` of a module are, compiled for this processor or loaded from the cache folder.

    Args:
        name: of the module; what it says follows from its name and our sources.
        build: makes it, if it must be compiled.
        functions: the functions' names.
    """
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    target = llvm.Target.from_default_triple()
    features = llvm.get_host_cpu_features().flatten()
    machine = target.create_target_machine(llvm.get_host_cpu_name(), features, opt=3, jit=True)
    key = hashlib.sha256(f"{llvm.get_host_cpu_name()} {features}".encode()).hexdigest()[:16]
    file = KERNEL_CACHE / f"{name}-{key}.o"
    code = _read(file)
    if code is None:
        module = build()
        module.triple = target.triple
        code = _compile(str(module), machine)
        _write(file, code)
    # An engine begins with a module; ours is empty, and the machine passes into its hands.
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _ENGINES.append(engine)
    return {function: engine.get_function_address(function) for function in functions}


def _compile(text: str, machine: llvm.TargetMachine) -> bytes:
    global _compiled  # noqa: PLW0603 - a count of what this process did
    _compiled += 1
    module = llvm.parse_assembly(text)
    module.verify()
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(module, builder)
    code: bytes = machine.emit_object(module)
    return code


def _read(file: Path) -> bytes | None:
    """Return the code in a file, if it is there and whole."""
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        _log.warning("the kernel cache has a file that cannot be read (%s); compiling again", error)
        return None
    digest, code = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
    if hashlib.sha256(code).digest() == digest:
        return code
    _log.warning("the kernel cache has a damaged file, %s; compiling again", file)
    return None


def _write(file: Path, code: bytes) -> None:
    """Keep code for the next start. Where nothing can be written, it starts slower."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, hashlib.sha256(code).digest() + code)
    except (OSError, ConfigError) as error:
        _log.warning("compiled code cannot be kept in %s (%s)", file.parent, error)
