"""Write `report.html` into a run's directory when its `train fit` ends."""

from __future__ import annotations

import logging
import time
from types import FrameType

from trainer_cli.files import staged_path
from trainer_cli.runs import RunDir
from trainer_cli.schema import TrainConfig
from trainer_cli.signals import SignalHandlers
from trainer_cli.steps import RunStatus

log = logging.getLogger(__name__)

_LONG_RECORDS_BYTES = 16 << 20
"""Size of metrics.jsonl from which a run that did not finish gets no report: reading it takes about a second, and the
process may have little time left."""


def report_at_end(config: TrainConfig, error: BaseException | None, *, has_begun: bool) -> None:
    """Write the report if an attempt was recorded, or if a kill had interrupted the last one; a failure is a warning.

    The run has ended by then: its lock is free, its summary is written, and its training time is counted.
    """
    run = RunDir(config.run_dir)
    # A finished run is left as it is.
    if not config.report or not (has_begun or staged_path(run.report_file).exists()):
        return
    try:
        # A signal that stops a run ends the report, so that the process exits with the code of the fit.
        with SignalHandlers(_raise):
            _write(run)
    except _SignalReceived:
        log.debug("a signal has ended the report")
    # An error of the report must not replace how the run has ended.
    except Exception as failure:
        log.warning("%s could not be written: %s", run.report_file, failure)
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
