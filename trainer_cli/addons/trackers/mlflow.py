"""MLflow: all attempts of a run are one run of the service. Needs the extra `mlflow`."""

from __future__ import annotations

import logging
import os
import re
from posixpath import normpath
from typing import Any
from zlib import crc32

from trainer_cli.addons.trackers.media import without_channel
from trainer_cli.addons.trackers.service_id import read_id, save_id
from trainer_cli.loggers import Logger, Record, RunFacts, import_extra
from trainer_cli.steps import RunStatus

log = logging.getLogger(__name__)

_ILLEGAL = re.compile(r"[^\w.\- /]")
_LONGEST_NAME = 250
_RETRIES = "2"
"""Retries of a request that fails at once, in a few seconds. MLflow's own 7 would stop the training for four minutes,
and the records are kept and sent later anyway."""
_TIMEOUT_S = "20"
"""Limit of a request that is not answered. MLflow's own is 120."""
_MOST_PARAMS, _MOST_METRICS = 100, 1000
"""Limits of one request."""
_STATUSES = {
    RunStatus.finished: "FINISHED",
    # To run at a later time. KILLED looks as FAILED does.
    RunStatus.stopped: "SCHEDULED",
    RunStatus.failed: "FAILED",
    RunStatus.interrupted: "KILLED",
}


class LegalNames:
    """Maps names to legal names of MLflow: letters, digits, `_ - . /` and spaces, in the form of a relative path."""

    def __init__(self) -> None:
        self._sent_as: dict[str, str] = {}

    def __call__(self, name: str) -> str:
        """The name to send: other characters are replaced by `_`, and a name that then collides gets a digest."""
        sent = self._sent_as.get(name)
        if sent is None:
            # A digest only in a collision, so that the names of most metrics stay as they are.
            sent = legal_name(name)
            if sent in self._sent_as.values():
                sent = _with_digest(sent, name)
            self._sent_as[name] = sent
            if sent != name:
                log.warning("MLflow does not accept the name %r: it is sent as %r", name, sent)
        return sent


def legal_name(name: str) -> str:
    """The name itself, or a similar one that MLflow accepts."""
    if len(name) > _LONGEST_NAME:
        name = _with_digest(name, name)
    name = _ILLEGAL.sub("_", name)
    # MLflow refuses names that are no plain relative path: `a//b`, `/a`, `a/`, `../a`, `.` and an empty one.
    folders = [folder if folder.strip(".") else "_" * max(len(folder), 1) for folder in name.split("/")]
    return re.sub(r"^\.\.", "__", normpath("/".join(folders)))


def _with_digest(name: str, source: str) -> str:
    return f"{name[: _LONGEST_NAME - 20]}_{crc32(source.encode()):08x}"


class MlflowLogger(Logger):
    """Sends metrics to MLflow, the hyperparameters as its params, and texts, images and tables as artifacts; histograms
    are left out.

    Its run's id is kept in `mlflow.json` of the run directory, so that a resume continues that run. Records of steps
    after the resumed checkpoint are not sent again if the resume is exact.

    Args:
        tracking_uri: a server, or `sqlite:///FILE`; None: the value of MLFLOW_TRACKING_URI.
        experiment: name of the experiment, which is created if it does not exist.
        tags: tags of the run.
    """

    writes = ("tracking_uri",)

    needs_package = "mlflow"
    is_remote = True

    def __init__(
        self, tracking_uri: str | None = None, experiment: str = "trainer-cli", tags: dict[str, str] | None = None
    ) -> None:
        self.tracking_uri, self.experiment, self.tags = tracking_uri, experiment, tags
        self._client: Any = None
        self._run_id = ""
        self._status: str | None = None
        self._entities: Any = None
        self._names = LegalNames()

    def start(self, facts: RunFacts) -> None:
        """Continue the run of an earlier attempt, or create one with the hyperparameters as its params."""
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", _RETRIES)
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", _TIMEOUT_S)
        mlflow, self._entities = import_extra("mlflow", "mlflow"), import_extra("mlflow.entities", "mlflow")
        client = mlflow.MlflowClient(tracking_uri=self.tracking_uri)
        file = None if facts.run_dir is None else facts.run_dir / "mlflow.json"
        run_id = read_id(file)
        if run_id is None:
            experiment = client.get_experiment_by_name(self.experiment)
            if experiment is None:
                experiment_id = client.create_experiment(self.experiment)
            else:
                experiment_id = experiment.experiment_id
            run_id = client.create_run(experiment_id, run_name=facts.title, tags=self.tags).info.run_id
            # Before the params: if one is refused, the next attempt must not create another run.
            save_id(file, run_id)
            # Only for a new run: MLflow refuses to change a param, as a resume with another setting would.
            params = [self._entities.Param(self._names(key), str(value)[:500]) for key, value in facts.hparams.items()]
            for start in range(0, len(params), _MOST_PARAMS):
                client.log_batch(run_id, params=params[start : start + _MOST_PARAMS])
        else:
            client.update_run(run_id, status="RUNNING")
        self._client, self._run_id, self._status = client, run_id, None

    def log(self, record: Record) -> None:
        """Send metrics in one request, and each text, image and table in one of its own."""
        if self._client is None:
            return
        client, run_id, time_ms = self._client, self._run_id, round(record.time * 1000)
        values = {**record.metrics, "epoch": record.epoch} if record.metrics else {}
        metrics = [
            self._entities.Metric(self._names(name), value, time_ms, record.step) for name, value in values.items()
        ]
        for start in range(0, len(metrics), _MOST_METRICS):
            client.log_batch(run_id, metrics=metrics[start : start + _MOST_METRICS])
        for name, text in record.texts.items():
            client.log_text(run_id, text, f"{self._names(name)}/step{record.step}.txt")
        for name, image in record.images.items():
            client.log_image(run_id, without_channel(image), f"{self._names(name)}/step{record.step}.png")
        for name, table in record.tables.items():
            rows = {"columns": list(table.columns), "rows": [list(row) for row in table.rows]}
            client.log_dict(run_id, rows, f"{self._names(name)}/step{record.step}.json")

    def last_step(self) -> int | None:
        """The newest step that the service has; -1 if it has none."""
        # The value of each metric at its greatest step: the history of a long run would be read as a whole. `epoch` is
        # sent with all metrics of a record. Only the message of the service has the step.
        newest = self._client.get_run(self._run_id).data.to_proto().metrics
        return max((int(metric.step) for metric in newest if metric.key == "epoch"), default=-1)

    def note_end(self, status: RunStatus) -> None:
        self._status = _STATUSES[status]

    def close(self) -> None:
        client, self._client = self._client, None
        if client is not None and self._status is not None:
            client.set_terminated(self._run_id, self._status)
