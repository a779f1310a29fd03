"""W&B, MLflow and Trackio by their own libraries, without a network: one run there for two attempts here.

Each is tested where its extra is installed: pip install "trainer-cli[wandb,mlflow,trackio]".
"""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer_cli.addons.trackers.mlflow import LegalNames, MlflowLogger, legal_name
from trainer_cli.addons.trackers.service_id import read_id
from trainer_cli.addons.trackers.trackio import TrackioLogger
from trainer_cli.addons.trackers.wandb import WandbLogger, shorten_name
from trainer_cli.errors import UserError
from trainer_cli.loggers.base import Logger, Record, RunFacts, Table, import_extra
from trainer_cli.steps.run_status import RunStatus

MEDIA: dict[str, Any] = {
    "texts": {"samples/0": "<b>"},
    "images": {"val/grey": np.zeros((4, 4, 1), dtype=np.uint8), "val/rgb": np.zeros((4, 4, 3), dtype=np.uint8)},
    "histograms": {"weights": np.arange(5.0), "empty": np.zeros(0)},
    "tables": {"worst": Table(("index", "text"), ((3, "x"), (5, "y")))},
}


def _two_attempts(folder: Path, make: Callable[[], Logger], *, knows: bool = True) -> None:
    for steps, last in (((1, 2), -1 if knows else None), ((2, 3), 2 if knows else None)):
        logger = make()
        logger.rewind(folder, steps[0] - 1)
        logger.start(RunFacts(run_dir=folder, name="mine", hparams={"optimizer.lr": 0.1}))
        assert logger.last_step() == last
        for step in steps:
            media = MEDIA if step == 3 else {}
            logger.log(Record(step, step / 2, 1e9 + step, {"train/loss": 1 / step, "odd": float("nan")}, **media))
        logger.flush(durable=True)
        logger.note_end(RunStatus.finished)
        logger.close()
        logger.close()


def test_the_id_of_a_run_is_none_where_none_was_saved(tmp_path: Path) -> None:
    assert read_id(None) is None
    assert read_id(tmp_path / "none.json") is None
    (tmp_path / "torn.json").write_text("{")
    assert read_id(tmp_path / "torn.json") is None


@pytest.mark.parametrize(
    ("folder", "title"),
    [(None, "mine"), ("runs/mine", "mine"), ("runs/mine/sweep/optimizer.lr=0.1", "mine optimizer.lr=0.1")],
)
def test_a_run_of_a_sweep_is_named_by_its_swept_values_too(folder: str | None, title: str) -> None:
    assert RunFacts(run_dir=None if folder is None else Path(folder), name="mine").title == title


def test_an_extra_that_is_not_installed_is_named() -> None:
    with pytest.raises(UserError, match=r"needs the package no_such.*pip install \"trainer-cli\[wandb\]"):
        import_extra("no_such.part", "wandb")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_wandb_continues_one_run_in_its_offline_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed: pip install 'trainer-cli[wandb]'")
    monkeypatch.setenv("WANDB_SILENT", "true")
    _two_attempts(tmp_path, lambda: WandbLogger(mode="offline"), knows=False)
    # Its service writes the files, and `finish` does not wait for them. A process waits at its end.
    wandb.teardown()
    run_id = json.loads((tmp_path / "wandb.json").read_text())["run_id"]
    files = sorted((tmp_path / "wandb").glob(f"offline-run-*-{run_id}/run-{run_id}.wandb"))
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == len(files) == 2
    content = b"".join(file.read_bytes() for file in files)
    for name in (b"train/loss", b"val/grey", b"weights", b"worst", b"optimizer.lr"):
        assert name in content
    assert len(list((tmp_path / "wandb").glob("offline-run-*/files/media/html/samples/*.html"))) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_wandb_keeps_its_newest_step_beside_an_evaluation_of_an_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed: pip install 'trainer-cli[wandb]'")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(mode="offline")
    # After a fit of 20 steps: an evaluation of the checkpoint of step 10.
    logger.start(RunFacts(run_dir=tmp_path, start_step=20))
    for step in (20, 10):
        logger.log(Record(step, 1.0, 1e9, {"val/loss": 1 / step}))
    assert logger._run.summary["step"] == 20
    logger.close()
    wandb.teardown()


