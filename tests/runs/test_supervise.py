"""What is around a training: restarts, signals as requests, and files in the run directory that ask for something."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import struct
import termios
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tiny import loader, on, trainer

from trainer_cli.addons.jobs import supervise as module
from trainer_cli.addons.jobs.restart import Ended, decide_restart
from trainer_cli.addons.jobs.supervise import Child, Children, supervise
from trainer_cli.checkpoint.writer_thread import run_now
from trainer_cli.running.fitting import _describe_stop
from trainer_cli.running.trigger_files import TriggerFiles
from trainer_cli.runs.run_dir import RunDir
from trainer_cli.schema.sections import RestartsConfig, TrainConfig
from trainer_cli.signals import STOPPING, StopSignals


@pytest.mark.parametrize(
    ("code", "reason", "why"),
    [
        (0, "", "the run is finished"),
        (2, "ConfigError", "the config or the command is wrong"),
        (3, "", "no checkpoint is valid"),
        (4, "", "the run directory is in use"),
        (75, "SIGTERM", "a stop was requested"),
        (130, "", "a stop was requested"),
        (1, "AssertionError: x", "a restart does not fix an AssertionError"),
    ],
)
def test_what_a_restart_cannot_mend_ends_it(code: int, reason: str, why: str) -> None:
    decision = decide_restart(Ended(code, reason, progressed=True), failures=0, most=9, backoff_s=1)
    assert decision.pause_s is None
    assert decision.why.startswith(why)


def test_failures_without_progress_are_counted_and_the_pause_doubles() -> None:
    failures, pauses = 0, []
    for progressed in (False, False, True, False, False, False):
        decision = decide_restart(Ended(-9, "", progressed), failures=failures, most=3, backoff_s=5)
        failures = decision.failures
        pauses.append(decision.pause_s)
    assert pauses == [5, 10, 5, 10, 20, None]
    assert decision.why == "4 failures in a row without progress"
    assert decide_restart(Ended(1, "", progressed=False), failures=20, most=99, backoff_s=60).pause_s == 600


@pytest.mark.parametrize(
    ("attempts", "code", "pauses"),
    [
        ([(-9, 0, ""), (1, 4, "OSError: x"), (1, 8, "OSError: x"), (0, 12, "done")], 0, [2, 2, 2]),
        ([(1, 0, "OSError"), (1, 0, "OSError")], 1, [2]),
        ([(-11, 0, ""), (-11, 0, "")], 1, [2]),
        ([(2, -1, "")], 2, []),
        ([(1, 3, "AssertionError: loss")], 1, []),
        ([(75, 3, "SIGTERM")], 75, []),
    ],
    ids=["progress until the end", "no progress", "no progress by a signal", "a mistake", "an assertion", "a stop"],
)
def test_a_run_is_restarted_while_it_progresses_and_ends_with_the_last_exit_code(
    attempts: list[tuple[int, int, str]], code: int, pauses: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each attempt has an exit code, the step of its newest checkpoint, and a reason."""
    ended: list[tuple[int, int, str]] = [(0, -1, "")]
    paused: list[float] = []

    def run(child: Child, command: list[str]) -> int:
        assert command[-4:] == ["-m", "trainer_cli", "fit", "+experiment=x"]
        ended.append(attempts[len(ended) - 1])
        child.received += [signal.SIGTERM] * (ended[-1][0] == 75)
        return ended[-1][0]

    monkeypatch.setattr(Child, "run", run)
    monkeypatch.setattr(Child, "pause", lambda child, seconds: paused.append(seconds))
    monkeypatch.setattr(module, "_newest_step", lambda folder: ended[-1][1])
    monkeypatch.setattr(RunDir, "attempts", property(lambda run: [{"reason": ended[-1][2]}]))
    config = TrainConfig(run_dir=str(tmp_path / "run"), restarts=RestartsConfig(max=1, backoff="2s"))
    assert supervise(config, ["fit", "+experiment=x"]) == code
    assert (ended[1:], paused) == (attempts, pauses)


