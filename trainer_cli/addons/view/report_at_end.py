"""Write `report.html` into a run's directory when its `train fit` ends."""

from __future__ import annotations

import logging
import time
from types import FrameType, TracebackType

from trainer_cli.files import FileIdentity, staged_path
from trainer_cli.runs import RunDir
from trainer_cli.schema import TrainConfig
from trainer_cli.signals import SignalHandlers
from trainer_cli.steps import RunStatus

log = logging.getLogger(__name__)

_LONG_RECORDS_BYTES = 16 << 20
"""Size of metrics.jsonl from which a run that did not finish gets no report: reading it takes about a second, and the
process may have little time left."""


class ReportAtEnd:
    """Surrounds a fit. At its end the report is written if an attempt was recorded meanwhile, or if a kill had
    interrupted the last one; a failure is a warning.

    The run has ended by then: its lock is free, its summary is written, and its training time is counted.
    """

    def __init__(self) -> None:
        self._run: RunDir | None = None
        self._summary_before: FileIdentity | None = None
        self._was_interrupted = False

    def expect(self, config: TrainConfig) -> None:
        """Take the run directory from the config, before anything is written there."""
        if config.report:
            self._run = RunDir(config.run_dir)
            self._summary_before = FileIdentity.at(self._run.summary_file)
            self._was_interrupted = staged_path(self._run.report_file).exists()

    def __enter__(self) -> ReportAtEnd:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write the report unless nothing was trained, or a second Ctrl-C has ended the fit."""
        if self._run is None or isinstance(error, KeyboardInterrupt):
            return
        # Without a new summary nothing was trained: a finished run is left as it is.
        if FileIdentity.at(self._run.summary_file) == self._summary_before and not self._was_interrupted:
            return
        try:
            # A signal that stops a run ends the report, so that the process exits with the code of the fit.
            with SignalHandlers(_raise):
                _write(self._run)
        except _SignalReceived:
            log.debug("a signal has ended the report")
        # An error of the report must not replace how the run has ended.
        except Exception as failure:
            log.warning("%s could not be written: %s", self._run.report_file, failure)
            log.debug("the report failed", exc_info=True)


class _SignalReceived(BaseException):
    """Raised by the handler of signals in the code that it interrupts."""


def _raise(number: int, frame: FrameType | None) -> None:
    raise _SignalReceived


def _write(run: RunDir) -> None:
    """Write the report, unless the run has no step, or it was stopped and its records are long."""
    summary = run.read_summary()
    # A run without a step has nothing to show, and its error is what is read.
    if not summary.get("step"):
        return
    is_finished = summary.get("status") == RunStatus.finished
    if not is_finished and run.metrics_file.exists() and run.metrics_file.stat().st_size > _LONG_RECORDS_BYTES:
        return
    # Imported here: a fit that is refused needs none of it.
    from trainer_cli.addons.view.report import report

    report([run.path], run.report_file, now=time.time())
    print(f"report: {run.report_file}", flush=True)
