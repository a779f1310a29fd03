"""Every value, text, image and histogram that is logged, in whatever hook and outside of all, reaches the loggers."""

from __future__ import annotations

import errno
import io
import json
import logging
import math
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import ListLogger, StopAt, StopInEvaluation, loader, on, trainer

from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.errors import SaveError, UserError
from trainer_cli.files.json_lines import read_rows
from trainer_cli.loggers.base import Record, RunFacts
from trainer_cli.loggers.console import ConsoleLogger
from trainer_cli.loggers.media import MediaLogger
from trainer_cli.loggers.tensorboard import TensorBoardLogger
from trainer_cli.loggers.text_files import CsvLogger, JsonlLogger
from trainer_cli.steps.progress import Progress
from trainer_cli.trainer import metric_logger
from trainer_cli.trainer.hooks import VOCABULARY, Callback
from trainer_cli.trainer.metric_logger import histogram_medium, image_medium, table_medium
from trainer_cli.trainer.train_step import TrainStep
from trainer_cli.trainer.trainer import Trainer

_BEFORE_THE_TRAINER_LOGS = ("pre_setup",)

# Hooks that a fit with checkpoints and an evaluation calls.
IN_FIT = [
    hook for hook in VOCABULARY
    if hook not in (*_BEFORE_THE_TRAINER_LOGS, "next_step", "__enter__", "__exit__", "on_fit_exception",
                    "on_train_exception", "on_validate_exception", "on_before_load_checkpoint",
                    "preprocess_checkpoint", "on_load_checkpoint")
]  # fmt: skip

FAILING = ["on_train_batch_end", "on_before_forward", "on_validate_start", "on_fit_end", "on_save_checkpoint"]


def _logging(*hooks: str, fails_in: str | None = None, at: int = 3) -> Callback:
    """A callback that logs a value and a text in each hook, under its name; and may fail in one."""

    def method(hook: str) -> Any:
        def call(self: Any, *args: Any) -> None:
            if args:
                self.trainer = args[0]
            self.trainer.log_metrics({f"of/{hook}": 1.0})
            self.trainer.log_text(f"text/{hook}", hook)
            if hook == fails_in and self.trainer.progress.step >= at:
                raise ValueError("planned")

        return call

    made: Callback = type("Logging", (Callback,), {hook: method(hook) for hook in hooks})()
    return made


def _fit(*callbacks: Callback, logger: ListLogger, folder: Path | None = None, **settings: Any) -> Any:
    made = trainer(
        callbacks={type(one).__name__: one for one in callbacks}, loggers=[logger], run_dir=folder,
        settings={"max_duration": 6, "eval_interval": 3, "log_interval": 2, **settings},
        schedulers=_schedule,
        checkpoint=None if folder is None else CheckpointerCallback(folder / "ckpt", save_interval=2),
    )  # fmt: skip
    return made


