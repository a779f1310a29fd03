"""The best interval of saves for a mean time between failures, from what a run has measured."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from trainer_cli.commands.command_line import main
from trainer_cli.goodput import best_interval_s
from trainer_cli.running.failures import copy_seconds, find_best_interval, measured_saves
from trainer_cli.runs.run_dir import RunDir

NOW = 1.5e9
HOUR_S = 3600.0


def run_with(path: Path, *attempts: list[tuple[int, float, float]]) -> RunDir:
    """A run whose attempts, an hour apart, have saved: (step, seconds of training, seconds of saves) before each."""
    run = RunDir(path)
    run.create("name: x\n", [], {"run_id": "x"}).release()
    lines = []
    for number, saves in enumerate(attempts):
        run.begin_attempt(name="x", start_step=0, now=NOW + number * HOUR_S, environment={})
        for step, training_s, saving_s in saves:
            spent = {"start": 5.0, "training": training_s, "saving": saving_s}
            facts = {"event": "saved", "name": f"step{step}", "step": step, "kind": "permanent", "reason": "why"}
            at = NOW + number * HOUR_S + training_s
            lines.append(json.dumps({"time": at, **facts, "time_s": spent, "kept_s": training_s}))
    run.history_file.write_text("".join(f"{line}\n" for line in lines))
    return run


SAVES = [(0, 0.0, 0.0), (100, 50.0, 0.9), (200, 100.0, 1.0)]


@pytest.mark.parametrize(
    ("attempts", "save_s", "source"),
    [
        ([SAVES], 0.5, "measured: 2 saves of attempt 1"),
        ([[(0, 0.0, 0.0), (9, 1.0, 9.0)], SAVES], 0.5, "measured: 2 saves of attempt 2"),
        ([SAVES, [(300, 9.0, 0.0)]], 0.5, "measured: 2 saves of attempt 1"),  # its only save is not over
        ([SAVES[:2]], 0.9, "measured: 1 save of attempt 1"),
    ],
    ids=["one attempt", "the newest", "one that saved twice", "one save"],
)
def test_the_newest_attempt_that_saved_twice_has_measured_its_saves(
    attempts: list[list[tuple[int, float, float]]], save_s: float, source: str, tmp_path: Path
) -> None:
    saves = measured_saves(run_with(tmp_path / "x", *attempts))
    assert saves is not None
    assert (saves.save_s, saves.source, saves.step_s) == (
        save_s,
        source,
        0.5 if len(attempts[0]) == 3 else saves.step_s,
    )


def test_the_best_interval_is_in_seconds_and_in_steps(tmp_path: Path) -> None:
    run = run_with(tmp_path / "x", SAVES)
    best = find_best_interval(run, None, HOUR_S, None, in_background=False)
    assert best is not None
    assert best.interval_s == best_interval_s(0.5, HOUR_S)
    assert best.steps == round(best.interval_s / 0.5)
    given = find_best_interval(run, None, HOUR_S, 0.25, in_background=False)
    assert given is not None
    assert given.steps == round(best.interval_s / 0.25), "a step time that is given counts more than the measured one"


def test_without_a_measured_save_only_one_in_the_background_is_estimated(tmp_path: Path) -> None:
    run = run_with(tmp_path / "x", SAVES[:1])
    assert find_best_interval(run, 10**6, HOUR_S, None, in_background=False) is None
    best = find_best_interval(run, 10**6, HOUR_S, None, in_background=True)
    assert best is not None
    assert (best.source[:9], best.steps) == ("estimated", None)
    assert copy_seconds(2**27) > copy_seconds(2**20) > 0


def test_the_plan_shows_the_interval_or_says_what_is_lacking(
    empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", "+experiment=digits_mlp", "--between-failures"]
    assert main([*command, "1h", "checkpoint.save_async=true", "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["best_interval"]
    assert (best["between_failures_s"], best["source"][:9]) == (HOUR_S, "estimated")
    assert main([*command, "1h", "checkpoint.save_async=true"]) == 0
    assert "with a failure every 3600 s on average:" in capsys.readouterr().out
    assert main([*command, "1h", "checkpoint.save_async=true", "-m", "optimizer.lr=0.1,0.2"]) == 0
    header, *rows = capsys.readouterr().out.splitlines()[:3]
    assert re.split("  +", header)[-1] == "best interval"
    assert all(re.search(r"  [\d.]+ s$", row) for row in rows), rows
    assert main([*command, "1h", "checkpoint.save_async=false"]) == 2
    assert "has not measured two saves in one start" in capsys.readouterr().err
    assert main([*command, "6ep"]) == 2
    assert "--between-failures is 6ep, but it must be a time" in capsys.readouterr().err
