"""A training's whole state as one tree, and back: model, optimizer, schedules, counts, data, callbacks, RNG.

Taking it back has two halves. First every owner says what does not fit, and all of that is one table; only where
the table is empty does anybody take anything.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_cli.checkpoint import model_state
from trainer_cli.checkpoint.model_state import Fitting
from trainer_cli.checkpoint.optimizer_state import capture_optimizer, fit_optimizer
from trainer_cli.errors import TrainError, UserError
from trainer_cli.trainer.progress import Progress
from trainer_cli.trainer.schedulers import MOVED

if TYPE_CHECKING:
    from trainer_cli.trainer.hooks import Callback
    from trainer_cli.trainer.trainer import Trainer


log = logging.getLogger(__name__)

ADVICE = "Go on with what the checkpoint was made with, or begin a new run from its weights with ckpt=."


class Tree(dict[str, Any]):
    """A state that is being put together: what stands in it is not replaced by who comes later."""

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
    if trainer.optimizer is not None:
        state["optimizer"] = capture_optimizer(trainer.model, trainer.optimizer)
    if trainer.scaler is not None:
        state["scaler"] = trainer.scaler.state_dict()
    if train_loader is not None:
        state["data"] = trainer.loop.data_state(trainer)
    return state


def take_weights(trainer: Trainer, state: Mapping[str, Any], path: Path) -> None:
    """Take the model alone.

    Raises:
        UserError: with a table of all that does not fit; the model is then untouched.
    """
    _take({"model": _of_model(trainer, state)}, path)


def take_for_evaluation(trainer: Trainer, state: Mapping[str, Any], path: Path) -> None:
    """Take the model, and the state of every callback that changes what is evaluated."""
    fittings = {"model": _of_model(trainer, state)}
    saved = state.get("callbacks", {})
    for name, callback in trainer.callbacks.items():
        if callback.evaluates:
            fittings[f"callbacks.{name}"] = _of_callback(callback, saved.get(name, {}))
    _take(fittings, path)


def take_all(
    trainer: Trainer, train_loader: Any, state: Mapping[str, Any], keep_settings: Sequence[str], path: Path
) -> None:
    """Take everything; the RNG waits in `trainer.rng` for the first step.

    What only one side has of callbacks and of the loss scale is logged, not refused: whoever changed the config so
    has said that it may be.

    Raises:
        UserError: with a table of all that does not fit; nothing is then taken.
    """
    fittings = {"model": _of_model(trainer, state)}
    if trainer.optimizer is not None:
        optimizer = trainer.optimizer
        moved = MOVED if trainer.schedulers.live else ()
        fittings["optimizer"] = _of(
            state,
            "optimizer",
            lambda own: fit_optimizer(trainer.model, optimizer, own, keep_settings=keep_settings, moved=moved),
        )
    fittings["schedulers"] = _of(state, "schedulers", lambda own: trainer.schedulers.fit(own, trainer.optimizer))
    fittings["scaler"] = _of_scaler(trainer, state)
    fittings["progress"] = _of(state, "progress", lambda own: _of_progress(trainer.progress, own))
    fittings["loop"] = _of(state, "loop", lambda own: _of_loop(trainer, own))
    fittings["rng"] = _of(state, "rng", lambda own: Fitting(model_state.rng_faults(own), lambda: None))
    saved = state.get("callbacks", {})
    for name, callback in trainer.callbacks.items():
        if name in saved:
            fittings[f"callbacks.{name}"] = _of_callback(callback, saved[name])
    if train_loader is not None:
        fittings["data"] = _of(state, "data", lambda own: _of_data(train_loader, own))
    _take(fittings, path)
    for line in _one_sided(trainer, state):
        log.warning("%s", line)
    trainer.rng = state["rng"]


def _take(fittings: Mapping[str, Fitting], path: Path) -> None:
    faults = {owner: fitting.faults for owner, fitting in fittings.items() if fitting.faults}
    if faults:
        text = model_state.table(f"{path} does not fit this training", faults)
        raise UserError(f"{text}\n", cure=f"Nothing was loaded. {ADVICE}")
    for fitting in fittings.values():
        fitting.take()


def _of(state: Mapping[str, Any], owner: str, fit: Callable[[Any], Fitting]) -> Fitting:
    if owner not in state:
        return Fitting(["missing in the checkpoint"], lambda: None)
    try:
        return fit(state[owner])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        return Fitting([f"is not what this version saves: {type(error).__name__}: {error}"], lambda: None)


def _of_model(trainer: Trainer, state: Mapping[str, Any]) -> Fitting:
    return _of(state, "model", lambda own: model_state.fit_model(trainer.model, own)[0])


def _of_scaler(trainer: Trainer, state: Mapping[str, Any]) -> Fitting:
    scaler, own = trainer.scaler, state.get("scaler")
    if scaler is None or own is None:
        return Fitting([], lambda: None)
    return Fitting(scaler.check_state(own), lambda: scaler.load_state_dict(own))


def _of_progress(progress: Progress, own: Any) -> Fitting:
    try:
        Progress().load_state_dict(own)
    except ValueError as error:
        return Fitting([str(error)], lambda: None)
    return Fitting([], lambda: progress.load_state_dict(own))


def _of_loop(trainer: Trainer, own: Any) -> Fitting:
    wanted = set(trainer.loop.state_dict())
    rows = [f"{key}: missing in the checkpoint" for key in sorted(wanted - set(own))]
    rows += [f"{key}: not in this loop" for key in sorted(set(own) - wanted)]
    return Fitting(rows, lambda: trainer.loop.load_state_dict(own))


def _of_data(train_loader: Any, own: Mapping[str, Any]) -> Fitting:
    try:
        # Without the position of the loader's own, which it would keep as soon as it has seen that the rest fits.
        train_loader.check_state({**own, "loader": None})
    except TrainError as error:
        return Fitting([error.what], lambda: None)
    return Fitting([], lambda: train_loader.check_state(own))


def _of_callback(callback: Callback, own: dict[str, Any]) -> Fitting:
    return Fitting(list(callback.check_state(own)), lambda: callback.load_state_dict(own))


def _one_sided(trainer: Trainer, state: Mapping[str, Any]) -> list[str]:
    """What is only in the checkpoint, or only here."""
    saved = state.get("callbacks", {})
    lines = [
        f"the checkpoint has state of a callback '{name}', which is not here: it is dropped"
        for name in saved
        if name not in trainer.callbacks
    ]
    lines += [
        f"callback '{name}' keeps state, but the checkpoint has none of it: it begins anew"
        for name, callback in trainer.callbacks.items()
        if name not in saved and callback.state_dict()
    ]
    if trainer.scaler is None and "scaler" in state:
        lines.append("the checkpoint has a loss scale, but there is none in this precision: it is dropped")
    if trainer.scaler is not None and "scaler" not in state:
        lines.append("the checkpoint has no loss scale: scaling begins anew")
    return lines
