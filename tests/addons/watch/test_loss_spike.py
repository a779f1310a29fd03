"""LossSpike: a loss far above those before it stops the training, is left out, or sends it back; exact over resumes."""

from __future__ import annotations

import copy
import logging
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import Plant, fit_and_save
from tiny import Line, ListLogger, StopAt, everything, same

from trainer_cli.addons.watch.loss_spike import LossSpike
from trainer_cli.callbacks.check_finite import CheckFinite
from trainer_cli.catalog import Catalog
from trainer_cli.errors import ConfigError, TrainError
from trainer_cli.trainer.hooks import Callback
from trainer_cli.trainer.precision import Precision

SPIKE = (1, 3)
"""The place of the ninth batch of `loader(20)`, which has five in an epoch."""


def _plant(*places: tuple[int, int], value: float = 1e3) -> Plant:
    """Makes the targets of batches huge."""
    return Plant(*places, how="target", value=value)


def _fit(folder: Path, spike: LossSpike | None, *callbacks: Callback, **more: Any) -> Any:
    settings = {"max_duration": 15, **more.pop("settings", {})}
    more.setdefault("optimizer", lambda model: torch.optim.AdamW(model.parameters(), 0.01))
    return fit_and_save(folder, {} if spike is None else {"spike": spike}, *callbacks, settings=settings, **more)


def _spike(action: Any, **more: Any) -> LossSpike:
    return LossSpike(action, **{"window": 8, "deviations": 20, **more})


