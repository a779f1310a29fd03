"""Run a model over the batches of a loader, and divide what it returns into a value for each sample."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from trainer_cli.batches import sample_count, to_device
from trainer_cli.data import Loader, PaddingBatch, SharedLoader, as_loader
from trainer_cli.errors import UserError
from trainer_cli.loads import LoadOptions
from trainer_cli.outputs import OutputKind, modes_kept
from trainer_cli.patterns import matches
from trainer_cli.state import restore_rng, rng_kept
from trainer_cli.terminal import format_count
from trainer_cli.trainer.evaluate import (
    buffers_kept,
    finalized,
    find_paths,
    load_checkpoint,
    refuse_average_of_present,
    training_kept,
)
from trainer_cli.trainer.loading import Unset
from trainer_cli.trainer.setup import loader_settings

if TYPE_CHECKING:
    from trainer_cli.trainer.trainer import Trainer

_RETURN = "Return a mapping from the model's forward, such as {'logits': logits}, with a row for each sample."


def predict_all(
    trainer: Trainer,
    loader: Any,
    ckpt_path: str | Path | Unset | None,
    patterns: str | Sequence[str],
    load: LoadOptions,
) -> list[dict[str, Any]]:
    """The outputs for each sample; arguments as in `Trainer.predict`. Collective."""
    group = trainer.strategy.group
    loader = as_loader(loader, shuffle=False, **loader_settings(trainer.seed, trainer.device, group))
    _refuse_divided(loader, group.data_size)
    patterns = [patterns] if isinstance(patterns, str) else patterns
    predictor = Predictor(trainer, loader, patterns)
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        if not trainer.fitting:
            stack.enter_context(finalized(trainer))
            stack.enter_context(trainer.logging.shown())
        path = _find_checkpoint(trainer, ckpt_path)
        refuse_average_of_present(trainer, [path], load)
        if path is not None:
            stack.enter_context(training_kept(trainer))
        weights = replace(load, states=("model",))
        stack.enter_context(Predictor.evaluating(trainer, {"predict": loader}, path, weights))
        batches = stack.enter_context(closing(loader.iterate(0)))
        while True:
            with group.checking("while predictions were made"):
                batch = next(batches, None)
                outputs = None if batch is None else predictor.outputs(batch)
            # The ranks of a tensor group have the same samples.
            gathered = group.gather(outputs)[:: group.tensor_size]
            if all(rank_outputs is None for rank_outputs in gathered):
                return rows
            for rank_outputs in gathered:
                if rank_outputs is not None and rank_outputs[0]:
                    rows += predictor.divide(*rank_outputs)


def _refuse_divided(loader: Any, data_size: int) -> None:
    """Refuse a loader that takes this rank's samples itself: their order is unknown, and samplers repeat some."""
    if data_size > 1 and not isinstance(loader, Loader | SharedLoader):
        raise UserError(
            "predict cannot tell the order of samples that a loader or sampler divides among the ranks itself",
            cure="Give the dataset, or a loader of all samples: predict divides them.",
        )


def _find_checkpoint(trainer: Trainer, ckpt_path: str | Path | Unset | None) -> Path | None:
    """The checkpoint to load; None: the present weights."""
    paths = find_paths(trainer, ckpt_path if isinstance(ckpt_path, Unset) else [ckpt_path])
    if len(paths) != 1:
        names = ", ".join("None" if path is None else path.name for path in paths)
        raise UserError(
            f"predict uses one checkpoint, and {ckpt_path} names {len(paths)} ({names})",
            where="ckpt_path",
            cure="Name one of them, or call predict for each.",
        )
    return paths[0]


