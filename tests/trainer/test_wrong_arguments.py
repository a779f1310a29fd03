"""The likeliest mistakes in calls of the library are one message of our own that names the cure."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import MISSING, fields
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Line, Points

import trainer_cli
from trainer_cli import (
    EMA,
    Callback,
    CheckpointerCallback,
    ConfigError,
    LoadOptions,
    Logging,
    Trainer,
    TrainError,
    TrainingLoop,
    ValidationLoop,
    latest_checkpoint,
    save_checkpoint,
)
from trainer_cli.errors import NoCheckpointError, UserError
from trainer_cli.schema.checkpoint_config import CheckpointConfig
from trainer_cli.schema.sections import LoopConfig, PrecisionConfig
from trainer_cli.trainer.trainer import OF_PARTS

DATA = Points(16)


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.1)


def trainer(**arguments: Any) -> Trainer:
    given = {"model": Line, "optimizer": adam, "loop": TrainingLoop(max_duration=1), "device": "cpu"}
    return Trainer(**{**given, **arguments})


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (lambda: trainer(logger=[]), "Did you mean 'loggers'?"),
        (lambda: trainer(optimizers=adam), "Did you mean 'optimizer'?"),
        (lambda: trainer(lr_scheduler=None), "Did you mean 'schedulers'?"),
        (lambda: trainer(accelerator="gpu"), "Did you mean 'device'?"),
        (lambda: trainer(default_root_dir="x"), "Did you mean 'run_dir'?"),
        (lambda: trainer(lr=0.1), "It is an argument of the optimizer."),
        (lambda: trainer().fit(train_dataloaders=DATA), "Did you mean 'train_loader'?"),
        (lambda: trainer().fit(DATA, val_dataloaders=DATA), "Did you mean 'val_loader'?"),
        (lambda: trainer().fit(DATA, resume="x"), "Did you mean 'ckpt_path'?"),
        (lambda: trainer().validate(dataloaders=DATA), "Did you mean 'val_loader'?"),
        (lambda: trainer().validate(train_loader=DATA), "Did you mean 'val_loader'?"),
        (lambda: trainer().fit(dataloader=DATA), "Did you mean 'train_loader'?"),
        (lambda: trainer().validate_all(dataloaders=DATA), "Did you mean 'val_loaders'?"),
        (lambda: trainer().predict(dataloaders=DATA), "Did you mean 'loader'?"),
        (lambda: trainer().predict(val_loader=DATA), "Did you mean 'loader'?"),
        (lambda: trainer().predict(DATA, eval_steps=3), "Give a loader of fewer samples."),
        (lambda: trainer().predict(DATA, weight_dcay=1), "It takes: loader, ckpt_path, outputs, load."),
        (lambda: trainer().validate_all(DATA, ckpt_path="x"), "Did you mean 'ckpt_paths'?"),
        (lambda: trainer().predict(DATA, output="y"), "Did you mean 'outputs'?"),
        (lambda: EMA(dekay=0.9), "Did you mean 'decay'?"),  # type: ignore[call-arg]
        (lambda: ValidationLoop(limit_test_batches=3), "Did you mean 'eval_steps'?"),  # type: ignore[call-arg]
        (lambda: Logging(progress_bar=False), "Did you mean 'console'?"),  # type: ignore[call-arg]
        (lambda: LoadOptions(state=["model"]), "Did you mean 'states'?"),  # type: ignore[call-arg]
        (lambda: ValidationLoop(zzz=3), "It takes: eval_steps, hook."),  # type: ignore[call-arg]
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
    return eval(code, {**parts, "Trainer": trainer, "trainer": trainer(), "DATA": DATA, **names})


WRONG = (3, 0.5, [1], {"a": 1}, object(), int, True)


@pytest.mark.parametrize(
    ("call", "values"),
    [
        (lambda value: trainer(hparams=value), (3, "x", [1], object())),
        (lambda value: trainer(config=value), WRONG),
        (lambda value: trainer(run_dir=value), WRONG),
        (lambda value: trainer(precision=value), ("bf16-mixed", *WRONG)),
        (lambda value: trainer(loop=value), ("3ep", *WRONG)),
        (lambda value: trainer(schedulers=value).fit(DATA), ("cosine", 3, object())),
        (lambda value: CheckpointerCallback(value), WRONG),
        (lambda value: save_checkpoint(value, 0, torch.nn.Linear(1, 1), None), WRONG),  # type: ignore[arg-type]
        (lambda value: trainer().save_checkpoint(value), (None, *WRONG)),
        (lambda value: trainer().load_checkpoint(value), (None, *WRONG)),
        (lambda value: trainer().fit(DATA, load=value), (None, "model", *WRONG)),
        (lambda value: trainer().fit(DATA, keep_settings=value), ("lr", iter(["lr"]), *WRONG)),
        (lambda value: trainer().fit(DATA, ckpt_path=value), WRONG),
        (lambda value: trainer().validate(DATA, load=value), ("model", *WRONG)),
        (lambda value: trainer().validate(DATA, loop=value), WRONG),
        (lambda value: trainer().validate_all(DATA, load=value), ("model", *WRONG)),
        (lambda value: trainer().load_checkpoint("x", keep_settings=value), ("lr", iter(["lr"]), *WRONG)),
        (lambda value: trainer().predict(DATA, outputs=value), (iter(["y"]), *WRONG)),
        (lambda value: trainer().predict(DATA, load=value), ("model", *WRONG)),
        (lambda value: trainer().log_metrics(value), ("x", 3, [1])),
        (lambda value: trainer().log_metrics({value: 1.0}), (3, None)),
        (lambda value: trainer().log_text(value, "x"), (None, *WRONG)),
        (lambda value: trainer().log_histogram("x", value), ("x", object(), {"a": 1})),
        (lambda value: trainer().log_table("x", value, [[1]]), (3, None)),
        (lambda value: trainer().log_table("x", ["a"], value), (3, [1], None)),
        (lambda value: trainer().stop("x", by=value), ("me", *WRONG)),
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
        trainer(device=device)
    assert caught.value.cure == (None if cure is None else f"Did you mean '{cure}'?")


@pytest.mark.parametrize(
    "call",
    [
        lambda pattern: trainer().validate(DATA, pattern),
        lambda pattern: trainer().validate_all(DATA, pattern),
        lambda pattern: trainer().validate_all(DATA, [pattern]),
        lambda pattern: trainer().predict(DATA, pattern),
        lambda pattern: trainer().fit(DATA, ckpt_path=pattern),
        lambda pattern: latest_checkpoint(pattern),
    ],
)
def test_a_pattern_that_matches_nothing_is_the_error_of_checkpoints(call: Callable[[str], Any], tmp_path: Path) -> None:
    with pytest.raises(NoCheckpointError, match=r"nope\*"):
        call(str(tmp_path / "nope*"))


def test_a_trainer_takes_its_arguments_by_name() -> None:
    with pytest.raises(ConfigError, match=r"no argument without a name\. Write Trainer\(model=…, optimizer=…\)\."):
        Trainer(Line, adam)  # type: ignore[misc]


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
    made = trainer(callbacks=[callback])
    made.stop("enough", by=callback)
    assert made.stop_request is not None
    assert made.stop_request.reason == "enough"
