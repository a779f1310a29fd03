"""Evaluations leave no trace: the check before step 1, one that a stop interrupted, and metrics with a state."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_parts import data_loader
from tiny import ListLogger, Points, StopInEvaluation, assert_resumes_exactly, everything, loader, on, same, trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.callbacks.early_stopping import EarlyStopping, ThresholdStopper
from trainer_cli.callbacks.validation_callback import ValidationCallback
from trainer_cli.errors import UserError
from trainer_cli.loggers.marks import loader_of
from trainer_cli.metric_names import Mode
from trainer_cli.optim.scheduler_intervals import Scheduled
from trainer_cli.outputs.model_call import ForwardState
from trainer_cli.schema.checkpoint_config import KeepBestConfig
from trainer_cli.trainer.train_step import TrainStep
from trainer_cli.trainer.validation_loop import Due


class Following(nn.Module):
    """Its forward changes all that a forward can, in training and in evaluation."""

    mean: Tensor
    replaced: Tensor
    not_saved: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.words = nn.Linear(2, 1), nn.Embedding(3, 2, max_norm=0.1)
        self.frozen: Tensor = nn.Parameter(torch.zeros(()), requires_grad=False)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("replaced", torch.zeros(()))
        self.register_buffer("not_saved", torch.zeros(()), persistent=False)
        self.extra = 0
        self.dropout = nn.Dropout(0.1)

    def get_extra_state(self) -> Any:
        return torch.tensor(self.extra)

    def set_extra_state(self, state: Any) -> None:
        self.extra = int(state)

    def forward(self, batch: Any) -> Any:
        x, y = batch
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.3)
            self.replaced = self.replaced + 1
            self.not_saved += 1
            self.frozen += 1
        self.extra += 1
        word = self.words(torch.arange(len(x)) % 3).sum(1)
        return (self.layer(self.dropout(x) - self.mean).squeeze(-1) + word - y).square().mean()


class Counting(TrainStep):
    """Counts forwards in a state of its own."""

    def __init__(self) -> None:
        self.forwards = 0

    def forward(self, batch: Any) -> Any:
        self.forwards += 1
        return super().forward(batch)

    def state_dict(self) -> dict[str, Any]:
        return {"forwards": self.forwards}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.forwards = state["forwards"]


def _plateau(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)


BEST = {"metric": "val/loss", "mode": "min", "count": 1}

# What wants a metric: callbacks, settings of the saver, of the loop, and the trainer's own.
OPTIONS: dict[str, tuple[list[Any], dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "nothing": ([], {}, {}, {}),
    "keep_best": ([], {"keep_best": BEST}, {}, {}),
    "early stopping": ([lambda: EarlyStopping("val/loss", patience="90ep")], {}, {}, {}),
    "threshold": ([lambda: ThresholdStopper("val/loss", -1.0)], {}, {}, {}),
    "plateau": ([], {}, {}, {"schedulers": {"plateau": Scheduled(_plateau, "evaluation", metric="val/loss")}}),
    "sanity steps": ([], {}, {"eval_sanity_steps": 2}, {}),
}


def _fit(folder: Path, option: str, *callbacks: Any, max_duration: int = 9) -> Any:
    makers, saver, loop, more = OPTIONS[option]
    made = trainer(
        Following, step=Counting(), callbacks=[*(make() for make in makers), *callbacks],
        settings={"max_duration": max_duration, "eval_interval": 3, **loop},
        checkpoint=CheckpointerCallback(folder, **{"save_interval": None, **saver}), **more,
    )  # fmt: skip
    train: Any = Points(12)
    made.fit(data_loader(train, 4), DataLoader(Points(6), 2))
    return made


@pytest.mark.parametrize("option", OPTIONS)
def test_a_resume_of_a_model_whose_forward_changes_it_is_exact(option: str, tmp_path: Path) -> None:
    assert_resumes_exactly(lambda folder, *callbacks: _fit(folder, option, *callbacks), tmp_path, 2, 3, 5)


@pytest.mark.parametrize("option", OPTIONS)
def test_the_check_changes_nothing_at_a_start(option: str, tmp_path: Path) -> None:
    with_check = _fit(tmp_path / "with", option, max_duration=1)
    without = _fit(tmp_path / "without", "nothing", max_duration=1)
    assert same(everything(with_check)["model"], everything(without)["model"]) == []
    assert with_check.model.not_saved == without.model.not_saved
    assert with_check.step.forwards == without.step.forwards


def test_a_resume_after_an_interrupted_evaluation_is_exact(tmp_path: Path) -> None:
    """But for parameters that an evaluation changes in place: copies of all at each evaluation would be too much."""
    straight = _fit(tmp_path / "straight", "keep_best")
    _fit(tmp_path / "parts", "keep_best", StopInEvaluation(3, 1))
    resumed = _fit(tmp_path / "parts", "keep_best")
    differ = same(_without_options(straight), _without_options(resumed))
    assert [row for row in differ if not row.startswith(("/model/frozen", "/model/words"))] == []


class Observed(nn.Module):
    """Its forward writes buffers in evaluation mode, as observers of quantization-aware training do."""

    range: Tensor
    late: Tensor | None
    channels: Tensor

    def __init__(self, write: str) -> None:
        super().__init__()
        self.layer, self.write = nn.Linear(2, 1), WRITES[write]
        self.register_buffer("range", torch.zeros(2))
        self.register_buffer("late", None)
        self.register_buffer("channels", torch.zeros(0))
        self.register_buffer("fixed", torch.ones(1).expand(3))
        self.norm = nn.BatchNorm1d(2)

    def forward(self, batch: Any) -> Any:
        x, y = batch
        self.write(self, x.abs().amax(0))
        late = 0.0 if self.late is None else self.late.mean()
        values = self.layer(self.norm(x) + self.range).squeeze(-1) + self.channels.sum() + late
        return {"loss": (values - y).square().mean(), "values": values}


def _in_training_mode(model: Observed, peak: Tensor) -> None:
    model.norm.train()


EXTREME = (torch.full((2, 2), 9.0), torch.zeros(2))
WRITES: dict[str, Callable[[Observed, Tensor], Any]] = {
    "in place": lambda model, peak: model.range.lerp_(peak, 0.5),
    "the data": lambda model, peak: model.range.data.copy_(peak),
    "by another tensor": lambda model, peak: setattr(model, "range", model.range.maximum(peak)),
    "created": lambda model, peak: setattr(model, "late", peak),
    "resized": lambda model, peak: model.channels.resize_(2).copy_(peak),
    "statistics of a norm": _in_training_mode,
}
EVALUATES: dict[str, Any] = {
    "loaders": None,
    "a callback": type(
        "Again", (ValidationCallback,), {"evaluate": lambda self, made: made.step.forward(EXTREME) and {}}
    ),
    "a hook": lambda: on(run_validation=lambda made, is_last: made.step.forward(EXTREME)),
    "validate": lambda: on(on_train_batch_start=lambda made, *_: made.validate(loader(6, 2))),
    "predict": lambda: on(on_train_batch_start=lambda made, *_: made.predict(loader(6, 2))),
}


@pytest.mark.parametrize(
    ("write", "evaluates"), [*((write, "loaders") for write in WRITES), *(("in place", name) for name in EVALUATES)]
)
def test_an_evaluation_changes_no_buffer_of_the_training(
    write: str, evaluates: str, caplog: pytest.LogCaptureFixture
) -> None:
    ends = []
    for interval, make in ((None, None), (2, EVALUATES[evaluates])):
        callbacks = [] if make is None else [make()]
        made = trainer(
            lambda: Observed(write),
            callbacks=[*callbacks, on(on_after_forward=lambda *_: None)],
            settings={"eval_interval": interval, "eval_at_start": interval is not None},
        )
        with caplog.at_level(logging.INFO, logger="trainer_cli"):
            made.fit(loader(12), None if interval is None else loader(6, 2))
        ends.append(made.model.state_dict())
    assert same(*ends) == []
    lines = [message for message in caplog.messages if "evaluations write" in message]
    assert len(lines) == 1
    assert "of the model, such as" in lines[0]


def test_what_a_callback_writes_after_an_evaluation_stays() -> None:
    calibrates = on(on_after_evaluation=lambda made, metrics: made.model.range.fill_(7.0))
    made = trainer(lambda: Observed("in place"), callbacks=[calibrates])
    made.fit(loader(), loader(5, 2))
    assert made.model.get_buffer("range").tolist() == [7.0, 7.0]


def test_what_was_restored_is_in_the_same_tensors() -> None:
    model = Following()
    before = {name: (id(value), value.clone()) for name, value in (*model.named_parameters(), *model.named_buffers())}
    state = ForwardState(model, parameters=True)
    model((torch.ones(4, 2), torch.ones(4)))
    assert model.replaced == 1
    state.restore()
    for name, value in (*model.named_parameters(), *model.named_buffers()):
        assert (id(value), torch.equal(value, before[name][1])) == (before[name][0], True), name
    assert model.extra == 0


def _without_options(made: Any) -> dict[str, Any]:
    return {key: value for key, value in everything(made).items() if key != "callbacks"}


class Count:
    """How many samples were seen since the last reset."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.seen = 0

    def update(self, values: Tensor) -> None:
        self.seen += len(values)

    def compute(self) -> Any:
        return float(self.seen)


