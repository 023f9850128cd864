"""Products with one matrix in every kind of blocks: of few rows beside reading it, of many beside int8 and bfloat16.

    few     1 and 4 rows times a matrix that no cache holds, on all cores: bytes of panels a second, over what a plain
            read of memory brings, measured right before and right behind (see ``hardware/ceilings.py``)
    many    32 and 512 rows times panels that stay in the caches, on one core: multiply-adds a second, over those of
            int8 quads (``w8a8_int8``), which were measured right before and right behind; bfloat16 is there to compare

Panels have random bytes. Reported are medians. Products are walked as the fused decoder walks them, the next panel
fetched ahead; numbers of a column are 2,048.

    python benchmarks/products.py [--formats Q4_0,Q6_K] [--repeats 9] [--megabytes 256] [--json FILE]
"""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numba
import numpy as np
from hardware.ceilings import Ceilings, cache_bytes
from report import Row, machine, parser, print_report
from rich.console import Console

from pagefold.config import available_cpus
from pagefold.kernels.block_kinds import KINDS
from pagefold.kernels.blocks import blocks_of
from pagefold.kernels.emit import call_tile
from pagefold.kernels.formats import PANEL_WIDTH
from pagefold.kernels.pairs import bfloat16_pairs
from pagefold.kernels.quads import int8_quads

if TYPE_CHECKING:
    from pagefold.kernels.formats import ProductFormat

NUM_K, FEW, MANY = 2048, (1, 4), (32, 512)
ASKED_READ, ASKED_INT8 = 0.9, 1.0
CACHED_PANELS = 8
MULTIPLY_ADDS = 2e8  # of a time of many rows
BYTES_BELOW = 60  # so that scales are numbers of a usual size, whatever half of one a byte is
LINE = 64

console = Console(stderr=True)


@numba.njit(nogil=True)
def walk(product, x, x_distance, panels, panel_bytes, num_panels, num_k, num_rows, y, y_distance, times):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN201, PLR0913, PLR0917
    """Multiply rows with all panels, so many times."""
    for _ in range(times):
        for index in range(num_panels):
            following = panels + min(index + 1, num_panels - 1) * panel_bytes
            here = panels + index * panel_bytes
            call_tile(product, (x, x_distance, here, num_k, num_rows, y, y_distance, 0, following))


class Product:
    """Rows and panels of random bytes.

    Args:
        product_format: of both.
        num_rows: rows.
        num_panels: panels.
    """

    def __init__(self, product_format: ProductFormat, num_rows: int, num_panels: int) -> None:
        random = np.random.default_rng(0)
        self._tile, self._num_rows = product_format.tiles().product, num_rows
        panel_bytes = product_format.panel_bytes(NUM_K)
        some = random.integers(0, BYTES_BELOW, (min(num_panels, LINE), panel_bytes), dtype=np.uint8)
        self._panels = np.empty((num_panels, panel_bytes), np.uint8)
        for first in range(0, num_panels, len(some)):
            self._panels[first : first + len(some)] = some[: num_panels - first]
        self._x = random.integers(0, BYTES_BELOW, (num_rows, product_format.row_bytes(NUM_K) + LINE), dtype=np.uint8)

    @property
    def num_bytes(self) -> int:
        """Bytes of the panels."""
        return self._panels.nbytes

    def seconds(self, num_threads: int, times: int = 1) -> float:
        """Return how long it takes, each thread a share of the panels; in CPU time if it is one thread."""
        shares = np.array_split(self._panels, num_threads)

        def one(share: np.ndarray[tuple[int, int], np.dtype[np.uint8]]) -> None:
            y = np.zeros((self._num_rows, PANEL_WIDTH), np.float32)
            rows = self._x.ctypes.data, self._x.strides[0]
            out = y.ctypes.data, y.strides[0]
            panels = share.ctypes.data, share.strides[0], len(share)
            walk(self._tile, *rows, *panels, NUM_K, self._num_rows, *out, times)

        if num_threads == 1:
            begin = time.thread_time()
            one(self._panels)
            return time.thread_time() - begin
        with ThreadPoolExecutor(num_threads) as threads:
            list(threads.map(int, range(num_threads)))  # they are there
            begin = time.perf_counter()
            list(threads.map(one, shares))
            return time.perf_counter() - begin


