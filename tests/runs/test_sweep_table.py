"""How a job stands is read from its directory, and from nowhere else."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
from printed import Terminal

from trainer_cli.addons.jobs.sweep_table import (
    JobStatus,
    as_table,
    best_jobs,
    job_status,
    recorded_error,
    recording_error,
    shorten_error,
    write_csv,
    write_failure,
)
from trainer_cli.errors import ConfigError
from trainer_cli.runs.metrics import BestSettings
from trainer_cli.runs.run_dir import RunDir, write_json


def job(folder: Path, *statuses: str, **facts: Any) -> RunDir:
    """A run's directory with an attempt of each status, the last of which is the run's."""
    run = RunDir(folder / "run")
    if statuses:
        run.path.mkdir(parents=True, exist_ok=True)
        attempts = [{"attempt": number, "status": status} for number, status in enumerate(statuses, 1)]
        write_json(run.summary_file, {"status": statuses[-1], "reason": "why", **facts, "attempts": attempts})
    return run


def stands(folder: Path, run: RunDir, now: str | None = None) -> tuple[str, str]:
    found = job_status("KEY", {}, run, folder / "failure", live_state=now)
    return found.status, found.reason


@pytest.mark.parametrize(
    ("statuses", "failure", "message"),
    [
        ([], None, ("not begun", "")),
        ([], 2, ("failed", "exit code 2")),
        (["finished"], None, ("finished", "why")),
        (["finished"], 1, ("finished", "why")),
        (["failed"], 1, ("failed", "why")),
        (["stopped"], None, ("stopped", "why")),
        (["stopped"], 2, ("failed", "exit code 2")),
        (["running"], None, ("killed", "the process ended without a summary")),
        (["running"], -9, ("killed", "signal 9")),
        (["killed", "finished"], None, ("finished", "why")),
    ],
)
def test_the_status_is_what_the_disk_tells(
    tmp_path: Path, statuses: list[str], failure: int | None, message: tuple[str, str]
) -> None:
    run = job(tmp_path, *statuses)
    if failure is not None:
        write_failure(tmp_path / "failure", failure, run)
    assert stands(tmp_path, run) == message


def test_a_job_that_fails_before_its_directory_is_there_reports_of_what(tmp_path: Path) -> None:
    frozen, run = tmp_path / "lr=0.1.yaml", job(tmp_path)
    with pytest.raises(ConfigError), recording_error(frozen):
        raise ConfigError("2 mistakes:\n  - one is wrong (here).\n  - another is.\n")
    write_failure(tmp_path / "failure", 2, run, recorded_error(frozen))
    assert stands(tmp_path, run) == ("failed", "exit code 2: one is wrong (here).")
    with pytest.raises(ValueError, match="x"), recording_error(frozen):
        raise ValueError("x" * 1000)
    assert recorded_error(frozen) == "x" * 1000
    assert shorten_error("x" * 1000) == "x" * 160 + "..."
    with pytest.raises(KeyError), recording_error(frozen):
        raise KeyError
    assert recorded_error(frozen) == "KeyError"
    assert recorded_error(tmp_path / "other.yaml") == ""


@pytest.mark.parametrize(
    ("code", "error", "message"),
    [
        (1, "KEY: why", ("failed", "exit code 1: KEY: why")),
        (1, "why", ("failed", "why")),
        (1, "wh...", ("failed", "why")),
        (2, "data: no such folder", ("failed", "exit code 2: data: no such folder")),
        (-9, "", ("killed", "signal 9")),
    ],
)
def test_the_reason_of_a_failed_job_is_that_of_its_last_start(
    tmp_path: Path, code: int, error: str, message: tuple[str, str]
) -> None:
    """The summary is that of an earlier start if the job failed before it could begin an attempt."""
    run = job(tmp_path, "failed")
    write_failure(tmp_path / "failure", code, run, error)
    assert stands(tmp_path, run) == message


def test_a_noted_failure_is_forgotten_once_a_later_attempt_has_begun(tmp_path: Path) -> None:
    write_failure(tmp_path / "failure", 2, job(tmp_path, "stopped"))
    assert stands(tmp_path, job(tmp_path, "stopped", "stopped")) == ("stopped", "why")


def test_a_job_runs_while_its_directory_is_held_or_its_process_is_ours(tmp_path: Path) -> None:
    run = job(tmp_path, "running")
    assert stands(tmp_path, run, "running")[0] == "running"
    with run.lock():
        assert stands(tmp_path, run)[0] == "running"
    assert stands(tmp_path, run)[0] == "killed"


def test_a_job_that_ends_while_it_is_looked_at_is_not_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, is_locked = job(tmp_path, "running"), RunDir.is_locked

    def end_and_look(directory: RunDir) -> bool:
        # The process writes its summary, and its lock ends with it.
        job(tmp_path, "finished")
        return is_locked(directory)

    monkeypatch.setattr(RunDir, "is_locked", end_and_look)
    assert stands(tmp_path, run) == ("finished", "why")


def test_a_damaged_note_or_summary_is_no_error(tmp_path: Path) -> None:
    run = job(tmp_path, "stopped")
    (tmp_path / "failure").write_text("{")
    assert stands(tmp_path, run)[0] == "stopped"
    run.summary_file.write_text("[]")
    assert stands(tmp_path, run) == ("not begun", "")


def row(key: str, status: str = "finished", *, loss: float | str | None = None, **facts: Any) -> JobStatus:
    best = {} if loss is None else {"val/loss": {"value": loss, "step": 10, "mode": "min"}}
    last = {} if loss is None else {"val/loss": loss}
    return JobStatus(
        key, {"seed": key, "model": "mlp"}, Path("runs/x/sweep") / key, status, best=best, last=last, **facts
    )


def test_the_table_marks_the_best_job_and_says_why_others_failed() -> None:
    rows = [
        row("1", loss=0.5, step=10, seconds=1.25),
        row("2", loss=0.25, step=10, seconds=2.0),
        row("3", loss="nan"),
        row("4", "failed", reason="exit code 2"),
        row("5", "not begun"),
    ]
    assert as_table(rows, BestSettings()).splitlines() == [
        "   seed  model  status     step  best val/loss  seconds",
        "   1     mlp    finished     10            0.5      1.2",
        "*  2     mlp    finished     10           0.25      2.0",
        "   3     mlp    finished",
        "   4     mlp    failed",
        "   5     mlp    not begun",
        "* best val/loss of all jobs: 0.25, of 2",
        "failed: 4: exit code 2",
    ]


METRICS = "step  best iid/loss  best shifted/loss  best shifted/r2"


@pytest.mark.parametrize(
    ("columns", "header", "left_out"),
    [
        (120, f"optimizer.lr  model.hidden  status     {METRICS}  seconds", []),
        (100, f"lr    hidden  status     {METRICS}  seconds", []),
        (80, "lr    hidden  status     step  best iid/loss  best shifted/loss  seconds", ["best shifted/r2"]),
        (44, "lr    hidden   step  best shifted/loss",
         ["best iid/loss", "best shifted/r2", "seconds", "status"]),
    ],
)  # fmt: skip
def test_a_narrow_terminal_gets_the_swept_values_the_step_and_the_metric_that_decides(
    columns: int, header: str, left_out: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("iid/loss", "shifted/loss", "shifted/r2")
    best = {name: {"value": 0.5, "step": 10, "mode": "max" if "r2" in name else "min"} for name in names}
    rows = [
        JobStatus(
            lr, {"optimizer.lr": lr, "model.hidden": "[8]"}, Path(lr), "finished", step=1890, seconds=1.0, best=best
        )
        for lr in ("1e-3", "3e-3")
    ]
    monkeypatch.setattr("sys.stdout", Terminal())
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    text = as_table(rows, BestSettings(watched=(("shifted/loss", None),)))
    assert text.split("\n", 1)[0].strip() == header
    assert ("left out, as they do not fit" in text) == bool(left_out)
    noted = " ".join(text.split("left out, as they do not fit: ")[-1].split("\n* best")[0].split())
    assert not left_out or sorted(noted.split(", ")) == sorted(left_out)
    assert "1,890" in text


def test_a_reason_that_jobs_share_apart_from_their_folders_is_shown_once() -> None:
    rows = [
        *(row(key, "failed", reason=f"the loss is NaN, see runs/x/sweep/{key}/train.log") for key in "abcdef"),
        row("g", "failed", reason="exit code 2"),
        row("h", "stopped", reason="exit code 2"),
    ]
    _, shown = as_table(rows, BestSettings()).split("h     mlp    stopped\n")
    assert shown.splitlines() == [
        "failed: a: the loss is NaN, see runs/x/sweep/a/train.log",
        "  the same: b, c, d and 2 more",
        "failed: g: exit code 2",
        "stopped: h: exit code 2",
    ]


def test_a_warning_that_jobs_share_apart_from_numbers_and_folders_is_shown_once(tmp_path: Path) -> None:
    rows = [JobStatus(key, {"seed": key}, tmp_path / key, "finished") for key in "abc"]
    for number, row in enumerate(rows[:2]):
        row.run_dir.mkdir()
        warnings = [f"the average spans {100 + number}.5 steps", f"{row.run_dir}/checkpoints is slow"]
        lines = [f"2026-11-30 11:15:2{number},001 WARNING {text}" for text in warnings * 2]
        (row.run_dir / "train.log").write_text("\n".join(["2026-11-30 11:15:20,001 INFO committed", *lines, "more"]))
    assert as_table(rows, BestSettings()).splitlines()[-2:] == [
        "warning of 2 of 3 jobs: the average spans 100.5 steps",
        f"warning of 2 of 3 jobs: {rows[0].run_dir}/checkpoints is slow",
    ]


@pytest.mark.parametrize(
    ("rules", "marked", "note"),
    [
        ([{"metric": "val/f1", "mode": "max"}] * 3, ["a", "c"], "* best val/f1 of all jobs: 0.9, of a and 1 more"),
        ([{"metric": None, "mode": "min"}] * 3, ["b"], "* best val/loss of all jobs: 0.1, of b"),
        (
            [{"metric": "val/f1", "mode": "max"}, {"metric": None}, {"metric": None}],
            ["b"],
            "* best val/loss of all jobs: 0.1, of b",
        ),
    ],
    ids=["the rule of all", "no rule", "different rules"],
)
def test_the_best_jobs_are_marked_by_the_rule_of_their_runs(
    rules: list[dict[str, Any]], marked: list[str], note: str, tmp_path: Path
) -> None:
    rows = []
    for key, f1, loss in zip("abc", (0.9, 0.8, 0.9), (0.5, 0.1, 0.6), strict=True):
        best = {
            "val/loss": {"value": loss, "step": 1, "mode": "min"},
            "val/f1": {"value": f1, "step": 1, "mode": "max"},
        }
        rows.append(JobStatus(key, {"seed": key}, tmp_path / key, "finished", best=best))
    # Those of the configs, also of jobs that have no directory yet.
    settings = BestSettings.common(BestSettings.of({"checkpoint": {"keep_best": rule}}) for rule in rules)
    lines = as_table(rows, settings).splitlines()
    assert [line.split()[1] for line in lines if line.startswith("*  ")] == marked
    assert note in lines


def test_of_equally_good_jobs_the_one_at_its_end_is_trained_on() -> None:
    rows = [row("a", "paused", loss=0.5), row("b", loss=0.5), row("c", loss=0.5), row("d", "failed", loss=0.5)]
    assert [job.key for job in best_jobs(rows, BestSettings())[1]] == ["b", "c", "a", "d"]


@pytest.mark.parametrize(
    ("lengths", "without_best", "note"),
    [
        (["20", "20", "20"], "", None),
        (["20", "40", "20"], "", "  compared although loop.max_duration differs: 20, 40"),
        (["20", "2ep", "40"], "", "  compared although loop.max_duration differs: 20, 2ep, 40"),
        (["20", "20", "40"], "c", None),
    ],
)
def test_jobs_of_different_lengths_are_compared_with_a_note(
    lengths: list[str], without_best: str, note: str | None, tmp_path: Path
) -> None:
    rows = []
    for key, length in zip("abc", lengths, strict=True):
        (tmp_path / key).mkdir()
        (tmp_path / key / "config.yaml").write_text(f"loop: {{max_duration: {length}}}\n")
        best = {} if key == without_best else {"val/loss": {"value": 0.5, "step": 1, "mode": "min"}}
        rows.append(JobStatus(key, {"seed": key}, tmp_path / key, "finished", best=best))
    lines = as_table(rows, BestSettings()).splitlines()
    assert [line for line in lines if "max_duration" in line] == ([] if note is None else [note])


def test_the_csv_has_every_job_every_metric_and_the_place(tmp_path: Path) -> None:
    write_csv(tmp_path / "sweep.csv", [row("1", loss=0.5, step=10, seconds=1.5, attempts=2), row("2", "failed")])
    first, second = csv.DictReader((tmp_path / "sweep.csv").read_text().splitlines())
    assert first == {
        "KEY": "1", "seed": "1", "model": "mlp", "status": "finished", "step": "10", "best val/loss": "0.5",
        "last val/loss": "0.5", "seconds": "1.5", "attempts": "2", "reason": "", "run_dir": "runs/x/sweep/1",
    }  # fmt: skip
    assert (second["status"], second["best val/loss"], second["step"]) == ("failed", "", "")
