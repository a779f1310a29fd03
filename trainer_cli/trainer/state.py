"""A training's whole state as one tree, and back: model, optimizer, schedules, counts, data, callbacks, RNG."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainer_cli.checkpoint import snapshot
from trainer_cli.errors import UserError

if TYPE_CHECKING:
    from trainer_cli.trainer.trainer import Trainer


log = logging.getLogger(__name__)


def capture(trainer: Trainer, train_loader: Any) -> dict[str, Any]:
    """The state after the step just made. Tensors in it are the live ones."""
    state: dict[str, Any] = {
        "model": snapshot.capture_model(trainer.model),
        "schedulers": [scheduler.state_dict() for scheduler in trainer.schedulers],
        "progress": trainer.progress.state_dict(),
        "loop": trainer.loop.state_dict(),
        "callbacks": {name: own for name, call in trainer.callbacks.items() if (own := call.state_dict())},
        "rng": trainer.rng or snapshot.capture_rng(),
    }
    if trainer.optimizer is not None:
        state["optimizer"] = snapshot.capture_optimizer(trainer.model, trainer.optimizer)
    if train_loader is not None:
        state["data"] = trainer.loop.data_state(trainer)
    return state


def restore(trainer: Trainer, train_loader: Any, state: dict[str, Any], keep_settings: Sequence[str]) -> None:
    """Take everything but the model from a state. The RNG waits in `trainer.rng` for the first step.

    Raises:
        UserError: the optimizer, the schedules or the data do not fit.
    """
    if trainer.optimizer is not None and "optimizer" in state:
        snapshot.restore_optimizer(trainer.model, trainer.optimizer, state["optimizer"], keep_settings=keep_settings)
    saved = state["schedulers"]
    if len(saved) != len(trainer.schedulers):
        raise UserError(
            f"the checkpoint has {len(saved)} schedules, but here are {len(trainer.schedulers)}",
            where="scheduler",
            cure="Go on with the same schedules, or begin a new run from these weights with ckpt=.",
        )
    for scheduler, own in zip(trainer.schedulers, saved, strict=True):
        scheduler.load_state_dict(own)
    if train_loader is not None and "data" in state:
        train_loader.check_state(state["data"])
    trainer.progress.load_state_dict(state["progress"])
    trainer.loop.load_state_dict(state["loop"])
    for name, own in state["callbacks"].items():
        if name not in trainer.callbacks:
            log.warning("the checkpoint has state of a callback '%s', which is not here: it is dropped", name)
            continue
        trainer.callbacks[name].load_state_dict(own)
    trainer.rng = state["rng"]
