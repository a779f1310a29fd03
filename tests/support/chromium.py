"""Loads a page in Chromium, without a network: for a script in the page, or for a test that presses keys."""

from __future__ import annotations

import html
import json
import os
import re
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt-get install chromium")


def look(address: str, profile: Path, *, height: int, most_ms: int = 30_000) -> dict[str, Any]:
    """What the page's script writes into `data-told` of its body, as JSON.

    Args:
        most_ms: time that passes in the page, which takes less outside of it where the page only waits.
    """
    assert CHROMIUM is not None
    command = [
        CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        f"--user-data-dir={profile}", f"--window-size=1400,{height}", f"--virtual-time-budget={most_ms}",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--dump-dom", address,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    (told,) = re.findall(r'<body data-told="([^"]*)"', done.stdout)
    found: dict[str, Any] = json.loads(html.unescape(told))
    assert (found.get("error"), found["problem"]) == (None, ""), found
    return found


class Page:
    """A page of a Chromium that a test drives by real keys, through a pipe of the DevTools protocol."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers = commands, answers
        self._buffer = b""
        self._calls = 0
        self._session: str | None = None
        self.complaints: list[str] = []
        """What the console and the log of the browser say, with the requests that failed."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def open(self, address: str, *, width: int = 1400, height: int = 900, dark: bool = False) -> None:
        """Load a page in a window of a size, and wait until its scripts have run."""
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        # From another page: a new fragment alone would not load it again.
        for url in ("about:blank", address):
            self._call("Page.navigate", url=url)
            self.wait_for(f"location.href.startsWith({json.dumps(url)}) && document.readyState === 'complete'")

    def resize(self, width: int, height: int = 900) -> None:
        """Give the window a size."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def run(self, script: str) -> Any:
        """The value of an expression, as JSON; of a promise what it resolves to."""
        done = self._call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def wait_for(self, script: str) -> None:
        """Wait until an expression is true."""
        until = time.monotonic() + _LIMIT_S
        while not self.run(f"Boolean({script})"):
            assert time.monotonic() < until, f"never true: {script}"
            time.sleep(0.02)

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press and release a key, as its `KeyboardEvent.key` names it."""
        text = {"text": {"Enter": "\r"}.get(key, key)} if key == "Enter" or len(key) == 1 else {}
        for kind, more in (("keyDown", text), ("keyUp", {})):
            code = _KEY_CODES.get(key, 0)
            self._call(
                "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, modifiers=8 * shift, **more
            )

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._calls += 1
        message = {"id": self._calls, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session is not None else {}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._calls:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            if answer.get("method") in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
                self.complaints.append(json.dumps(answer["params"]))

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            assert select.select([self._answers], [], [], _LIMIT_S)[0], "the browser does not answer"
            content = os.read(self._answers, 1 << 20)
            assert content, "the browser has ended"
            self._buffer += content
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found


_LIMIT_S = 500
_KEY_CODES = {
    "Tab": 9, "Enter": 13, "Escape": 27, "End": 35, "Home": 36,
    "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40,
}  # fmt: skip


@contextmanager
def page(profile: Path) -> Iterator[Page]:
    """A page in a Chromium that ends with the block. Other addresses than 127.0.0.1 cannot be reached."""
    assert CHROMIUM is not None
    (for_browser, commands), (answers, from_browser) = os.pipe(), os.pipe()
    # Chromium reads its descriptor 3 and writes its descriptor 4.
    shell = f'exec "$0" "$@" 3</dev/fd/{for_browser} 4>/dev/fd/{from_browser}'
    options = [
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={profile}",
        "--remote-debugging-pipe", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "about:blank",
    ]  # fmt: skip
    process = subprocess.Popen(
        ["/bin/sh", "-c", shell, CHROMIUM, *options], pass_fds=(for_browser, from_browser), stderr=subprocess.DEVNULL
    )
    os.close(for_browser)
    os.close(from_browser)
    try:
        yield Page(commands, answers)
    finally:
        # A browser whose pipe is closed ends.
        os.close(commands)
        os.close(answers)
        try:
            process.wait(_LIMIT_S)
        finally:
            process.kill()
