"""The claims of Composer's tests of its trainer: lengths, loaders, parts of batches, and several fits of one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from peer_claims import Claim, claims, each, try_claim
from peer_runs import Numbers, Stream, Sum, Watcher, batches, make_trainer, same_weights, weights
from torch import Tensor, nn
from torch.utils.data import DataLoader

from trainer_cli import Callback, LoadOptions, Scheduled, Trainer, TrainingLoop, UserError


def check_length(folder: Path, max_duration: int | str, steps: int, limit: int | None = None, width: int = 8) -> None:
    """Batches of 4 samples; a sample has 8 tokens."""
    made = make_trainer(max_duration, model=lambda: Sum(width), limit_train_batches=limit)
    result = made.fit(batches(8, 4, width))
    assert (result.finished, result.step, made.progress.tokens) == (True, steps, steps * 4 * width)


def check_length_on_a_stream(folder: Path, max_duration: int | str, limit: int | None = None) -> None:
    result = make_trainer(max_duration, limit_train_batches=limit).fit(DataLoader(Stream(), batch_size=4))
    assert (result.finished, result.step) == (True, 1)


def check_epoch_of_a_stream(folder: Path) -> None:
    assert make_trainer("1ep").fit(DataLoader(Stream(9), batch_size=4)).step == 3
    result = make_trainer("1ep", hard_stop=7).fit(DataLoader(Stream(), batch_size=4))
    assert (result.finished, result.step) == (True, 7)


def check_evaluated_loaders(folder: Path, val: str, interval: str, subset: int | None) -> None:
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
    """A clock that advances by a millisecond whenever it is read, and as much more as it is told."""

    now = 1000.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


def check_time_of_evaluations(folder: Path, interval: str, evaluations: int) -> None:
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


def check_microbatch(folder: Path, size: int | str) -> None:
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


def check_second_fit(folder: Path) -> None:
    made, straight = make_trainer("1ep"), make_trainer("2ep")
    assert [fit_on(made, "1ep"), fit_on(made, "2ep"), fit_on(straight, "2ep")] == [5, 10, 10]
    assert same_weights(weights(made.model), weights(straight.model))


def check_reset(folder: Path, new: str | None, steps: int) -> None:
    made, straight = make_trainer("1ep"), make_trainer("1ep")
    fit_on(made, "1ep")
    for trainer in (made, straight):
        assert fit_on(trainer, new or "1ep", ckpt_path=None) == steps
    assert same_weights(weights(made.model), weights(straight.model))
    assert made.progress.samples == 2 * steps


def check_going_on(folder: Path, new: str, steps: int, total: str, total_steps: int) -> None:
    """The new length counts from the beginning; a fit that has reached it makes no step."""
    made = make_trainer("1ep")
    assert fit_on(made, "1ep") == 5
    assert fit_on(made, new) == steps
    assert fit_on(made, total) == total_steps


def check_pieces(folder: Path, unit: str) -> None:
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


def check_no_weights(folder: Path, fits: bool) -> None:
    made = make_trainer("1ep", model=NoWeights, optimizer=None)
    if not fits:
        assert made.validate(batches())["val"]["loss"] > 0
        return
    with pytest.raises(UserError, match="this trainer has no optimizer"):
        made.fit(batches())
    with pytest.raises(ValueError, match="optimizer got an empty parameter list"):
        make_trainer("1ep", model=NoWeights)


def check_minimal(folder: Path) -> None:
    assert Trainer(model=Sum()).validate(batches())["val"]["loss"] > 0


def check_unknown_device(folder: Path) -> None:
    with pytest.raises(UserError, match=r"device.*'potato'"):
        make_trainer(device="potato")


def check_empty_loader(folder: Path, kind: str) -> None:
    """Refused before the first step, though the evaluation is at the end."""
    empty = DataLoader(Numbers(0), batch_size=2)
    made = make_trainer("1ep")
    with pytest.raises(UserError, match=f"the {kind} loader.* has no batches"):
        made.fit(*((empty, batches()) if kind == "train" else (batches(), empty)))
    assert made.progress.step == 0


def check_active_iterator(folder: Path) -> None:
    loader = DataLoader(Numbers(10), batch_size=2, persistent_workers=True, num_workers=1)
    next(iter(loader))
    made = make_trainer("1ep")
    assert made.fit(loader).step == 5
    assert made.progress.samples == 10


def check_device_of_a_checkpoint(folder: Path) -> None:
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


def check_saved_to(folder: Path, path: str) -> None:
    first, second = make_trainer("1ep"), make_trainer("1ep", seed=1)
    first.fit(batches())
    first.save_checkpoint(path)
    second.load_checkpoint(folder / path)
    assert same_weights(weights(first.model), weights(second.model))


def check_schedule(folder: Path, every_batch: bool) -> None:
    watcher = Watcher()
    made = make_trainer(
        "2ep",
        watcher,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-6),
        schedulers=Scheduled(
            lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 2.0), "step" if every_batch else "epoch"
        ),
    )
    made.fit(batches(10, 2))
    doublings = range(10) if every_batch else [0] * 5 + [1] * 5
    assert watcher.rates == pytest.approx([1e-6 * 2**number for number in doublings])


class Returns(Sum):
    """The loss of Sum in one of the forms that a model may return."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def forward(self, batch: Tensor) -> Any:
        loss = super().forward(batch)["loss"]
        parts = {"first": loss * 0.25, "second": loss * 0.75}
        return {"alone": loss, "tuple": (loss, parts), "mapping": {"loss": loss, **parts}}[self.form]


def check_forms_of_a_loss(folder: Path) -> None:
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


