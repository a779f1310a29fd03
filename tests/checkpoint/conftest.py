"""What the tests of this folder share."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

# For old_runs.py.
sys.path.append(str(Path(__file__).parent))


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system gives no more threads."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
