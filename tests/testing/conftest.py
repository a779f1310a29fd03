"""The check of a project that the tests plant faults in; its processes are forked, on any system.

Imports that take long are inside functions: every selection of tests imports this file.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from exact_project import EXPERIMENT, PARTS, Check

if TYPE_CHECKING:
    from trainer_cli.addons.exact.attempts import Probes
    from trainer_cli.addons.exact.report import ResumeReport


class In:
    """Runs probes in one folder by processes that many tests share."""

    def __init__(self, forked: Probes, cwd: Path, imports: Sequence[str] = ()) -> None:
        self._forked, self._cwd, self._imports = forked, cwd, imports

    def __call__(self, plan: Path, output: Path) -> int:
        return self._forked(plan, output, self._cwd, self._imports)

    def close(self) -> None:
        """They go on for the next test."""


@pytest.fixture(scope="session")
def run_in() -> Iterator[Callable[..., Any]]:
    """For a folder and the heavy modules that are needed, what runs a probe there."""
    from trainer_cli.addons.exact.attempts import Probes

    forked = Probes(Path.cwd())
    yield partial(In, forked)
    forked.close()


@pytest.fixture
def project(tmp_path: Path) -> Callable[[str], Path]:
    """Makes the project with more code in it, and returns its folder."""

    def make(code: str) -> Path:
        (tmp_path / "project/configs/experiment").mkdir(parents=True)
        (tmp_path / "project/configs/experiment/mine.yaml").write_text(EXPERIMENT)
        (tmp_path / "project/parts.py").write_text(PARTS + code)
        return tmp_path / "project"

    return make


@pytest.fixture
def check(
    project: Callable[[str], Path], run_in: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Check]:
    """The check of that project; nothing of it may be left in the temporary folder, nor in the project's runs."""
    from trainer_cli.addons.exact.resume import check_resume
    from trainer_cli.config.composing import compose

    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))

    def of(code: str = "", *overrides: str, steps: int = 12) -> ResumeReport:
        folder = project(code)
        monkeypatch.chdir(folder)
        heavy = ["trainer_cli.strategies.fsdp"] if "parallel=fsdp" in overrides else []
        return check_resume(compose(["experiment=mine", *overrides]), steps=steps, run=run_in(folder, heavy))

    yield of
    assert not list(scratch.iterdir())
    assert not (tmp_path / "project/runs").exists()
