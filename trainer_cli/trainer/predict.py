"""Run a model over the batches of a loader, and divide what it returns into a value for each sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from trainer_cli.checkpoint import model_state
from trainer_cli.core.patterns import matches
from trainer_cli.errors import UserError
from trainer_cli.trainer.metrics import sample_count, to_device

if TYPE_CHECKING:
    from trainer_cli.trainer.trainer import Trainer

_NOT_OUTPUTS = frozenset({"loss", "weight", "tokens"})
_RETURN = "Return a mapping from the model's forward, such as {'logits': logits}, with a row for each sample."


@contextmanager
def predicting(trainer: Trainer, loaders: Mapping[str, Any]) -> Iterator[None]:
    """Put the model into evaluation mode, with the weights that evaluations see, such as an average of EMA."""
    rng = model_state.capture_rng()
    try:
        with trainer.modes.evaluating(), ExitStack() as stack, torch.no_grad():
            trainer.hooks.call("on_enter_validate_all", trainer, stack, loaders)
            trainer.model.eval()
            trainer.step.bind_model(trainer)
            yield
    finally:
        model_state.restore_rng(rng)


def predict_batch(trainer: Trainer, batch: Any, loader: Any, patterns: Sequence[str]) -> tuple[int, dict[str, Any]]:
    """The number of samples in a batch, and the outputs for them on the host: name -> a value for each sample.

    Args:
        patterns: globs of the names of outputs; empty: all.

    Raises:
        UserError: the model returns no value for each sample, or none with such a name.
    """
    count = sample_count(batch, loader.batch_samples)
    raw = trainer.step.forward(to_device(batch, trainer.device) if trainer.device.type != "cpu" else batch)
    outputs = {name: value for name, value in _named(raw).items() if _length(value) == count}
    chosen = {
        name: _on_host(value)
        for name, value in outputs.items()
        if not patterns or any(matches(name, pattern) for pattern in patterns)
    }
    if not outputs:
        raise UserError(
            f"the model returned {_described(raw)} for {count} samples, which has no output for each of them",
            cure=_RETURN,
        )
    if not chosen:
        raise UserError(
            f"predict.outputs is {list(patterns)}, and no output is called so",
            where="predict.outputs",
            cure=f"Available: {', '.join(outputs)}.",
        )
    return count, chosen


def _named(raw: Any) -> dict[str, Any]:
    """What a model returned by name, without the loss."""
    if isinstance(raw, tuple) and len(raw) == 2 and (raw[0] is None or _is_loss(raw[0])):
        raw = raw[1]
    if isinstance(raw, Mapping):
        return {str(name): value for name, value in raw.items() if name not in _NOT_OUTPUTS}
    if isinstance(raw, list) and raw and all(isinstance(entry, Mapping) for entry in raw):
        # As detectors return: a mapping for each sample.
        return {str(name): [entry[name] for entry in raw] for name in raw[0] if all(name in entry for entry in raw)}
    if isinstance(raw, tuple):
        return {f"output_{index}": value for index, value in enumerate(raw)}
    return {"output": raw}


def _is_loss(value: Any) -> bool:
    return isinstance(value, Tensor) and value.ndim == 0


def _length(value: Any) -> int | None:
    if isinstance(value, Tensor | np.ndarray):
        return int(value.shape[0]) if value.ndim else None
    return len(value) if isinstance(value, list | tuple) else None


def _on_host(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu()
    return [_on_host(entry) for entry in value] if isinstance(value, list | tuple) else value


def _described(raw: Any) -> str:
    if isinstance(raw, Mapping):
        return f"a mapping of {', '.join(map(str, raw)) or 'nothing'}"
    return f"a tensor of shape {tuple(raw.shape)}" if isinstance(raw, Tensor) else f"a {type(raw).__name__}"
