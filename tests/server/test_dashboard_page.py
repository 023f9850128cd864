"""The dashboard's page in a real browser: what it draws, what it asks for, and who can use it.

The pictures of the docs are drawn here, into the folder $PAGEFOLD_PICTURES if that is set:

    PAGEFOLD_PICTURES=docs/pictures pytest tests/server/test_dashboard_page.py -k pictures
"""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from chromium import Chromium, Page, needs_chromium
from dashboard_stage import Stage
from local_server import LocalServer

from pagefold.config import ServerConfig

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = needs_chromium

LOW_CONTRAST = """(() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (c) => { const x = c / 255; return x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4; };
  const luminance = ([r, g, b]) => 0.2126 * light(r) + 0.7152 * light(g) + 0.0722 * light(b);
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const colour = rgb(getComputedStyle(node).backgroundColor);
      if (colour.length < 4 || colour[3] > 0) return colour;
    }
    return [255, 255, 255];
  };
  const found = [];
  let seen = 0;
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
    if (!own || !node.checkVisibility() || node.closest("script, style, noscript, .unseen, .skip")) continue;
    const style = getComputedStyle(node);
    const ink = rgb(node instanceof SVGElement ? style.fill : style.color);
    const [a, b] = [luminance(ink), luminance(ground(node))].sort((x, y) => y - x);
    seen += 1;
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) found.push(`${node.tagName} ${node.textContent.slice(0, 30)}: ${ratio.toFixed(2)}`);
  }
  return { found, seen };
})()"""

FOCUSABLE = """[...document.querySelectorAll("a[href], button, input, summary, [tabindex='0']")]
  .filter((one) => one.checkVisibility() && !one.closest("dialog:not([open])")).length"""

