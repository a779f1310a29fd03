"""Averages of the weights that are evaluated in their place: exponential (EMA), or equal over the end (SWA)."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainer_cli.dtensor import local_of
from trainer_cli.errors import ConfigError
from trainer_cli.state import capture_model, clean_name, find_spectral_vectors, name_parameters, unwrap
from trainer_cli.steps import Duration
from trainer_cli.terminal import format_count
from trainer_cli.torch_compat import foreach_copy_, foreach_lerp_
from trainer_cli.trainer import Callback
from trainer_cli.values import check_whole

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from trainer_cli.trainer import Trainer, TrainingLoop

log = logging.getLogger(__name__)

_MOST_OF_FIRST = 0.1
"""Share of the first weights in the average at the end of a run, without a warning."""
# Changes of less than 1/256 of a weight would be rounded away in the average.
_HALF = (torch.float16, torch.bfloat16)


class EMA(Callback):
    """Keeps `average = decay * average + (1 - decay) * weights`, and evaluates the average in place of the weights.

    Every validation loader and every downstream evaluation sees the average; training never does. Averaged is every
    parameter that is trained (tied ones once), in 32 bits where it has 16. One that is unfrozen later joins before its
    first update, which is as if it had been averaged from the start; one that is frozen later stays in the average.
    Other parameters and buffers, such as the statistics of batch norm, are those of the model; the vectors of a
    spectral norm are computed for the average. The average is in every checkpoint, and `train validate` evaluates
    it too. A run that begins with weights of another (`ckpt=`) averages from those on. If there are many averages,
    the last in `callbacks` is evaluated; `train ckpt export --ema NAME` exports any.

    Args:
        decay: how much of the average stays at each update.
        every: optimizer steps from one update to the next, counted from the run's beginning.
        start: steps, or a duration in steps or epochs, at whose end the average begins as a copy of the weights;
            until then the weights themselves are evaluated.
    """

    evaluates = True

    def __init__(self, decay: float = 0.999, every: int = 1, start: int | str = 0) -> None:
        if not 0 <= decay < 1:
            raise ConfigError(f"decay is {decay}, but it must be at least 0 and less than 1", location="decay")
        check_whole("every", every, 1)
        self.decay, self.every = float(decay), every
        self.start = None if start == 0 else Duration.read("start", start)
        self._start_step = 0
        self._model: nn.Module | None = None
        self._first_trained: frozenset[str] = frozenset()
        """Clean names of the parameters that were trained when the trainer was made."""
        self._average: dict[str, Tensor] = {}
        """By clean name; empty until the average begins."""
        self._pairs: tuple[list[Tensor], list[Tensor]] = ([], [])
        """Averages, and the tensors of the model that they are of: this rank's parts, in the same order."""
        self._halves: tuple[list[Tensor], list[Tensor]] = ([], [])
        """The same for tensors of 16 bits, whose averages have 32."""
        self._not_averaged: dict[Optimizer, tuple[int, list[nn.Parameter]]] = {}
        """The number of groups of an optimizer, and its parameters that are not averaged yet."""

    def setup(self, trainer: Trainer) -> None:
        self._model = trainer.model

    def post_setup(self, trainer: Trainer) -> None:
        """Note which parameters are trained at first: each has an average."""
        named = name_parameters(trainer.model).items()
        self._first_trained = frozenset(name for parameter, name in named if parameter.requires_grad)

    def on_fit_start(
        self, trainer: Trainer, train_loader: Any, val_loaders: Mapping[str, Any], loop: TrainingLoop
    ) -> None:
        """Find the step at which the average begins, and begin at once if it is past."""
        steps = 0 if self.start is None else loop.require_steps(f"EMA: start is {self.start}", self.start)
        self._start_step = steps
        self._warn_if_long(trainer.progress.step, steps, loop.planned_steps)
        # Refuses one whose vectors cannot be computed.
        find_spectral_vectors(capture_model(trainer.model), computed=False)
        if not self._average and trainer.progress.step >= steps:
            self._begin()

    def _warn_if_long(self, step: int, start: int, planned: int | None) -> None:
        """Warn at the beginning of a run if the average would hold its first weights to the end."""
        # SWA has a decay of 0: all its weights count equally.
        if not self.decay or step or planned is None or planned <= start:
            return
        updates = planned // self.every - start // self.every
        share = self.decay**updates
        if share > _MOST_OF_FIRST:
            advice = "a smaller `every`"
            if updates:
                # Rounded down to its first digit that is not 9, or to one.
                decay = _MOST_OF_FIRST ** (1 / updates)
                unit = 10 ** math.ceil(-math.log10(1 - decay))
                advice = f"a smaller decay, such as {math.floor(decay * unit) / unit:g},"
            log.warning(
                "%d %% of the average of %s will be the first weights, after %s: %s averages the last ones",
                100 * share, type(self).__name__, format_count(updates, "update"), advice,
            )  # fmt: skip

    def on_before_optimizer_step(self, trainer: Trainer, model: nn.Module, optimizer: Optimizer) -> None:
        """Begin to average parameters that were unfrozen, before their first update."""
        if not self._average:
            return
        group_count, waiting = self._not_averaged.get(optimizer, (0, []))
        # A callback may add groups. Otherwise the list is looked up, because this is called at every step.
        if group_count != len(optimizer.param_groups):
            names = name_parameters(trainer.model)
            members = (parameter for group in optimizer.param_groups for parameter in group["params"])
            waiting = [member for member in members if member in names and names[member] not in self._average]
            self._not_averaged[optimizer] = len(optimizer.param_groups), waiting
        unfrozen = [parameter for parameter in waiting if parameter.requires_grad or parameter.grad is not None]
        if unfrozen:
            self._join(unfrozen)

    def on_train_step_end(self, trainer: Trainer, model: nn.Module, outputs: Any, batch: Any) -> None:
        """Update the average, or begin it, after an optimizer step."""
        step = trainer.progress.step
        if not trainer.is_step_complete:
            return
        if not self._average:
            if step >= self._start_step:
                self._begin()
        # By the run's step, not by a count of this process: a resume then updates at the same steps.
        elif step % self.every == 0:
            averages, parameters = self._pairs
            share = self._share()
            with torch.no_grad():
                if averages:
                    foreach_lerp_(averages, parameters, share)
                # The foreach kernels take no lists of two types.
                for average, parameter in zip(*self._halves, strict=True):
                    average.lerp_(parameter.float(), share)

    def _share(self) -> float:
        """The share of the weights in the next average."""
        return 1.0 - self.decay

    def on_enter_evaluation(self, trainer: Trainer, stack: ExitStack, val_loaders: Mapping[str, Any]) -> None:
        """Evaluate with the average, if it has begun."""
        if self._average:
            stack.enter_context(self._in_place_of_the_weights())

    def state_dict(self) -> dict[str, Any]:
        """The average by parameter name; none before it begins."""
        return {"average": dict(self._average)}

    def check_state(self, state: dict[str, Any]) -> Iterable[str]:
        """A line for each saved average that does not fit its parameter, and for each parameter without an average."""
        tensors = self._tensors()
        saved = {clean_name(name, tensors): value for name, value in (state.get("average") or {}).items()}
        buffers = self._buffer_names()
        for name, value in saved.items():
            if name in buffers:
                # Loaded with the model, after this check: it may be None yet, or of another shape.
                continue
            if name not in tensors:
                yield f"{name}: averaged in the checkpoint, but no parameter of this model"
            elif value.shape != tensors[name].shape:
                yield (
                    f"{name}: has shape {tuple(tensors[name].shape)} in this model, "
                    f"but {tuple(value.shape)} in the checkpoint"
                )
            elif value.dtype != _averaged(tensors[name].dtype):
                yield f"{name}: is {value.dtype} in the checkpoint, but {_averaged(tensors[name].dtype)} here"
        if saved:
            yield from (f"{name}: missing in the checkpoint" for name in sorted(self._first_trained - saved.keys()))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the average, after `check_state`, into new tensors."""
        tensors = self._tensors()
        saved = {clean_name(name, tensors): value for name, value in (state.get("average") or {}).items()}
        buffers = self._buffer_names()
        self._average = {}
        for name, value in saved.items():
            # A buffer that was None or had another shape at the save: `SWA._pair_up` begins its average anew. Earlier
            # versions averaged the vectors of spectral norms, too.
            if name in buffers and (name not in tensors or tensors[name].shape != value.shape):
                continue
            # Like the parameter, so that a sharded one has an average with the same shards.
            average = torch.empty_like(tensors[name], dtype=value.dtype, requires_grad=False)
            self._average[name] = average.copy_(value)
        self._pair_up()

    def _begin(self) -> None:
        """Begin the average with the present weights."""
        # Whether a parameter is trained is not its `requires_grad` at this moment: the step of a GAN switches it.
        self._average = {
            # A copy also where the type stays: the optimizer changes the parameter in place.
            name: value.detach().to(_averaged(value.dtype), copy=True)
            for name, value in self._tensors().items()
            if value.requires_grad or name in self._first_trained or not isinstance(value, nn.Parameter)
        }
        self._pair_up()

    def _join(self, parameters: Iterable[nn.Parameter]) -> None:
        """Begin to average parameters that are about to be updated for the first time: the average until now is their
        present value."""
        names = name_parameters(self._live_model())
        for parameter in parameters:
            self._average[names[parameter]] = parameter.detach().to(_averaged(parameter.dtype), copy=True)
        self._pair_up()

    def _pair_up(self) -> None:
        """List each average with its tensor, for the foreach kernels, which take tensors of one type."""
        tensors = self._tensors()
        self._pairs, self._halves, self._not_averaged = ([], []), ([], []), {}
        for name, average in self._average.items():
            averages, parameters = self._halves if tensors[name].dtype in _HALF else self._pairs
            # Of a sharded parameter this rank's part.
            averages.append(local_of(average))
            parameters.append(local_of(tensors[name]))

    def _live_model(self) -> nn.Module:
        """The model that is averaged."""
        assert self._model is not None, "a callback's setup comes first"
        return self._model

    def _tensors(self) -> dict[str, Tensor]:
        """The tensors that may be averaged, by clean name."""
        return {name: parameter for parameter, name in name_parameters(self._live_model()).items()}

    def _buffer_names(self) -> frozenset[str]:
        """Clean names of the buffers that may be averaged, also of those that are None now."""
        return frozenset()

    @contextmanager
    def _in_place_of_the_weights(self) -> Iterator[None]:
        """Put the average into the model's parameters inside the block; the weights are restored bit for bit."""
        averages = [*self._pairs[0], *self._halves[0]]
        parameters = [*self._pairs[1], *self._halves[1]]
        state = capture_model(self._live_model())
        # Also in evaluation mode a spectral norm is computed by its vectors, which are those of the trained weights.
        vectors = list(find_spectral_vectors(state, computed=False).values())
        # Copies, not swapped tensors: optimizers, strategies and a compiled forward hold the parameters themselves.
        with torch.no_grad():
            weights = [tensor.detach().clone() for tensor in (*parameters, *vectors)]
        try:
            with torch.no_grad():
                foreach_copy_(parameters, averages)
                for name, vector in find_spectral_vectors(state).items():
                    state[name].copy_(vector)
            yield
        finally:
            with torch.no_grad():
                foreach_copy_([*parameters, *vectors], weights)


