"""A store on this machine; the helpers of this folder are importable."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from s3 import new_bucket, s3_server

sys.path.append(str(Path(__file__).parent))


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """The address of a store on this machine."""
    with s3_server() as address:
        yield address


@pytest.fixture
def url(endpoint: str) -> str:
    """A folder in an empty bucket of that store."""
    return f"s3://{new_bucket(endpoint)}/run"