FOCUSED = """(() => {
  const one = document.activeElement;
  if (!one || one === document.body) return null;
  const style = getComputedStyle(one);
  if (!one.dataset.seen) one.dataset.seen = Math.random();
  const outline = style.outlineStyle === "none" ? 0 : parseFloat(style.outlineWidth);
  return { key: one.dataset.seen, name: one.tagName, outline };
})()"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Chromium]:
    browser = Chromium()
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()


def opened(browser: Chromium, url: str, **how: Any) -> Page:
    page = browser.page(**how)
    page.goto(f"{url}/dashboard")
    return page


def shown(browser: Chromium, stage: Stage, **how: Any) -> Page:
    page = opened(browser, stage.url, **how)
    page.wait("document.querySelectorAll('#requests tr').length === 20 && !document.querySelector('#whatif').hidden")
    return page


def check_quiet(page: Page, url: str) -> None:
    assert page.errors() == []
    assert page.requested()
    assert all(one.startswith((f"{url}/", "data:")) for one in page.requested()), page.requested()


def test_it_shows_what_a_server_does_while_it_does_it(browser: Chromium, tiny: LocalServer) -> None:
    prompt = list(range(40_000, 40_120))
    first = tiny.complete(prompt, max_tokens=3, ignore_eos=True)
    page = opened(browser, tiny.url)
    page.wait(f"document.querySelector('#requests button')?.dataset.request === '{first['id']}-0'")
    assert page.text("#state") == "Live"
    assert page.text("#model") == "tiny"
    second = tiny.complete(prompt, max_tokens=3, ignore_eos=True)
    page.wait(f"document.querySelector('#requests button')?.dataset.request === '{second['id']}-0'")
    row = page.text("#requests tr")
    assert "93 %" in row
    assert "112 of 120" in row
    assert "partial block" in row
    told = tiny.http.get("/v1/dashboard").json()
    for miss in told["misses"][:6]:  # the page shows no more, and tests before this one have caused others
        assert miss["told"] in page.text("#causes")
    assert f"{told['tiers'][0]['num_blocks']:,} blocks" in page.text("#tier-device")
    label = page.eval("document.querySelector('#tier-device canvas').getAttribute('aria-label')")
    assert f"{told['tiers'][0]['now']['cached']:,} cached" in label
    check_quiet(page, tiny.url)
    page.close()


def test_every_panel_is_filled_and_nothing_comes_from_elsewhere(browser: Chromium, stage: Stage) -> None:
    page = shown(browser, stage)
    assert page.eval("document.querySelectorAll('#tiers canvas').length") == 2
    assert page.eval("document.querySelectorAll('#prefixes tr').length") == 10
    assert "the policy named it" in page.text("#rules")
    (loss, *_) = page.eval("fetch('/v1/advice').then((answer) => answer.json())")["data"]
    assert loss["told"] in page.text("#advice")
    assert loss["remedy"] in page.text("#advice")
    curve = page.eval("fetch('/v1/cache/whatif').then((answer) => answer.json())")
    assert curve["told"] in page.text("#whatif")
    assert page.eval("document.querySelectorAll('#curve polyline').length") == len(curve["policies"])
    assert "learned, in use" in page.text("#curve")
    # Of the device's blocks each state has its colour in the picture.
    colours = page.eval(
        "(() => { const c = document.querySelector('#tier-device canvas'); const d = c.getContext('2d')"
        ".getImageData(0, 0, c.width, c.height).data; const n = {};"
        " for (let i = 0; i < d.length; i += 4) { const k = [d[i], d[i+1], d[i+2]].join(); n[k] = (n[k] ?? 0) + 1; }"
        " return n; })()"
    )
    held, cached = (colours.get(colour, 0) for colour in ("194,104,26", "59,110,165"))
    told = page.eval("fetch('/v1/dashboard').then((answer) => answer.json())")["tiers"][0]["series"]
    share = sum(filter(None, told["held"])) / (sum(filter(None, told["held"])) + sum(filter(None, told["cached"])))
    assert held / (held + cached) == pytest.approx(share, abs=0.06)
    check_quiet(page, stage.url)
    page.close()


def test_a_disk_has_its_blocks_and_what_moves(browser: Chromium, tiny_chat_model: Path, tmp_path: Path) -> None:
    server = LocalServer(
        tiny_chat_model,
        kv_cache_memory_bytes=40 * 2**13,
        max_model_len=512,
        max_num_seqs=2,
        kv_offloading_size=0.01,
        kv_disk_path=str(tmp_path),
        kv_disk_size=0.01,
        kv_write_policy="write_through",
    )
    try:
        server.complete(list(range(30_000, 30_250)), max_tokens=1)
        page = opened(browser, server.url)
        page.wait("document.querySelectorAll('#tier-disk canvas').length === 2")
        label = "document.querySelector('#tier-disk canvas').getAttribute('aria-label')"
        page.wait(f"{label}.includes('15 cached')")
        assert page.eval(label).startswith("The disk: blocks over ten minutes")
        (disk,) = (one for one in server.http.get("/v1/dashboard").json()["tiers"] if one["name"] == "disk")
        assert f"{disk['num_blocks']:,} blocks" in page.text("#tier-disk h3")
        assert "read in ten minutes" in page.text("#tier-disk h3")
        page.eval("document.querySelector('#tier-disk canvas').focus()")
        page.press("End")
        assert page.text("#tier-disk .said").startswith("0 s ago: cached 15, free ")
        moved = "document.querySelectorAll('#tier-disk canvas')[1].getAttribute('aria-label')"
        assert "15 written" in page.eval(moved)
        assert page.eval("document.documentElement.scrollWidth <= innerWidth")
        check_quiet(page, server.url)
        page.close()
    finally:
        server.close()


def test_panels_that_a_server_does_not_have_are_not_there(browser: Chromium) -> None:
    bare = Stage("<b id=injected>x</b><img src=x onerror=alert(1)>", ServerConfig(enable_explain=False))
    page = opened(browser, bare.url)
    page.wait("document.querySelector('#state').textContent === 'Live'")
    assert page.eval("document.querySelector('#whatif').hidden && document.querySelector('#advice').hidden")
    assert page.text("#no-requests") == "This server remembers none: it was started with --no-enable-explain."
    assert page.text("#model") == "<b id=injected>x</b><img src=x onerror=alert(1)>"
    assert page.eval("document.querySelectorAll('#injected, #model img').length") == 0
    check_quiet(page, bare.url)
    page.close()
    bare.close()


@pytest.mark.quick(every=4)
@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [320, 400, 760, 1200])
def test_it_fits_and_can_be_read(browser: Chromium, stage: Stage, width: int, is_dark: bool) -> None:
    page = shown(browser, stage, width=width, height=800, is_dark=is_dark)
    page.eval("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    page.wait("[...document.querySelectorAll('details table')].every((one) => one.rows.length > 5)")
    assert page.eval("document.documentElement.scrollWidth") <= width
    contrast = page.eval(LOW_CONTRAST)
    assert contrast["found"] == []
    assert contrast["seen"] > 100
    ground = page.eval("getComputedStyle(document.body).backgroundColor")
    assert ground == ("rgb(18, 21, 24)" if is_dark else "rgb(245, 243, 238)")
    page.close()


def test_the_switch_of_themes_is_remembered(browser: Chromium, stage: Stage) -> None:
    page = shown(browser, stage)
    ground = "getComputedStyle(document.body).backgroundColor"
    seen = []
    for _ in range(3):
        page.click("#theme")
        seen.append((page.text("#theme"), page.eval(ground)))
    assert [name for name, _ in seen] == ["Theme: light", "Theme: dark", "Theme: auto"]
    assert [colour == "rgb(18, 21, 24)" for _, colour in seen] == [False, True, False]
    page.click("#theme")
    page.click("#theme")
    page.goto(f"{stage.url}/dashboard")
    assert page.text("#theme") == "Theme: dark"
    assert page.eval(ground) == "rgb(18, 21, 24)"
    page.close()


def test_the_keyboard_reaches_everything_and_shows_where_it_is(browser: Chromium, stage: Stage) -> None:
    page = shown(browser, stage)
    page.click("#pause")
    num = page.eval(FOCUSABLE)
    assert num > 30
    page.eval("document.activeElement.blur()")
    reached: dict[str, Any] = {}
    for _ in range(2 * num):
        page.press("Tab")
        one = page.eval(FOCUSED)
        if one is None or one["key"] in reached:
            break
        reached[one["key"]] = one
    assert len(reached) >= num
    assert [one for one in reached.values() if one["outline"] < 2] == []
    # A chart tells its columns, one by one.
    page.eval("document.querySelector('#tier-device canvas').focus()")
    page.press("End")
    last = page.text("#tier-device .said")
    assert last.startswith("0 s ago: held by requests ")
    page.press("ArrowLeft")
    assert page.text("#tier-device .said").startswith("5 s ago: ")
    page.press("Home")
    assert page.text("#tier-device .said").startswith("10 min ago: ")
    page.close()


def test_why_opens_by_the_keyboard_and_gives_the_focus_back(browser: Chromium, stage: Stage) -> None:
    page = shown(browser, stage)
    page.eval("document.querySelector('#requests tr:nth-child(2) button').focus()")
    name = page.eval("document.activeElement.dataset.request")
    page.press("Enter")
    page.wait("document.querySelector('#why').open")
    assert page.text("#why-head") == name
    assert " tokens from " in page.text("#why-told")
    page.press("Escape")
    page.wait("!document.querySelector('#why').open")
    assert page.eval("document.activeElement.dataset.request") == name
    page.close()


def test_a_screen_reader_gets_names_for_everything(browser: Chromium, stage: Stage) -> None:
    page = shown(browser, stage)
    nodes = page.accessible()
    roles = {"button", "link", "textbox", "img", "image", "table", "region", "dialog", "DisclosureTriangle"}
    named = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in nodes]
    checked = [(role, name) for role, name in named if role in roles]
    # A table of a panel is named by the panel's heading, which is before it.
    assert [role for role, name in checked if not name.strip() and role != "table"] == []
    assert {role for role, _ in checked} >= {"button", "region", "table"}
    assert page.eval("document.documentElement.lang") == "en"
    assert page.eval("document.querySelectorAll('h1').length") == 1
    levels = page.eval("[...document.querySelectorAll('h1, h2, h3')].map((one) => Number(one.tagName[1]))")
    assert all(after - before <= 1 for before, after in pairwise(levels))
    ids = page.eval("[...document.querySelectorAll('[id]')].map((one) => one.id)")
    assert len(ids) == len(set(ids))
    referred = page.eval(
        "[...document.querySelectorAll('[aria-labelledby]')].map((one) => one.getAttribute('aria-labelledby'))"
    )
    assert set(referred) <= set(ids)
    assert page.eval(
        "[...document.querySelectorAll('table')].every((one) => !one.rows.length || one.querySelector('th[scope=col]'))"
    )
    assert page.eval("document.querySelectorAll('[aria-live], [role=status]').length") == 1
    page.close()


def test_the_key_is_asked_for_and_kept_in_the_tab_alone(browser: Chromium, tiny_chat_model: Path) -> None:
    door = {"api_keys": ("sk-one",), "admin_api_key": "sk-admin"}
    server = LocalServer(tiny_chat_model, door=door, kv_cache_memory_bytes=2**21, max_num_seqs=2)
    try:
        page = opened(browser, server.url)
        page.wait("!document.querySelector('#asks-key').hidden")
        assert "admin key" in page.text("#key-why")
        assert page.eval("document.activeElement.id") == "key"
        assert page.eval("document.querySelector('label[for=key]').control.type") == "password"
        num_asked = sum(url.endswith("/v1/dashboard") for url in page.requested())
        page.type("sk-one")
        page.press("Enter")
        page.until(lambda: sum(url.endswith("/v1/dashboard") for url in page.requested()) > num_asked, "another try")
        page.wait("document.querySelector('#key').value === '' && !document.querySelector('#asks-key').hidden")
        page.wait("document.activeElement.id === 'key' && sessionStorage.length === 0")
        num_asked = sum(url.endswith("/v1/dashboard") for url in page.requested())
        for no_key in ("schlüssel", "ключ", "two words"):  # a header takes not all of them, and a server none
            page.type(no_key)
            page.press("Enter")
            page.wait("document.querySelector('#key-why').innerText.startsWith('That is no key')")
            page.wait("document.querySelector('#key').value === '' && document.activeElement.id === 'key'")
            page.eval("document.querySelector('#key-why').textContent = ''")
        assert sum(url.endswith("/v1/dashboard") for url in page.requested()) == num_asked
        assert page.text("#state") == "Waits for a key"
        page.type("sk-admin")
        page.press("Enter")
        page.wait("document.querySelector('#asks-key').hidden && document.querySelector('#state').innerText === 'Live'")
        assert page.eval("JSON.stringify(sessionStorage)") == json.dumps(
            {"pagefold-admin-key": "sk-admin"}, separators=(",", ":")
        )
        assert "sk-" not in page.eval("JSON.stringify(localStorage) + document.cookie + location.href")
        assert not any("sk-" in url for url in page.requested())
        page.goto(f"{server.url}/dashboard")
        page.wait("document.querySelector('#state').innerText === 'Live'")
        page.close()
        other = opened(browser, server.url)
        other.wait("!document.querySelector('#asks-key').hidden")
        other.close()
    finally:
        server.close()


@pytest.mark.long
def test_nobody_asks_while_nobody_looks(browser: Chromium, stage: Stage) -> None:
    page = shown(browser, stage)
    count = "performance.getEntriesByType('resource').filter((one) => one.name.endsWith('/v1/dashboard')).length"
    page.eval("Object.defineProperty(document, 'hidden', { value: true, configurable: true })")
    page.eval("document.dispatchEvent(new Event('visibilitychange'))")
    before = page.eval(count)
    page.eval("new Promise((done) => setTimeout(done, 5600))")
    assert page.eval(count) - before <= 0
    page.eval("Object.defineProperty(document, 'hidden', { value: false, configurable: true })")
    page.eval("document.dispatchEvent(new Event('visibilitychange'))")
    page.wait(f"{count} === {before + 1}")
    page.wait(f"{count} === {before + 2}")
    page.click("#pause")
    assert page.text("#state") == "Paused"
    assert page.eval("document.querySelector('#pause').getAttribute('aria-pressed')") == "true"
    before = page.eval(count)
    page.eval("new Promise((done) => setTimeout(done, 5600))")
    assert page.eval(count) == before
    page.click("#pause")
    page.wait(f"{count} > {before}")
    page.close()


@pytest.mark.long
def test_a_server_that_goes_away_and_comes_back(browser: Chromium) -> None:
    stage = Stage()
    page = opened(browser, stage.url)
    page.wait("document.querySelector('#state').innerText === 'Live'")
    page.call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=-1, uploadThroughput=-1)
    page.wait("document.querySelector('#state').innerText.startsWith('The server does not answer')")
    page.call("Network.emulateNetworkConditions", offline=False, latency=0, downloadThroughput=-1, uploadThroughput=-1)
    page.wait("document.querySelector('#state').innerText === 'Live'")
    page.close()
    stage.close()


@pytest.mark.long
def test_it_moves_little(browser: Chromium, stage: Stage) -> None:
    page = shown(browser, stage)
    first = page.num_bytes()
    assert first < 100_000
    page.wait(
        "performance.getEntriesByType('resource').filter((one) => one.name.endsWith('/v1/dashboard')).length >= 3"
    )
    assert page.num_bytes() < 150_000
    page.close()


@pytest.mark.long
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_pictures_of_the_docs(browser: Chromium, stage: Stage, tmp_path: Path, theme: str) -> None:
    folder = Path(os.environ.get("PAGEFOLD_PICTURES") or tmp_path)
    page = shown(browser, stage, width=1180, height=1000, is_dark=theme == "dark")
    page.picture(folder / f"dashboard-{theme}.png", height=1180)
    assert 20_000 < (folder / f"dashboard-{theme}.png").stat().st_size < 200_000
    page.close()
    page = shown(browser, stage, width=400, height=800, is_dark=theme == "dark")
    page.picture(folder / f"dashboard-narrow-{theme}.png", height=900)
    assert 10_000 < (folder / f"dashboard-narrow-{theme}.png").stat().st_size < 200_000
    page.close()
