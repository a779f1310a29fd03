"""Going back, requests by trigger files, failures kept apart, other folders and names: through the command."""

from __future__ import annotations

import json
import os
import re
import shlex
from functools import partial
from pathlib import Path

import pytest
from command import SMALL, Result, hold, make_project, names, running, train
from compare import assert_same_state, metrics
from printed import message

from trainer_cli.catalog.catalog import Catalog
from trainer_cli.catalog.history import Life
from trainer_cli.files.json_lines import read_rows

RUN = (*SMALL, "loop.max_duration=40", "run_dir=run", "+callbacks.interrupt._target_=interrupts.Interrupt")


@pytest.mark.parametrize("resume", ["run/checkpoints/step20", "run@step20"])
def test_going_back_is_asked_about_done_and_not_done_again_by_the_same_command(resume: str, tmp_path: Path) -> None:
    assert train("fit", *RUN, cwd=tmp_path).code == 0
    folder = tmp_path / "run/checkpoints"
    assert names(folder) == ["step0", "step10", "step20", "step30", "step40"]
    back = (*RUN, f"resume={resume}")
    refused = train("fit", *back, cwd=tmp_path)
    assert refused.code == 2
    assert "newer checkpoints exist: step30, step40 (checkpoint.newer" in message(refused.err)
    assert "checkpoint.newer=trash" in refused.err
    assert names(folder) == ["step0", "step10", "step20", "step30", "step40"]
    gone = (*back, "checkpoint.newer=trash")
    stopped = train("fit", *gone, cwd=tmp_path, INTERRUPT="SIGTERM train 34 0")
    assert stopped.code == 75
    assert "went back to step 20: removed step30, step40" in stopped.err
    assert names(folder) == ["step0", "step10", "step20", "step30", "step35"]
    history = Life.read_all(read_rows(tmp_path / "run/checkpoints.jsonl"))
    removed = {one.step: one.removed_reason for one in history if one.removed_reason}
    assert removed == dict.fromkeys((30, 40), "the run went back to step 20")
    places = json.loads((tmp_path / "run/provenance.json").read_text())
    assert places["loop.max_duration"] == places["checkpoint.newer"] == "command line"
    assert re.fullmatch(r".*configs/experiment/digits_mlp\.yaml:\d+", places["optimizer.lr"])
    again = train("fit", *gone, cwd=tmp_path)
    assert again.code == 0
    assert f"the previous attempt resumed from {resume}, and has saved since" in again.err
    assert names(folder) == ["step0", "step10", "step20", "step30", "step40"]
    straight = train("fit", *RUN, "run_dir=straight", cwd=tmp_path)
    assert straight.code == 0
    assert_same_state(tmp_path / "run", tmp_path / "straight")


def test_a_branch_left_behind_wins_no_more_though_the_start_that_left_it_was_killed(tmp_path: Path) -> None:
    assert train("fit", *RUN, cwd=tmp_path).code == 0
    folder = tmp_path / "run/checkpoints"
    (folder / "step40").rename(tmp_path / "step40")
    back = (*RUN, "resume=run/checkpoints/step20", "checkpoint.newer=trash", "loop.max_duration=45")
    assert train("fit", *back, cwd=tmp_path, INTERRUPT="SIGKILL train 21 0").code == -9
    # As if it had been killed before it came to remove this one.
    (tmp_path / "step40").rename(folder / "step40")
    auto = train("fit", *RUN, "loop.max_duration=45", cwd=tmp_path)
    assert auto.code == 2
    assert "checkpoint step40 is not used: the run went back to step 20" in auto.err
    assert "this goes back to step 20" in auto.err
    done = train("fit", *RUN, "loop.max_duration=45", "checkpoint.newer=trash", cwd=tmp_path)
    assert done.code == 0, done.err
    assert names(folder) == ["step0", "step10", "step20", "step30", "step40", "step45"]
    assert json.loads((folder / "step40/manifest.json").read_text())["attempt"] == 4


