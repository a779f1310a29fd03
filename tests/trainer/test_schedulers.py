"""Schedulers: by name, all of torch's gone on with exactly, settings of the config and positions of the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Line, ListLogger, StopAt, everything, loader, same, trainer
from torch.optim import lr_scheduler as lr

from trainer_cli import WarmupCosine
from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.callbacks.learning_rate_monitor import LearningRateMonitor
from trainer_cli.checkpoint.format.tree import UnsavableState
from trainer_cli.core.schema import SchedulerInterval
from trainer_cli.errors import UserError
from trainer_cli.trainer.hooks import Callback
from trainer_cli.trainer.scheduler_intervals import Scheduled, default_interval
from trainer_cli.trainer.schedulers import Schedulers, name_schedulers


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


class Rates(Callback):
    """Writes down the learning rate that each step is made with."""

    def __init__(self) -> None:
        self.of: dict[int, float] = {}

    def on_before_optimizer_step(self, trainer: Any, model: Any, optimizer: Any) -> None:
        self.of[trainer.progress.step + 1] = float(optimizer.param_groups[0]["lr"])


def _sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _each_step(given: Any) -> Any:
    if isinstance(given, dict):
        return {name: _each_step(one) for name, one in given.items()}
    if isinstance(given, list):
        return [_each_step(one) for one in given]
    return given if given is None or isinstance(given, Scheduled) else Scheduled(given, "step")


def _fit(folder: Path, schedulers: Any, *callbacks: Callback, length: int = 9, interval: str = "step") -> Any:
    schedulers = _each_step(schedulers) if interval == "step" else schedulers
    made = trainer(
        Line,
        optimizer=_sgd,
        schedulers=schedulers,
        callbacks=callbacks,
        settings={"max_duration": length},
        checkpoint=CheckpointerCallback(folder),
    )
    made.fit(loader())
    return made


@pytest.mark.parametrize("stop", [1, 4, 6])
@pytest.mark.parametrize("kind", TORCHS)
def test_every_scheduler_of_torch_goes_on_bit_for_bit(tmp_path: Path, kind: str, stop: int) -> None:
    straight = _fit(tmp_path / "straight", TORCHS[kind])
    _fit(tmp_path / "parts", TORCHS[kind], StopAt(stop))
    resumed = _fit(tmp_path / "parts", TORCHS[kind])
    assert resumed.loaded_step == stop
    assert same(everything(straight), everything(resumed)) == []


SEVERAL = {
    "warm": lambda o: lr.LinearLR(o, total_iters=4),
    "off": None,
    "decay": lambda o: lr.ExponentialLR(o, 0.9),
    "ours": lambda o: WarmupCosine(o, 9, warmup=2),
    "last": lambda o: lr.ExponentialLR(o, 0.5),
}


def test_several_step_once_each_in_their_order_and_go_on_bit_for_bit(tmp_path: Path) -> None:
    rates, more = Rates(), Rates()
    straight = _fit(tmp_path / "straight", SEVERAL, rates)
    assert list(straight.checkpoint_state()["schedulers"]) == ["warm", "decay", "ours", "last"]
    _fit(tmp_path / "parts", SEVERAL, StopAt(4))
    resumed = _fit(tmp_path / "parts", SEVERAL, more)
    assert same(everything(straight), everything(resumed)) == []
    assert more.of == {step: rate for step, rate in rates.of.items() if step > 4}


def test_names_are_given_to_those_that_have_none() -> None:
    assert list(name_schedulers(3)) == ["scheduler"]
    assert list(name_schedulers([1, None, 2])) == ["scheduler", "scheduler_2"]
    assert list(name_schedulers({"a": 1, "b": None})) == ["a"]
    assert name_schedulers(None) == {}


def test_schedules_of_several_optimizers_go_by_their_names() -> None:
    two = ("g", "d")
    assert name_schedulers(_sgd, two) == {"g": ("g", _sgd), "d": ("d", _sgd)}
    assert name_schedulers({"d": {"warm": 1, "off": None, "slow": 2}}, two) == {"d.warm": ("d", 1), "d.slow": ("d", 2)}
    assert name_schedulers({"g": [1, 2], "d": None}, two) == {"g": ("g", 1), "g_2": ("g", 2)}
    with pytest.raises(UserError, match=r"there is no optimizer 'gg'\. Did you mean 'g'"):
        name_schedulers({"gg": 1}, two)
    with pytest.raises(UserError, match="there are several optimizers"):
        name_schedulers([_sgd], two)


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (None, "decay: not in this training"),
        (TORCHS["StepLR"], "scheduler: missing in the checkpoint"),
        ({"decays": TORCHS["ExponentialLR"]}, "decay: not in this training. Did you mean 'decays'?"),
        ({"decay": TORCHS["StepLR"]}, r"decay: it is a torch.optim.lr_scheduler.StepLR, but the checkpoint has a"),
        (
            {"decay": TORCHS["ExponentialLR"], "more": TORCHS["StepLR"]},
            "more: missing in the checkpoint",
        ),
    ],
)
def test_what_does_not_fit_by_name_or_kind_is_in_the_table(tmp_path: Path, now: Any, said: str) -> None:
    _fit(tmp_path, {"decay": TORCHS["ExponentialLR"]}, length=1)
    with pytest.raises(UserError) as caught:
        _fit(tmp_path, now)
    assert f"schedulers  {said}" in str(caught.value) or f"            {said}" in str(caught.value)


def test_checkpoints_of_before_schedulers_had_names_stay_readable(tmp_path: Path) -> None:
    class AsBefore(Callback):
        def postprocess_checkpoint(self, trainer: Any, state: dict[str, Any]) -> None:
            state["schedulers"] = [one["state"] for one in state["schedulers"].values()]

    straight = _fit(tmp_path / "straight", TORCHS["OneCycleLR"])
    _fit(tmp_path / "parts", TORCHS["OneCycleLR"], AsBefore(), StopAt(4))
    assert same(everything(straight), everything(_fit(tmp_path / "parts", TORCHS["OneCycleLR"]))) == []
    _fit(tmp_path / "one", TORCHS["OneCycleLR"], AsBefore(), StopAt(4))
    with pytest.raises(UserError, match="schedulers  the checkpoint has 1, but here are 2"):
        _fit(tmp_path / "one", [TORCHS["OneCycleLR"], TORCHS["StepLR"]])


def test_a_hard_stop_changes_nothing_of_what_a_schedule_sees(tmp_path: Path) -> None:
    rates, whole = Rates(), Rates()
    settings: dict[str, Any] = {"max_duration": 9, "hard_stop": 4}
    for stop, callbacks in ((4, [rates]), (None, [rates])):
        made = trainer(
            schedulers=TORCHS["OneCycleLR"],
            callbacks=callbacks,
            settings={**settings, "hard_stop": stop},
            checkpoint=CheckpointerCallback(tmp_path),
        )
        made.fit(loader())
    trainer(schedulers=TORCHS["OneCycleLR"], callbacks=[whole], settings={"max_duration": 9}).fit(loader())
    assert rates.of == whole.of


def test_a_second_fit_of_the_same_trainer_goes_on_along_the_same_schedule(tmp_path: Path) -> None:
    whole, seen = Rates(), Rates()
    _fit(tmp_path / "straight", TORCHS["StepLR"], whole)
    made = trainer(
        optimizer=_sgd,
        schedulers=Scheduled(TORCHS["StepLR"], "step"),
        callbacks=[seen, StopAt(4)],
        settings={"max_duration": 9},
        checkpoint=CheckpointerCallback(tmp_path / "parts"),
    )
    made.fit(loader())
    assert made.fit(loader()).step == 9
    assert seen.of == whole.of


def test_a_saved_schedule_that_is_not_whole_is_in_the_table() -> None:
    def made() -> Schedulers:
        optimizer = torch.optim.SGD(Line().parameters(), lr=0.1)
        return Schedulers({"x": TORCHS["SequentialLR"]}, {"optimizer": optimizer})

    saved = made().state_dict()
    own = saved["x"]["state"]
    own["last_epoch"] = "much"
    own["more"] = 1
    own["_schedulers"] = own["_schedulers"][:1]
    del own["_schedulers"][0]["start_factor"]
    other = made()
    before = other.state_dict()
    assert other.fit(saved).faults == [
        "x.last_epoch: is a value in the checkpoint, but a number here",
        "x._schedulers: has 1 schedules in the checkpoint, but 2 here",
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


@pytest.mark.parametrize("kind", TORCHS)
def test_a_scheduler_of_torch_steps_as_its_documentation_says(kind: str) -> None:
    schedulers = Schedulers(TORCHS[kind], {"optimizer": _sgd(Line())})
    assert [one for one in SchedulerInterval if schedulers.has(one)] == [NATURAL[kind]]


class Own(lr.LRScheduler):
    """A user's schedule."""