def _schedule(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


def _keys(logger: ListLogger) -> set[str]:
    """The names that were logged, without that of a loader."""
    return {key.removeprefix("val/") for record in logger.records for key in (*record.metrics, *record.texts)}


@pytest.mark.parametrize("hook", IN_FIT)
def test_a_value_of_every_hook_of_a_fit_arrives(hook: str, tmp_path: Path) -> None:
    logger = ListLogger()
    made = _fit(_logging(*{"on_fit_start", hook}), logger=logger, folder=tmp_path)
    made.fit(loader(), loader(6, shuffle=False))
    assert {f"of/{hook}", f"text/{hook}"} <= _keys(logger)
    assert made.metric_logger.record == {}


@pytest.mark.parametrize("hook", ["on_before_load_checkpoint", "preprocess_checkpoint", "on_load_checkpoint"])
def test_a_value_of_the_hooks_of_a_load_arrives(hook: str, tmp_path: Path) -> None:
    val = loader(6, shuffle=False)
    _fit(StopAt(2), logger=ListLogger(), folder=tmp_path).fit(loader(), val)
    logger = ListLogger()
    _fit(_logging(hook), logger=logger, folder=tmp_path).fit(loader(), val)
    assert f"of/{hook}" in _keys(logger)


@pytest.mark.parametrize("hook", FAILING)
def test_values_of_a_failing_fit_arrive_once_over_a_resume(hook: str, tmp_path: Path) -> None:
    logger = ListLogger()
    callback = _logging("on_fit_start", "on_fit_exception", "finalize", hook, fails_in=hook)
    with pytest.raises((ValueError, SaveError), match="planned"):
        _fit(callback, logger=logger, folder=tmp_path).fit(loader(), loader(6, shuffle=False))
    assert {"of/on_fit_exception", "of/finalize", f"of/{hook}"} <= _keys(logger)
    _fit(_logging("on_train_batch_end"), logger=logger, folder=tmp_path).fit(loader(), loader(6, shuffle=False))
    steps = logger.steps("of/on_train_batch_end")
    assert steps == sorted(set(steps))


def test_a_step_that_failed_keeps_what_it_logged(tmp_path: Path) -> None:
    logger = ListLogger()
    with pytest.raises(ValueError, match="planned"):
        _fit(_logging("on_before_backward", fails_in="on_before_backward", at=3), logger=logger).fit(loader())
    assert logger.steps("of/on_before_backward") == [1, 2, 3, 4]


@pytest.mark.parametrize("hook", [*(hook for hook in IN_FIT if "valid" in hook), "finalize"])
def test_values_of_an_evaluation_outside_of_a_fit_arrive(hook: str, tmp_path: Path) -> None:
    logger, val = ListLogger(), loader(6, shuffle=False)
    made = _fit(_logging("on_validate_start", hook), logger=logger, folder=tmp_path)
    made.fit(loader(), val)
    logger.records.clear()
    metrics = made.validate(val, tmp_path / "ckpt/step4")
    assert {f"of/{hook}", f"text/{hook}"} <= _keys(logger)
    assert [(record.step, record.metrics["val/loss"]) for record in logger.records if "val/loss" in record.metrics] == [
        (4, metrics["val"]["loss"])
    ]
    logger.records.clear()
    made.validate_all(val, str(tmp_path / "ckpt/step*"))
    assert logger.steps("val/loss") == [0, 2, 4, 6]


def test_an_evaluation_inside_a_fit_leaves_the_steps_record_alone() -> None:
    losses: list[float] = []

    def evaluate(trainer: Any, *_: Any) -> None:
        trainer.log_metrics(before=1.0)
        losses.append(trainer.validate(loader(6, shuffle=False), None)["val"]["loss"])

    logger = ListLogger()
    _fit(on(on_train_batch_end=evaluate), logger=logger).fit(loader())
    assert (len(losses), min(losses) > 0) == (6, True)
    assert logger.steps("before") == [1, 2, 3, 4, 5, 6]
    assert logger.steps("val/loss") == []


def _fail_on_the_second(trainer: Any, *_: Any) -> None:
    if trainer.name_scope_path == "second/":
        raise ValueError("planned")


def _evaluate_two(trainer: Any, path: Path | None) -> None:
    with pytest.raises(ValueError, match="planned"):
        trainer.validate({name: loader(6, shuffle=False) for name in ("first", "second")}, path)


def test_an_evaluation_that_fails_inside_a_fit_leaves_the_steps_record_alone() -> None:
    def evaluate(trainer: Any, *_: Any) -> None:
        trainer.log_metrics(before=1.0)
        _evaluate_two(trainer, None)

    logger = ListLogger()
    _fit(on(on_train_batch_end=evaluate, on_validate_start=_fail_on_the_second), logger=logger).fit(loader())
    assert logger.steps("before") == [1, 2, 3, 4, 5, 6]
    assert logger.steps("first/loss") == []


def test_an_evaluation_of_a_checkpoint_that_fails_logs_nothing_at_another_step(tmp_path: Path) -> None:
    _fit(logger=ListLogger(), folder=tmp_path).fit(loader())
    logger = ListLogger()
    _evaluate_two(_fit(on(on_validate_start=_fail_on_the_second), logger=logger), tmp_path / "ckpt/step6")
    assert logger.records == []


class FailingStart(ListLogger):
    """Cannot be started once."""

    fails = True

    def start(self, facts: RunFacts) -> None:
        if self.fails:
            self.fails = False
            raise OSError(errno.ENOSPC, "No space left on device")
        super().start(facts)


def test_a_logger_that_cannot_be_opened_for_an_evaluation_loses_nothing() -> None:
    first, failing = ListLogger(), FailingStart()
    made = trainer(loggers={"first": first, "failing": failing})
    made.log_metrics(before=1.0)
    with pytest.raises(OSError, match="No space"):
        made.validate(loader(6, shuffle=False), None)
    assert first.closed == 1
    assert made.validate(loader(6, shuffle=False), None)["val"]["loss"] > 0
    made.fit(loader())
    assert first.steps("before") == failing.steps("before") == [0]


def test_a_value_that_cannot_be_logged_after_a_fit_is_logged_with_the_next() -> None:
    failing = FailingStart()
    failing.fails = False
    made = _fit(logger=failing)
    made.fit(loader())
    failing.fails = True
    with pytest.raises(OSError, match="No space"):
        made.log_metrics(first=1.0)
    made.log_metrics(second=2.0)
    assert dict(failing.records[-1].metrics) == {"first": 1.0, "second": 2.0}


def test_records_that_wait_behind_a_wrong_one_are_logged_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_logger, "_is_on_device", lambda value: True)
    log = ListLogger()
    logger = metric_logger.MetricLogger({"list": log})
    values: list[Any] = [1.0, torch.ones(2), 3.0, 4.0]
    for step, value in enumerate(values):
        logger.add({"x": value})
        logger.flush(Progress(step), 0.0, wait=False)
    with pytest.raises(UserError, match="'x' is a tensor of shape"):
        logger.settle()
    logger.settle()
    assert log.steps("x") == [0, 2, 3]


