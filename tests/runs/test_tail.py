"""The last lines of a run's log and metrics, and what is added to them."""

from __future__ import annotations

import json
import os
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from trainer_cli.commands.tail import Tail

BEGIN = 1.5e9


def stamp(second: float) -> str:
    return datetime.fromtimestamp(BEGIN + second).isoformat(" ", "milliseconds").replace(".", ",")


def log(run: Path, second: float, message: str, level: str = "INFO") -> None:
    with open(run / "train.log", "a") as file:
        file.write(f"{stamp(second)} {level:7} {message}\n")


def record(run: Path, second: float, step: int, **metrics: float | str) -> None:
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps({"step": step, "epoch": 0.5, "time": BEGIN + second, **metrics}) + "\n")


def test_log_lines_and_records_are_merged_by_time(tmp_path: Path) -> None:
    log(tmp_path, 1, "first")
    log(tmp_path, 3, "third\nTraceback:\n  below it")
    record(tmp_path, 2, 1000, **dict[str, Any]({"train/loss": 0.123456, "val/loss": "nan"}))
    record(tmp_path, 4, 2000)
    lines = [
        f"{stamp(1)} INFO    first",
        f"{stamp(2)} METRICS step 1,000  train/loss 0.1235  val/loss nan",
        f"{stamp(3)} INFO    third",
        "Traceback:",
        "  below it",
        f"{stamp(4)} METRICS step 2,000",
    ]
    for most in (0, 1, 3, 6, 100):
        assert Tail(tmp_path, most).read() == lines[max(0, 6 - most) :]


def test_only_what_was_added_is_returned_next(tmp_path: Path) -> None:
    tail = Tail(tmp_path, 2)
    assert tail.read() == []
    for second in range(5):
        record(tmp_path, second, second)
    assert len(tail.read()) == 5
    assert tail.read() == []
    record(tmp_path, 6, 6)
    log(tmp_path, 5, "before it")
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "time"')
    assert [line[24:] for line in tail.read()] == ["INFO    before it", "METRICS step 6"]
    assert tail.read() == []


@pytest.mark.parametrize("most", [0, 3, 100])
def test_a_resume_returns_what_it_makes_again_and_nothing_twice(tmp_path: Path, most: int) -> None:
    for step in (1, 2, 3, 4):
        record(tmp_path, step, step)
    tail = Tail(tmp_path, most)
    assert len(tail.read()) == min(most, 4)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    os.truncate(tmp_path / "metrics.jsonl", len("".join(lines[:2])))
    for step in (3, 4, 5):
        record(tmp_path, 10 + step, step, again=1)
    assert [line[24:] for line in tail.read()] == [f"METRICS step {step}  again 1" for step in (3, 4, 5)]


def test_torn_lines_and_control_characters_reach_no_terminal(tmp_path: Path) -> None:
    log(tmp_path, 1, "\x1b[2Jcleared")
    (tmp_path / "metrics.jsonl").write_bytes(b'\0\0\n[]\n{"step": 1}\n{"step": 1, "time": 1, "x": [1]}\n\xff\n')
    assert Tail(tmp_path, 10).read() == [f"{stamp(1)} INFO    ?[2Jcleared"]


@pytest.mark.parametrize("level", [None, "debug", "info"])
@pytest.mark.parametrize("most", [0, 1, 2, 1000])
def test_the_messages_are_those_of_the_console(tmp_path: Path, most: int, level: str | None) -> None:
    if level is not None:
        (tmp_path / "config.yaml").write_text(f"logging:\n  level: {level}\n")
    log(tmp_path, 1, "first")
    log(tmp_path, 2, "lost", "WARNING")
    # More lines than are read at first.
    below = [f"  line {number}" for number in range(450)]
    log(tmp_path, 3, "\n".join(["the run failed", *below]), "DEBUG")
    lines = [f"{stamp(1)} INFO    first", f"{stamp(2)} WARNING lost"]
    failure = [f"{stamp(3)} DEBUG   the run failed", *below] if level == "debug" else []
    tail = Tail(tmp_path, most)
    lines += failure
    assert tail.read() == lines[max(0, len(lines) - most) :]
    log(tmp_path, 4, "again", "DEBUG")
    log(tmp_path, 5, "last")
    again = [f"{stamp(4)} DEBUG   again"] if level == "debug" else []
    assert tail.read() == [*again, f"{stamp(5)} INFO    last"]
