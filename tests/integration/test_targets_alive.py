"""What files cannot tell of a target is reported by the live one, still before anything is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import make_project, train
from printed import message

HIDDEN = """
import torch

from trainer_cli.loggers.base import Logger
from trainer_cli.trainer.hooks import Callback


def same(thing):
    return thing


@same
class Model(torch.nn.Linear):
    def __init__(self, width: int = 1): ...


@same
class Optimizer(torch.optim.SGD):
    def __init__(self, params, rate: float = 0.1):
        super().__init__(params, lr=rate)


@same
class Schedule:
    def __init__(self, optimizer, total_steps: int, warmup: int = 0): ...


@same
class Note(Callback):
    def __init__(self, text: str = ""): ...


@same
class Log(Logger):
    def __init__(self, text: str = ""): ...
"""


FILES = {
    "mine/hidden.py": HIDDEN,
    "configs/optimizer/hidden.yaml": "_target_: mine.hidden.Optimizer\nrate: 0.1\n",
    "configs/scheduler/hidden.yaml": "_target_: mine.hidden.Schedule\nwarmup: 1ep\n",
    "configs/scheduler/two.yaml": "one:\n  _target_: mine.hidden.Schedule\ntwo: null\n",
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose parts are hidden behind a decorator that nobody knows."""
    return make_project(tmp_path_factory.mktemp("project"), **FILES)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["model._target_=mine.hidden.Model", "model.width=x"], "model.width is 'x', but it must be a whole number"),
        (["model._target_=mine.hidden.Model", "+model.widht=1"], "Model takes no argument 'widht' (model.widht"),
        (["optimizer=hidden", "+optimizer.rat=1"], "Did you mean 'rate'?"),
        (["optimizer=hidden", "optimizer.rate=fast"], "optimizer.rate is 'fast', but it must be a number"),
        (["scheduler=hidden", "scheduler.warmup=1.5"], "scheduler.warmup is 1.5, but it must be a whole number"),
        (["scheduler=hidden", "+scheduler.warmpu=1ep"], "Did you mean 'warmup'?"),
        (["scheduler=two", "+scheduler.one.optimizer=1"], "gets its 'optimizer' from train (scheduler.one.optimizer"),
        (
            [
                "scheduler=hidden",
                "~scheduler.warmup",
                "+scheduler.interval=step",
                "scheduler._target_=torch.optim.lr_scheduler.ReduceLROnPlateau",
            ],
            "takes the metric val/loss, so its interval is evaluation, not step",
        ),
        (
            ["+callbacks.note={_target_: mine.hidden.Note, text: 3}"],
            "callbacks.note.text is 3, but it must be a string",
        ),
        (["+loggers.log={_target_: mine.hidden.Log, txt: a}"], "Log takes no argument 'txt' (loggers.log.txt"),
        (["+loggers.log={_target_: mine.hidden.Gone}"], "module mine.hidden has no 'Gone' (loggers.log._target_"),
    ],
)
def test_a_live_mistake_is_reported_before_anything_is_written(
    overrides: list[str], said: str, project: Path, tmp_path: Path
) -> None:
    done = train("fit", "experiment=mine", f"run_dir={tmp_path}/run", *overrides, cwd=project)
    assert done.code == 2, done.err
    assert said in message(done.err)
    assert ", command line: " in message(done.err) or "command line)" in message(done.err)
    assert "Traceback" not in done.err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("target", ["os.system", "torch.hub.load", "pathlib.Path.touch", "mine.parts.torch.save"])
def test_a_run_directory_that_names_something_else_runs_nothing(target: str, project: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train("fit", "experiment=mine", f"run_dir={run}", "loop.max_duration=4st", cwd=project).code == 0
    config = run / "config.yaml"
    config.write_text(
        config.read_text().replace("_target_: mine.parts.Line", f"_target_: {target}\n  _args_: [{tmp_path}/canary]")
    )
    done = train("fit", f"resume={run}", "loop.max_duration=8st", cwd=project)
    assert done.code == 2, done.err
    assert f"_target_ {target}" in done.err
    assert not (tmp_path / "canary").exists()
