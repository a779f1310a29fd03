"""ScopedFlags: set flags of torch while a fit, its training or an evaluation lasts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainer_cli.config.suggest import did_you_mean
from trainer_cli.errors import ConfigError
from trainer_cli.trainer.hooks import Callback

if TYPE_CHECKING:
    from trainer_cli.trainer.trainer import Trainer
    from trainer_cli.trainer.training_loop import TrainingLoop

Flags = Mapping[str, bool | int | float | str | None]


class ScopedFlags(Callback):
    """Sets attributes of torch's modules, and restores them afterwards, whatever happens meanwhile.

    Args:
        fit, train, validate: path of an attribute -> its value while the whole fit, the training between two
            evaluations, or an evaluation lasts; such as `torch.backends.cuda.matmul.allow_tf32: true`. The attribute
            must be there, and of the same type.
    """

    def __init__(self, fit: Flags | None = None, train: Flags | None = None, validate: Flags | None = None) -> None:
        self.fit, self.train, self.validate = dict(fit or {}), dict(train or {}), dict(validate or {})
        for where, flags in (("fit", self.fit), ("train", self.train), ("validate", self.validate)):
            for path, value in flags.items():
                _check(where, path, value)

    def on_enter_fit(
        self, trainer: Trainer, stack: ExitStack, train_loader: Any, val_loaders: Mapping[str, Any], loop: TrainingLoop
    ) -> None:
        stack.enter_context(flags_set(self.fit))

    def on_enter_train(
        self, trainer: Trainer, stack: ExitStack, train_loader: Any, loop: TrainingLoop, loop_idx: int
    ) -> None:
        stack.enter_context(flags_set(self.train))

    def on_enter_validate_all(self, trainer: Trainer, stack: ExitStack, val_loaders: Mapping[str, Any]) -> None:
        stack.enter_context(flags_set(self.validate))


@contextmanager
def flags_set(flags: Flags) -> Iterator[None]:
    """Attributes by their paths, set inside the block."""
    with ExitStack() as stack:
        for path, value in flags.items():
            owner, name = _owner(path)
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


def _check(where: str, path: str, value: object) -> None:
    # A config may be recovered from a checkpoint: it must not set attributes of any module.
    if path.split(".")[0] != "torch":
        raise ConfigError(f"'{path}' is no attribute of torch", location=where)
    owner, name = _owner(path)
    if owner is None or not hasattr(owner, name):
        known = [] if owner is None else [one for one in dir(owner) if not one.startswith("_")]
        raise ConfigError(f"there is no '{path}'", location=where, hint=did_you_mean(name, known).strip() or None)
    present = getattr(owner, name)
    if callable(present):
        raise ConfigError(f"'{path}' is a function or a class, and no flag", location=where)
    if present is not None and value is not None and type(value) is not type(present):
        raise ConfigError(f"'{path}' is {present!r}, so it cannot be {value!r}", location=where)


def _owner(path: str) -> tuple[Any, str]:
    """The object that has the last part of a path, or None, and that part."""
    *parents, name = path.split(".")
    owner: Any = import_module(parents[0]) if parents else None
    for part in parents[1:]:
        owner = getattr(owner, part, None)
    return owner, name
