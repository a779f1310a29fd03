"""Schedulers: by name, all of torch's and ours gone on with exactly, their intervals, groups and metrics."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Line, ListLogger, StopAt, assert_resumes_exactly, loader, make_sgd, on, same, trainer
from torch import nn
from torch.optim import lr_scheduler as lr

from trainer_cli import TrainingLoop, TrainStep, WarmupCosine, scheduler_factory
from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.callbacks.learning_rate_monitor import LearningRateMonitor
from trainer_cli.errors import ConfigError, UserError
from trainer_cli.manifest import UnsavableState
from trainer_cli.optim.scheduler_intervals import Scheduled, default_interval
from trainer_cli.optim.schedulers import Schedulers, name_schedulers
from trainer_cli.schema.sections import SchedulerInterval
from trainer_cli.trainer.hooks import Callback


class Halving:
    """A factor with a memory of its own."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 0.5 ** (self.calls // 3)


TORCHS: dict[str, Any] = {
    "LambdaLR of a function": lambda o: lr.LambdaLR(o, lambda step: 1 / (step + 1)),
    "LambdaLR of an object": lambda o: lr.LambdaLR(o, Halving()),
    "MultiplicativeLR": lambda o: lr.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr.StepLR(o, 2),
    "MultiStepLR": lambda o: lr.MultiStepLR(o, [2, 3, 7]),
    "ConstantLR": lambda o: lr.ConstantLR(o, total_iters=5),
    "LinearLR": lambda o: lr.LinearLR(o, total_iters=6),
    "ExponentialLR": lambda o: lr.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: lr.PolynomialLR(o, 7),
    "CosineAnnealingLR": lambda o: lr.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 2, 2),
    "CyclicLR": lambda o: lr.CyclicLR(o, 0.01, 0.2, step_size_up=2),
    "OneCycleLR": lambda o: lr.OneCycleLR(o, 0.2, total_steps=12),
    "SequentialLR": lambda o: lr.SequentialLR(o, [lr.LinearLR(o, total_iters=3), lr.ExponentialLR(o, 0.7)], [5]),
    "ChainedScheduler": lambda o: lr.ChainedScheduler([lr.LinearLR(o, total_iters=6), lr.ExponentialLR(o, 0.9)]),
}


def _rates(rates: dict[int, float]) -> Callback:
    """Writes down the learning rate that each step is made with."""

    def note(trainer: Any, model: Any, optimizer: Any) -> None:
        rates[trainer.progress.step + 1] = float(optimizer.param_groups[0]["lr"])

    return on(on_before_optimizer_step=note)


def _by(interval: str, schedulers: Any) -> Any:
    if isinstance(schedulers, dict):
        return {name: _by(interval, schedule) for name, schedule in schedulers.items()}
    return schedulers if schedulers is None or isinstance(schedulers, Scheduled) else Scheduled(schedulers, interval)


def _fit(schedulers: Any, folder: Path, *callbacks: Callback, length: int = 9, **settings: Any) -> Any:
    made = trainer(
        Line,
        optimizer=make_sgd,
        schedulers=schedulers,
        callbacks=callbacks,
        settings={"max_duration": length, **settings},
        checkpoint=CheckpointerCallback(folder),
    )
    made.fit(loader(), loader() if settings else None)
    return made


@pytest.mark.parametrize("kind", TORCHS)
def test_every_scheduler_of_torch_goes_on_bit_for_bit(tmp_path: Path, kind: str) -> None:
    assert_resumes_exactly(partial(_fit, _by("step", TORCHS[kind])), tmp_path, 1, 4, 6)


SEVERAL = {
    "warm": lambda o: lr.LinearLR(o, total_iters=4),
    "off": None,
    "decay": lambda o: lr.ExponentialLR(o, 0.9),
    "ours": lambda o: WarmupCosine(o, 9, warmup=2),
    "last": lambda o: lr.ExponentialLR(o, 0.5),
}


