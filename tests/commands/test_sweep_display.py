"""The live table of a sweep: what runs first, its step, best metric and time left, and one bar over all jobs."""

from __future__ import annotations

import io
import json
import re
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from printed import Terminal

from trainer_cli.addons.jobs.sweep_display import SweepDisplay
from trainer_cli.addons.jobs.sweep_table import NOT_BEGUN, JobStatus
from trainer_cli.runs.metrics import BestSettings
from trainer_cli.runs.record import RunView
from trainer_cli.runs.run_dir import RunDir
from trainer_cli.steps.run_status import RunStatus
from trainer_cli.terminal import cell_width


def status_of(key: str, state: str, run: RunDir, **facts: Any) -> JobStatus:
    return JobStatus(key, {"seed": key[-1]}, run.path, state, **facts)


@pytest.fixture
def running(tmp_path: Path) -> RunDir:
    """A run of 100 steps that has logged every tenth up to step 50."""
    run = RunDir(tmp_path / "seed=1")
    with ExitStack() as stack:
        stack.enter_context(run.create("name: x\ncheckpoint:\n  folder: null\n", [], {"run_id": "x"}))
        run.begin_attempt(name="x", start_step=0, now=time.time(), environment={})
        run.record_total_steps(100)
    began = time.time()
    for index, loss in enumerate([0.5, 0.25, float("nan"), 0.75, 0.5]):
        record = {"step": 10 * index + 10, "epoch": 0.0, "time": began + index, "train/loss": 1.0, "val/loss": loss}
        with run.metrics_file.open("a") as file:
            file.write(json.dumps(record).replace("NaN", '"nan"') + "\n")
    return run


def drawn(display: SweepDisplay, stream: io.StringIO) -> list[str]:
    """The lines of the last drawing, without colours."""
    stream.truncate(0)
    display.draw_if_due()
    *_, last = re.findall(r"\x1b7((?:\x1b\[\d+;1H\x1b\[2K[^\n]*?)+)\x1b8", stream.getvalue())
    plain = re.sub(r"\x1b\[[\d;]*m", "", last)
    return re.split(r"\x1b\[\d+;1H\x1b\[2K", plain)[1:]


def test_running_jobs_come_first_with_step_and_best_metric_and_the_bar_is_over_all(
    running: RunDir, tmp_path: Path
) -> None:
    other = RunDir(tmp_path / "other")
    stream = Terminal()
    runs = {f"seed={number}": running if number == 1 else other for number in range(4)}
    display = SweepDisplay(stream, runs, BestSettings())
    best = {"val/loss": {"value": 0.125, "step": 100, "mode": "min"}}
    display.update(
        [
            status_of("seed=0", RunStatus.finished, other, step=100, best=best),
            status_of("seed=1", RunStatus.running, running),
            status_of("seed=2", RunStatus.failed, other, step=10),
            status_of("seed=3", NOT_BEGUN, other),
        ]
    )
    header, *jobs, bar = drawn(display, stream)
    assert header.split("  ")[0] == "job"
    assert "best val/loss" in header
    assert [line.split()[:1] for line in jobs] == [["seed=1"], ["seed=2"], ["seed=0"], ["…"]]
    # No process holds the lock of the run, so its reader knows no time left.
    assert jobs[0].split() == ["seed=1", "running", "50/100", "0.25"]
    assert jobs[2].split() == ["seed=0", "finished", "100", "0.125"]
    assert jobs[3] == "… and 1 more: 1 not begun"
    assert re.fullmatch(r"\S+ 2/4 jobs  62%  1 running  1 failed  elapsed 0:00", bar)
    display.close()
    assert stream.getvalue().endswith("\x1b[J")


def test_while_jobs_are_paused_no_share_and_no_time_left_is_claimed(running: RunDir, tmp_path: Path) -> None:
    stream = Terminal()
    display = SweepDisplay(stream, {"seed=1": running}, BestSettings(), prunes=True)
    other = RunDir(tmp_path / "other")
    states = [(RunStatus.finished, 1), (RunView.PAUSED, 2), (NOT_BEGUN, 1)]
    rows = [status_of(f"{state}{n}", state, other, step=9) for state, count in states for n in range(count)]
    display.update([status_of("seed=1", RunStatus.running, running), *rows])
    *_, last = drawn(display, stream)
    # Paused ones may go on: of five jobs one has ended.
    assert re.fullmatch(r"1/5 jobs  1 running  2 paused  elapsed 0:00", last)


@pytest.mark.parametrize("letter", ["x", "精", "😀", "e\u0301"], ids=ascii)
def test_jobs_without_room_are_counted_and_the_table_is_drawn_once_a_second(tmp_path: Path, letter: str) -> None:
    run, stream = RunDir(tmp_path / "run"), Terminal()
    keys = [f"optimizer.name={letter * 100},seed={number}" for number in range(30)]
    display = SweepDisplay(stream, dict.fromkeys(keys, run), BestSettings())
    display.update([JobStatus(key, {"optimizer.name": letter * 100}, run.path, RunStatus.failed) for key in keys])
    lines = drawn(display, stream)
    assert len(lines) == 12, "half of the terminal"
    assert lines[-2] == "… and 21 more: 21 failed"
    assert all(cell_width(line) < 80 for line in lines)
    assert lines[1].startswith("…")
    assert re.search(",seed=0 +failed", lines[1])
    stream.truncate(0)
    display.draw_if_due()
    assert stream.getvalue() == ""
    display.close()


