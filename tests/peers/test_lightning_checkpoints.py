"""The claims of Lightning's tests about its ModelCheckpoint: when it saves, what it keeps, under which names."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peer_claims import Claim, claims, each, try_claim
from small_runs import Run, Script, fit, make_trainer, saved
from torch import nn

from trainer_cli import Callback, CheckpointerCallback, ConfigError, Scheduled, Trainer

BEST = {"metric": "val/score"}
TOP = "test_model_checkpoint: "


def manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint."""
    content: dict[str, Any] = json.loads((path / "manifest.json").read_text())
    return content


def check_saved(folder: Path, save: Mapping[str, Any], loop: Mapping[str, Any], batches: int, steps: Any) -> None:
    fit(folder, save={"save_final": False, **save}, loop=loop, batches=batches)
    assert saved(folder) == list(steps)


def check_saved_by_time(folder: Path, interval: str, least: int, most: int) -> None:
    class Sleep(Callback):
        def on_train_batch_start(self, trainer: Trainer, model: nn.Module, batch: Any, batch_idx: int) -> None:
            time.sleep(0.01)

    fit(folder, save={"save_interval": interval, "save_final": False}, loop={"max_duration": 8}, callbacks=[Sleep()])
    assert least <= len(saved(folder)) <= most


def check_refused(folder: Path, save: Mapping[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        CheckpointerCallback(folder / "checkpoints", **save)
    assert not (folder / "checkpoints").exists()


def check_refused_link(folder: Path, url: str) -> None:
    with pytest.raises(ConfigError, match="latest_link"):
        CheckpointerCallback(url, latest_link=True)


def check_accepted(folder: Path, save: Mapping[str, Any]) -> None:
    fit(folder, save=save)
    assert saved(folder)[-1] == 4


def fit_scored(folder: Path, scores: Sequence[float], best: Mapping[str, Any], **save: Any) -> Run:
    """One step, one evaluation with the next of the scores, and so on."""
    return fit(
        folder,
        batches=1,
        save={"save_final": False, "keep_best": {**BEST, **best}, **save},
        loop={"max_duration": len(scores), "eval_interval": 1},
        callbacks=[Script(scores)],
    )


def check_kept(folder: Path, scores: Sequence[float], best: Mapping[str, Any], steps: Sequence[int]) -> None:
    fit_scored(folder, scores, best)
    assert saved(folder) == steps


def check_number_of_saves(folder: Path, count: int, epochs: int, interval: str, saves: int) -> None:
    class Saves(Callback):
        number = 0

        def on_after_save_checkpoint(self, trainer: Trainer, path: Path) -> None:
            self.number += 1

    counted = Saves()
    fit(
        folder,
        batches=10,
        save={"save_final": False, "keep_best": {**BEST, "count": count}},
        loop={"max_duration": f"{epochs}ep", "eval_interval": interval},
        callbacks=[Script([10 * 0.99**number for number in range(20)]), counted],
    )
    assert counted.number == saves
    assert len(saved(folder)) == count


def check_evaluated_epochs(folder: Path, interval: str, epochs: int, steps: Sequence[int]) -> None:
    fit(
        folder,
        batches=1,
        save={"save_final": False, "keep_best": {**BEST, "count": 9}},
        loop={"max_duration": epochs, "eval_interval": interval},
        callbacks=[Script([1])],
    )
    assert saved(folder) == [*steps, epochs]


def check_scores_in_manifests(folder: Path, scores: Sequence[float]) -> None:
    fit_scored(folder, scores, {}, save_interval=1)
    at = [manifest(folder / "checkpoints" / f"step{step}")["metrics"]["val/score"] for step in saved(folder)]
    assert at == list(scores)


def check_score_and_rate(folder: Path, metric: str, interval: str, plateau: bool) -> None:
    """Checkpoints made for a metric have it, and the rates after the schedule's step of that moment."""

    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        if plateau:
            return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

    run = fit(
        folder,
        batches=12,
        save={"save_final": False, "keep_best": {"metric": metric, "count": 20}},
        loop={"max_duration": "3ep", "eval_interval": interval, "log_interval": interval},
        callbacks=[Script([3, 1, 2])],
        schedulers=Scheduled(schedule, metric=metric if plateau else None),
    )
    logged = run.log.values(metric)
    assert saved(folder) == sorted(logged)
    for step, value in logged.items():
        path = folder / "checkpoints" / f"step{step}"
        assert manifest(path)["metrics"][metric] == value
        trainer = make_trainer(schedulers=Scheduled(schedule, metric=metric if plateau else None))
        trainer.load_checkpoint(path)
        assert trainer.optimizer is not None
        rate = trainer.optimizer.param_groups[0]["lr"]
        assert rate == pytest.approx(0.1 if plateau else 0.1 * 0.5 ** (step // 12))


def check_not_scored(folder: Path, mode: str) -> None:
    fit_scored(folder, [math.nan] * 3, {"mode": mode})
    assert not saved(folder)


def check_is_best(folder: Path, scores: Sequence[float], mode: str, step: int) -> None:
    run = fit_scored(folder, scores, {"mode": mode}, save_interval=1, max_checkpoints=1)
    checkpoint = run.trainer.checkpoint
    assert isinstance(checkpoint, CheckpointerCallback)
    assert saved(folder) == sorted({step, len(scores)})
    assert step == len(scores) or "best" in checkpoint.kept()[f"step{step}"]


CLAIMS: list[Claim] = [
    *claims(
        f"{TOP}test_model_checkpoint_every_n_epochs",
        check_saved,
        {
            "every epoch of five has a checkpoint": ({"save_interval": "1ep"}, {"max_duration": "5ep"}, 1, range(1, 6)),
            "every second epoch has one": ({"save_interval": "2ep"}, {"max_duration": "5ep"}, 1, [2, 4]),
            "every third epoch has one": ({"save_interval": "3ep"}, {"max_duration": "5ep"}, 1, [3]),
            "an interval that is off saves nothing": ({"save_interval": None}, {"max_duration": "5ep"}, 1, []),
        },
    ),
    *claims(
        f"{TOP}test_ckpt_every_n_train_steps",
        check_saved,
        {
            "saves come every 16 steps over two epochs": (
                {"save_interval": 16},
                {"max_duration": 64},
                32,
                [16, 32, 48, 64],
            )
        },
    ),
    *claims(
        f"{TOP}test_model_checkpoint_train_time_interval",
        check_saved_by_time,
        {"an interval may be a time": ("0.02s", 1, 8), "a time that has not passed saves nothing": ("1h", 0, 0)},
    ),
    *claims(
        "test_checkpoint_callback_frequency: test_default_checkpoint_freq",
        check_saved,
        {
            "one epoch leaves one checkpoint by default": ({"save_interval": "1ep"}, {"max_duration": "1ep"}, 10, [10]),
            "two epochs leave two": ({"save_interval": "1ep"}, {"max_duration": "2ep"}, 10, [10, 20]),
            "a quarter of an epoch gives four": ({"save_interval": "0.25ep"}, {"max_duration": 12}, 12, [3, 6, 9, 12]),
        },
    ),
    *claims(
        "test_checkpoint_callback_frequency: test_default_checkpoint_freq",
        check_saved,
        {
            "0.3 of an epoch gives six saves in two epochs": (
                {"save_interval": "0.3ep"},
                {"max_duration": "2ep"},
                10,
                [3, 6, 9, 12, 15, 18],
            )
        },
        difference="Six, too, but counted from the run's beginning and not anew in each epoch, so that a resume in the "
        "middle of an epoch shifts none.",
    ),
    *claims(
        "test_checkpoint_callback_frequency: test_disabled_checkpointing",
        check_saved,
        {"nothing is saved where saving is off": ({"enabled": False, "save_interval": 1}, {"max_duration": 4}, 4, [])},
    ),
    *claims(
        f"{TOP}test_val_check_interval_checkpoint_files",
        check_saved,
        {
            "five saves in an epoch are called by their steps": (
                {"save_interval": "0.2ep"},
                {"max_duration": "1ep"},
                10,
                [2, 4, 6, 8, 10],
            )
        },
    ),
    *claims(
        f"{TOP}test_save_last_every_n_epochs_interaction",
        check_saved,
        {
            "the last state is saved though no interval is set": (
                {"save_final": True},
                {"max_duration": "2ep"},
                1,
                [2],
            ),
            "the last state is saved between two intervals": (
                {"save_final": True, "save_interval": "5ep"},
                {"max_duration": "7ep"},
                1,
                [5, 7],
            ),
        },
    ),
    *claims(
        f"{TOP}test_save_last_without_save_on_train_epoch_and_without_val",
        check_saved,
        {"without validation the last state is saved, too": ({"save_final": True}, {"max_duration": "2ep"}, 3, [6])},
    ),
    *claims(
        f"{TOP}test_train_epoch_end_ckpt_with_no_validation",
        check_saved,
        {"without validation epochs are saved": ({"save_interval": "1ep"}, {"eval_interval": "0.5ep"}, 2, [2, 4])},
    ),
    *claims(
        f"{TOP}test_model_checkpoint_topk_zero",
        check_saved,
        {
            "with no interval and no metric only the last state stays": (
                {"save_final": True},
                {"max_duration": 6},
                2,
                [6],
            )
        },
    ),
    *claims(
        f"{TOP}test_model_checkpoint_save_last_none_monitor",
        check_saved,
        {"without a metric all are kept": ({"save_interval": "1ep"}, {"max_duration": "2ep"}, 10, [10, 20])},
    ),
    *claims(
        f"{TOP}test_default_checkpoint_behavior",
        check_saved,
        {
            "of three epochs only the newest stays, if that is asked for": (
                {"save_interval": "1ep", "max_checkpoints": 1},
                {"max_duration": "3ep"},
                5,
                [15],
            )
        },
        difference="By default all checkpoints stay, since nothing is removed that was not asked for; "
        "checkpoint.max_checkpoints=1 keeps the newest alone.",
    ),
    *claims(
        f"{TOP}test_none_monitor_not_alternating",
        check_saved,
        {
            "a single checkpoint is replaced under a name of its step": (
                {"save_interval": 1, "max_checkpoints": 1},
                {"max_duration": 3},
                1,
                [3],
            )
        },
        difference="A name always has the step, so the one that is kept never takes over the name of another.",
    ),
    *claims(
        f"{TOP}test_invalid_top_k",
        check_refused,
        {"a negative number of best checkpoints is refused": ({"keep_best": {**BEST, "count": -3}}, "count")},
    ),
    *claims(
        f"{TOP}test_none_monitor_top_k",
        check_refused,
        {"three of the best without a metric are refused": ({"keep_best": {"count": 3}}, "metric")},
    ),
    *claims(
        f"{TOP}test_none_monitor_top_k",
        check_accepted,
        {
            "all without a metric are accepted": ({"save_interval": 1},),
            "none without a metric is accepted": ({"keep_best": {}},),
            "one without a metric is accepted": ({"max_checkpoints": 1},),
        },
    ),
    *claims(
        f"{TOP}test_invalid_every_n_epochs",
        check_refused,
        {"a negative number of epochs is refused": ({"save_interval": "-3ep"}, "save_interval")},
    ),
    *claims(
        f"{TOP}test_invalid_every_n_train_steps",
        check_refused,
        {"a negative number of steps is refused": ({"save_interval": -3}, "save_interval")},
    ),
    *claims(
        f"{TOP}test_invalid_every_n_train_steps",
        check_refused,
        {"0 as an interval is refused": ({"save_interval": 0}, "more than zero")},
        difference="0 turns Lightning's interval off; here off is null, and 0 is refused as a likely mistake.",
    ),
    *claims(
        f"{TOP}test_invalid_trigger_combination",
        check_saved,
        {
            "steps and epochs may be combined": (
                {"save_interval": "2ep", "ephemeral_save_interval": 3},
                {"max_duration": 10},
                4,
                [8, 9],
            )
        },
        difference="Lightning refuses two intervals; here one is for good, the other for safety, and may be of another "
        "unit: a safety save goes once a newer one is there.",
    ),
    *claims(
        f"{TOP}test_model_checkpoint_mode_options",
        check_refused,
        {"an unknown mode is refused": ({"keep_best": {**BEST, "mode": "unknown"}}, "mode")},
    ),
    *claims(
        f"{TOP}test_model_checkpoint_save_last_as_link_not_local",
        check_refused_link,
        {"a link in a store is refused": ("memory://bucket/x",)},
    ),
    *claims(
        "test_trainer: test_model_checkpoint_options",
        check_kept,
        {
            "of losses 10, 9, 2.8, 5, 2.5 five best are all": ([10, 9, 2.8, 5, 2.5], {"count": 5}, [1, 2, 3, 4, 5]),
            "the best one is the fifth": ([10, 9, 2.8, 5, 2.5], {"count": 1}, [5]),
            "the best two are third and fifth": ([10, 9, 2.8, 5, 2.5], {"count": 2}, [3, 5]),
            "the best three are the last three": ([10, 9, 2.8, 5, 2.5], {"count": 3}, [3, 4, 5]),
            "the best four are all but the first": ([10, 9, 2.8, 5, 2.5], {"count": 4}, [2, 3, 4, 5]),
        },
    ),
    *claims(
        f"{TOP}test_save_last_only_when_checkpoint_saved",
        check_kept,
        {"a score that is not among the best saves nothing": ([1, 1.1, 0.8, 1.3], {"count": 1}, [3])},
    ),
    *claims(
        f"{TOP}test_checkpointing_with_nan_as_first",
        check_kept,
        {
            "after a NaN the smallest score is kept": ([math.nan, 8, 7, 5], {"mode": "min"}, [4]),
            "after a NaN the largest score is kept": ([math.nan, 5, 7, 8], {"mode": "max"}, [4]),
        },
    ),
    *claims(
        f"{TOP}test_current_score_when_nan",
        check_not_scored,
        {"NaN as a smallest score is not best": ("min",), "NaN as a largest score is not best": ("max",)},
        difference="Lightning counts NaN as infinite and keeps it as the best there is; here a score that is no number "
        "enters no list of the best, and saves nothing.",
    ),
    *claims(
        f"{TOP}test_current_score",
        check_scores_in_manifests,
        {"each checkpoint has the score of its own step": ([0.1, 0.2, 0.3],)},
    ),
    *claims(
        f"{TOP}test_model_checkpoint_topk_all",
        check_is_best,
        {
            "of rising scores the last is best": ([0, 1, 2], "max", 3),
            "of falling scores under max the first is best, beside the newest": ([2, 1, 0], "max", 1),
        },
    ),
    *claims(
        f"{TOP}test_check_val_every_n_epochs_top_k_integration",
        check_evaluated_epochs,
        {"with an evaluation every second epoch of five, the second and fourth are saved": ("2ep", 5, [2, 4])},
        difference="The fifth is saved as well: the end of a run is always evaluated, so that its score is known.",
    ),
    *claims(
        "test_checkpoint_callback_frequency: test_top_k",
        check_number_of_saves,
        {
            "one best of one evaluation is saved once": (1, 1, "1ep", 1),
            "two best of two evaluations are two saves": (2, 2, "1ep", 2),
            "two best of four improving evaluations are four saves": (2, 1, "0.25ep", 4),
        },
    ),
    *claims(
        "test_checkpoint_callback_frequency: test_top_k",
        check_number_of_saves,
        {"two best of the evaluations every 0.3 of two epochs are seven saves": (2, 2, "0.3ep", 7)},
        difference="Lightning makes six: here the run's end is evaluated, too, and its score is the best.",
    ),
    *claims(
        f"{TOP}test_model_checkpoint_score_and_ckpt",
        check_score_and_rate,
        {
            "a save for a validation score has score and stepped rates": ("val/score", "1ep", False),
            "a save for a training score has them": ("train/mae", "1ep", False),
            "a save for a validation score has them under a plateau schedule": ("val/score", "1ep", True),
        },
    ),
    *claims(
        f"{TOP}test_model_checkpoint_score_and_ckpt_val_check_interval",
        check_score_and_rate,
        {
            "so has each of four saves an epoch": ("val/score", "0.25ep", False),
            "and each of four under a plateau schedule": ("val/score", "0.25ep", True),
            "and saves that do not meet the epoch's end": ("val/score", 5, False),
        },
    ),
]


@each(CLAIMS)
def test_the_claim_holds(claim: Claim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try_claim(claim, tmp_path, monkeypatch)
