"""The loops: what happens at which step, exact accumulation and means, and evaluations that leave no trace."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small_parts import data_loader, present
from tiny import Line, ListLogger, Noisy, StopAt, StopInEvaluation, Unsized, loader, on, recorder, same, trainer
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from trainer_cli import WarmupCosine
from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.data.loader import Loader
from trainer_cli.errors import NotFiniteError, UserError
from trainer_cli.loggers.text_files import JsonlLogger
from trainer_cli.state.generators import capture_rng
from trainer_cli.trainer.finite import not_finite
from trainer_cli.trainer.precision import Precision
from trainer_cli.trainer.trainer import Trainer


class Weighted(nn.Module):
    """A loss that is the mean over the samples with weights of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1, dtype=torch.float64)

    def forward(self, batch: Any) -> Any:
        x, y, weight = batch
        error = (self.linear(x).squeeze(-1) - y).square()
        return {"loss": (error * weight).sum() / weight.sum(), "weight": weight.sum(), "tokens": len(y)}


class WeightedPoints:
    deterministic = True

    def __init__(self, length: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(length, 2, generator=generator, dtype=torch.float64)
        self.weight = torch.rand(length, generator=generator, dtype=torch.float64) * 9 + 0.5

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.x[index].prod(), self.weight[index]


@pytest.mark.parametrize(
    ("length", "batch", "accum", "steps"), [(12, 4, 3, 1), (11, 4, 3, 1), (18, 4, 3, 2), (7, 1, 5, 2)]
)
def test_accumulated_gradients_are_those_of_the_whole_batch(length: int, batch: int, accum: int, steps: int) -> None:
    """Unequal weights, an uneven last batch, and batches left over at the epoch's end, which make a step."""
    data, gradients = WeightedPoints(length), []
    for size, count in ((batch, accum), (batch * accum, 1)):
        seen: list[list[torch.Tensor]] = []
        keep = on(
            on_before_optimizer_step=lambda trainer, model, optimizer, seen=seen: seen.append(
                [parameter.grad.clone() for parameter in model.parameters()]
            )
        )
        settings = {"max_duration": "2ep", "grad_accum_steps": count}
        trained = trainer(Weighted, callbacks=[keep], settings=settings, lr=0.01)
        trained.fit(Loader(data, size, shuffle=True, seed=1))
        assert (trained.progress.step, trained.progress.samples, trained.progress.epoch) == (2 * steps, 2 * length, 2)
        gradients.append(seen)
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-14)


DRAWS = {"on_validate_batch_start": lambda *_: (torch.rand(3), random.random(), np.random.rand())}


@pytest.mark.parametrize("batch_size", [1, 3, 4, 10])
def test_a_validation_mean_is_that_over_all_samples_whatever_the_batches(batch_size: int) -> None:
    data = loader(10, batch_size, noise=0, shuffle=False)
    means = trainer().validate(data)["val"]
    model: Any = trainer().model
    x, y = (torch.stack(part) for part in zip(*(data.source.dataset[i] for i in range(10)), strict=True))
    error = model.linear(x).squeeze(-1) - y
    assert means["loss"] == pytest.approx(error.square().mean().item(), rel=1e-6)
    assert means["mae"] == pytest.approx(error.abs().mean().item(), rel=1e-6)


def test_a_validation_mean_takes_the_weights_that_the_model_gives() -> None:
    data = WeightedPoints(7)
    one = trainer(Weighted).validate(Loader(data, 3, shuffle=False, seed=0))["val"]["loss"]
    assert one == pytest.approx(trainer(Weighted).validate(Loader(data, 7, shuffle=False, seed=0))["val"]["loss"])


def test_eval_steps_limits_the_batches_of_each_loader() -> None:
    trained = trainer(settings={"eval_steps": 2})
    trained.validate({"a": loader(40), "b": loader(40)})
    assert trained.model.calls == 4
    assert trained.model.training


def test_an_evaluation_leaves_modes_gradients_and_random_state_alone() -> None:
    trained = trainer(Noisy, callbacks=[on(**DRAWS)])
    trained.model.get_submodule("body.3").eval()
    for parameter in trained.model.parameters():
        parameter.grad = torch.full_like(parameter, 3.0)
    modes = [module.training for module in trained.model.modules()]
    state, generators = copy.deepcopy(trained.model.state_dict()), capture_rng()
    trained.validate(loader(noise=0.1, num_workers=0))
    assert [module.training for module in trained.model.modules()] == modes
    assert False in modes
    assert all((present(parameter.grad) == 3).all() for parameter in trained.model.parameters())
    assert same(trained.model.state_dict(), state) == []
    assert same(capture_rng(), generators) == []