class CountModule(Count, nn.Module):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.reset()


class Holder(nn.Module):
    """Returns a metric that it holds as a submodule, or in a container; in evaluations alone, or always."""

    def __init__(self, name: str, *, in_training: bool = True) -> None:
        super().__init__()
        kind, place = METRICS[name]
        self.layer, self.in_training = nn.Linear(1, 1), in_training
        held: Any = {"count": kind()}
        places: dict[str, Any] = {"submodule": nn.ModuleDict, "dict": dict, "list": lambda held: [held["count"]]}
        self.held = places[place](held)

    def forward(self, batch: Any) -> Any:
        outputs = {"loss": self.layer(batch[0]).square().mean()}
        if self.training and not self.in_training:
            return outputs
        metric = self.held[0] if isinstance(self.held, list) else self.held["count"]
        metric.update(batch[0])
        return outputs | {"count": metric}


DATA = torch.utils.data.TensorDataset(torch.ones(10, 1))

METRICS: dict[str, tuple[type, str]] = {
    "module, submodule": (CountModule, "submodule"), "module in a dict": (CountModule, "dict"),
    "module in a list": (CountModule, "list"), "object in a dict": (Count, "dict"), "object": (Count, "list"),
    "a collection": (type("Several", (Count,), {"compute": lambda self: {"seen": float(self.seen)}}), "dict"),
}  # fmt: skip


