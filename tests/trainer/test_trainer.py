"""The trainer: what its slots take, what a resume brings back, and where a run starts and ends."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Line, ListLogger, StopAt, everything, loader, on, recorder, same, trainer
from torch import nn
from torch.optim import lr_scheduler as lr

from trainer_cli import WarmupCosine
from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.checkpoint.checkpointer import make_sync_checkpointer
from trainer_cli.errors import CheckpointError, UserError
from trainer_cli.loads.options import LoadOptions
from trainer_cli.optim.schedulers import scheduler_factory
from trainer_cli.trainer.hooks import Callback
from trainer_cli.trainer.setup import pick_device
from trainer_cli.trainer.trainer import Trainer
from trainer_cli.trainer.training_loop import TrainingLoop


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        ({"model": 3}, "model: expected Module, got int"),
        ({"model": lambda: "net"}, "model: expected Module, got str"),
        ({"optimizer": 3}, "optimizer: expected Optimizer, got int. Give an optimizer, or a function such as"),
        ({"optimizer": "adam"}, "optimizer: expected Optimizer, got str. Give an optimizer, or a function such as"),
        ({"optimizer": lambda model: ([_sgd(model)], [])}, "got tuple. Give several .* schedules as `schedulers`"),
        ({"optimizer": {"a": lambda model: [_sgd(model)]}}, r"optimizer\.a: .* got list. Give several .* as a mapping"),
        ({"optimizer": lambda model: model}, "optimizer: expected Optimizer, got Line"),
        ({"optimizer": torch.optim.SGD}, r"got the class SGD\. Give `lambda model: SGD\(model.parameters\(\), …\)`"),
        ({"optimizer": {"a": torch.optim.SGD}}, "got the class SGD"),
        ({"optimizer": None}, "no optimizer, so it can only validate"),
        ({"precision": "bf16"}, "precision: expected Precision, got str"),
        ({"loop": 10}, "loop: expected TrainingLoop, got int"),
        ({"checkpoint": "folder"}, "checkpoint: expected Callback, got str"),
        ({"callbacks": 5}, "callbacks: expected a sequence or mapping of Callback, got int"),
        ({"callbacks": Callback()}, "callbacks: expected a sequence or mapping of Callback, got Callback"),
        ({"callbacks": [Callback(), print]}, "callbacks.builtin_function_or_method: expected Callback, got"),
        ({"callbacks": {"a": 5}}, r"callbacks\.a: expected Callback, got int"),
        ({"callbacks": [Callback]}, r"expected Callback, got the class Callback\. Give an instance of it: Callback\("),
        ({"callbacks": {"checkpoint": Callback()}, "checkpoint": Callback()}, "two callbacks are called 'checkpoint'"),
        ({"callbacks": [CheckpointerCallback("a")]}, "a CheckpointerCallback, as .*give it as checkpoint=, or in YAML"),
        (
            {"callbacks": [CheckpointerCallback("a")], "checkpoint": CheckpointerCallback("b")},
            "holds a CheckpointerCallback, as .*give it as checkpoint=",
        ),
        ({"loggers": {"a": Callback()}}, r"loggers\.a: expected Logger, got Callback\. .*trainer_cli import Logger\."),
        ({"compile": True}, r"compile: expected a mapping of arguments of torch\.compile, got bool"),
        ({"seed": "0"}, "seed is '0', but it must be a whole number"),
        ({"device": "toaster"}, "device: expected auto, cpu, cuda or mps, got 'toaster'"),
        ({"schedulers": 5}, "schedulers: expected a schedule, got int without step .* A schedule has step, state_dict"),
        ({"schedulers": lambda optimizer: [3]}, "got list without step .* Give a list of functions, each of which"),
        ({"schedulers": lambda optimizer: "no"}, "schedulers: expected a schedule, got str without step"),
        ({"schedulers": [3]}, "schedulers: expected a schedule, got int without step"),
        ({"schedulers": lr.ConstantLR}, r"got the class ConstantLR .* Give `lambda optimizer: ConstantLR\(optimizer"),
        (
            {"schedulers": scheduler_factory(WarmupCosine, TrainingLoop(max_duration=4), warmup=1)},
            r"not of this trainer \(scheduler\)\. Give both the same TrainingLoop",
        ),
    ],
)  # fmt: skip
def test_every_slot_says_what_it_expected_and_what_it_got(slots: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Trainer(**{"model": Line, "optimizer": _sgd, "device": "cpu", **slots}).fit(loader())


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        (lambda: {"optimizer": _sgd(Line())}, "optimizer is an instance, but model is a function"),
        (lambda: {"model": Line(), "optimizer": _sgd(Line())}, r"a parameter of shape \(1, 2\) does not belong"),
        (lambda: {"schedulers": lr.ConstantLR(_sgd(Line()))}, "the schedule is of another optimizer than the trainer"),
    ],
    ids=["no model yet", "another model", "another optimizer"],
)  # fmt: skip
def test_an_optimizer_or_a_schedule_of_something_else_is_refused(slots: Any, message: str) -> None:
    # Made here and not with the table: the first optimizer of a process imports torch's compiler.
    with pytest.raises(UserError, match=message):
        Trainer(**{"model": Line, "optimizer": _sgd, "device": "cpu", **slots()}).fit(loader())


def test_a_model_and_an_optimizer_may_be_given_as_they_are() -> None:
    model = Line()
    trained = Trainer(model=model, optimizer=_sgd(model), loop=TrainingLoop(max_duration=2), device="cpu")
    result = trained.fit([(torch.rand(2, 2), torch.rand(2))] * 2)
    assert (result.step, result.finished, result.reason) == (2, True, "max_duration of 2 steps reached")
    assert trained.model is model


def test_without_an_optimizer_there_is_still_validation() -> None:
    assert "loss" in trainer(optimizer=None).validate(loader())["val"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_a_device_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(UserError, match=r"device is cuda, but this machine has none.*It has: .*cpu"):
        pick_device("cuda")


def test_hooks_may_add_to_a_checkpoint_and_take_it_back(tmp_path: Path) -> None:
    loaded: dict[str, Any] = {}

    def append(text: str) -> Any:
        return lambda trainer, state: state["extra"].update(text=state["extra"]["text"] + text)

    extra = on(
        on_save_checkpoint=lambda trainer, state: state.update(extra={"tensor": torch.arange(3), "text": "x"}),
        postprocess_checkpoint=append("y"),
        preprocess_checkpoint=append("z"),
        on_load_checkpoint=lambda trainer, state: loaded.update(state["extra"]),
    )
    for length in (1, 2):
        saver = CheckpointerCallback(tmp_path)
        trainer(callbacks=[extra], checkpoint=saver, settings={"max_duration": length}).fit(loader())
    assert (loaded["text"], loaded["tensor"].tolist()) == ("xyz", [0, 1, 2])


def test_what_is_logged_at_each_start_is_never_twice_in_one_step(tmp_path: Path) -> None:
    logger = ListLogger()
    for stop in (2, 2, 4):
        saver = CheckpointerCallback(tmp_path, save_interval=2, save_on_stop=False)
        announces = on(on_fit_start=lambda trainer, *_: trainer.log_metrics(parameters=3))
        trainer(callbacks=[announces, StopAt(stop)], loggers=[logger], checkpoint=saver, run_dir=tmp_path).fit(loader())
    assert logger.steps("parameters") == [0, 3]


def test_weights_alone_start_a_new_training_at_step_0(tmp_path: Path) -> None:
    first = trainer(checkpoint=CheckpointerCallback(tmp_path / "a"))
    first.fit(loader())
    seen: list[Any] = []
    look = on(on_fit_start=lambda made, *_: seen.extend((made.progress.step, made.model.linear.weight.clone())))
    forked = trainer(callbacks=[look], seed=9, checkpoint=CheckpointerCallback(tmp_path / "b"))
    forked.fit(loader(), ckpt_path=tmp_path / "a" / "step6", load=LoadOptions(states=["model"]))
    assert seen[0] == 0
    assert torch.equal(seen[1], first.model.linear.weight)
    assert sorted(path.name for path in (tmp_path / "b").glob("step*")) == ["step3", "step6"]


def test_a_checkpoint_path_of_none_begins_anew(tmp_path: Path) -> None:
    trainer(checkpoint=CheckpointerCallback(tmp_path), settings={"max_duration": 2}).fit(loader())
    anew = trainer(checkpoint=CheckpointerCallback(tmp_path, enabled=False), settings={"max_duration": 1})
    assert anew.fit(loader(), ckpt_path=None).step == 1


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


def _raise(error: Exception) -> None:
    raise error


def test_a_start_that_is_refused_leaves_the_records_of_before(tmp_path: Path) -> None:
    first = ListLogger()
    trainer(loggers=[first], settings={"log_interval": 1}, run_dir=tmp_path).fit(loader())
    refuses = on(on_fit_start=lambda *_: _raise(UserError("not today")))
    with pytest.raises(UserError, match="not today"):
        trainer(loggers=[first], callbacks=[refuses], run_dir=tmp_path).fit(loader(), ckpt_path=None)
    assert first.steps("train/loss") == [1, 2, 3, 4, 5, 6]


def test_a_record_of_step_0_survives_a_resume_from_step_0(tmp_path: Path) -> None:
    logger = ListLogger()

    def attempt(callbacks: Any) -> None:
        trainer(
            callbacks=callbacks, loggers=[logger], run_dir=tmp_path,
            settings={"max_duration": 2, "eval_at_start": True},
            checkpoint=CheckpointerCallback(tmp_path / "checkpoints"),
        ).fit(loader(), loader(4))  # fmt: skip

    dies = on(on_before_forward=lambda trainer, model, *_: model.training and _raise(RuntimeError("power cut")))
    with pytest.raises(RuntimeError, match="power cut"):
        attempt([dies])
    attempt([])
    assert [record.step for record in logger.records] == [0, 2]


def test_loggers_hear_where_a_run_starts_and_are_closed_whatever_happens(tmp_path: Path) -> None:
    logger = ListLogger()
    for callbacks in ([StopAt(2)], [recorder([], fail_in=("on_train_start",))], []):
        made = trainer(
            callbacks=callbacks, loggers=[logger], name="mine", run_dir=tmp_path,
            checkpoint=CheckpointerCallback(tmp_path / "c"),
        )  # fmt: skip
        try:
            made.fit(loader(10, 4))
        except RuntimeError:
            continue
    facts = [(fact.start_step, fact.start_samples, fact.total_steps) for fact in logger.facts]
    assert facts == [(0, 0, 6), (2, 8, 6), (2, 8, 6)]
    assert {fact.name for fact in logger.facts} == {"mine"}
    assert logger.closed == 3


def test_every_checkpoint_is_evaluated_on_every_loader_with_its_own_weights_and_step(tmp_path: Path) -> None:
    trainer(checkpoint=CheckpointerCallback(tmp_path, save_interval=2), settings={"max_duration": 4}).fit(loader())
    downstream = on(run_validation=lambda trainer, is_last: trainer.log_metrics({"task/score": 1.0, "b/more": 2.0}))
    book: list[str] = []
    only = trainer(optimizer=None, callbacks=[downstream, recorder(book)])
    paths = [tmp_path / "step2", tmp_path / "step4", tmp_path / "step2"]
    rows = only.validate_all({"a": loader(6), "b": loader(4)}, paths)
    assert [(row.step, row.loader) for row in rows] == [(s, name) for s in (2, 4, 2) for name in ("a", "b", "task")]
    assert rows[0].metrics == rows[6].metrics != rows[3].metrics
    assert (rows[1].metrics["more"], rows[2].metrics) == (2.0, {"score": 1.0})
    assert book.count("on_enter_evaluation") == book.count("run_validation") == 3
    expected = {"val": rows[3].metrics, "task": {"score": 1.0}, "b": {"more": 2.0}}
    assert only.validate(loader(6), tmp_path / "step4") == expected


def test_metrics_may_be_logged_as_tensors_that_need_gradients() -> None:
    logger = ListLogger()
    logs = on(on_before_backward=lambda trainer, model, loss: trainer.log_metrics(raw=loss))
    trainer(callbacks=[logs], loggers=[logger], settings={"max_duration": 1}).fit(loader())
    assert logger.records[0].metrics["raw"] == logger.records[0].metrics["train/loss"]


def test_workers_that_live_over_epochs_end_with_the_fit() -> None:
    train = loader(12, 4, num_workers=1, persistent_workers=True)
    before = multiprocessing.active_children()
    trainer(settings={"max_duration": 5}).fit(train)
    assert multiprocessing.active_children() == before