class Predictor:
    """Calls the model for the batches of a loader, and divides what it returns into a row for each sample.

    All batches must have the same outputs.

    Args:
        patterns: globs of the names of outputs; empty: all.
    """

    def __init__(self, trainer: Trainer, loader: Any, patterns: Sequence[str]) -> None:
        self._trainer, self._loader, self._patterns = trainer, loader, patterns
        self._names: set[str] | None = None

    @staticmethod
    @contextmanager
    def evaluating(
        trainer: Trainer, loaders: Mapping[str, Any], path: Path | None, load: LoadOptions
    ) -> Iterator[None]:
        """Put the model into evaluation mode, with the weights that evaluations see, such as an average of EMA.

        Args:
            path: the checkpoint that is loaded before; None: the present weights.
        """
        if path is not None:
            load_checkpoint(trainer, path, load)
        with rng_kept():
            if (kept := trainer.loading.kept_generators()) is not None:
                restore_rng(kept)
            with trainer.modes.evaluating(), ExitStack() as stack, torch.no_grad():
                stack.enter_context(buffers_kept(trainer))
                stack.enter_context(modes_kept(trainer.model))
                trainer.hooks.call("on_enter_validate_all", trainer, stack, loaders)
                trainer.hooks.call("on_enter_evaluation", trainer, stack, loaders)
                trainer.model.eval()
                stack.enter_context(trainer.strategy.evaluation(trainer.model))
                trainer.step.bind_model(trainer)
                yield

    def rows(self, batch: Any) -> list[dict[str, Any]]:
        """The rows of a batch: name -> value.

        Raises:
            UserError: the model returns no value for each sample, none with such a name, or other outputs than before.
        """
        return self.divide(*self.outputs(batch))

    def outputs(self, batch: Any) -> tuple[int, dict[str, Any]]:
        """The number of samples in a batch, and the outputs for them on the host: name -> a value for each sample.

        A padding batch has none: only its forward runs, which may be collective.
        """
        trainer, patterns = self._trainer, self._patterns
        if type(batch) is PaddingBatch:
            trainer.step.forward(to_device(batch.batch, trainer.device))
            return 0, {}
        count = sample_count(batch, self._loader.batch_samples)
        raw = trainer.step.forward(to_device(batch, trainer.device) if trainer.device.type != "cpu" else batch)
        outputs = {name: value for name, value in _name_outputs(raw).items() if _length(value) == count}
        chosen = {
            name: _on_host(value)
            for name, value in outputs.items()
            if not patterns or any(matches(name, pattern) for pattern in patterns)
        }
        if not outputs:
            raise UserError(
                f"the model returned {_described(raw)} for {format_count(count, 'sample')}, which has no output for "
                "each of them",
                cure=_RETURN,
            )
        if not chosen:
            raise UserError(
                f"no output is called so: {', '.join(patterns)}",
                where="predict.outputs",
                cure=f"Available: {', '.join(outputs)}.",
            )
        return count, chosen

    def divide(self, count: int, outputs: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The rows of `count` samples: name -> value.

        Raises:
            UserError: an earlier batch has other outputs.
        """
        self._names = self._names or set(outputs)
        if different := sorted(self._names ^ set(outputs)):
            raise UserError(
                f"{', '.join(different)}: only some batches have a value for each of their samples (here {count})",
                where="predict.outputs",
                cure="Select the outputs that have one in each batch.",
            )
        return [{name: values[index] for name, values in outputs.items()} for index in range(count)]


def _name_outputs(raw: Any) -> dict[str, Any]:
    """What a model returned, without the loss: name -> value. Unnamed values are `output`, or `output_0` and so on."""
    if isinstance(raw, tuple) and len(raw) == 2:
        loss, outputs = raw
        if loss is None or _is_loss(loss):
            raw = outputs
    if isinstance(raw, Mapping):
        numbers = (OutputKind.loss, OutputKind.total)
        return {str(name): value for name, value in raw.items() if OutputKind.of(name, value) not in numbers}
    if isinstance(raw, list) and raw and all(isinstance(entry, Mapping) for entry in raw):
        # Detectors return a mapping for each sample: use the names that all of them have.
        shared_names = [name for name in raw[0] if all(name in entry for entry in raw)]
        return {str(name): [entry[name] for entry in raw] for name in shared_names}
    if isinstance(raw, tuple):
        return {f"output_{index}": value for index, value in enumerate(raw)}
    return {"output": raw}


def _is_loss(value: Any) -> bool:
    """Whether a value is a tensor of one number."""
    return isinstance(value, Tensor) and value.ndim == 0


def _length(value: Any) -> int | None:
    """The number of entries of a tensor, array, list or tuple along its first axis; None for anything else."""
    if isinstance(value, Tensor | np.ndarray):
        return int(value.shape[0]) if value.ndim else None
    return len(value) if isinstance(value, list | tuple) else None


def _on_host(value: Any) -> Any:
    """The value with its tensors, also in lists and tuples, copied to the host."""
    if isinstance(value, Tensor):
        # A copy: it may be a view of a larger tensor, or a buffer that the next forward overwrites.
        return value.detach().to("cpu", copy=True)
    return [_on_host(entry) for entry in value] if isinstance(value, list | tuple) else value


def _described(raw: Any) -> str:
    """What a model returned, in words for an error."""
    if isinstance(raw, Mapping):
        return f"a mapping of {', '.join(map(str, raw)) or 'nothing'}"
    return f"a tensor of shape {tuple(raw.shape)}" if isinstance(raw, Tensor) else f"a {type(raw).__name__}"