def _averaged(dtype: torch.dtype) -> torch.dtype:
    """The type of the average of tensors of this type."""
    return torch.float32 if dtype in _HALF else dtype


class SWA(EMA):
    """Stochastic weight averaging (Izmailov et al., 2018, arXiv:1803.05407): the mean of the weights at `start`, and
    after each `every` from the run's beginning that follows. Everything else is as in `EMA`, but floating-point
    buffers, such as the statistics of batch norm, are averaged too, as by torch's `AveragedModel(use_buffers=True)`.
    For the constant rate of the paper use torch.optim.swa_utils.SWALR as the scheduler.

    Args:
        start: where the average begins; steps, or a duration in steps or epochs.
        every: how often weights are added; steps, or a duration in steps or epochs.
    """

    def __init__(self, start: int | str, every: int | str = "1ep") -> None:
        # The decay and the steps of EMA are not used: `_share` and `every` replace them.
        super().__init__(0.0, 1, start)
        self._interval = Duration.read("every", every)
        self._count = 1
        """Weights in the average."""

    def on_fit_start(
        self, trainer: Trainer, train_loader: Any, val_loaders: Mapping[str, Any], loop: TrainingLoop
    ) -> None:
        """Convert `every` to steps, then do what EMA does."""
        self.every = max(1, loop.require_steps(f"SWA: every is {self._interval}", self._interval))
        super().on_fit_start(trainer, train_loader, val_loaders, loop)

    def state_dict(self) -> dict[str, Any]:
        """The average by name, and the number of weights in it."""
        return {**super().state_dict(), "count": self._count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the average, and of how many weights it is."""
        super().load_state_dict(state)
        # EMA's checkpoints have no count; an average that begins counts 1.
        self._count = int(state.get("count", 1))

    def _share(self) -> float:
        """The share of one more weight: all count equally. Called once for each update."""
        self._count += 1
        return 1.0 / self._count

    def on_train_step_end(self, trainer: Trainer, model: nn.Module, outputs: Any, batch: Any) -> None:
        if self._average and trainer.is_step_complete and trainer.progress.step % self.every == 0:
            self._pair_up()
        super().on_train_step_end(trainer, model, outputs, batch)

    def on_enter_evaluation(self, trainer: Trainer, stack: ExitStack, val_loaders: Mapping[str, Any]) -> None:
        self._pair_up()
        super().on_enter_evaluation(trainer, stack, val_loaders)

    def _pair_up(self) -> None:
        """Pair averages and tensors, after the averages of buffers were made to fit these."""
        # A forward may create a buffer, replace it or change its shape: its average then begins anew.
        if self._average:
            tensors = self._tensors()
            for name in sorted(self._buffer_names()):
                buffer, average = tensors.get(name), self._average.get(name)
                if buffer is None:
                    self._average.pop(name, None)
                elif average is None or average.shape != buffer.shape:
                    self._average[name] = buffer.detach().to(_averaged(buffer.dtype), copy=True)
        super()._pair_up()

    def _buffer_names(self) -> frozenset[str]:
        """Clean names of all buffers. `named_buffers` would leave out those that are None."""
        return frozenset(
            clean_name(f"{prefix}.{buffer}" if prefix else buffer)
            for prefix, module in unwrap(self._live_model()).named_modules()
            for buffer in module._buffers.keys()  # noqa: SIM118
        )

    def _tensors(self) -> dict[str, Tensor]:
        """The parameters, and the floating-point buffers except for the vectors of spectral norms."""
        buffers = {clean_name(name): buffer for name, buffer in unwrap(self._live_model()).named_buffers()}
        tensors = {**super()._tensors(), **buffers}
        # A mean of unit vectors is no unit vector: `find_spectral_vectors` computes the vectors of the average.
        vectors = find_spectral_vectors(tensors, computed=False)
        return {
            name: value
            for name, value in tensors.items()
            if name not in buffers or (value.is_floating_point() and name not in vectors)
        }
