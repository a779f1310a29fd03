"""ThresholdStopper and EarlyExit: end the run by a metric or a function, once, with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny import ListLogger, loader, trainer

from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.callbacks.early_stopping import EarlyExit, ThresholdStopper
from trainer_cli.errors import ConfigError, UserError

SETTINGS = {"max_duration": 40, "eval_interval": 4, "log_interval": 3}


def _fit(*callbacks: Any, folder: Path | None = None, logger: ListLogger | None = None, **settings: Any) -> Any:
    made = trainer(
        callbacks=list(callbacks), loggers=[logger] if logger else [], settings={**SETTINGS, **settings},
        checkpoint=None if folder is None else CheckpointerCallback(folder, save_interval=None),
    )  # fmt: skip
    return made.fit(loader(), loader(6, shuffle=False))


@pytest.mark.parametrize(
    ("metric", "mode"), [("val/mae", "min"), ("train/loss", "min"), ("train/samples_per_s", "max")]
)
def test_the_first_value_at_the_threshold_or_beyond_ends_the_run(metric: str, mode: str) -> None:
    logger = ListLogger()
    threshold = 0.5 if mode == "min" else 1e-3
    result = _fit(ThresholdStopper(metric, threshold, mode), logger=logger)
    values = {record.step: record.metrics[metric] for record in logger.records if metric in record.metrics}
    beyond = [step for step, value in values.items() if (value <= threshold if mode == "min" else value >= threshold)]
    assert result.finished
    assert beyond == [result.step]
    assert result.reason.startswith(f"{metric} is ")


def test_a_run_that_a_threshold_ended_stays_finished_until_the_rule_changes(tmp_path: Path) -> None:
    first = _fit(ThresholdStopper("val/mae", 0.5), folder=tmp_path)
    again = _fit(ThresholdStopper("val/mae", 0.5), folder=tmp_path)
    assert (again.step, again.reason) == (first.step, first.reason)
    further = _fit(ThresholdStopper("val/mae", 0.4), folder=tmp_path)
    assert further.step > first.step


def test_a_metric_that_nothing_reports_is_refused_before_the_first_step() -> None:
    with pytest.raises(UserError, match="val/los"):
        _fit(ThresholdStopper("val/los", 1.0))


def test_the_first_function_that_answers_ends_the_run() -> None:
    asked: list[int] = []

    def never(trainer: Any) -> None:
        asked.append(trainer.progress.step)

    def at_seven(trainer: Any) -> str | bool:
        return "seven are enough" if trainer.progress.step == 7 else False

    result = _fit(EarlyExit([never, at_seven]), grad_accum_steps=2)
    assert (result.step, result.finished, result.reason) == (7, True, "seven are enough")
    assert asked == list(range(1, 8)), "once a step, and not once a batch"


def test_a_registered_function_is_asked_until_its_handle_is_removed() -> None:
    callback = EarlyExit()
    handle = callback.register(lambda trainer: trainer.progress.step >= 2)
    assert _fit(callback).reason == "<lambda> asked for it"
    handle.remove()
    assert _fit(callback).step == 40


def test_a_condition_that_cannot_be_called_is_refused() -> None:
    with pytest.raises(ConfigError, match="3 is no function of the trainer"):
        EarlyExit([3])  # type: ignore[list-item]


@pytest.mark.parametrize("bad", [{"mode": "most"}, {"threshold": float("nan")}, {"threshold": True}])
def test_wrong_settings_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        ThresholdStopper(**{"metric": "val/loss", "threshold": 1.0, **bad})
