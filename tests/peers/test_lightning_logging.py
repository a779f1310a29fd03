"""The claims of Lightning's tests about what a model and callbacks log, and about means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from peer_claims import Claim, claims, each, try_claim
from small_runs import Logs, Net, Rows, fit, make_trainer, rows
from torch import nn

from trainer_cli import Callback, JsonlLogger, Loader, Metrics, Trainer, UserError

TRAIN = "test_train_loop_logging: "
EVAL = "test_eval_loop_logging: "
CONNECTOR = "test_logger_connector: "
RESULT = "test_metric_result_integration: "
HOOKS = {
    **dict.fromkeys(
        (
            "on_fit_start",
            "on_train_start",
            "on_train_batch_start",
            "on_train_batch_end",
            "on_before_backward",
            "on_after_backward",
            "on_before_optimizer_step",
            "on_after_optimizer_step",
            "on_train_end",
            "on_fit_end",
        ),
        "mine",
    ),
    **dict.fromkeys(
        ("on_validate_start", "on_validate_batch_start", "on_validate_batch_end", "on_validate_end"), "val/mine"
    ),
}


class Returns(Net):
    """Returns more: its number of calls in this mode, and what a subclass names."""

    more: Mapping[str, Any] = {}

    def forward(self, batch: Any) -> Any:
        outputs = super().forward(batch)
        calls = self.__dict__.setdefault("calls", {True: 0, False: 0})
        calls[self.training] += 1
        return {**outputs, "call": torch.tensor(float(calls[self.training])), **self.more}


def returning(**more: Any) -> type[nn.Module]:
    return type("ReturnsMore", (Returns,), {"more": more})


def check_training_means(folder: Path, interval: int, expected: Mapping[int, float]) -> None:
    """A logged value is the mean over the steps since the log before."""
    run = fit(model=Returns, batches=6, loop={"max_duration": 6, "log_interval": interval})
    assert run.log.values("train/call") == expected


def check_logged_steps(folder: Path, batches: int, steps: int, interval: int) -> None:
    run = fit(batches=batches, loop={"max_duration": steps, "log_interval": interval})
    assert list(run.log.values("train/loss")) == sorted({*range(interval, steps + 1, interval), steps})


def check_kind_logged(folder: Path, value: Any, expected: float) -> None:
    run = fit(model=returning(mine=value), loop={"log_interval": 1, "eval_interval": 4})
    last = run.log.records[-1].metrics
    assert (last["train/mine"], last["val/mine"]) == (expected, expected)


def check_not_logged(folder: Path, value: Any) -> None:
    """What a model returns and is no number is no metric."""
    run = fit(model=returning(mine=value), loop={"log_interval": 1, "eval_interval": 4})
    assert not [name for name in run.log.records[-1].metrics if name.endswith("mine")]


def check_logged_in(folder: Path, hook: str, name: str) -> None:
    run = fit(loop={"log_interval": 1, "eval_interval": 2}, callbacks=[Logs(hook, {"mine": 7.0})])
    assert set(run.log.values(name).values()) == {7.0}


def check_logged_value(folder: Path, value: Any) -> None:
    run = fit(loop={"log_interval": 1}, callbacks=[Logs("on_train_batch_end", {"mine": value})])
    assert run.log.values("mine")[4] == 3.0


def check_refused_value(folder: Path, value: Any) -> None:
    with pytest.raises(UserError, match="and no number"):
        fit(loop={"log_interval": 1}, callbacks=[Logs("on_train_batch_end", {"mine": value})])


def check_logged_twice(folder: Path) -> None:
    class Twice(Callback):
        def on_train_batch_end(self, trainer: Trainer, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            trainer.log_metrics(mine=1.0)
            trainer.log_metrics(mine=2.0)

    run = fit(loop={"log_interval": 1}, callbacks=[Twice()])
    assert set(run.log.values("mine").values()) == {2.0}


def check_record_place(folder: Path) -> None:
    run = fit(batches=2, loop={"log_interval": 1})
    places = [(record.step, record.epoch) for record in run.log.records if "train/loss" in record.metrics]
    assert places == [(1, 0.5), (2, 1.0), (3, 1.5), (4, 2.0)]


def check_own_names(folder: Path, name: str) -> None:
    """step, epoch and time of a line are the record's own."""
    with pytest.raises(UserError, match=name):
        fit(folder, loop={"log_interval": 1}, run_dir=folder, loggers=[JsonlLogger()],
            callbacks=[Logs("on_train_batch_end", {name: -1.0})])  # fmt: skip