@pytest.mark.parametrize("interrupted", [False, True], ids=["straight", "interrupted"])
@pytest.mark.parametrize("in_training", [True, False], ids=["always", "in evaluations"])
@pytest.mark.parametrize("name", METRICS)
def test_each_evaluation_of_each_loader_counts_its_own_samples(name: str, in_training: bool, interrupted: bool) -> None:
    model, logger = Holder(name, in_training=in_training), ListLogger()
    settings = {"max_duration": 3, "eval_interval": 1, "eval_at_start": True}
    stop = StopInEvaluation(2 if interrupted else -1)
    made = trainer(lambda: model, callbacks=[stop], loggers=[logger], settings=settings)
    data = DataLoader(DATA, 5), {"a": DataLoader(DATA, 5), "b": DataLoader(DATA, 5)}
    assert made.fit(*data).finished is not interrupted
    stop.step = -1
    assert made.fit(*data).finished
    values = [value for record in logger.records for key, value in record.metrics.items() if "/count" in key]
    assert values == [10.0] * (2 * 4)
    again = made.validate(DATA)["val"]
    assert 10.0 in (again.get("count"), again.get("count/seen"))


class Detector(nn.Module):
    """Returns a loss in training, and as those of torchvision a list in evaluations; or what `returns` makes of it."""

    def __init__(self, returns: Any = None) -> None:
        super().__init__()
        self.layer, self.returns = nn.Linear(2, 1), returns

    def forward(self, batch: Any) -> Any:
        values = self.layer(batch[0]).squeeze(-1)
        if self.training:
            return (values - batch[1]).square().mean()
        boxes = [{"boxes": value} for value in values]
        return boxes if self.returns is None else self.returns(values)


