"""A real Chromium without a window, driven by its DevTools protocol over two pipes: no port, no package."""

import base64
import json
import os
import selectors
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SECONDS = 120.0  # for an answer or an event, on a busy machine


class Browser:
    """One tab. events: what the browser has told so far, such as requests and errors, in order."""

    def __init__(self, profile: Path) -> None:
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe"]
        # Chromium reads its commands from descriptor 3 and answers on 4.
        command = f'exec chromium "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self.process = subprocess.Popen(
            ["bash", "-c", command, "chromium", *options, f"--user-data-dir={profile}"],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self.commands, self.answers, self.read, self.number = ours_out, ours_in, b"", 0
        self.events: list[dict[str, Any]] = []
        self.session: str | None = None
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> Any:
        """Give a command; returns the answer. Raises RuntimeError with the browser's words if it refuses."""
        self.number += 1
        message: dict[str, Any] = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.commands, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + SECONDS
        while True:
            told = self._next(until)
            if told.get("id") == self.number:
                if "error" in told:
                    raise RuntimeError(f"{method}: {told['error']}")
                return told["result"]
            self.events.append(told)

    def wait(self, method: str) -> None:
        """For an event since the last `open`."""
        until = time.monotonic() + SECONDS
        while not any(event.get("method") == method for event in self.events):
            self.events.append(self._next(until))

    def _next(self, until: float) -> dict[str, Any]:
        """The next message. Raises TimeoutError if none has come by `until`: other ones must not keep a wait alive."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.answers, selectors.EVENT_READ)
            while (left := until - time.monotonic()) > 0:
                message, end, rest = self.read.partition(b"\0")
                if end:
                    self.read = rest
                    return json.loads(message)
                if selector.select(left):
                    part = os.read(self.answers, 1 << 20)
                    if not part:
                        raise RuntimeError("Chromium has ended")
                    self.read += part
        raise TimeoutError("Chromium does not answer")

    def open(self, page: Path, width: int, height: int = 900, dark: bool = False, scale: float = 1) -> None:
        """Load a page from the disk, in a window of this size in CSS pixels, and wait until its scripts have run."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=False
        )
        self.events.clear()
        self.ask("Page.navigate", url=page.absolute().as_uri())
        self.wait("Page.loadEventFired")
        # What is drawn late, such as a chart whose size has changed, is drawn by the second frame.
        frames = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))"
        self.evaluate(frames)

    def evaluate(self, script: str) -> Any:
        """The value of an expression in the page, as JSON has it. Raises RuntimeError with the page's exception."""
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in found:
            raise RuntimeError(str(found["exceptionDetails"]))
        return found["result"].get("value")

    def screenshot(self, file: Path, height: int | None = None) -> None:
        """As PNG: the page from its beginning, all of it or `height` CSS pixels."""
        size = self.ask("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": height or size["height"], "scale": 1}
        found = self.ask("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(found["data"]))

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """kind: mouseMoved, mousePressed, mouseReleased, at a place in the window."""
        self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", **more)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(SECONDS)
        os.close(self.commands)
        os.close(self.answers)


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """profile: a folder for what Chromium stores."""
    opened = Browser(profile)
    try:
        yield opened
    finally:
        opened.close()
