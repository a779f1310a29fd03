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
from small_runs import Run, Script, fit, make_trainer, saved
from torch import nn

from trainer_cli import Callback, CheckpointerCallback, ConfigError, Scheduled, Trainer

BEST = {"metric": "val/score"}


def manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint."""
    content: dict[str, Any] = json.loads((path / "manifest.json").read_text())
    return content


@pytest.mark.parametrize(
    ("save", "loop", "batches", "steps"),
    [
        ({"save_interval": "1ep"}, {"max_duration": "5ep"}, 1, range(1, 6)),
        ({"save_interval": "2ep"}, {"max_duration": "5ep"}, 1, [2, 4]),
        ({"save_interval": "3ep"}, {"max_duration": "5ep"}, 1, [3]),
        ({"save_interval": None}, {"max_duration": "5ep"}, 1, []),
        ({"save_interval": 16}, {"max_duration": 64}, 32, [16, 32, 48, 64]),
        ({"save_interval": "1ep"}, {"max_duration": "1ep"}, 10, [10]),
        ({"save_interval": "1ep"}, {"max_duration": "2ep"}, 10, [10, 20]),
        ({"save_interval": "0.25ep"}, {"max_duration": 12}, 12, [3, 6, 9, 12]),
        ({"save_interval": "0.3ep"}, {"max_duration": "2ep"}, 10, [3, 6, 9, 12, 15, 18]),
        ({"enabled": False, "save_interval": 1}, {"max_duration": 4}, 4, []),
        ({"save_interval": "0.2ep"}, {"max_duration": "1ep"}, 10, [2, 4, 6, 8, 10]),
        ({"save_final": True}, {"max_duration": "2ep"}, 1, [2]),
        ({"save_final": True, "save_interval": "5ep"}, {"max_duration": "7ep"}, 1, [5, 7]),
        ({"save_final": True}, {"max_duration": "2ep"}, 3, [6]),
        ({"save_interval": "1ep"}, {"eval_interval": "0.5ep"}, 2, [2, 4]),
        ({"save_final": True}, {"max_duration": 6}, 2, [6]),
        ({"save_interval": "1ep", "max_checkpoints": 1}, {"max_duration": "3ep"}, 5, [15]),
        ({"save_interval": 1, "max_checkpoints": 1}, {"max_duration": 3}, 1, [3]),
        ({"save_interval": "2ep", "ephemeral_save_interval": 3}, {"max_duration": 10}, 4, [8, 9]),
    ],
)
def test_steps_that_leave_a_checkpoint(
    folder: Path, save: Mapping[str, Any], loop: Mapping[str, Any], batches: int, steps: Any
) -> None:
    fit(folder, save={"save_final": False, **save}, loop=loop, batches=batches)
    assert saved(folder) == list(steps)


@pytest.mark.parametrize(("interval", "least", "most"), [("0.02s", 1, 8), ("1h", 0, 0)])
def test_an_interval_may_be_a_time(folder: Path, interval: str, least: int, most: int) -> None:
    class Sleep(Callback):
        def on_train_batch_start(self, trainer: Trainer, model: nn.Module, batch: Any, batch_idx: int) -> None:
            time.sleep(0.01)

    fit(folder, save={"save_interval": interval, "save_final": False}, loop={"max_duration": 8}, callbacks=[Sleep()])
    assert least <= len(saved(folder)) <= most


@pytest.mark.parametrize(
    ("save", "match"),
    [
        ({"keep_best": {**BEST, "count": -3}}, "count"),
        ({"keep_best": {"count": 3}}, "metric"),
        ({"save_interval": "-3ep"}, "save_interval"),
        ({"save_interval": -3}, "save_interval"),
        ({"save_interval": 0}, "more than zero"),
        ({"keep_best": {**BEST, "mode": "unknown"}}, "mode"),
    ],
)
def test_wrong_settings_of_saves_are_refused(folder: Path, save: Mapping[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        CheckpointerCallback(folder / "checkpoints", **save)
    assert not (folder / "checkpoints").exists()


@pytest.mark.parametrize("save", [{"save_interval": 1}, {"keep_best": {}}, {"max_checkpoints": 1}])
def test_settings_without_a_metric_are_accepted(folder: Path, save: Mapping[str, Any]) -> None:
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


@pytest.mark.parametrize(
    ("scores", "best", "steps"),
    [
        ([10, 9, 2.8, 5, 2.5], {"count": 5}, [1, 2, 3, 4, 5]),
        ([10, 9, 2.8, 5, 2.5], {"count": 1}, [5]),
        ([10, 9, 2.8, 5, 2.5], {"count": 2}, [3, 5]),
        ([10, 9, 2.8, 5, 2.5], {"count": 3}, [3, 4, 5]),
        ([10, 9, 2.8, 5, 2.5], {"count": 4}, [2, 3, 4, 5]),
        ([1, 1.1, 0.8, 1.3], {"count": 1}, [3]),
        ([math.nan, 8, 7, 5], {"mode": "min"}, [4]),
        ([math.nan, 5, 7, 8], {"mode": "max"}, [4]),
    ],
)
def test_the_best_scores_are_kept(
    folder: Path, scores: Sequence[float], best: Mapping[str, Any], steps: Sequence[int]
) -> None:
    fit_scored(folder, scores, best)
    assert saved(folder) == steps


@pytest.mark.parametrize(
    ("count", "epochs", "interval", "saves"),
    [(1, 1, "1ep", 1), (2, 2, "1ep", 2), (2, 1, "0.25ep", 4), (2, 2, "0.3ep", 7)],
)
def test_each_improvement_is_one_save(folder: Path, count: int, epochs: int, interval: str, saves: int) -> None:
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


@pytest.mark.parametrize("scores", [[0.1, 0.2, 0.3]])
def test_each_checkpoint_has_the_score_of_its_own_step(folder: Path, scores: Sequence[float]) -> None:
    fit_scored(folder, scores, {}, save_interval=1)
    at = [manifest(folder / "checkpoints" / f"step{step}")["metrics"]["val/score"] for step in saved(folder)]
    assert at == list(scores)


@pytest.mark.parametrize(
    ("metric", "interval", "plateau"),
    [
        ("val/score", "1ep", False),
        ("train/mae", "1ep", False),
        ("val/score", "1ep", True),
        ("val/score", 5, False),
    ],
)
def test_saves_for_a_score_have_stepped_rates(folder: Path, metric: str, interval: str, plateau: bool) -> None:
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


@pytest.mark.parametrize("mode", ["min", "max"])
def test_nan_is_no_score(folder: Path, mode: str) -> None:
    fit_scored(folder, [math.nan] * 3, {"mode": mode})
    assert not saved(folder)


@pytest.mark.parametrize(("scores", "mode", "step"), [([0, 1, 2], "max", 3), ([2, 1, 0], "max", 1)])
def test_the_best_checkpoint_outlives_the_rotation(folder: Path, scores: Sequence[float], mode: str, step: int) -> None:
    run = fit_scored(folder, scores, {"mode": mode}, save_interval=1, max_checkpoints=1)
    checkpoint = run.trainer.checkpoint
    assert isinstance(checkpoint, CheckpointerCallback)
    assert saved(folder) == sorted({step, len(scores)})
    assert step == len(scores) or "best" in checkpoint.kept()[f"step{step}"]
