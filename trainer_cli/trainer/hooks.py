"""The hooks of callbacks: when each is called, and what holds then.

The loop in pseudo-code, each hook at its place:

    pre_setup  setup  post_setup
    fit:
        on_enter_fit(stack)                          contexts that the whole fit runs in
        on_before_load_checkpoint -> read -> preprocess_checkpoint -> on_load_checkpoint
        on_fit_start
        on_save_opportunity(pre_train)
        until the run ends:
            on_enter_train(stack)  on_train_start    the steps up to the next evaluation
            for each optimizer step:
                for each batch of it:
                    on_train_batch_start  on_train_step_start
                    on_before_forward     model(batch)     on_after_forward
                    on_before_backward    loss.backward()  on_after_backward
                    (after the last batch of the step: )
                        on_before_optimizer_step       optimizer.step()       on_after_optimizer_step
                        on_before_optimizer_zero_grad  optimizer.zero_grad()  on_after_optimizer_zero_grad
                        on_before_scheduler_step       scheduler.step()       on_after_scheduler_step
                    on_train_step_end  on_train_batch_end
                on_log(metrics)                      where a log is due
                on_save_opportunity(step)            where `next_step` named this step and no evaluation is due
            on_train_end
            on_enter_validate_all(stack)             in `validate_all`, once around all checkpoints
            on_enter_evaluation(stack)               the weights are loaded
            for each validation loader:
                on_enter_validate(stack)  on_validate_start
                for each batch:
                    on_validate_batch_start  on_validate_step_start
                    on_before_forward  model(batch)  on_after_forward
                    on_validate_step_end  on_validate_batch_end
                on_validate_end
            run_validation(is_last)
            on_after_evaluation(metrics)
            on_save_opportunity(step | final | stop)
        on_fit_end
    finalize                                         after `validate`, `validate_all` and `predict`, too

`predict` calls on_enter_validate_all, on_enter_evaluation, and on_before_forward and on_after_forward for each batch.

The hooks from on_before_forward to on_after_optimizer_zero_grad are called by the methods of `TrainStep`; a subclass
may call these in another order, and for each optimizer on its own. Schedules step once, after all optimizers of a step.

A save inside `on_save_opportunity` runs: on_save_checkpoint(state) -> postprocess_checkpoint(state) -> write ->
on_after_save_checkpoint(path). The first two also run once after on_fit_start, to try whether the state can be saved
at all. Where a callback names metrics in `wanted_metrics`, one batch of each loader is evaluated before all else, to
see whether they are reported; `trainer.sanity_checking` is then True. A hook that no callback overrides costs
nothing: the loop holds an empty tuple.

What a callback may read of the trainer, besides its public methods. It changes none of these but by a method:

    model  optimizers  schedulers  scaler            what is trained; scaler is None without loss scaling
    loop  step  precision  strategy                  how; `strategy.group` is the ranks, `agreement` their sums
    progress                                         counts: step, epoch, batch, samples, tokens, seconds
    device  seed  name  run_dir  config  hparams     as given to the trainer; `logging` too
    callbacks  checkpoint  loggers                   by name; the callback that saves; by name
    metric_logger                                    `last`: the last record; `rate_seconds`; `activity`
    fitting  evaluating  sanity_checking             whether a fit runs; the loop that evaluates; the check at the start
    resumed  loaded_from  loaded_step                whether the run continues; which checkpoint was loaded; its step
    stop_request  stop_reason                        the stop requested for this step; the reason, at a save and after
    is_log_step  is_step_complete                    of the present step
    is_first_iteration  is_final_iteration
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from difflib import get_close_matches
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

from trainer_cli.errors import UserError
from trainer_cli.signatures import CheckedArguments

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from trainer_cli.checkpoint import Checkpointer
    from trainer_cli.policy import Occasion
    from trainer_cli.trainer.trainer import Trainer
    from trainer_cli.trainer.training_loop import TrainingLoop
    from trainer_cli.trainer.validation_loop import ValidationLoop


class Callback(CheckedArguments):
    """Base class of callbacks. A hook that is not overridden costs nothing.

    Hooks run in the order of the callbacks, teardowns (`…_end`, `…_exception`, `finalize`) in reverse. An
    exception keeps its type and gets a note which hook of which callback it came from.

    `with MyCallback():` adds it to every trainer that is made, or begins to fit or evaluate, inside the block.
    """

    validation_hooks: tuple[str, ...] = ()
    """Base names of further hooks: with `("probe",)` it may have `on_probe_start`, which `ValidationLoop(hook="probe")`
    calls."""
    save_requested: bool = False
    """Set when a save is requested; read by the checkpointer."""
    evaluates: bool = False
    """Whether the state changes the result of an evaluation. It is then loaded with the weights for an evaluation, as
    {} if the checkpoint has none."""
    rolls_back: bool = False
    """Whether it may call `Trainer.ask_to_roll_back`. The checkpoint to go back to then stays when a stop saves one."""
    measures_only: bool = False
    """Whether it changes nothing of the training, so that the start of a fit does not list it."""

    def __enter__(self) -> Self:
        self._handles = [*getattr(self, "_handles", ()), add_global_callback(self)]
        return self

    def __exit__(self, *error: object) -> None:
        self._handles.pop().remove()

    def state_dict(self) -> dict[str, Any]:
        """The state to save in checkpoints. Empty: none."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state from `state_dict`."""

    def check_state(self, state: dict[str, Any]) -> Iterable[str]:
        """One line for each part of a saved state that does not fit. Called before any state is loaded."""
        return ()

    def wanted_metrics(self) -> Mapping[str, str]:
        """Setting -> the metric that it needs: `LOADER/NAME` of an evaluation, or `train/NAME` of the logs."""
        return {}

    def check_wanted_metrics(self, where: str) -> None:
        """Called before the first step, once it is known that the metrics of `wanted_metrics` exist: raise a UserError
        if one cannot be used. `where` is the key of the callback, such as callbacks.early."""

    def logged_metrics(self) -> Iterable[str]:
        """The metrics that it logs in `on_after_evaluation`, such as `val/perplexity`: a setting may then name them,
        and one that no evaluation logs is refused before the first step instead of after the first evaluation."""
        return ()

    def end_rule(self) -> Sequence[str | float]:
        """The settings by which it ends a run with `trainer.stop(reason, by=self)`. If they have changed, a run that it
        finished continues when started again."""
        return ()

    def pre_setup(self, trainer: Trainer) -> None:
        """Before model and optimizer exist, in the constructor."""

    def setup(self, trainer: Trainer) -> None:
        """Model and optimizer exist."""

    def post_setup(self, trainer: Trainer) -> None:
        """Every callback's `setup` has run."""

    def finalize(self) -> None:
        """The end of a fit, or of an evaluation outside of one, also after an error."""

    def on_enter_fit(
        self, trainer: Trainer, stack: ExitStack, train_loader: Any, val_loaders: Mapping[str, Any], loop: TrainingLoop
    ) -> None:
        """Enter contexts that last for the whole fit."""

    def on_fit_start(
        self, trainer: Trainer, train_loader: Any, val_loaders: Mapping[str, Any], loop: TrainingLoop
    ) -> None:
        """A checkpoint, if any, is loaded; no step has been made."""

    def on_fit_end(self, trainer: Trainer, loop: TrainingLoop) -> None:
        """Training ended without an exception."""

    def on_fit_exception(self, trainer: Trainer, exception: BaseException) -> None:
        """An exception ends the fit; KeyboardInterrupt too."""

    def on_enter_train(
        self, trainer: Trainer, stack: ExitStack, train_loader: Any, loop: TrainingLoop, loop_idx: int
    ) -> None:
        """Enter contexts that last until the next evaluation."""

    def on_train_start(
        self, trainer: Trainer, model: nn.Module, train_loader: Any, loop: TrainingLoop, loop_idx: int
    ) -> None:
        """Training begins or continues after an evaluation; the model is in train mode."""

    def on_train_end(self, trainer: Trainer, model: nn.Module, loop: TrainingLoop, loop_idx: int) -> None:
        """Training pauses for an evaluation, or ends."""

    def on_train_exception(self, trainer: Trainer, exception: BaseException) -> None:
        """An exception ends the training, also in `on_enter_train` and `on_train_end`; KeyboardInterrupt too."""

    def on_train_batch_start(self, trainer: Trainer, model: nn.Module, batch: Any, batch_idx: int) -> None:
        """A batch is on the device. `batch_idx` counts from the start of the epoch."""

    def on_train_batch_end(self, trainer: Trainer, model: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        """The batch is done; `trainer.progress.step` counts an optimizer step that it completed."""

    def on_train_step_start(self, trainer: Trainer, model: nn.Module, batch: Any) -> None:
        """Before the forward of one batch."""

    def on_train_step_end(self, trainer: Trainer, model: nn.Module, outputs: Any, batch: Any) -> None:
        """After the backward of one batch and, if due, the optimizer step."""

    def on_before_forward(
        self, trainer: Trainer, model: nn.Module, batch: Any, args: list[Any], kwargs: dict[str, Any]
    ) -> None:
        """Change `args` and `kwargs` in place to change what the model is called with."""

    def on_after_forward(self, trainer: Trainer, model: nn.Module, outputs: Any, batch: Any) -> None:
        """`outputs` is what the model returned."""

    def on_before_backward(self, trainer: Trainer, model: nn.Module, loss: Tensor) -> None:
        """The loss of this batch, before accumulation weights it."""

    def on_after_backward(self, trainer: Trainer, model: nn.Module, loss: Tensor) -> None:
        """The gradients of this batch are accumulated."""

    def on_before_optimizer_step(self, trainer: Trainer, model: nn.Module, optimizer: Optimizer) -> None:
        """The gradients are complete (averaged over the accumulation) and not yet clipped."""

    def on_after_optimizer_step(self, trainer: Trainer, model: nn.Module, optimizer: Optimizer) -> None:
        """The parameters are updated."""

    def on_before_optimizer_zero_grad(self, trainer: Trainer, model: nn.Module, optimizer: Optimizer) -> None:
        """The gradients still exist (clipped)."""

    def on_after_optimizer_zero_grad(self, trainer: Trainer, model: nn.Module, optimizer: Optimizer) -> None:
        """The gradients are cleared."""

    def on_before_scheduler_step(
        self, trainer: Trainer, model: nn.Module, optimizer: Optimizer, scheduler: Any
    ) -> None:
        """Before a scheduler steps."""

    def on_after_scheduler_step(self, trainer: Trainer, model: nn.Module, optimizer: Optimizer, scheduler: Any) -> None:
        """The learning rates are those of the next step."""

    def on_log(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """A log step: `metrics` holds the training metrics of its record, `trainer.log_metrics` adds others."""

    def on_enter_validate_all(self, trainer: Trainer, stack: ExitStack, val_loaders: Mapping[str, Any]) -> None:
        """Enter contexts that last for the evaluations of all checkpoints on all loaders, before one is loaded; in a
        fit, for one evaluation."""

    def on_enter_evaluation(self, trainer: Trainer, stack: ExitStack, val_loaders: Mapping[str, Any]) -> None:
        """Enter contexts that last for the evaluation of the present weights on all loaders, such as other weights."""

    def on_enter_validate(self, trainer: Trainer, stack: ExitStack, val_loader: Any, loop: ValidationLoop) -> None:
        """Enter contexts that last for the evaluation on one loader."""

    def on_validate_start(self, trainer: Trainer, model: nn.Module, val_loader: Any, loop: ValidationLoop) -> None:
        """The evaluation on one loader begins; the model is in eval mode."""

    def on_validate_end(self, trainer: Trainer, model: nn.Module, loop: ValidationLoop) -> None:
        """The evaluation on one loader is complete; `loop.metrics` holds its means. Not called if the run stops."""

    def on_validate_exception(self, trainer: Trainer, exception: BaseException) -> None:
        """An exception ends an evaluation of the loaders or of a callback, also in the hooks that enter contexts;
        KeyboardInterrupt too. Not called if the run stops, as by a signal."""

    def on_validate_batch_start(self, trainer: Trainer, model: nn.Module, batch: Any, batch_idx: int) -> None:
        """A validation batch is on the device."""

    def on_validate_batch_end(
        self, trainer: Trainer, model: nn.Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A validation batch is counted."""

    def on_validate_step_start(self, trainer: Trainer, model: nn.Module, batch: Any) -> None:
        """Before the forward of a validation batch."""

    def on_validate_step_end(self, trainer: Trainer, model: nn.Module, outputs: Any, batch: Any) -> None:
        """After the forward of a validation batch."""

    def run_validation(self, trainer: Trainer, is_last: bool) -> None:
        """All loaders are evaluated: make further evaluations, which may depend on the model only."""

    def on_after_evaluation(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        """In a fit, an evaluation is complete: `metrics` holds what loaders and callbacks reported. Callbacks with
        `wanted_metrics` are called after the others, so that they see what these have logged here."""

    def next_step(self, trainer: Trainer) -> int | None:
        """The earliest step after this one at which `on_save_opportunity` must be called; None: never by step."""
        return None

    def on_save_opportunity(self, trainer: Trainer, occasion: Occasion) -> None:
        """The opportunity to save: after the evaluation and the log of this step."""

    def on_save_checkpoint(self, trainer: Trainer, state: dict[str, Any]) -> None:
        """Add to the state that will be saved. Called once before the first step too, as a check."""

    def postprocess_checkpoint(self, trainer: Trainer, state: dict[str, Any]) -> None:
        """Change the state after all callbacks have added to it."""

    def on_after_save_checkpoint(self, trainer: Trainer, path: Path) -> None:
        """The checkpoint is committed: at its own step, or at the end of a later one where a thread wrote it, and then
        those that it replaces are removed already."""

    def on_before_load_checkpoint(self, trainer: Trainer, path: Path) -> None:
        """Before a checkpoint is read."""

    def preprocess_checkpoint(self, trainer: Trainer, state: dict[str, Any]) -> None:
        """Change the loaded state before any part of it is used."""

    def on_load_checkpoint(self, trainer: Trainer, state: dict[str, Any]) -> None:
        """Load what `on_save_checkpoint` added; model, optimizer and progress are restored."""


@runtime_checkable
class CheckpointSaver(Protocol):
    """What the trainer needs of the callback given as `checkpoint`, besides its hooks."""

    save_requested: bool
    folder: Path
    """Where the checkpoints of this run are."""
    checkpointer: Checkpointer
    """Loads the checkpoints that this callback saves."""

    @property
    def tolerates_errors(self) -> bool:
        """Whether a disk that cannot be written does not end the training."""

    def newest(self, *, first: bool = True) -> Path | None:
        """The newest valid checkpoint of this run, to resume from; unless `first`, None if only step 0 was saved."""

    def newest_finite(self) -> Path | None:
        """The newest valid checkpoint of this run whose weights are finite."""

    def go_back(self, trainer: Trainer) -> Path | None:
        """The newest checkpoint to go back to during a training; later ones are no longer the newest."""

    def save_now(self, trainer: Trainer) -> Path:
        """Save the present step outside of a fit; its path."""


_NO_HOOKS = (
    "state_dict", "load_state_dict", "check_state", "save_requested", "evaluates", "wanted_metrics", "logged_metrics",
    "check_wanted_metrics", "end_rule", "validation_hooks", "measures_only", "rolls_back",
)  # fmt: skip
VOCABULARY: tuple[str, ...] = tuple(
    name for name in vars(Callback) if not name.startswith("_") and name not in _NO_HOOKS
)
_FAMILY = ("on_{}_start", "on_{}_end", "on_{}_batch_start", "on_{}_batch_end", "on_{}_step_start", "on_{}_step_end")
_TEARDOWN = re.compile(r"on_.*_(end|exception)|finalize")
_INNER = re.compile(r"on_.*_(batch|step)_end")

Hook = tuple[Callable[..., Any], ...]


_global: list[Callback] = []


class GlobalHandle:
    """Removes a global callback."""

    def __init__(self, callback: Callback) -> None:
        self._callback: Callback | None = callback

    def remove(self) -> None:
        """Remove it: trainers no longer call it from their next fit or evaluation on. May be called twice."""
        # One of possibly many entries: each handle removes its own.
        if self._callback is not None:
            _global.remove(self._callback)
            self._callback = None


def add_global_callback(callback: Callback) -> GlobalHandle:
    """Add a callback to every trainer from its construction, or its next fit or evaluation, on.

    It is called after a trainer's callbacks, but before the one that saves, and has its own state. Its
    `pre_setup` is called only by trainers made later.
    """
    if not isinstance(callback, Callback):
        raise UserError(f"expected Callback, got {type(callback).__name__}")
    # A list, not a set: each handle stands for one entry.
    _global.append(callback)
    return GlobalHandle(callback)


def global_callbacks() -> list[Callback]:
    """The callbacks that are added now, each once."""
    return list(dict.fromkeys(_global))


class Hooks:
    """For each hook the methods of the callbacks that override it, in calling order."""

    def __init__(self, callbacks: Mapping[str, Callback], families: Iterable[str] = ()) -> None:
        self._callbacks = dict(callbacks)
        declared = (base for callback in callbacks.values() for base in callback.validation_hooks)
        self.families = {*families, *declared}
        self._family_names = _family_names(self.families)
        for name, callback in self._callbacks.items():
            self._refuse_misspelt(name, callback)
        self._hooks = {hook: self._bind(hook) for hook in {*VOCABULARY, *self._family_names}}

    def __getitem__(self, hook: str) -> Hook:
        """The methods that override a hook, to be bound once and called in turn."""
        return self._hooks[hook]

    def refuse_in(self, *components: object) -> None:
        """Refuse hooks in objects that are not callbacks, where they would never be called.

        Raises:
            UserError: naming the class and the hook.
        """
        # By identity: a step may be given as a callback, too.
        callbacks = set(map(id, self._callbacks.values()))
        hooks = [hook for hook in (*VOCABULARY, *sorted(self._family_names)) if hook.startswith(("on_", "run_"))]
        for component, hook in product(components, hooks):
            if id(component) not in callbacks and callable(getattr(type(component), hook, None)):
                raise UserError(
                    f"{type(component).__name__}.{hook} would never be called: only hooks of callbacks are",
                    cure="Move it into a Callback, and give that as callbacks=.",
                )

    def add_family(self, base: str) -> None:
        """Bind the hooks that `ValidationLoop(hook=base)` calls, too."""
        if base not in self.families:
            self.families.add(base)
            names = _family_names([base])
            self._family_names |= names
            self._hooks |= {hook: self._bind(hook) for hook in names}

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """Call no callback inside the block, for steps that are undone."""
        # With every name, because a step binds its hooks by name.
        hooks, self._hooks = self._hooks, dict.fromkeys(self._hooks, ())
        try:
            yield
        finally:
            self._hooks = hooks

    def call(self, hook: str, *args: Any) -> None:
        """Call every method of a hook in order, up to the first exception."""
        for call in self._hooks[hook]:
            call(*args)

    def call_all(self, hook: str, *args: Any) -> None:
        """Call every method of a hook; then raise the first exception, with notes of the others."""
        first: BaseException | None = None
        # A teardown of one callback must not depend on another's.
        for call in self._hooks[hook]:
            try:
                call(*args)
            except BaseException as error:
                # KeyboardInterrupt too: it must not keep other callbacks from closing their files.
                if first is None:
                    first = error
                else:
                    first.add_note(f"and then {type(error).__name__}: {error}")
        if first is not None:
            raise first

    def _bind(self, hook: str) -> Hook:
        """The methods of the callbacks that override a hook, in calling order, with a note on their errors."""
        callbacks = [*self._callbacks.items()]
        if hook == "on_after_evaluation":
            # Callbacks that want metrics come after those that may log them here. The sort is stable.
            callbacks.sort(key=lambda item: type(item[1]).wanted_metrics is not Callback.wanted_metrics)
        bound = []
        for name, callback in callbacks:
            # A hook that is not overridden is not called at all, so that it costs nothing per step.
            if getattr(type(callback), hook, None) is not getattr(Callback, hook, None):
                self._check_signature(name, callback, hook)
                note = f"in {hook} of callback '{name}' ({type(callback).__name__})"
                bound.append(_add_note(getattr(callback, hook), note))
        # Reversed, like nested contexts; the end of a batch or step is no teardown.
        if _TEARDOWN.fullmatch(hook) and not _INNER.fullmatch(hook):
            bound.reverse()
        return tuple(bound)

    def _check_signature(self, name: str, callback: Callback, hook: str) -> None:
        """Refuse a hook that does not take its arguments: it would end the training where it is first called."""
        declared = getattr(Callback, self._family_names.get(hook, hook))
        arguments = [*inspect.signature(declared).parameters][1:]
        try:
            inspect.signature(getattr(callback, hook)).bind(*arguments)
        except TypeError:
            raise UserError(
                f"{type(callback).__name__}.{hook} does not take the arguments of this hook",
                where=f"callback '{name}'",
                cure=f"Write `def {hook}({', '.join(['self', *arguments])})`.",
            ) from None

    def _refuse_misspelt(self, name: str, callback: Callback) -> None:
        """Refuse a method whose name looks like a hook: it would never be called, without any sign of it."""
        hooks = [*VOCABULARY, *sorted(self._family_names)]
        for attribute in dir(type(callback)):
            if attribute in hooks or attribute.startswith("_") or attribute in _NO_HOOKS:
                continue
            close = get_close_matches(attribute, hooks, n=1, cutoff=0.85)
            looks_like_hook = attribute.startswith("on_") or bool(close)
            if looks_like_hook and callable(getattr(type(callback), attribute)):
                near = close or get_close_matches(attribute, hooks, n=1)
                raise UserError(
                    f"{type(callback).__name__}.{attribute} is not a hook, so it would never be called",
                    where=f"callback '{name}'",
                    cure=f"Did you mean '{near[0]}'?" if near else "The hooks are listed in trainer_cli.trainer.hooks.",
                )


def _family_names(bases: Iterable[str]) -> dict[str, str]:
    """Hook of each family -> the hook of evaluations that takes the same arguments."""
    return {pattern.format(base): pattern.format("validate") for base in bases for pattern in _FAMILY}


def _add_note(function: Callable[..., Any], note: str) -> Callable[..., Any]:
    """The function, with a note added to its exceptions, whose type stays."""

    def call(*args: Any) -> Any:
        """Call the function; an error gets the note."""
        try:
            return function(*args)
        except BaseException as error:
            error.add_note(note)
            raise

    return call
