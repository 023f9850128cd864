"""Triton's kernels compiled for a card that need not be there: what a process runs whose Triton does not interpret."""

from __future__ import annotations

import os

__all__ = ["begin", "compile_kernel", "compile_launched", "spilled_bytes"]

_POINTERS = {"query", "key", "value", "out", "sinks"}
_COLUMNS = {"rows", "tiles", "query_starts", "seq_of", "tables", "lengths", "first_blocks", "cells", "places"}
_COLUMNS |= {"residual_ids"}
_SUMS = {"sums", "weights", "key_centres", "value_centres", "bases"}
_HALVES = {"residuals", "recent"}
_FLOATS = {"scale", "softcap"}
_ALIGNED = {
    "block_stride",
    "query_stride_t",
    "query_stride_h",
    "key_stride_t",
    "key_stride_h",
    "value_stride_t",
    "value_stride_h",
    "table_stride_h",
}
_NAMES = {"torch.float16": "fp16", "torch.bfloat16": "bf16", "torch.float32": "fp32"}


def begin() -> None:
    """Begin such a process."""
    os.environ["TRITON_INTERPRET"] = "0"


def compile_kernel(
    name,
    dtype,
    head_dim,
    group,
    capability,
    *,
    has_window=False,
    is_chunked=False,
    has_softcap=False,
    has_sinks=False,
    block_size=16,
    codec=None,
    has_recent=True,
):
    """Compile a kernel as it ships for that shape and card; return its shared memory in bytes and its PTX."""
    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from pagefold.runner.attention.cuda import encode, kernels, seal
    from pagefold.runner.attention.cuda.attention import HeadShape
    from pagefold.runner.attention.cuda.blocks import CardBlocks, reads_of
    from pagefold.runner.attention.cuda.configs import Reads, padded, sealing_warps
    from pagefold.runner.codecs import CELL_CODECS

    num_kv_heads = 8
    reads = Reads.NUMBERS if codec is None else reads_of(CELL_CODECS[codec])
    heads = HeadShape(getattr(torch, dtype), num_kv_heads * group, num_kv_heads, head_dim, capability, reads=reads)
    how = heads.config("prefill" if name == "prefill" else "decode")
    blocks = CardBlocks.of(_slab(heads, block_size, codec))
    room = {"write_codes": encode, "bring_queries": encode, "write_sealed": seal}.get(name, kernels)
    encodes = room is not kernels
    constants = {
        "SHAPE": heads.constants(block_size),
        "CELL_FORMAT": blocks.format_of(0),
        "HEADS": padded(num_kv_heads),
        "ROWS": 16 if encodes else how.rows,
        "TILE": how.tile,
        "MIN_TILES": 4,
        "SPLITS": 64,
        "HAS_WINDOW": has_window,
        "IS_CHUNKED": is_chunked,
        "HAS_SOFTCAP": has_softcap,
        "HAS_SINKS": has_sinks,
        "IS_SPLIT": True,
        "HAS_RECENT": has_recent,
    }
    kernel = getattr(room, name)
    element = _NAMES[str(heads.dtype)]
    signature, constexprs, attributes = {}, {}, {}
    of_slab = element if codec is None else "u8"
    types = (
        dict.fromkeys(_SUMS, "*fp32")
        | dict.fromkeys(_POINTERS, f"*{element}")
        | dict.fromkeys(_COLUMNS, "*i32")
        | dict.fromkeys(_HALVES, "*fp16")
        | dict.fromkeys(_FLOATS, "fp32")
        | {"slab": f"*{of_slab}"}
    )
    for index, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
            constexprs[argument] = constants[argument]
            continue
        signature[argument] = types.get(argument, "i32")
        if signature[argument].startswith("*") or argument in _ALIGNED:
            attributes[index,] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    target = GPUTarget("cuda", 10 * capability[0] + capability[1], 32)
    options = {}
    if name in {"decode", "prefill"}:
        options = {"num_warps": how.num_warps, "num_stages": how.num_stages}
    if encodes:
        options = {"enable_fp_fusion": False}
    if name == "write_sealed":
        options["num_warps"] = sealing_warps(block_size, head_dim)
    compiled = triton.compile(source, target=target, options=options)
    return compiled.metadata.shared, compiled.asm["ptx"]


def compile_launched(codec, rules=None):
    """Compile what a layer of a step launches for an H100, as Triton binds and specializes its arguments.

    Sequences decode, in splits, and prefill; ``rules`` are of cache groups, the layer of the first one. Returns the
    shared memory of each kernel in bytes, by name.
    """
    from unittest import mock

    import torch
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    from equivalence.attention_cases import Lengths, Shape, make_case
    from pagefold.runner.attention.cuda.attention import CudaAttention, HeadShape

    target = GPUTarget("cuda", 90, 32)
    backend = make_backend(target)
    shared = {}

    def run(kernel, *, grid, warmup, **arguments):
        assert len(grid) <= 3
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        how, *source = kernel._pack_args(backend, arguments, *bind(**arguments))
        compiled = triton.compile(ASTSource(kernel, *source), target=target, options=how.__dict__)
        shared[kernel.__name__] = compiled.metadata.shared

    rules = {} if rules is None else {"rules": rules, "layer": 0}
    case = make_case(Shape(16, 64, 8, 4, 1), [Lengths(20, 1), Lengths(3, 6)], per_head=False, seed=1, **rules)
    query, key, value = (numbers.to(torch.bfloat16) for numbers in (case.query, case.key, case.value))
    heads = HeadShape(torch.bfloat16, 32, 8, 64)
    with mock.patch.object(JITFunction, "run", run):
        CudaAttention(heads, num_splits=2)(query, key, value, _slab(heads, 16, codec), case.inputs, 0, case.scale)
    return shared


def _slab(heads, block_size, codec):
    """Return a slab of one block."""
    import torch

    from pagefold.kv import CODECS, KVGeometry
    from pagefold.runner.codec_slab import CODEC_ROWS_LAYOUT, CodecSlab
    from pagefold.runner.codecs import CELL_CODECS
    from pagefold.runner.sealed_slab import SEALED_ROWS_LAYOUT, SealedSlab
    from pagefold.runner.slab import ROWS_LAYOUT, Slab

    head_dim, num_kv_heads = heads.head_dim, heads.num_kv_heads
    if codec is None:
        data = torch.empty(1, num_kv_heads, 2, block_size * head_dim, dtype=heads.dtype)
        return Slab(data, head_dim, ROWS_LAYOUT)
    geometry = KVGeometry(1, num_kv_heads, head_dim, 2, block_size, CODECS[codec])
    data = torch.empty(1, geometry.bytes_per_block, dtype=torch.uint8)
    if CELL_CODECS[codec].seals:
        residuals = torch.empty(num_kv_heads, 1, 2, block_size * head_dim, dtype=torch.float16)
        return SealedSlab(data, residuals, geometry, layout=SEALED_ROWS_LAYOUT)
    return CodecSlab(data, geometry, layout=CODEC_ROWS_LAYOUT)


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
