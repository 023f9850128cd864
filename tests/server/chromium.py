"""A headless Chromium, driven by its DevTools protocol over a pipe: nothing but the browser need be installed.

https://chromedevtools.github.io/devtools-protocol/: messages of JSON, each ended by a zero byte, on the browser's file
descriptors 3 and 4.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

__all__ = ["Chromium", "Page", "needs_chromium"]

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PATIENCE_S = 60.0

needs_chromium = pytest.mark.skipif(PROGRAM is None, reason="no chromium is installed (apt-get install chromium)")

_FLAGS = (
    *("--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--no-first-run", "--no-default-browser-check"),
    *("--disable-gpu", "--disable-dev-shm-usage", "--disable-extensions", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-default-apps", "--mute-audio", "--hide-scrollbars"),
    *("--force-color-profile=srgb", "--font-render-hinting=none", "--disable-features=Translate,OptimizationHints"),
)
_LOWEST_FD = 10


class Chromium:
    """A browser with a profile of its own, which is gone when it is closed."""

    def __init__(self) -> None:
        assert PROGRAM is not None
        self._profile = tempfile.mkdtemp(prefix="pagefold-chromium-")
        theirs_in, self._out = _pipe()
        self._in, theirs_out = _pipe()
        # bash puts the ends where the browser looks for them.
        command = f'exec "$@" 3<&{theirs_in} 4>&{theirs_out} {theirs_in}<&- {theirs_out}>&-'
        arguments = [PROGRAM, *_FLAGS, f"--user-data-dir={self._profile}", "about:blank"]
        self._log = Path(self._profile, "log").open("wb")  # noqa: SIM115 - the browser writes it as long as it lives
        self._process = subprocess.Popen(
            ["bash", "-c", command, "bash", *arguments],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._changed = threading.Condition()
        self._answers: dict[int, dict[str, Any]] = {}
        self._events: list[dict[str, Any]] = []
        self._number = 0
        self._has_ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Ask the browser, and return what it answers."""
        with self._changed:
            self._number += 1
            number = self._number
        message = {"id": number, "method": method, "params": params} | (
            {} if session is None else {"sessionId": session}
        )
        os.write(self._out, json.dumps(message).encode() + b"\0")
        with self._changed:
            assert self._changed.wait_for(lambda: number in self._answers or self._has_ended, PATIENCE_S), method
            assert number in self._answers, f"the browser has ended: {Path(self._log.name).read_text()[-2000:]}"
            answer = self._answers.pop(number)
        assert "error" not in answer, (method, params, answer["error"])
        return answer["result"]

    def events(self, session: str, *methods: str) -> list[dict[str, Any]]:
        """What it told of a page so far."""
        with self._changed:
            return [
                one["params"] for one in self._events if one.get("sessionId") == session and one["method"] in methods
            ]

    def page(self, width: int = 1200, height: int = 900, *, is_dark: bool = False, scale: float = 1.0) -> Page:
        """Open a page with cookies and storage of its own."""
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, session, context)
        for domain in ("Page", "Runtime", "Network", "Log", "Accessibility", "DOM"):
            page.call(f"{domain}.enable")
        page.resize(width, height, scale)
        page.use_dark(is_dark=is_dark)
        return page

    def close(self) -> None:
        with contextlib.suppress(AssertionError, OSError):
            self.call("Browser.close")
        try:
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)
        os.close(self._out)
        os.close(self._in)
        self._log.close()
        shutil.rmtree(self._profile, ignore_errors=True)

    def _read(self) -> None:
        buffer = b""
        while True:
            data = os.read(self._in, 2**16)
            *messages, buffer = (buffer + data).split(b"\0")
            with self._changed:
                for message in map(json.loads, messages):
                    if "id" in message:
                        self._answers[message["id"]] = message
                    else:
                        self._events.append(message)
                self._has_ended = not data
                self._changed.notify_all()
            if not data:
                return


class Page:
    """One page of the browser."""

    def __init__(self, browser: Chromium, session: str, context: str) -> None:
        self._browser = browser
        self._session = session
        self._context = context

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def events(self, *methods: str) -> list[dict[str, Any]]:
        return self._browser.events(self._session, *methods)

    def resize(self, width: int, height: int, scale: float = 1.0) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )

    def use_dark(self, *, is_dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def goto(self, url: str) -> None:
        loaded = len(self.events("Page.loadEventFired"))
        self.call("Page.navigate", url=url)
        self.until(lambda: len(self.events("Page.loadEventFired")) > loaded, f"{url} to load")

    def eval(self, expression: str) -> Any:
        """The value of an expression; a promise is waited for."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Wait until an expression is true, and return its value."""
        found: list[Any] = []

        def holds() -> bool:
            found[:] = [self.eval(expression)]
            return bool(found[0])

        self.until(holds, expression)
        return found[0]

    def until(self, condition: Any, what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, f"waited for {what}; errors: {self.errors()}"
            time.sleep(0.02)

    def text(self, selector: str) -> str:
        return self.eval(f"document.querySelector({json.dumps(selector)}).innerText")

    def click(self, selector: str) -> None:
        self.eval(f"document.querySelector({json.dumps(selector)}).click()")

    def press(self, key: str) -> None:
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35}
        named = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **named, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **named)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def requested(self) -> list[str]:
        """Every URL that it asked for."""
        return [event["request"]["url"] for event in self.events("Network.requestWillBeSent")]

    def num_bytes(self) -> float:
        """What came over the network, heads included."""
        return sum(event["encodedDataLength"] for event in self.events("Network.loadingFinished"))

    def errors(self) -> list[str]:
        """What its console shows as an error or a warning."""
        thrown = [str(event["exceptionDetails"]) for event in self.events("Runtime.exceptionThrown")]
        logged = [event["entry"] for event in self.events("Log.entryAdded")]
        said = self.events("Runtime.consoleAPICalled")
        return [
            *thrown,
            *(f"{entry['text']} {entry.get('url', '')}" for entry in logged if entry["level"] in ("error", "warning")),
            *(str(event["args"]) for event in said if event["type"] in ("error", "warning", "assert")),
        ]

    def accessible(self) -> list[dict[str, Any]]:
        """What a screen reader gets: the nodes that are not ignored."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        return [node for node in nodes if not node["ignored"]]

    def picture(self, file: Path | None = None, *, height: int | None = None) -> bytes:
        """A PNG of the page, up to ``height``; of all of it if not said."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], height or 10_000), "scale": 1}
        shot = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        data = base64.b64decode(shot["data"])
        if file is not None:
            file.write_bytes(data)
        return data

    def close(self) -> None:
        self._browser.call("Target.disposeBrowserContext", browserContextId=self._context)


def _pipe() -> tuple[int, int]:
    """Return the ends of a pipe, as numbers that are nobody's 3 or 4."""
    ends = os.pipe()
    made = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, _LOWEST_FD) for end in ends)
    for end in ends:
        os.close(end)
    return made[0], made[1]
