"""The table of what the suites of other trainers claim is readable: no row twice, a reason for each difference."""

from __future__ import annotations

import importlib.util
from collections import Counter
from pathlib import Path

import pytest
from peer_claims import Claim

FILES = sorted(path for path in Path(__file__).parent.glob("test_*.py") if path.name != "test_table.py")


def table_of(path: Path) -> list[Claim]:
    spec = importlib.util.spec_from_file_location(f"peers_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    rows: list[Claim] = module.CLAIMS
    return rows


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_each_row_is_there_once_and_tells_what_differs(path: Path) -> None:
    rows = table_of(path)
    twice = [name for name, count in Counter((row.source, row.text) for row in rows).items() if count > 1]
    assert not twice
    assert not [row for row in rows if not row.text.strip() or not row.source.strip()]
    # What ours does instead and why takes a sentence.
    assert not [row for row in rows if row.difference and len(row.difference.split()) < 6]