def test_hidden_jobs_are_counted_by_their_states_and_failures_are_not_hidden(tmp_path: Path) -> None:
    run, stream = RunDir(tmp_path / "run"), Terminal()
    states = {"finished": 12, NOT_BEGUN: 24, "failed": 2, "killed": 1, "running": 1}
    rows = [status_of(f"{state}{number}", state, run) for state, count in states.items() for number in range(count)]
    display = SweepDisplay(stream, {row.key: run for row in rows}, BestSettings())
    display.update(rows)
    lines = drawn(display, stream)
    assert [line.split()[0] for line in lines[1:6]] == ["running0", "failed0", "failed1", "killed0", "finished0"]
    assert lines[-2] == "… and 31 more: 7 finished, 24 not begun"


@pytest.mark.parametrize(
    ("swept", "names"),
    [
        ({"optimizer.lr": ["1e-3", "3e-3"], "seed": ["1", "1"]},
         ["optimizer.lr=1e-3,seed=1", "optimizer.lr=3e-3,seed=1"]),
        ({"model.encoder.hidden": ["64", "32"], "model.decoder.attention.dropout_rate": ["0.1", "0.2"]},
         ["hidden=64,dropout_rate=0.1", "hidden=32,dropout_rate=0.2"]),
        ({"first.lr": ["1", "2"], "second.lr": ["3", "4"], "data.name_of_set": ["mine", "mine"]},
         ["first.lr=1,second.lr=3", "first.lr=2,second.lr=4"]),
        ({"model.hidden_of_encoder": ["[64,64]", "[32,32]"], "model.hidden_of_decoder": ["[64,64]", "[32,32]"]},
         ["[64,64],[64,64]", "[32,32],[32,32]"]),
    ],
    ids=["as they are", "the last parts of keys", "what differs", "values"],
)  # fmt: skip
def test_a_name_of_a_job_is_shortened_by_what_does_not_differ(
    swept: dict[str, list[str]], names: list[str], tmp_path: Path
) -> None:
    run, stream = RunDir(tmp_path / "run"), Terminal()
    values = [dict(zip(swept, job, strict=True)) for job in zip(*swept.values(), strict=True)]
    keys = [",".join(f"{key}={value}" for key, value in job.items()) for job in values]
    display = SweepDisplay(stream, dict.fromkeys(keys, run), BestSettings())
    display.update([JobStatus(key, job, run.path, RunStatus.failed) for key, job in zip(keys, values, strict=True)])
    shown = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in display.text(0.0, 56, 24)]
    assert [line.split()[0] for line in shown[1:3]] == names


def test_the_metric_that_decides_is_that_of_the_config_before_a_job_has_one(running: RunDir, tmp_path: Path) -> None:
    other, stream = RunDir(tmp_path / "other"), Terminal()
    watched = BestSettings(watched=(("shifted/loss", None),))
    display = SweepDisplay(stream, {"seed=0": other, "seed=1": running}, watched)
    both = {name: {"value": 0.5, "step": 10, "mode": "min"} for name in ("iid/loss", "shifted/loss")}
    for ended, now in ((both, RunStatus.running), ({}, RunStatus.running), (both, RunStatus.finished)):
        display.update([
            status_of("seed=0", RunStatus.finished, other, step=100, best=both),
            status_of("seed=1", now, running, step=50, best=ended),
        ])  # fmt: skip
        assert "best shifted/loss" in drawn(display, stream)[0]


def test_before_the_first_job_runs_the_bar_names_what_it_waits_for(running: RunDir, tmp_path: Path) -> None:
    other, stream = RunDir(tmp_path / "other"), Terminal()
    display = SweepDisplay(stream, {"seed=0": other, "seed=1": other}, BestSettings())
    display.update([status_of(f"seed={number}", NOT_BEGUN, other) for number in range(2)])
    lines = drawn(display, stream)
    assert lines[0] == "2 not begun"
    assert "loading torch …  0/2 jobs" in lines[1]
    display.update([status_of("seed=0", RunStatus.running, other), status_of("seed=1", NOT_BEGUN, other)])
    _, job, _, bar = drawn(display, stream)
    assert job.split() == ["seed=0", "starting"]
    assert "loading torch" not in bar


@pytest.mark.parametrize(
    ("width", "parts"),
    [
        (100, "2/40 jobs  5%  1 running  1 failed  elapsed 1:00  ETA 19:00"),
        (59, "2/40 jobs  5%  1 running  1 failed  ETA 19:00"),
        (44, "2/40 jobs  5%  1 failed  ETA 19:00"),
        (40, "2/40 jobs  5%  1 failed"),
        (26, "2/40 jobs  1 failed"),
        (6, "2/4…"),
    ],
)
def test_a_narrow_terminal_gets_whole_parts_of_the_bar(width: int, parts: str, tmp_path: Path) -> None:
    run, stream = RunDir(tmp_path / "run"), Terminal()
    display = SweepDisplay(stream, {f"seed={number}": run for number in range(40)}, BestSettings())
    display.update([status_of(f"seed={number}", NOT_BEGUN, run) for number in range(40)])
    display.text(0.0, 80, 24)
    states = [RunStatus.failed, RunStatus.finished, RunStatus.running, *[NOT_BEGUN] * 37]
    display.update([status_of(f"seed={number}", state, run) for number, state in enumerate(states)])
    bar = re.sub(r"\x1b\[[\d;]*m", "", display.text(60.0, width, 24)[-1])
    assert bar.lstrip("━╸").lstrip() == parts
    assert cell_width(bar) <= width