class Slower(lr.StepLR):
    """A user's variant of a schedule of torch."""


@pytest.mark.parametrize(
    ("kind", "interval"),
    [
        (lr.StepLR, "epoch"), (lr.LambdaLR, "epoch"), (lr.OneCycleLR, "step"), (lr.ReduceLROnPlateau, "evaluation"),
        (WarmupCosine, "step"), (Own, "step"), (Slower, "epoch"),
    ],
)  # fmt: skip
def test_the_default_interval_of_a_class(kind: type, interval: str) -> None:
    assert default_interval(kind) == interval


@pytest.mark.parametrize("stop", [1, 4, 5, 7])
@pytest.mark.parametrize("kind", [name for name, interval in NATURAL.items() if interval == "epoch"])
def test_a_schedule_by_epochs_steps_at_their_ends_and_goes_on_bit_for_bit(tmp_path: Path, kind: str, stop: int) -> None:
    rates = Rates()
    straight = _fit(tmp_path / "straight", TORCHS[kind], rates, length=13, interval="epoch")
    optimizer = _sgd(Line())
    schedule, expected = TORCHS[kind](optimizer), []
    per_epoch = straight.loop.steps_per_epoch
    for step in range(1, 14):
        expected.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        if step % per_epoch == 0:
            schedule.step()
    assert list(rates.of.values()) == expected
    _fit(tmp_path / "parts", TORCHS[kind], StopAt(stop), length=13, interval="epoch")
    resumed = _fit(tmp_path / "parts", TORCHS[kind], length=13, interval="epoch")
    assert same(everything(straight), everything(resumed)) == []


