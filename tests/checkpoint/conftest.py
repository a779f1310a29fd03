"""Makes the helpers of this folder and of tests/trainer importable; a folder in memory for thousands of fsyncs."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), *(str(Path(__file__).parents[1] / name) for name in ("trainer", "faults"))]


@pytest.fixture
def memory_path() -> Iterator[Path]:
    """An empty folder, in memory where the system has such a place."""
    shared = "/dev/shm"
    place = shared if os.path.isdir(shared) and os.access(shared, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as folder:
        yield Path(folder)


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system gives no more threads."""

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """The address of a store on this machine."""
    # Imported here: most files need no store.
    from s3 import s3_server

    with s3_server() as address:
        yield address


@pytest.fixture
def url(endpoint: str) -> str:
    """A folder in an empty bucket of that store."""
    from s3 import new_bucket

    return f"s3://{new_bucket(endpoint)}/run"
