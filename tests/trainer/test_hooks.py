"""Hooks: called in order, at no cost where nobody listens, and never silently misspelt."""

from __future__ import annotations

import re
import signal
from typing import Any

import pytest
import torch
from tiny import Line, ListLogger, StopAt, loader, recorder, trainer

from trainer_cli import WarmupCosine
from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.checkpoint.catalog import catalog_of
from trainer_cli.checkpoint.find import latest_checkpoint
from trainer_cli.errors import SaveError, UserError
from trainer_cli.runs.signals import StopSignals
from trainer_cli.trainer import hooks as hooks_module
from trainer_cli.trainer.hooks import VOCABULARY, Callback, Hooks
from trainer_cli.trainer.trainer import Trainer
from trainer_cli.trainer.training_loop import TrainingLoop
from trainer_cli.trainer.validation_loop import ValidationLoop


def test_a_hook_that_nobody_overrides_is_an_empty_tuple() -> None:
    class Quiet(Callback):
        def state_dict(self) -> dict[str, Any]:
            return {"a": 1}

    bound = Hooks({"one": Quiet(), "two": Callback()}, families=("validate",))
    assert {bound[hook] for hook in VOCABULARY} == {()}


def test_only_overriders_are_bound_and_a_subclass_counts_for_what_it_inherits() -> None:
    class First(Callback):
        def on_fit_start(self, *args: Any) -> None: ...

    class Second(First):
        def setup(self, trainer: Trainer) -> None: ...

    bound = Hooks({"first": First(), "second": Second(), "none": Callback()})
    assert (len(bound["on_fit_start"]), len(bound["setup"]), len(bound["on_fit_end"])) == (2, 1, 0)


def _pseudo_code() -> list[str]:
    """The loop as the docstring of hooks.py draws it, in the order of a fit of two epochs of three batches with
    two to a step, a log and one validation loader of one batch after each epoch, and a save by step after the first
    step."""
    step_of_two = [*_BATCH, *_INNER_END, *_BATCH, *_STEP, *_INNER_END]
    leftover = [*_BATCH, *_STEP, *_INNER_END]
    evaluation = [
        "on_enter_validate_all", "on_enter_validate", "on_validate_start", "on_validate_batch_start",
        "on_validate_step_start", "on_before_forward", "on_after_forward", "on_validate_step_end",
        "on_validate_batch_end", "on_validate_end", "run_validation", "on_after_evaluation", "on_save_opportunity",
    ]  # fmt: skip
    stretch = [
        "on_enter_train",
        "on_train_start",
        *step_of_two,
        "on_save_opportunity",
        *leftover,
        "on_log",
        "on_train_end",
        *evaluation,
    ]
    return ["pre_setup", "setup", "post_setup", "on_enter_fit", "on_fit_start", "on_save_opportunity",
            *stretch, *stretch, "on_fit_end", "finalize"]  # fmt: skip


_BATCH = ["on_train_batch_start", "on_train_step_start", "on_before_forward", "on_after_forward", "on_before_backward",
          "on_after_backward"]  # fmt: skip
_STEP = ["on_before_optimizer_step", "on_after_optimizer_step", "on_before_optimizer_zero_grad",
         "on_after_optimizer_zero_grad", "on_before_scheduler_step", "on_after_scheduler_step"]  # fmt: skip
_INNER_END = ["on_train_step_end", "on_train_batch_end"]


def test_a_fit_calls_every_hook_where_the_pseudo_code_says() -> None:
    book: list[str] = []
    callback = recorder(book)
    type(callback).next_step = lambda self, trainer: trainer.progress.step + 1  # type: ignore[method-assign]
    trainer(
        callbacks=[callback],
        settings={"max_duration": "2ep", "eval_interval": "1ep", "log_interval": "1ep", "grad_accum_steps": 2},
        schedulers=lambda optimizer: WarmupCosine(optimizer, 4),
    ).fit(loader(10, 4), loader(3, 4, shuffle=False))
    assert book == _pseudo_code()


def test_the_pseudo_code_names_every_hook_and_no_other() -> None:
    drawn = set(re.findall(r"[a-z_]+", hooks_module.__doc__ or ""))
    abnormal = {"on_fit_exception", "on_train_exception", "on_validate_exception"}
    assert set(VOCABULARY) - abnormal <= drawn
    assert {word for word in drawn if word.startswith("on_")} <= set(VOCABULARY)


