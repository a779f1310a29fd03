"""What models and callbacks log, and what loggers write of it."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import FailIn, ListLogger, Logs, Net, StopAt, fit, make_trainer, rows
from torch import nn

from trainer_cli import Callback, CsvLogger, JsonlLogger, Trainer, UserError

HOOKS = {
    **dict.fromkeys(
        (
            "on_fit_start",
            "on_train_start",
            "on_train_batch_start",
            "on_train_batch_end",
            "on_before_backward",
            "on_after_backward",
            "on_before_optimizer_step",
            "on_after_optimizer_step",
            "on_train_end",
            "on_fit_end",
        ),
        "mine",
    ),
    **dict.fromkeys(
        ("on_validate_start", "on_validate_batch_start", "on_validate_batch_end", "on_validate_end"), "val/mine"
    ),
}


class Returns(Net):
    """Returns more: its number of calls in this mode, and what a subclass names."""

    more: Mapping[str, Any] = {}

    def forward(self, batch: Any) -> Any:
        outputs = super().forward(batch)
        calls = self.__dict__.setdefault("calls", {True: 0, False: 0})
        calls[self.training] += 1
        return {**outputs, "call": torch.tensor(float(calls[self.training])), **self.more}


def returning(**more: Any) -> type[nn.Module]:
    return type("ReturnsMore", (Returns,), {"more": more})


@pytest.mark.parametrize(
    ("interval", "expected"), [(1, {step: step for step in range(1, 7)}), (3, {3: 2.0, 6: 5.0}), (6, {6: 3.5})]
)
def test_logged_values_are_means_of_the_interval(interval: int, expected: Mapping[int, float]) -> None:
    """A logged value is the mean over the steps since the log before."""
    run = fit(model=Returns, batches=6, loop={"max_duration": 6, "log_interval": interval})
    assert run.log.values("train/call") == expected


@pytest.mark.parametrize(("batches", "steps", "interval"), [(10, 10, 1), (3, 10, 1), (3, 10, 5)])
def test_steps_that_are_logged(batches: int, steps: int, interval: int) -> None:
    run = fit(batches=batches, loop={"max_duration": steps, "log_interval": interval})
    assert list(run.log.values("train/loss")) == sorted({*range(interval, steps + 1, interval), steps})


@pytest.mark.parametrize(("value", "expected"), [(torch.tensor(2), 2.0), (12.0, 12.0), (3, 3.0)])
def test_tensors_and_numbers_are_logged(value: Any, expected: float) -> None:
    run = fit(model=returning(mine=value), loop={"log_interval": 1, "eval_interval": 4})
    last = run.log.records[-1].metrics
    assert (last["train/mine"], last["val/mine"]) == (expected, expected)


@pytest.mark.parametrize("value", [torch.ones(2), torch.ones(1)])
def test_tensors_of_several_elements_are_not_logged(value: Any) -> None:
    """What a model returns and is not a number is no metric."""
    run = fit(model=returning(mine=value), loop={"log_interval": 1, "eval_interval": 4})
    assert not [name for name in run.log.records[-1].metrics if name.endswith("mine")]


@pytest.mark.parametrize(
    ("hook", "name"),
    [
        *[(hook, name) for hook, name in HOOKS.items() if name == "mine"],
        *[(hook, name) for hook, name in HOOKS.items() if "/" in name],
    ],
)
def test_each_hook_may_log(hook: str, name: str) -> None:
    run = fit(loop={"log_interval": 1, "eval_interval": 2}, callbacks=[Logs(hook, {"mine": 7.0})])
    assert set(run.log.values(name).values()) == {7.0}


@pytest.mark.parametrize("value", [torch.tensor([[3.0]])])
def test_a_tensor_of_one_element_that_is_logged_by_name_is_a_number(value: Any) -> None:
    run = fit(loop={"log_interval": 1}, callbacks=[Logs("on_train_batch_end", {"mine": value})])
    assert run.log.values("mine")[4] == 3.0


@pytest.mark.parametrize("value", [[1.0], {"a": 1.0}, "text", torch.ones(2)])
def test_values_that_are_no_numbers_are_refused(value: Any) -> None:
    with pytest.raises(UserError, match="and no number"):
        fit(loop={"log_interval": 1}, callbacks=[Logs("on_train_batch_end", {"mine": value})])


def test_the_later_value_of_a_step_counts() -> None:
    class Twice(Callback):
        def on_train_batch_end(self, trainer: Trainer, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            trainer.log_metrics(mine=1.0)
            trainer.log_metrics(mine=2.0)

    run = fit(loop={"log_interval": 1}, callbacks=[Twice()])
    assert set(run.log.values("mine").values()) == {2.0}


def test_a_record_has_its_step_and_its_epoch() -> None:
    run = fit(batches=2, loop={"log_interval": 1})
    places = [(record.step, record.epoch) for record in run.log.records if "train/loss" in record.metrics]
    assert places == [(1, 0.5), (2, 1.0), (3, 1.5), (4, 2.0)]


@pytest.mark.parametrize("name", ["epoch", "step"])
def test_names_of_the_progress_may_be_logged(folder: Path, name: str) -> None:
    """step, epoch and time of a line are the record's own."""
    with pytest.raises(UserError, match=name):
        fit(folder, loop={"log_interval": 1}, run_dir=folder, loggers=[JsonlLogger()],
            callbacks=[Logs("on_train_batch_end", {name: -1.0})])  # fmt: skip


def test_an_evaluation_returns_its_means_by_name() -> None:
    trainer = make_trainer(model=returning(c=torch.tensor(2.0), **{"d/e/f": 2.0}))
    metrics = trainer.validate(rows(5))["val"]
    assert (metrics["c"], metrics["d/e/f"]) == (2.0, 2.0)


