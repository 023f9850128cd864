"""What the dashboard costs who looks at it: first paint, and bytes a minute, in a headless Chromium.

* first paint: the time from the navigation's start to the first contentful paint, as the browser's own entries of
  ``performance`` say (Paint Timing). The dashboard's page beside a page of one word, both from the same server and in
  the same browser, each in a context of its own (nothing is cached), alternating; medians. The server has had ten
  minutes of requests, in virtual time, so that its answers are as large as they get.
* bytes: what came over the network in the first minute, heads included; the page itself and all that it asked for.

It drives the browser as the tests of the page do (tests/server/chromium.py), and needs one (``apt-get install
chromium``). Without one it says so, and measures nothing.

    python benchmarks/dashboard.py [--repeats 20] [--seconds 60] [--json FILE]
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from report import Row, machine, parser, print_report
from rich.progress import track

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "server"))

if TYPE_CHECKING:
    from collections.abc import Sequence

    from chromium import Chromium
    from dashboard_stage import Stage

ASKED_OF_PAINT = 2.0
ASKED_BYTES = 300_000
FIRST_PAINT = """new Promise((done) => new PerformanceObserver((list) => {
  const found = list.getEntries().find((one) => one.name === "first-contentful-paint");
  if (found) done(found.startTime);
}).observe({ type: "paint", buffered: true }))"""
EMPTY = "<!doctype html><html lang='en'><head><title>Empty</title></head><body>Empty</body></html>"


def first_paint_ms(browser: Chromium, url: str) -> float:
    """Return when a page is first painted, after its navigation began."""
    page = browser.page()
    page.goto(url)
    painted_ms = float(page.eval(FIRST_PAINT))
    page.close()
    return painted_ms


def measure_paint(browser: Chromium, stage: Stage, num_repeats: int) -> Row:
    """Return the dashboard's first paint beside an empty page's."""
    urls = {"page": f"{stage.url}/dashboard", "empty": f"{stage.url}/empty"}
    for url in urls.values():
        first_paint_ms(browser, url)
    painted: dict[str, list[float]] = {name: [] for name in urls}
    for repeat in track(range(num_repeats), "first paints"):
        for name in sorted(urls, reverse=bool(repeat % 2)):
            painted[name].append(first_paint_ms(browser, urls[name]))
    page_ms, empty_ms = (statistics.median(painted[name]) for name in ("page", "empty"))
    ratio = page_ms / empty_ms
    return Row(
        "first paint of the dashboard, of an empty page's",
        f"<= {ASKED_OF_PAINT:g} x",
        f"{ratio:.2f} x ({page_ms:.0f} ms of {empty_ms:.0f} ms)",
        ratio <= ASKED_OF_PAINT,
        {"painted_ms": painted},
    )


def measure_bytes(browser: Chromium, stage: Stage, seconds: float) -> Row:
    """Return what the first minute moves."""
    page = browser.page()
    page.goto(f"{stage.url}/dashboard")
    for _ in track(range(round(seconds)), "looking on"):
        time.sleep(1.0)
    a_minute = page.num_bytes() * 60 / seconds
    page.close()
    return Row(
        "bytes that it moves in its first minute",
        f"<= {ASKED_BYTES // 1000} kB",
        f"{a_minute / 1000:.0f} kB",
        a_minute <= ASKED_BYTES,
        {"bytes": a_minute},
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and report."""
    made = parser(__doc__)
    made.add_argument("--repeats", type=int, default=20, help="of each page's first paint")
    made.add_argument("--seconds", type=float, default=60.0, help="that bytes are counted for")
    arguments = made.parse_args(argv)

    from chromium import PROGRAM, Chromium
    from dashboard_stage import Stage
    from fastapi.responses import HTMLResponse

    if PROGRAM is None:
        print("no chromium is installed (apt-get install chromium): nothing is measured")
        return
    stage = Stage()
    stage.app.get("/empty", response_class=HTMLResponse)(lambda: EMPTY)
    browser = Chromium()
    try:
        rows = [measure_paint(browser, stage, arguments.repeats), measure_bytes(browser, stage, arguments.seconds)]
    finally:
        browser.close()
        stage.close()
    print_report("dashboard", rows, machine() | {"browser": PROGRAM}, arguments.json)


if __name__ == "__main__":
    main()
