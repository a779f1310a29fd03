"""Errors cross a process as they are."""

from __future__ import annotations

import copy
import pickle

import pytest

from trainer_cli.data.workers import WorkerError
from trainer_cli.errors import (
    Code,
    ConfigError,
    ConfigErrors,
    FullDiskError,
    MissingStateError,
    NoCheckpointError,
    NoSpaceError,
    StoreAwayError,
    TrainError,
    UserError,
)
from trainer_cli.manifest import DamagedCheckpoint, UnsavableState

MISTAKE = ConfigError("x is 1", location="x", source="a.yaml:1", code=Code.no_effect, hint="Leave it out.")
ERRORS = [
    MISTAKE,
    ConfigErrors([MISTAKE, ConfigError("y is 2")]),
    StoreAwayError("the store does not answer", where="s3://a"),
    NoCheckpointError("there is none", where="runs/a", cure="Train first."),
    *(
        kind("a message", where="runs/a", cure="Do this.")
        for kind in (
            TrainError, UserError, FullDiskError, NoSpaceError, MissingStateError, DamagedCheckpoint, WorkerError,
            UnsavableState,
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("copied", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy], ids=["pickle", "copy"])
def test_an_error_is_the_same_in_another_process(error: TrainError, copied: type) -> None:
    other = copied(error)
    assert type(other) is type(error)
    assert (str(other), other.args, other.exit_code) == (str(error), error.args, error.exit_code)
    assert other.__dict__.keys() == error.__dict__.keys()
    if isinstance(error, OSError):
        assert isinstance(other, OSError)
        assert (other.errno, other.strerror, other.filename) == (error.errno, error.strerror, error.filename)
