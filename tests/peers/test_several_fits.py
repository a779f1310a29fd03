"""Several fits, lengths and evaluations on a DataLoader of torch."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from user_loaders import Numbers, Stream, Sum, Watcher, batches, make_trainer, same_weights, weights

from trainer_cli import Callback, LoadOptions, Trainer, TrainingLoop, UserError, ValidationLoop


@pytest.mark.parametrize(
    ("max_duration", "steps", "limit", "width"),
    [
        ("1ep", 2, None, 8),
        ("1st", 1, None, 8),
        (1, 1, None, 8),
        *[(f"{tokens}tok", steps, None, 8) for tokens, steps in ((1, 1), (32, 1), (60, 2), (65, 3))],
    ],
)
def test_lengths_have_units(max_duration: int | str, steps: int, limit: int | None, width: int) -> None:
    """Batches of 4 samples; a sample has 8 tokens."""
    made = make_trainer(max_duration, model=lambda: Sum(width), limit_train_batches=limit)
    result = made.fit(batches(8, 4, width))
    assert (result.finished, result.step, made.progress.tokens) == (True, steps, steps * 4 * width)


@pytest.mark.parametrize(("max_duration", "limit"), [("1st", None), ("1sp", None), (1, None), ("1ep", 1)])
def test_lengths_of_trainings_on_a_stream(max_duration: int | str, limit: int | None) -> None:
    result = make_trainer(max_duration, limit_train_batches=limit).fit(DataLoader(Stream(), batch_size=4))
    assert (result.finished, result.step) == (True, 1)


def test_a_stream_may_end_an_epoch() -> None:
    assert make_trainer("1ep").fit(DataLoader(Stream(9), batch_size=4)).step == 3
    result = make_trainer("1ep", hard_stop=7).fit(DataLoader(Stream(), batch_size=4))
    assert (result.finished, result.step) == (True, 7)


@pytest.mark.parametrize(
    ("val", "interval", "subset"),
    [(val, *case) for val in ("one", "named", "two") for case in (("1ep", None), ("1st", 1))],
)
def test_all_loaders_are_evaluated_at_each_interval(val: str, interval: str, subset: int | None) -> None:
    loaders = {
        "one": batches(2, 1),
        "named": {"near": batches(2, 1)},
        "two": [batches(2, 1), batches(2, 1)],
    }
    names = {"one": ["val"], "named": ["near"], "two": ["validate_0", "validate_1"]}[val]
    watcher = Watcher()
    make_trainer("1ep", watcher, eval_interval=interval, eval_steps=subset).fit(batches(10, 2), loaders[val])
    steps = range(1, 6) if interval == "1st" else [5]
    assert watcher.evaluations == [(step, name, subset or 2) for step in steps for name in names]


class Clock:
    """A clock that advances by a millisecond whenever it is read, and as much more as a test adds."""

    now = 1000.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


@pytest.mark.parametrize(("interval", "evaluations"), [("1st", 4), ("1ep", 2)])
def test_evaluations_are_no_training_time(interval: str, evaluations: int) -> None:
    clock = Clock()

    class Slow(Watcher):
        def on_validate_batch_end(self, trainer: Trainer, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            clock.now += 100

    slow = Slow()
    made = make_trainer("2ep", slow, eval_interval=interval, eval_steps=1, log_interval=1, limit_train_batches=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", clock)
        result = made.fit(batches(10, 2), batches(10, 2))
    assert len(slow.evaluations) == evaluations
    assert result.metrics["train/samples_per_s"] > 2, "without the evaluation between two steps"
    assert 100 * (evaluations - 1) < made.progress.seconds < 100 * evaluations, "with evaluations but the last"


@pytest.mark.parametrize("size", [1, 2, 3, "auto"])
def test_parts_of_a_batch_train_as_the_whole(size: int | str) -> None:
    whole, parts = make_trainer("2ep"), make_trainer("2ep", microbatch=size)
    sizes: list[int] = []
    parts.model.register_forward_pre_hook(lambda model, inputs: sizes.append(len(inputs[0])))
    for made in (whole, parts):
        made.fit(batches(10, 4))
    assert all(torch.allclose(value, weights(whole.model)[name]) for name, value in weights(parts.model).items())
    assert max(sizes) == (4 if size == "auto" else size)


def fit_on(made: Trainer, max_duration: int | str, **more: Any) -> int:
    """Fit again with another length; the step at its end. An epoch has 5 steps."""
    made.loop = TrainingLoop(max_duration=max_duration, eval_interval=None, log_interval=None)
    return made.fit(batches(10, 2), **more).step


def test_a_second_fit_with_a_longer_length_goes_on_where_the_first_ended() -> None:
    made, straight = make_trainer("1ep"), make_trainer("2ep")
    assert [fit_on(made, "1ep"), fit_on(made, "2ep"), fit_on(straight, "2ep")] == [5, 10, 10]
    assert same_weights(weights(made.model), weights(straight.model))


@pytest.mark.parametrize(("new", "steps"), [("1ep", 5), ("1st", 1), ("2ep", 10), (None, 5)])
def test_a_second_fit_may_begin_anew(new: str | None, steps: int) -> None:
    made, straight = make_trainer("1ep"), make_trainer("1ep")
    fit_on(made, "1ep")
    for trainer in (made, straight):
        assert fit_on(trainer, new or "1ep", ckpt_path=None) == steps
    assert same_weights(weights(made.model), weights(straight.model))
    assert made.progress.samples == 2 * steps


@pytest.mark.parametrize(
    ("new", "steps", "total", "total_steps"),
    [("1ep", 5, "2ep", 10), ("1st", 5, "6st", 6), ("2ep", 10, "3ep", 15), ("1ep", 5, "1ep", 5)],
)
def test_a_second_fit_counts_from_the_beginning(new: str, steps: int, total: str, total_steps: int) -> None:
    """The new length counts from the beginning; a fit that has reached it makes no step."""
    made = make_trainer("1ep")
    assert fit_on(made, "1ep") == 5
    assert fit_on(made, new) == steps
    assert fit_on(made, total) == total_steps


@pytest.mark.parametrize("unit", ["ep", "st", "sp"])
def test_a_run_in_pieces_counts_right(unit: str) -> None:
    class Counts(Callback):
        batches = 0

        def on_train_batch_end(self, trainer: Trainer, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.batches += 1

    counts = Counts()
    made = make_trainer("1ep", counts)
    seconds = 0.0
    for piece in range(1, 3 if unit == "ep" else 11):
        step = 5 * piece if unit == "ep" else piece
        assert fit_on(made, f"{2 * piece if unit == 'sp' else piece}{unit}") == step == counts.batches
        progress = made.progress
        assert (progress.epoch, progress.batch, progress.epoch_samples) == (step // 5, step % 5, step % 5 * 2)
        assert (progress.samples, progress.tokens) == (2 * step, 8 * step)
        assert progress.seconds > seconds
        seconds = progress.seconds


class NoWeights(nn.Module):
    def forward(self, batch: Tensor) -> Tensor:
        return batch.mean()


@pytest.mark.parametrize("fits", [False, True])
def test_a_model_without_weights_is_only_evaluated(fits: bool) -> None:
    made = make_trainer("1ep", model=NoWeights, optimizer=None)
    if not fits:
        assert made.validate(batches())["val"]["loss"] > 0
        return
    with pytest.raises(UserError, match="this trainer has no optimizer"):
        made.fit(batches())
    with pytest.raises(ValueError, match="optimizer got an empty parameter list"):
        make_trainer("1ep", model=NoWeights)


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(UserError, match=r"device.*'potato'"):
        make_trainer(device="potato")


@pytest.mark.parametrize("kind", ["train", "validation"])
def test_an_empty_loader_is_refused(kind: str) -> None:
    """Refused before the first step, though the evaluation is at the end."""
    empty = DataLoader(Numbers(0), batch_size=2)
    made = make_trainer("1ep")
    with pytest.raises(UserError, match=f"the {kind} loader.* has no batches"):
        made.fit(*((empty, batches()) if kind == "train" else (batches(), empty)))
    assert made.progress.step == 0


def test_a_loader_with_running_workers_begins_anew() -> None:
    loader = DataLoader(Numbers(10), batch_size=2, persistent_workers=True, num_workers=1)
    next(iter(loader))
    made = make_trainer("1ep")
    assert made.fit(loader).step == 5
    assert made.progress.samples == 10


def test_a_loaded_state_is_on_the_device_asked_for(folder: Path) -> None:
    first, second = (
        make_trainer("1ep", optimizer=lambda model: torch.optim.AdamW(model.parameters())) for _ in range(2)
    )
    first.fit(batches())
    first.save_checkpoint(folder / "saved")
    weights_alone = LoadOptions(states=["model"])
    assert second.fit(batches(), ckpt_path=folder / "saved", load=weights_alone).step == 5
    assert second.optimizer is not None
    moments = [value for state in second.optimizer.state.values() for value in state.values()]
    assert {tensor.device.type for tensor in (*second.model.parameters(), *moments)} == {"cpu"}
    assert not same_weights(weights(first.model), weights(second.model))


@pytest.mark.parametrize("path", ["relative", "x/y/z"])
def test_a_checkpoint_is_saved_to_a_path(folder: Path, path: str) -> None:
    first, second = make_trainer("1ep"), make_trainer("1ep", seed=1)
    first.fit(batches())
    first.save_checkpoint(path)
    second.load_checkpoint(folder / path)
    assert same_weights(weights(first.model), weights(second.model))


class Returns(Sum):
    """The loss of Sum in one of the forms that a model may return."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def forward(self, batch: Tensor) -> Any:
        loss = super().forward(batch)["loss"]
        parts = {"first": loss * 0.25, "second": loss * 0.75}
        return {"alone": loss, "tuple": (loss, parts), "mapping": {"loss": loss, **parts}}[self.form]


