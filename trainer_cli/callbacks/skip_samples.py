"""Callbacks that leave out samples, and that set flags of torch for a while."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from trainer_cli.errors import ConfigError, UserError
from trainer_cli.patterns import did_you_mean
from trainer_cli.trainer import Callback
from trainer_cli.values import check_whole

if TYPE_CHECKING:
    from trainer_cli.trainer import Trainer, TrainingLoop


class SkipSamples(Callback):
    """Passes over the next `samples` samples when a training begins, or is resumed.

    Samples are skipped once: a later resume skips only what `samples` was raised by. They make no steps, so the
    training is as long as without. It needs a loader that counts samples, such as one over a map-style dataset.
    """

    def __init__(self, samples: int) -> None:
        check_whole("samples", samples, 0)
        self.samples = samples
        self._skipped = 0

    def on_fit_start(
        self, trainer: Trainer, train_loader: Any, val_loaders: Mapping[str, Any], loop: TrainingLoop
    ) -> None:
        """Continue at the position after the samples to skip, less those that an earlier attempt has skipped."""
        samples_to_skip, self._skipped = self.samples - self._skipped, max(self.samples, self._skipped)
        if samples_to_skip <= 0:
            return
        batch_size = getattr(train_loader, "samples_per_batch", None)
        if batch_size is None or loop.epoch_batches is None:
            raise UserError("SkipSamples needs a train loader that counts samples", cure="Use a map-style dataset.")
        # `limit_train_batches` may end an epoch before the end of the dataset.
        epoch_length = min(train_loader.length, loop.epoch_batches * batch_size)
        epochs, epoch_samples = divmod(trainer.progress.epoch_samples + samples_to_skip, epoch_length)
        batch = len(train_loader) - train_loader.batches_after(epoch_samples)
        loop.pass_over(trainer, trainer.progress.epoch + epochs, batch, epoch_samples)

    def state_dict(self) -> dict[str, Any]:
        """The number of samples that were skipped."""
        return {"skipped": self._skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._skipped = int(state["skipped"])


Flags = Mapping[str, bool | int | float | str | None]


class ScopedFlags(Callback):
    """Sets attributes of torch's modules, and restores them afterwards, also after an error.

    Args:
        fit, train, validate: path of an attribute -> its value while the whole fit, the training between two
            evaluations, or an evaluation lasts; such as `torch.backends.cuda.matmul.allow_tf32: true`. The attribute
            must be there, and of the same type.
    """

    def __init__(self, fit: Flags | None = None, train: Flags | None = None, validate: Flags | None = None) -> None:
        self.fit, self.train, self.validate = dict(fit or {}), dict(train or {}), dict(validate or {})
        for argument, flags in (("fit", self.fit), ("train", self.train), ("validate", self.validate)):
            for path, value in flags.items():
                _check(argument, path, value)

    def on_enter_fit(
        self, trainer: Trainer, stack: ExitStack, train_loader: Any, val_loaders: Mapping[str, Any], loop: TrainingLoop
    ) -> None:
        """Set the flags of torch for the fit."""
        stack.enter_context(flags_set(self.fit))

    def on_enter_train(
        self, trainer: Trainer, stack: ExitStack, train_loader: Any, loop: TrainingLoop, loop_idx: int
    ) -> None:
        """Set the flags of torch for the training alone."""
        stack.enter_context(flags_set(self.train))

    def on_enter_validate_all(self, trainer: Trainer, stack: ExitStack, val_loaders: Mapping[str, Any]) -> None:
        stack.enter_context(flags_set(self.validate))


@contextmanager
def flags_set(flags: Flags) -> Iterator[None]:
    """Set attributes inside the block: path -> value; restore them afterwards."""
    with ExitStack() as stack:
        for path, value in flags.items():
            owner, name = _owner(path)
            # Before it is set: a value that torch refuses leaves those before it restored.
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield


def _check(where: str, path: str, value: object) -> None:
    """Raise ConfigError unless the path is that of a flag of torch, and the value is of its type; `where`: the
    argument."""
    # For a config from a checkpoint, running/reach.py refuses flags beyond torch.backends.
    if path.split(".")[0] != "torch":
        raise ConfigError(f"'{path}' is not an attribute of torch", location=where)
    owner, name = _owner(path)
    if owner is None or not hasattr(owner, name):
        names = [] if owner is None else [attribute for attribute in dir(owner) if not attribute.startswith("_")]
        raise ConfigError(f"there is no '{path}'", location=where, hint=did_you_mean(name, names).strip() or None)
    present = getattr(owner, name)
    if callable(present):
        raise ConfigError(f"'{path}' is a function or a class, not a flag", location=where)
    # By type, not by isinstance: true is an int, too.
    if present is not None and value is not None and type(value) is not type(present):
        raise ConfigError(f"'{path}' is {present!r}, so it cannot be {value!r}", location=where)


def _owner(path: str) -> tuple[Any, str]:
    """The object that has the attribute at a path, and the attribute's name.

    None instead of the object if it does not exist, or belongs to a module that torch imports, such as `torch.sys`.
    """
    *parents, name = path.split(".")
    owner: Any = import_module(parents[0]) if parents else None
    for parent in parents[1:]:
        owner = getattr(owner, parent, None)
        if isinstance(owner, ModuleType) and owner.__name__.partition(".")[0] != "torch":
            return None, name
    return owner, name