def test_a_save_and_a_load_call_their_hooks_in_order(tmp_path: Any) -> None:
    book: list[str] = []
    settings = {"max_duration": 2}
    trainer(settings=settings, checkpoint=CheckpointerCallback(tmp_path, save_interval=1)).fit(loader())
    trainer(
        callbacks=[recorder(book)],
        settings={"max_duration": 3},
        checkpoint=CheckpointerCallback(tmp_path, save_interval=1),
    ).fit(loader())
    own = [hook for hook in book if "checkpoint" in hook or hook in ("on_fit_start", "on_save_opportunity")]
    assert own[:4] == ["on_before_load_checkpoint", "preprocess_checkpoint", "on_load_checkpoint", "on_fit_start"]
    assert own[-4:] == [
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
    with pytest.raises(UserError, match=rf"Bad\.{wrong} is no hook.*callback 'mine'.*Did you mean '{near}'"):
        Hooks({"mine": bad})


def test_other_methods_of_a_callback_are_its_own_business() -> None:
    free = type("Free", (Callback,), {"save": lambda self: None, "helper": lambda self: None, "_on_x": lambda s: None})
    bound = Hooks({"free": free()})
    assert all(bound[hook] == () for hook in VOCABULARY)


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


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, UserError])
@pytest.mark.parametrize("hook", ["setup", "on_fit_start", "on_before_forward", "on_validate_start", "on_fit_end"])
def test_an_exception_keeps_its_type_and_says_where_it_came_from(hook: str, error: type[BaseException]) -> None:
    bad = recorder([], fail_in=(hook,), error=error)
    with pytest.raises(error) as caught:
        trainer(callbacks={"bad": bad}, settings={"max_duration": 1}).fit(loader(), loader())
    assert f"in {hook} of callback 'bad' (Recorder)" in caught.value.__notes__


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_in_an_evaluation_is_no_exception_of_it(number: signal.Signals) -> None:
    book: list[str] = []

    class Signalled(Callback):
        def on_validate_batch_end(self, *args: Any) -> None:
            signal.raise_signal(number)

    with StopSignals() as signals:
        trained = trainer(callbacks={"book": recorder(book), "signalled": Signalled()}, settings={"eval_interval": 2})
        signals.listen(lambda reason: trained.stop(reason, finished=False))
        result = trained.fit(loader(), loader(shuffle=False))
    assert (result.step, result.finished, result.reason) == (2, False, number.name)
    assert [hook for hook in book if hook.endswith("_exception")] == []
    assert book.count("on_validate_batch_end") == 1
    assert "on_validate_end" not in book
    assert book[-2:] == ["on_fit_end", "finalize"]


def test_an_error_in_an_evaluation_is_an_exception_of_it() -> None:
    book: list[str] = []
    with pytest.raises(RuntimeError, match="on_validate_batch_end failed"):
        trainer(callbacks=[recorder(book, fail_in=("on_validate_batch_end",))]).fit(loader(), loader(shuffle=False))
    assert [hook for hook in book if hook.endswith("_exception")] == ["on_validate_exception", "on_fit_exception"]


_OF_TRAINING = ("on_enter_train", "on_train_start", "on_before_forward", "on_before_optimizer_step", "on_log")
_OF_EVALUATION = (
    "on_enter_validate_all", "on_enter_validate", "on_validate_start", "on_validate_step_start", "on_validate_end",
    "run_validation",
)  # fmt: skip


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
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
    with pytest.raises(error):
        trainer(callbacks=[recorder(book, fail_in=(hook,), error=error)], settings={"max_duration": 1}).fit(
            loader(), loader(4, shuffle=False)
        )
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
    one, two = recorder(book, "one."), recorder(book, "two.", fail_in=failing)
    three = recorder(book, "three.", fail_in=("on_before_backward", *failing))
    logger = ListLogger()
    with pytest.raises(RuntimeError, match=r"three\.on_before_backward failed") as caught:
        trainer(callbacks={"one": one, "two": two, "three": three}, loggers=[logger]).fit(loader())
    assert book[-9:] == [f"{who}.{hook}" for hook in failing for who in ("three", "two", "one")]
    notes = " ".join(caught.value.__notes__)
    assert all(f"three.{hook} failed" in notes for hook in failing)
    assert logger.closed == 1


