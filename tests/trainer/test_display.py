"""What a notebook shows, where a trainer shows metrics by itself, and the loss for displays."""

from __future__ import annotations

import io
import sys
import threading
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import tiny
import torch
from printed import Terminal

from trainer_cli.loggers.base import Now, Record, RunFacts
from trainer_cli.loggers.console import ConsoleLogger
from trainer_cli.loggers.notebook import NotebookLogger, in_notebook
from trainer_cli.messages import Logging
from trainer_cli.outputs.metrics import WeightedMeans
from trainer_cli.trainer.evaluate import Evaluation, Evaluations, LoaderMetrics
from trainer_cli.trainer.training_loop import FitResult


def as_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process look like the kernel of a notebook."""
    ipython = ModuleType("IPython")
    cast("Any", ipython).get_ipython = lambda: SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))


def test_a_notebook_shows_the_bar_and_the_newest_records_and_merges_those_of_a_step() -> None:
    shown: list[str] = []
    logger = NotebookLogger(shown.append)
    logger.start(RunFacts(total_steps=40, now=lambda: Now(30, 300)))
    logger.log(Record(10, 1.0, 1.0, {"train/loss": 0.5, "train/lr": 0.1}))
    logger.log(Record(30, 3.0, 3.0, {"train/loss": 0.25}))
    logger.log(Record(30, 3.0, 3.0, {"val/<b>": 0.75}))
    logger.close()
    logger.close()
    assert '<progress value="30" max="40"></progress> step 30/40' in shown[-1]
    assert "<th>step</th><th>epoch</th><th>train/loss</th><th>val/&lt;b&gt;</th>" in shown[-1]
    assert "<tr><td>30</td><td>3</td><td>0.25</td><td>0.75</td></tr>" in shown[-1]
    assert "train/lr" not in shown[-1]
    assert shown[-1].count("<tr>") == 3


def test_a_fit_shows_its_records_in_a_notebook_and_no_thread_outlives_it() -> None:
    shown: list[str] = []
    trainer = tiny.trainer(loggers=[NotebookLogger(shown.append)], settings={"log_interval": 2})
    trainer.fit(tiny.loader())
    assert "step 6/6" in shown[-1]
    assert "train/loss" in shown[-1]
    with pytest.raises(RuntimeError):
        tiny.trainer(
            loggers=[NotebookLogger(shown.append)],
            callbacks=[tiny.recorder([], fail_in=("on_train_start",))],
        ).fit(tiny.loader())
    assert "notebook-display" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(
    ("place", "loggers", "logging", "kinds"),
    [
        ("terminal", (), None, {"console": ConsoleLogger}),
        ("terminal", (), Logging(console="off"), {}),
        ("terminal", {"console": None}, None, {}),
        ("terminal", [tiny.ListLogger()], None, {"ListLogger": tiny.ListLogger, "console": ConsoleLogger}),
        ("terminal", [ConsoleLogger("plain")], None, {"ConsoleLogger": ConsoleLogger}),
        ("notebook", (), None, {"console": NotebookLogger}),
        ("notebook", (), Logging(console="off"), {}),
        ("notebook", (), Logging(console="plain"), {"console": ConsoleLogger}),
        ("pipe", (), None, {}),
        ("pipe", (), Logging(console="plain"), {"console": ConsoleLogger}),
    ],
    ids=[
        "terminal",
        "terminal, off",
        "terminal, None",
        "terminal, beside another",
        "terminal, given",
        "notebook",
        "notebook, off",
        "notebook, plain",
        "pipe",
        "pipe, plain",
    ],
)
def test_a_trainer_shows_metrics_on_a_terminal_and_in_a_notebook_unless_it_is_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, place: str, loggers: Any, logging: Logging | None, kinds: dict[str, type]
) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal() if place == "terminal" else io.StringIO())
    if place == "notebook":
        as_kernel(monkeypatch)
    assert in_notebook() is (place == "notebook")
    trainer = tiny.trainer(loggers=loggers, logging=logging)
    assert {name: type(logger) for name, logger in trainer.loggers.items()} == kinds


def test_results_are_tables_in_a_notebook_and_plain_values_elsewhere() -> None:
    metrics = LoaderMetrics(val={"loss": 0.5}, other={"loss": 1.0, "accuracy": 0.25})
    assert metrics == {"val": {"loss": 0.5}, "other": {"loss": 1.0, "accuracy": 0.25}}
    assert "<th>loader</th><th>loss</th><th>accuracy</th>" in metrics._repr_html_()
    assert "<tr><td>val</td><td>0.5</td><td></td></tr>" in metrics._repr_html_()
    rows = Evaluations([Evaluation(None, 3, "val", {"loss": 0.5})])
    assert "<tr><td>present weights</td><td>val</td><td>0.5</td></tr>" in rows._repr_html_()
    text = FitResult(True, "max_duration <reached>", 1234, {"val/loss": 0.5})._repr_html_()
    assert "max_duration &lt;reached&gt;" in text
    assert "<td>step</td><td>1,234</td>" in text


def test_what_trainers_return_shows_itself() -> None:
    trainer = tiny.trainer()
    assert isinstance(trainer.fit(tiny.loader(), tiny.loader()), FitResult)
    assert isinstance(trainer.validate(tiny.loader()), LoaderMetrics)
    assert isinstance(trainer.validate_all(tiny.loader(), [None]), Evaluations)


# The loss for displays: the mean since the last log, answered by the thread of the training at the next batch.


def test_a_request_is_answered_at_the_next_batch_with_the_mean_since_the_last_log() -> None:
    means = WeightedMeans(torch.device("cpu"))
    means.add(torch.tensor(8.0), {}, 1)
    means.reset()
    assert means.live_loss.request() is None, "nothing was requested before"
    means.add(torch.tensor(1.0), {}, 3)
    means.add(torch.tensor(5.0), {}, 1)
    assert means.live_loss.request() == 1.0, "as it was at the request"
    means.add(torch.tensor(2.0), {}, torch.tensor(4.0))
    assert means.live_loss.request() == (3 + 5 + 8) / 8
    assert means.means() == {"loss": 2.0}


def test_batches_without_weight_leave_the_loss_as_it_was() -> None:
    means = WeightedMeans(torch.device("cpu"))
    means.live_loss.request()
    means.add(torch.tensor(3.0), {}, 2)
    means.reset()
    means.live_loss.request()
    means.add(torch.tensor(7.0), {}, 0)
    assert means.live_loss.request() == 3.0


def test_no_batch_is_read_without_a_request() -> None:
    means = WeightedMeans(torch.device("cpu"))
    means.add(torch.tensor(3.0), {}, 1)
    assert means.live_loss.request() is None
    reader = threading.Thread(target=means.live_loss.request)
    reader.start()
    reader.join()
    means.add(torch.tensor(5.0), {}, 1)
    assert means.live_loss.request() == 4.0
