"""A store on this machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from s3 import new_bucket, s3_server


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """The address of a store on this machine."""
    with s3_server() as address:
        yield address


@pytest.fixture
def url(endpoint: str) -> str:
    """A folder in an empty bucket of that store."""
    return f"s3://{new_bucket(endpoint)}/run"