def test_several_step_once_each_in_their_order_and_go_on_bit_for_bit(tmp_path: Path) -> None:
    rates: dict[str, dict[int, float]] = {"straight": {}, "parts": {}}

    def fit(folder: Path, *callbacks: Callback) -> Any:
        return _fit(_by("step", SEVERAL), folder, _rates(rates[folder.name]), *callbacks)

    straight, _ = assert_resumes_exactly(fit, tmp_path, 4)
    assert list(straight.checkpoint_state()["schedulers"]) == ["warm", "decay", "ours", "last"]
    assert rates["parts"] == rates["straight"]


@pytest.mark.parametrize(
    ("schedulers", "optimizers", "expected"),
    [
        (3, (), ["scheduler"]),
        ([1, None, 2], (), ["scheduler", "scheduler_2"]),
        ({"a": 1, "b": None}, (), ["a"]),
        (None, (), []),
        (print, ("g", "d"), {"g": ("g", print), "d": ("d", print)}),
        ({"d": {"warm": 1, "off": None, "slow": 2}}, ("g", "d"), {"d.warm": ("d", 1), "d.slow": ("d", 2)}),
        ({"g": [1, 2], "d": None}, ("g", "d"), {"g": ("g", 1), "g_2": ("g", 2)}),
    ],
)
def test_schedules_are_named_by_their_keys_and_their_optimizers(
    schedulers: Any, optimizers: tuple[str, ...], expected: Any
) -> None:
    named = name_schedulers(schedulers, optimizers) if optimizers else list(name_schedulers(schedulers))
    assert named == expected


