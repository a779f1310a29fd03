"""Every table of the benchmarks can be measured: its smallest form is, with every row and no figure looked at."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import data
import warm_python
from measuring import check
from settings import Settings, Size
from timing import HERE

SCRIPT = ast.parse((HERE / "__main__.py").read_text(encoding="utf-8"))
TABLES: dict[str, str] = next(
    ast.literal_eval(node.value)
    for node in SCRIPT.body
    if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "TABLES"
)
NEEDS_CUDA = {"gpu"}
"""Measured on the CPU by test_bench.py."""
LONG = {"console", "failures", "growth", "probe", "ranks", "recovery", "search", "sweep"}
"""Tables of many processes or long runs, which campaigns measure."""
OF_ADDONS = {
    "failures": "jobs", "files": "formats", "frequency": "text", "growth": "text", "recovery": "jobs",
    "probe": "precheck", "replay": "exact", "search": "search", "serve": "view", "stall": "text", "stores": "stores",
    "sweep": "jobs",
}  # fmt: skip
"""Tables that need an add-on."""


@pytest.fixture(scope="module", autouse=True)
def _warm() -> Iterator[None]:
    """Processes that measure are forks: no figure is looked at."""
    with warm_python.start():
        yield


@pytest.fixture(autouse=True)
def _threads_and_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tables set threads and variables for their process: here they are put back."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", "BENCH_S3"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", str(HERE.parents[1]))
    monkeypatch.syspath_prepend(str(HERE))
    for module in TABLES.values():
        # Helpers of other tests have some of these names.
        if not str(getattr(sys.modules.get(module), "__file__", HERE)).startswith(str(HERE)):
            monkeypatch.delitem(sys.modules, module)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[
                *([pytest.mark.campaign] if name in LONG else []),
                *([pytest.mark.addon(OF_ADDONS[name])] if name in OF_ADDONS else []),
            ],
        )
        for name in sorted(TABLES.keys() - NEEDS_CUDA)
    ],
)
def test_the_smallest_form_of_every_table_is_measured(name: str, tmp_path: Path) -> None:
    tables = importlib.import_module(TABLES[name]).measure(Settings(Size.smoke, None, str(tmp_path)))
    assert tables
    check(tables)
    for table in tables:
        failed = {row: reason for row, reason in table.skipped.items() if "not installed" not in reason}
        assert failed == {}
        assert table.to_markdown()


def test_the_loader_is_measured() -> None:
    assert data.resume_in_this_process("train")["first_batch_ms"] > 0
    assert {size: sorted(figures) for size, figures in data.seeding(1).items()} == {
        size: ["here", "worker"] for size in ("32", "64", "128")
    }