def test_a_failure_keeps_what_there_is_apart(tmp_path: Path) -> None:
    project = make_project(tmp_path)
    parts = project / "mine/parts.py"
    parts.write_text(
        parts.read_text().replace(
            '        return {"loss": ((guess',
            '        if self.training and os.path.exists("fail"):\n'
            '            self.calls = getattr(self, "calls", 0) + 1\n'
            "            if self.calls == 20:\n"
            '                raise ArithmeticError("no luck")\n'
            '        return {"loss": ((guess',
        )
    )
    (project / "fail").touch()
    failed = train("fit", "experiment=mine", "run_dir=run", cwd=project)
    assert failed.code == 1
    assert "the state after the failure is kept in run/checkpoints/exception/step19" in failed.err
    assert names(project / "run/checkpoints") == ["step0", "step16"]
    os.unlink(project / "fail")
    done = train("fit", "experiment=mine", "run_dir=run", cwd=project)
    assert "resuming at step 16" in done.err
    straight = train("fit", "experiment=mine", "run_dir=straight", cwd=project)
    assert straight.code == 0
    assert_same_state(project / "run", project / "straight")


def test_another_folder_is_gone_on_from_where_the_checkpoints_were(tmp_path: Path) -> None:
    assert train("fit", *RUN, "checkpoint.folder=here", cwd=tmp_path, INTERRUPT="SIGTERM train 24 0").code == 75
    assert names(tmp_path / "here") == ["step0", "step10", "step20", "step25"]
    moved = train("fit", *RUN, "checkpoint.folder=there", cwd=tmp_path)
    assert "resuming at step 25" in moved.err
    assert names(tmp_path / "there") == ["step30", "step40"]
    assert not (tmp_path / "run/checkpoints").exists()
    finished = train("fit", *RUN, "checkpoint.folder=there", cwd=tmp_path)
    assert "is finished at step 40" in finished.out


@pytest.mark.parametrize("where", [(), ("checkpoint.folder=here",), ("checkpoint.name='at-{step}'",)])
def test_the_command_that_a_run_ends_with_evaluates_its_checkpoints(tmp_path: Path, where: tuple[str, ...]) -> None:
    for _ in range(2):
        message = train("fit", *RUN, *where, cwd=tmp_path).out
        command = next(line for line in message.splitlines() if line.startswith("  train validate"))
        evaluated = train(*shlex.split(command)[1:], "trust=[interrupts]", cwd=tmp_path)
        assert evaluated.code == 0, evaluated.err
    nothing = train("fit", *RUN, "run_dir=other", "checkpoint.enabled=false", cwd=tmp_path).out
    assert "train validate" not in nothing


def test_files_in_the_run_directory_ask_for_a_save_an_evaluation_and_a_stop(tmp_path: Path) -> None:
    project = make_project(tmp_path)
    held = hold(project, "train")
    run = project / "run"
    with running("fit", "experiment=mine", "run_dir=run", "loop.max_duration=400", cwd=project) as started:
        started.reach("train")
        for stop_request in ("save", "evaluate"):
            (run / stop_request).touch()
            started.wait_for(partial(lambda file: not file.exists(), run / stop_request), f"heard ({stop_request})")
        (project / "at-train").unlink()
        held.unlink()
        started.wait_for(lambda: any("val/loss" in line for line in metrics(run)), "evaluated")
        (run / "stop").touch()
        result = started.end()
    assert result.code in (75, 0), result.err
    first = min(line["step"] for line in metrics(run) if "val/loss" in line)
    assert first % 16 != 0
    assert (run / f"checkpoints/step{first}/manifest.json").exists()
    assert "requested" in (run / "train.log").read_text()
    if result.code == 75:
        assert json.loads((run / "summary.json").read_text())["reason"] == "requested by a file"


def test_verify_beside_a_run_that_saves_and_removes_at_every_step_finds_nothing_wrong(tmp_path: Path) -> None:
    settings = ("loop.eval_interval=null", "loop.eval_steps=1", "checkpoint.save_interval=1", "loop.log_interval=100")
    run = ("experiment=digits_mlp", "model.hidden=[64]", "loop.max_duration=1000000", *settings)
    with running("fit", *run, "checkpoint.max_checkpoints=3", "run_dir=run", cwd=tmp_path) as training:
        training.wait_for((tmp_path / "run/metrics.jsonl").exists, "training")
        training.wait_for(lambda: len(Catalog.of(tmp_path / "run/checkpoints").names()) > 1, "saving")
        looks: list[Result] = []
        while len(looks) < 5 or not any(look.err for look in looks):
            looks.append(train("ckpt", "verify", "run", cwd=tmp_path))
        assert training.process.poll() is None
    for look in looks:
        assert look.code == 0, look.out + look.err
        assert all(line.endswith((" found", " valid")) for line in look.out.splitlines()), look.out
        passed_over = r"skipped: \S+, which was removed meanwhile"
        assert all(re.fullmatch(passed_over, line) for line in look.err.splitlines()), look.err