def test_a_restart_resumes_the_run_that_resume_anew_has_begun(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    begun = RunDir(tmp_path / "run")
    begun.create("", [], {"run_id": "a" * 16}).release()
    commands: list[list[str]] = []

    def run(child: Child, command: list[str]) -> int:
        commands.append(command[command.index("fit") :])
        if len(commands) == 2:
            begun.move_to_trash()
            begun.create("", [], {"run_id": "b" * 16}).release()
        return 1 if len(commands) < 4 else 0

    monkeypatch.setattr(Child, "run", run)
    monkeypatch.setattr(Child, "pause", lambda child, seconds: None)
    config = TrainConfig(run_dir=str(begun.path), restarts=RestartsConfig(max=9), resume="anew")
    assert supervise(config, ["fit"]) == 0
    assert commands == [["fit"], ["fit"], ["fit", "resume=auto"], ["fit", "resume=auto"]]


def test_a_signal_during_a_pause_ends_it_at_once() -> None:
    with Child() as child:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
        assert child.pause(60)


@pytest.mark.parametrize(
    ("number", "reason", "more"),
    [(signal.SIGTERM, "SIGTERM", "twice"), (signal.SIGHUP, "SIGHUP", "twice"), (signal.SIGINT, "Ctrl-C", "again")],
)
def test_the_first_signal_is_noted_reported_and_passed_on(
    number: signal.Signals, reason: str, more: str, capfd: pytest.CaptureFixture[str]
) -> None:
    requests: list[str] = []
    with StopSignals() as signals:
        signals.listen(requests.append)
        signal.raise_signal(number)
        signal.raise_signal(signal.SIGTERM)
    assert requests == [reason]
    assert capfd.readouterr().err == f"{reason}: stopping after this step; Ctrl-C {more} stops at once\n"


@pytest.mark.parametrize(
    ("hook", "words"),
    [
        ("on_train_batch_end", "this step"),
        ("on_validate_batch_end", "this validation batch, and a resume makes the evaluation again"),
        ("on_after_evaluation", "this validation batch, and a resume makes the evaluation again"),
        ("on_save_opportunity", "this save"),
    ],
)
def test_a_signal_is_answered_by_what_it_waits_for(hook: str, words: str, capfd: pytest.CaptureFixture[str]) -> None:
    raises = on(**{hook: lambda *_: signal.raise_signal(signal.SIGTERM)})
    made = trainer(callbacks=[raises], settings={"max_duration": 2, "eval_interval": 1})
    with StopSignals() as signals:
        signals.listen(lambda reason: made.stop(reason, finished=False), partial(_describe_stop, made))
        made.fit(loader(), loader(4))
    assert f"SIGTERM: stopping after {words}; Ctrl-C twice stops at once" in capfd.readouterr().err


def test_a_stop_that_takes_long_says_where_it_waits(capfd: pytest.CaptureFixture[str]) -> None:
    with StopSignals(reported_wait_s=0.1):
        signal.raise_signal(signal.SIGTERM)
        run_now(partial(time.sleep, 1.0))
    text = capfd.readouterr().err
    assert re.search(r"SIGTERM: still waiting after 0 s for \w+ \(checkpoint/writer_thread.py:\d+\); Ctrl-C", text), (
        text
    )
    with StopSignals(reported_wait_s=0.1):
        signal.raise_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert "still" not in capfd.readouterr().err


def test_a_signal_that_came_before_anybody_listened_is_kept_and_the_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in STOPPING]
    requests: list[str] = []
    with StopSignals() as signals:
        signal.raise_signal(signal.SIGUSR1)
        signals.listen(requests.append)
    assert requests == ["SIGUSR1"]
    assert [signal.getsignal(number) for number in STOPPING] == before


@pytest.mark.parametrize("columns", [0, 20, 40, 80, 120])
def test_the_promise_of_a_stop_is_broken_between_words_on_a_terminal(columns: int) -> None:
    master, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    before = os.dup(2)
    os.dup2(terminal, 2)
    try:
        with StopSignals(Children.promise):
            signal.raise_signal(signal.SIGINT)
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(terminal)
    shown = os.read(master, 10_000).decode()
    os.close(master)
    assert " ".join(shown.split()) == f"Ctrl-C: {Children.promise}; Ctrl-C again stops at once"
    assert max(map(len, shown.splitlines())) < (columns or 80)


def test_the_second_ctrl_c_interrupts_whatever_other_signals_came() -> None:
    with StopSignals():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_under_nohup_the_end_of_the_terminal_stops_nothing() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            signal.raise_signal(signal.SIGHUP)
            assert signals.stop_request is None
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_handlers_register_one_function_for_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[Any] = []
    monkeypatch.setattr(os, "register_at_fork", lambda **functions: registered.append(functions))
    for _ in range(3):
        with StopSignals(), StopSignals():
            pass
    assert len(registered) <= 1, "none, if an earlier test has entered"


def test_a_file_that_asks_counts_once_and_is_deleted_and_none_is_read_after_the_end(tmp_path: Path) -> None:
    granted: list[str] = []
    seen = threading.Event()

    def grant(name: str) -> None:
        granted.append(name)
        seen.set()

    with TriggerFiles(tmp_path, {name: partial(grant, name) for name in ("save", "stop")}, interval_s=0.01):
        (tmp_path / "save").touch()
        assert seen.wait(500)
        seen.clear()
        (tmp_path / "stop").touch()
        assert seen.wait(500)
    assert granted == ["save", "stop"]
    assert list(tmp_path.iterdir()) == []
    assert not [thread for thread in threading.enumerate() if thread.name == "trigger_files"]


def test_files_from_before_the_start_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "stop").touch()
    (tmp_path / "save").mkdir()
    granted: list[str] = []
    requests = {name: lambda name=name: granted.append(name) for name in ("save", "stop")}
    with TriggerFiles(tmp_path, requests, interval_s=60):
        assert not (tmp_path / "stop").exists()
    assert granted == []
    assert (tmp_path / "save").is_dir()
