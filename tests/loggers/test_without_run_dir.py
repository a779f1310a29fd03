"""Loggers of a trainer without a run directory: a resume drops the records of steps that it makes again, and those of
other trainings in the same file stay."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trainer_cli import (
    MLP,
    Callback,
    CheckpointerCallback,
    CsvLogger,
    Digits,
    JsonlLogger,
    Logger,
    MediaLogger,
    TensorBoardLogger,
    Trainer,
    TrainingLoop,
)


class _FailedError(Exception):
    pass


class _FailAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_step_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.progress.step == self.step:
            raise _FailedError


def _jsonl_losses(folder: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (folder / "log").read_text().splitlines()]
    return [(line["step"], line["train/loss"]) for line in lines]


def _csv_losses(folder: Path) -> list[tuple[int, float]]:
    with open(folder / "log", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["metric"] == "train/loss"]
    return [(int(row["step"]), float(row["value"])) for row in rows]


def _tensorboard_losses(folder: Path) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder / "log"), size_guidance={"scalars": 0}).Reload()
    return [(event.step, event.value) for event in events.Scalars("train/loss")]


LOGGERS: dict[str, tuple[Callable[[str], Logger], Callable[[Path], list[tuple[int, float]]]]] = {
    "jsonl": (JsonlLogger, _jsonl_losses),
    "csv": (CsvLogger, _csv_losses),
    "tensorboard": (TensorBoardLogger, _tensorboard_losses),
}


@pytest.fixture(params=LOGGERS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def _make(
    loggers: list[Logger], checkpoints: str, steps: int = 20, fails_at: int | None = None, *callbacks: Callback
) -> Trainer:
    return Trainer(
        model=MLP,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-2),
        loop=TrainingLoop(max_duration=steps, log_interval=2),
        checkpoint=CheckpointerCallback(checkpoints, save_interval=6),
        callbacks=[*callbacks, *([] if fails_at is None else [_FailAt(fails_at)])],
        loggers=loggers,
        seed=0,
    )


def _make_trainer(
    kind: str, checkpoints: str, steps: int = 20, fails_at: int | None = None, logs: bool = True
) -> Trainer:
    return _make([LOGGERS[kind][0]("log")] if logs else [], checkpoints, steps, fails_at)


def _train(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *fails_at: int) -> list[tuple[int, float]]:
    """Train in an empty folder, and return what is logged."""
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    for step in fails_at:
        with pytest.raises(_FailedError):
            _make_trainer(kind, "checkpoints", fails_at=step).fit(Digits().train)
    _make_trainer(kind, "checkpoints").fit(Digits().train)
    return LOGGERS[kind][1](folder)


@pytest.fixture(scope="module")
def wholes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[int, float]]]:
    """Kind -> what a training that does not fail logs."""
    logged = {}
    for kind in LOGGERS:
        with pytest.MonkeyPatch.context() as patches:
            logged[kind] = _train(kind, tmp_path_factory.mktemp("whole"), patches)
    return logged


@pytest.mark.parametrize("fails_at", [(5,), (11,), (12,), (17,), (5, 11), (11, 17), (17, 17)], ids=str)
def test_no_step_is_logged_twice(
    kind: str,
    fails_at: tuple[int, ...],
    wholes: dict[str, list[tuple[int, float]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = wholes[kind]
    assert [step for step, _ in whole] == [*range(2, 21, 2)]
    # A try without a checkpoint after step 0 is begun anew. Where no event was written at step 0, nothing tells its
    # events from those of others.
    tries = whole[:2] if kind == "tensorboard" and fails_at[0] == 5 else []
    assert _train(kind, tmp_path / "parts", monkeypatch, *fails_at) == tries + whole


@pytest.mark.parametrize("kind", ["jsonl", "csv"], indirect=True)
@pytest.mark.parametrize("fails_at", [(), (5,), (11,), (17, 17)], ids=str)
def test_records_of_another_training_in_the_file_stay(
    kind: str, fails_at: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _make_trainer(kind, "others", steps=30).fit(Digits().train)
    before = LOGGERS[kind][1](tmp_path)
    assert [step for step, _ in before] == [*range(2, 31, 2)]
    assert _train(kind, tmp_path, monkeypatch, *fails_at) == before + before[:10]


def _fail(kind: str, checkpoints: str, step: int) -> None:
    with pytest.raises(_FailedError):
        _make_trainer(kind, checkpoints, fails_at=step).fit(Digits().train)


@pytest.mark.parametrize("kind", ["jsonl", "csv"], indirect=True)
def test_records_that_another_training_has_appended_stay(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _fail(kind, "checkpoints", 11)
    _make_trainer(kind, "others", steps=30).fit(Digits().train)
    _make_trainer(kind, "checkpoints").fit(Digits().train)
    # The step after the checkpoint is made again; what is after it in the file is not of this training.
    assert [step for step, _ in LOGGERS[kind][1](tmp_path)] == [2, 4, 6, *range(2, 31, 2), *range(8, 21, 2)]
    _fail(kind, "third", 9)
    _make_trainer(kind, "third").fit(Digits().train)
    assert [step for step, _ in LOGGERS[kind][1](tmp_path)][-10:] == [*range(2, 21, 2)]


@pytest.mark.parametrize("kind", ["jsonl", "csv"], indirect=True)
def test_records_stay_that_another_training_has_logged_between_two_fits_of_one(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = _make_trainer(kind, "checkpoints", steps=10)
    trainer.fit(Digits().train)
    _make_trainer(kind, "others", steps=30).fit(Digits().train)
    trainer.loop = TrainingLoop(max_duration=20, log_interval=2)
    trainer.fit(Digits().train)
    assert [step for step, _ in LOGGERS[kind][1](tmp_path)] == [*range(2, 11, 2), *range(2, 31, 2), *range(12, 21, 2)]


def test_nothing_is_dropped_by_a_checkpoint_that_says_nothing_of_the_file(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _make_trainer(kind, "checkpoints", steps=12, logs=False).fit(Digits().train)
    _make_trainer(kind, "others", steps=30).fit(Digits().train)
    before = {file: file.read_bytes() for file in tmp_path.rglob("log*") if file.is_file()}
    _make_trainer(kind, "checkpoints").fit(Digits().train)
    for file, content in before.items():
        assert file.read_bytes().startswith(content)


def test_images_of_another_training_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    class Draw(Callback):
        def on_train_step_end(self, trainer: Trainer, *_: Any) -> None:
            trainer.log_image("noise", torch.zeros(4, 4))

    def make(checkpoints: str, steps: int, fails_at: int | None = None) -> Trainer:
        return _make([MediaLogger()], checkpoints, steps, fails_at, Draw())

    with pytest.raises(_FailedError):
        make("checkpoints", 20, fails_at=9).fit(Digits().train)
    make("others", 30).fit(Digits().train)
    images = {file.name for file in tmp_path.rglob("*.png")}
    make("checkpoints", 12).fit(Digits().train)
    assert images <= {file.name for file in tmp_path.rglob("*.png")}


def test_a_second_fit_of_a_trainer_keeps_all_records(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer = _make_trainer(kind, "checkpoints", steps=10)
    trainer.fit(Digits().train)
    trainer.loop = TrainingLoop(max_duration=20, log_interval=2)
    trainer.fit(Digits().train)
    assert [step for step, _ in LOGGERS[kind][1](tmp_path)] == [*range(2, 21, 2)]


@pytest.mark.parametrize("kind", ["jsonl", "csv"], indirect=True)
def test_a_torn_line_of_another_training_spoils_no_record(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torn = b'{"step": 20, "ep' if kind == "jsonl" else b"step,epoch,time,metric,value\n20,1.0,17"
    (tmp_path / "log").write_bytes(torn)
    _make_trainer(kind, "checkpoints").fit(Digits().train)
    first, _, rest = (tmp_path / "log").read_bytes().partition(torn + b"\n")
    assert first == b""
    assert rest.startswith(b'{"step": 2,' if kind == "jsonl" else b"2,")


class _OwnLogger(Logger):
    """Has no way to tell trainings apart."""

    def __init__(self) -> None:
        self.calls: list[object] = []

    def rewind(self, run_dir: Path, step: int) -> None:
        self.calls.append((str(run_dir), step))

    def log(self, record: Any) -> None:
        self.calls.append(record.step)


def test_a_logger_of_the_users_is_rewound_by_a_resume_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    logger = _OwnLogger()

    with pytest.raises(_FailedError):
        _make([logger], "checkpoints", 10, fails_at=9).fit(Digits().train)
    _make([logger], "checkpoints", 10).fit(Digits().train)
    assert logger.calls == [2, 4, 6, 8, (".", 6), 8, 10]
