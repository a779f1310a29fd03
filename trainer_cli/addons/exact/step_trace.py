"""A callback that makes a row for each of some steps: numbers for people, the samples to blame for exceptions and for
what is not finite, and digests to compare two trainings."""

from __future__ import annotations

import math
import pdb
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import chain
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainer_cli.addons.exact.digests import Digests
from trainer_cli.addons.exact.divergence import OF_RANK, RUINED, BlamedSamples, Stage, StepRow
from trainer_cli.addons.exact.epoch_orders import names_in_batch
from trainer_cli.addons.exact.replay_records import is_clocked
from trainer_cli.addons.exact.sample_losses import compute_alone, count_samples, read_losses, read_numbers
from trainer_cli.batches import describe_batch, rows_with_nan, tensors_of
from trainer_cli.dtensor import local_of, whole_of
from trainer_cli.errors import TrainError
from trainer_cli.leaves import walk
from trainer_cli.outputs import ForwardState, read_evaluation, read_outputs
from trainer_cli.policy import Occasion
from trainer_cli.state import are_finite, capture_rng, name_parameters, rng_kept, unwrap
from trainer_cli.torch_compat import foreach_norm
from trainer_cli.trainer import Callback

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from trainer_cli.trainer import Trainer, ValidationLoop

_OPTIMIZERS = ("optimizer", "optimizers")
NOT_COMPARED = ("progress", "loop", "microbatch")
"""Parts of a state that count, or follow from what is compared."""
_MOST_NORMS = 10
_MOST_COMPUTED = 4
"""Batches of a validation set whose samples are computed alone."""