class Boxes:
    """A metric of lists: the mean of the boxes."""

    def reset(self) -> None:
        self.seen: list[float] = []

    def update(self, predictions: Any, targets: Any) -> None:
        assert len(predictions) == len(targets)
        self.seen += [float(entry["boxes"]) for entry in predictions]

    def compute(self) -> float:
        return sum(self.seen) / len(self.seen)


def _boxes() -> Any:
    """A metric of the predictions, by a callback of an add-on."""
    metrics = pytest.importorskip("trainer_cli.addons.inspect.metrics")
    return metrics.Metrics({"box": Boxes()}, predictions=None, targets=1)


def _detect(folder: Path, *callbacks: Any, **more: Any) -> Any:
    made = trainer(
        Detector,
        callbacks=[_boxes(), *callbacks],
        checkpoint=CheckpointerCallback(folder, keep_best=KeepBestConfig(metric="val/box", mode=Mode.max)),
        settings={"eval_interval": 2, "log_interval": 2},
        **more,
    )
    made.fit(loader(), loader(5, 2, shuffle=False))
    return made


def test_an_evaluation_without_a_loss_reports_the_metrics_of_its_outputs(tmp_path: Path) -> None:
    logger = ListLogger()
    made = _detect(tmp_path, loggers=[logger])
    assert logger.steps("val/box") == [2, 4, 6]
    assert not logger.steps("val/loss")
    assert made.validate(loader(5, 2, shuffle=False)) == {"val": {"box": logger.records[-1].metrics["val/box"]}}


def test_a_run_whose_evaluations_have_no_loss_resumes_exactly(tmp_path: Path) -> None:
    assert_resumes_exactly(_detect, tmp_path, 3)


@pytest.mark.parametrize(
    ("returns", "metrics"),
    [
        (lambda values: {"logits": values, "mean": values.mean()}, ["mean"]),
        (lambda values: {"loss": None, "mean": values.mean()}, ["mean"]),
        (lambda values: (None, {"mean": values.mean(), "weight": 3}), ["mean"]),
        (lambda values: {"loss": values.mean(), "mean": values.mean()}, ["loss", "mean"]),
        (list, "the evaluation on 'val' reports nothing: the model returned list without a loss or a metric"),
        (lambda values: {"logits": values}, "reports nothing: the model returned dict"),
        (lambda values: values, "the model's loss is a tensor of shape"),
        (lambda values: (values, values), "the model's loss is a tensor of shape"),
        (lambda values: None, "the model returned NoneType, expected a loss"),
    ],
)
def test_an_evaluation_needs_a_loss_or_a_metric(returns: Any, metrics: Any) -> None:
    made = trainer(lambda: Detector(returns))
    if isinstance(metrics, str):
        with pytest.raises(UserError, match=metrics):
            made.validate(loader(5, 2, shuffle=False))
    else:
        assert sorted(made.validate(loader(5, 2, shuffle=False))["val"]) == metrics


def test_a_metric_that_such_an_evaluation_lacks_is_refused_before_step_1() -> None:
    made = trainer(Detector, callbacks=[_boxes(), EarlyStopping(patience=1)])
    with pytest.raises(UserError, match="'val/loss', which no validation loader or callback reports"):
        made.fit(loader(), loader(5, 2, shuffle=False))