ADDED = "A length counts from the beginning of the run, so the sum of both lengths is given for the second fit."
INT = "A number without a unit counts optimizer steps here, and never epochs."

CLAIMS: list[Claim] = [
    *claims(
        "test_trainer: test_minimal_init", check_minimal, {"a model is enough for a trainer that evaluates": ()}
    ),
    *claims(
        "test_trainer: test_no_param_model",
        check_no_weights,
        {
            "a model without weights is evaluated": (False,),
            "training a model without weights is refused": (True,),
        },
    ),
    *claims(
        "test_trainer: test_max_duration",
        check_length,
        {"1ep is an epoch": ("1ep", 2), "1st is a step": ("1st", 1)},
    ),
    *claims("test_trainer: test_max_duration", check_length, {"the number 1 is an epoch": (1, 1)}, difference=INT),
    *claims(
        "test_trainer: test_max_duration_tokens",
        check_length,
        {
            f"{tokens} tokens at 32 a step are {steps} steps": (f"{tokens}tok", steps)
            for tokens, steps in ((1, 1), (32, 1), (60, 2), (65, 3))
        },
    ),
    *claims(
        "test_trainer: test_infinite_train_loader",
        check_length_on_a_stream,
        {
            "a stream without end is trained on for 1 step": ("1st",),
            "a stream without end is trained on for 1 sample": ("1sp",),
            "a stream without end is trained on for a length that is a number": (1,),
            "a stream without end is trained on for an epoch that is limited to 1 batch": ("1ep", 1),
        },
    ),
    *claims(
        "test_trainer: test_infinite_train_loader",
        check_epoch_of_a_stream,
        {"a length in epochs is refused for a stream": ()},
        difference="A stream may end, and then its epoch does; one without end is trained on until another limit.",
    ),
    *claims(
        "test_trainer: test_eval_dataloader",
        check_evaluated_loaders,
        {
            f"{val} loader(s), every {interval}, {'all' if subset is None else subset} of the batches": (
                val, interval, subset,
            )
            for val in ("one", "named", "two")
            for interval in ("1ep", "1st")
            for subset in (None, 1)
        },
    ),
    *claims(
        "test_trainer: test_eval_is_excluded_from_wct_tracking",
        check_time_of_evaluations,
        {
            f"the time trained leaves out an evaluation every {interval}": (interval, count)
            for interval, count in (("1st", 4), ("1ep", 2))
        },
        difference="The logged rate leaves evaluations out; a length in time counts them, as the limit of a job does.",
    ),
    *claims(
        "test_trainer: test_microbatch",
        check_microbatch,
        {f"parts of {size} train as whole batches do": (size,) for size in (1, 2, 3, "auto")},
    ),
    *claims(
        "test_trainer: test_multiple_calls_to_fit",
        check_second_fit,
        {"a second fit with a longer length goes on where the first ended": ()},
    ),
    *claims(
        "test_trainer: test_reset_time",
        check_reset,
        {
            f"a second fit of {new or 'the same length'} may begin anew": (new, steps)
            for new, steps in (("1ep", 5), ("1st", 1), ("2ep", 10), (None, 5))
        },
    ),
    *claims(
        "test_trainer: test_reset_time",
        check_going_on,
        {
            "a second fit trains 1ep more": ("1ep", 5, "2ep", 10),
            "a second fit trains 1st more": ("1st", 5, "6st", 6),
            "a second fit trains 2ep more": ("2ep", 10, "3ep", 15),
        },
        difference=ADDED,
    ),
    *claims(
        "test_trainer: test_reset_time",
        check_going_on,
        {"a second fit without a new length is refused": ("1ep", 5, "1ep", 5)},
        difference="It makes no step and is done, as is the command when a finished run is started again.",
    ),
    *claims(
        "test_trainer: test_training_duration_unit",
        check_pieces,
        {f"fits of 1 {unit} each count right over two epochs": (unit,) for unit in ("ep", "st", "sp")},
    ),
    *claims(
        "test_trainer: test_schedulers",
        check_schedule,
        {"a schedule steps with each batch": (True,), "a schedule steps with each epoch": (False,)},
    ),
    *claims(
        "test_trainer: test_tuple_loss, test_dict_loss",
        check_forms_of_a_loss,
        {"a loss alone, with outputs, or in a mapping of several losses trains alike": ()},
    ),
    *claims("test_trainer: test_invalid_device", check_unknown_device, {"an unknown device is refused": ()}),
    *claims(
        "test_trainer: test_device_with_checkpoint",
        check_device_of_a_checkpoint,
        {"weights and moments are on the device asked for, after a checkpoint was loaded": ()},
    ),
    *claims(
        "test_trainer: test_save_checkpoint_to_folder",
        check_saved_to,
        {f"a checkpoint is saved to {path}, and loaded from there": (path,) for path in ("relative", "x/y/z")},
    ),
    *claims(
        "test_trainer: test_empty_train_dataloader",
        check_empty_loader,
        {"an empty train loader is refused": ("train",)},
    ),
    *claims(
        "test_trainer: test_empty_eval_dataloader",
        check_empty_loader,
        {"an empty evaluation loader is refused": ("validation",)},
    ),
    *claims(
        "test_trainer: test_dataloader_active_iterator_error",
        check_active_iterator,
        {"a loader whose workers are at work already is refused": ()},
        difference="Its iterator is begun anew, so that the training has all of its batches.",
    ),
]  # fmt: skip


@each(CLAIMS)
def test_the_claim_holds(claim: Claim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try_claim(claim, tmp_path, monkeypatch)
