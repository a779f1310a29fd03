"""The trainer: model, optimizer, callbacks and loggers in one object: fit, validate, save and load."""

from __future__ import annotations

import copy
import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from trainer_cli.checkpoint import model_state
from trainer_cli.checkpoint.checkpointer import CheckpointMetadata, make_sync_checkpointer
from trainer_cli.checkpoint.find import expanded
from trainer_cli.checkpoint.foreign.kind import kind_of, refuse_foreign
from trainer_cli.checkpoint.group_verify import verify_share
from trainer_cli.checkpoint.model_state import evaluated_average
from trainer_cli.core.field_rules import checked_values
from trainer_cli.core.load_options import WEIGHTS, WHOLE, LoadOptions
from trainer_cli.core.policy import Occasion
from trainer_cli.core.progress import Progress
from trainer_cli.core.schema import ModelCall, SchedulerInterval, TrainConfig
from trainer_cli.core.stopping import Stop
from trainer_cli.core.url_path import as_path, local_path
from trainer_cli.data.adapt import as_loader, is_loader
from trainer_cli.errors import UserError
from trainer_cli.loggers.base import Logger, Now, RunFacts
from trainer_cli.parallel.same import check_same
from trainer_cli.parallel.strategy import Single, Strategy
from trainer_cli.parallel.torch_compat import leave_compiler_out, step_lightly
from trainer_cli.trainer.evaluate import Evaluation, evaluate_checkpoint, sanity_check
from trainer_cli.trainer.finite import check_end
from trainer_cli.trainer.hooks import Callback, CheckpointSaver, Hooks, global_callbacks, second_to
from trainer_cli.trainer.lengths import Requests
from trainer_cli.trainer.messages import Logging
from trainer_cli.trainer.metric_logger import EVALUATING, SAVING, MetricLogger, Recording
from trainer_cli.trainer.metrics import SampleCheck
from trainer_cli.trainer.optimizer_modes import OptimizerModes
from trainer_cli.trainer.optimizers import make_optimizers
from trainer_cli.trainer.precision import LossScaler, Precision
from trainer_cli.trainer.prefetch import close_at_the_end
from trainer_cli.trainer.schedulers import Schedulers, name_schedulers
from trainer_cli.trainer.setup import (
    add_by_class,
    be_deterministic,
    compile_model,
    leave_out_frozen,
    made,
    named,
    pick_device,
    refuse_lazy,
    reset,
    seed_everything,
    seed_rank,
    settings_of,
    typed,
    warn_if_never_seeded,
)
from trainer_cli.trainer.setup import freeze as freeze_parameters
from trainer_cli.trainer.state import capture, load_all, load_weights, read_state
from trainer_cli.trainer.train_step import TrainStep
from trainer_cli.trainer.training_loop import TrainingLoop
from trainer_cli.trainer.validation_loop import ValidationLoop

Factory = Callable[..., Any]
C = TypeVar("C", bound=Callback)
P = TypeVar("P")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FitResult:
    """How a fit ended."""

    finished: bool
    reason: str
    step: int
    metrics: dict[str, float]
    """The last record; of a finished run that was resumed, those of its last checkpoint."""


def _part(slot: str, value: Any, kind: type[P]) -> P:
    """A part of the trainer; one with its defaults, if none is given."""
    part: P = kind() if value is None else typed(slot, value, kind)
    return part


def _with_sparsity(
    callbacks: dict[str, Callback], sparsity: Callback | Callable[[], Callback] | None
) -> dict[str, Callback]:
    if sparsity is None:
        return callbacks
    if "sparsity" in callbacks:
        raise UserError("two callbacks are called 'sparsity'", cure="Give it once, as sparsity=.")
    return {"sparsity": typed("sparsity", made(sparsity, Callback), Callback), **callbacks}


def _checked_saver(checkpoint: CheckpointSaver | None, callbacks: Mapping[str, Callback]) -> CheckpointSaver | None:
    if checkpoint is not None:
        if "checkpoint" in callbacks:
            raise UserError("two callbacks are called 'checkpoint'", cure="Give it once, as checkpoint=.")
        typed("checkpoint", typed("checkpoint", checkpoint, Callback), CheckpointSaver)
    for name, one in callbacks.items():
        if isinstance(one, CheckpointSaver):
            # It would save, and nothing of that would be resumed.
            raise UserError(
                f"callbacks holds a {type(one).__name__}, as {name!r}",
                cure="One saves: give it as checkpoint=, or in YAML under the name callbacks.checkpoint.",
            )
    return checkpoint