@pytest.mark.parametrize(
    ("schedulers", "message"),
    [
        ({"gg": 1}, r"there is no optimizer 'gg' \(schedulers\)\. Did you mean 'g'"),
        ([1], "there are several optimizers"),
    ],
)
def test_schedules_of_several_optimizers_must_name_them(schedulers: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        name_schedulers(schedulers, ("g", "d"))


@pytest.mark.parametrize(
    ("now", "problem"),
    [
        (None, "decay: not in this run"),
        (TORCHS["StepLR"], "scheduler: missing in the checkpoint"),
        ({"decays": TORCHS["ExponentialLR"]}, "decay: not in this run. Did you mean 'decays'?"),
        ({"decay": TORCHS["StepLR"]}, "decay: it is a torch.optim.lr_scheduler.StepLR, but the checkpoint has a"),
        ({"decay": TORCHS["ExponentialLR"], "more": TORCHS["StepLR"]}, "more: missing in the checkpoint"),
    ],
)
def test_what_does_not_fit_by_name_or_kind_is_in_the_table(tmp_path: Path, now: Any, problem: str) -> None:
    _fit(_by("step", {"decay": TORCHS["ExponentialLR"]}), tmp_path, length=1)
    with pytest.raises(UserError) as caught:
        _fit(_by("step", now), tmp_path)
    assert f"schedulers  {problem}" in str(caught.value)


def test_checkpoints_of_before_schedulers_had_names_stay_readable(tmp_path: Path) -> None:
    def drop_names(trainer: Any, state: dict[str, Any]) -> None:
        state["schedulers"] = [one["state"] for one in state["schedulers"].values()]

    def fit(folder: Path, *callbacks: Callback) -> Any:
        as_before = [on(postprocess_checkpoint=drop_names)] if callbacks else []
        return _fit(_by("step", TORCHS["OneCycleLR"]), folder, *callbacks, *as_before)

    assert_resumes_exactly(fit, tmp_path, 4)
    fit(tmp_path / "one", StopAt(4))
    with pytest.raises(UserError, match="schedulers  the checkpoint has 1, but here are 2"):
        _fit([TORCHS["OneCycleLR"], TORCHS["StepLR"]], tmp_path / "one")


def test_a_hard_stop_changes_nothing_of_what_a_schedule_sees(tmp_path: Path) -> None:
    rates: dict[str, dict[int, float]] = {"parts": {}, "whole": {}}
    for folder, stop in (("parts", 4), ("parts", None), ("whole", None)):
        _fit(TORCHS["OneCycleLR"], tmp_path / folder, _rates(rates[folder]), hard_stop=stop)
    assert rates["parts"] == rates["whole"]


def test_a_saved_schedule_that_is_not_whole_is_in_the_table() -> None:
    first, other = (Schedulers({"x": TORCHS["SequentialLR"]}, {"optimizer": make_sgd(Line())}) for _ in range(2))
    saved = first.state_dict()
    state = saved["x"]["state"]
    state.update(last_epoch="much", more=1, _schedulers=state["_schedulers"][:1])
    del state["_schedulers"][0]["start_factor"]
    before = other.state_dict()
    assert other.fit(saved).faults == [
        "x.last_epoch: is a value in the checkpoint, but a number here",
        "x._schedulers: has 1 schedule in the checkpoint, but 2 here",
        "x.more: not in this schedule",
    ]
    assert same(other.state_dict(), before) == []


def test_a_state_that_cannot_be_saved_is_refused_before_step_1_by_its_owners_name(tmp_path: Path) -> None:
    class Odd:
        def step(self) -> None: ...

        def state_dict(self) -> dict[str, Any]:
            return {"seen": {1, 2}}

        def load_state_dict(self, state: Any) -> None: ...

    made = trainer(schedulers={"odd": Odd()}, checkpoint=CheckpointerCallback(tmp_path))
    with pytest.raises(UnsavableState, match="schedulers/odd/state/seen is a set"):
        made.fit(loader())
    assert made.progress.step == 0


NATURAL = {
    **dict.fromkeys(TORCHS, "epoch"),
    **dict.fromkeys(("CyclicLR", "OneCycleLR", "LambdaLR of a function", "LambdaLR of an object"), "step"),
    "MultiplicativeLR": "step",
}

# A user's schedule, and one of a schedule of torch.
Own = type("Own", (lr.LRScheduler,), {"get_lr": lambda self: self.base_lrs})

Slower = type("Slower", (lr.StepLR,), {})

OTHERS: dict[str, tuple[Any, str]] = {
    "ReduceLROnPlateau": (lr.ReduceLROnPlateau, "evaluation"),
    "WarmupCosine": (lambda o: WarmupCosine(o, 9), "step"),
    "a user's own": (Own, "step"),
    "a user's variant of torch's": (lambda o: Slower(o, 1), "epoch"),
}


@pytest.mark.parametrize("kind", [*TORCHS, *OTHERS])
def test_a_scheduler_steps_as_its_documentation_says(kind: str) -> None:
    make, interval = OTHERS.get(kind) or (TORCHS[kind], NATURAL[kind])
    schedulers = Schedulers(lambda optimizer: make(optimizer), {"optimizer": make_sgd(Line())})
    assert [one for one in SchedulerInterval if schedulers.has(one)] == [interval]


@pytest.mark.parametrize(
    ("kind", "interval"),
    [(lr.StepLR, "epoch"), (lr.LambdaLR, "epoch"), (lr.ReduceLROnPlateau, "evaluation"), (WarmupCosine, "step")],
)
def test_the_default_interval_of_a_class_does_not_look_at_its_arguments(kind: type, interval: str) -> None:
    assert default_interval(kind) == interval


@pytest.mark.parametrize("kind", [name for name, interval in NATURAL.items() if interval == "epoch"])
def test_a_schedule_by_epochs_steps_at_their_ends_and_goes_on_bit_for_bit(tmp_path: Path, kind: str) -> None:
    rates: dict[str, dict[int, float]] = {"straight": {}, "parts": {}}

    def fit(folder: Path, *callbacks: Callback) -> Any:
        return _fit(_by("epoch", TORCHS[kind]), folder, _rates(rates[folder.name]), *callbacks, length=13)

    straight, _ = assert_resumes_exactly(fit, tmp_path, 1, 4, 5, 7)
    optimizer = make_sgd(Line())
    schedule, expected = TORCHS[kind](optimizer), []
    for step in range(1, 14):
        expected.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        if step % straight.loop.steps_per_epoch == 0:
            schedule.step()
    assert [*rates["straight"].values()] == [*rates["parts"].values()] == expected


@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: lr.LambdaLR(o, lambda step: 0.5**step),
        lambda o: Scheduled(lr.LambdaLR(o, lambda step: 0.5**step)),
        Scheduled(lambda o: lr.LambdaLR(o, lambda step: 0.5**step)),
    ],
)
def test_a_schedule_that_a_function_makes_has_one_interval_however_it_is_returned(schedule: Any) -> None:
    made = trainer(schedulers=schedule, settings={"max_duration": 1})
    made.fit(loader())
    assert made.schedulers.has("step")


