"""The CPU that this runs on, as a device: its free memory, and its peaks as far as they can be told."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pagefold.config import available_memory_bytes
from pagefold.plan.tables import Device

__all__ = ["this_cpu"]

_COPIED_BYTES = 64 * 2**20
_REPEATS = 3
_OPERATIONS_A_CYCLE = (("avx512f", 64.0), ("avx2", 32.0), ("asimd", 16.0))
"""What one core does in float32: two units multiply and add whole vectors. The clock is what the system says now."""
_FLAGS = "avx512_bf16", "avx512_vnni"
"""Of what multiplies bfloat16 and int8: twice and four times as much a cycle."""


def this_cpu() -> Device:
    """Return this machine, with what is free of its memory as a server would count it.

    Bandwidth is that of copying memory on all cores, measured now (each byte is read and written). Peak operations are
    cores times clock times the operations of a cycle, in float32, bfloat16 and int8; None where the clock or the
    vectors are not told.
    """
    about = _about()
    flops_32 = _peak_flops(about)
    multiplies_bfloat16, multiplies_int8 = ("avx512f" in about and flag in about for flag in _FLAGS)
    return Device(
        name="cpu",
        memory_bytes=available_memory_bytes(),
        bandwidth=_copy_bandwidth(),
        flops_16=flops_32 and flops_32 * (2 if multiplies_bfloat16 else 1),
        flops_8=flops_32 and flops_32 * 4 if multiplies_int8 else None,
        flops_32=flops_32,
        source="this machine: free memory; copying measured now; cores x clock x vector width",
        is_cpu=True,
        multiplies_bfloat16=multiplies_bfloat16,
    )


def _copy_bandwidth() -> float:
    """Every core reads a file in memory into a buffer of its own, which lets go of the interpreter's lock."""
    file = os.memfd_create("pagefold")
    try:
        os.write(file, bytes(_COPIED_BYTES))
        buffers = [bytearray(_COPIED_BYTES) for _ in range(len(os.sched_getaffinity(0)))]
        with ThreadPoolExecutor(len(buffers)) as threads:
            best = min(_copy_once(threads, file, buffers) for _ in range(_REPEATS))
    finally:
        os.close(file)
    return 2 * _COPIED_BYTES * len(buffers) / best


def _copy_once(threads: ThreadPoolExecutor, file: int, buffers: list[bytearray]) -> float:
    began = time.perf_counter()
    for copied in threads.map(lambda buffer: os.preadv(file, [buffer], 0), buffers):
        assert copied == _COPIED_BYTES
    return time.perf_counter() - began


def _about() -> str:
    """Return what the system says of the processor; nothing where it says nothing."""
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""


def _peak_flops(about: str) -> float | None:
    clocks = [float(line.split(":")[1]) * 1e6 for line in about.splitlines() if line.startswith("cpu MHz")]
    a_cycle = next((number for flag, number in _OPERATIONS_A_CYCLE if flag in about), None)
    if not clocks or a_cycle is None:
        return None
    return len(os.sched_getaffinity(0)) * max(clocks) * a_cycle
