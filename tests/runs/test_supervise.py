"""`restarts.max`: which failures are followed by a restart, after which pause, and what ends it."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from trainer_cli.core.schema import RestartsConfig, TrainConfig
from trainer_cli.core.stopping import Ended, decide_restart
from trainer_cli.runs import supervise as module
from trainer_cli.runs.run_dir import RunDir
from trainer_cli.runs.supervise import Child, supervise


@pytest.mark.parametrize(
    ("code", "reason", "why"),
    [
        (0, "", "the run is finished"),
        (2, "ConfigError", "the config or the command is wrong"),
        (3, "", "no checkpoint is valid"),
        (4, "", "the run directory is in use"),
        (75, "SIGTERM", "a stop was requested"),
        (130, "", "a stop was requested"),
        (1, "AssertionError: x", "a restart does not mend an AssertionError"),
    ],
)
def test_what_a_restart_cannot_mend_ends_it(code: int, reason: str, why: str) -> None:
    found = decide_restart(Ended(code, reason, progressed=True), failures=0, most=9, backoff_s=1)
    assert found.pause_s is None
    assert found.why.startswith(why)


def test_failures_without_progress_are_counted_and_the_pause_doubles() -> None:
    failures, pauses = 0, []
    for progressed in (False, False, True, False, False, False):
        found = decide_restart(Ended(-9, "", progressed), failures=failures, most=3, backoff_s=5)
        failures = found.failures
        pauses.append(found.pause_s)
    assert pauses == [5, 10, 5, 10, 20, None]
    assert found.why == "4 failures in a row without progress"
    long = decide_restart(Ended(1, "", progressed=False), failures=20, most=99, backoff_s=60)
    assert long.pause_s == 600


class Attempts:
    """Plays the child: each attempt has an exit code, the step of its newest checkpoint, and a reason."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *attempts: tuple[int, int, str]) -> None:
        self.left, self.step, self.pauses, self.commands = list(attempts), -1, [], []  # type: ignore[var-annotated]
        self.reason = ""
        monkeypatch.setattr(Child, "run", lambda child, command: self._run(child, command))
        monkeypatch.setattr(Child, "pause", lambda child, seconds: self.pauses.append(seconds))
        monkeypatch.setattr(module, "_newest_step", lambda folder: self.step)
        monkeypatch.setattr(RunDir, "attempts", property(lambda run: [{"reason": self.reason}]))

    def _run(self, child: Child, command: list[str]) -> int:
        self.commands.append(command)
        code, self.step, self.reason = self.left.pop(0)
        child.received += [signal.SIGTERM] * (code == 75)
        return code


def _config(path: Path, **restarts: Any) -> TrainConfig:
    return TrainConfig(run_dir=str(path / "run"), restarts=RestartsConfig(**restarts))


def test_a_run_that_fails_and_progresses_is_restarted_until_it_is_done(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    played = Attempts(monkeypatch, (-9, 0, ""), (1, 4, "OSError: x"), (1, 8, "OSError: x"), (0, 12, "done"))
    assert supervise(_config(tmp_path, max=1, backoff="2s"), ["fit", "+experiment=x"]) == 0
    assert played.pauses == [2, 2, 2]
    assert played.commands[0][-4:] == ["-m", "trainer_cli", "fit", "+experiment=x"]


@pytest.mark.parametrize(
    ("attempts", "code"),
    [
        ([(1, 0, "OSError"), (1, 0, "OSError")], 1),
        ([(-11, 0, ""), (-11, 0, "")], 1),
        ([(2, -1, "")], 2),
        ([(1, 3, "AssertionError: loss")], 1),
        ([(75, 3, "SIGTERM")], 75),
    ],
)
def test_it_ends_with_the_last_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, attempts: Any, code: int
) -> None:
    played = Attempts(monkeypatch, *attempts)
    assert supervise(_config(tmp_path, max=1), []) == code
    assert played.left == []


def test_a_signal_during_a_pause_ends_it_at_once() -> None:
    with Child() as child:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGTERM)).start()
        assert child.pause(60)