class StepTrace(Callback):
    """Looks at some steps of a training, and at the evaluations after them, and changes nothing. Collective: each rank
    has one.

    Args:
        steps: the numbers of the steps, counted from 1.
        digests: also digest all that the steps begin with and compute, and make a last row, without batches, of the
            state after the last step. Samples to blame are not looked for: digests would include what that computes.
        per_sample: also take the loss of each sample, see `compute_alone`; without it only where the loss of the
            batch is not finite.
        debugs: stop in the debugger before each batch, with `trainer`, `model` and `batch`.
    """

    def __init__(self, steps: range, *, digests: bool = False, per_sample: bool = False, debugs: bool = False) -> None:
        self._steps = steps
        self._digests = Digests() if digests else None
        self._per_sample, self._debugs = per_sample, debugs
        self._made: dict[int, StepRow] = {}
        self._row: StepRow | None = None
        self._ruined_at: int | None = None
        """The step since which the weights are not finite, as far as was seen."""
        self._watched = ExitStack()
        self._before: ForwardState | None = None
        self._batch: Any = None
        self._size = 1
        """Number of samples in that batch."""
        self._bad_rows: dict[str, list[int]] = {}
        self._sample_losses: list[float] | str | None = None
        self._evaluated: tuple[Any, ValidationLoop] | None = None
        """The loader and the loop of an evaluation after one of the steps."""
        self._bad_batches: list[dict[str, Any]] = []
        """Those of the evaluation on this rank."""

    @property
    def rows(self) -> list[StepRow]:
        """The steps that have been made, and the one in which an error was raised."""
        return list(self._made.values())

    def on_train_batch_start(self, trainer: Trainer, model: nn.Module, batch: Any, batch_idx: int) -> None:
        if self._row is not None:
            return
        # At each step, for those before the first one to look at may have ruined them.
        if self._digests is None and self._ruined_at is None and not are_finite(trainer.trained):
            self._ruined_at = trainer.progress.step
        if trainer.progress.step + 1 in self._steps:
            self._row = self._begin(trainer)
            self._before = ForwardState(unwrap(model))
            since = "" if self._ruined_at is None else f"{RUINED}{self._ruined_at}"
            parameters = name_parameters(model).items()
            self._note_not_finite("parameter", ((name + since, value) for value, name in parameters))
            for name, module in unwrap(model).named_modules():
                handle = module.register_forward_hook(partial(self._look, name or type(module).__name__))
                self._watched.callback(handle.remove)

    def on_train_step_start(self, trainer: Trainer, model: nn.Module, batch: Any) -> None:
        if self._row is None:
            return
        self._hold(batch, trainer.loop.batch_samples)
        self._sample_losses = self._compute_losses(trainer) if self._per_sample else None
        if self._digests is not None:
            for name, digests in _digest_rows(self._digests, batch, self._size):
                self._row.rows.setdefault(name, []).extend(digests)
        if self._debugs:
            # It shows this frame, with trainer, model and batch.
            pdb.Pdb(skip=["torch.*"]).set_trace()

    def on_before_forward(
        self, trainer: Trainer, model: nn.Module, batch: Any, args: list[Any], kwargs: dict[str, Any]
    ) -> None:
        if self._evaluated is not None:
            self._hold(batch, self._evaluated[0].batch_samples)
        self._note(Stage.inputs, "input", [*args, *kwargs.values()])

    def on_after_forward(self, trainer: Trainer, model: nn.Module, outputs: Any, batch: Any) -> None:
        if self._digests is not None and self._row is not None:
            self._add(Stage.drawn, self._digests.of_generators(capture_rng()))
        if self._evaluated is not None:
            self._look_at_evaluation(trainer, *self._evaluated, outputs)

    def on_before_backward(self, trainer: Trainer, model: nn.Module, loss: Tensor) -> None:
        self._note(Stage.loss, "loss", loss)

    def on_after_backward(self, trainer: Trainer, model: nn.Module, loss: Tensor) -> None:
        # After it, because it needs the buffers of the forward; and before the weights change. With weights that are
        # not finite, no sample is to blame. Digests would include the outputs of these forwards.
        if self._row is None or self._digests is not None or self._sample_losses is not None:
            return
        if bool(loss.detach().isfinite()):
            return
        if not (self._row.not_finite or "").startswith("parameter"):
            self._sample_losses = self._compute_losses(trainer)

    def on_train_step_end(self, trainer: Trainer, model: nn.Module, outputs: Any, batch: Any) -> None:
        if self._row is None:
            return
        loss, named = read_outputs(outputs)
        entry = {
            "rank": trainer.strategy.group.rank,
            "number": len(self._row.batches) + 1,
            "samples": trainer.step.batch_size,
            "batch": describe_batch(batch),
            "loss": float(loss.detach()),
            **read_numbers(named),
            **({"not_finite": self._bad_rows} if self._bad_rows else {}),
        }
        if self._sample_losses is not None:
            losses = read_losses(named, trainer.step.batch_size)
            entry["sample_losses"] = self._sample_losses if losses is None else losses
        self._batch = None
        self._row.batches.append(entry)

    def on_before_optimizer_step(self, trainer: Trainer, model: nn.Module, optimizer: Optimizer) -> None:
        if self._row is None:
            return
        self._note_gradients(Stage.gradients, model, optimizer)
        gradients = {name: value for name, value in _list_gradients(model, optimizer) if value is not None}
        self._note_not_finite("gradient of", gradients.items())
        norms = map(float, map(whole_of, foreach_norm(list(gradients.values()))))
        self._row.grad_norms |= dict(zip(gradients, norms, strict=True))

    def on_before_optimizer_zero_grad(self, trainer: Trainer, model: nn.Module, optimizer: Optimizer) -> None:
        self._note_gradients(Stage.clipped, model, optimizer)

    def on_train_batch_end(self, trainer: Trainer, model: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        row = self._row
        if row is None or not trainer.is_step_complete:
            return
        self._watched.close()
        self._before = None
        norms = row.grad_norms
        row.grad_norm = math.sqrt(sum(value * value for value in norms.values())) if norms else None
        # NaN first, which no comparison orders.
        largest = sorted(norms, key=lambda name: (math.isnan(norms[name]), norms[name]), reverse=True)
        row.grad_norms = {name: norms[name] for name in largest[:_MOST_NORMS]}
        row.lr = {
            name: [float(group["lr"]) for group in groups if group.get("lr") is not None]
            for name, groups in trainer.step.settings_used().items()
        }
        self._end(trainer, row)
        self._row = None

    def on_save_opportunity(self, trainer: Trainer, occasion: Occasion) -> None:
        # Here and not at the end of the batch: teardowns of other callbacks, as with an average, come later.
        step = trainer.progress.step
        if self._digests is not None and step == self._steps[-1] and step + 1 not in self._made:
            self._end(trainer, self._begin(trainer))

    def on_train_exception(self, trainer: Trainer, exception: BaseException) -> None:
        if self._row is not None and self._may_be_of_sample(exception):
            failed = {**self._find_errors(trainer), "number": len(self._row.batches) + 1}
            self._row.blamed = BlamedSamples(failed=failed)

    def on_enter_validate(self, trainer: Trainer, stack: ExitStack, val_loader: Any, loop: ValidationLoop) -> None:
        is_looked_at = self._digests is None and trainer.progress.step in self._made and not trainer.sanity_checking
        # With weights that are not finite, no sample is to blame.
        if is_looked_at and are_finite(trainer.trained):
            self._evaluated = val_loader, loop
            stack.push(partial(self._end_evaluation, trainer))

    def logged_metrics(self) -> Iterable[str]:
        # It states that `on_after_evaluation` logs none.
        return ()

    def on_after_evaluation(self, trainer: Trainer, metrics: Mapping[str, float]) -> None:
        row = self._made.get(trainer.progress.step)
        if row is None or self._digests is not None:
            return
        batches = [*chain.from_iterable(trainer.strategy.group.gather(self._bad_batches))]
        self._bad_batches = []
        if bad := [name for name, value in metrics.items() if not math.isfinite(value)]:
            row.blamed = BlamedSamples(metrics=bad, batches=batches)

    def finalize(self) -> None:
        # After an error inside a step.
        self._watched.close()
        if self._row is not None:
            self._made[self._row.step] = self._row
            self._row = None

    def _hold(self, batch: Any, loader_count: int | None) -> None:
        """Keep a batch, and note its rows with NaN, before the model, which may change it in place."""
        self._batch, self._size = batch, count_samples(batch, loader_count)
        self._bad_rows = rows_with_nan(batch, self._size)

    def _look_at_evaluation(self, trainer: Trainer, loader: Any, loop: ValidationLoop, outputs: Any) -> None:
        loss, named = read_evaluation(outputs)
        # The key of the loss is another name: `read_numbers` leaves out an output of that name.
        numbers = [*read_numbers({"": loss}).values(), *read_numbers(named).values()]
        if loop.counts and not all(map(math.isfinite, numbers)):
            entry = {"rank": trainer.strategy.group.rank, "samples": self._size, "not_finite": self._bad_rows}
            if sum(batch["loader"] == loop.name for batch in self._bad_batches) < _MOST_COMPUTED:
                entry["sample_losses"] = self._compute_losses(trainer)
            self._bad_batches.append(self._name_samples(entry, loader, loop))
        self._batch = None

    def _end_evaluation(
        self,
        trainer: Trainer,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._evaluated is not None
        if self._may_be_of_sample(error):
            failed = self._name_samples(self._find_errors(trainer), *self._evaluated)
            self._made[trainer.progress.step].blamed = BlamedSamples(batches=[failed])
        self._evaluated = self._batch = None

    def _find_errors(self, trainer: Trainer) -> dict[str, Any]:
        """Which samples of the batch raise an exception alone."""
        raised = compute_alone(trainer, self._batch, self._size).raised
        return {"rank": trainer.strategy.group.rank, "samples": self._size, "raised": raised}

    def _compute_losses(self, trainer: Trainer) -> list[float] | str:
        # In an evaluation there are no buffers of before.
        return compute_alone(trainer, self._batch, self._size, self._before).losses

    @staticmethod
    def _name_samples(entry: dict[str, Any], loader: Any, loop: ValidationLoop) -> dict[str, Any]:
        with rng_kept():
            names = names_in_batch(loader, loop.batch_idx)
        # A `collate_fn` may drop samples.
        is_whole = names is not None and len(names) == entry["samples"]
        return {**entry, "loader": loop.name, "names": names if is_whole else None}

    def _may_be_of_sample(self, error: BaseException | None) -> bool:
        """Whether an error may be that of a sample of the batch: not one of this package, nor a stop."""
        is_of_user = isinstance(error, Exception) and not isinstance(error, TrainError)
        return self._digests is None and self._batch is not None and is_of_user

    def _begin(self, trainer: Trainer) -> StepRow:
        progress = trainer.progress
        values = {} if self._digests is None else _state(self._digests, trainer)
        return StepRow(
            progress.step + 1, progress.samples, epoch=progress.epoch, batch_idx=progress.batch, values=values
        )

    def _end(self, trainer: Trainer, row: StepRow) -> None:
        self._made[row.step] = merge_ranks(trainer.strategy.group.gather(row))

    def _look(self, name: str, module: nn.Module, inputs: Any, outputs: Any) -> None:
        # Returns nothing: a value would replace the outputs.
        if self._digests is not None:
            digests = [str(self._digests.digest(value)) for value in tensors_of(outputs)]
            self._add(Stage.outputs, [(name, " ".join(digests))])
        self._note_not_finite("activation of", ((name, value) for value in tensors_of(outputs)))

    def _note_not_finite(self, kind: str, tensors: Iterable[tuple[str, Any]]) -> None:
        """Note the first tensor that is not finite, unless one was found before."""
        if self._row is None or self._row.not_finite is not None:
            return
        for name, value in tensors:
            values = local_of(value).detach()
            if values.is_floating_point() and not bool(torch.isfinite(values).all()):
                self._row.not_finite = f"{kind} {name}"
                return

    def _note_gradients(self, stage: Stage, model: nn.Module, optimizer: Optimizer) -> None:
        if self._digests is not None and self._row is not None:
            # From the loss backwards, as they are computed.
            for name, gradient in reversed(_list_gradients(model, optimizer)):
                self._add(stage, [(name, str(self._digests.digest(gradient)))])

    def _note(self, stage: Stage, name: str, value: Any) -> None:
        if self._digests is not None and self._row is not None:
            self._add(stage, self._digests.tree(value, name))

    def _add(self, stage: Stage, leaves: Iterable[tuple[str, str]]) -> None:
        """Add digests; those of a second batch, or a second call of a module, under names of their own."""
        assert self._row is not None
        values = self._row.values.setdefault(stage, {})
        for name, digest in leaves:
            free, count = name, 1
            while free in values:
                count += 1
                free = f"{name} (call {count})"
            values[free] = digest


def _list_gradients(model: nn.Module, optimizer: Optimizer) -> list[tuple[str, Tensor | None]]:
    """The gradient of each parameter of an optimizer, by its name, in the order of the model."""
    stepped = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    return [(name, parameter.grad) for parameter, name in name_parameters(model).items() if parameter in stepped]


def _digest_rows(digests: Digests, batch: Any, size: int) -> Iterator[tuple[str, list[str]]]:
    """The digest of each sample in each leaf of a batch; of a leaf that is not divided by samples, one for all."""
    for name, leaf in walk(batch, "batch", _is_list_of_samples):
        if isinstance(leaf, list | tuple) or (isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == size):
            yield name, [digests.digest(row) or digests.whole(row) for row in leaf]
        else:
            yield name, [digests.whole(leaf)] * size


def _is_list_of_samples(value: Any) -> bool:
    return isinstance(value, list | tuple) and not any(isinstance(entry, Tensor | Mapping) for entry in value)


def _state(digests: Digests, trainer: Trainer) -> dict[str, dict[str, str]]:
    """Digests of what a step begins with, by stage."""
    stages: dict[str, dict[str, str]] = {}
    parameters = {name for name, _ in unwrap(trainer.model).named_parameters(remove_duplicate=False)}
    for name, digest in digests.of_state(trainer):
        if name.partition(".")[0] not in NOT_COMPARED and not is_clocked(name):
            stages.setdefault(_choose_stage(name, parameters), {})[name.removeprefix("model.")] = digest
    return stages


def _choose_stage(name: str, parameters: set[str]) -> Stage:
    section, _, rest = name.partition(".")
    if section == "random":
        return Stage.random
    if section == "model":
        return Stage.weights if rest in parameters else Stage.buffers
    if section in _OPTIMIZERS:
        return Stage.settings if ".groups[" in name else Stage.optimizer
    return Stage.callbacks if section == "callbacks" else Stage.other


def merge_ranks(ranks: Sequence[StepRow]) -> StepRow:
    """The rows of all ranks as one: batches and samples by rank, and of values what differs from rank 0 by its name."""
    merged = replace(
        ranks[0],
        ranks=len(ranks),
        batches=list(chain(*zip(*(row.batches for row in ranks), strict=True))),
        # The first rank that met one: the same step may be finite on others.
        not_finite=next(filter(None, (row.not_finite for row in ranks)), None),
    )
    for rank, row in enumerate(ranks[1:], 1):
        for leaf, rows in row.rows.items():
            merged.rows.setdefault(leaf, []).extend(rows)
        for stage, values in row.values.items():
            first = merged.values.setdefault(stage, {})
            first.update({f"{name}{OF_RANK}{rank})": text for name, text in values.items() if first.get(name) != text})
    return merged
