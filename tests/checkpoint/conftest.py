"""What the tests of this folder share."""

from __future__ import annotations

import threading

import pytest


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system gives no more threads."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