class Each(Callback):
    """Keeps the state after each step."""

    def __init__(self) -> None:
        self.states: list[Any] = []

    def on_train_batch_end(self, trainer: Any, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.is_step_complete:
            moments = [value for optimizer in trainer.optimizers.values() for value in optimizer.state.values()]
            # Not the statistics of batch norm: they have seen the batch, as in a loop that leaves out `optimizer.step`.
            weights = dict(model.named_parameters())
            self.states.append(copy.deepcopy({"weights": weights, "moments": moments}))


@pytest.mark.parametrize("how", ["", "fp16", "accumulated", "clipped"])
def test_skip_leaves_out_the_update_of_the_spike_and_nothing_else(how: str, tmp_path: Path) -> None:
    more: dict[str, Any] = {}
    if how == "fp16":
        more["precision"] = Precision(dtype="fp16", loss_scale=8.0)
    if how == "clipped":
        more["precision"] = Precision(clip_norm=1.0)
    if how == "accumulated":
        more["settings"] = {"grad_accum_steps": 2}
    each, spike = Each(), _spike("skip", **({"window": 4} if how == "accumulated" else {}))
    _fit(tmp_path, spike, each, _plant(SPIKE), **more)
    # Three steps make an epoch of five batches by two.
    planted = 5 if how == "accumulated" else 9
    assert spike.times == 1
    assert [step for step, pair in enumerate(pairwise(each.states), 2) if same(*pair) == []] == [planted]


def test_a_training_without_a_spike_is_bit_for_bit_that_without_the_callback(tmp_path: Path) -> None:
    bare = _fit(tmp_path / "bare", None)
    for action in ("stop", "skip", "roll_back", "warn"):
        watched = _fit(tmp_path / action, _spike(action))
        assert same(bare.model.state_dict(), watched.model.state_dict()) == [], action


def test_skip_is_a_plain_loop_that_makes_no_step_there(tmp_path: Path) -> None:
    """Against a loop by hand, which takes the same batches and leaves out `optimizer.step` at one of them."""

    class Keep(Callback):
        def __init__(self) -> None:
            self.batches: list[Any] = []
            self.first: Any = None

        def on_train_step_end(self, trainer: Any, model: Any, outputs: Any, batch: Any) -> None:
            self.batches.append(copy.deepcopy(batch))

        def on_train_step_start(self, trainer: Any, model: Any, batch: Any) -> None:
            if self.first is None:
                self.first = copy.deepcopy(model.state_dict())

    keep = Keep()
    made = _fit(tmp_path, _spike("skip"), _plant(SPIKE), keep, model=Line)
    model = Line()
    model.load_state_dict(keep.first)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for number, batch in enumerate(keep.batches):
        optimizer.zero_grad()
        model(batch)["loss"].backward()
        if number != 8:
            optimizer.step()
    assert same(model.state_dict(), made.model.state_dict()) == []


def test_a_loss_that_is_not_finite_is_left_to_check_finite(tmp_path: Path) -> None:
    spike = _spike("skip")
    finite = CheckFinite("skip")
    made = _fit(tmp_path, spike, finite, _plant(SPIKE, value=float("nan")))
    assert (spike.times, finite.times) == (0, 1)
    assert all(bool(torch.isfinite(value).all()) for value in made.model.state_dict().values())


def test_stop_ends_before_the_update_and_names_the_step(tmp_path: Path) -> None:
    each = Each()
    with pytest.raises(TrainError, match=r"loss spike at step 9: .* deviations above .* median of 8 steps") as caught:
        _fit(tmp_path, _spike("stop"), _plant(SPIKE), each)
    assert caught.value.exit_code == 1
    assert "action=skip" in str(caught.value)
    assert "others" not in str(caught.value)
    # The folder is no run, as is that of the steps that are replayed.
    assert "train replay" not in str(caught.value)
    assert len(each.states) == 8


def test_warn_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bare = _fit(tmp_path / "bare", None, _plant(SPIKE))
    with caplog.at_level(logging.WARNING, "trainer_cli"):
        watched = _fit(tmp_path / "warned", _spike("warn"), _plant(SPIKE))
    assert same(bare.model.state_dict(), watched.model.state_dict()) == []
    assert next(text for text in caplog.messages if "loss spike" in text).startswith("loss spike at step 9")


class LeaveOut(Callback):
    """Leaves out the update of the ninth step."""

    def on_before_optimizer_step(self, trainer: Any, *args: Any) -> None:
        if trainer.step.step_idx == 8:
            trainer.step.skips_update = True


def test_warn_leaves_an_update_out_that_another_callback_leaves_out(tmp_path: Path) -> None:
    bare = _fit(tmp_path / "bare", None, LeaveOut(), _plant(SPIKE))
    watched = _fit(tmp_path / "warned", None, LeaveOut(), _plant(SPIKE), _spike("warn"))
    assert same(bare.model.state_dict(), watched.model.state_dict()) == []


def test_roll_back_never_sees_the_batches_again(tmp_path: Path) -> None:
    plant, logger, spike = _plant(SPIKE), ListLogger(), _spike("roll_back")
    made = _fit(tmp_path, spike, plant, logger=logger)
    places = [(epoch, batch) for epoch in range(5) for batch in range(5)]
    # The spike is in step 9, and step 6 is saved: steps 7 to 15 are made over the batches after the ninth.
    assert plant.seen == places[: 9 + 9]
    assert (spike.times, made.progress.step) == (1, 15)
    assert logger.steps("train/loss") == [2, 4, 6, 8, 10, 12, 14, 15]


@pytest.mark.parametrize("action", ["skip", "roll_back"])
@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize(
    "saves", [{}, {"save_interval": 50, "ephemeral_save_interval": 3}, {"save_interval": None, "fixed_steps": [2, 9]}]
)
def test_a_resume_is_exact_wherever_it_was_stopped(
    action: str, accumulated: int, saves: dict[str, Any], tmp_path: Path
) -> None:
    """With a save at the stop, which the straight run lacks, and without one, as after a kill."""
    window = {"window": 8} if accumulated == 1 else {"window": 4}
    more = {"settings": {"grad_accum_steps": accumulated, "eval_interval": 5}}
    straight = ListLogger()
    whole = _fit(tmp_path / "whole", _spike(action, **window), _plant(SPIKE), logger=straight, saves=saves, **more)
    for stop, on_stop in product((4, 6, 8, 10, 13), (False, True)):
        folder, logger = tmp_path / f"{stop}-{on_stop}", ListLogger()
        stops = {**saves, "save_on_stop": on_stop}
        # The second time at that step of the steps that are made again, if it is one of them.
        for _ in range(2):
            _fit(folder, _spike(action, **window), _plant(SPIKE), StopAt(stop), logger=logger, saves=stops, **more)
        resumed = _fit(folder, _spike(action, **window), _plant(SPIKE), logger=logger, saves=saves, **more)
        assert same(everything(whole), everything(resumed)) == [], (stop, on_stop)
        assert logger.stream == straight.stream


@pytest.mark.parametrize("stop", [7, 8])
def test_a_step_that_a_stop_had_saved_is_saved_anew_after_it_was_undone(stop: int, tmp_path: Path) -> None:
    for _ in range(2):
        _fit(tmp_path, _spike("roll_back"), _plant(SPIKE), StopAt(stop))
    newest = Catalog.of(tmp_path / "ckpt").newest_valid()
    assert newest is not None
    assert newest.manifest is not None
    assert (newest.step, newest.manifest.progress["passed_over"]) == (stop, 3)


def test_more_than_max_times_end_the_training(tmp_path: Path) -> None:
    for action in ("skip", "roll_back"):
        with pytest.raises(TrainError, match=r"spike at step .*, after 1 other\."):
            _fit(tmp_path / action, _spike(action, max_times=1), _plant(SPIKE, (2, 0)))


def test_a_loss_that_stays_high_is_no_spike_for_long(tmp_path: Path) -> None:
    places = [(epoch, batch) for epoch in range(2, 9) for batch in range(5)]
    spike = _spike("skip", max_times=99)
    _fit(tmp_path, spike, _plant(*places), settings={"max_duration": 40})
    assert 1 <= spike.times <= 8


@pytest.mark.parametrize("steps", [4, 5])
def test_a_training_that_ends_before_half_the_window_says_so(
    steps: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    spike, plant = _spike("warn"), _plant((0, 4))
    with caplog.at_level(logging.INFO, "trainer_cli"):
        _fit(tmp_path, spike, plant, settings={"max_duration": steps})
    said = "LossSpike acts after 4 losses, half of its window, and the training ends at step 4 before that"
    assert (said in caplog.messages) is (steps == 4)
    assert ("loss spike at step 5" in caplog.text) is (steps == 5)


@pytest.mark.parametrize(
    ("key", "value"), [("action", "rollback"), ("deviations", 0), ("window", 3), ("max_times", -1), ("window", True)]
)
def test_a_wrong_argument_is_refused(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=key):
        LossSpike(**{key: value})