def _plateau(folder: Path, *callbacks: Callback, metric: str | None = None, length: int = 12, **more: Any) -> Any:
    made = trainer(
        Line,
        optimizer=_sgd,
        schedulers=Scheduled(lambda o: lr.ReduceLROnPlateau(o, factor=0.5, patience=0), metric=metric),
        callbacks=callbacks,
        settings={"max_duration": length, "eval_interval": 2, **more},
        checkpoint=CheckpointerCallback(folder),
    )
    made.fit(loader(), loader())
    return made


@pytest.mark.parametrize("stop", [1, 2, 5, 8])
def test_a_plateau_is_told_the_metric_of_each_evaluation_and_goes_on_bit_for_bit(tmp_path: Path, stop: int) -> None:
    seen: list[float] = []

    class Metrics(Callback):
        def on_after_evaluation(self, trainer: Any, metrics: dict[str, float]) -> None:
            seen.append(metrics["val/loss"])

    straight = _plateau(tmp_path / "straight", Metrics())
    optimizer = _sgd(Line())
    schedule = lr.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for value in seen:
        schedule.step(value)
    assert len(seen) == 6
    assert straight.optimizers["optimizer"].param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert straight.schedulers.live["scheduler"].state_dict() == schedule.state_dict()
    _plateau(tmp_path / "parts", StopAt(stop))
    assert same(everything(straight), everything(_plateau(tmp_path / "parts"))) == []