class Unset:
    """The default of `ckpt_path`: the newest checkpoint of this run, if there is one, or else the present weights."""


UNSET = Unset()


class Trainer(Recording, Requests):
    """Trains a model and evaluates it.

    Args:
        model: a module, or a class or function without arguments that makes one. Its forward takes a batch and
            returns a loss, `(loss, outputs)`, or a mapping with `loss`; every other scalar of a mapping is a metric.
        optimizer: an optimizer over the model's parameters, a function `model -> optimizer`, or a mapping of names
            to either. None: the trainer can only validate.
        schedulers: a schedule, a function `optimizer -> schedule`, or a list or mapping by name of either; each
            steps at the interval of its kind, or of `Scheduled(schedule, interval)`. The name is the key of its saved
            state. For several optimizers, a function that is called for each, or a mapping of their names to what one
            optimizer may have.
        model_call: `batch`: the model is called as `model(batch)`; `args`: `model(*batch)`; `kwargs`: `model(**batch)`.
        freeze: globs of parameter names, or `re:` and a regular expression: these parameters are not trained, and no
            optimizer has them. Norms whose running statistics match stay in evaluation mode.
        compile: arguments of torch.compile for the model's forward, such as `{"mode": "max-autotune"}`; None: it is
            not compiled.
        step: forward, backward and optimizer steps of one batch; None: one loss, all optimizers stepped together.
        precision: number format, loss scaling and clipping.
        sparsity: which weights are held at zero, such as `trainer_cli.GMP(0.8)`, or a function without
            arguments that makes it; None: none. It is called before all callbacks.
        loop: lengths and intervals of the training; or a ValidationLoop, for a trainer that only validates.
        checkpoint: the CheckpointerCallback (or a subclass); it is called after all other callbacks.
        callbacks, loggers: sequences, or mappings by name. The name is the key of a callback's saved state.
        logging: what is printed, and how the console shows metrics.
        seed: seeds python, numpy and torch before a `model` that is a class or a function is called. A module that was
            made before has its weights already.
        deterministic: only deterministic kernels, for the whole process.
        device: `auto`, or a torch device's name.
        strategy: how many processes train the model; None: this one alone.
        run_dir, name: where loggers write, and the run's name.
        config, hparams: for loggers: the run's config as YAML, and the values that tell it from other runs.
    """

    callbacks: dict[str, Callback]
    hooks: Hooks
    scaler: LossScaler | None = None
    loaded_from: Path | None = None
    """The checkpoint that the present state, or a part of it, was loaded from."""
    loaded_step = 0
    resumed = False
    """Whether the training goes on from an earlier step."""
    rng: dict[str, Any] | None = None
    """The random state of a loaded checkpoint, until it is restored."""
    stop_reason: str | None = None
    sanity_checking = False
    evaluating: ValidationLoop | None = None
    """The loop that evaluates, or has evaluated last."""
    _used = False
    """Whether it has begun to train, or a checkpoint was loaded."""
    _is_whole = False
    """Whether the record of the step that a fit began with had been written before."""
    _train_loader: Any = None
    _start_samples = 0

    def __init__(
        self,
        *,
        model: nn.Module | Callable[[], nn.Module],
        optimizer: torch.optim.Optimizer | Factory | Mapping[str, torch.optim.Optimizer | Factory] | None = None,
        schedulers: Any = None,
        model_call: str = ModelCall.batch,
        freeze: Sequence[str] = (),
        compile: Mapping[str, Any] | None = None,
        step: TrainStep | None = None,
        precision: Precision | None = None,
        sparsity: Callback | Callable[[], Callback] | None = None,
        loop: TrainingLoop | ValidationLoop | None = None,
        checkpoint: CheckpointSaver | None = None,
        callbacks: Mapping[str, Callback] | Sequence[Callback] = (),
        loggers: Mapping[str, Logger] | Sequence[Logger] = (),
        seed: int | None = None,
        deterministic: bool = False,
        device: str = "auto",
        strategy: Strategy | None = None,
        run_dir: str | Path | None = None,
        name: str = "default",
        logging: Logging | None = None,
        config: str = "",
        hparams: Mapping[str, bool | int | float | str] | None = None,
    ) -> None:
        values = {"name": name, "deterministic": deterministic, "model_call": model_call, "freeze": freeze}
        checked = checked_values(TrainConfig, values if seed is None else {**values, "seed": seed})
        self.model_call: ModelCall = checked["model_call"]
        self.seed: int | None = checked.get("seed")
        self.precision = _part("precision", precision, Precision)
        self._only_validates = isinstance(loop, ValidationLoop)
        self.loop = _part("loop", None if isinstance(loop, ValidationLoop) else loop, TrainingLoop)
        if isinstance(loop, ValidationLoop):
            self.loop.validation = loop
        self.step = _part("step", step, TrainStep)
        self._own_callbacks = _with_sparsity(named("callbacks", callbacks, Callback), sparsity)
        self.checkpoint = _checked_saver(checkpoint, self._own_callbacks)
        Recording.__init__(self, named("loggers", loggers, Logger))
        Requests.__init__(self, typed("strategy", Single() if strategy is None else strategy, Strategy))
        self._global_callbacks = global_callbacks()
        self._bind_callbacks()
        self.logging = _part("logging", logging, Logging)
        self.device = pick_device(device)
        self.run_dir = None if run_dir is None else local_path(run_dir, "run_dir")
        self.name = name
        self.config, self.hparams = config, dict(hparams or {})
        self._given_model, self._given_schedulers = model, schedulers
        self._run_id = uuid.uuid4().hex[:12]
        self.progress = Progress()
        self.schedulers = Schedulers()
        self.sample_check = SampleCheck()
        self.checkpointer = make_sync_checkpointer() if checkpoint is None else checkpoint.checkpointer
        if checkpoint is None:
            self.checkpointer.join(self.strategy.group)
        if checked["deterministic"]:
            be_deterministic()
        if self.seed is not None:
            if isinstance(model, nn.Module):
                warn_if_never_seeded()
            seed_everything(self.seed)
        self.hooks.call("pre_setup", self)
        self._make(optimizer, checked["freeze"], compile)
        self.hooks.call("setup", self)
        self.hooks.call("post_setup", self)
        self._first_states = {name: copy.deepcopy(call.state_dict()) for name, call in self.callbacks.items()}

    def _make(self, optimizer: Any, freeze: Sequence[str], compile: Mapping[str, Any] | None) -> None:
        """Make the model and the optimizers over its parameters."""
        given = optimizer.values() if isinstance(optimizer, Mapping) else (optimizer,)
        model = self._given_model
        if not isinstance(model, nn.Module) and any(isinstance(one, torch.optim.Optimizer) for one in given):
            raise UserError(
                "optimizer is an instance, but model is a function: the optimizer cannot hold its parameters",
                cure="Give the optimizer as a function `model -> optimizer`.",
            )
        own: nn.Module = typed("model", made(model, nn.Module), nn.Module)
        refuse_lazy(own)
        self._frozen_norms = freeze_parameters(own, freeze)
        self.model: nn.Module = self.strategy.place(own, self.device)
        if compile is None:
            leave_compiler_out()
        else:
            compile_model(self.model, compile)
        self.optimizers = make_optimizers(optimizer, self.model)
        if freeze:
            leave_out_frozen(self.optimizers.values())
        for one in self.optimizers.values():
            step_lightly(one)
        self.first_settings = {name: settings_of(one) for name, one in self.optimizers.items()}
        self.modes = OptimizerModes(self.optimizers.values())
        if self.optimizers:
            self.scaler = self.precision.scaler(self.device)
            name_schedulers(self._given_schedulers, self.optimizers)

    def fit(
        self,
        train_loader: Any,
        val_loader: Any = None,
        ckpt_path: str | Path | Unset | None = UNSET,
        *,
        load: LoadOptions = WHOLE,
        keep_settings: Sequence[str] = (),
    ) -> FitResult:
        """Train until the loop's end, or until `stop` is called.

        Args:
            train_loader: a Dataset, a DataLoader, or a loader of `trainer_cli.data`.
            val_loader: one of these, which is called `val`; a list of them, called `validate_0` and so on; or a mapping
                of names to them.
            ckpt_path: not given: resume the newest valid checkpoint of this run, else continue from the trainer's
                present state; None: start at step 0 with a new optimizer state, and with new weights if `model` was
                given as a function; a path: load this checkpoint, and no other.
            load: what to load from the checkpoint named; `LoadOptions(states=["model"])` loads the weights alone and
                starts at step 0. A checkpoint that is resumed because none was named is loaded whole.
            keep_settings: optimizer settings (such as `lr`, or `NAME.lr` of one of several) that stay as configured,
                not as in the checkpoint.

        Raises:
            UserError: no optimizer, an empty loader, a model or a loader that breaks its contract.
            CheckpointError: the checkpoint named is not valid, or does not fit.
            NotFiniteError: the loss, or the weights at the end, are not finite.
        """
        if not self.optimizers:
            raise UserError("this trainer has no optimizer, so it can only validate", cure="Give it an optimizer.")
        if self._only_validates:
            raise UserError("loop is a ValidationLoop, so this trainer can only validate", cure="Give a TrainingLoop.")
        self._join_global_callbacks()
        train = as_loader(train_loader, shuffle=True, **self._loader_settings)
        val = self._val_loaders(val_loader)
        self._train_loader = train
        if promise := getattr(train, "promise", None):
            log.info(promise)
        self._check_names(val)
        self.loop.evaluations.check(val)
        if ckpt_path is None and self._used:
            self._reset()
        self._used = self.fitting = True
        # Gradients that an interrupted fit left would be added to the first step's.
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()
        try:
            with ExitStack() as stack:
                stack.enter_context(self.logging.shown())
                for loader in (train, *val.values()):
                    if (close := getattr(loader, "close", None)) is not None:
                        stack.callback(close_at_the_end, close)
                self.hooks.call("on_enter_fit", self, stack, train, val, self.loop)
                self.modes.train()
                stack.callback(self.modes.eval)
                self._load_or_start(ckpt_path, load, keep_settings)
                self._start_samples = self.progress.samples
                # Callbacks that refuse to start do so here, before loggers are rewound.
                self.hooks.call("on_fit_start", self, train, val, self.loop)
                sanity_check(self, val)
                self.start_loggers()
                if self.rng is None and self.progress.step == 0:
                    seed_rank(self.seed or 0, self.strategy.group.data_rank)
                stop = self.loop.run(self, val)
                self.hooks.call_all("on_fit_end", self, self.loop)
        except BaseException as error:
            with ExitStack() as after:
                after.callback(self._close_after, error)
                with second_to(error):
                    self.hooks.call_all("on_fit_exception", self, error)
            raise
        finally:
            self.fitting = False
            self._clear_requests()
        # A resumed fit without a step is that of a finished run, whose end was logged before.
        self.close(writes_rest=not self._is_whole or self.step.step_idx >= 0)
        return FitResult(stop.finished, stop.reason, self.progress.step, self._last_metrics())

    def _last_metrics(self) -> dict[str, float]:
        """The last record of metrics; where a finished run was resumed and no step made, that of its checkpoint."""
        last: Mapping[str, float] = self.metric_logger.last
        if not last and self.resumed and self.loaded_from is not None and self.progress.step == self.loaded_step:
            last = self.checkpointer.metrics(self.loaded_from)
        return dict(last)

    def _load_or_start(
        self, ckpt_path: str | Path | Unset | None, load: LoadOptions, keep_settings: Sequence[str]
    ) -> None:
        """Bring model, optimizers, schedules and the loop to the step at which the training begins. As of `fit`."""
        group, loop, train = self.strategy.group, self.loop, self._train_loader
        if isinstance(ckpt_path, Unset):
            ckpt_path, load = self._newest_checkpoint(), WHOLE
        elif ckpt_path is not None:
            ckpt_path = self.checkpointer.locate(ckpt_path)
            refuse_foreign(ckpt_path, load.states)
        loop.agree_on_length(train, group)
        counts = self._progress_of(ckpt_path) if ckpt_path is not None and load.resumes else self.progress
        loop.prepare(self, train, counts)
        if ckpt_path is not None:
            self.load_checkpoint(ckpt_path, load, keep_settings)
            check_same(group, {"step": self.progress.step, "number of samples": self.progress.samples})
        else:
            self._make_schedulers()
            # An earlier fit of this trainer, or a loaded state: the records up to here stay.
            self.resumed = self.resumed or self.progress.step > 0
        epoch = self.progress.epoch
        loop.start_at(train, self.progress)
        if self.progress.epoch != epoch:
            self.schedulers.step(self, SchedulerInterval.epoch)

    def _newest_checkpoint(self) -> Path | None:
        """The newest valid checkpoint of this run; None if there is none, or nothing that saves."""
        if self.checkpoint is None:
            return None
        group = self.strategy.group
        newest: Path | None = group.on_main(self.checkpoint.newest, partial(verify_share, group))
        return newest

    def validate(
        self,
        val_loader: Any,
        ckpt_path: str | Path | Unset | None = UNSET,
        *,
        loop: ValidationLoop | None = None,
        load: LoadOptions = WEIGHTS,
    ) -> dict[str, dict[str, float]]:
        """Evaluate on each loader: loader -> metrics.

        Args:
            ckpt_path: whose weights; not given: those of the trainer if it has trained or loaded something, else of
                the newest valid checkpoint of this run, if there is one; None: those of the trainer.
            loop: evaluates each loader; None: those of `TrainingLoop`.
        """
        paths = ckpt_path if isinstance(ckpt_path, Unset) else [ckpt_path]
        rows = self.validate_all(val_loader, paths, loop=loop, load=load)
        return {row.loader: row.metrics for row in rows}

    def validate_all(
        self,
        val_loaders: Any,
        ckpt_paths: str | Path | Iterable[str | Path | None] | Unset = UNSET,
        *,
        loop: ValidationLoop | None = None,
        load: LoadOptions = WEIGHTS,
    ) -> list[Evaluation]:
        """Evaluate every checkpoint on every loader; each checkpoint is loaded once, over the whole model.

        Args:
            ckpt_paths: paths, and globs such as `runs/x/checkpoints/step*`, which are expanded before any work, in the
                order of steps; None: the present weights; not given: as of `validate`.
            loop: evaluates each loader; None: those of `TrainingLoop`.
            load: the rules for names; of the states the weights are loaded, and callbacks that evaluate.

        Raises:
            FileNotFoundError: a glob matches no checkpoint.
        """
        self._join_global_callbacks()
        with ExitStack() as stack:
            stack.callback(self._clear_requests)
            if not self.fitting:
                stack.enter_context(self._opened_loggers())
                stack.push(self._finalize)
            paths = self._paths_to_evaluate(ckpt_paths)
            loaders = self._val_loaders(val_loaders)
            load = replace(load, states=("model",))
            if loop is not None and typed("loop", loop, ValidationLoop).hook not in self.hooks.families:
                self.hooks = Hooks(self.callbacks, {*self.hooks.families, loop.hook})
            stack.enter_context(self.logging.shown())
            return [row for path in paths for row in evaluate_checkpoint(self, loaders, path, load, loop)]

    def _paths_to_evaluate(self, ckpt_paths: str | Path | Iterable[str | Path | None] | Unset) -> list[Path | None]:
        """The checkpoints that are named, globs expanded; None for the present weights."""
        if isinstance(ckpt_paths, Unset):
            newest = None if self._used else self._newest_checkpoint()
            if newest is not None:
                log.info("evaluating %s, the newest checkpoint of this run", newest)
            return [newest]
        patterns: Iterable[Any] = [ckpt_paths]
        if isinstance(ckpt_paths, Iterable) and not isinstance(ckpt_paths, str):
            patterns = ckpt_paths
        paths: list[Path | None] = []
        for pattern in patterns:
            paths += [None] if pattern is None else expanded(pattern)
        return paths

    def _finalize(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """Let callbacks clean up after an evaluation; a second error becomes a note of the first."""
        with ExitStack() as stack:
            if error is not None:
                stack.enter_context(second_to(error))
            self.hooks.call_all("finalize")

    def flush_record(self, *, wait: bool = True) -> dict[str, float]:
        """Pass the record of this step to every logger, and return its metrics. Without `wait`, one whose metrics are
        on a device is passed on later."""
        return self.metric_logger.flush(self.progress, self.epoch_reached(), wait=wait)

    def get_callbacks(self, kind: type[C]) -> dict[str, C]:
        """The callbacks of a class, or of subclasses, by name."""
        return {name: one for name, one in self.callbacks.items() if isinstance(one, kind)}

    def get_callback(self, kind: type[C]) -> C | None:
        """The first callback of a class; None if there is none."""
        return next(iter(self.get_callbacks(kind).values()), None)

    @property
    def is_log_step(self) -> bool:
        """Whether the training metrics of the step that is being made, or was made last, are logged. An interval in
        samples, tokens or time is known only at the end of the step."""
        return bool(self.loop.logs(self))

    @property
    def is_step_complete(self) -> bool:
        """At the end of a batch: whether it has completed an optimizer step; one of an accumulated step may not."""
        return bool(self.progress.step != self.step.step_idx)

    @property
    def is_first_iteration(self) -> bool:
        """Whether the step that is being made, or was made last, is the first of this fit."""
        return bool(self.loop.is_first(self))

    @property
    def is_final_iteration(self) -> bool:
        """Whether the training ends after the step that is being made, or was made last, as far as is known: at
        `max_duration` or `hard_stop` in steps or epochs, or because a stop was requested."""
        return bool(self.loop.is_final(self))

    def maybe_checkpoint(self, stop: Stop | None, *, over: bool = False) -> None:
        """Offer a save after a step: an ordinary one, the final one, or one that stops early. `over`: the stop came
        when no step was left.

        Raises:
            NotFiniteError: the training is at its end, and its weights are not finite.
        """
        if over or (stop is not None and stop.finished):
            check_end(self)
        early = Occasion.last_stop if over else Occasion.stop
        occasion = Occasion.step if stop is None else Occasion.final if stop.finished else early
        self.stop_reason = stop.reason if stop is not None else None
        self.loop.note_stop(self, stop)
        with self.metric_logger.pause(SAVING, self.progress):
            self.hooks.call("on_save_opportunity", self, occasion)

    def train_mode(self) -> None:
        """Put the model into train mode, but for frozen norms."""
        self.model.train()
        for norm in self._frozen_norms:
            norm.eval()

    def callback_steps(self) -> list[int]:
        """The next steps at which callbacks may save."""
        steps = (call(self) for call in self.hooks["next_step"])
        return [step for step in steps if step is not None]

    def checkpoint_state(self) -> dict[str, Any]:
        """The state that a resume needs, as one tree, with what hooks added. Of sharded tensors it has this rank's
        part."""
        growing = capture(self, self._train_loader)
        self.hooks.call("on_save_checkpoint", self, growing)
        state = dict(growing)
        self.hooks.call("postprocess_checkpoint", self, state)
        return state

    def save_checkpoint(self, path: str | Path) -> Path:
        """Save the present state as the checkpoint at `path`, durably; one that is there is replaced. Not for this
        run's own folder of checkpoints, where the CheckpointerCallback saves and removes.

        Raises:
            SaveError: nothing was committed; what was there before still is.
        """
        path = as_path(path)
        metadata = CheckpointMetadata(
            step=self.progress.step,
            epoch=self.progress.epoch,
            run_id=self._run_id,
            files=model_state.model_files(self.model),
            average=evaluated_average(self.callbacks),
            progress=self.progress.state_dict(),
        )
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        checkpointer = make_sync_checkpointer()
        checkpointer.join(self.strategy.group)
        checkpointer.save(self.checkpoint_state, path, metadata=metadata, trained=trained)
        return path

    def load_checkpoint(self, path: str | Path, load: LoadOptions = WHOLE, keep_settings: Sequence[str] = ()) -> None:
        """Load a checkpoint of this program or of another one. The RNG state is restored when training begins.

        Args:
            load: what to load, and under which names.
            keep_settings: optimizer settings (such as `lr`) that stay as they are configured now.
        """
        path = self.checkpointer.locate(path)
        self._make_schedulers()
        average = self._evaluated_average(path) if load.average and load.weights_alone else None
        state = self.read_checkpoint(path, load, *(["callbacks"] if average is not None else []))
        if load.weights_alone:
            load_weights(self, state, load, path, average)
        else:
            if load.takes("optimizer"):
                self.modes.train()
            load_all(self, self._train_loader, state, load, keep_settings, path)
        if load.whole:
            self.hooks.call("on_load_checkpoint", self, state)
        self.resumed = load.resumes

    def _bind_callbacks(self) -> None:
        """The trainer's own callbacks, the global ones, and the one that saves; the hooks of all."""
        self.callbacks = dict(self._own_callbacks)
        if self.checkpoint is not None:
            self.callbacks["checkpoint"] = self.checkpoint  # type: ignore[assignment]
        add_by_class(self.callbacks, [one for one in self._global_callbacks if one not in self.callbacks.values()])
        if self.checkpoint is not None:
            self.callbacks["checkpoint"] = self.callbacks.pop("checkpoint")
        self.hooks = Hooks(self.callbacks, families={"validate", *self.loop.evaluations.hooks()})

    def _join_global_callbacks(self) -> None:
        """Take over global callbacks that were added or removed since the last fit or evaluation."""
        before, now = self._global_callbacks, global_callbacks()
        if now == before:
            return
        self._global_callbacks = now
        self._bind_callbacks()
        for name, callback in self.callbacks.items():
            if callback in now and callback not in before:
                callback.setup(self)
                callback.post_setup(self)
                self._first_states[name] = copy.deepcopy(callback.state_dict())

    def _make_schedulers(self) -> None:
        """Make the schedules once: made over a trained optimizer, they would start from its present rates."""
        if not self.schedulers.live:
            self.schedulers = Schedulers(self._given_schedulers, self.optimizers)

    def _reset(self) -> None:
        """Undo the changes of an earlier fit. A model given as an instance keeps its weights."""
        if self.seed is not None:
            seed_everything(self.seed)
        if not isinstance(self._given_model, nn.Module):
            self.model.load_state_dict(made(self._given_model, nn.Module).state_dict())
        for name, optimizer in self.optimizers.items():
            reset(optimizer, self.first_settings[name])
        self.schedulers = Schedulers()
        self.scaler = self.precision.scaler(self.device)
        for name, state in self._first_states.items():
            if state and name in self.callbacks:
                self.callbacks[name].load_state_dict(copy.deepcopy(state))
        self.progress = Progress()
        self.metric_logger = MetricLogger(self.loggers)
        self.loop.reset()
        self.loaded_from, self.loaded_step, self.resumed, self.rng = None, 0, False, None

    def _progress_of(self, path: str | Path) -> Progress | None:
        """The progress of a checkpoint, if it has one."""
        return Progress.of(self.checkpointer.progress(path) or {})

    def _evaluated_average(self, path: Path) -> str | None:
        """Name of the callback whose average was evaluated in place of a checkpoint's weights, if there is one."""
        return None if kind_of(path) is not None else self.checkpointer.average(path)

    def read_checkpoint(self, path: Path, load: LoadOptions, *more: str) -> dict[str, Any]:
        """The state in a checkpoint, or what is to be loaded of it, as changed by hooks."""
        self._used = True
        self.hooks.call("on_before_load_checkpoint", self, path)
        state: dict[str, Any] = self.strategy.group.checked(
            lambda: read_state(self.checkpointer, path, load, *more, model=self.model), "while a checkpoint was read"
        )
        self.hooks.call("preprocess_checkpoint", self, state)
        self.loaded_from, self.loaded_step = path, int(state.get("progress", {}).get("step", 0))
        return state

    def restore_rng(self) -> None:
        """Restore the random state of the loaded checkpoint, last before the first step."""
        if self.rng is not None:
            model_state.restore_rng(self.rng)
            self.rng = None

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer (the first of several), or None."""
        return next(iter(self.optimizers.values()), None)

    @property
    def samples_this_time(self) -> int:
        """Samples trained on in this process."""
        return self.progress.samples - self._start_samples

    def close(self, *, writes_rest: bool = True) -> None:
        """Close all loggers and callbacks, also after an error in one.

        Args:
            writes_rest: write what was logged after the last record.
        """
        with ExitStack() as stack:
            # Last: a save in flight makes durable what was logged before it.
            stack.callback(self.metric_logger.close)
            stack.callback(self._write_rest if writes_rest else self.metric_logger.record.clear)
            stack.callback(self.hooks.call_all, "finalize")

    def _write_rest(self) -> None:
        """Pass on what was logged after the last record. What a step logged that failed is of that step."""
        if self.metric_logger.is_open:
            step = max(self.progress.step, self.step.step_idx + 1) if self.fitting else self.progress.step
            self.metric_logger.flush(replace(self.progress, step=step), self.epoch_reached())

    @contextmanager
    def _opened_loggers(self) -> Iterator[None]:
        """Outside of a fit: open the loggers for what is logged inside the block. What was logged before the first fit
        stays for it."""
        record = self.metric_logger.record
        before = {} if self.metric_logger.was_closed else dict(record)
        for name in before:
            del record[name]
        self.metric_logger.reopen(self._facts())
        try:
            yield
        finally:
            with ExitStack() as stack:
                stack.callback(record.update, before)
                stack.callback(self.metric_logger.close)
                stack.callback(self._write_rest)

    def _write_if_closed(self) -> None:
        if self.metric_logger.was_closed and not self.metric_logger.is_open and not self.fitting:
            with self._opened_loggers():
                pass

    def _close_after(self, error: BaseException) -> None:
        with second_to(error):
            self.close()

    def start_loggers(self) -> None:
        """Drop the records that are later than the present state, and open the loggers."""
        self._is_whole = self.resumed and self.loop.pending_eval_record is None
        keep = self.progress.step if self._is_whole else self.progress.step - 1
        tolerant = self.checkpoint is not None and self.checkpoint.tolerates_errors
        self.metric_logger.start(self._facts(), self.progress, keep=keep, tolerant=tolerant)

    def _facts(self) -> RunFacts:
        return RunFacts(
            run_dir=self.run_dir,
            name=self.name,
            total_steps=self.loop.last_step if self.fitting else None,
            start_step=self.progress.step,
            start_samples=self.progress.samples,
            console=self.logging.console,
            config=self.config,
            hparams=self.hparams,
            now=self._now,
        )

    def _now(self) -> Now:
        """What the training is at, for displays, which call this in threads of their own."""
        doing, loop = self.metric_logger.activity, self.evaluating
        if doing == EVALUATING and loop is not None:
            doing = f"{doing} {loop.name}, batch {loop.batch_idx + 1:,}"
        return Now(self.progress.step, self.progress.samples, doing, self.metric_logger.pauses)

    @staticmethod
    def _check_names(val_loaders: Mapping[str, Any]) -> None:
        if "train" in val_loaders:
            raise UserError(
                "a validation loader is called 'train', as the training's own metrics are", cure="Give it another name."
            )

    def _val_loaders(self, val_loader: Any) -> dict[str, Any]:
        if val_loader is None:
            return {}
        if isinstance(val_loader, list | tuple) and val_loader and all(map(is_loader, val_loader)):
            val_loader = {f"validate_{index}": one for index, one in enumerate(val_loader)}
        elif not isinstance(val_loader, Mapping):
            val_loader = {"val": val_loader}
        return {name: as_loader(loader, shuffle=False, **self._loader_settings) for name, loader in val_loader.items()}

    @property
    def _loader_settings(self) -> dict[str, Any]:
        group = self.strategy.group
        return {
            "seed": self.seed or 0,
            "pin_memory": self.device.type == "cuda",
            "rank": group.data_rank,
            "world_size": group.data_size,
        }

    def epoch_reached(self) -> float:
        """Epochs trained, with a fraction where the length of one is known."""
        per_epoch = self.loop.steps_per_epoch
        if per_epoch is None:
            return float(self.progress.epoch)
        return float(round((self.progress.step + self.loop.epoch_offset) / per_epoch, 4))