def test_a_value_logged_after_a_fit_is_written_at_once(tmp_path: Path) -> None:
    logger = ListLogger()
    made = _fit(logger=logger)
    made.log_metrics(before=1.0)
    assert not logger.records
    made.fit(loader())
    made.log_metrics(after=2.0)
    made.log_text("words", "after")
    assert [(record.step, dict(record.metrics), dict(record.texts)) for record in logger.records[-2:]] == [
        (6, {"after": 2.0}, {}), (6, {}, {"words": "after"}),
    ]  # fmt: skip
    assert logger.steps("before") == [0]
    assert logger.closed == 3


def test_a_file_has_what_was_logged_at_the_end_and_after(tmp_path: Path) -> None:
    lines = []
    for _ in range(2):
        made = trainer(
            callbacks=[_logging("on_fit_start", "on_fit_end", "on_after_save_checkpoint", "finalize")],
            loggers=[JsonlLogger()], run_dir=tmp_path, checkpoint=CheckpointerCallback(tmp_path / "ckpt"),
            settings={"log_interval": 3},
        )  # fmt: skip
        made.fit(loader())
        lines.append((tmp_path / "metrics.jsonl").read_text())
    assert all(f'"of/{hook}"' in lines[0] for hook in ("on_fit_end", "on_after_save_checkpoint", "finalize"))
    assert lines[0] == lines[1], "a finished run that is started again writes nothing again"
    made.log_metrics(after=1.0)
    assert '"step": 6' in (added := (tmp_path / "metrics.jsonl").read_text().removeprefix(lines[1]))
    assert '"after": 1.0' in added