@pytest.mark.parametrize(
    "schedulers",
    [
        Scheduled(lambda o: lr.ExponentialLR(o, 0.5), "step"),
        lambda o: Scheduled(lr.ExponentialLR(o, 0.5), "step"),
        [lambda o: Scheduled(lr.ExponentialLR(o, 0.5), "step")],
        {"decay": lambda o: Scheduled(lr.ExponentialLR(o, 0.5), "step")},
        lambda o: Scheduled(lambda other: lr.ExponentialLR(other, 0.5), "step"),
    ],
    ids=["around a function", "returned", "in a list", "in a mapping", "returned around a function"],
)
def test_an_interval_is_given_around_a_function_or_by_what_it_returns(schedulers: Any, tmp_path: Path) -> None:
    rates: dict[int, float] = {}
    _fit(schedulers, tmp_path, _rates(rates), length=3)
    first = rates[1]
    assert [*rates.values()] == [first, first / 2, first / 4]


def _plateau(metric: str | None, folder: Path, *callbacks: Callback) -> Any:
    plateau = Scheduled(lambda o: lr.ReduceLROnPlateau(o, factor=0.5, patience=0), metric=metric)
    return _fit(plateau, folder, *callbacks, length=12, eval_interval=2)


def test_a_plateau_is_told_the_metric_of_each_evaluation_and_goes_on_bit_for_bit(tmp_path: Path) -> None:
    straight, _ = assert_resumes_exactly(partial(_plateau, None), tmp_path, 1, 2, 5, 8)
    seen: list[float] = []
    notes = on(on_after_evaluation=lambda trainer, metrics: seen.append(metrics["val/loss"]))
    _plateau(None, tmp_path / "noted", notes)
    optimizer = make_sgd(Line())
    schedule = lr.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for value in seen:
        schedule.step(value)
    assert len(seen) == 6
    assert straight.optimizers["optimizer"].param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert straight.schedulers.live["scheduler"].state_dict() == schedule.state_dict()


@pytest.mark.parametrize(
    ("metric", "mode", "warned"),
    [("val/accuracy", "min", True), ("val/loss", "max", True), ("val/loss", "min", False), ("val/x", "min", False)],
)
def test_a_plateau_that_takes_the_worst_value_for_the_best_is_named(
    metric: str, mode: Any, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    Schedulers(Scheduled(lambda o: lr.ReduceLROnPlateau(o, mode), metric=metric), {"optimizer": make_sgd(Line())})
    assert bool(caplog.messages) == warned
    assert all(f"its mode is {mode}, but of {metric}" in message for message in caplog.messages)


def test_a_factory_refuses_a_metric_of_unknown_direction_where_it_is_called() -> None:
    with pytest.raises(ConfigError, match="mode"):
        scheduler_factory(lr.ReduceLROnPlateau, TrainingLoop(max_duration=3), metric="val/unheard_of")


def test_a_metric_that_nothing_reports_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the metric of scheduler is 'val/los', which no .* Did you mean 'val/loss'"):
        _plateau("val/los", tmp_path)
    assert not (tmp_path / "step0").exists()


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        ("StepLR", {"interval": "batch"}, "interval is 'batch'"),
        ("plateau", {"interval": "epoch"}, "ReduceLROnPlateau takes the metric val/loss, so its interval"),
        ("plateau", {"interval": "evaluation", "metric": "train/loss"}, "so its interval is log, not evaluation"),
        ("plateau", {"interval": "log", "metric": "val/loss"}, "so its interval is evaluation, not log"),
        ("StepLR", {"metric": "val/loss"}, "StepLR takes no metric"),
        ("StepLR", {"interval": "log"}, "takes no metric"),
    ],
)
def test_an_interval_that_cannot_be_is_refused(kind: str, settings: dict[str, Any], message: str) -> None:
    make = TORCHS["StepLR"] if kind == "StepLR" else lr.ReduceLROnPlateau
    with pytest.raises(UserError, match=message):
        trainer(schedulers=Scheduled(lambda optimizer: make(optimizer), **settings)).fit(loader())


