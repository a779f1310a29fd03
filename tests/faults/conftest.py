"""Makes the helpers of other folders importable here, and starts the processes to fork from."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

for _name in ("faults", "integration", "checkpoint"):
    sys.path.insert(0, str(Path(__file__).parents[1] / _name))

from forks import Forks  # noqa: E402


@pytest.fixture(scope="session")
def pool() -> Iterator[list[Forks]]:
    """Two of them, to keep two cores busy."""
    servers = [Forks(), Forks()]
    yield servers
    for server in servers:
        server.close()