def test_a_logger_that_draws_random_numbers_at_its_start_changes_no_run() -> None:
    class Drawing(ListLogger):
        def start(self, facts: Any) -> None:
            super().start(facts)
            random.random(), torch.rand(1)

    drawn: list[Any] = []
    noted = on(on_train_start=lambda *_: drawn.append((random.random(), torch.rand(1).item())))
    for logger in (ListLogger(), Drawing()):
        _fit(noted, logger=logger).fit(loader())
    assert drawn[: len(drawn) // 2] == drawn[len(drawn) // 2 :]


def _lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_an_evaluation_after_a_fit_repeats_no_metric_of_its_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"max_duration": 4, "eval_interval": 2, "log_interval": 2}
    made = trainer(loggers=[JsonlLogger()], run_dir=tmp_path, settings=settings)
    made.fit(loader(), loader(6, shuffle=False))
    logged = _lines(tmp_path)
    assert made.validate(loader(6, shuffle=False))
    assert _lines(tmp_path) == logged
    assert "already" not in caplog.text
    assert made.validate({"other": loader(6, shuffle=False), "val": loader(8, shuffle=False)})
    names = [(line["step"], key) for line in _lines(tmp_path) for key in line if "/" in key]
    assert len(set(names)) == len(names)
    assert {(4, "other/loss"), (4, "validate_1/loss")} <= set(names)
    assert _lines(tmp_path)[-1]["epoch"] == logged[-1]["epoch"]


def test_each_other_evaluation_of_a_logged_step_has_a_scope_of_its_own(tmp_path: Path) -> None:
    score = iter([1.0, 1.0, 2.0])
    extra = on(run_validation=lambda made, is_last: made.log_metrics({"mine/score": next(score)}))
    logger = ListLogger()
    made = trainer(callbacks=[extra], loggers=[logger], settings={"max_duration": 4, "eval_interval": 4})
    small, large = loader(6, shuffle=False), loader(8, shuffle=False)
    made.fit(loader(), {"a": small, "b": small})
    means = made.validate({"a": large, "b": small})
    assert set(means) == {"a", "b", "mine"}
    made.validate({"a": large, "b": large})
    assert {record.step for record in logger.records} == {4}
    values = {key: value for record in logger.records for key, value in record.metrics.items() if "train/" not in key}
    assert sum(len([key for key in record.metrics if "train/" not in key]) for record in logger.records) == len(values)
    assert {key: values[key] for key in ("validate_1/loss", "validate_1/mae")} == {
        f"validate_1/{key}": means["a"][key] for key in ("loss", "mae")
    }
    # `b` of the second evaluation is as logged; the third has two other loaders and another score.
    assert {key.partition("/")[0] for key in values} == {
        "a", "b", "mine", "validate_1", "validate_2", "validate_3", "validate_4",
    }  # fmt: skip
    assert values["validate_4/mine/score"] == 2.0


RAMP = [[0.0, 0.5, 1.0]]


@pytest.mark.parametrize(
    ("value", "shape", "expected"),
    [
        (np.array(RAMP), (1, 3, 1), [0, 127, 255]),
        (torch.tensor(RAMP, dtype=torch.bfloat16), (1, 3, 1), [0, 127, 255]),
        (torch.tensor(RAMP, requires_grad=True)[None], (1, 3, 1), [0, 127, 255]),
        (torch.tensor([[-1.0, 2.0, torch.nan, torch.inf]]), (1, 4, 1), [0, 255, 0, 255]),
        (torch.tensor([[0, 7, 300, -5]]), (1, 4, 1), [0, 7, 255, 0]),
        (np.array([[0, 200]], dtype=np.uint8), (1, 2, 1), [0, 200]),
        (torch.tensor([[True, False]]), (1, 2, 1), [255, 0]),
        (np.arange(6, dtype=np.uint8).reshape(3, 1, 2), (1, 2, 3), [0, 2, 4, 1, 3, 5]),
        (np.zeros((4, 2, 5)), (2, 5, 4), [0] * 40),
    ],
)
def test_an_image_becomes_bytes_with_its_channels_last(value: Any, shape: tuple[int, ...], expected: list[int]) -> None:
    found = image_medium("x", value).value
    assert (found.dtype, found.shape, found.reshape(-1).tolist()) == (np.uint8, shape, expected)