def test_a_metric_is_of_the_loader_with_the_longest_name() -> None:
    loaders = {"easy": 1, "easy/long": 2, "hard": 3}
    names = ["easy/loss", "easy/long/loss", "easy/longer", "hard/a/b", "mine/loss", "easy"]
    assert [loader_of(name, loaders) for name in names] == ["easy", "easy/long", "easy", "hard", "mine", "easy"]
    for due_by_interval in loaders:
        by_interval = Due({due_by_interval: 0}, callbacks=False, is_all=False)
        counted = [name for name in loaders if Due(loaders, by_interval=by_interval).counts(f"{name}/loss")]
        assert counted == [due_by_interval]


@pytest.mark.parametrize("end", [{"hard_stop": 4}, {"max_duration": 4}], ids=["hard_stop", "max_duration"])
@pytest.mark.parametrize("loaders", [{}, {"slow": {"interval": 3}, "quick": {"interval": 2}}], ids=["shared", "own"])
def test_an_evaluation_only_because_a_run_ends_changes_nothing_of_a_longer_one(
    end: dict[str, int], loaders: dict[str, Any], tmp_path: Path
) -> None:
    def fit(folder: str, *callbacks: Any, **settings: Any) -> Any:
        made = trainer(
            callbacks=[EarlyStopping("slow/loss", patience=90, min_delta=0.0), *callbacks],
            schedulers={"plateau": Scheduled(_plateau, "evaluation", metric="slow/loss")},
            checkpoint=CheckpointerCallback(tmp_path / folder, save_interval=None),
            settings={"max_duration": 9, "eval_interval": 3, "eval_loaders": loaders, **settings},
        )
        made.fit(loader(12, 4), {"slow": loader(6, 2), "quick": loader(4, 2)})
        state = everything(made)
        return {name: state[name] for name in ("schedulers", "callbacks", "model")}

    whole = fit("whole")
    assert whole["schedulers"]["plateau"]["state"]["last_epoch"] == 3
    # Step 4 is due for the quick loader alone, or for none.
    assert same(fit("parts", **end), whole) != []
    assert same(fit("parts"), whole) == []
    # A stop puts this evaluation off, and the training is longer when it is made.
    fit("stopped", StopInEvaluation(4), **end)
    assert same(fit("stopped"), whole) == []


@pytest.mark.parametrize(
    ("samples", "names", "warned"),
    [
        (6, ["r2"], ["val/r2"]),
        (6, ["r2", "F1", "accuracy"], ["val/r2", "val/F1"]),
        (6, ["accuracy", "mse"], []),
        # Of one batch the mean is the value.
        (2, ["r2"], []),
    ],
)
def test_a_mean_over_batches_that_is_not_the_value_over_the_set_is_named_once(
    samples: int, names: list[str], warned: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def forward(self, batch: Any) -> dict[str, Any]:
            return {"loss": self.layer.weight.sum(), **dict.fromkeys(names, 0.5)}

    made = trainer(Own(), settings={"max_duration": 4, "eval_interval": 2})
    made.fit(loader(8, 2), {"val": loader(samples, 2)})
    lines = [record.getMessage() for record in caplog.records if "the mean of the values" in record.getMessage()]
    assert [line.partition(":")[0] for line in lines] == ([", ".join(warned)] if warned else [])


def test_an_error_in_an_evaluation_names_the_validation_set_once() -> None:
    def fail(made: Any, model: nn.Module, batch: Any) -> None:
        if made.progress.step == 2 and made.evaluating.name == "hard":
            raise ArithmeticError("no luck")

    made = trainer(callbacks=[on(on_validate_step_start=fail)], settings={"max_duration": 4, "eval_interval": 2})
    with pytest.raises(ArithmeticError) as caught:
        made.fit(loader(), {"easy": loader(), "hard": loader()})
    notes = [note for note in caught.value.__notes__ if note.startswith("while evaluating")]
    assert notes == ["while evaluating hard at step 2"]
