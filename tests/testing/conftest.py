"""The check of a project that the tests plant faults in; its processes are forked, on any system.

Imports that take long are inside functions: every selection of tests imports this file.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from exact_project import EXPERIMENT, PARTS, Check, WarmProbes
from ranks import IMPORTED

if TYPE_CHECKING:
    from trainer_cli.addons.exact.report import ResumeReport


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
def check(project: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Check]:
    """The check of that project; nothing of it may be left in the temporary folder, nor in the project's runs."""
    from trainer_cli.addons.exact.resume import check_resume
    from trainer_cli.config.composing import compose

    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))

    def of(code: str = "", *overrides: str, steps: int = 6, two_hash_seeds: bool = False) -> ResumeReport:
        folder = project(code)
        monkeypatch.chdir(folder)
        heavy = ["trainer_cli.strategies.fsdp", *IMPORTED] if "parallel=fsdp" in overrides else []
        if "(torch.optim." in code:
            # Its step would import the compiler in each process.
            heavy.append("torch._dynamo")
        run = None if two_hash_seeds else WarmProbes(folder, heavy)
        return check_resume(compose(["experiment=mine", *overrides]), steps=steps, run=run)

    yield of
    assert not list(scratch.iterdir())
    assert not (tmp_path / "project/runs").exists()
