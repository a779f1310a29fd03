"""Hooks: called in order, at no cost where nobody listens, and never silently misspelt."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Line, ListLogger, StopAt, loader, make_sgd, on, recorder, trainer

from trainer_cli import WarmupCosine
from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.catalog.catalog import Catalog
from trainer_cli.catalog.find import latest_checkpoint
from trainer_cli.errors import SaveError, UserError
from trainer_cli.signals import StopSignals
from trainer_cli.trainer import hooks as hooks_module
from trainer_cli.trainer.hooks import VOCABULARY, Callback, Hooks
from trainer_cli.trainer.precision import Precision
from trainer_cli.trainer.train_step import TrainStep
from trainer_cli.trainer.trainer import Trainer
from trainer_cli.trainer.training_loop import TrainingLoop
from trainer_cli.trainer.validation_loop import ValidationLoop


def test_only_overriders_are_bound_and_a_subclass_counts_for_what_it_inherits() -> None:
    first = on(on_fit_start=print)
    second = type("Second", (type(first),), {"setup": lambda self, trainer: None, "helper": lambda self: None})()
    free = type("Free", (Callback,), {"save": lambda self: None, "_on_x": lambda self: None, "state_dict": dict})()
    bound = Hooks({"first": first, "second": second, "none": Callback(), "free": free}, families=("validate",))
    counts = {hook: len(bound[hook]) for hook in VOCABULARY if bound[hook]}
    assert counts == {"on_fit_start": 2, "setup": 1}
    assert bound["on_fit_end"] == (), "what nobody overrides costs nothing"


_BATCH = ["on_train_batch_start", "on_train_step_start", "on_before_forward", "on_after_forward", "on_before_backward",
          "on_after_backward"]  # fmt: skip

_STEP = ["on_before_optimizer_step", "on_after_optimizer_step", "on_before_optimizer_zero_grad",
         "on_after_optimizer_zero_grad", "on_before_scheduler_step", "on_after_scheduler_step"]  # fmt: skip

_INNER_END = ["on_train_step_end", "on_train_batch_end"]

_EVALUATION = [
    "on_enter_validate_all", "on_enter_evaluation", "on_enter_validate", "on_validate_start", "on_validate_batch_start",
    "on_validate_step_start", "on_before_forward", "on_after_forward", "on_validate_step_end",
    "on_validate_batch_end", "on_validate_end", "run_validation", "on_after_evaluation", "on_save_opportunity",
]  # fmt: skip

_EPOCH = [
    "on_enter_train", "on_train_start", *_BATCH, *_INNER_END, *_BATCH, *_STEP, *_INNER_END, "on_save_opportunity",
    *_BATCH, *_STEP, *_INNER_END, "on_log", "on_train_end", *_EVALUATION,
]  # fmt: skip

PSEUDO_CODE = ["pre_setup", "setup", "post_setup", "on_enter_fit", "on_fit_start", "on_save_opportunity",
               *_EPOCH, *_EPOCH, "on_fit_end", "finalize"]  # fmt: skip
"""The loop as the docstring of hooks.py draws it, in the order of a fit of two epochs of three batches with two to a
step, a log and one validation loader of one batch after each epoch, and a save by step after the first step."""


def test_a_fit_calls_every_hook_where_the_pseudo_code_says() -> None:
    book: list[str] = []
    callback = recorder(book)
    type(callback).next_step = lambda self, trainer: trainer.progress.step + 1  # type: ignore[method-assign]
    trainer(
        callbacks=[callback],
        settings={"max_duration": "2ep", "eval_interval": "1ep", "log_interval": "1ep", "grad_accum_steps": 2},
        schedulers=lambda optimizer: WarmupCosine(optimizer, 4),
    ).fit(loader(10, 4), loader(3, 4, shuffle=False))
    assert book == PSEUDO_CODE


def test_the_pseudo_code_names_every_hook_and_no_other() -> None:
    drawn = set(re.findall(r"[a-z_]+", hooks_module.__doc__ or ""))
    abnormal = {"on_fit_exception", "on_train_exception", "on_validate_exception"}
    assert set(VOCABULARY) - abnormal <= drawn
    assert {word for word in drawn if word.startswith("on_")} <= set(VOCABULARY)


def test_a_save_and_a_load_call_their_hooks_in_order(tmp_path: Path) -> None:
    book: list[str] = []
    for callbacks, length in (([], 2), ([recorder(book)], 3)):
        saver = CheckpointerCallback(tmp_path, save_interval=1)
        trainer(callbacks=callbacks, settings={"max_duration": length}, checkpoint=saver).fit(loader())
    hooks = [hook for hook in book if "checkpoint" in hook or hook in ("on_fit_start", "on_save_opportunity")]
    assert hooks[:4] == ["on_before_load_checkpoint", "preprocess_checkpoint", "on_load_checkpoint", "on_fit_start"]
    assert hooks[-4:] == [
        "on_save_opportunity", "on_save_checkpoint", "postprocess_checkpoint", "on_after_save_checkpoint",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("on_train_batch_edn", "on_train_batch_end"),
        ("on_fit_begin", "on_fit_end"),
        ("on_validate_epoch_end", "on_validate_step_end"),
        ("finalise", "finalize"),
        ("post_setups", "post_setup"),
    ],
)
def test_a_misspelt_hook_is_refused_with_the_nearest(wrong: str, near: str) -> None:
    bad = type("Bad", (Callback,), {wrong: lambda self: None})()
    with pytest.raises(UserError, match=rf"Bad\.{wrong} is not a hook.*callback 'mine'.*Did you mean '{near}'"):
        Hooks({"mine": bad})


@pytest.mark.parametrize(
    ("hook", "method", "arguments"),
    [
        ("on_fit_start", lambda self, trainer, model: None, "self, trainer, train_loader, val_loaders, loop"),
        ("on_train_batch_end", lambda self, trainer: None, "self, trainer, model, outputs, batch, batch_idx"),
        ("on_after_evaluation", lambda self, trainer, metrics, more: None, "self, trainer, metrics"),
        ("on_probe_start", lambda self: None, "self, trainer, model, val_loader, loop"),
    ],
)
def test_a_hook_that_does_not_take_its_arguments_is_refused(hook: str, method: Any, arguments: str) -> None:
    bad = type("Bad", (Callback,), {hook: method})()
    with pytest.raises(UserError, match=rf"Bad\.{hook} does not take.*Write `def {hook}\({arguments}\)`"):
        Hooks({"mine": bad}, families=("probe",))


@pytest.mark.parametrize(
    "method", [lambda self, *arguments: self.seen(*arguments), lambda self, a, b, more=1: self.seen(a, b)]
)
def test_a_hook_may_take_more_than_its_arguments(method: Any) -> None:
    seen: list[Any] = []
    good = type("Good", (Callback,), {"on_after_evaluation": method, "seen": lambda self, *values: seen.append(values)})
    Hooks({"mine": good()}).call("on_after_evaluation", "trainer", "metrics")
    assert seen == [("trainer", "metrics")]


def test_teardowns_run_in_reverse_and_all_others_in_order() -> None:
    book: list[str] = []
    callbacks = {"a": recorder(book, "a."), "b": recorder(book, "b.")}
    bound = Hooks(callbacks, families=("validate",))
    reversed_hooks = []
    for hook in VOCABULARY:
        book.clear()
        bound.call(hook, *([None] * 3))
        if book == [f"b.{hook}", f"a.{hook}"]:
            reversed_hooks.append(hook)
        else:
            assert book == [f"a.{hook}", f"b.{hook}"]
    assert sorted(reversed_hooks) == [
        "finalize", "on_fit_end", "on_fit_exception", "on_train_end", "on_train_exception",
        "on_validate_end", "on_validate_exception",
    ]  # fmt: skip


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_in_an_evaluation_is_no_exception_of_it(number: signal.Signals) -> None:
    book: list[str] = []
    signalled = on(on_validate_batch_end=lambda *_: signal.raise_signal(number))
    with StopSignals() as signals:
        trained = trainer(callbacks={"book": recorder(book), "signalled": signalled}, settings={"eval_interval": 2})
        signals.listen(lambda reason: trained.stop(reason, finished=False))
        result = trained.fit(loader(), loader(shuffle=False))
    assert (result.step, result.finished, result.reason) == (2, False, number.name)
    assert [hook for hook in book if hook.endswith("_exception")] == []
    assert (book.count("on_validate_batch_end"), book.count("on_validate_end")) == (1, 0)
    assert book[-2:] == ["on_fit_end", "finalize"]


_OF_TRAINING = (
    "on_enter_train", "on_train_start", "on_before_forward", "on_before_optimizer_step", "on_log", "on_train_end",
)  # fmt: skip

_OF_EVALUATION = (
    "on_enter_validate_all", "on_enter_evaluation", "on_enter_validate", "on_validate_start", "on_validate_step_start",
    "on_validate_batch_end", "on_validate_end", "run_validation",
)  # fmt: skip


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, UserError])
@pytest.mark.parametrize(
    ("hook", "expected"),
    [
        *((hook, ["on_train_exception", "on_fit_exception"]) for hook in _OF_TRAINING),
        *((hook, ["on_validate_exception", "on_fit_exception"]) for hook in _OF_EVALUATION),
    ],
)
def test_an_exception_is_reported_once_to_the_hook_of_its_part(
    hook: str, expected: list[str], error: type[BaseException]
) -> None:
    book: list[str] = []
    bad = recorder(book, fail_in=(hook,), error=error)
    with pytest.raises(error) as caught:
        trainer(callbacks={"bad": bad}, settings={"max_duration": 1}).fit(loader(), loader(4, shuffle=False))
    assert f"in {hook} of callback 'bad' (Recorder)" in caught.value.__notes__
    assert [each for each in book if each.endswith("_exception")] == expected
    assert book[-1] == "finalize"


@pytest.mark.parametrize("steps", [None, 1])
@pytest.mark.parametrize("hook", _OF_EVALUATION)
def test_an_exception_outside_of_a_training_is_reported_too(hook: str, steps: int | None) -> None:
    book: list[str] = []
    made = trainer(callbacks=[recorder(book, fail_in=(hook,))], settings={"eval_sanity_steps": steps})
    with pytest.raises(RuntimeError, match=f"{hook} failed"):
        made.validate_all({"val": loader(4, shuffle=False)}, [None]) if steps is None else made.fit(loader(), loader(4))
    ended = ["on_validate_exception"] if steps is None else ["on_validate_exception", "on_fit_exception"]
    assert [each for each in book if each.endswith("_exception")] == ended
    assert book[-1] == "finalize"


def test_every_teardown_runs_whatever_the_others_do() -> None:
    book: list[str] = []
    failing = ("on_train_exception", "on_fit_exception", "finalize")
    callbacks = {
        "one": recorder(book, "one."),
        "two": recorder(book, "two.", fail_in=failing),
        "three": recorder(book, "three.", fail_in=("on_before_backward", *failing)),
    }
    logger = ListLogger()
    with pytest.raises(RuntimeError, match=r"three\.on_before_backward failed") as caught:
        trainer(callbacks=callbacks, loggers=[logger]).fit(loader())
    assert book[-9:] == [f"{who}.{hook}" for hook in failing for who in ("three", "two", "one")]
    notes = " ".join(caught.value.__notes__)
    assert all(f"three.{hook} failed" in notes for hook in failing)
    assert logger.closed == 1


def test_the_first_failing_teardown_is_raised_and_the_others_are_noted() -> None:
    bound = Hooks({name: recorder([], f"{name}.", fail_in=("finalize",)) for name in "abc"})
    with pytest.raises(RuntimeError, match=r"c\.finalize") as caught:
        bound.call_all("finalize")
    notes = " ".join(caught.value.__notes__)
    assert all(f"{name}.finalize failed" in notes for name in "ab")


def test_contexts_are_entered_and_left_around_what_they_are_for() -> None:
    book: list[str] = []

    def enter(name: str) -> Any:
        def hook(trainer: Trainer, stack: Any, *_: Any) -> None:
            book.append(name)
            stack.callback(book.append, f"/{name}")

        return hook

    contexts = on(
        on_enter_fit=enter("fit"), on_enter_train=enter("train"), on_enter_validate_all=enter("all"),
        on_enter_evaluation=enter("weights"), on_enter_validate=enter("one"),
        on_train_end=lambda *_: book.append("end"),
    )  # fmt: skip
    trainer(callbacks=[contexts], settings={"max_duration": 1}).fit(loader(), {"x": loader(), "y": loader()})
    within = ["weights", "one", "/one", "one", "/one", "/weights"]
    assert book == ["fit", "train", "end", "/train", "all", *within, "/all", "/fit"]


def test_one_context_is_around_all_checkpoints_and_one_around_each(tmp_path: Path) -> None:
    trainer(checkpoint=CheckpointerCallback(tmp_path, save_interval=3)).fit(loader())
    book: list[str] = []
    only = trainer(optimizer=None, callbacks=[recorder(book)])
    only.validate_all({"x": loader(4), "y": loader(4)}, f"{tmp_path}/step*")
    wanted = ("on_enter_validate_all", "on_before_load_checkpoint", "on_enter_evaluation", "on_enter_validate")
    entered = [hook for hook in book if hook in wanted]
    each = ["on_before_load_checkpoint", "on_enter_evaluation", "on_enter_validate", "on_enter_validate"]
    assert entered == ["on_enter_validate_all", *each, *each, *each]


_PARTS: dict[str, Callable[[Any], Any]] = {
    "loop": lambda kind: trainer(loop=kind(TrainingLoop)(max_duration=1)),
    "validation loop": lambda kind: Trainer(model=Line, loop=kind(ValidationLoop)(), device="cpu"),
    "loop of an evaluation": lambda kind: trainer().validate(loader(), loop=kind(ValidationLoop)()),
    "step": lambda kind: trainer(step=kind(TrainStep)()),
    "precision": lambda kind: trainer(precision=kind(Precision)()),
}


@pytest.mark.parametrize("hook", ["on_validate_start", "on_train_batch_end", "run_validation"])
@pytest.mark.parametrize("part", list(_PARTS))
def test_hooks_of_a_part_that_is_no_callback_are_refused(part: str, hook: str) -> None:
    def with_hook(base: type) -> type:
        return type("Mine", (base,), {hook: lambda self, *args: None})

    with pytest.raises(UserError, match=rf"Mine\.{hook} would never be called.*Move it into a Callback"):
        _PARTS[part](with_hook)


def test_a_loop_that_is_a_callback_too_has_its_hooks() -> None:
    book: list[str] = []

    class Both(ValidationLoop, Callback):
        def on_validate_end(self, *args: Any) -> None:
            book.append("end")

    both = Both()
    loop = TrainingLoop(max_duration=1)
    loop.validation = both
    trainer(loop=loop, callbacks=[both]).fit(loader(), loader(4))
    assert book == ["end"]


def test_on_before_forward_may_change_what_the_model_is_called_with() -> None:
    seen = []

    class Wants(torch.nn.Linear):
        def forward(self, batch: Any, scale: float = 1.0) -> Any:
            seen.append((batch, scale))
            return self.weight.sum() * scale

    def change(trainer: Any, model: Any, batch: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
        args[0], kwargs["scale"] = "changed", 3.0

    callbacks = [on(on_before_forward=change)]
    trainer(lambda: Wants(1, 1), callbacks=callbacks, settings={"max_duration": 1}).fit(loader(), loader(4))
    assert set(seen) == {("changed", 3.0)}


def test_a_validation_loop_has_its_own_hook_names() -> None:
    book: list[str] = []
    mine = on(
        on_probe_start=lambda *_: book.append("start"),
        on_probe_batch_start=lambda trainer, model, batch, batch_idx: book.append(f"batch {batch_idx}"),
        on_probe_batch_end=lambda *_: book.append("batch end"),
        on_probe_end=lambda *_: book.append("end"),
        on_validate_start=lambda *_: book.append("not mine"),
    )
    loop = TrainingLoop(max_duration=1, eval_interval=None)
    loop.validation = ValidationLoop(hook="probe")
    Trainer(model=Line, optimizer=make_sgd, loop=loop, callbacks=[mine], device="cpu").fit(loader(), loader(5, 4))
    assert book == ["start", "batch 0", "batch end", "batch 1", "batch end", "end"]
    with pytest.raises(UserError, match=r"on_probe_\w+ is not a hook"):
        trainer(callbacks=[mine])


def test_a_stop_between_two_steps_changes_no_order() -> None:
    book: list[str] = []
    trainer(callbacks=[recorder(book), StopAt(2)]).fit(loader())
    assert book.count("on_train_start") == book.count("on_train_end") == 1
    assert book[-2:] == ["on_fit_end", "finalize"]


def test_loggers_are_closed_after_every_callback_has_come_to_rest() -> None:
    """A save that is still being written then makes durable what was logged before it."""
    logger, closed = ListLogger(), []
    trainer(Line, callbacks=[on(finalize=lambda: closed.append(logger.closed))], loggers={"list": logger}).fit(loader())
    assert (closed, logger.closed) == ([0], 1)


_OUTSIDE = ("on_before_load_checkpoint", "preprocess_checkpoint", "on_load_checkpoint", "on_enter_fit", "on_fit_start",
            "finalize", "on_fit_end")  # fmt: skip
"""Called once, with or without steps."""


@pytest.mark.parametrize("hook", [hook for hook in VOCABULARY if hook not in ("next_step",)])
def test_an_exception_in_any_hook_keeps_its_type_ends_all_else_and_leaves_the_last_checkpoint_valid(
    hook: str, tmp_path: Any
) -> None:
    """At step 3, when checkpoints are there; hooks of the setup, of a load and of exceptions where they are called."""

    class Broken(Exception):
        pass

    book: list[str] = []
    late = not hook.endswith("_exception") and hook not in ("pre_setup", "setup", "post_setup")

    def fail(self: Callback, *args: Any) -> None:
        trainer = args[0] if args else None
        if not late or hook in _OUTSIDE or trainer is None or trainer.progress.step >= 3:
            raise Broken(hook)

    def stop(self: Callback, trainer: Trainer, *args: Any) -> None:
        if trainer.progress.step >= 3:
            raise Broken("the one that is second")

    own: dict[str, Any] = {hook: fail}
    if hook.endswith("_exception"):
        own["on_validate_batch_end" if "validate" in hook else "on_before_backward"] = stop
    bad = type("Bad", (Callback,), own)()
    settings = {"max_duration": 5, "eval_interval": 1, "log_interval": 1}

    def fit(*callbacks: Callback) -> None:
        saver = CheckpointerCallback(tmp_path, save_interval=1, save_async=False)
        trainer(
            callbacks={f"{number}": one for number, one in enumerate(callbacks)},
            checkpoint=saver,
            settings=settings,
            schedulers=lambda optimizer: WarmupCosine(optimizer, 5),
        ).fit(loader(), loader(4, shuffle=False))

    if hook in _OUTSIDE:
        fit(StopAt(2))
    saves = hook in ("on_save_checkpoint", "postprocess_checkpoint")  # These make the save fail, as a disk does.
    with pytest.raises(SaveError if saves else Broken) as caught:
        fit(recorder(book), bad)
    assert type(caught.value.__cause__ if saves else caught.value) is Broken
    notes = " ".join(caught.value.__notes__)
    assert saves or f"in {hook} of callback '1' (Bad)" in notes or "and then Broken" in notes
    if "setup" not in hook:
        assert book[-1] == "finalize"
    saved = [entry for entry in Catalog.of(tmp_path).entries() if entry.problem is None]
    assert "setup" in hook or saved
    fit()
    assert latest_checkpoint(tmp_path).name == "step5"
