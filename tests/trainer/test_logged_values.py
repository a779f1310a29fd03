"""Every value that is logged, in whatever hook and outside of all, reaches the loggers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import ListLogger, StopAt, loader, trainer

from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.errors import SaveError
from trainer_cli.loggers.text_files import JsonlLogger
from trainer_cli.trainer.hooks import VOCABULARY, Callback

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
    class Evaluates(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            trainer.log_metrics(before=1.0)
            assert trainer.validate(loader(6, shuffle=False), None)["val"]["loss"] > 0

    logger = ListLogger()
    _fit(Evaluates(), logger=logger).fit(loader())
    assert logger.steps("before") == [1, 2, 3, 4, 5, 6]
    assert logger.steps("val/loss") == []


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
            random.random()
            torch.rand(1)

    class Noted(Callback):
        def on_train_start(self, trainer: Any, model: Any, *rest: Any) -> None:
            self.drawn = random.random(), torch.rand(1).item()

    drawn = []
    for logger in (ListLogger(), Drawing()):
        noted = Noted()
        _fit(noted, logger=logger).fit(loader())
        drawn.append(noted.drawn)
    assert drawn[0] == drawn[1]


def _lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_an_evaluation_after_a_fit_repeats_no_metric_of_its_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = trainer(
        loggers=[JsonlLogger()], run_dir=tmp_path,
        settings={"max_duration": 4, "eval_interval": 2, "log_interval": 2},
    )  # fmt: skip
    made.fit(loader(), loader(6, shuffle=False))
    logged = _lines(tmp_path)
    assert made.validate(loader(6, shuffle=False))
    assert _lines(tmp_path) == logged
    assert "already" not in caplog.text
    assert made.validate({"other": loader(6, shuffle=False), "val": loader(8, shuffle=False)})
    names = [(line["step"], key) for line in _lines(tmp_path) for key in line if "/" in key]
    assert len(set(names)) == len(names)
    assert (4, "other/loss") in names
    assert _lines(tmp_path)[-1]["epoch"] == logged[-1]["epoch"]
    assert "val/loss of step 4 is logged as" in caplog.text