def check_weighted(folder: Path) -> None:
    """The mean of an evaluation weighs batches by their samples."""
    run = fit(val=Loader(Rows(5), 2, shuffle=False, seed=0), loop={"eval_interval": 4})
    batch = [torch.stack(parts) for parts in zip(*[Rows(5)[index] for index in range(5)], strict=True)]
    with torch.no_grad():
        whole = run.trainer.model(batch)["loss"]
    assert run.log.values("val/loss")[4] == pytest.approx(float(whole), rel=1e-5)


def check_evaluated_result(folder: Path) -> None:
    trainer = make_trainer(model=returning(c=torch.tensor(2.0), **{"d/e/f": 2.0}))
    metrics = trainer.validate(rows(5))["val"]
    assert (metrics["c"], metrics["d/e/f"]) == (2.0, 2.0)


def check_loaders_apart(folder: Path, names: Sequence[str], means: Sequence[float]) -> None:
    """Each loader has means of its own, over its batches alone."""
    run = fit(model=Returns, val={"a": rows(2), "b": rows(4)}, loop={"eval_interval": 4})
    assert [run.log.values(name)[4] for name in names] == list(means)


class Greatest:
    """A metric with a state: the greatest prediction."""

    def __init__(self) -> None:
        self.resets, self.value = 0, -1.0

    def update(self, predictions: torch.Tensor, targets: Any = None) -> None:
        self.value = max(self.value, float(predictions.max()))

    def compute(self) -> float:
        return self.value

    def reset(self) -> None:
        self.resets, self.value = self.resets + 1, -1.0


def check_metric(folder: Path, what: str) -> None:
    metric = Greatest()
    callback = Metrics({"greatest": metric}, predictions=0, targets=1)
    run = fit(batches=4, val=5, loop={"eval_interval": 2}, callbacks=[callback])
    if what == "value":
        assert run.log.values("val/greatest") == pytest.approx({2: 0.8, 4: 0.8})
    else:
        assert metric.resets == 2


def check_metric_of_model(folder: Path) -> None:
    class WithMetric(Net):
        def __init__(self) -> None:
            super().__init__()
            self.greatest = Greatest()

        def forward(self, batch: Any) -> Any:
            self.greatest.update(batch[0])
            return {**super().forward(batch), "greatest": self.greatest}

    run = fit(model=WithMetric, train=rows(2), val=rows(5), loop={"eval_interval": 4, "log_interval": 2})
    assert run.log.values("val/greatest") == pytest.approx({4: 0.8})
    assert not run.log.values("train/greatest")


