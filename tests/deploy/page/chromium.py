"""Headless Chromium for tests, controlled by its DevTools pipe. It can reach 127.0.0.1 only."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

_ANSWER_S: Final = 30.0
_END_S: Final = 10.0
# Chromium reads commands from file descriptor 3 and writes to 4.
_WITH_PIPES: Final = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)
_OPTIONS: Final = (
    "--headless",
    "--no-sandbox",  # its sandbox does not start as root, and tests may run as root
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--remote-debugging-pipe",
    "about:blank",
)


def chromium() -> str:
    """Return the path of Chromium; skip the test with instructions if it is not installed."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("chromium is not installed; on Debian: apt-get install --no-install-recommends chromium")
    return path


class Tab:
    """One page, with its requests, console messages and exceptions.

    Args:
        to, of: File descriptors of the pipes to and from Chromium.
    """

    def __init__(self, to: int, of: int) -> None:
        self._to, self._of = to, of
        self._number = 0
        self._buffer = b""
        self.requested: list[str] = []
        self.messages: list[str] = []
        """Console messages, exceptions, log entries and dialogs."""
        target = self._call("Target.createTarget", {"url": "about:blank"}, session=None)["targetId"]
        self._session: str = self._call("Target.attachToTarget", {"targetId": target, "flatten": True}, session=None)["sessionId"]
        for domain in ("Runtime", "Log", "Network", "Page"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command of the DevTools protocol to the page.

        Raises:
            AssertionError: Chromium rejects the command, or does not answer.
        """
        return self._call(method, params, session=self._session)

    def reset(self) -> None:
        """Leave the page, which may still send requests; then clear the recorded requests and messages."""
        self.open("about:blank")
        self.until("location.href === 'about:blank'")
        self.requested.clear()
        self.messages.clear()

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, converted by JSON."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, f"{expression}: {found['exceptionDetails']}"
        return found["result"].get("value")

    def until(self, expression: str, *, timeout_s: float = 20.0) -> None:
        """Wait until JavaScript takes the value of an expression as true, as it does an element.

        Raises:
            AssertionError: It is not true within `timeout_s`.
        """
        deadline_s = time.monotonic() + timeout_s
        while not self.value(f"Boolean({expression})"):
            assert time.monotonic() < deadline_s, f"{expression} is not true after {timeout_s:g} s; {self.messages}"
            time.sleep(0.05)

    def size(self, width: int, height: int, *, scale: float = 1.0) -> None:
        """Set the size of the window in CSS pixels."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=width < 600)

    def use_dark(self, is_dark: bool) -> None:
        features = [{"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def picture(self, file: Path) -> None:
        """Write a picture of the whole page as PNG."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(found["data"]))

    def _call(self, method: str, params: Mapping[str, Any], *, session: str | None) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline_s = time.monotonic() + _ANSWER_S
        while True:
            found = self._read(deadline_s)
            if found.get("id") == self._number:
                assert "error" not in found, f"{method}: {found['error']}"
                return dict(found["result"])
            self._record(str(found.get("method")), found.get("params", {}))

    def _read(self, deadline_s: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._of], [], [], max(0.0, deadline_s - time.monotonic()))
            assert ready, f"chromium has not answered within {_ANSWER_S:g} s"
            read = os.read(self._of, 1 << 16)
            assert read, "chromium has ended"
            self._buffer += read
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))

    def _record(self, event: str, params: Mapping[str, Any]) -> None:
        match event:
            case "Network.requestWillBeSent":
                self.requested.append(params["request"]["url"])
            case "Runtime.consoleAPICalled":
                self.messages.append(f"console.{params['type']}: {params['args']}")
            case "Runtime.exceptionThrown":
                self.messages.append(f"exception: {params['exceptionDetails']}")
            case "Log.entryAdded":
                self.messages.append(f"log: {params['entry']['text']} {params['entry'].get('url', '')}")
            case "Page.javascriptDialogOpening":
                self.messages.append(f"dialog: {params['message']}")


@contextmanager
def tab(folder: Path) -> Iterator[Tab]:
    """Open a tab; after the block, end Chromium.

    Args:
        folder: Empty folder for the profile.
    """
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    # Avoid descriptors 3 and 4, because the child process replaces them.
    given = [fcntl.fcntl(one, fcntl.F_DUPFD, 16) for one in (theirs_in, theirs_out)]
    os.close(theirs_in)
    os.close(theirs_out)
    start = [sys.executable, "-I", "-S", "-c", _WITH_PIPES, *map(str, given), chromium()]
    command = [*start, *_OPTIONS, f"--user-data-dir={folder}"]
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, pass_fds=given)
        for one in given:
            os.close(one)
        try:
            yield Tab(ours_out, ours_in)
        finally:
            os.close(ours_out)  # Chromium exits at the end of its pipe
            os.close(ours_in)
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(_END_S)
