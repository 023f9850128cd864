"""Attention of 32 decoding requests over a prefix that they share, against the same lengths in blocks of their own.

Workload: the attention op alone, SmolLM2's shape (9 query heads, 3 KV heads, head_dim 64, float32, blocks of 16), 32
requests of 2,048 shared tokens and 64 own, one new token each. ``shared``: the prefix lies in the same blocks for all.
``distinct``: every request has its own copy. Same results, to the bit: asserted. Interleaved, medians.

Beside it the floors: the bytes that each has to read, over the bandwidth that a plain sum of 256 MiB reaches.

    python benchmarks/shared_attention.py [--repeats 25] [--shared 2048] [--json FILE]
"""

from __future__ import annotations

import statistics
import time

import numpy as np
from report import Row, machine, parser, print_report, read_bandwidth

NUM_REQUESTS, OWN = 32, 64
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 9, 3, 64, 16
ASKED = 3.0


def main() -> None:
    """Measure and report."""
    import torch

    from pagefold.config import available_cpus
    from pagefold.kv import KVGeometry
    from pagefold.runner.attention.cpu import CpuAttention
    from pagefold.runner.attention.inputs import AttentionInputs
    from pagefold.runner.slab import Slab

    arguments = parser(__doc__)
    arguments.add_argument("--repeats", type=int, default=25)
    arguments.add_argument("--shared", type=int, default=2048)
    args = arguments.parse_args()
    where = machine()
    num_prefix, num_own = args.shared // BLOCK_SIZE, OWN // BLOCK_SIZE
    num_blocks = NUM_REQUESTS * (num_prefix + num_own)
    slab = Slab.allocate(KVGeometry(1, NUM_KV_HEADS, HEAD_DIM, 4, BLOCK_SIZE), num_blocks, torch.float32)
    generator = torch.Generator().manual_seed(0)
    slab.data.normal_(generator=generator)
    distinct = np.random.default_rng(0).permutation(num_blocks).reshape(NUM_REQUESTS, -1).astype(np.int32)
    slab.data[distinct[1:, :num_prefix]] = slab.data[distinct[0, :num_prefix]]
    shared = distinct.copy()
    shared[:, :num_prefix] = distinct[0, :num_prefix]
    query = torch.randn(NUM_REQUESTS, NUM_HEADS, HEAD_DIM, generator=generator)
    key, value = torch.randn(2, NUM_REQUESTS, NUM_KV_HEADS, HEAD_DIM, generator=generator)

    def inputs(tables: np.ndarray) -> AttentionInputs:  # type: ignore[type-arg]
        rows = np.arange(NUM_REQUESTS + 1, dtype=np.int32)
        lengths = np.full((NUM_REQUESTS, 1), args.shared + OWN, np.int32)
        cells = np.arange(NUM_KV_HEADS, dtype=np.int32)[None, None]
        return AttentionInputs.of_one_group(
            query_starts=rows,
            tables=np.broadcast_to(tables[:, None], (NUM_REQUESTS, NUM_KV_HEADS, tables.shape[1])),
            lengths=np.broadcast_to(lengths, (NUM_REQUESTS, NUM_KV_HEADS)),
            cells=np.broadcast_to(cells, (NUM_REQUESTS, 1, NUM_KV_HEADS)),
        )

    kinds = {name: (inputs(tables), CpuAttention(available_cpus())) for name, tables in
             (("shared", shared), ("distinct", distinct))}  # fmt: skip
    taken: dict[str, list[float]] = {name: [] for name in kinds}
    results = {}
    for _ in range(args.repeats + 1):
        for name, (one, attention) in kinds.items():
            begin = time.perf_counter()
            results[name] = attention(query, key, value, slab, one, 0, HEAD_DIM**-0.5)
            taken[name].append(time.perf_counter() - begin)
    assert torch.equal(results["shared"], results["distinct"])
    bandwidth = read_bandwidth()
    block_bytes = slab.data[0].nbytes
    blocks = {"shared": num_prefix + NUM_REQUESTS * num_own, "distinct": num_blocks}
    rows = []
    for name in kinds:
        median = statistics.median(taken[name][1:])
        floor = blocks[name] * block_bytes / bandwidth
        text = f"{1000 * median:.2f} ms; reading {blocks[name]:,} blocks takes {1000 * floor:.2f} ms"
        rows.append(Row(name, "", text, values={"seconds": median, "floor_seconds": floor}))
    ratio = statistics.median(d / s for d, s in zip(taken["distinct"][1:], taken["shared"][1:], strict=True))
    rows.append(Row("distinct / shared", f">= {ASKED:g} x", f"{ratio:.2f} x", ratio >= ASKED, {"ratio": ratio}))
    print_report("shared_attention", rows, where, args.json)


if __name__ == "__main__":
    main()
