"""Whether a finished run trains further is one decision of `fit`, `plan` and a sweep."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from exact_project import POINTS

from trainer_cli.addons.jobs.sweep import plan_jobs
from trainer_cli.catalog.catalog import Catalog
from trainer_cli.commands.command_line import main
from trainer_cli.config.composing import compose
from trainer_cli.running.planning import plan
from trainer_cli.running.start import Done
from trainer_cli.runs.run_dir import RunDir

PARTS = f"""{POINTS}
from trainer_cli import Callback

class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, batch):
        x, y = batch
        return {{"loss": ((self.layer(x).squeeze(1) - y) ** 2).mean()}}


class Enough(Callback):
    def on_after_optimizer_step(self, trainer, model, optimizer):
        if trainer.progress.step == 6:
            trainer.stop("enough", finished=True)
"""
EXPERIMENT = """# @package _global_
model: {_target_: parts.Line}
data: {_target_: parts.Data, batch_size: 4}
optimizer: {_target_: torch.optim.SGD, lr: 0.01}
loop: {max_duration: 12, eval_interval: 4, log_interval: 1}
checkpoint: {save_interval: 4}
"""
JOB = "runs/mine/sweep/seed=1"
QUIET = ["experiment=mine", "device=cpu", "logging.console=off", "report=false"]
ENOUGH = "+callbacks.enough._target_=parts.Enough"
ENDS: dict[str, list[str]] = {
    "by a callback": [ENOUGH],
    "by a callback in a part": [ENOUGH, "loop.hard_stop=9"],
    "by a callback at the end of a part": [ENOUGH, "loop.hard_stop=7"],
    "by max_duration": ["loop.max_duration=7"],
    "by max_duration in a part": ["loop.max_duration=7", "loop.hard_stop=9"],
    "by hard_stop": ["loop.hard_stop=7"],
    "by hard_stop, as a final checkpoint recorded it before": ["loop.hard_stop=7"],
}
LONGER = "loop.max_duration=20"
CHANGES: dict[str, list[str]] = {
    "nothing": [],
    "a later hard_stop": ["loop.hard_stop=10"],
    "no hard_stop": ["loop.hard_stop=null"],
    "a longer run": [LONGER],
    "a longer run without a hard_stop": [LONGER, "loop.hard_stop=null"],
}


KEPT = {
    ("by a callback", "nothing"), ("by a callback", "a longer run"),
    ("by a callback in a part", "no hard_stop"), ("by a callback in a part", "a longer run without a hard_stop"),
    ("by a callback at the end of a part", "a later hard_stop"),
    ("by a callback at the end of a part", "a longer run"),
    ("by max_duration", "nothing"), ("by max_duration", "a longer run"),
    ("by max_duration in a part", "a later hard_stop"),
    ("by max_duration in a part", "a longer run without a hard_stop"),
    ("by hard_stop", "nothing"), ("by hard_stop", "a later hard_stop"), ("by hard_stop", "no hard_stop"),
    ("by hard_stop, as a final checkpoint recorded it before", "nothing"),
    ("by hard_stop, as a final checkpoint recorded it before", "a longer run"),
}  # fmt: skip
"""Each end with changes that reopen it and that do not; campaigns leave no pair out."""


def _is_reopened(end: str, change: str) -> bool:
    is_part = end.startswith("by hard_stop")
    return ("hard_stop" in change and is_part) or "longer" in change


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Makes a project with a run that has ended in this way."""
    projects: dict[str, Path] = {}

    def make(end: str) -> Path:
        if end not in projects:
            folder = projects[end] = tmp_path_factory.mktemp("project")
            (folder / "configs/experiment").mkdir(parents=True)
            (folder / "configs/experiment/mine.yaml").write_text(EXPERIMENT)
            (folder / "parts.py").write_text(PARTS)
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(folder)
                # The parts of another project are no source of this one.
                patch.delitem(sys.modules, "parts", raising=False)
                assert main(["fit", *QUIET, "seed=1", f"run_dir='{JOB}'", *ENDS[end]]) == 0
            if end.endswith("before"):
                catalog = Catalog.of(folder / JOB / "checkpoints")
                manifest = catalog.entry("step7").manifest
                assert manifest is not None
                catalog.storage.amend("step7", replace(manifest, finished="hard_stop at 7 steps").to_bytes())
        return projects[end]

    return make


@pytest.mark.parametrize(
    ("end", "change"),
    [pytest.param(*pair, marks=() if pair in KEPT else pytest.mark.campaign) for pair in product(ENDS, CHANGES)],
)
def test_fit_plan_and_sweep_agree_whether_a_finished_run_trains_further(
    end: str, change: str, ended: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reopened = _is_reopened(end, change)
    # Nothing is written where the run stays as it is.
    project = Path(shutil.copytree(ended(end), tmp_path / "project")) if reopened else ended(end)
    monkeypatch.chdir(project)
    changed = {item.partition("=")[0]: item for item in (*ENDS[end], *CHANGES[change])}
    overrides = [*QUIET, *changed.values()]
    (job, _) = plan_jobs([*overrides, "seed=1,2"])
    assert job.run.path == Path(JOB)
    assert job.done is not reopened
    planned = plan(compose([*overrides, "seed=1", f"run_dir='{JOB}'"]))
    assert isinstance(planned.start, Done) is not reopened
    before = RunDir(JOB).read_summary()
    assert main(["fit", *overrides, "seed=1", f"run_dir='{JOB}'"]) == 0
    after = RunDir(JOB).read_summary()
    assert (after != before) is reopened
    if reopened:
        assert planned.timeline.end is not None
        assert planned.timeline.stop is not None
        assert (after["step"], after["reason"]) == (planned.timeline.end.step, planned.timeline.stop.reason)


@pytest.mark.parametrize("verb", ["fit", "plan"])
@pytest.mark.parametrize("end", ["by max_duration", "by hard_stop", "by a callback"])
@pytest.mark.parametrize(
    ("length", "is_changed", "note"),
    [(7, False, ""), (7, True, ""), (5, True, " (loop.max_duration=5 is below what is trained)")],
)
def test_what_a_finished_run_does_not_follow_is_said(
    verb: str,
    end: str,
    length: int,
    is_changed: bool,
    note: str,
    ended: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    project = Path(shutil.copytree(ended(end), tmp_path / "project"))
    monkeypatch.chdir(project)
    (project / "parts.py").write_text(f"{PARTS}# changed\n" if is_changed else PARTS)
    given = [*ENDS[end], f"loop.max_duration={length}"]
    changed = {item.partition("=")[0]: item for item in given}
    capsys.readouterr()
    assert main([verb, "experiment=mine", "device=cpu", "seed=1", f"run_dir='{JOB}'", *changed.values()]) == 0
    printed = capsys.readouterr()
    assert f"nothing{' to do' if verb == 'fit' else ''}{note}.\n" in printed.out
    assert ("the source is not what" in printed.err) is is_changed
    assert ("was trained with: parts.py (changed)" in printed.err) is is_changed