@pytest.mark.parametrize(
    ("interval", "log_interval", "times"), [("step", 1, 1), ("step", "1ep", 1), (None, 1, 0)], ids=str
)
def test_a_rate_that_is_lost_within_the_first_epoch_is_told_once(
    interval: Any, log_interval: Any, times: int, caplog: pytest.LogCaptureFixture
) -> None:
    schedule = Scheduled(lambda o: lr.ExponentialLR(o, 1e-7), interval)
    trainer(schedulers=schedule, settings={"max_duration": 8, "log_interval": log_interval}).fit(loader())
    assert caplog.text.count("within the first epoch, at step ") == times
    assert caplog.text.count(": scheduler moves once after each step. Is interval: epoch meant") == times


def test_the_optimizer_whose_rate_is_lost_is_named_with_its_own_schedules(caplog: pytest.LogCaptureFixture) -> None:
    schedulers = {"weight": lambda o: WarmupCosine(o, 20), "bias": Scheduled(lambda o: lr.ExponentialLR(o, 0), "step")}
    made = trainer(optimizer=OF_TWO, schedulers=schedulers, settings={"max_duration": 3, "log_interval": 1})
    made.fit(loader(24))
    assert [message for message in caplog.messages if "rate" in message] == [
        "the learning rate of bias fell from 0.2 to 0 within the first epoch, at step 1 of 3: bias moves once after "
        "each step. Is interval: epoch meant, or a schedule as long as the run (1dur)?"
    ]


OF_TWO: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "weight": lambda model: torch.optim.SGD([model.get_parameter("linear.weight")], lr=0.1),
    "bias": lambda model: torch.optim.SGD([model.get_parameter("linear.bias")], lr=0.2),
}


class Inner(TrainStep):
    """Steps one of its optimizers `count` times a batch, or at every second batch."""

    def __init__(self, count: float) -> None:
        self.count = count

    def train_batch(self, batch: Any) -> Any:
        for _ in range(_inner_steps(self.count, self.step_idx)):
            self.backward(self.model(batch)["loss"], "weight")
            self.optimizer_step("weight")
        loss = self.forward(batch)["loss"]
        self.backward(loss, "bias")
        return loss


def _inner_steps(count: float, step: int) -> int:
    return int(count) if count >= 1 else step % 2


SCHEDULES_OF_STEPS: dict[str, Any] = {
    "a length of the run": lambda o: WarmupCosine(o, 10, warmup=3),
    "a schedule of torch": lambda o: Scheduled(lr.LinearLR(o, 1.0, 0.1, total_iters=9), "step"),
    "a function": lambda o: lr.LambdaLR(o, lambda step: 1 - step / 10),
}


@pytest.mark.parametrize("count", [0.5, 1, 5])
@pytest.mark.parametrize("kind", SCHEDULES_OF_STEPS)
def test_a_schedule_moves_once_after_a_step_in_which_its_optimizer_steps_however_often(
    kind: str, count: float, tmp_path: Path
) -> None:
    make = SCHEDULES_OF_STEPS[kind]
    rates: dict[int, float] = {}
    note = on(on_train_step_start=lambda made, *_: rates.update({made.progress.step: _rate(made)}))

    def fit(folder: Path, *callbacks: Callback) -> Any:
        made = trainer(
            optimizer=OF_TWO, schedulers=make, step=Inner(count), callbacks=[note, *callbacks],
            checkpoint=CheckpointerCallback(folder, save_interval=4), settings={"max_duration": 10},
        )  # fmt: skip
        made.fit(loader(16, 4, noise=0, shuffle=False))
        return made

    made, _ = assert_resumes_exactly(fit, tmp_path, 3)
    torch.manual_seed(0)
    model = Line()
    optimizers = {name: of_two(model) for name, of_two in OF_TWO.items()}
    schedules = [make(optimizer) for optimizer in optimizers.values()]
    schedules = [schedule.schedule if isinstance(schedule, Scheduled) else schedule for schedule in schedules]
    batches = [batch for epoch in range(3) for batch in loader(16, 4, noise=0, shuffle=False).iterate(epoch)]
    for step, batch in enumerate(batches[:10]):
        assert rates[step] == optimizers["weight"].param_groups[0]["lr"]
        for name, times in (("weight", _inner_steps(count, step)), ("bias", 1)):
            for _ in range(times):
                model.zero_grad()
                model(batch)["loss"].backward()
                optimizers[name].step()
        for schedule, times in zip(schedules, (_inner_steps(count, step), 1), strict=True):
            if times:
                schedule.step()
    torch.testing.assert_close(made.model.state_dict(), model.state_dict())