def test_a_metric_that_nothing_reports_is_refused_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the metric of scheduler is 'val/los', which no .* Did you mean 'val/loss'"):
        _plateau(tmp_path, metric="val/los")
    assert not (tmp_path / "step0").exists()


@pytest.mark.parametrize(
    ("scheduled", "message"),
    [
        (Scheduled(lambda o: lr.StepLR(o, 1), "batch"), "interval is 'batch'"),
        (
            Scheduled(lambda o: lr.ReduceLROnPlateau(o), "epoch"),
            "ReduceLROnPlateau takes the metric val/loss, so its interval",
        ),
        (Scheduled(lambda o: lr.StepLR(o, 1), metric="val/loss"), "StepLR takes no metric"),
    ],
)
def test_an_interval_that_cannot_be_is_refused(scheduled: Scheduled, message: str) -> None:
    with pytest.raises(UserError, match=message):
        trainer(schedulers=scheduled).fit(loader())


def test_a_rate_that_is_lost_within_the_first_epoch_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    def fit(log_interval: Any = 1, **scheduled: Any) -> int:
        caplog.clear()
        schedule = Scheduled(lambda o: lr.ExponentialLR(o, 1e-7), **scheduled)
        settings = {"max_duration": 8, "log_interval": log_interval}
        trainer(schedulers=schedule, optimizer=_sgd, settings=settings).fit(loader())
        return caplog.text.count("within the first epoch: scheduler steps after every optimizer step")

    assert fit(interval="step") == 1
    assert fit(interval="step", log_interval="1ep") == 1
    assert fit() == 0


def test_a_rate_that_reaches_zero_at_the_end_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    trainer(
        schedulers=lambda o: lr.OneCycleLR(o, 0.2, total_steps=4, final_div_factor=1e9),
        optimizer=_sgd,
        settings={"max_duration": 4, "log_interval": 1},
    ).fit(loader())
    assert "within the first epoch" not in caplog.text


@pytest.mark.parametrize("log_interval", [1, 4])
@pytest.mark.parametrize(
    "scheduled",
    [
        Scheduled(TORCHS["OneCycleLR"], "step"),
        Scheduled(TORCHS["ExponentialLR"], "epoch"),
        Scheduled(lambda o: lr.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=10.0)),
        Scheduled(lambda o: WarmupCosine(o, 12, warmup=2)),
    ],
    ids=["step", "epoch", "evaluation", "ours"],
)
@pytest.mark.parametrize("several", [False, True], ids=["one optimizer", "two optimizers"])
@pytest.mark.parametrize("tensor", [False, True], ids=["number", "tensor"])
def test_the_settings_logged_with_a_step_are_those_that_it_was_made_with(
    scheduled: Scheduled, log_interval: int, several: bool, tensor: bool
) -> None:
    used: dict[tuple[int, str], float] = {}

    class Used(Callback):
        def on_before_optimizer_step(self, trainer: Any, model: Any, optimizer: Any) -> None:
            (name,) = (name for name, one in trainer.optimizers.items() if one is optimizer)
            infix = f"{name}/" if several else ""
            step = trainer.progress.step + 1
            used[step, f"train/lr{'/' + name if several else ''}"] = float(optimizer.param_groups[0]["lr"])
            for number, group in enumerate(optimizer.param_groups):
                used.update(
                    {(step, f"train/{key}/{infix}group{number}"): float(group[key]) for key in ("lr", "momentum")}
                )

    def made(parameters: Any) -> torch.optim.Optimizer:
        rate = torch.tensor(0.1) if tensor else 0.1
        return torch.optim.SGD([{"params": [one]} for one in parameters], lr=rate, momentum=0.9)

    logger = ListLogger()
    trainer(
        optimizer={"a": lambda m: made([m.linear.weight]), "b": lambda m: made([m.linear.bias])}
        if several
        else lambda m: made(m.parameters()),
        schedulers={"a": scheduled, "b": scheduled} if several else scheduled,
        callbacks=[Used(), LearningRateMonitor(["lr", "momentum"])],
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