def check_means_resumed(folder: Path, stop: int) -> None:
    """The mean of a log after a resume has the steps before it."""

    class StopAt(Callback):
        def on_train_batch_end(self, trainer: Trainer, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if trainer.progress.step == stop:
                trainer.stop("enough for now", finished=False)

    loop = {"max_duration": 6, "log_interval": 3}
    expected = fit(batches=6, val=0, loop=loop).log.values("train/loss")
    fit(folder, batches=6, val=0, loop=loop, save={}, callbacks=[StopAt()])
    rest = fit(folder, batches=6, val=0, loop=loop, save={})
    assert rest.log.values("train/loss") == {step: expected[step] for step in (3, 6) if step > stop}


def check_precision_of_means(folder: Path, dtype: torch.dtype) -> None:
    """Means of 16-bit values are not rounded to 16 bits."""
    run = fit(
        model=returning(mine=torch.tensor(0.1, dtype=dtype)), batches=9, loop={"max_duration": 9, "log_interval": 9}
    )
    assert run.log.values("train/mine")[9] == float(torch.tensor(0.1, dtype=dtype))


CLAIMS: list[Claim] = [
    *claims(
        f"{TRAIN}test__training_step__log",
        check_training_means,
        {
            "at each step its value is logged": (1, {step: step for step in range(1, 7)}),
            "over some steps their mean is logged": (3, {3: 2.0, 6: 5.0}),
            "over an epoch its mean is logged": (6, {6: 3.5}),
        },
    ),
    *claims(
        "test_trainer: test_log_every_n_steps",
        check_logged_steps,
        {
            "each of ten steps is logged": (10, 10, 1),
            "each is, where epochs are shorter": (3, 10, 1),
            "each fifth is, over the ends of epochs": (3, 10, 5),
        },
    ),
    *claims(
        f"{TRAIN}test_unsqueezed_tensor_logging",
        check_kind_logged,
        {
            "a tensor without dimensions is a number": (torch.tensor(2), 2.0),
        },
    ),
    *claims(
        f"{EVAL}test_eval_float_logging", check_kind_logged, {"a float is logged": (12.0, 12.0), "an int is": (3, 3.0)}
    ),
    *claims(
        f"{TRAIN}test_logging_raises",
        check_not_logged,
        {
            "a tensor of several elements that a model returns": (torch.ones(2),),
            "a tensor of one element and one dimension that a model returns": (torch.ones(1),),
        },
        difference="Outputs of a model may hold anything for callbacks, such as a value for each sample, of which "
        "the last batch may have one: numbers without dimensions alone are metrics.",
    ),
    *claims(
        f"{TRAIN}test_unsqueezed_tensor_logging",
        check_logged_value,
        {"a tensor of one element that is logged by name is a number": (torch.tensor([[3.0]]),)},
    ),
    *claims(
        f"{TRAIN}test_log_invalid_raises",
        check_refused_value,
        {
            "a list is refused": ([1.0],),
            "a mapping is refused": ({"a": 1.0},),
            "a text is refused": ("text",),
            "a tensor of several elements is refused": (torch.ones(2),),
        },
    ),
    *claims(
        f"{TRAIN}test_logging_raises",
        check_logged_twice,
        {"one name logged twice in a step": ()},
        difference="Lightning refuses it; here the later value of a step counts, as callbacks may correct each other.",
    ),
    *claims(
        f"{TRAIN}test_log_metrics_epoch_step_values", check_record_place, {"a record has its step and its epoch": ()}
    ),
    *claims(
        f"{TRAIN}test_log_works_in_train_callback",
        check_logged_in,
        {f"what is logged in {hook} is in the log": (hook, name) for hook, name in HOOKS.items() if name == "mine"},
    ),
    *claims(
        f"{EVAL}test_log_works_in_val_callback",
        check_logged_in,
        {
            f"what is logged in {hook} has the loader's name": (hook, name)
            for hook, name in HOOKS.items()
            if "/" in name
        },
    ),
    *claims(
        f"{CONNECTOR}test_logged_metrics_has_logged_epoch_value",
        check_own_names,
        {"a metric called epoch": ("epoch",), "a metric called step": ("step",)},
        difference="Lightning writes the user's value in place of the epoch; a record's own names cannot be "
        "logged over.",
    ),
    *claims(
        f"{EVAL}test_eval_logging_auto_reduce", check_weighted, {"an evaluation's mean is that of its samples": ()}
    ),
    *claims(
        f"{EVAL}test_eval_epoch_only_logging", check_evaluated_result, {"an evaluation returns its means by name": ()}
    ),
    *claims(
        f"{EVAL}test_multiple_dataloaders_reset",
        check_loaders_apart,
        {"each of two loaders has its own means": (["a/call", "b/call"], [1.5, 4.5])},
    ),
    *claims(
        f"{CONNECTOR}test_metrics_reset",
        check_metric,
        {"a metric object is computed over an evaluation": ("value",), "it is reset before each": ("resets",)},
    ),
    *claims(
        f"{TRAIN}test_metric_are_properly_reduced",
        check_metric_of_model,
        {"a metric object that a model returns is computed, and reset in between": ()},
        difference="Of an evaluation it is; in the training, where Lightning computes it at the epoch's end, only "
        "means of numbers are logged, which cost no step a wait.",
    ),
    *claims(
        f"{RESULT}test_result_collection_restoration",
        check_means_resumed,
        {f"after a resume at step {stop} means are as without": (stop,) for stop in (1, 2, 4)},
    ),
    *claims(
        f"{RESULT}test_metric_result_precision_no_lower_than_float32",
        check_precision_of_means,
        {"means of bf16 are exact": (torch.bfloat16,), "means of fp16 are exact": (torch.float16,)},
    ),
]


@each(CLAIMS)
def test_the_claim_holds(claim: Claim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try_claim(claim, tmp_path, monkeypatch)
