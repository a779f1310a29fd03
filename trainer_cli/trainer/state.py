"""The state of a training as one tree, and back: model, optimizer, schedules, counts, data, callbacks, RNG.

Loading has two phases: every part reports what does not fit, in one table; only if the table is empty is anything
loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_cli.checkpoint import model_state
from trainer_cli.checkpoint.model_state import Fitting
from trainer_cli.checkpoint.optimizer_state import capture_optimizer, fit_optimizer
from trainer_cli.errors import TrainError, UserError
from trainer_cli.trainer.optimizers import ONLY
from trainer_cli.trainer.progress import Progress
from trainer_cli.trainer.schedulers import MOVED

if TYPE_CHECKING:
    from trainer_cli.trainer.hooks import Callback
    from trainer_cli.trainer.trainer import Trainer


log = logging.getLogger(__name__)

_SEVERAL = "optimizers"
"""The states of several optimizers, by name; that of a single one is under `optimizer`."""
OTHER_MODEL = "The model must have the layers and shapes that the checkpoint was saved with."
ADVICE = "Resume with the config of the checkpoint, or start a new run from its weights with ckpt=."


def later(trainer: Trainer) -> tuple[str, ...]:
    """Tensors that are read into their destination after all checks."""
    return ("model", *(f"{_place_of(name)}/state" for name in trainer.optimizers))


def _place_of(optimizer: str) -> str:
    """The key of an optimizer's state in the tree."""
    return ONLY if optimizer == ONLY else f"{_SEVERAL}/{optimizer}"


class Tree(dict[str, Any]):
    """A state being assembled: an existing key must not be replaced."""

    def __setitem__(self, key: str, value: Any) -> None:
        if key in self:
            raise UserError(
                f"the state to be saved has a '{key}' already, and it would be replaced", cure="Choose another name."
            )
        super().__setitem__(key, value)

    def update(self, *given: Any, **named: Any) -> None:
        """Add several."""
        for key, value in dict(*given, **named).items():
            self[key] = value

    def __ior__(self, given: Any) -> Tree:  # type: ignore[override,misc]
        self.update(given)
        return self


def capture(trainer: Trainer, train_loader: Any) -> Tree:
    """The state after the step just made. Tensors in it are the live ones."""
    state = Tree(
        model=model_state.capture_model(trainer.model),
        schedulers=trainer.schedulers.state_dict(),
        progress=trainer.progress.state_dict(),
        loop=trainer.loop.state_dict(),
        callbacks={name: own for name, call in trainer.callbacks.items() if (own := call.state_dict())},
        rng=trainer.rng or model_state.capture_rng(),
    )
    captured = {name: capture_optimizer(trainer.model, one) for name, one in trainer.optimizers.items()}
    if ONLY in captured:
        state[ONLY] = captured[ONLY]
    elif captured:
        state[_SEVERAL] = captured
    if own := trainer.step.state_dict():
        state["step"] = own
    if trainer.scaler is not None:
        state["scaler"] = trainer.scaler.state_dict()
    if train_loader is not None:
        state["data"] = trainer.loop.data_state(trainer)
    return state


def load_weights(trainer: Trainer, state: Mapping[str, Any], path: Path) -> None:
    """Load the model alone.

    Raises:
        UserError: with a table of all that does not fit; the model is then untouched.
    """
    _load({"model": _of_model(trainer, state)}, path, OTHER_MODEL)
    step = state.get("progress", {}).get("step")
    log.info("weights from %s%s (%d tensors)", path, "" if step is None else f" step {step}", len(state["model"]))


def load_for_evaluation(trainer: Trainer, state: Mapping[str, Any], path: Path) -> None:
    """Load the model, and the state of every callback that changes evaluations."""
    fittings = {"model": _of_model(trainer, state)}
    saved = state.get("callbacks", {})
    for name, callback in trainer.callbacks.items():
        if callback.evaluates:
            fittings[f"callbacks.{name}"] = _of_callback(callback, saved.get(name, {}))
    _load(fittings, path, OTHER_MODEL)