def few_rows(product_format: ProductFormat, megabytes: int, repeats: int, ceilings: Ceilings) -> list[Row]:
    """Time products that are bound by reading panels."""
    rows, num_threads = [], available_cpus()
    num_panels = megabytes * 2**20 // product_format.panel_bytes(NUM_K)
    for num_rows in FEW:
        product = Product(product_format, num_rows, num_panels)
        product.seconds(num_threads)
        shares, rates = [], []
        for _ in range(repeats):
            before, seconds = ceilings.now(), product.seconds(num_threads)
            could = before.and_then(ceilings.now()).bytes_read
            rates.append(product.num_bytes / seconds)
            shares.append(rates[-1] / could)
        share, rate = statistics.median(shares), statistics.median(rates)
        asked = num_rows == 1 and product_format.name in KINDS
        rows.append(
            Row(
                f"{product_format.name}, {num_rows} row{'s' * (num_rows > 1)}",
                f">= {ASKED_READ:.2f} of reading" if asked else "",
                f"{share:.2f} of reading, {rate / 1e9:.1f} GB/s",
                share >= ASKED_READ if asked else None,
                {"share": share, "bytes_a_second": rate, "rows": num_rows},
            )
        )
    return rows


def many_rows(product_format: ProductFormat, repeats: int) -> list[Row]:
    """Time products that are bound by operations."""
    rows, quads = [], int8_quads()
    for num_rows in MANY:
        num = CACHED_PANELS * PANEL_WIDTH * NUM_K * num_rows
        times = max(1, int(MULTIPLY_ADDS / num))
        product, peer = (Product(one, num_rows, CACHED_PANELS) for one in (product_format, quads))
        product.seconds(1)
        shares, rates = [], []
        for _ in range(repeats):
            before, seconds, behind = (one.seconds(1, times) for one in (peer, product, peer))
            rates.append(num * times / seconds)
            shares.append((before + behind) / 2 / seconds)
        share, rate = statistics.median(shares), statistics.median(rates)
        asked = product_format.name in KINDS
        rows.append(
            Row(
                f"{product_format.name}, {num_rows} rows",
                f">= {ASKED_INT8:.1f} x {quads.name}" if asked else "",
                f"{share:.2f} x, {rate / 1e9:.0f} G multiply-adds/s",
                share >= ASKED_INT8 if asked else None,
                {"share": share, "multiply_adds_a_second": rate, "rows": num_rows},
            )
        )
    return rows


def main() -> None:
    """Measure and report."""
    arguments = parser(__doc__)
    arguments.add_argument("--formats", default="w8a8_int8,bfloat16," + ",".join(KINDS), help="which, by name")
    arguments.add_argument("--repeats", type=int, default=9, help="times of each")
    arguments.add_argument("--megabytes", type=int, default=256, help="of the matrix that few rows are multiplied with")
    asked = arguments.parse_args()
    known: dict[str, ProductFormat] = {one.name: one for one in (int8_quads(), bfloat16_pairs())}
    known |= {name: blocks_of(name) for name in KINDS}
    ceilings, rows = Ceilings(int8_quads()), []
    for name in asked.formats.split(","):
        console.print(f"{name}: {known[name].means}")
        rows += few_rows(known[name], asked.megabytes, asked.repeats, ceilings)
        rows += many_rows(known[name], asked.repeats)
    facts = machine() | {"cache_bytes": cache_bytes()}
    print_report("products", rows, facts, asked.json)


if __name__ == "__main__":
    main()