@pytest.mark.parametrize(
    "cell",
    [torch.ones(2), np.ones(3), np.zeros(0), object(), [1, 2]],
    ids=["tensor", "array", "empty", "object", "list"],
)
def test_a_cell_that_is_no_text_and_no_number_is_refused(cell: Any) -> None:
    with pytest.raises(UserError, match="table 'x' has the row"):
        table_medium("x", ["a"], [[cell]])
    assert table_medium("x", ["a"], [[torch.tensor(1.5)], [np.int64(2)]]).value.rows == ((1.5,), (2,))


@pytest.mark.parametrize("shape", [(), (4,), (2, 3, 4), (8, 8, 3), (1, 1, 3, 3), (0, 5), (3, 0, 4)])
def test_what_is_no_image_is_refused_with_its_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(
        UserError, match=r"image 'x' has shape \(.*Give \(height, width\) or \(channels, height, width\)"
    ):
        image_medium("x", torch.zeros(shape))


def test_a_histogram_holds_the_finite_values_of_the_moment() -> None:
    values = torch.tensor([[1.0, torch.nan], [torch.inf, 3.0]])
    found = histogram_medium("x", values).value
    values.zero_()
    assert found.tolist() == [1.0, 3.0]
    assert histogram_medium("x", torch.arange(3)).value.tolist() == [0.0, 1.0, 2.0]


def texts(records: list[Record], name: str) -> list[tuple[int, str]]:
    return [(record.step, record.texts[name]) for record in records if name in record.texts]


def test_what_hooks_log_belongs_to_the_step_that_they_are_called_for() -> None:
    logger = ListLogger()
    made = trainer(callbacks=[on(**SHOWS)], loggers=[logger], settings={"eval_interval": 2, "log_interval": 3})
    made.fit(loader(), loader())
    steps = [(step, str(step)) for step in range(1, 7)]
    assert texts(logger.records, "before") == texts(logger.records, "train") == steps
    assert [(one.step, one.images["val/image"].tolist()) for one in logger.records if one.images] == [
        (step, [[[step]] * 3] * 2) for step in (2, 4, 6)
    ]
    assert [one.histograms["weights"].size for one in logger.records if one.histograms] == [2] * 6
    assert logger.steps("train/loss") == [3, 6]
    assert [record.has_media for record in logger.records] == [True] * 6


def _show_weights(trainer: Any, model: Any, optimizer: Any) -> None:
    trainer.log_text("before", str(trainer.progress.step + 1))
    trainer.log_histogram("weights", model.linear.weight)


def _show_text(trainer: Any, *_: Any) -> None:
    trainer.log_text("train", "gone")
    trainer.log_text("train", str(trainer.progress.step))


def _show_image(trainer: Any, *_: Any) -> None:
    trainer.log_image("val/image", torch.full((2, 3), 1 / 255 * trainer.progress.step))


SHOWS = {
    "on_before_optimizer_step": _show_weights,
    "on_train_batch_end": _show_text,
    "on_validate_batch_end": _show_image,
}
"""Hooks that log a medium of each kind, with the step that was made or is being made."""


def test_a_step_logs_for_the_step_that_it_makes() -> None:
    class Telling(TrainStep):
        def train_batch(self, batch: Any) -> Any:
            self.trainer.log_text("step", str(self.trainer.progress.step + 1))
            return super().train_batch(batch)

    logger = ListLogger()
    trainer(step=Telling(), loggers=[logger], settings={"grad_accum_steps": 2}).fit(loader())
    assert texts(logger.records, "step") == [(step, str(step)) for step in range(1, 7)]


def test_a_medium_and_a_metric_may_have_the_same_name_and_an_evaluation_reports_metrics_alone() -> None:
    logger, seen = ListLogger(), {}
    same_name = on(
        on_validate_end=lambda trainer, *_: trainer.log_text("val/loss", "small"),
        on_after_evaluation=lambda trainer, metrics: seen.update(metrics),
    )
    made = trainer(callbacks=[same_name], loggers=[logger], settings={"eval_interval": 6})
    made.fit(loader(), loader())
    assert texts(logger.records, "val/loss") == [(6, "small")]
    assert isinstance(seen["val/loss"], float)
    assert set(seen) == {"val/loss", "val/mae"}
    assert set(made.validate(loader())["val"]) == {"loss", "mae"}


