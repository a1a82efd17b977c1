"""A headless Chromium, controlled over a pipe by its own protocol: no driver, no port."""

import base64
import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_PATIENCE_SECONDS = 60
_FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars",
    "--disable-extensions", "--disable-background-networking", "--disable-dev-shm-usage",
    "--remote-debugging-pipe", "--force-color-profile=srgb",
)  # fmt: skip


def find_chromium() -> str | None:
    """Return the path of a Chromium; None if there is none."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)


class Page:
    """One tab."""

    def __init__(self, reading: int, writing: int) -> None:
        self._reading, self._writing = reading, writing
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self.problems: list[str] = []
        self.urls: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """Send one command and return its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            self._note(answer)

    def _receive(self) -> Any:
        while b"\0" not in self._rest:
            data = os.read(self._reading, 1 << 16)
            assert data, "Chromium has ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, event: Any) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.urls.append(params["request"]["url"])

    def open(self, url: str) -> None:
        """Open an address and wait until the page has loaded."""
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script: str) -> Any:
        """Evaluate an expression and return its value."""
        result = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, script: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + _PATIENCE_SECONDS
        while not self.run(script):
            assert time.monotonic() < end, f"never true: {script}"
            time.sleep(0.02)

    def write(self, text: str) -> None:
        """Type text at the cursor."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, **more: Any) -> None:
        """Press and release a key."""
        text = {"text": "\r"} if key == "Enter" else {}
        code = {"Enter": 13, "Escape": 27, "Tab": 9}.get(key, 0)
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key,
                windowsVirtualKeyCode=code, **(text if kind == "keyDown" else {}), **more,
            )  # fmt: skip

    def resize(self, width: int, height: int, *, scale: float = 1) -> None:
        """Set the window's size in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height,
            deviceScaleFactor=scale, mobile=width < 600,
        )  # fmt: skip

    def prefer(self, scheme: str) -> None:
        """Set the preferred colour scheme, "light" or "dark"."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def picture(self) -> bytes:
        """Return a screenshot as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])


def import_modules(page: Page) -> None:
    """Make the exports of the page's modules available as `own` once it has loaded."""
    modules = ("chat", "chats", "calls", "connection", "live", "markdown", "pictures")
    names = json.dumps([f"/{name}.js" for name in modules])
    page.run(
        f"Promise.all({names}.map((name) => import(name)))"
        ".then((found) => { window.own = Object.assign({}, ...found); })"
    )


@contextlib.contextmanager
def browser_page(profile: Path) -> Iterator[Page]:
    """Open a tab in a new browser with its files in `profile`."""
    to_browser, ours_out = os.pipe()
    ours_in, from_browser = os.pipe()
    chromium = find_chromium()
    assert chromium is not None
    line = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
    process = subprocess.Popen(
        ["bash", "-c", line, chromium, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
        pass_fds=(to_browser, from_browser),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser)
    os.close(from_browser)
    try:
        page = Page(ours_in, ours_out)
        yield page
        page.call("Page.close")
    finally:
        process.terminate()
        process.wait()
        os.close(ours_in)
        os.close(ours_out)
