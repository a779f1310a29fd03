"""`restarts.max`: start `train fit` in a process, and start it again from its checkpoint after a failure.

    this process:  start a child -> wait -> ask `verdict` -> pause -> start the next child …
    the child:     an ordinary `train fit`, which resumes; it ends when this process is gone

A signal is handed on to the child, which saves and exits with 75; during a pause it ends this process with 75.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from trainer_cli.checkpoint.integrity import catalog_of
from trainer_cli.checkpoint.storage.url_path import as_path
from trainer_cli.config.schema import TrainConfig, check_duration
from trainer_cli.errors import ExitCode
from trainer_cli.run.run_dir import RunDir
from trainer_cli.run.signals import STOPPING
from trainer_cli.trainer.duration import Unit
from trainer_cli.trainer.messages import to_console
from trainer_cli.trainer.restarts import Ended, verdict

log = logging.getLogger(__name__)


def supervise(config: TrainConfig, arguments: Sequence[str]) -> int:
    """Fit in processes of their own until one is done or cannot be mended; the last exit code.

    Args:
        arguments: of each process, after `train fit`.
    """
    to_console(config.logging.level)
    backoff = check_duration("restarts.backoff", config.restarts.backoff, units=(Unit.SECOND,))
    backoff_s = 0.0 if backoff is None else float(backoff.value)
    command = [sys.executable, "-m", "trainer_cli", "fit", *arguments]
    run, failures = RunDir(config.run_dir), 0
    folder = run.checkpoints_folder if config.checkpoint.folder is None else as_path(config.checkpoint.folder)
    with _Child() as child:
        while True:
            before = _newest_step(folder)
            code = child.run(command)
            if child.stopped:
                return code if code >= 0 else int(ExitCode.STOPPED_EARLY)
            reason = str(run.attempts[-1].get("reason") or "") if run.attempts else ""
            found = verdict(
                Ended(code, reason, progressed=_newest_step(folder) > before),
                failures=failures,
                most=config.restarts.max,
                backoff_s=backoff_s,
            )
            failures = found.failures
            if found.pause_s is None:
                if code not in (ExitCode.DONE, ExitCode.STOPPED_EARLY):
                    log.error("not restarted: %s", found.why)
                return code if code >= 0 else int(ExitCode.FAILED)
            log.warning("the attempt failed (%s); restarting in %g s", found.why, found.pause_s)
            if child.pause(found.pause_s):
                return int(ExitCode.STOPPED_EARLY)


def _newest_step(folder: Path) -> int:
    """The step of the newest checkpoint that a resume may take; -1 without any."""
    return max((entry.step for entry in catalog_of(folder).entries() if entry.resumable), default=-1)


class _Child:
    """The process of the present attempt; signals are handed on to it."""

    def __init__(self) -> None:
        self.stopped = False
        self._process: subprocess.Popen[bytes] | None = None
        self._wake = threading.Event()
        self._before: dict[int, object] = {}

    def run(self, command: Sequence[str]) -> int:
        """Start it, wait for its end, and return its exit code; negative for a signal."""
        with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as process:
            self._process = process
            if self.stopped:
                process.send_signal(signal.SIGTERM)
            try:
                return process.wait()
            finally:
                self._process = None

    def pause(self, seconds: float) -> bool:
        """Wait; True, at once, if a stop was requested."""
        return self._wake.wait(seconds) or self.stopped

    def _hand_on(self, number: int, frame: object) -> None:
        self.stopped = True
        self._wake.set()
        if self._process is not None:
            self._process.send_signal(number)

    def __enter__(self) -> _Child:
        for number in STOPPING:
            self._before[number] = signal.signal(number, self._hand_on)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