@pytest.mark.parametrize(("names", "means"), [(["a/call", "b/call"], [1.5, 4.5])])
def test_each_of_two_loaders_has_its_own_means(names: Sequence[str], means: Sequence[float]) -> None:
    """Each loader has means of its own, over its batches alone."""
    run = fit(model=Returns, val={"a": rows(2), "b": rows(4)}, loop={"eval_interval": 4})
    assert [run.log.values(name)[4] for name in names] == list(means)


class Greatest:
    """A metric with a state: the greatest prediction."""

    def __init__(self) -> None:
        self.resets, self.value = 0, -1.0

    def update(self, predictions: torch.Tensor, targets: Any = None) -> None:
        self.value = max(self.value, float(predictions.max()))

    def compute(self) -> float:
        return self.value

    def reset(self) -> None:
        self.resets, self.value = self.resets + 1, -1.0


@pytest.mark.parametrize("what", ["value", "resets"])
def test_a_metric_is_computed_over_each_evaluation(what: str) -> None:
    metric = Greatest()
    metrics = pytest.importorskip("trainer_cli.addons.inspect.metrics")
    callback = metrics.Metrics({"greatest": metric}, predictions=0, targets=1)
    run = fit(batches=4, val=5, loop={"eval_interval": 2}, callbacks=[callback])
    if what == "value":
        assert run.log.values("val/greatest") == pytest.approx({2: 0.8, 4: 0.8})
    else:
        assert metric.resets == 2


def test_a_metric_that_a_model_returns() -> None:
    class WithMetric(Net):
        def __init__(self) -> None:
            super().__init__()
            self.greatest = Greatest()

        def forward(self, batch: Any) -> Any:
            self.greatest.update(batch[0])
            return {**super().forward(batch), "greatest": self.greatest}

    run = fit(model=WithMetric, train=rows(2), val=rows(5), loop={"eval_interval": 4, "log_interval": 2})
    assert run.log.values("val/greatest") == pytest.approx({4: 0.8})
    assert not run.log.values("train/greatest")


@pytest.mark.parametrize("stop", [1, 2, 4])
def test_means_are_resumed_within_an_epoch(folder: Path, stop: int) -> None:
    """The mean of a log after a resume has the steps before it."""

    loop = {"max_duration": 6, "log_interval": 3}
    expected = fit(batches=6, val=0, loop=loop).log.values("train/loss")
    fit(folder, batches=6, val=0, loop=loop, save={}, callbacks=[StopAt(stop)])
    rest = fit(folder, batches=6, val=0, loop=loop, save={})
    assert rest.log.values("train/loss") == {step: expected[step] for step in (3, 6) if step > stop}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_means_of_half_precision_are_exact(dtype: torch.dtype) -> None:
    """Means of 16-bit values are not rounded to 16 bits."""
    run = fit(
        model=returning(mine=torch.tensor(0.1, dtype=dtype)), batches=9, loop={"max_duration": 9, "log_interval": 9}
    )
    assert run.log.values("train/mine")[9] == float(torch.tensor(0.1, dtype=dtype))


def lines_of(folder: Path) -> list[dict[str, str]]:
    with open(folder / "metrics.csv") as file:
        return list(csv.DictReader(file))


def test_each_record_is_in_the_file_at_once(folder: Path) -> None:
    sizes: list[int] = []

    class See(Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            path = folder / "metrics.csv"
            sizes.append(len(lines_of(folder)) if path.stat().st_size else 0)

    fit(folder, run_dir=folder, loggers=[CsvLogger()], callbacks=[See()], loop={"log_interval": 1})
    assert sizes[0] == 0
    assert sizes[1] < sizes[2] < sizes[3]


@pytest.mark.parametrize("path", ["x/y/metrics.csv", "metrics.csv"])
def test_a_csv_file_may_be_elsewhere(folder: Path, path: str) -> None:
    fit(folder, run_dir=folder, loggers=[CsvLogger(path)], loop={"log_interval": 1})
    assert (folder / path).is_file()


def test_a_second_start_continues_the_log(folder: Path) -> None:
    settings: dict[str, Any] = {"run_dir": folder, "loop": {"log_interval": 1}, "save": {}}
    fit(folder, loggers=[CsvLogger()], **settings)
    before = lines_of(folder)
    fit(folder, loggers=[CsvLogger()], **settings)
    assert lines_of(folder) == before
    assert [path.name for path in folder.glob("*.csv")] == ["metrics.csv"]


def test_two_loggers_are_given_the_same_records() -> None:
    other = ListLogger()
    run = fit(loop={"log_interval": 1}, loggers=[other])
    assert [record.metrics for record in other.records] == [record.metrics for record in run.log.records]


@pytest.mark.parametrize("fails", [True, False])
def test_loggers_are_closed(fails: bool) -> None:
    log = ListLogger()
    trainer = make_trainer(loggers=[log], callbacks=[FailIn("on_train_batch_start", 2)] if fails else [])
    if fails:
        with pytest.raises(RuntimeError):
            trainer.fit(rows(4))
    else:
        trainer.fit(rows(4))
    assert log.calls[0] == "start"
    assert log.calls[-1] == "close"


def test_without_loggers_nothing_is_written(folder: Path) -> None:
    trainer = make_trainer(loop={"log_interval": 1})
    result = trainer.fit(rows(4))
    assert "train/loss" in result.metrics
    assert not list(folder.iterdir())


def test_an_evaluation_after_a_fit_is_logged_at_its_last_step() -> None:
    run = fit(loop={"log_interval": 1})
    run.trainer.validate({"again": rows(2)})
    assert list(run.log.values("again/loss")) == [4]
