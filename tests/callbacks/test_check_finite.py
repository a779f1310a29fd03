"""CheckFinite: a planted NaN ends the training, skips the step, or sends the training back; none of it is saved."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import Plant, fit_and_save
from tiny import ListLogger, Noisy, StopAt, everything, loader, same, trainer

from trainer_cli.callbacks.check_finite import CheckFinite
from trainer_cli.callbacks.ema import EMA, SWA
from trainer_cli.checkpoint.checkpointer import make_sync_checkpointer
from trainer_cli.errors import NotFiniteError
from trainer_cli.trainer.hooks import Callback
from trainer_cli.trainer.precision import Precision
from trainer_cli.trainer.train_step import TrainStep


def _fit(folder: Path, finite: CheckFinite, *callbacks: Callback, **more: Any) -> Any:
    return fit_and_save(folder, {"finite": finite}, *callbacks, **more)


def _saved(folder: Path) -> list[str]:
    return sorted((path.name for path in (folder / "ckpt").glob("step*")), key=lambda name: int(name[4:]))


def _finite(made: Any) -> bool:
    return all(bool(torch.isfinite(value).all()) for value in made.model.state_dict().values())


ALL = [(epoch, batch) for epoch in range(4) for batch in range(5)]
"""The places of the batches of `loader(20)`, in their order."""
FIFTH = (0, 4)


@pytest.mark.parametrize("how", ["input", "target"])
def test_raise_ends_the_training_before_anything_is_logged_or_saved(how: str, tmp_path: Path) -> None:
    logger = ListLogger()
    # At the next event: that of step 6, or one before it, such as the end of a write.
    with pytest.raises(NotFiniteError, match=r"not finite at step [56]") as caught:
        _fit(tmp_path, CheckFinite(), Plant(FIFTH, how=how), logger=logger)
    assert "step3" in str(caught.value)
    assert _saved(tmp_path) == ["step0", "step3"]
    assert max(record.step for record in logger.records) == 4


def test_the_check_is_also_before_an_evaluation_and_the_end(tmp_path: Path) -> None:
    none = {"log_interval": None, "eval_interval": 4}
    with pytest.raises(NotFiniteError, match="not finite at step 4"):
        _fit(tmp_path / "evaluated", CheckFinite(), Plant((0, 3)), settings=none)
    none = {"log_interval": None, "eval_interval": None, "max_duration": 5}
    with pytest.raises(NotFiniteError, match="not finite at step 5"):
        _fit(tmp_path / "ended", CheckFinite(), Plant(FIFTH), settings=none)


@pytest.mark.parametrize(("how", "accumulated"), [("input", 1), ("target", 2)])
def test_skip_leaves_out_the_step_and_nothing_else(how: str, accumulated: int, tmp_path: Path) -> None:
    """Weights, moments and the statistics of batch norm are those of a training that has no such step."""

    class Watch(Callback):
        def __init__(self) -> None:
            self.states: list[Any] = []

        def on_train_batch_end(self, trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.progress.step == len(self.states) + 1:
                moments = list(trainer.optimizer.state.values())
                state = {"model": model.state_dict(), "moments": [{**one, "step": 0} for one in moments]}
                self.states.append(copy.deepcopy(state))

    watch, logger, finite = Watch(), ListLogger(), CheckFinite("skip")
    made = _fit(
        tmp_path, finite, watch, Plant(FIFTH, (1, 2), how=how), logger=logger,
        settings={"grad_accum_steps": accumulated},
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), 0.01),
    )  # fmt: skip
    bad = [step + 1 for step in range(1, 12) if same(watch.states[step - 1], watch.states[step]) == []]
    assert bad == ([5, 8] if accumulated == 1 else [3, 5])
    assert finite.times == len(bad)
    assert _finite(made)
    losses = [record.metrics["train/loss"] for record in logger.records if "train/loss" in record.metrics]
    assert all(loss == loss for loss in losses), "a skipped batch is in no mean"
    counts = [record.metrics["train/skipped_steps"] for record in logger.records if "train/loss" in record.metrics]
    assert counts == [sum(step <= now for step in bad) for now in range(2, 13, 2)]


def test_skip_changes_nothing_while_all_is_finite(tmp_path: Path) -> None:
    bare = _fit(tmp_path / "bare", CheckFinite())
    skipping = _fit(tmp_path / "skipping", CheckFinite("skip"))
    assert same(bare.model.state_dict(), skipping.model.state_dict()) == []


def test_more_than_max_times_end_the_training(tmp_path: Path) -> None:
    with pytest.raises(NotFiniteError, match="skipped 2 steps up to step 6"):
        _fit(tmp_path / "skip", CheckFinite("skip", max_times=1), Plant(FIFTH, (1, 0)))
    with pytest.raises(NotFiniteError, match="went back 1 time,"):
        _fit(tmp_path / "back", CheckFinite("roll_back", max_times=1), Plant((0, 4), (1, 1)))
    with pytest.raises(NotFiniteError, match="cannot go back"):
        trainer(Noisy, callbacks=[CheckFinite("roll_back"), Plant((0, 0))]).fit(loader(20))


def test_roll_back_passes_over_the_data_and_logs_each_step_once(tmp_path: Path) -> None:
    plant, logger, finite = Plant(FIFTH), ListLogger(), CheckFinite("roll_back")
    made = _fit(tmp_path, finite, plant, logger=logger, settings={"max_duration": "2ep", "eval_interval": "1ep"})
    assert (finite.times, made.progress.step) == (1, 10), "the training is as long as without"
    # Noticed before the evaluation of step 5; back to step 3; steps 4 to 10 are made over the batches after the fifth.
    assert plant.seen == ALL[:12]
    assert made.progress.passed_over == 2
    assert (made.progress.epoch, made.progress.batch) == (2, 2)
    assert [record.step for record in logger.records if "train/loss" in record.metrics] == [2, 4, 6, 8, 10]
    assert [record.step for record in logger.records if "val/loss" in record.metrics] == [5, 10]
    assert _saved(tmp_path) == ["step0", "step3", "step6", "step9", "step10"]
    assert _finite(made)


def test_a_resume_after_a_roll_back_is_exact(tmp_path: Path) -> None:
    """Stopped before the roll-back, with it, and after it; what a stop saves is no place to go back to."""
    settings = {"max_duration": "3ep", "eval_interval": "1ep"}
    adam = {"optimizer": lambda model: torch.optim.Adam(model.parameters(), 0.01), "settings": settings}
    straight = ListLogger()
    whole = _fit(tmp_path / "whole", CheckFinite("roll_back"), Plant(FIFTH), logger=straight, **adam)
    for stop in (4, 5, 8):
        folder, logger = tmp_path / str(stop), ListLogger()
        _fit(folder, CheckFinite("roll_back"), Plant(FIFTH), StopAt(stop), logger=logger, **adam)
        resumed = _fit(folder, CheckFinite("roll_back"), Plant(FIFTH), logger=logger, **adam)
        assert same(everything(whole), everything(resumed)) == [], stop
        assert logger.stream == straight.stream


class PlantLoss(Plant):
    """Makes the loss alone NaN; the gradients stay finite."""

    def on_train_step_start(self, trainer: Any, model: Any, batch: Any) -> None:
        super().on_train_step_start(trainer, model, [torch.zeros(()), torch.zeros(())])

    def on_after_forward(self, trainer: Any, model: Any, outputs: Any, batch: Any) -> None:
        if model.training and self.seen[-1] in self.places:
            outputs[0].data.fill_(float("nan"))


PLACES = {"first": (0, 0), "evaluated": (0, 3), "last": (2, 1)}


@pytest.mark.parametrize(
    ("policy", "place", "plant", "more"),
    [
        *((policy, place, Plant, "") for policy in ("skip", "roll_back") for place in PLACES),
        ("skip", "evaluated", PlantLoss, "fp16"),
        ("roll_back", "evaluated", PlantLoss, ""),
        ("roll_back", "evaluated", Plant, "fp16"),
        ("skip", "first", PlantLoss, "accumulated"),
        ("roll_back", "evaluated", Plant, "accumulated"),
    ],
)
def test_a_nan_at_any_step_leaves_no_trace(
    policy: str, place: str, plant: type[Plant], more: str, tmp_path: Path
) -> None:
    """Beside averages of weights and buffers, with one bad batch of two in a step, and with the loss scale of fp16."""
    seen: list[int] = []

    class Evaluated(Callback):
        def on_validate_start(self, trainer: Any, model: Any, val_loader: Any, loop: Any) -> None:
            assert all(bool(torch.isfinite(value).all()) for value in model.state_dict().values())
            seen.append(trainer.progress.step)

    settings: dict[str, Any] = {"max_duration": 12, "eval_interval": 4, "log_interval": 2}
    if more == "accumulated":
        settings |= {"max_duration": 6, "eval_interval": 2, "grad_accum_steps": 2}
    finite, logger = CheckFinite(policy), ListLogger()
    profiling = pytest.importorskip("trainer_cli.addons.inspect.profiling")
    beside = [SWA(1, 1), EMA(0.5), profiling.Throughput(), profiling.DurationProfiler()]
    made = _fit(
        tmp_path, finite, *beside, plant(PLACES[place]), Evaluated(), logger=logger, settings=settings,
        precision=Precision("fp16", loss_scale=8.0) if more == "fp16" else None,
    )  # fmt: skip
    assert finite.times == 1
    assert made.progress.step == settings["max_duration"]
    assert made.progress.passed_over == 0 if policy == "skip" else made.progress.passed_over > 0
    assert seen == list(range(settings["eval_interval"], made.progress.step + 1, settings["eval_interval"]))
    for name in _saved(tmp_path):
        saved = make_sync_checkpointer().read(tmp_path / "ckpt" / name)
        assert all(bool(torch.isfinite(one).all()) for one in _leaves(saved) if one.is_floating_point()), name
    metrics = {key: value for record in logger.records for key, value in record.metrics.items()}
    assert all(math.isfinite(value) for value in metrics.values()), metrics
    rates = [
        record.metrics["train/throughput/steps_per_s"] for record in logger.records if "train/loss" in record.metrics
    ]
    assert min(rates) > 0


def _leaves(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _leaves(one)


@pytest.mark.parametrize("of", ["first", "second"])
def test_of_two_optimizers_a_loss_that_is_not_finite_skips_those_after_it(of: str) -> None:
    """And no step that follows."""

    class Alternating(TrainStep):
        def train_batch(self, batch: Any) -> Any:
            for name in ("first", "second"):
                loss = self.forward(batch)[0]
                if name == of and self.step_idx == 2:
                    loss = loss * float("nan")
                self.backward(loss, name)
                self.optimizer_step(name)
            return loss.detach()

    changed: dict[str, list[int]] = {"first": [], "second": []}

    class Watch(Callback):
        def on_before_optimizer_step(self, trainer: Any, model: Any, optimizer: Any) -> None:
            self.before = [one.detach().clone() for group in optimizer.param_groups for one in group["params"]]

        def on_after_optimizer_step(self, trainer: Any, model: Any, optimizer: Any) -> None:
            after = [one for group in optimizer.param_groups for one in group["params"]]
            name = next(key for key, one in trainer.optimizers.items() if one is optimizer)
            if any(not torch.equal(one, before) for one, before in zip(after, self.before, strict=True)):
                changed[name].append(trainer.progress.step)

    finite, ema = CheckFinite("skip"), EMA(0.5)
    made = trainer(
        Noisy, callbacks=[finite, ema, Watch()], step=Alternating(), settings={"max_duration": 5},
        optimizer={
            # The order of the config is not that of the step.
            "second": lambda model: torch.optim.SGD(model.body[4].parameters(), lr=0.1),
            "first": lambda model: torch.optim.SGD([*model.body[0].parameters(), *model.body[1].parameters()], lr=0.1),
        },
    )  # fmt: skip
    made.fit(loader(20))
    assert changed == {"first": [0, 1, 3, 4] if of == "first" else [0, 1, 2, 3, 4], "second": [0, 1, 3, 4]}
    assert finite.times == 1