def test_a_training_is_the_same_with_and_without_evaluations() -> None:
    ends = []
    for often in (None, 1):
        settings = {"eval_interval": often, "eval_at_start": bool(often)}
        trained = trainer(Noisy, callbacks=[on(**DRAWS)], settings=settings)
        trained.fit(loader(12), loader(6))
        ends.append(trained.model.state_dict())
    assert same(*ends) == []


def test_a_failing_evaluation_puts_the_modes_back() -> None:
    trained = trainer(callbacks=[recorder([], fail_in=("on_validate_batch_end",))])
    with pytest.raises(RuntimeError, match="on_validate_batch_end failed"):
        trained.validate(loader())
    assert trained.model.training


@pytest.mark.parametrize(
    ("length", "steps"),
    [
        (5, 5),
        ("2ep", 6),
        ("0.5ep", 2),
        ("1.34ep", 5),
        ("9sp", 3),
        ("14sp", 4),
        ("25tok", 3),
        ("30tok", 3),
        ("31tok", 4),
    ],
)
@pytest.mark.parametrize("tokens", ["a number", "a tensor"])
def test_a_training_is_as_long_as_it_is_reported(length: Any, steps: int, tokens: str) -> None:
    trained = trainer(Line if tokens == "a number" else OnTheDevice, settings={"max_duration": length})
    result = trained.fit(loader(10, 4))
    assert (result.step, result.finished) == (steps, True)


def test_a_training_in_seconds_ends_and_counts_all_attempts() -> None:
    trained = trainer(settings={"max_duration": "0.05s"})
    assert trained.fit(loader()).finished
    assert 0.05 <= trained.progress.seconds < 2
    later = trainer(settings={"max_duration": "1h"})
    later.progress.seconds = 3600.0
    assert later.fit(loader()).reason == "max_duration of 3600s reached"
    assert later.progress.step == 0


def test_max_time_stops_this_process_to_be_resumed() -> None:
    result = trainer(settings={"max_duration": 10**9, "max_time": "0.02s"}).fit(loader())
    assert (result.finished, result.reason) == (False, "max_time of 0.02s used up")


@pytest.mark.parametrize(
    ("interval", "expected"),
    [(2, [2, 4, 6]), ("1ep", [3, 6]), ("0.5ep", [2, 3, 5, 6]), ("8sp", [2, 5, 6]), ("36tok", [4, 6]), (4, [4, 6])],
)
def test_logs_and_evaluations_come_at_absolute_counts_and_at_the_end(interval: Any, expected: list[int]) -> None:
    logger = ListLogger()
    settings = {"log_interval": interval, "eval_interval": interval}
    trainer(loggers=[logger], settings=settings).fit(loader(10, 4), loader(3))
    # 4, 4 and 2 samples a step; the end always has both.
    assert logger.steps("train/loss") == logger.steps("val/loss") == expected


def test_a_step_has_one_record_with_all_that_was_measured_at_it() -> None:
    logger = ListLogger()
    trainer(loggers=[logger], settings={"log_interval": 2, "eval_interval": 3}).fit(
        loader(), {"one": loader(3), "two": loader(4)}
    )
    steps = [record.step for record in logger.records]
    assert steps == sorted(set(steps)) == [2, 3, 4, 6]
    assert {key.split("/")[0] for key in logger.records[-1].metrics} == {"train", "one", "two"}


def test_what_a_callback_logs_stands_at_the_step_it_was_logged_at() -> None:
    def log(trainer: Trainer, model: Any, outputs: Any, *_: Any) -> None:
        if trainer.progress.step in (2, 3):
            trainer.log_metrics(mine=outputs["loss"] * 0 + trainer.progress.step)

    logger = ListLogger()
    trainer(callbacks=[on(on_train_batch_end=log)], loggers=[logger], settings={"log_interval": 3}).fit(loader())
    assert [(record.step, record.metrics.get("mine")) for record in logger.records] == [(2, 2.0), (3, 3.0), (6, None)]


