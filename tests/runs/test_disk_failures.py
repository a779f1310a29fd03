"""What ends a run whose disk is full, or whose directory is gone, and with which exit code."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from tiny import loader, trainer

from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.callbacks.state_saver import RunIdentity
from trainer_cli.errors import ExitCode, NoSpaceError, SaveError
from trainer_cli.running.disk_failures import explain_disk_failure

HERE = Path()


def disk_error(number: int) -> OSError:
    return OSError(number, os.strerror(number), "run/metrics.jsonl")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A trainer whose second attempt has saved steps 2 and 4."""
    identity = RunIdentity(run_id="ours", attempt=2)
    checkpoint = CheckpointerCallback(tmp_path_factory.mktemp("checkpoints"), identity=identity, save_interval=2)
    made = trainer(settings={"max_duration": 4}, checkpoint=checkpoint)
    made.fit(loader(10, 4))
    return made


@pytest.mark.parametrize(
    ("error", "what", "help"),
    [
        (disk_error(errno.ENOSPC), "No space left on device", "Free some space on the disk."),
        (disk_error(errno.EDQUOT), "Disk quota exceeded", "Free some space, or have the quota raised."),
        (
            NoSpaceError("it was not begun", where="run/metrics.jsonl", cure="Free some."),
            "it was not begun",
            "Free some.",
        ),
    ],
    ids=["ENOSPC", "EDQUOT", "checkpoint"],
)
def test_a_full_disk_stops_a_run_that_can_be_resumed(trained: Any, error: Exception, what: str, help: str) -> None:
    stop = explain_disk_failure(error, HERE, trained)
    assert stop is not None
    assert (stop.exit_code, stop.what, stop.where) == (ExitCode.STOPPED_EARLY, what, "run/metrics.jsonl")
    assert str(stop.cure).endswith(f"{help} Then run the same command again to resume at step 4.")


@pytest.mark.parametrize(
    "error", [disk_error(errno.EIO), SaveError("failed"), RuntimeError("no space")], ids=["EIO", "save", "other"]
)
def test_no_other_error_is_a_stop(trained: Any, error: Exception) -> None:
    assert explain_disk_failure(error, HERE, trained) is None


@pytest.mark.parametrize(
    "error", [disk_error(errno.ENOENT), SaveError("failed"), disk_error(errno.ENOSPC)], ids=["ENOENT", "save", "ENOSPC"]
)
def test_a_run_directory_that_is_gone_is_the_reason(trained: Any, tmp_path: Path, error: Exception) -> None:
    failure = explain_disk_failure(error, tmp_path / "gone", trained)
    assert failure is not None
    assert (failure.exit_code, failure.where) == (ExitCode.FAILED, str(tmp_path / "gone"))
    assert failure.what == "the run directory is gone: it was moved or deleted during the run"
    assert explain_disk_failure(RuntimeError("mine"), tmp_path / "gone", trained) is None


def test_an_attempt_that_committed_nothing_has_failed(
    trained: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start on a disk that is still full makes no progress, and ends with 1."""
    with monkeypatch.context() as patch:
        patch.setattr(trained.checkpoint, "identity", RunIdentity(run_id="ours", attempt=3))
        assert explain_disk_failure(disk_error(errno.ENOSPC), HERE, trained) is None
    without = trainer(settings={"max_duration": 4}, checkpoint=CheckpointerCallback(tmp_path / "none"))
    assert explain_disk_failure(disk_error(errno.ENOSPC), HERE, without) is None
    assert explain_disk_failure(disk_error(errno.ENOSPC), HERE, trainer()) is None


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EACCES])
def test_a_file_system_that_does_not_answer_is_not_a_run_directory_that_is_gone(
    trained: Any, tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(path: Path, **settings: Any) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(Path, "stat", fails)
    assert explain_disk_failure(SaveError("failed"), tmp_path, trained) is None
