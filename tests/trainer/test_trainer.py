"""The trainer: what its slots take, what a resume brings back, and where a run starts and ends."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import multiprocessing
import re
from collections.abc import Callable
from dataclasses import MISSING, fields
from enum import EnumMeta
from inspect import signature
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from tiny import Line, ListLogger, Points, StopAt, loader, on, recorder, trainer
from torch import nn
from torch.optim import lr_scheduler as lr

import trainer_cli
from trainer_cli import (
    EMA,
    ConfigError,
    EarlyStopping,
    JsonlLogger,
    Logger,
    Logging,
    Precision,
    TrainError,
    ValidationLoop,
    WarmupCosine,
    latest_checkpoint,
    save_checkpoint,
)
from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.checkpoint.checkpointer import make_sync_checkpointer
from trainer_cli.config.check import validate
from trainer_cli.config.tree import ConfigTree, Node
from trainer_cli.errors import CheckpointError, NoCheckpointError, UserError
from trainer_cli.loads.options import LoadOptions
from trainer_cli.metric_names import Mode
from trainer_cli.optim.schedulers import scheduler_factory
from trainer_cli.schema import sections as schema
from trainer_cli.schema.checkpoint_config import CheckpointConfig, KeepBestConfig, Removal
from trainer_cli.schema.sections import LoopConfig, PrecisionConfig
from trainer_cli.trainer.hooks import Callback
from trainer_cli.trainer.setup import pick_device
from trainer_cli.trainer.trainer import OF_PARTS, Trainer
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


def test_a_gpu_is_chosen_by_its_number_and_one_that_is_not_there_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("cuda:1") == torch.device("cuda", 1)
    with pytest.raises(UserError, match=r"device is cuda:2, but this process sees no such GPU.*: cuda:0, cuda:1\."):
        pick_device("cuda:2")


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
    assert torch.equal(seen[1], first.model.get_parameter("linear.weight"))
    assert sorted(path.name for path in (tmp_path / "b").glob("step*")) == ["step3", "step6"]


def test_a_checkpoint_path_of_none_begins_anew(tmp_path: Path) -> None:
    trainer(checkpoint=CheckpointerCallback(tmp_path), settings={"max_duration": 2}).fit(loader())
    anew = trainer(checkpoint=CheckpointerCallback(tmp_path, enabled=False), settings={"max_duration": 1})
    assert anew.fit(loader(), ckpt_path=None).step == 1


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

    dies = on(
        on_before_forward=lambda trainer, model, *_: _raise(RuntimeError("power cut")) if model.training else None
    )
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


# The likeliest mistakes in calls of the library are one message of our own that names the cure.


DATA = Points(16)


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.1)


def new_trainer(**arguments: Any) -> Any:
    given = {"model": Line, "optimizer": adam, "loop": TrainingLoop(max_duration=1), "device": "cpu"}
    return Trainer(**{**given, **arguments})


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (lambda: new_trainer(logger=[]), "Did you mean 'loggers'?"),
        (lambda: new_trainer(optimizers=adam), "Did you mean 'optimizer'?"),
        (lambda: new_trainer(lr_scheduler=None), "Did you mean 'schedulers'?"),
        (lambda: new_trainer(accelerator="gpu"), "Did you mean 'device'?"),
        (lambda: new_trainer(default_root_dir="x"), "Did you mean 'run_dir'?"),
        (lambda: new_trainer(lr=0.1), "It is an argument of the optimizer."),
        (lambda: new_trainer().fit(train_dataloaders=DATA), "Did you mean 'train_loader'?"),
        (lambda: new_trainer().fit(DATA, val_dataloaders=DATA), "Did you mean 'val_loader'?"),
        (lambda: new_trainer().fit(DATA, resume="x"), "Did you mean 'ckpt_path'?"),
        (lambda: new_trainer().validate(dataloaders=DATA), "Did you mean 'val_loader'?"),
        (lambda: new_trainer().validate(train_loader=DATA), "Did you mean 'val_loader'?"),
        (lambda: new_trainer().fit(dataloader=DATA), "Did you mean 'train_loader'?"),
        (lambda: new_trainer().validate_all(dataloaders=DATA), "Did you mean 'val_loaders'?"),
        (lambda: new_trainer().predict(dataloaders=DATA), "Did you mean 'loader'?"),
        (lambda: new_trainer().predict(val_loader=DATA), "Did you mean 'loader'?"),
        (lambda: new_trainer().predict(DATA, eval_steps=3), "Give a loader of fewer samples."),
        (lambda: new_trainer().predict(DATA, weight_dcay=1), "It takes: loader, ckpt_path, outputs, load."),
        (lambda: new_trainer().validate_all(DATA, ckpt_path="x"), "Did you mean 'ckpt_paths'?"),
        (lambda: new_trainer().predict(DATA, output="y"), "Did you mean 'outputs'?"),
        (lambda: cast("Any", EMA)(dekay=0.9), "Did you mean 'decay'?"),
        (lambda: cast("Any", ValidationLoop)(limit_test_batches=3), "Did you mean 'eval_steps'?"),
        (lambda: cast("Any", Logging)(progress_bar=False), "Did you mean 'console'?"),
        (lambda: cast("Any", LoadOptions)(state=["model"]), "Did you mean 'states'?"),
        (lambda: cast("Any", ValidationLoop)(zzz=3), "It takes: eval_steps, hook."),
    ],
)  # fmt: skip
def test_an_unknown_argument_names_the_one_that_is_meant(call: Callable[[], Any], hint: str) -> None:
    with pytest.raises(ConfigError, match="takes no argument") as caught:
        call()
    assert caught.value.hint == hint


EPOCHS = "Did you mean 'max_duration'? Epochs are written as 5ep. "
OF_LOOP = "Write Trainer(loop=TrainingLoop(max_duration=…))."


@pytest.mark.parametrize(
    ("call", "name", "value", "hint"),
    [
        ("Trainer", "max_epochs", 3, EPOCHS + OF_LOOP),
        ("Trainer", "max_duration", "3ep", OF_LOOP),
        ("Trainer", "eval_steps", 3, "Write Trainer(loop=TrainingLoop(eval_steps=…))."),
        ("Trainer", "max_grad_norm", 1.0, "Did you mean 'clip_norm'? Write Trainer(precision=Precision(clip_norm=…))."),
        ("Trainer", "save_interval", 3, "Write Trainer(checkpoint=CheckpointerCallback(save_interval=…))."),
        ("Trainer", "progress_bar", "off", "Did you mean 'console'? Write Trainer(logging=Logging(console=…))."),
        ("Trainer", "train_loader", DATA, "Write trainer.fit(train_loader=…)."),
        ("Trainer", "val_loader", DATA, "Write trainer.fit(train_loader=…, val_loader=…)."),
        ("Trainer", "resume_from", None, "Did you mean 'ckpt_path'? Write trainer.fit(train_loader=…, ckpt_path=…)."),
        ("trainer.fit", "epochs", 3, EPOCHS + OF_LOOP),
        ("trainer.fit", "loop", TrainingLoop(max_duration=1), "Write Trainer(loop=…)."),
        ("trainer.fit", "callbacks", [], "Write Trainer(callbacks=…)."),
        ("trainer.fit", "logger", [], "Did you mean 'loggers'? Write Trainer(loggers=…)."),
        ("trainer.fit", "devices", "cpu", "Did you mean 'device'? Write Trainer(device=…)."),
        ("trainer.fit", "model", Line, "Write Trainer(model=…)."),
        ("trainer.fit", "limit_val_batches", 3, "Did you mean 'eval_steps'? "
         "Write Trainer(loop=TrainingLoop(eval_steps=…))."),
        ("trainer.validate", "eval_steps", 3,
         "Write trainer.validate(val_loader=…, loop=ValidationLoop(eval_steps=…))."),
        ("trainer.validate", "max_duration", 3, OF_LOOP),
        ("trainer.validate_all", "limit_val_batches", 3, "Did you mean 'eval_steps'? "
         "Write trainer.validate_all(val_loaders=…, loop=ValidationLoop(eval_steps=…))."),
        ("trainer.predict", "loggers", [], "Write Trainer(loggers=…)."),
        ("trainer.predict", "loop", ValidationLoop(), "Write Trainer(loop=…)."),
    ],
)  # fmt: skip
def test_an_argument_of_another_call_is_shown_where_it_is_taken(
    call: str, name: str, value: Any, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"takes no argument '{name}'") as caught:
        _evaluate(call)(**{name: value})
    assert caught.value.hint == hint
    _run_cure(hint, value)


@pytest.mark.parametrize("name", [name for name, hint in OF_PARTS.items() if "Write" in hint])
def test_every_argument_of_a_part_is_taken_there(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sections = (LoopConfig, PrecisionConfig, CheckpointConfig, Logging)
    field = next(field for section in sections for field in fields(section) if field.name == name)
    _run_cure(OF_PARTS[name], field.default if field.default_factory is MISSING else field.default_factory())


@pytest.mark.parametrize("method", ["fit", "validate", "validate_all", "predict"])
def test_a_method_refers_what_it_does_not_take_to_the_constructor(method: str) -> None:
    taken = signature(getattr(Trainer, method)).parameters
    for name in signature(Trainer).parameters:
        if name not in taken:
            with pytest.raises(ConfigError) as caught:
                getattr(Trainer, method)(**{name: None})
            assert caught.value.hint == f"Write Trainer({name}=…)."


def _run_cure(hint: str, value: Any) -> None:
    """Run the code in a hint, with data as the loaders, if it needs others, and the value as what is left."""
    code = re.sub(r"\b(\w+_loaders?)=…(?=,)", r"\1=DATA", hint.partition("Write ")[2].removesuffix("."))
    _evaluate(code.replace("…", "value"), value=value)


def _evaluate(code: str, **names: Any) -> Any:
    """Evaluate code in which `Trainer` needs no other arguments, and `trainer` is one."""
    parts = {name: getattr(trainer_cli, name) for name in trainer_cli.__all__}
    return eval(code, {**parts, "Trainer": new_trainer, "trainer": new_trainer(), "DATA": DATA, **names})


WRONG = (3, 0.5, [1], {"a": 1}, object(), int, True)


@pytest.mark.parametrize(
    ("call", "values"),
    [
        (lambda value: new_trainer(hparams=value), (3, "x", [1], object())),
        (lambda value: new_trainer(config=value), WRONG),
        (lambda value: new_trainer(run_dir=value), WRONG),
        (lambda value: new_trainer(precision=value), ("bf16-mixed", *WRONG)),
        (lambda value: new_trainer(loop=value), ("3ep", *WRONG)),
        (lambda value: new_trainer(schedulers=value).fit(DATA), ("cosine", 3, object())),
        (lambda value: CheckpointerCallback(value), WRONG),
        (lambda value: save_checkpoint(value, 0, torch.nn.Linear(1, 1), None), WRONG),  # type: ignore[arg-type]
        (lambda value: new_trainer().save_checkpoint(value), (None, *WRONG)),
        (lambda value: new_trainer().load_checkpoint(value), (None, *WRONG)),
        (lambda value: new_trainer().fit(DATA, load=value), (None, "model", *WRONG)),
        (lambda value: new_trainer().fit(DATA, keep_settings=value), ("lr", iter(["lr"]), *WRONG)),
        (lambda value: new_trainer().fit(DATA, ckpt_path=value), WRONG),
        (lambda value: new_trainer().validate(DATA, load=value), ("model", *WRONG)),
        (lambda value: new_trainer().validate(DATA, loop=value), WRONG),
        (lambda value: new_trainer().validate_all(DATA, load=value), ("model", *WRONG)),
        (lambda value: new_trainer().load_checkpoint("x", keep_settings=value), ("lr", iter(["lr"]), *WRONG)),
        (lambda value: new_trainer().predict(DATA, outputs=value), (iter(["y"]), *WRONG)),
        (lambda value: new_trainer().predict(DATA, load=value), ("model", *WRONG)),
        (lambda value: new_trainer().log_metrics(value), ("x", 3, [1])),
        (lambda value: new_trainer().log_metrics({value: 1.0}), (3, None)),
        (lambda value: new_trainer().log_text(value, "x"), (None, *WRONG)),
        (lambda value: new_trainer().log_histogram("x", value), ("x", object(), {"a": 1})),
        (lambda value: new_trainer().log_table("x", value, [[1]]), (3, None)),
        (lambda value: new_trainer().log_table("x", ["a"], value), (3, [1], None)),
        (lambda value: new_trainer().stop("x", by=value), ("me", *WRONG)),
    ],
)  # fmt: skip
def test_a_value_of_a_wrong_type_is_a_message_of_ours(
    call: Callable[[Any], Any], values: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for value in values:
        with pytest.raises(TrainError):
            call(value)
    assert not [*tmp_path.iterdir()], "a folder called as the value was made"


@pytest.mark.parametrize(
    ("device", "cure"),
    [("gpu", "cuda"), ("gpu:1", "cuda:1"), ("CPU", "cpu"), ("cuda0", "cuda"), (" cpu", "cpu"), ("zzz", None)],
)
def test_an_unknown_device_names_the_nearest(device: str, cure: str | None) -> None:
    with pytest.raises(UserError, match="expected auto, cpu, cuda or mps") as caught:
        new_trainer(device=device)
    assert caught.value.cure == (None if cure is None else f"Did you mean '{cure}'?")


@pytest.mark.parametrize(
    "call",
    [
        lambda pattern: new_trainer().validate(DATA, pattern),
        lambda pattern: new_trainer().validate_all(DATA, pattern),
        lambda pattern: new_trainer().validate_all(DATA, [pattern]),
        lambda pattern: new_trainer().predict(DATA, pattern),
        lambda pattern: new_trainer().fit(DATA, ckpt_path=pattern),
        lambda pattern: latest_checkpoint(pattern),
    ],
)
def test_a_pattern_that_matches_nothing_is_the_error_of_checkpoints(call: Callable[[str], Any], tmp_path: Path) -> None:
    with pytest.raises(NoCheckpointError, match=r"nope\*"):
        call(str(tmp_path / "nope*"))


def test_a_trainer_takes_its_arguments_by_name() -> None:
    with pytest.raises(ConfigError, match=r"no argument without a name\. Write Trainer\(model=…, optimizer=…\)\."):
        cast("Any", Trainer)(Line, adam)


def test_a_subclass_adds_its_own_arguments() -> None:
    class Own(Trainer):
        def __init__(self, size: int, **arguments: Any) -> None:
            super().__init__(model=Line, device="cpu", **arguments)
            self.size = size

    assert Own(3, optimizer=adam).size == 3
    with pytest.raises(ConfigError, match="Trainer takes no argument 'sise'"):
        Own(3, sise=4)


def test_a_callback_that_stops_is_one_of_the_trainer() -> None:
    callback = Callback()
    made = new_trainer(callbacks=[callback])
    made.stop("enough", by=callback)
    assert made.stop_request is not None
    assert made.stop_request.reason == "enough"


# Constructors refuse in Python what a config file refuses, by the same rules and in the same words.


WRONG_VALUES: tuple[Any, ...] = ("no", "3", 1.5, True, -1, 0, float("nan"), [1.5], ["3"], {"zzz": 1})
CONSTRUCTORS: dict[str, tuple[type, Callable[..., Any]]] = {
    "loop": (schema.LoopConfig, TrainingLoop),
    "precision": (schema.PrecisionConfig, Precision),
    "checkpoint": (CheckpointConfig, CheckpointerCallback),
    "checkpoint.keep_best": (KeepBestConfig, lambda **best: CheckpointerCallback(keep_best=best)),
    "logging": (schema.LoggingConfig, Logging),
    "": (schema.TrainConfig, lambda **own: Trainer(model=Line, device="cpu", **own)),
}
ONLY_OF_A_CONFIG = ("checkpoint.folder", "checkpoint.keep_best", "logging.rank_files")
OF_THE_TRAINER = ("name", "seed", "deterministic", "model_call", "freeze")


def all_fields() -> list[tuple[str, str]]:
    """Section and name of every field that is an argument of a constructor, too."""
    found = [(section, one.name) for section, (kind, _) in CONSTRUCTORS.items() for one in dataclasses.fields(kind)]
    return [
        (section, name)
        for section, name in found
        if (name in OF_THE_TRAINER if not section else f"{section}.{name}" not in ONLY_OF_A_CONFIG)
    ]


def refused_in_a_config(section: str, name: str, value: Any) -> str | None:
    nested: Any = {name: value}
    for key in reversed(section.split(".") if section else []):
        nested = {key: nested}
    _, mistakes = validate(ConfigTree(Node.of(nested)), missing_ok=True)
    key = f"{section}.{name}".lstrip(".")
    return next((one.message for one in mistakes if (one.location or "").startswith(key)), None)


def refused_in_python(section: str, name: str, value: Any) -> str | None:
    try:
        CONSTRUCTORS[section][1](**{name: value})
    except ConfigError as error:
        return error.message
    return None


@pytest.mark.parametrize(("section", "name"), all_fields())
def test_a_value_that_a_config_refuses_is_refused_in_python(
    section: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda *_: None)
    field = next(one for one in dataclasses.fields(CONSTRUCTORS[section][0]) if one.name == name)
    refused = 0
    for value in WRONG_VALUES:
        expected, message = (ask(section, name, value) for ask in (refused_in_a_config, refused_in_python))
        refused += message is not None
        texts = "str" in str(field.type)
        if value != value or (texts and type(value) is int):
            # A config says first that a number must be finite, and takes one for a string as it is written.
            assert message is not None
            continue
        if (texts or name == "freeze") and expected is None:
            continue  # A pattern may still match nothing.
        assert message == expected, f"{name}={value!r}"
    assert refused >= 4


@pytest.mark.parametrize("kind", [TrainingLoop, Precision, CheckpointerCallback])
def test_an_object_is_no_value(kind: type, tmp_path: Path) -> None:
    for name in inspect.signature(kind).parameters:
        if name not in ("folder", "identity", "thread"):
            with pytest.raises(ConfigError, match=name):
                kind(**{name: object()})


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"max_checkpoints": np.int64(2)}, 2),
        ({"enabled": np.bool_(False)}, False),
        ({"fixed_steps": range(2, 7, 2)}, [2, 4, 6]),
        ({"fixed_steps": np.array([2, 4])}, [2, 4]),
        ({"fixed_steps": (2,)}, [2]),
        ({"save_interval": np.int32(3)}, 3),
        ({"remove": "never"}, Removal.never),
        ({"keep_best": {"metric": "f1", "mode": "max"}}, KeepBestConfig(metric="f1", mode=Mode.max)),
        ({"keep_best": None}, KeepBestConfig()),
    ],
)  # fmt: skip
def test_what_python_and_numpy_call_a_value_is_one(settings: dict[str, Any], expected: Any, tmp_path: Path) -> None:
    ((name, _),) = settings.items()
    value = getattr(CheckpointerCallback(tmp_path, **settings).settings, name)
    assert (value, type(value)) == (expected, type(expected))


def constructors() -> list[tuple[type, str, type]]:
    """Every public callback and logger with its arguments that are numbers or switches."""
    public = [getattr(trainer_cli, name) for name in trainer_cli.__all__]
    return [
        (one, parameter.name, kind)
        for one in public
        if inspect.isclass(one) and issubclass(one, Callback | Logger) and one is not CheckpointerCallback
        for parameter in inspect.signature(one).parameters.values()
        for kind in (bool, int, float)
        if str(parameter.annotation) in (kind.__name__, f"{kind.__name__} | None")
    ]


@pytest.mark.parametrize(("component", "name", "kind"), constructors())
def test_callbacks_and_loggers_refuse_another_type(component: type, name: str, kind: type) -> None:
    needed = {
        one.name: 0.5 if "float" in str(one.annotation) else "val/loss"
        for one in inspect.signature(component).parameters.values()
        if one.default is inspect.Parameter.empty and one.name != name
    }
    for value in ("0.9", [1], *([1.5] if kind is int else [])):
        with pytest.raises(ConfigError, match=rf"{component.__name__}: {name} is .*, but it must be"):
            component(**{**needed, name: value})


def test_positions_count_too_and_what_python_refuses_stays_its_own() -> None:
    with pytest.raises(ConfigError, match=r"EMA: decay is '0\.9', but it must be a number"):
        EMA("0.9")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"EMA takes no argument 'dekay'\. Did you mean 'decay'\?"):
        EMA(dekay=0.9)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="takes no arguments"):
        Callback(3)
    assert copy.deepcopy(EarlyStopping("val/acc", min_delta=1)).metric == "val/acc"
    assert isinstance(JsonlLogger("x.jsonl"), Logger)


class Own(EMA):
    def __init__(self, decay: int) -> None:
        super().__init__(decay / 10)


def test_a_users_own_constructor_takes_what_it_takes() -> None:
    assert Own(9.5).decay == 0.95  # type: ignore[arg-type]


def test_choices_of_the_schema_are_enumerations() -> None:
    assert {one.name for one in dataclasses.fields(CheckpointConfig) if isinstance(one.type, EnumMeta)} >= {
        "remove", "newer", "format", "compression", "digest", "on_save_error",
    }  # fmt: skip
