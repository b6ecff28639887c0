"""A headless Chromium, driven over the DevTools protocol through two pipes: no driver, no library.

    with Browser.start() as browser:
        browser.open(path)
        browser.evaluate("document.title")
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader, BufferedWriter
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--remote-debugging-pipe", "--window-size=1500,1100", "--hide-scrollbars",
            "--disable-background-networking")  # fmt: skip
# The protocol's pipes are file descriptors 3 and 4.
_WITH_PIPES = """
import os, sys
ours = [os.dup(int(fd)) for fd in sys.argv[1:3]]
high = [os.dup2(fd, 100 + i) for i, fd in enumerate(ours)]
for fd, wanted in zip(high, (3, 4)):
    os.dup2(fd, wanted)
os.execv(sys.argv[3], sys.argv[3:])
"""


def find_browser() -> str | None:
    """The path of a Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of one browser."""

    def __init__(self, out: BufferedWriter, into: BufferedReader) -> None:
        self._out, self._in = out, into
        self._buffer, self._number, self._session = b"", 0, ""
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.call(f"{domain}.enable")

    @classmethod
    @contextmanager
    def start(cls, path: str, profile: Path) -> Iterator[Browser]:
        """A browser with a profile folder of its own; ended when the block is left."""
        (to_read, to_write), (from_read, from_write) = os.pipe(), os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-c", _WITH_PIPES, str(to_read), str(from_write), path, *_OPTIONS,
             f"--user-data-dir={profile}"],
            pass_fds=(to_read, from_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_read)
        os.close(from_write)
        with os.fdopen(to_write, "wb") as out, os.fdopen(from_read, "rb") as into:
            try:
                yield cls(out, into)
            finally:
                process.terminate()
                process.wait(timeout=20)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; events in between are looked through."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        self._out.flush()
        while (answer := self._read()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, path: Path) -> None:
        """Load a page and wait for its scripts."""
        self.call("Page.navigate", url=path.resolve().as_uri())
        while self._read_event() != "Page.loadEventFired":
            pass

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression, or of what it promises."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True,
                           awaitPromise=True)  # fmt: skip
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def click(self, selector: str) -> None:
        """A real click in the middle of an element."""
        x, y = self._middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def hover(self, selector: str) -> None:
        """Move the mouse over an element."""
        x, y = self._middle(selector)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x - 1, y=y)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path) -> None:
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))

    def _middle(self, selector: str) -> tuple[float, float]:
        box = self.evaluate(f"""(() => {{
            const node = document.querySelector({json.dumps(selector)});
            node.scrollIntoView({{block: "center"}});
            const b = node.getBoundingClientRect();
            return [b.x + b.width / 2, b.y + b.height / 2];
        }})()""")
        return float(box[0]), float(box[1])

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            data = os.read(self._in.fileno(), 1 << 16)
            assert data, "the browser has ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        parsed: dict[str, Any] = json.loads(message)
        return parsed

    def _read_event(self) -> str:
        message = self._read()
        self._note(message)
        return str(message.get("method"))

    def _note(self, message: dict[str, Any]) -> None:
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(message["params"]["exceptionDetails"]))
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])