def test_forms_of_a_loss_train_alike() -> None:
    results = {}
    for form in ("alone", "tuple", "mapping"):
        made = make_trainer("1ep", model=lambda form=form: Returns(form), log_interval=1)
        results[form] = made.fit(batches()).metrics, weights(made.model)
    for metrics, end in results.values():
        assert same_weights(end, results["alone"][1])
        assert metrics["train/loss"] == results["alone"][0]["train/loss"]
    for form in ("tuple", "mapping"):
        metrics = results[form][0]
        assert metrics["train/first"] + metrics["train/second"] == pytest.approx(metrics["train/loss"])


@pytest.mark.parametrize(
    ("interval", "batch_size", "width", "count"),
    [
        ("1tok", 1, 1, 5),
        ("1tok", 5, 16, 5),
        ("64tok", 1, 16, 2),
        ("64tok", 4, 1, 1),
        ("64tok", 4, 16, 5),
        ("65tok", 1, 16, 1),
        ("65tok", 4, 16, 4),
        ("65tok", 5, 16, 5),
        ("1sp", 4, 4, 5),
        ("4sp", 1, 4, 2),
        ("4sp", 5, 4, 5),
        ("5sp", 1, 4, 1),
        ("5sp", 4, 4, 4),
    ],
)
def test_tokens_and_samples_count_evaluations(interval: str, batch_size: int, width: int, count: int) -> None:
    """Of five steps; a sample has a token for each of its numbers."""
    watcher = Watcher()
    made = make_trainer(5, watcher, eval_interval=interval, eval_steps=2, model=lambda: Sum(width))
    made.fit(batches(100, batch_size, width), batches(10, 1, width))
    steps = [step for step, _, number in watcher.evaluations if number == 2]
    assert len(steps) == count == len(set(steps))
    assert steps[-1] == made.progress.step, "the end is always evaluated"