def test_a_training_mean_is_over_the_samples_since_the_last_log() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, batch: Any) -> Any:
            return {"loss": self.weight.sum(), "size": float(len(batch[1]))}

    logger = ListLogger()
    trainer(Counts, loggers=[logger], settings={"log_interval": "1ep"}).fit(loader(10, 4))
    # Batches of 4, 4 and 2: weighted (16 + 16 + 4) / 10.
    assert [record.metrics["train/size"] for record in logger.records] == [3.6, 3.6]


def test_eval_at_start_measures_the_new_model_at_step_0(tmp_path: Path) -> None:
    logger = ListLogger()
    trained = trainer(loggers=[logger], settings={"eval_at_start": True, "max_duration": 2}, run_dir=tmp_path)
    expected = trained.validate(loader(6, shuffle=False))["val"]["loss"]
    logger.records.clear()
    trained.fit(loader(), loader(6, shuffle=False))
    assert (logger.records[0].step, logger.records[0].metrics["val/loss"]) == (0, expected)
    assert [record.step for record in logger.records] == [0, 2], "the evaluation before the fit is not there twice"


class Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the step at which the host asks the device for a number."""

    def __init__(self, trained: Trainer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trained, self.steps = trained, set[int]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten._local_scalar_dense.default:
            self.steps.add(self.trained.progress.step)
        return function(*args, **(kwargs or {}))


class OnTheDevice(Line):
    """Its outputs are all tensors; also its tokens."""

    def forward(self, batch: Any) -> Any:
        outputs = super().forward(batch)
        return {**outputs, "tokens": torch.tensor(3, dtype=torch.int32) * len(batch[1]), "half": 0.5}


@pytest.mark.parametrize("accum", [1, 2])
@pytest.mark.parametrize("model", [Line, OnTheDevice])
def test_the_host_waits_for_the_device_at_log_steps_alone(accum: int, model: Any) -> None:
    settings = {"max_duration": 8, "log_interval": 4, "grad_accum_steps": accum}
    trained = trainer(model, settings=settings, precision=Precision(clip_norm=1.0), loggers=[ListLogger()])
    with Waits(trained) as waits:
        trained.fit(loader(noise=0))
    assert waits.steps == {4, 8}
    assert trained.progress.tokens == 3 * trained.progress.samples


@pytest.mark.gpu
def test_on_a_gpu_the_host_waits_at_log_steps_alone() -> None:
    watched = on(
        on_train_batch_start=lambda *_: torch.cuda.set_sync_debug_mode("error"),
        on_train_batch_end=lambda *_: torch.cuda.set_sync_debug_mode("default"),
    )
    trained = trainer(OnTheDevice, callbacks=[watched], settings={"max_duration": 8, "log_interval": 4})
    trained.model.cuda()
    trained.device = torch.device("cuda")
    trained.fit(loader(noise=0))
    assert trained.progress.tokens == 3 * trained.progress.samples


class Breaks(Line):
    """Its loss is not finite at these calls."""

    def __init__(self, *calls: int) -> None:
        super().__init__()
        self.bad = calls

    def forward(self, batch: Any) -> Any:
        loss = super().forward(batch)["loss"]
        return loss.detach() * float("inf") + 0 * loss if self.calls in self.bad else loss


def test_one_loss_that_is_not_finite_is_a_warning_and_two_in_a_row_the_end(caplog: pytest.LogCaptureFixture) -> None:
    once = trainer(lambda: Breaks(2, 4), settings={"log_interval": 1}, lr=0.0)
    assert once.fit(loader(noise=0)).finished
    assert caplog.text.count("the loss is not finite at step") == 2
    assert "There is no checkpoint with finite weights." in caplog.text
    twice = trainer(lambda: Breaks(2, 3), settings={"log_interval": 1}, lr=0.0)
    ends = r"seen not finite at step 2, and the run ends at step 3\. There is no .*log_interval=1"
    with pytest.raises(NotFiniteError, match=ends):
        twice.fit(loader(noise=0))


NAN_IN_SECOND = [torch.tensor([[1.0], [float("nan")]]), torch.zeros(2)]


@pytest.mark.parametrize(
    ("config", "saves", "batch", "message"),
    [
        ("", None, None, "There is no checkpoint with finite weights. Make a new trainer without the cause: a sample"),
        ("", 4, None, "The last finite checkpoint is step4. Make a new trainer without the cause: a sample"),
        ("", 4, None, "a learning rate that is too large; fit(..., keep_settings=['lr']) resumes with another."),
        (
            "",
            4,
            NAN_IN_SECOND,
            "it ends; in its batch, NaN is in the sample at 1, counted from 0. The last",
        ),
        ("", 4, NAN_IN_SECOND, "step4. Mend the sample, and make a new trainer."),
        ("", 4, [torch.full((2, 3), float("nan")), torch.zeros(3)], "it ends. The last"),
        ("", 4, [torch.full((2, 3), -float("inf")), torch.zeros(2)], "it ends. The last"),
        ("", 4, [torch.full((2, 3), float("nan")), torch.zeros(2)], "step4. Make a new trainer without the cause: a"),
        ("seed: 1", 4, None, "it ends. The last finite checkpoint is step4."),
    ],
    ids=[
        "nothing saved",
        "a checkpoint",
        "its rate",
        "a sample",
        "its cure",
        "samples second",
        "a mask",
        "padding",
        "of the command",
    ],
)
def test_a_loss_that_is_not_finite_advises_a_training_in_python_in_its_own_words(
    config: str, saves: int | None, batch: Any, message: str
) -> None:
    checkpoint = None if saves is None else SimpleNamespace(newest_finite=lambda: f"step{saves}")
    step = SimpleNamespace(batch_size=None if batch is None else len(batch[1]))
    job: Any = SimpleNamespace(config=config, checkpoint=checkpoint, step=step)
    text = str(not_finite(job, "it ends", batch))
    assert message in text
    assert "name=OTHER" not in text
    assert "optimizer.lr" not in text
    assert ("make a new trainer" in text.lower()) == (not config)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(2, 1), nn.Parameter(torch.ones(()))

    def forward(self, batch: Any) -> Any:
        return (self.linear(batch[0]).sum() + 100) * self.scale / len(batch[0])


@pytest.mark.parametrize(
    ("accum", "precision", "largest"), [(1, Precision(clip_norm=0.1), 0.11), (3, None, 40.0)], ids=["clip", "divide"]
)
def test_parameters_of_a_group_added_in_the_middle_are_clipped_and_divided(
    accum: int, precision: Precision | None, largest: float
) -> None:
    gradients: list[float] = []

    def add_group(trainer: Trainer, model: Any, *_: Any) -> None:
        if trainer.progress.step == 2 and len(present(trainer.optimizer).param_groups) == 1:
            present(trainer.optimizer).add_param_group({"params": [model.scale], "lr": 0.5})

    trained = trainer(
        Scaled,
        optimizer=lambda model: torch.optim.SGD(model.linear.parameters(), lr=1e-3),
        schedulers=lambda optimizer: WarmupCosine(optimizer, total_steps=6),
        callbacks=[on(
            on_train_batch_start=add_group,
            on_after_optimizer_step=lambda trainer, model, optimizer: gradients.append(float(model.scale.grad)),
        )],
        precision=precision,
        settings={"grad_accum_steps": accum},
    )  # fmt: skip
    trained.fit(loader(24, 4))
    # Before, nothing changed or cleared them.
    assert all(abs(gradient) <= largest for gradient in gradients[3:])
    rates = [group["lr"] for group in present(trained.optimizer).param_groups]
    assert rates == pytest.approx([0.0, 0.0], abs=1e-9), "the schedule ends for both"


@pytest.mark.parametrize(("accum", "limit", "steps"), [(1, None, 10), (2, None, 6), (1, 2, 4)])
def test_a_loader_without_length_ends_its_epochs_by_itself(accum: int, limit: int | None, steps: int) -> None:
    settings = {"eval_interval": "1ep", "grad_accum_steps": accum, "limit_train_batches": limit}
    trained = trainer(settings={"max_duration": "2ep", **settings})
    trained.fit(Unsized(5), loader(3))
    assert (trained.progress.step, trained.progress.samples) == (steps, 8 if limit else 20)
    assert (trained.progress.epoch, trained.progress.batch, trained.progress.epoch_samples) == (2, 0, 0)
    assert (trained.loop.steps_per_epoch, trained.loop.total_steps) == ((2, 4) if limit else (None, None))


def test_a_part_epoch_of_a_loader_without_length_is_one_of_the_steps_that_are_reported() -> None:
    trained = trainer(settings={"max_duration": "0.5ep", "steps_per_epoch": 4})
    assert trained.fit(Unsized(4)).step == 2


@pytest.mark.parametrize(("stated", "accum", "warned"), [(5, 1, 0), (7, 1, 1), (4, 1, 1), (3, 2, 0), (None, 1, 0)])
def test_another_length_of_the_first_epoch_than_is_stated_is_a_warning(
    stated: int | None, accum: int, warned: int, caplog: pytest.LogCaptureFixture
) -> None:
    trainer(settings={"max_duration": 12, "steps_per_epoch": stated, "grad_accum_steps": accum}).fit(Unsized(5))
    assert caplog.text.count(f"the first epoch has 5 steps, and loop.steps_per_epoch is {stated}") == warned


class Wrong(Unsized):
    """A loader of another length than it reports."""

    def __init__(self, batches: int, reported: int) -> None:
        super().__init__(batches)
        self.reported = reported

    def __len__(self) -> int:
        return self.reported


@pytest.mark.parametrize(
    ("data", "settings", "message"),
    [
        (Unsized(4), {"max_duration": "0.5ep"}, r"set loop\.steps_per_epoch"),
        (Unsized(5), {"limit_train_batches": 0.5}, "is a fraction, but the train loader has no length"),
        (Wrong(4, 9), {}, "ended after 4 batches of epoch 0, but 9 were expected"),
        (Wrong(0, 0), {}, "no batches"),
        ([(torch.ones(2, 3),)], {"max_duration": "9tok"}, "the model's outputs have no 'tokens'"),
        ([(torch.ones(2, 3),)], {"log_interval": "5tok"}, "the model's outputs have no 'tokens'"),
        ({"labelled": loader(), "unlabelled": loader()}, {}, r"a mapping \('labelled', 'unlabelled'\) where one"),
        (zip(loader().iterate(0), loader().iterate(0), strict=True), {}, "zip can be iterated only once"),
        ([data_loader([1]), data_loader([1])], {}, "join training data in one dataset"),
        ((data_loader([1]), data_loader([1])), {}, "join training data in one dataset"),
    ],
    ids=[
        "part of no length", "fraction of no length", "ends early", "empty", "no tokens", "no tokens for logs",
        "mapping", "zip", "list of loaders", "tuple of loaders",
    ],
)  # fmt: skip
def test_data_that_cannot_be_trained_on_are_refused(data: Any, settings: dict[str, Any], message: str) -> None:
    model = WithoutTokens if "tokens" in message else Line
    with pytest.raises(UserError, match=message):
        trainer(model, settings=settings).fit(data)


class WithoutTokens(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 1)

    def forward(self, batch: Any) -> Any:
        return super().forward(batch[0]).mean()


@pytest.mark.parametrize(("limit", "steps"), [(2, 4), (0.5, 4), (1, 2), (99, 6), (1.0, 6)])
def test_limit_train_batches_makes_epochs_shorter(limit: Any, steps: int) -> None:
    trained = trainer(settings={"max_duration": "2ep", "limit_train_batches": limit})
    assert trained.fit(loader(10, 4)).step == steps
    assert trained.progress.epoch == 2


def test_validation_loaders_that_are_empty_or_named_as_the_training_are_refused() -> None:
    with pytest.raises(UserError, match="a validation loader is called 'train'"):
        trainer().fit(loader(), {"train": loader()})
    with pytest.raises(UserError, match="'probe' gave no batch"):
        trainer().validate({"probe": Unsized(0)})


def test_a_stop_that_finishes_the_run_still_has_its_evaluation_and_its_log() -> None:
    logger = ListLogger()
    result = trainer(callbacks=[StopAt(4, finished=True)], loggers=[logger]).fit(loader(), loader(9))
    assert (result.step, result.finished) == (4, True)
    assert {"val/loss", "train/loss"} <= set(result.metrics)
    assert [record.step for record in logger.records] == [4]


def test_a_stop_asked_for_by_an_evaluation_lets_it_end_where_the_run_is_finished() -> None:
    enough = on(on_validate_batch_end=lambda made, *_: made.progress.step == 2 and made.stop("good enough"))
    logger = ListLogger()
    result = trainer(callbacks=[enough], loggers=[logger], settings={"eval_interval": 2}).fit(loader(), loader(9))
    assert (result.step, result.finished, result.reason) == (2, True, "good enough")
    (record,) = logger.records
    assert record.step == 2
    assert {"val/loss", "train/loss"} <= set(record.metrics)


@pytest.mark.parametrize("finished", [True, False])
def test_a_stop_asked_for_while_saving_repeats_nothing(tmp_path: Path, finished: bool) -> None:
    evaluations: list[bool] = []
    while_saving = on(
        on_after_save_checkpoint=lambda made, path: made.progress.step == 2 and made.stop("signal", finished=finished),
        run_validation=lambda made, is_last: evaluations.append(is_last),
    )
    logger = ListLogger()
    result = trainer(
        callbacks=[while_saving],
        loggers=[logger],
        settings={"log_interval": 2, "eval_interval": 2},
        checkpoint=CheckpointerCallback(tmp_path, save_interval=2, save_async=False),
    ).fit(loader(), loader(3))
    assert (result.step, result.finished, "train/loss" in result.metrics) == (2, finished, True)
    assert [record.step for record in logger.records] == [2]
    assert len(evaluations) == 1


def test_run_validation_runs_without_validation_data_too() -> None:
    seen: list[tuple[int, bool]] = []

    def run_validation(trainer: Trainer, is_last: bool) -> None:
        seen.append((trainer.progress.step, is_last))
        trainer.log_metrics({"task/score": 0.5})

    logger = ListLogger()
    callbacks = [on(run_validation=run_validation)]
    trainer(callbacks=callbacks, loggers=[logger], settings={"eval_interval": 4}).fit(loader())
    assert seen == [(4, False), (6, True)]
    assert logger.steps("task/score") == [4, 6]


class RandomModel(Line):
    """Draws in its evaluations, so that they depend on the random state that training left."""

    def forward(self, batch: Any) -> Any:
        return {**super().forward(batch), "drawn": torch.rand(()).item()}


def _attempts(folder: Path, loggers: list[Any], *stops: Any, settings: Any = None) -> Any:
    """Attempts at one run, each stopped by the callback given to it; the last goes through."""
    for attempt, stop in enumerate((*stops, None)):
        trained = trainer(
            RandomModel,
            callbacks={"stop": stop} if stop else (),
            loggers=loggers,
            settings={
                "max_duration": 9,
                "log_interval": 2,
                "eval_interval": 3,
                "eval_at_start": True,
                **(settings or {}),
            },
            checkpoint=CheckpointerCallback(folder / "checkpoints", save_interval=4),
            run_dir=folder,
        )
        if list(folder.glob("checkpoints/step*")):
            torch.rand(attempt)  # What was drawn before a resume must not matter.
        result = trained.fit(loader(10, 4), {"val": loader(7, 3, shuffle=False), "more": loader(4, shuffle=False)})
        assert result.finished is (stop is None)
    return trained


STOPS: dict[str, list[Any]] = {
    "between logs": [StopAt(5)],
    "at a log": [StopAt(4)],
    "at an evaluation": [StopAt(3)],
    "in an evaluation": [StopInEvaluation(6, 1)],
    "in its first batch, twice": [StopInEvaluation(6), StopInEvaluation(6, 1)],
    "in the last evaluation": [StopInEvaluation(9)],
    "in the first one": [StopInEvaluation(0)],
    "again and again": [StopAt(1), StopAt(3), StopInEvaluation(6), StopAt(8)],
}


@pytest.mark.parametrize("stops", STOPS.values(), ids=STOPS)
def test_the_records_of_a_resumed_run_are_those_of_one_that_went_through(tmp_path: Path, stops: list[Any]) -> None:
    logger, straight = ListLogger(), ListLogger()
    one = _attempts(tmp_path / "straight", [straight, JsonlLogger()])
    two = _attempts(tmp_path / "resumed", [logger, JsonlLogger()], *stops)
    assert logger.stream == straight.stream
    assert [record.step for record in straight.records] == [0, 2, 3, 4, 6, 8, 9]
    assert _lines(tmp_path / "resumed") == _lines(tmp_path / "straight")
    assert torch.equal(one.model.linear.weight, two.model.linear.weight)


def _lines(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key not in ("time", "train/samples_per_s")} for line in lines]
