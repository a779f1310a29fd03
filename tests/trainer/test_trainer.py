"""The trainer: what its slots take, what a resume brings back, and that it is all the same as going through."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import Line, ListLogger, Noisy, Points, StopAt, Unsized, everything, loader, recorder, same, trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from trainer_cli import WarmupCosine
from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.checkpoint.checkpointer import make_sync_checkpointer
from trainer_cli.core.load_options import LoadOptions
from trainer_cli.errors import CheckpointError, UserError
from trainer_cli.trainer.hooks import Callback
from trainer_cli.trainer.schedulers import scheduler_factory
from trainer_cli.trainer.setup import pick_device
from trainer_cli.trainer.trainer import Trainer
from trainer_cli.trainer.training_loop import TrainingLoop


@pytest.mark.parametrize(
    ("slots", "said"),
    [
        ({"model": 3}, "model: expected Module, got int"),
        ({"model": lambda: "net"}, "model: expected Module, got str"),
        ({"optimizer": 3}, "optimizer: expected Optimizer, got int"),
        ({"optimizer": lambda model: model}, "optimizer: expected Optimizer, got Line"),
        ({"precision": "bf16"}, "precision: expected Precision, got str"),
        ({"loop": 10}, "loop: expected TrainingLoop, got int"),
        ({"checkpoint": "folder"}, "checkpoint: expected Callback, got str"),
        ({"callbacks": 5}, "callbacks: expected a sequence or mapping of Callback, got int"),
        ({"callbacks": Callback()}, "callbacks: expected a sequence or mapping of Callback, got Callback"),
        ({"callbacks": [Callback(), print]}, "callbacks.builtin_function_or_method: expected Callback, got"),
        ({"callbacks": {"a": 5}}, r"callbacks\.a: expected Callback, got int"),
        (
            {"loggers": {"a": Callback()}},
            r"loggers\.a: expected Logger, got Callback\. .* from trainer_cli import Logger\.",
        ),
        ({"callbacks": [Callback]}, r"expected Callback, got the class Callback\. Give an instance of it: Callback\("),
        ({"optimizer": torch.optim.SGD}, r"got the class SGD\. Give `lambda model: SGD\(model.parameters\(\), …\)`"),
        ({"optimizer": {"a": torch.optim.SGD}}, "got the class SGD"),
        ({"compile": True}, r"compile: expected a mapping of arguments of torch\.compile, got bool"),
        ({"seed": "0"}, "seed is '0', but it must be a whole number"),
        ({"device": "toaster"}, "device: expected auto, cpu, cuda or mps, got 'toaster'"),
    ],
)
def test_every_slot_says_what_it_expected_and_what_it_got(slots: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        Trainer(**{"model": Line, "optimizer": _sgd, "device": "cpu", **slots})


@pytest.mark.parametrize(
    ("scheduler", "said"),
    [(5, "got int without step"), (lambda optimizer: "no", "got str without step"), ([3], "got int without step")],
)
def test_a_schedule_must_be_one(scheduler: Any, said: str) -> None:
    with pytest.raises(UserError, match=f"schedulers: expected a schedule, {said}"):
        trainer(schedulers=scheduler).fit(loader())


def test_a_schedule_of_another_optimizer_or_a_class_is_refused() -> None:
    other = torch.optim.lr_scheduler.ConstantLR(_sgd(Line()))
    with pytest.raises(UserError, match="the schedule is of another optimizer than the trainer's"):
        trainer(schedulers=other).fit(loader())
    with pytest.raises(UserError, match=r"got the class ConstantLR .* Give `lambda optimizer: ConstantLR\(optimizer"):
        trainer(schedulers=torch.optim.lr_scheduler.ConstantLR).fit(loader())


def test_a_schedule_by_the_length_of_another_loop_is_refused() -> None:
    factory = scheduler_factory(WarmupCosine, TrainingLoop(max_duration=4), warmup=1)
    with pytest.raises(UserError, match=r"not of this trainer \(scheduler\)\. Give both the same TrainingLoop"):
        trainer(schedulers=factory).fit(loader())


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside another"])
def test_a_saver_among_the_callbacks_is_refused(beside: bool, tmp_path: Path) -> None:
    saver = {"checkpoint": CheckpointerCallback(tmp_path / "a")} if beside else {}
    with pytest.raises(UserError, match=r"holds a CheckpointerCallback, as .*give it as checkpoint=, or in YAML"):
        trainer(callbacks=[CheckpointerCallback(tmp_path)], **saver)


def test_an_optimizer_of_another_model_is_refused() -> None:
    with pytest.raises(UserError, match=r"a parameter of shape \(1, 2\) is none of the model's"):
        Trainer(model=Line(), optimizer=_sgd(Line()))


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_an_optimizer_instance_cannot_go_with_a_model_that_is_still_to_be_made() -> None:
    with pytest.raises(UserError, match="optimizer is an instance, but model is a function"):
        Trainer(model=Line, optimizer=_sgd(Line()))


def test_a_model_and_an_optimizer_may_be_given_as_they_are() -> None:
    model = Line()
    trained = Trainer(model=model, optimizer=_sgd(model), loop=TrainingLoop(max_duration=2), device="cpu")
    assert trained.fit(loader()).step == 2
    assert trained.model is model


def test_without_an_optimizer_there_is_only_validation() -> None:
    only = trainer(optimizer=None)
    assert "loss" in only.validate(loader())["val"]
    with pytest.raises(UserError, match="no optimizer, so it can only validate"):
        only.fit(loader())


def test_names_that_would_meet_are_refused() -> None:
    with pytest.raises(UserError, match="two callbacks are called 'checkpoint'"):
        trainer(callbacks={"checkpoint": Callback()}, checkpoint=Callback())
    with pytest.raises(UserError, match="a validation loader is called 'train'"):
        trainer().fit(loader(), {"train": loader()})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_device_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(UserError, match=r"device is cuda, but this machine has none.*It has: .*cpu"):
        pick_device("cuda")


class Counter(Callback):
    """A callback with state."""

    def __init__(self) -> None:
        self.steps = 0

    def on_after_optimizer_step(self, *args: Any) -> None:
        self.steps += 1

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


def test_two_callbacks_of_one_class_have_their_own_state(tmp_path: Path) -> None:
    one, two = Counter(), Counter()
    two.steps = 100
    trainer(callbacks=[one, two], checkpoint=CheckpointerCallback(tmp_path), settings={"max_duration": 3}).fit(loader())
    again = [Counter(), Counter()]
    trained = trainer(callbacks=again, checkpoint=CheckpointerCallback(tmp_path), settings={"max_duration": 5})
    assert list(trained.callbacks) == ["Counter", "Counter_2", "checkpoint"]
    trained.fit(loader())
    assert [counter.steps for counter in again] == [5, 105]


def test_state_of_a_callback_that_is_gone_is_dropped_aloud(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stop = StopAt(2)
    trainer(callbacks={"count": Counter(), "stop": stop}, checkpoint=CheckpointerCallback(tmp_path)).fit(loader())
    trainer(checkpoint=CheckpointerCallback(tmp_path)).fit(loader())
    assert "state of callback 'count', which this training does not have: it is dropped" in caplog.text


def test_hooks_may_add_to_a_checkpoint_and_take_it_back(tmp_path: Path) -> None:
    class Extra(Callback):
        found: Any = None

        def on_save_checkpoint(self, trainer: Any, state: dict[str, Any]) -> None:
            state["extra"] = {"tensor": torch.arange(3), "text": "x"}

        def postprocess_checkpoint(self, trainer: Any, state: dict[str, Any]) -> None:
            state["extra"]["text"] += "y"

        def preprocess_checkpoint(self, trainer: Any, state: dict[str, Any]) -> None:
            state["extra"]["text"] += "z"

        def on_load_checkpoint(self, trainer: Any, state: dict[str, Any]) -> None:
            self.found = state["extra"]

    for length in (1, 2):
        callback = Extra()
        trainer(callbacks=[callback], checkpoint=CheckpointerCallback(tmp_path), settings={"max_duration": length}).fit(
            loader()
        )
    assert callback.found["text"] == "xyz"
    assert callback.found["tensor"].tolist() == [0, 1, 2]


OPTIMIZERS: dict[str, Any] = {
    "sgd momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.05),
}
SCHEDULES: dict[str, Any] = {
    "no schedule": None,
    "warmup cosine": lambda optimizer: WarmupCosine(optimizer, 18, warmup=2),
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=40),
    "step": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5),
}


def _noisy(folder: Path, optimizer: str, schedule: str, accum: int, *callbacks: Callback) -> Trainer:
    made = trainer(
        Noisy,
        optimizer=OPTIMIZERS[optimizer],
        schedulers=SCHEDULES[schedule],
        callbacks={type(callback).__name__: callback for callback in callbacks},
        settings={"max_duration": "3ep", "grad_accum_steps": accum, "eval_interval": "0.5ep", "log_interval": 4},
        checkpoint=CheckpointerCallback(folder),
    )
    return made


CASES = [
    *[(optimizer, schedule, 1, 0, (4,)) for optimizer in OPTIMIZERS for schedule in SCHEDULES],
    ("adamw", "one cycle", 1, 0, (6,)),
    ("sgd momentum", "warmup cosine", 1, 0, (1, 6, 7, 12)),
    ("adamw", "step", 3, 0, (1,)),
    ("sgd momentum", "one cycle", 3, 0, (2,)),
    ("adamw", "warmup cosine", 4, 0, (1, 3)),
    ("adamw", "warmup cosine", 1, 2, (4, 6)),
    ("sgd momentum", "no schedule", 3, 2, (1,)),
]


@pytest.mark.parametrize(("optimizer", "schedule", "accum", "workers", "stops"), CASES)
def test_a_resume_ends_bit_for_bit_where_going_through_ends(
    tmp_path: Path, optimizer: str, schedule: str, accum: int, workers: int, stops: tuple[int, ...]
) -> None:
    """With dropout, batch norm, noisy samples and a last batch that is smaller: six batches an epoch."""
    val = loader(5, 2, shuffle=False)
    straight = _noisy(tmp_path / "straight", optimizer, schedule, accum)
    straight.fit(loader(22, 4, num_workers=workers), val)
    wanted = everything(straight)
    for stop in stops:
        part = _noisy(tmp_path / "parts", optimizer, schedule, accum, StopAt(stop))
        assert (part.fit(loader(22, 4, num_workers=workers), val).step, part.stop_reason) == (stop, "enough for now")
    resumed = _noisy(tmp_path / "parts", optimizer, schedule, accum)
    torch.rand(5), random.random(), np.random.rand()
    resumed.fit(loader(22, 4, num_workers=0), val)
    assert resumed.loaded_step == stops[-1]
    assert same(wanted, everything(resumed)) == []


def twice(samples: list[Any]) -> Any:
    """A batch whose leading size is not the number of its samples."""
    return default_collate(samples + samples)


def test_a_resume_is_exact_where_the_leading_size_of_a_batch_is_not_its_number_of_samples(tmp_path: Path) -> None:
    val = loader(5, 2, shuffle=False)
    for make in (
        lambda: loader(22, 4, collate_fn=twice),
        lambda: DataLoader(Points(22, 0.1), 4, shuffle=True, collate_fn=twice),  # type: ignore[arg-type]
    ):
        folder = tmp_path / type(make()).__name__
        straight = _noisy(folder / "straight", "adamw", "step", 1)
        straight.fit(make(), val)
        _noisy(folder / "parts", "adamw", "step", 1, StopAt(3)).fit(make(), val)
        resumed = _noisy(folder / "parts", "adamw", "step", 1)
        resumed.fit(make(), val)
        assert same(everything(straight), everything(resumed)) == []


def test_two_runs_with_other_seeds_do_not_end_alike() -> None:
    """So that the comparison above can fail at all."""
    ends = []
    for seed in (0, 1):
        trained = trainer(Noisy, seed=seed)
        trained.fit(loader(22, 4))
        ends.append(everything(trained))
    assert same(ends[0]["model"], ends[1]["model"])
    assert same(ends[0]["rng"], ends[1]["rng"])


class Counting:
    """A lazy stream with a position of its own, and no length."""

    def __init__(self, batches: int = 5) -> None:
        self.batches, self.position = batches, 0

    def __iter__(self) -> Iterator[Any]:
        while self.position < self.batches:
            self.position += 1
            x = torch.full((2, 2), self.position / 10)
            yield x, x.sum(1)
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class Restarting(Counting):
    """One that knows its length, and begins anew with each epoch unless it was put somewhere else."""

    resumed = False

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[Any]:
        self.position, self.resumed = self.position if self.resumed else 0, False
        return super().__iter__()

    def load_state_dict(self, state: dict[str, int]) -> None:
        super().load_state_dict(state)
        self.resumed = True


@pytest.mark.parametrize("limit", [None, 3])
@pytest.mark.parametrize("stop", [2, 3, 5, 6])
def test_a_resume_at_an_epochs_end_is_exact_on_a_loader_with_a_position(
    tmp_path: Path, limit: int | None, stop: int
) -> None:
    settings = {"max_duration": 9, "limit_train_batches": limit}
    straight = trainer(settings=settings)
    straight.fit(Restarting())
    for callbacks in ([StopAt(stop)], []):
        resumed = trainer(callbacks=callbacks, settings=settings, checkpoint=CheckpointerCallback(tmp_path))
        resumed.fit(Restarting())
    assert resumed.loaded_step == stop
    assert same(everything(straight)["model"], everything(resumed)["model"]) == []


@pytest.mark.parametrize("stop", [1, 3, 5, 7])
@pytest.mark.parametrize(
    "make",
    [
        Counting,
        lambda: Unsized(5),
        lambda: DataLoader(TensorDataset(torch.rand(10, 2), torch.arange(10.0)), batch_size=2, shuffle=True),
    ],
    ids=["stateful without length", "without length", "a DataLoader"],
)
def test_a_resume_is_exact_on_loaders_of_the_users_own(tmp_path: Path, make: Any, stop: int) -> None:
    torch.manual_seed(8)
    made = make()
    straight = trainer(settings={"max_duration": 9})
    straight.fit(made)
    torch.manual_seed(8)
    made = make()
    for callbacks in ([StopAt(stop)], []):
        resumed = trainer(callbacks=callbacks, settings={"max_duration": 9}, checkpoint=CheckpointerCallback(tmp_path))
        if isinstance(made, Counting):
            made = make()
        resumed.fit(made)
    assert resumed.loaded_step == stop
    assert same(everything(straight)["model"], everything(resumed)["model"]) == []
    assert straight.progress.samples == resumed.progress.samples == 18


class Announces(Callback):
    def on_fit_start(self, trainer: Any, *args: Any) -> None:
        trainer.log_metrics(parameters=3)


def test_what_is_logged_at_each_start_is_never_twice_in_one_step(tmp_path: Path) -> None:
    logger = ListLogger()
    for stop in (2, 2, 4):
        saver = CheckpointerCallback(tmp_path, save_interval=2, save_on_stop=False)
        callbacks = [Announces(), StopAt(stop)]
        trainer(callbacks=callbacks, loggers=[logger], checkpoint=saver, run_dir=tmp_path).fit(loader())
    assert logger.steps("parameters") == [0, 3]


def test_weights_alone_start_a_new_training_at_step_0(tmp_path: Path) -> None:
    first = trainer(checkpoint=CheckpointerCallback(tmp_path / "a"))
    first.fit(loader())
    forked = trainer(seed=9, checkpoint=CheckpointerCallback(tmp_path / "b"), settings={"max_duration": 1})
    seen: list[Any] = []

    class Look(Callback):
        def on_fit_start(self, trainer: Any, *args: Any) -> None:
            seen.append((trainer.progress.step, trainer.model.linear.weight.clone()))

    forked = trainer(callbacks=[Look()], seed=9, checkpoint=CheckpointerCallback(tmp_path / "b"))
    forked.fit(loader(), ckpt_path=tmp_path / "a" / "step6", load=LoadOptions(states=["model"]))
    assert seen[0][0] == 0
    assert torch.equal(seen[0][1], first.model.linear.weight)
    assert sorted(path.name for path in (tmp_path / "b").glob("step*")) == ["step3", "step6"]


def test_a_checkpoint_path_of_none_begins_anew(tmp_path: Path) -> None:
    trainer(checkpoint=CheckpointerCallback(tmp_path), settings={"max_duration": 2}).fit(loader())
    anew = trainer(checkpoint=CheckpointerCallback(tmp_path, enabled=False), settings={"max_duration": 1})
    assert anew.fit(loader(), ckpt_path=None).step == 1


def test_a_finished_run_fitted_again_makes_no_step(tmp_path: Path) -> None:
    loggers = [ListLogger(), ListLogger()]
    for logger in loggers:
        trained = trainer(loggers=[logger], checkpoint=CheckpointerCallback(tmp_path))
        result = trained.fit(loader(), loader(4))
    assert (result.finished, result.step, trained.model.calls) == (True, 6, 0)
    assert loggers[1].records == []


def test_a_longer_max_duration_reopens_a_finished_run(tmp_path: Path) -> None:
    for length in (4, 9):
        trained = trainer(checkpoint=CheckpointerCallback(tmp_path), settings={"max_duration": length})
        trained.fit(loader())
    straight = trainer(settings={"max_duration": 9})
    straight.fit(loader())
    assert trained.loaded_step == 4
    assert same(everything(straight)["model"], everything(trained)["model"]) == []


def test_a_checkpoint_of_something_else_is_refused_with_what_it_lacks(tmp_path: Path) -> None:
    make_sync_checkpointer().save({"weights": torch.ones(2)}, tmp_path / "step3")
    with pytest.raises(CheckpointError, match="has no model and no progress"):
        trainer().fit(loader(), ckpt_path=tmp_path / "step3")


def test_who_refuses_to_start_does_so_before_the_books_are_cut_back(tmp_path: Path) -> None:
    class Refuses(Callback):
        def on_fit_start(self, *args: Any) -> None:
            raise UserError("not today")

    first = ListLogger()
    trainer(loggers=[first], settings={"log_interval": 1}, run_dir=tmp_path).fit(loader())
    assert first.steps("train/loss") == [1, 2, 3, 4, 5, 6]
    with pytest.raises(UserError, match="not today"):
        trainer(loggers=[first], callbacks=[Refuses()], run_dir=tmp_path).fit(loader(), ckpt_path=None)
    assert first.steps("train/loss") == [1, 2, 3, 4, 5, 6]


def test_a_stop_after_the_record_of_its_step_is_saved_with_that_record(tmp_path: Path) -> None:
    class StopInSave(Callback):
        def on_after_save_checkpoint(self, trainer: Trainer, path: Path) -> None:
            if trainer.progress.step == 2:
                trainer.stop("signal", finished=False)

    saver = CheckpointerCallback(tmp_path, save_interval=2, save_async=False)
    trained = trainer(callbacks=[StopInSave()], checkpoint=saver, settings={"log_interval": 2})
    result = trained.fit(loader())
    assert result.step == 2
    assert "train/loss" in result.metrics


def test_other_data_is_refused_on_a_resume(tmp_path: Path) -> None:
    trainer(checkpoint=CheckpointerCallback(tmp_path), settings={"max_duration": 1}).fit(loader(10))
    with pytest.raises(UserError, match="length was 10 and is 11"):
        trainer(checkpoint=CheckpointerCallback(tmp_path)).fit(loader(11))


def test_a_record_of_step_0_survives_a_resume_from_step_0(tmp_path: Path) -> None:
    class Dies(Callback):
        def on_fit_end(self, *args: Any) -> None: ...

        def on_before_forward(self, trainer: Any, model: Any, *args: Any) -> None:
            if model.training:
                raise RuntimeError("power cut")

    logger = ListLogger()

    def attempt(callbacks: Any) -> None:
        trainer(
            callbacks=callbacks,
            loggers=[logger],
            run_dir=tmp_path,
            settings={"max_duration": 2, "eval_at_start": True},
            checkpoint=CheckpointerCallback(tmp_path / "checkpoints"),
        ).fit(loader(), loader(4))

    with pytest.raises(RuntimeError, match="power cut"):
        attempt([Dies()])
    attempt([])
    assert [record.step for record in logger.records] == [0, 2]


def test_loggers_hear_where_a_run_starts_and_are_closed_whatever_happens(tmp_path: Path) -> None:
    logger = ListLogger()
    for callbacks, length in (([StopAt(2)], 6), ([recorder([], fail_in=("on_train_start",))], 6), ([], 6)):
        made = trainer(
            callbacks=callbacks,
            loggers=[logger],
            name="mine",
            run_dir=tmp_path,
            settings={"max_duration": length},
            checkpoint=CheckpointerCallback(tmp_path / "c"),
        )
        try:
            made.fit(loader(10, 4))
        except RuntimeError:
            continue
    assert [(fact.start_step, fact.start_samples, fact.total_steps) for fact in logger.facts] == [
        (0, 0, 6),
        (2, 8, 6),
        (2, 8, 6),
    ]
    assert {fact.name for fact in logger.facts} == {"mine"}
    assert logger.closed == 3


def test_every_checkpoint_is_evaluated_on_every_loader_with_its_own_weights_and_step(tmp_path: Path) -> None:
    trainer(checkpoint=CheckpointerCallback(tmp_path, save_interval=2), settings={"max_duration": 4}).fit(loader())
    seen: list[Any] = []

    class Downstream(Callback):
        def run_validation(self, trainer: Any, is_last: bool) -> None:
            seen.append(is_last)
            trainer.log_metrics({"task/score": 1.0, "b/more": 2.0})

    book: list[str] = []
    only = trainer(optimizer=None, callbacks=[Downstream(), recorder(book)])
    paths = [tmp_path / "step2", tmp_path / "step4", tmp_path / "step2"]
    rows = only.validate_all({"a": loader(6), "b": loader(4)}, paths)
    assert [(row.step, row.loader) for row in rows] == [(s, name) for s in (2, 4, 2) for name in ("a", "b", "task")]
    assert rows[0].metrics == rows[6].metrics != rows[3].metrics
    assert (rows[1].metrics["more"], rows[2].metrics) == (2.0, {"score": 1.0})
    assert book.count("on_enter_validate_all") == len(seen) == 3
    assert only.validate(loader(6), tmp_path / "step4") == {
        "val": rows[3].metrics,
        "task": {"score": 1.0},
        "b": {"more": 2.0},
    }


def test_metrics_may_be_logged_as_tensors_that_need_gradients() -> None:
    class Logs(Callback):
        def on_before_backward(self, trainer: Any, model: Any, loss: Any) -> None:
            trainer.log_metrics(raw=loss)

    logger = ListLogger()
    trainer(callbacks=[Logs()], loggers=[logger], settings={"max_duration": 1}).fit(loader())
    assert logger.records[0].metrics["raw"] == logger.records[0].metrics["train/loss"]


def test_a_trainer_needs_no_checkpoint_callback() -> None:
    result = trainer(settings={"max_duration": 2}).fit([(torch.rand(2, 2), torch.rand(2))] * 2)
    assert (result.step, result.finished, result.reason) == (2, True, "max_duration of 2 steps reached")
    assert "train/loss" in result.metrics


def test_workers_that_live_over_epochs_end_with_the_fit() -> None:
    train = loader(12, 4, num_workers=1, persistent_workers=True)
    before = multiprocessing.active_children()
    trainer(settings={"max_duration": 5}).fit(train)
    assert multiprocessing.active_children() == before