def test_the_first_failing_teardown_is_raised_and_the_others_are_noted() -> None:
    bound = Hooks({name: recorder([], f"{name}.", fail_in=("finalize",)) for name in "abc"})
    with pytest.raises(RuntimeError, match=r"c\.finalize") as caught:
        bound.call_all("finalize")
    notes = " ".join(caught.value.__notes__)
    assert "b.finalize failed" in notes
    assert "a.finalize failed" in notes


def test_contexts_are_entered_and_left_around_what_they_are_for() -> None:
    book: list[str] = []

    class Contexts(Callback):
        def on_enter_fit(self, trainer: Trainer, stack: Any, *args: Any) -> None:
            book.append("fit")
            stack.callback(book.append, "/fit")

        def on_enter_train(self, trainer: Trainer, stack: Any, *args: Any) -> None:
            book.append("train")
            stack.callback(book.append, "/train")

        def on_enter_validate_all(self, trainer: Trainer, stack: Any, *args: Any) -> None:
            book.append("all")
            stack.callback(book.append, "/all")

        def on_enter_validate(self, trainer: Trainer, stack: Any, *args: Any) -> None:
            book.append("one")
            stack.callback(book.append, "/one")

        def on_train_end(self, *args: Any) -> None:
            book.append("end")

    trainer(callbacks=[Contexts()], settings={"max_duration": 1}).fit(loader(), {"x": loader(), "y": loader()})
    assert book == ["fit", "train", "end", "/train", "all", "one", "/one", "one", "/one", "/all", "/fit"]


def test_on_before_forward_may_change_what_the_model_is_called_with() -> None:
    seen = []

    class Wants(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, batch: Any, scale: float = 1.0) -> Any:
            seen.append((batch, scale))
            return self.weight.sum() * scale

    class Change(Callback):
        def on_before_forward(self, trainer: Any, model: Any, batch: Any, args: list[Any], kwargs: Any) -> None:
            args[0] = "changed"
            kwargs["scale"] = 3.0

    trainer(Wants, callbacks=[Change()], settings={"max_duration": 1}).fit(loader(), loader(4))
    assert set(seen) == {("changed", 3.0)}


def test_a_validation_loop_has_its_own_hook_names() -> None:
    book: list[str] = []

    class Mine(Callback):
        def on_probe_start(self, *args: Any) -> None:
            book.append("start")

        def on_probe_batch_start(self, trainer: Any, model: Any, batch: Any, batch_idx: int) -> None:
            book.append(f"batch {batch_idx}")

        def on_probe_batch_end(self, *args: Any) -> None:
            book.append("batch end")

        def on_probe_end(self, *args: Any) -> None:
            book.append("end")

        def on_validate_start(self, *args: Any) -> None:
            book.append("not mine")

    loop = TrainingLoop(max_duration=1, eval_interval=None)
    loop.validation = ValidationLoop(hook="probe")
    sgd = lambda model: torch.optim.SGD(model.parameters(), lr=0.1)  # noqa: E731
    Trainer(model=Line, optimizer=sgd, loop=loop, callbacks=[Mine()], device="cpu").fit(loader(), loader(5, 4))
    assert book == ["start", "batch 0", "batch end", "batch 1", "batch end", "end"]
    with pytest.raises(UserError, match=r"on_probe_\w+ is no hook"):
        trainer(callbacks=[Mine()])


def test_a_stop_between_two_steps_changes_no_order() -> None:
    book: list[str] = []
    trainer(callbacks=[recorder(book), StopAt(2)]).fit(loader())
    assert book.count("on_train_start") == book.count("on_train_end") == 1
    assert book[-2:] == ["on_fit_end", "finalize"]


def test_loggers_are_closed_after_every_callback_has_come_to_rest() -> None:
    """A save that is still being written then makes durable what was logged before it."""
    logger, closed = ListLogger(), []

    class Waits(Callback):
        def finalize(self) -> None:
            closed.append(logger.closed)

    trainer(Line, callbacks=[Waits()], loggers={"list": logger}).fit(loader())
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
    saved = [entry for entry in catalog_of(tmp_path).entries() if entry.problem is None]
    assert "setup" in hook or saved
    fit()
    assert latest_checkpoint(tmp_path).name == "step5"
