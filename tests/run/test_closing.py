"""What is said at the end of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer_cli.run.report import closing
from trainer_cli.run.rundir import Outcome, RunDir, RunStatus


def test_the_best_and_the_pinned_are_reported_however_many_others_stay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = [{"name": f"step{step}", "why": "permanent"} for step in range(900, 0, -100)]
    kept[0]["why"], kept[5]["why"], kept[7]["why"] = "final", "val/loss 0.1 is the best", "pinned"
    outcome = Outcome(status=RunStatus.finished, reason="enough", step=900, wall_time_s=1.0, checkpoints=kept)
    closing(RunDir(tmp_path), outcome, {})
    line = next(line for line in capsys.readouterr().out.splitlines() if "checkpoints  " in line)
    message = "step900 (final), step400 (val/loss 0.1 is the best), step200 (pinned), step800 (permanent) and 5 more"
    assert line.split(maxsplit=1)[1] == message