def _rate(made: Any) -> float:
    return float(made.optimizers["weight"].param_groups[0]["lr"])


class OfTimm:
    """A schedule as those of timm: `step` takes the epoch, and `step_update` the number of steps."""

    def __init__(self, optimizer: Any, by_epochs: bool = True) -> None:
        self.optimizer, self.by_epochs = optimizer, by_epochs

    def _set(self, count: int) -> None:
        self.optimizer.param_groups[0]["lr"] = 0.1 / (1 + count)

    def step(self, epoch: int, metric: float | None = None) -> None:
        if self.by_epochs:
            self._set(epoch)

    def step_update(self, num_updates: int, metric: float | None = None) -> None:
        if not self.by_epochs:
            self._set(num_updates)

    def state_dict(self) -> dict[str, Any]:
        return {"by_epochs": self.by_epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.by_epochs = state["by_epochs"]


class ByEpoch(OfTimm):
    """Has no `step_update`."""

    step_update = property()


class ByUpdates(ByEpoch):
    def step(self, num_updates: int) -> None:  # type: ignore[override]
        self._set(num_updates)


class OfTorch(lr.LRScheduler):
    """A schedule of torch's kind whose step requires the epoch."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer, self.last_epoch = optimizer, 0

    def step(self, epoch: int) -> None:  # type: ignore[override]
        self.last_epoch = epoch
        self.optimizer.param_groups[0]["lr"] = 0.1 / (1 + epoch)


# 3 batches an epoch: the rate of each step, counted by epochs or by steps.
BY_EPOCHS = [0.1 / (1 + step // 3) for step in range(9)]
BY_STEPS = [0.1 / (1 + step) for step in range(9)]


class OwnUpdate(OfTimm):
    """Its `step` takes no count, so its `step_update` is no call of a trainer."""

    def step(self) -> None:  # type: ignore[override]
        self.by_epochs += 1  # type: ignore[assignment]
        self._set(self.by_epochs - 1)

    def step_update(self, *_: Any) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    ("make", "interval", "expected"),
    [
        (partial(OfTimm), None, BY_EPOCHS),
        (partial(OfTimm), "epoch", BY_EPOCHS),
        (partial(OfTimm), "step", BY_EPOCHS),
        (partial(OfTimm, by_epochs=False), None, BY_STEPS),
        (partial(OfTimm, by_epochs=False), "step", BY_STEPS),
        (partial(ByEpoch), None, BY_EPOCHS),
        (partial(ByEpoch), "step", BY_STEPS),
        (partial(ByUpdates), None, BY_STEPS),
        (partial(ByUpdates), "epoch", BY_EPOCHS),
        (partial(OwnUpdate), None, BY_STEPS),
        (partial(OwnUpdate), "epoch", BY_EPOCHS),
        (partial(OfTorch), None, BY_EPOCHS),
        (partial(OfTorch), "step", BY_STEPS),
    ],
)
def test_a_schedule_whose_step_takes_a_count_is_given_it(
    make: Any, interval: str | None, expected: list[float], tmp_path: Path
) -> None:
    def fit(folder: Path, *callbacks: Callback) -> Any:
        rates.setdefault(folder.name, {})
        made = trainer(
            schedulers=Scheduled(make, interval), callbacks=[_rates(rates[folder.name]), *callbacks],
            checkpoint=CheckpointerCallback(folder, save_interval=2), settings={"max_duration": 9},
        )  # fmt: skip
        made.fit(loader(12))
        return made

    rates: dict[str, dict[int, float]] = {}
    assert_resumes_exactly(fit, tmp_path, 4)
    assert list(rates["straight"].values()) == pytest.approx(expected)
    assert rates["parts"] == rates["straight"]


def _with_step(step: Any) -> Any:
    return lambda optimizer: type("Odd", (OfTimm,), {"step": step, "step_update": property()})(optimizer)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (_with_step(lambda self, temperature: None), "the step of Odd requires temperature .*called epoch or"),
        (_with_step(lambda self, epoch, batch: None), "the step of Odd requires epoch, batch"),
        (_with_step(lambda self, epoch, metrics: None), "the step of Odd requires epoch"),
        (
            Scheduled(partial(OfTimm), "evaluation"),
            "the step of OfTimm takes a number .* so its interval is not evaluation",
        ),
        (Scheduled(partial(ByUpdates), "log"), "the step of ByUpdates takes a number .* so its interval is not log"),
    ],
)
def test_a_schedule_whose_step_takes_something_else_is_refused_before_the_first_step(
    schedule: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        trainer(schedulers=schedule, checkpoint=CheckpointerCallback(tmp_path)).fit(loader())
    assert not (tmp_path / "step0").exists()


def test_a_rate_that_reaches_zero_at_the_end_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    schedule = lambda o: lr.OneCycleLR(o, 0.2, total_steps=4, final_div_factor=1e9)  # noqa: E731
    settings = {"max_duration": 4, "log_interval": 1}
    trainer(schedulers=schedule, optimizer=make_sgd, settings=settings).fit(loader())
    assert "within the first epoch" not in caplog.text


@pytest.mark.parametrize(
    ("scheduled", "log_interval", "several", "tensor"),
    [
        (Scheduled(TORCHS["OneCycleLR"], "step"), 1, True, False),
        (Scheduled(TORCHS["ExponentialLR"], "epoch"), 4, False, True),
        (Scheduled(TORCHS["ExponentialLR"], "epoch"), 1, True, False),
        (Scheduled(lambda o: lr.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=10.0)), 1, False, False),
        (Scheduled(lambda o: lr.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=10.0)), 4, True, True),
        (Scheduled(lambda o: WarmupCosine(o, 12, warmup=2)), 1, False, True),
        (Scheduled(lambda o: WarmupCosine(o, 12, warmup=2)), 4, False, False),
    ],
)
def test_the_settings_logged_with_a_step_are_those_that_it_was_made_with(
    scheduled: Scheduled, log_interval: int, several: bool, tensor: bool
) -> None:
    used: dict[tuple[int, str], float] = {}

    def note(trainer: Any, model: Any, optimizer: Any) -> None:
        (name,) = (name for name, one in trainer.optimizers.items() if one is optimizer)
        infix, step = f"{name}/" if several else "", trainer.progress.step + 1
        used[step, f"train/lr{'/' + name if several else ''}"] = float(optimizer.param_groups[0]["lr"])
        for number, group in enumerate(optimizer.param_groups):
            for key in ("lr", "momentum"):
                used[step, f"train/{key}/{infix}group{number}"] = float(group[key])

    def made(parameters: Any) -> torch.optim.Optimizer:
        rate = torch.tensor(0.1) if tensor else 0.1
        return torch.optim.SGD([{"params": [one]} for one in parameters], lr=rate, momentum=0.9)

    optimizers = {"a": lambda m: made([m.linear.weight]), "b": lambda m: made([m.linear.bias])}
    logger = ListLogger()
    trainer(
        optimizer=optimizers if several else lambda m: made(m.parameters()),
        schedulers={"a": scheduled, "b": scheduled} if several else scheduled,
        callbacks=[on(on_before_optimizer_step=note), LearningRateMonitor(["lr", "momentum"])],
        loggers=[logger],
        settings={"max_duration": 8, "log_interval": log_interval, "eval_interval": 2},
    ).fit(loader(), loader(4))
    logged = {
        (record.step, key): value
        for record in logger.records
        for key, value in record.metrics.items()
        if key.startswith(("train/lr", "train/momentum"))
    }
    steps = range(log_interval, 9, log_interval)
    assert logged == {(step, key): value for (step, key), value in used.items() if step in steps}