def load_all(
    trainer: Trainer, train_loader: Any, state: Mapping[str, Any], keep_settings: Sequence[str], path: Path
) -> None:
    """Load everything; the RNG state is kept in `trainer.rng` until the first step. Callbacks and a loss scale that
    only the checkpoint or only the trainer has are logged, not refused.

    Raises:
        UserError: with a table of all that does not fit; nothing is loaded then.
    """
    fittings = {"model": _of_model(trainer, state)}
    saved = {ONLY: state[ONLY]} if ONLY in state else state.get(_SEVERAL, {})
    for name, optimizer in trainer.optimizers.items():
        moved = MOVED if trainer.schedulers.of(name) else ()
        keep = [key.removeprefix(f"{name}.") for key in keep_settings if "." not in key or key.startswith(f"{name}.")]
        fit = partial(fit_optimizer, trainer.model, optimizer, keep_settings=keep, moved=moved)
        fittings[_place_of(name)] = _of(saved, name, fit)
    if trainer.optimizers:
        fittings |= {
            _place_of(name): Fitting(["not in this training"], _nothing)
            for name in saved
            if name not in trainer.optimizers
        }
    fittings["schedulers"] = _of(state, "schedulers", trainer.schedulers.fit)
    if "step" in state:
        fittings["step"] = Fitting([], lambda: trainer.step.load_state_dict(state["step"]))
    fittings["scaler"] = _of_scaler(trainer, state)
    fittings["progress"] = _of(state, "progress", lambda own: _of_progress(trainer.progress, own))
    fittings["loop"] = _of(state, "loop", lambda own: _of_loop(trainer, own))
    fittings["rng"] = _of(state, "rng", lambda own: Fitting(model_state.rng_faults(own), _nothing))
    of_callbacks = state.get("callbacks", {})
    for name, callback in trainer.callbacks.items():
        if name in of_callbacks:
            fittings[f"callbacks.{name}"] = _of_callback(callback, of_callbacks[name])
    if train_loader is not None:
        fittings["data"] = _of(state, "data", lambda own: _of_data(train_loader, own))
    _load(fittings, path)
    for line in _one_sided(trainer, state):
        log.warning("%s", line)
    trainer.rng = state["rng"]


def _nothing() -> None:
    """Load nothing."""


def _load(fittings: Mapping[str, Fitting], path: Path, advice: str = ADVICE) -> None:
    faults = {owner: fitting.faults for owner, fitting in fittings.items() if fitting.faults}
    if faults:
        text = model_state.table(f"{path} does not fit this training", faults)
        raise UserError(f"{text}\n", cure=f"Nothing was loaded. {advice}")
    for fitting in fittings.values():
        fitting.load()


def _of(state: Mapping[str, Any], owner: str, fit: Callable[[Any], Fitting]) -> Fitting:
    if owner not in state:
        return Fitting(["missing in the checkpoint"], _nothing)
    try:
        return fit(state[owner])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        return Fitting([f"is not what this version saves: {type(error).__name__}: {error}"], _nothing)


def _of_model(trainer: Trainer, state: Mapping[str, Any]) -> Fitting:
    return _of(state, "model", lambda own: model_state.fit_model(trainer.model, own)[0])


def _of_scaler(trainer: Trainer, state: Mapping[str, Any]) -> Fitting:
    scaler, own = trainer.scaler, state.get("scaler")
    if scaler is None or own is None:
        return Fitting([], _nothing)
    return Fitting(scaler.check_state(own), lambda: scaler.load_state_dict(own))


def _of_progress(progress: Progress, own: Any) -> Fitting:
    try:
        Progress().load_state_dict(own)
    except ValueError as error:
        return Fitting([str(error)], _nothing)
    return Fitting([], lambda: progress.load_state_dict(own))


def _of_loop(trainer: Trainer, own: Any) -> Fitting:
    wanted = set(trainer.loop.state_dict())
    rows = [f"{key}: missing in the checkpoint" for key in sorted(wanted - set(own))]
    rows += [f"{key}: not in this loop" for key in sorted(set(own) - wanted)]
    return Fitting(rows, lambda: trainer.loop.load_state_dict(own))


def _of_data(train_loader: Any, own: Mapping[str, Any]) -> Fitting:
    try:
        # Without the loader's own position: a loader keeps that once the rest fits.
        train_loader.check_state({**own, "loader": None})
    except TrainError as error:
        return Fitting([error.what], _nothing)
    return Fitting([], lambda: train_loader.check_state(own))


def _of_callback(callback: Callback, own: dict[str, Any]) -> Fitting:
    return Fitting(list(callback.check_state(own)), lambda: callback.load_state_dict(own))


def _one_sided(trainer: Trainer, state: Mapping[str, Any]) -> list[str]:
    """Log state that only the checkpoint has, or only the trainer."""
    saved = state.get("callbacks", {})
    lines = [
        f"the checkpoint has state of a callback '{name}', which this training does not have: it is dropped"
        for name in saved
        if name not in trainer.callbacks
    ]
    lines += [
        f"callback '{name}' has state, but the checkpoint has none for it: it starts new"
        for name, callback in trainer.callbacks.items()
        if name not in saved and callback.state_dict()
    ]
    if "step" not in state and trainer.step.state_dict():
        lines.append("the step has state, but the checkpoint has none for it: it starts new")
    if trainer.scaler is None and "scaler" in state:
        lines.append("the checkpoint has a loss scale, but there is none in this precision: it is dropped")
    if trainer.scaler is not None and "scaler" not in state:
        lines.append("the checkpoint has no loss scale: scaling starts new")
    return lines
