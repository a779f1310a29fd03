"""`train top` and `train tail` as commands: what they print, what they refuse, and how they end."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from datetime import datetime
from pathlib import Path

import pytest
from printed import message as printed_message

from trainer_cli.commands.command_line import main
from trainer_cli.runs.run_dir import Outcome, RunDir
from trainer_cli.runs.run_lock import RunLock
from trainer_cli.steps.run_status import RunStatus
from trainer_cli.terminal import cell_width

Captured = pytest.CaptureFixture[str]


def started(path: Path, *steps: int) -> RunLock:
    """A run that goes on as long as the lock is held, with records of these steps, two a second."""
    run = RunDir(path)
    lock = run.create("name: x\n", [], {"run_id": "x"})
    run.begin_attempt(name="x", start_step=0, now=time.time() - 100, environment={})
    run.record_total_steps(1000)
    with open(run.metrics_file, "w") as file:
        for step in steps:
            line = {"step": step, "epoch": 0.1, "time": time.time() - (steps[-1] - step) / 2, "train/loss": 0.25}
            file.write(f"{json.dumps(line)}\n")
    return lock


def ended(path: Path, status: RunStatus, reason: str) -> None:
    with started(path, 10, 20):
        RunDir(path).end_attempt(Outcome(status=status, reason=reason, step=20, wall_time_s=1.0), now=time.time())


def test_the_table_has_a_row_for_each_run(empty_folder: Path, capsys: Captured) -> None:
    ended(Path("runs/done"), RunStatus.finished, "max_duration reached")
    ended(Path("runs/sweep/lr=1"), RunStatus.failed, "ValueError:\nno \x1b data")
    with started(Path("runs/live"), 100, 200):
        assert main(["top"]) == 0
    header, live, *others = capsys.readouterr().out.splitlines()
    assert header.split() == ["run", "state", "step", "steps/s", "train/loss", "ETA", "seen", "reason"]
    assert re.fullmatch(r"live +running +200/1,000 +2 +0.25 +\d:\d\d +\d+ s", live), live
    assert any(re.fullmatch(r"done +finished +20/1,000 +0.25 +\d+ s +max_duration reached", one) for one in others)
    assert any(
        re.fullmatch(r"sweep/lr=1 +failed +20/1,000 +0.25 +\d+ s +ValueError: no \? data", one) for one in others
    )
    assert len(others) == 2


def test_json_has_one_object_for_each_run(empty_folder: Path, capsys: Captured) -> None:
    ended(Path("runs/done"), RunStatus.stopped, "SIGTERM")
    with started(Path("runs/live"), 100, 200):
        assert main(["top", "--json"]) == 0
    live, done = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert list(live) == [
        "run", "state", "reason", "step", "total_steps", "steps_per_s", "loss", "metric", "value", "eta_s",
        "checkpoint", "age_s", "goodput", "problem",
    ]  # fmt: skip
    assert (live["run"], live["state"], live["step"], live["total_steps"]) == ("runs/live", "running", 200, 1000)
    assert (done["run"], done["state"], done["reason"], done["eta_s"]) == ("runs/done", "stopped", "SIGTERM", None)


def test_a_run_that_a_sweep_has_paused_is_shown_as_paused_until_it_is_trained_on(
    empty_folder: Path, capsys: Captured
) -> None:
    rows = ["KEY,lr,status,step,reason,run_dir"]
    for key, step in (("lr=1", 20), ("lr=2", 10)):
        run = Path("runs/x/sweep", key)
        ended(run, RunStatus.finished, "hard_stop at 20 steps")
        rows.append(f"{key},1,paused,{step},the best 1 of 2 go on,{run}")
    Path("runs/x/sweep/sweep.csv").write_text("\n".join([*rows, ""]))
    assert main(["top", "--json"]) == 0
    shown = {row["run"]: (row["state"], row["reason"]) for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert shown == {
        "runs/x/sweep/lr=1": ("paused", "the best 1 of 2 go on"),
        "runs/x/sweep/lr=2": ("finished", "hard_stop at 20 steps"),
    }


def test_a_folder_without_runs_says_so(empty_folder: Path, capsys: Captured) -> None:
    Path("runs").mkdir()
    assert main(["top", "--once"]) == 0
    assert capsys.readouterr().out == "runs: no runs\n"
    assert main(["top", "--json"]) == 0
    assert capsys.readouterr().out == ""


def test_a_run_that_ended_is_tailed_to_its_end(empty_folder: Path, capsys: Captured) -> None:
    ended(Path("runs/done"), RunStatus.finished, "max_duration reached")
    for arguments in (["runs/done"], ["-f", "runs/done"]):
        assert main(["tail", "-n", "1", *arguments]) == 0
        out = capsys.readouterr().out
        last = "finished at step 20: max_duration reached\n"
        assert re.fullmatch(rf".* METRICS step 20  train/loss 0.25\n{last}", out), out


def test_a_tail_ends_with_the_error_of_a_failed_run_and_without_its_traceback(
    empty_folder: Path, capsys: Captured
) -> None:
    ended(Path("runs/broken"), RunStatus.failed, "ValueError: no data")
    log = "2026-01-31 12:00:00,500 INFO    begun\n2026-01-31 12:00:01,000 DEBUG   the run failed\nTraceback …\n"
    RunDir("runs/broken").log_file.write_text(log)
    assert main(["tail", "runs/broken"]) == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert (first[24:], last) == ("INFO    begun", "failed at step 20: ValueError: no data")


def test_a_tail_for_programs_is_one_object_a_line(empty_folder: Path, capsys: Captured) -> None:
    ended(Path("runs/done"), RunStatus.finished, "max_duration reached")
    run = RunDir("runs/done")
    run.log_file.write_text("2026-01-31 12:00:00,500 INFO    a \x1b message\nand more of it\n")
    assert main(["tail", "-f", "--json", "runs/done"]) == 0
    *lines, end = map(json.loads, capsys.readouterr().out.splitlines())
    at = datetime(2026, 1, 31, 12, 0, 0, 500_000).timestamp()
    messages = [{"time": at, "message": "2026-01-31 12:00:00,500 INFO    a \x1b message"}]
    messages.append({"time": at, "message": "and more of it"})
    records = [json.loads(line) for line in run.metrics_file.read_text().splitlines()]
    assert sorted(lines, key=lambda line: line["time"]) == lines
    assert [line for line in lines if "message" in line] == messages
    assert [line for line in lines if "step" in line] == records
    assert end == {"state": "finished", "step": 20, "reason": "max_duration reached", "problem": ""}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["top", "nowhere"], "there is no folder nowhere. Name the folder that holds your runs: train top DIR."),
        (["top", "--every", "0"], "--every is 0, but it must be a positive number of seconds."),
        (["top", "--every", "nan"], "--every is nan, but it must be a positive number of seconds."),
        (["tail", "done"], "done holds no run. Did you mean 'runs/done'?"),
        (["tail", "runs/donne"], "runs/donne holds no run. Did you mean 'runs/done'?"),
        (["tail", "elsewhere"], "elsewhere holds no run. `train top DIR` lists the runs below a folder."),
        (["tail", "-n", "-1", "runs/done"], "--lines is -1, but it cannot be negative."),
    ],
)
def test_a_mistake_is_one_message(arguments: list[str], message: str, empty_folder: Path, capsys: Captured) -> None:
    ended(Path("runs/done"), RunStatus.finished, "")
    assert main(arguments) == 2
    assert printed_message(capsys.readouterr().err) == message


@pytest.mark.parametrize("width", [70, 80, 120, 160, 300])
def test_a_narrow_terminal_cuts_the_reason_and_the_name_but_no_number(
    width: int, empty_folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, reason = f"{'long' * 20},optimizer.lr=0.1", "ValueError: " + "why " * 30
    ended(Path(f"runs/sweep/{key}"), RunStatus.failed, f"{reason.strip()}. Lower it.")
    with started(Path("runs/live"), 100, 200):
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        monkeypatch.setenv("COLUMNS", str(width))
        assert main(["top", "--once"]) == 0
    _, live, failed, *below = lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    assert ["lr=0.1: ValueError: why why" in line for line in below] == [True] * (width <= 160)
    assert re.search(r"live +running +200/1,000 +2 +0.25 +\d:\d\d +\d+ s", live), live
    assert re.search(r"lr=0.1 +failed +20/1,000 +0.25 +\d+ s", failed), failed
    assert (key in failed, "ValueError" in failed, reason.strip() in failed) == (width > 120, width > 160, width == 300)
    assert "Lower it" not in failed, "what to do is in the log"


def test_the_newest_value_of_the_metric_that_decides_is_shown_under_its_name(
    empty_folder: Path, capsys: Captured
) -> None:
    with started(Path("runs/live"), 100, 200):
        with Path("runs/live/metrics.jsonl").open("a") as file:
            file.write('{"step": 200, "epoch": 2, "time": 1, "val/loss": 0.5, "val/accuracy": 0.75}\n')
        assert main(["top", "--once"]) == 0
        header, live = capsys.readouterr().out.splitlines()
        assert re.search(r"loss +val/loss +ETA", header)
        assert re.search(r"live .* 0.25 +0.5 ", live)
        ended(Path("runs/done"), RunStatus.stopped, "SIGTERM")
        Path("runs/done/metrics.jsonl").write_text('{"step": 20, "epoch": 2, "time": 1, "test/loss": 3, "x/loss": 2}\n')
        assert main(["top", "--once"]) == 0
    header, live, done = capsys.readouterr().out.splitlines()
    assert re.search(r"loss +metric +ETA", header)
    assert " val/loss 0.5 " in live
    assert " x/loss 2 " in done, "no test set decides"


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_name_of_wide_letters_is_cut_by_the_columns_that_it_takes(
    width: int, empty_folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended(Path(f"runs/{'精度' * 12}"), RunStatus.failed, "損失が " * 30)
    ended(Path("runs/plain"), RunStatus.finished, "")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    assert main(["top", "--once"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(cell_width, lines)) <= width

    assert cell_width(lines[1].partition("20/")[0]) == cell_width(lines[2].partition("20/")[0])


def test_a_terminal_of_40_columns_shows_whole_cells_of_fewer_columns(
    empty_folder: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended(Path("runs/mnist-large"), RunStatus.failed, "ValueError: " + "why " * 30)
    with started(Path("runs/live"), 100, 200):
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        monkeypatch.setenv("COLUMNS", "40")
        assert main(["top", "--once"]) == 0
    header, live, failed, why = capsys.readouterr().out.splitlines()
    assert header.split() == ["run", "state", "step", "ETA"]
    assert re.fullmatch(r"mnist-large: ValueError: why why.*…", why)
    assert re.fullmatch(r"live +running +200/1,000 +\d:\d\d", live), live
    assert re.fullmatch(r"mnist-large +failed +20/1,000", failed), failed


def test_on_a_terminal_the_table_follows_the_runs_until_ctrl_c_and_leaves_the_terminal_clean(
    empty_folder: Path,
) -> None:
    lock = started(Path("runs/first"), 100, 200)
    ended(Path(f"runs/sweep/{'long' * 20},optimizer.lr=0.1"), RunStatus.failed, "ValueError: " + "why " * 20)
    process, terminal = on_a_terminal("top", "--every", "0.05")
    try:
        seen = until(terminal, "1 failed") + until(terminal, "optimizer.lr=0.1")
        assert all(one in seen for one in ("steps/s", "200/1,000", "0.25", "running"))
        assert "first" in seen
        assert seen.count("\x1b[?1049h") == 1, "a screen of its own"
        started(Path("runs/second"), 300, 400).release()
        seen += until(terminal, "second")
        lock.release()
        seen += until(terminal, "2 killed, 1 failed")
        os.write(terminal, b"\x03")
        seen += until(terminal, None)
        assert process.wait(timeout=500) == 0
        assert seen.rstrip().endswith("\x1b[?25h\x1b[?1049l"), "the cursor is shown, and that screen is left"
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def test_tail_follows_a_run_until_it_ends(empty_folder: Path) -> None:
    run = RunDir("runs/live")
    with started(run.path, 100, 200):
        process = subprocess.Popen(
            [sys.executable, "-m", "trainer_cli", "tail", "-f", "-n", "1", str(run.path)],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        assert "step 200" in process.stdout.readline()
        with open(run.metrics_file, "a") as file:
            file.write(json.dumps({"step": 300, "epoch": 0.1, "time": time.time(), "train/loss": 0.125}) + "\n")
        assert "step 300  train/loss 0.125" in process.stdout.readline()
        assert process.poll() is None
        run.end_attempt(Outcome(status=RunStatus.stopped, reason="why", step=310, wall_time_s=1.0), now=time.time())
    rest, _ = process.communicate(timeout=500)
    assert (rest, process.returncode) == ("stopped at step 310: why\n", 0)


def on_a_terminal(*arguments: str) -> tuple[subprocess.Popen[bytes], int]:
    """The command on a terminal of 100 columns and 20 lines; what is read from the returned file is what it shows."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 100, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "trainer_cli", *arguments],
        stdin=its, stdout=its, stderr=its, start_new_session=True, env={**os.environ, "TERM": "xterm-256color"},
        preexec_fn=lambda: (
            signal.signal(signal.SIGINT, signal.default_int_handler),
            fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        ),
    )  # fmt: skip
    os.close(its)
    return process, ours


def until(terminal: int, expected: str | None) -> str:
    """What is shown until a text, or until the terminal is closed."""
    seen, limit = "", time.monotonic() + 500
    while expected is None or expected not in seen:
        ready, _, _ = select.select([terminal], [], [], max(0.0, limit - time.monotonic()))
        assert ready, f"{expected!r} is not in {seen!r}"
        try:
            content = os.read(terminal, 4096)
        except OSError:  # Linux: the other side is closed.
            content = b""
        if not content:
            assert expected is None, f"{expected!r} is not in {seen!r}"
            break
        seen += content.decode(errors="replace")
    return seen
