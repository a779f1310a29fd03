"""A project that `train check data` and `train check model` look at."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer_cli.commands.command_line import main


@pytest.fixture
def check_project(
    empty_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, Any]]:
    """Makes a check of a project with this experiment and `parts.py`; returns the exit code and the report as JSON."""

    def check(what: str, experiment: str, parts: str, *words: str) -> tuple[int, Any]:
        # Each test has a module of this name.
        monkeypatch.delitem(sys.modules, "parts", raising=False)
        Path("configs/experiment").mkdir(parents=True)
        Path("configs/experiment/mine.yaml").write_text(experiment)
        Path("parts.py").write_text(parts)
        code = main(["check", what, "+experiment=mine", "device=cpu", "--json", *words])
        report = json.loads(capsys.readouterr().out)
        assert not Path("runs").exists(), "nothing is written"
        return code, report

    return check