@pytest.mark.slow
@pytest.mark.parametrize("stop", [StopAt(4), StopAt(5), StopInEvaluation(4), StopInEvaluation(2, 1)])
def test_a_stop_and_a_resume_show_each_medium_and_each_metric_once(tmp_path: Path, stop: Callback) -> None:
    """Also a stop before or in an evaluation, which the next attempt makes: its step's texts are not made again."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for callbacks in ([stop, on(**SHOWS)], [on(**SHOWS)]):
        trainer(
            callbacks=callbacks,
            loggers=[TensorBoardLogger()],
            checkpoint=CheckpointerCallback(tmp_path / "checkpoints", save_interval=100),
            run_dir=tmp_path,
            settings={"eval_interval": 2, "log_interval": 1},
        ).fit(loader(), loader())
    all_of_them = dict.fromkeys(("scalars", "images", "histograms", "tensors"), 0)
    shown = EventAccumulator(str(tmp_path / "tensorboard"), size_guidance=all_of_them).Reload()
    assert [(one.step, one.tensor_proto.string_val[0].decode()) for one in shown.Tensors("train/text_summary")] == [
        (step, str(step)) for step in range(1, 7)
    ]
    assert [one.step for one in shown.Histograms("weights")] == list(range(1, 7))
    assert [one.step for one in shown.Images("val/image")] == [2, 4, 6]
    assert [one.step for one in shown.Scalars("train/loss")] == list(range(1, 7))
    assert [one.step for one in shown.Scalars("val/loss")] == [2, 4, 6]


def test_loggers_are_told_what_the_run_is() -> None:
    logger = ListLogger()
    trainer(loggers=[logger], config="a: 1\n", hparams={"lr": 0.1}).fit(loader())
    (facts,) = logger.facts
    assert isinstance(facts, RunFacts)
    assert (facts.config, facts.hparams) == ("a: 1\n", {"lr": 0.1})


def test_media_of_a_run_that_is_stopped_are_those_of_a_straight_one(tmp_path: Path) -> None:
    def show(made: Any, *arguments: Any) -> None:
        made.log_text("words", f"before step {made.progress.step}")
        made.log_image("picture", torch.full((2, 3), made.progress.step / 10))

    def attempt(folder: Path, *callbacks: Any) -> None:
        trainer(
            callbacks=[*callbacks, on(on_train_batch_start=show)],
            loggers=[MediaLogger()], run_dir=folder, settings={"log_interval": 1},
            checkpoint=CheckpointerCallback(folder / "ckpt", save_interval=2),
        ).fit(loader())  # fmt: skip

    def media(folder: Path) -> list[Any]:
        lines = [json.loads(line) for line in (folder / "media.jsonl").read_text().splitlines()]
        files = {path.name: path.read_bytes() for path in (folder / "media").iterdir()}
        return [[{**line, "time": 0} for line in lines], files]

    def crash(made: Any, *arguments: Any) -> None:
        if made.progress.step == 5:
            raise RuntimeError("a crash after step 5, whose media are written")

    attempt(tmp_path / "straight")
    with pytest.raises(RuntimeError, match="a crash"):
        attempt(tmp_path / "parts", on(on_train_batch_start=crash))
    assert len(media(tmp_path / "parts")[0]) == 5
    attempt(tmp_path / "parts")
    assert media(tmp_path / "straight") == media(tmp_path / "parts")
    assert len(media(tmp_path / "parts")[1]) == 6


NOT_UNICODE = os.fsdecode(b"r\xe9sum\xe9.png")
SHOWN: dict[str, tuple[Callable[[Trainer], None], str | None]] = {
    "a histogram of one value": (lambda it: it.log_histogram("h", [1e13]), None),
    "a histogram of a large value": (lambda it: it.log_histogram("h", [1e15, 1e15]), None),
    "a histogram of ids": (lambda it: it.log_histogram("h", torch.tensor([17 * 10**17, 17 * 10**17 + 64])), None),
    "a histogram of neighbours": (lambda it: it.log_histogram("h", [1.0, math.nextafter(1, 2)]), None),
    "a histogram of tiny values": (lambda it: it.log_histogram("h", [5e-324, 1e-323]), None),
    "a histogram beyond 1e20": (lambda it: it.log_histogram("h", [-1e21, 0, 1e21]), "beyond 9e"),
    "a histogram of the largest floats": (lambda it: it.log_histogram("h", [-1.7e308, 1.7e308]), "beyond 9e"),
    "a histogram without finite values": (lambda it: it.log_histogram("h", [math.nan, math.inf]), None),
    "a histogram of nothing": (lambda it: it.log_histogram("h", []), None),
    "a text of bytes": (lambda it: it.log_text("t", NOT_UNICODE), "not valid Unicode"),
    "a text of control characters": (lambda it: it.log_text("t", "\0\x1b[31m\r\n[/red]"), None),
    "a name of bytes": (lambda it: it.log_text(NOT_UNICODE, "text"), "not valid Unicode"),
    "a histogram's name of bytes": (lambda it: it.log_histogram(NOT_UNICODE, [1.0]), "not valid Unicode"),
    "a metric's name of bytes": (lambda it: it.log_metrics({NOT_UNICODE: 1.0}), "not valid Unicode"),
    "a metric's name of markup": (lambda it: it.log_metrics({"[/red]{x}%s\n": 1.0}), None),
    "a metric's empty name": (lambda it: it.log_metrics({"": 1.0}), None),
    "odd metrics": (lambda it: it.log_metrics({"a": 1e308, "b": -math.inf, "c": math.nan, "d": 10**300}), None),
    "a cell of bytes": (lambda it: it.log_table("t", ["a"], [[NOT_UNICODE]]), "not valid Unicode"),
    "a column of bytes": (lambda it: it.log_table("t", [NOT_UNICODE], [["a"]]), "not valid Unicode"),
    "a cell of a huge number": (lambda it: it.log_table("t", ["a"], [[10**5000], [-(10**5000)], [2**70]]), None),
    "a table without rows": (lambda it: it.log_table("t", [], []), None),
    "a matrix of odd numbers": (lambda it: it.log_table("m", ["", "a"], [["a", math.nan]], matrix=True), None),
    "an image of odd numbers": (lambda it: it.log_image("i", [[math.nan, math.inf], [-math.inf, 1e300]]), None),
    "an image of 16 bits": (lambda it: it.log_image("i", np.full((2, 2), 60_000, np.uint16)), None),
}


@pytest.mark.parametrize("case", SHOWN)
def test_what_is_only_shown_ends_no_training_and_changes_no_weight(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    show, warning = SHOWN[case]
    displays = [ConsoleLogger(style, io.StringIO()) for style in ("rich", "plain")]
    loggers = [JsonlLogger(), CsvLogger(), MediaLogger(), TensorBoardLogger(), *displays]
    made = trainer(
        callbacks={"shows": on(on_after_evaluation=lambda it, _: show(it))}, loggers=loggers, run_dir=tmp_path,
        settings={"max_duration": 6, "eval_interval": 2, "log_interval": 2},
    )  # fmt: skip
    made.fit(loader(), loader(6, shuffle=False))
    plain = trainer(settings={"max_duration": 6, "eval_interval": 2, "log_interval": 2})
    plain.fit(loader(), loader(6, shuffle=False))
    assert made.progress.step == 6
    for name, weight in plain.model.state_dict().items():
        assert torch.equal(weight, made.model.state_dict()[name])
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == (warning is not None)
    assert (warning or "") in "".join(said)
    read = {record["step"] for record in read_rows(tmp_path / "metrics.jsonl")}
    assert read >= {2, 4, 6}
