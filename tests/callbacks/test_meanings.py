"""What settings mean, by the table of docs/moving.md: a check for each of its rows."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tiny import ListLogger, loader, same, trainer
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from trainer_cli.callbacks.early_stopping import EarlyStopping, ThresholdStopper
from trainer_cli.callbacks.ema import EMA, SWA
from trainer_cli.config.composing import compose
from trainer_cli.errors import ConfigError
from trainer_cli.metric_names import Mode, choose_mode
from trainer_cli.optim.scheduler_intervals import Scheduled
from trainer_cli.policy.rules import BestRule, CheckpointKind, RetentionRules, Saved, SaveFacts, SaveRules
from trainer_cli.schema.checkpoint_config import KeepBestConfig
from trainer_cli.steps.intervals import Duration, Interval
from trainer_cli.steps.progress import Progress
from trainer_cli.trainer.hooks import Callback

ROOT = Path(__file__).parents[2]


class Scores(Callback):
    """The n-th evaluation, at step n, has the n-th score; the last one is repeated."""

    def __init__(self, *scores: float) -> None:
        self.scores = scores

    def run_validation(self, trainer: Any, is_last: bool) -> None:
        step = min(max(trainer.progress.step, 1), len(self.scores))
        trainer.log_metrics({"task/score": self.scores[step - 1]})


def end(*scores: float, logger: Any = None, settings: Any = None, schedulers: Any = None, **stops: Any) -> Any:
    """The result of a run with an evaluation after each step, and of its EarlyStopping."""
    stopping = [EarlyStopping("task/score", "min", **stops)] if stops else []
    made = trainer(
        callbacks=[*stopping, Scores(*scores)],
        settings={"max_duration": 12, "eval_interval": 1, "log_interval": 1, **(settings or {})},
        loggers=[logger or ListLogger()],
        schedulers=schedulers,
    )
    return made.fit(loader(10, 4))


def reductions(plateau: Callable[[Any], Any], *scores: float) -> list[int]:
    """The steps whose evaluation made ReduceLROnPlateau lower the rate."""
    logger = ListLogger()
    end(*scores, logger=logger, schedulers=Scheduled(plateau, metric="task/score"))
    rates = [0.1, *(record.metrics["train/lr"] for record in logger.records if "train/lr" in record.metrics)]
    # A rate is logged with the step that uses it, the one after its evaluation.
    return [step - 1 for step, (before, now) in enumerate(pairwise(rates), 1) if now < before]


def patience_counts_evaluations() -> None:
    assert end(3, 2, 2, 2, 2, patience=3).step == 5
    assert end(3, 2, 2, 2, 2, patience="2ep").step == 2 + 2 * 3, "epochs of three steps"


def patience_of_0_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1, which ends the run at the first evaluation that is not better"):
        EarlyStopping(patience=0)
    assert end(3, 3, patience=1).step == 2


def min_delta_is_exclusive() -> None:
    assert end(3, 2.5, 2.5, patience=1, min_delta=0.5).step == 2, "by just that much is none"
    assert end(3, 2.25, 1.5, 1.5, patience=1, min_delta=0.5).step == 4


def nan_ends_or_is_no_improvement() -> None:
    assert end(3, math.nan, patience=3).step == 2
    assert end(3, math.nan, 3, patience=2, check_finite=False).step == 3


def training_metrics_are_looked_at_once_a_log() -> None:
    stopping = EarlyStopping("train/loss", patience=2, min_delta=1e9)
    settings = {"max_duration": 12, "log_interval": 2}
    assert trainer(callbacks=[stopping], settings=settings).fit(loader(10, 4)).step == 6


def the_last_weights_stay() -> None:
    stopping, rising = EarlyStopping("task/score", "min", patience=2), Scores(1, 2, 3)
    stopped = trainer(callbacks=[stopping, rising], settings={"max_duration": 9, "eval_interval": 1})
    straight = trainer(settings={"max_duration": 3})
    for made in (stopped, straight):
        assert made.fit(loader(10, 4)).step == 3
    assert same(stopped.model.state_dict(), straight.model.state_dict()) == []


def values_before_min_duration_count() -> None:
    assert end(1, 2, 3, 4, 5, 6, patience=2, settings={"min_duration": 5}).step == 5


def modes_follow_names() -> None:
    assert (choose_mode("val/accuracy", "auto", "mode"), choose_mode("val/loss", "auto", "mode")) == ("max", "min")
    with pytest.raises(ConfigError, match="does not tell"):
        choose_mode("val/score", "auto", "mode")


def thresholds_are_inclusive() -> None:
    made = trainer(
        callbacks=[ThresholdStopper("task/score", 2, "min"), Scores(3, 2)],
        settings={"max_duration": 9, "eval_interval": 1},
    )
    assert made.fit(loader(10, 4)).step == 2


def a_plateau_waits_one_evaluation_longer() -> None:
    assert reductions(lambda optimizer: ReduceLROnPlateau(optimizer, patience=2), 5)[0] == 1 + 2 + 1


def the_threshold_of_a_plateau_is_relative() -> None:
    # The second is better by more than 1e-4 of the first only for the smaller one.
    assert reductions(lambda optimizer: ReduceLROnPlateau(optimizer, patience=0), 1.0, 0.999)[0] == 3
    assert reductions(lambda optimizer: ReduceLROnPlateau(optimizer, patience=0), 100.0, 99.999)[0] == 2


def a_cooldown_counts_evaluations() -> None:
    steps = reductions(lambda optimizer: ReduceLROnPlateau(optimizer, patience=0, cooldown=3, factor=0.5), 5)
    assert steps[:2] == [2, 2 + 3 + 1]


def an_ephemeral_cooldown_counts_steps() -> None:
    rules = SaveRules(ephemeral_save_interval=Interval(Duration.parse(1)), ephemeral_cooldown=Duration.parse(3))
    assert [rules.why_save(SaveFacts(Progress(step=step), last_saved_step=4)) is not None for step in (6, 7)] == [
        False,
        True,
    ]


def nothing_is_kept_for_a_metric_by_default() -> None:
    assert KeepBestConfig().metric is None


def of_equal_values_the_newer_stays() -> None:
    rule = BestRule("val/loss", Mode.min, 1)
    older, newer = (Saved(f"step{step}", step, CheckpointKind.ephemeral, metrics={"val/loss": 1.0}) for step in (1, 2))
    assert rule.ranked([older, newer]) == [newer]
    assert rule.why_enter(newer.metrics, [older]) is not None


def the_best_is_kept_beside_max_checkpoints() -> None:
    saved = [
        Saved(f"step{step}", step, CheckpointKind.regular, metrics={"val/loss": float(step)}) for step in range(1, 6)
    ]
    rules = RetentionRules(max_checkpoints=2, keep_best=BestRule("val/loss"))
    assert sorted(rules.why_keep(saved)) == ["step1", "step4", "step5"]


class AveragedByTorch(Callback):
    """AveragedModel of torch, updated after every `every` steps."""

    def __init__(self, every: int = 1) -> None:
        self.every = every
        self.average: Any = None

    def on_train_batch_end(self, trainer: Any, model: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.progress.step % self.every == 0:
            self.average = self.average or AveragedModel(model, multi_avg_fn=cast("Any", get_ema_multi_avg_fn)(0.5))
            self.average.update_parameters(model)


def _averages(ema: EMA, every: int) -> tuple[dict[str, Any], dict[str, Any]]:
    reference = AveragedByTorch(every)
    trainer(callbacks=[ema, reference]).fit(loader(10, 4))
    return ema.state_dict()["average"], dict(reference.average.module.named_parameters())


def decay_and_every_are_those_of_torch() -> None:
    ours, of_torch = _averages(EMA(0.5, every=2, start=2), 2)
    for name, value in of_torch.items():
        torch.testing.assert_close(ours[name], value.detach())


def an_average_begins_with_the_initial_weights() -> None:
    ours, of_torch = _averages(EMA(0.5, start=1), 1)
    other, _ = _averages(EMA(0.5), 1)
    for name, value in of_torch.items():
        torch.testing.assert_close(ours[name], value.detach())
    assert same(ours, other) != []


def the_model_keeps_its_trained_weights() -> None:
    averaged, plain = trainer(callbacks=[EMA(0.5)]), trainer()
    for made in (averaged, plain):
        made.fit(loader(10, 4))
    assert same(averaged.model.state_dict(), plain.model.state_dict()) == []


def the_shipped_average_begins_after_four_fifths() -> None:
    assert compose(["callbacks=swa"]).config.callbacks["swa"]["start"] == "0.8dur"


def an_average_leaves_the_rate() -> None:
    logger = ListLogger()
    trainer(callbacks=[SWA(2, 1)], loggers=[logger], settings={"log_interval": 1}).fit(loader(10, 4))
    assert {record.metrics["train/lr"] for record in logger.records if "train/lr" in record.metrics} == {0.1}


def a_profile_is_written_once() -> None:
    profiler = pytest.importorskip("trainer_cli.addons.inspect.profiling").TorchProfiler
    assert inspect.signature(profiler).parameters["repeat"].default == 1
    assert inspect.signature(torch.profiler.schedule).parameters["repeat"].default == 0


def patience_is_3_by_default() -> None:
    assert EarlyStopping().patience == 3
    assert compose(["callbacks=early_stopping"]).config.callbacks["early_stopping"]["patience"] == 3


MEANINGS: dict[str, Callable[[], None]] = {
    "`EarlyStopping`: `patience`": patience_counts_evaluations,
    "`EarlyStopping`: `patience` of 0": patience_of_0_is_refused,
    "`EarlyStopping`: `patience` by default": patience_is_3_by_default,
    "`EarlyStopping`: `min_delta`": min_delta_is_exclusive,
    "`EarlyStopping`: a NaN": nan_ends_or_is_no_improvement,
    "`EarlyStopping`: a metric of the training": training_metrics_are_looked_at_once_a_log,
    "`EarlyStopping`: weights at the end": the_last_weights_stay,
    "`loop.min_duration`": values_before_min_duration_count,
    "`mode`": modes_follow_names,
    "`ThresholdStopper`: `threshold`": thresholds_are_inclusive,
    "`ReduceLROnPlateau`: `patience`": a_plateau_waits_one_evaluation_longer,
    "`ReduceLROnPlateau`: `threshold`": the_threshold_of_a_plateau_is_relative,
    "`ReduceLROnPlateau`: `cooldown`, `factor`": a_cooldown_counts_evaluations,
    "`checkpoint.ephemeral_cooldown`": an_ephemeral_cooldown_counts_steps,
    "`keep_best`: `metric` by default": nothing_is_kept_for_a_metric_by_default,
    "`keep_best`: `count`": of_equal_values_the_newer_stays,
    "`checkpoint.max_checkpoints`": the_best_is_kept_beside_max_checkpoints,
    "`EMA`: `decay`, `every`": decay_and_every_are_those_of_torch,
    "`EMA`: `start`": an_average_begins_with_the_initial_weights,
    "`EMA`: the model after the fit": the_model_keeps_its_trained_weights,
    "`SWA`: `start`": the_shipped_average_begins_after_four_fifths,
    "`SWA`: the learning rate": an_average_leaves_the_rate,
    "`TorchProfiler`: `repeat`": a_profile_is_written_once,
}


def test_each_row_of_the_table_is_run() -> None:
    text = (ROOT / "docs/moving.md").read_text("utf-8").split("## What settings of the same name mean\n")[1]
    rows = re.findall(r"^\| (`.*?) \| ", text.split("\n## ")[0], re.MULTILINE)
    assert rows == [*MEANINGS]


@pytest.mark.parametrize("row", MEANINGS)
def test_a_setting_means_what_the_table_says(row: str) -> None:
    MEANINGS[row]()
