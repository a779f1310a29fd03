"""The report that `train fit` writes at its end: when it is written, and that it never changes how a run ended."""

from __future__ import annotations

import logging
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from reported import make_run, outcome

from trainer_cli.addons.view import report_at_end
from trainer_cli.processes import FitEnd
from trainer_cli.runs.run_dir import RunDir
from trainer_cli.schema.sections import TrainConfig
from trainer_cli.steps.run_status import RunStatus


def fit(
    run: RunDir,
    status: RunStatus | None = RunStatus.finished,
    error: BaseException | None = None,
    step: int = 20,
    **config: Any,
) -> None:
    """Stands for a fit that records an attempt with this end; None: it is refused before."""
    with FitEnd() as end:
        end.expect(TrainConfig(run_dir=str(run.path), **config))
        if status is not None:
            run.end_attempt(outcome(status, step, "an end"), now=1_700_000_500.0)
        if error is not None:
            raise error


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path / "x", steps=20)


@pytest.mark.parametrize("status", [RunStatus.finished, RunStatus.stopped, RunStatus.failed])
def test_an_attempt_that_ends_leaves_a_report_in_its_run(
    run: RunDir, status: RunStatus, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        fit(run, status)
        assert capsys.readouterr().out == f"report: {run.report_file}\n"
    assert "train/grad_norm" in run.report_file.read_text()


def test_a_failed_fit_has_a_report_and_keeps_its_error(run: RunDir) -> None:
    with pytest.raises(ValueError, match="of the training"):
        fit(run, RunStatus.failed, ValueError("of the training"))
    assert run.report_file.exists()


@pytest.mark.parametrize(
    ("status", "error", "config"),
    [
        (None, None, {}),
        (RunStatus.failed, None, {"step": 0}),
        (RunStatus.finished, None, {"report": False}),
        (RunStatus.interrupted, KeyboardInterrupt(), {}),
    ],
    ids=["nothing trained", "no step was made", "switched off", "second Ctrl-C"],
)
def test_no_report_is_written_of(
    run: RunDir, status: RunStatus | None, error: BaseException | None, config: dict[str, Any]
) -> None:
    if error is None:
        fit(run, status, **config)
    else:
        with pytest.raises(KeyboardInterrupt):
            fit(run, status, error, **config)
    assert not run.report_file.exists()


def test_a_stopped_run_with_long_records_is_not_held_by_a_report(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_at_end, "_LONG_RECORDS_BYTES", 100)
    fit(run, RunStatus.stopped)
    assert not run.report_file.exists()
    fit(run, RunStatus.finished)
    assert run.report_file.exists()


def test_a_report_that_cannot_be_written_is_a_warning(run: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    run.report_file.write_text("a file of the user")
    with caplog.at_level(logging.WARNING):
        fit(run)
    assert "exists, and is not a report" in caplog.text
    assert run.report_file.read_text() == "a file of the user"


def test_a_signal_ends_the_report_and_not_the_process(run: RunDir) -> None:
    run.validation_folder.mkdir()
    # Reading it waits for a writer that does not come.
    os.mkfifo(run.validation_folder / "validation.jsonl")
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    is_done = threading.Event()

    def send() -> None:
        while not is_done.wait(0.2):
            os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        fit(run)
    finally:
        is_done.set()
        sender.join()
        signal.signal(signal.SIGTERM, before)
    assert not run.report_file.exists()


def test_a_report_in_which_the_process_was_killed_is_written_at_the_next_start(run: RunDir) -> None:
    left = run.path / ".tmp.report.html"
    left.write_text("<html>")
    fit(run, None)
    assert "train/grad_norm" in run.report_file.read_text()
    assert not left.exists()