def test_a_name_that_wandb_refuses_loses_its_middle() -> None:
    names = [shorten_name("a" * length + "z") for length in (1, 127, 128, 300)]
    assert [len(name) for name in names] == [2, 128, 128, 128]
    assert names[2:] == ["a" * 64 + "…" + "a" * 62 + "z"] * 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mlflow_continues_one_run_in_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed: pip install 'trainer-cli[mlflow]'")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "store").as_uri()
    _two_attempts(tmp_path, lambda: MlflowLogger(tracking_uri=uri, tags={"team": "a"}))
    client = mlflow.MlflowClient(tracking_uri=uri)
    (experiment,) = (one for one in client.search_experiments() if one.name == "trainer-cli")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_id == json.loads((tmp_path / "mlflow.json").read_text())["run_id"]
    assert (run.info.status, run.data.params, run.data.tags["team"]) == ("FINISHED", {"optimizer.lr": "0.1"}, "a")
    found = [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, "train/loss")]
    assert found == [(1, 1.0), (2, 0.5), (2, 0.5), (3, pytest.approx(1 / 3))]
    assert {one.path for one in client.list_artifacts(run.info.run_id)} == {"samples", "val", "worst"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_trackio_continues_one_run_in_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))
    pytest.importorskip("trackio", reason="trackio is not installed: pip install 'trainer-cli[trackio]'")
    from trackio.sqlite_storage import SQLiteStorage

    _two_attempts(tmp_path, TrackioLogger)
    name = json.loads((tmp_path / "trackio.json").read_text())["run_id"]
    assert SQLiteStorage.get_runs("trainer-cli") == [name]
    assert SQLiteStorage.get_run_config("trainer-cli", name)["optimizer.lr"] == 0.1
    logs = SQLiteStorage.get_logs("trainer-cli", name)
    found = [(one["step"], one["train/loss"]) for one in logs]
    assert found == [(1, 1.0), (2, 0.5), (2, 0.5), (3, pytest.approx(1 / 3))]
    assert {"samples/0", "val/grey", "val/rgb", "weights", "worst"} <= set(logs[-1])
    assert len(list((tmp_path / "store").rglob("*.png"))) == 2
    assert capsys.readouterr().out == ""


class FakeClient:
    """A run of W&B and a client of MLflow, which record how they are told of an end."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def mark_preempting(self) -> None:
        self.told.append("preempting")

    def finish(self, exit_code: int | None = None) -> None:
        self.told.append(exit_code)

    def set_terminated(self, run_id: str, status: str) -> None:
        self.told.append(status)


ENDS: dict[RunStatus, tuple[list[Any], str]] = {
    RunStatus.finished: ([0], "FINISHED"),
    RunStatus.stopped: (["preempting", 75], "SCHEDULED"),
    RunStatus.failed: ([1], "FAILED"),
    RunStatus.interrupted: ([255], "KILLED"),
}
"""What W&B and MLflow are told for each end."""


@pytest.mark.parametrize("status", ENDS)
def test_a_service_is_told_once_how_the_run_ended(status: RunStatus) -> None:
    wandb_run, client = FakeClient(), FakeClient()
    wandb, mlflow = WandbLogger(), MlflowLogger()
    wandb._run, mlflow._client = wandb_run, client
    for logger in (wandb, mlflow):
        logger.note_end(status)
        logger.close()
        logger.close()
    assert (wandb_run.told, client.told) == (ENDS[status][0], [ENDS[status][1]])


def test_a_run_of_mlflow_that_has_not_ended_stays_running() -> None:
    mlflow = MlflowLogger()
    mlflow._client = client = FakeClient()
    mlflow.close()
    assert client.told == []


LEGAL = ("train/loss", "acc", "a b-c_d.e/f", "épreuve", "a..b", "a" * 250)
ILLEGAL = {
    "acc@1": "acc_1",
    "f1 (macro) %": "f1 _macro_ _",
    "val[hard]/loss": "val_hard_/loss",
    "param_groups.*bias.weight_decay": "param_groups._bias.weight_decay",
    "a//b": "a/_/b",
    "/a": "_/a",
    "c/": "c/_",
    "../a": "__/a",
    "..a": "__a",
    ".": "_",
    "": "_",
    "a\nb": "a_b",
    "x" * 300: "x" * 230 + "_1b432d13",
}


@pytest.mark.parametrize("name", [*LEGAL, *ILLEGAL])
def test_names_for_mlflow_are_legal_and_legal_ones_stay(name: str) -> None:
    sent = legal_name(name)
    assert sent == ILLEGAL.get(name, name)
    assert re.fullmatch(r"[/\w.\- ]{1,250}", sent)
    assert posixpath.normpath(sent) == sent
    assert not sent.startswith("/")
    assert legal_name(sent) == sent


def test_each_name_that_mlflow_does_not_take_is_told_once_and_two_never_become_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    names = LegalNames()
    sent = [names(name) for name in ("acc@1", "acc#1", "loss", "acc@1", "acc_1")]
    assert (sent[0], sent[2], sent[3]) == ("acc_1", "loss", "acc_1")
    assert len({sent[0], sent[1], sent[4]}) == 3
    assert len(caplog.messages) == 3
    assert caplog.messages[0] == "MLflow does not accept the name 'acc@1': it is sent as 'acc_1'"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mlflow_takes_every_name_as_it_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed: pip install 'trainer-cli[mlflow]'")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "store").as_uri()
    logger = MlflowLogger(tracking_uri=uri)
    # In its files `_` cannot be a name beside `_/a`.
    names = dict.fromkeys((*LEGAL, *(name for name in ILLEGAL if name.strip("."))), 1.0)
    logger.start(RunFacts(run_dir=tmp_path, hparams=names))
    logger.log(Record(1, 0.1, 1e9, names, texts={"a//b@": "x"}))
    logger.close()
    client = mlflow.MlflowClient(tracking_uri=uri)
    run = client.get_run(json.loads((tmp_path / "mlflow.json").read_text())["run_id"])
    assert len(run.data.metrics) == len(names) + 1
    assert len(run.data.params) == len(names)
