"""Faults of the libraries that this package works around, each as a test of what should hold.

A test here is expected to fail, strictly: it fails the suite when a release mends its fault, so that the code which
works around it can go. Its docstring names that code. What the test asserts is its only failure; any other exception is
an error of the test.
"""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/upstream/" in str(item.path):
            # Only another version changes the result: `scripts/versions` runs them.
            item.add_marker(pytest.mark.campaign)
            item.add_marker(pytest.mark.xfail(strict=True, raises=AssertionError, reason="a fault of a library"))
