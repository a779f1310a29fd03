"""W&B, MLflow and Trackio after a resume: each step once, none missing, and again only after a change of the config.

The real command with the real libraries: W&B and MLflow send to servers of the tests on 127.0.0.1, Trackio to files.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from command import Result, running, train
from serving import serving
from tracker_servers import API_KEY, MlflowServer, WandbServer

HOLD = '''
"""Waits before the record of step HOLD_AT, until `hold` is removed; once ruins the weights at step 13."""

import math
import os
import time
from pathlib import Path

import torch

from trainer_cli import Callback
from trainer_cli.terminal import format_count


class Hold(Callback):
    def on_train_batch_end(self, trainer, model, outputs, batch, batch_idx):
        if trainer.progress.step == int(os.environ.get("HOLD_AT", 0)):
            Path("held").touch()
            while Path("hold").exists():
                time.sleep(0.01)
                Path("ping").unlink(missing_ok=True)
        if trainer.progress.step == 13 and Path("break").exists():
            raise RuntimeError("broken")
        if trainer.progress.step == 13 and Path("spoil").exists():
            Path("spoil").unlink()
            next(model.parameters()).data.fill_(math.nan)

    def on_after_evaluation(self, trainer, metrics):
        if "MEDIA" in os.environ:
            trainer.log_text("val/text", "<b>")
            trainer.log_image("val/image", torch.zeros(4, 4))
            trainer.log_histogram("val/weights", torch.arange(5.0))
'''
FIT = (
    "fit", "+experiment=digits_mlp", "run_dir=run", "logging.console=plain", "report=false", "loop.max_duration=20",
    "loop.log_interval=1", "loop.eval_interval=4", "checkpoint.save_interval=5", "checkpoint.save_async=false",
    "checkpoint.max_checkpoints=null", "+callbacks.hold._target_=hold.Hold",
)  # fmt: skip
HELD_AT = 13
"""Checkpoints 5 and 10 are saved, and steps up to 12 are logged."""

Values = list[tuple[int, str, float]]
"""(step, name, value), sorted."""


@dataclass
class Tracker:
    """A tracker, and how to read what it has."""

    name: str
    folder: Path
    env: dict[str, Any] = field(default_factory=dict)

    def sent(self) -> Values:
        """All values that it has, each as often as it has it."""
        raise NotImplementedError

    def count_runs(self) -> int:
        raise NotImplementedError


@dataclass
class Wandb(Tracker):
    server: WandbServer = field(kw_only=True)

    def sent(self) -> Values:
        (run,) = self.server.runs.values()
        return values_of(run.records)

    def count_runs(self) -> int:
        return len(self.server.runs)

    def state(self) -> str:
        (run,) = self.server.runs.values()
        return run.state


@dataclass
class Mlflow(Tracker):
    server: MlflowServer = field(kw_only=True)

    def sent(self) -> Values:
        (metrics,) = self.server.metrics.values()
        return values_of([{"step": int(item["step"]), item["key"]: item["value"]} for item in metrics])

    def count_runs(self) -> int:
        return len(self.server.metrics)

    def state(self) -> str:
        (state,) = self.server.states.values()
        return state


class Trackio(Tracker):
    def sent(self) -> Values:
        return values_of([{"step": step, **json.loads(metrics)} for _, step, metrics in self._rows()])

    def count_runs(self) -> int:
        return len({run for run, _, _ in self._rows()})

    def _rows(self) -> list[tuple[str, int, str]]:
        rows = []
        for file in self.folder.glob("store/trainer-cli*.db"):
            # Until the first record there is no such table.
            with closing(sqlite3.connect(file)) as database, suppress(sqlite3.OperationalError):
                rows += list(database.execute("SELECT run_name, step, metrics FROM metrics ORDER BY id"))
        return rows


def values_of(records: list[dict[str, Any]]) -> Values:
    """The values that do not depend on the clock."""
    return sorted(
        (record["step"], name, float(value))
        for record in records
        for name, value in record.items()
        if name not in ("step", "time") and "per_s" not in name
    )


def logged() -> Values:
    return values_of([json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()])


@pytest.fixture
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("hold.py").write_text(HOLD)


def skip_without(package: str) -> None:
    # Not imported: Trackio reads its folder when it is, and other tests of this process set it before that.
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install 'trainer-cli[{package}]'")


@pytest.fixture(params=["wandb", "mlflow", "trackio"])
def tracker(request: pytest.FixtureRequest, tmp_path: Path, _project: None) -> Iterator[Tracker]:
    name = request.param
    skip_without(name)
    if name == "wandb":
        with serving(WandbServer()) as wandb:
            yield Wandb(name, tmp_path, wandb_env(wandb), server=wandb)
            assert wandb.unknown == []
    elif name == "mlflow":
        with serving(MlflowServer()) as mlflow:
            yield Mlflow(name, tmp_path, {"MLFLOW_TRACKING_URI": mlflow.url}, server=mlflow)
            assert mlflow.unknown == []
    else:
        yield Trackio(name, tmp_path, {"TRACKIO_DIR": str(tmp_path / "store")})


def wandb_env(server: WandbServer) -> dict[str, Any]:
    return {
        "WANDB_BASE_URL": server.url,
        "WANDB_API_KEY": API_KEY,
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_X_FILE_STREAM_TRANSMIT_INTERVAL": "0.1",
        "HOME": os.getcwd(),
    }


def run(tracker: Tracker, *overrides: str, **env: Any) -> Result:
    return train(*FIT, f"loggers={tracker.name}", *overrides, cwd=tracker.folder, **{**tracker.env, **env})


def fit(tracker: Tracker, *overrides: str, **env: Any) -> Result:
    """Train to the end."""
    result = run(tracker, *overrides, **env)
    assert result.code == 0, result.err
    return result


def kill_fit(tracker: Tracker, *overrides: str, until: int = HELD_AT - 1, **env: Any) -> None:
    """Kill a training at step HELD_AT, once the tracker has the records up to step `until`."""
    Path("hold").touch()
    arguments = (*FIT, f"loggers={tracker.name}", *overrides)
    with running(*arguments, cwd=tracker.folder, **{**tracker.env, "HOLD_AT": str(HELD_AT), **env}) as process:
        process.wait_for(Path("held").exists, "held")
        if until:
            process.wait_for(lambda: until in {step for step, _, _ in tracker.sent()}, f"at step {until}")
        process.signal(signal.SIGKILL, group=True)
        assert process.end().killed
    Path("hold").unlink()


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", [10, 5])
def test_a_tracker_has_each_step_once_after_a_kill(tracker: Tracker, checkpoint: int) -> None:
    kill_fit(tracker)
    if checkpoint == 5:
        shutil.rmtree("run/checkpoints/step10")
    result = fit(tracker)
    assert f"{tracker.name} has the records up to step 12, which are not sent again" in result.err
    assert tracker.sent() == logged()
    assert tracker.count_runs() == 1


@pytest.mark.slow
def test_a_tracker_gets_the_steps_again_after_a_change(tracker: Tracker) -> None:
    kill_fit(tracker)
    before = tracker.sent()
    # Another length is another schedule.
    result = fit(tracker, "loop.max_duration=24")
    assert f"{tracker.name} has records up to step 12 of an earlier attempt. From step 11 on" in result.err
    assert tracker.sent() == sorted([*(value for value in before if value[0] > 10), *logged()])


@pytest.mark.slow
def test_a_tracker_gets_the_steps_again_after_a_rollback(tracker: Tracker) -> None:
    Path("spoil").touch()
    result = fit(tracker, "+callbacks.finite={_target_: trainer_cli.CheckFinite, policy: roll_back}")
    assert f"{tracker.name} has records up to step 12 of an earlier attempt. From step 11 on" in result.err
    sent, kept = Counter(tracker.sent()), Counter(logged())
    assert not kept - sent
    assert {step for step, _, _ in sent - kept} == {11, 12}
    assert tracker.count_runs() == 1


@pytest.mark.slow
def test_a_tracker_that_is_added_later_gets_all_steps(tracker: Tracker) -> None:
    kill_fit(tracker, f"loggers.{tracker.name}=null", until=0)
    result = fit(tracker)
    assert f"{tracker.name} lacks 10 records up to step 10" in result.err
    assert tracker.sent() == logged()


served = pytest.mark.parametrize("tracker", ["wandb", "mlflow"], indirect=True)


@pytest.mark.slow
@served
def test_a_training_goes_on_without_its_tracker_which_gets_the_rest_later(tracker: Wandb | Mlflow) -> None:
    Path("hold").touch()
    env = {**tracker.env, "HOLD_AT": str(HELD_AT), "WANDB_FINISH_TIMEOUT": "2"}
    with running(*FIT, f"loggers={tracker.name}", cwd=tracker.folder, **env) as process:
        process.wait_for(Path("held").exists, "held")
        process.wait_for(lambda: 12 in {step for step, _, _ in tracker.sent()}, "at step 12")
        tracker.server.is_down = True
        Path("hold").unlink()
        result = process.end()
    assert result.code == 0, result.err
    assert [step for step, name, _ in logged() if name == "train/loss"] == list(range(1, 21))
    # W&B has a process of its own, which tells of it.
    assert result.err.count("mlflow cannot be written") == (tracker.name == "mlflow")
    assert max(tracker.sent())[0] == 12
    tracker.server.is_down = False
    fit(tracker, "loop.max_duration=24")
    assert tracker.sent() == logged()


@pytest.mark.slow
@served
def test_a_training_is_resumed_without_its_tracker(tracker: Wandb | Mlflow) -> None:
    kill_fit(tracker)
    tracker.server.is_down = True
    result = fit(tracker, WANDB_INIT_TIMEOUT="3")
    assert f"{tracker.name} cannot be written" in result.err
    assert f"{tracker.name} lacks 10 records, which could not be written" in result.err
    tracker.server.is_down = False
    fit(tracker, "loop.max_duration=24")
    assert tracker.sent() == logged()


@pytest.mark.slow
@served
def test_a_tracker_that_cannot_be_reached_at_the_start_is_one_message(tracker: Wandb | Mlflow) -> None:
    tracker.server.is_down = True
    result = run(tracker, WANDB_INIT_TIMEOUT="3")
    assert result.code == 1
    assert f"the logger {tracker.name} cannot be started" in result.err
    assert f"loggers.{tracker.name}=null" in result.err
    assert "Traceback" not in result.err


ENDS = {
    "error": (1, "failed", "FAILED"),
    "SIGTERM": (75, "preempted", "SCHEDULED"),
    "second Ctrl-C": (130, "killed", "KILLED"),
}
"""How a training ends -> exit code, state in W&B and in MLflow."""


@pytest.mark.slow
@served
@pytest.mark.parametrize("end", ENDS)
def test_a_tracker_shows_how_the_run_ended_and_that_it_goes_on(tracker: Wandb | Mlflow, end: str) -> None:
    code, *states = ENDS[end]
    Path("hold").touch()
    env = {**tracker.env, "HOLD_AT": str(HELD_AT)}
    with running(*FIT, f"loggers={tracker.name}", cwd=tracker.folder, **env) as process:
        process.wait_for(Path("held").exists, "held")
        if end == "error":
            Path("break").touch()
        else:
            process.signal(signal.SIGTERM if end == "SIGTERM" else signal.SIGINT)
        if end == "second Ctrl-C":
            process.notice()
            process.signal(signal.SIGINT)
        Path("hold").unlink()
        result = process.end()
    assert result.code == code, result.err
    assert tracker.state() == states[tracker.name == "mlflow"]
    Path("break").unlink(missing_ok=True)
    fit(tracker)
    assert tracker.state() in ("finished", "FINISHED")
    assert tracker.sent() == logged()
    if isinstance(tracker, Mlflow):
        # No history is asked for, whatever its length: the answer to this has the newest value of each metric.
        assert tracker.server.asked.count("runs/get") == 5, "two of MLflow's own in each attempt, and one of the resume"
        assert "metrics/get-history" not in tracker.server.asked


@pytest.fixture
def wandb(tmp_path: Path, _project: None) -> Iterator[Wandb]:
    skip_without("wandb")
    with serving(WandbServer()) as server:
        yield Wandb("wandb", tmp_path, wandb_env(server), server=server)


@pytest.mark.slow
def test_wandb_gets_the_records_that_a_killed_process_had_not_sent(wandb: Wandb) -> None:
    # Its service sends at the start, and then after this pause.
    kill_fit(wandb, until=0, WANDB_X_FILE_STREAM_TRANSMIT_INTERVAL="1000")
    received = {step for step, _, _ in wandb.sent()}
    assert max(received, default=0) < 10
    result = fit(wandb)
    assert re.search(rf"wandb lacks {10 - max(received, default=0)} records? up to step 10", result.err)
    assert wandb.sent() == logged()


@pytest.mark.slow
def test_wandb_gets_texts_images_and_histograms(wandb: Wandb) -> None:
    fit(wandb, MEDIA="1")
    (stored,) = wandb.server.runs.values()
    # Evaluations at steps 4 to 20.
    assert sum(name.startswith("media/html/val/text_") for name in stored.uploads) == 5
    assert sum(name.startswith("media/images/val/image_") for name in stored.uploads) == 5
    assert [record["val/weights"]["_type"] for record in stored.records if "val/weights" in record] == ["histogram"] * 5


@pytest.mark.slow
def test_a_wrong_key_of_wandb_is_one_message(wandb: Wandb) -> None:
    result = run(wandb, WANDB_API_KEY="w" * 40)
    assert result.code == 1
    assert "the logger wandb cannot be started" in result.err
    assert "Traceback" not in result.err


@pytest.mark.slow
def test_wandb_that_is_disabled_sends_nothing(wandb: Wandb) -> None:
    fit(wandb, "loggers.wandb.mode=disabled")
    assert wandb.server.runs == {}


@pytest.mark.slow
def test_of_two_processes_only_one_sends(tracker: Tracker) -> None:
    fit(tracker, "parallel.strategy=ddp", "parallel.processes_per_node=2")
    assert tracker.count_runs() == 1
    assert tracker.sent() == logged()


@pytest.mark.slow
def test_each_run_of_a_sweep_is_a_run_of_the_tracker(tracker: Tracker) -> None:
    arguments = [argument for argument in FIT if not argument.startswith("run_dir=")]
    command = [*arguments, f"loggers={tracker.name}", "-m", "optimizer.lr=0.01,0.001"]
    result = train(*command, cwd=tracker.folder, **tracker.env)
    assert result.code == 0, result.err
    assert tracker.count_runs() == 2
    if isinstance(tracker, Wandb):
        names = {stored.display_name for stored in tracker.server.runs.values()}
        assert names == {"digits_mlp optimizer.lr=0.01", "digits_mlp optimizer.lr=0.001"}
