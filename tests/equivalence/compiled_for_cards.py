"""Triton's kernels compiled for a card that need not be there: what a process runs whose Triton does not interpret."""

from __future__ import annotations

import os

__all__ = ["begin", "compile_kernel", "spilled_bytes"]

_POINTERS = {"slab", "query", "key", "value", "out"}
_COLUMNS = {"rows", "tiles", "query_starts", "seq_of", "tables", "lengths", "cells"}
_SUMS = {"sums", "weights"}
_FLOATS = {"scale", "softcap"}
_NAMES = {"torch.float16": "fp16", "torch.bfloat16": "bf16", "torch.float32": "fp32"}


def begin() -> None:
    """Begin such a process."""
    os.environ["TRITON_INTERPRET"] = "0"


def compile_kernel(name, dtype, head_dim, group, capability, *, has_window=False, has_softcap=False, block_size=16):
    """Compile a kernel as it ships for that shape and card; return its shared memory in bytes and its PTX."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from pagefold.runner.attention.cuda import kernels
    from pagefold.runner.attention.cuda.attention import HeadShape
    from pagefold.runner.attention.cuda.configs import padded

    num_kv_heads = 8
    heads = HeadShape(getattr(torch, dtype), num_kv_heads * group, num_kv_heads, head_dim, capability)
    how = heads.config("prefill" if name == "prefill" else "decode")
    constants = {
        "NUM_KV_HEADS": num_kv_heads,
        "NUM_HEADS": heads.num_heads,
        "HEADS": padded(num_kv_heads),
        "GROUP": group,
        "ROWS": how.rows,
        "HEAD_DIM": head_dim,
        "DIMS": max(16, padded(head_dim)),
        "BLOCK_SIZE": block_size,
        "TILE": how.tile,
        "MIN_TILES": 4,
        "SPLITS": 64,
        "HAS_WINDOW": has_window,
        "HAS_SOFTCAP": has_softcap,
        "IS_SPLIT": True,
    }
    kernel = getattr(kernels, name)
    element = _NAMES[str(heads.dtype)]
    signature, constexprs, attributes = {}, {}, {}
    for index, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
            constexprs[argument] = constants[argument]
        elif argument in _SUMS:
            signature[argument] = "*fp32"
        elif argument in _POINTERS:
            signature[argument] = f"*{element}"
        elif argument in _COLUMNS:
            signature[argument] = "*i32"
        else:
            signature[argument] = "fp32" if argument in _FLOATS else "i32"
        if signature[argument].startswith("*") or argument in {
            "block_stride",
            "query_stride_t",
            "query_stride_h",
            "key_stride_t",
            "key_stride_h",
            "value_stride_t",
            "value_stride_h",
            "table_stride_h",
        }:
            attributes[index,] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    options = {}
    if name in {"decode", "prefill"}:
        options = {"num_warps": how.num_warps, "num_stages": how.num_stages}
    compiled = triton.compile(source, target=target, options=options)
    return compiled.metadata.shared, compiled.asm["ptx"]


def spilled_bytes(*args, **flags):
    """Compile a kernel; return how many bytes of registers it has to keep in memory, as ``ptxas`` says."""
    import re
    import subprocess
    import tempfile
    from pathlib import Path

    import triton

    _, ptx = compile_kernel(*args, **flags)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx)
        ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
        target = re.search(r"\.target (\w+)", ptx)[1]
        command = [ptxas, "-v", "--gpu-name", target, file, "-o", Path(folder) / "kernel.cubin"]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return int(re.search(r"(\d+) bytes spill stores", told)[1])
