"""Makes the helpers of this folder importable, and starts the process that commands are forked from."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from forks import Forks


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """`train fit` in milliseconds."""
    server = Forks()
    yield server
    server.close()
