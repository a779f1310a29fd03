"""Loads a page in Chromium, without a network, and returns what a script in the page has found."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
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