def test_a_callback_may_change_a_batch_of_an_evaluation_before_the_model_sees_it() -> None:
    class Blank(Callback):
        def on_validate_batch_start(self, trainer: Trainer, model: Any, batch: Tensor, batch_idx: int) -> None:
            batch.zero_()

    class Doubled(Callback):
        def on_before_forward(self, trainer: Trainer, model: Any, batch: Any, args: list[Any], kwargs: Any) -> None:
            if not model.training:
                args[0] = args[0] * 2

    seen: list[Tensor] = []

    class Looks(Sum):
        def forward(self, batch: Tensor) -> Any:
            seen.append(batch.clone())
            return super().forward(batch)

    for callback, factor in ((Blank(), 0.0), (Doubled(), 2.0)):
        seen.clear()
        make_trainer(1, callback, model=Looks).fit(batches(2, 2), batches(2, 2))
        assert torch.equal(seen[-1], seen[0] * factor)


class Parity(Numbers):
    """Each sample's index; odd ones are of class 1."""

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index), float(index % 2)])


class Zero(nn.Module):
    """Calls every sample of class 0, and notes the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, batch: Tensor) -> Any:
        self.seen += [int(index) for index in batch[:, 0]]
        return {"loss": batch[:, 1].mean(), "accuracy": (batch[:, 1] == 0).float().mean()}


@pytest.mark.parametrize(("size", "batch_size"), [(12, 4), (12, 1), (13, 6), (14, 3), (15, 2), (16, 6)])
def test_every_sample_is_evaluated_once(size: int, batch_size: int) -> None:
    model = Zero()
    made = make_trainer(model=model, optimizer=None)
    metrics = made.validate(DataLoader(Parity(size), batch_size=batch_size))["val"]
    assert model.seen == list(range(size))
    assert metrics["accuracy"] == pytest.approx(1 - (size // 2) / size, abs=1e-7)


@pytest.mark.parametrize("by_trainer", [True, False])
def test_an_evaluation_takes_its_number_of_batches(by_trainer: bool) -> None:
    watcher = Watcher()
    made = make_trainer(1, watcher, **({"eval_steps": 1} if by_trainer else {}))
    made.validate(batches(10, 1), loop=None if by_trainer else ValidationLoop(eval_steps=1))
    assert watcher.evaluations == [(0, "val", 1)]


def test_a_stream_without_end_is_evaluated_on_its_first_batch() -> None:
    watcher = Watcher()
    make_trainer(2, watcher, eval_interval=1, eval_steps=1).fit(batches(), DataLoader(Stream(), batch_size=2))
    assert watcher.evaluations == [(1, "val", 1), (2, "val", 1)]


def test_a_stream_is_evaluated_to_its_end() -> None:
    class StopsIn(Callback):
        def on_validate_batch_end(self, trainer: Trainer, model: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 20:
                trainer.stop("it has no end", finished=False)

    watcher = Watcher()
    make_trainer(1, watcher).validate(DataLoader(Stream(9), batch_size=2))
    assert watcher.evaluations == [(0, "val", 5)]
    result = make_trainer(2, StopsIn(), eval_interval=1).fit(batches(), DataLoader(Stream(), batch_size=2))
    assert (result.finished, result.step, result.reason) == (False, 1, "it has no end")


def test_a_list_with_something_else_counts_as_samples() -> None:
    made = make_trainer(optimizer=None)
    with pytest.raises(TypeError, match=r"batch must contain tensors.*; found <class 'torch\.utils\.data"):
        made.validate([batches(), "something else"])
    assert set(made.validate([batches(), batches()])) == {"validate_0", "validate_1"}
