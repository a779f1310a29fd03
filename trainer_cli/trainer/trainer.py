"""The trainer: model, optimizer, callbacks and loggers in one object: fit, validate, predict, save and load."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import cached_property, partial
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from trainer_cli.batches import SampleCheck
from trainer_cli.data import as_loader, as_val_loaders
from trainer_cli.errors import UserError
from trainer_cli.files import as_path
from trainer_cli.loads import WEIGHTS, WHOLE, LoadOptions
from trainer_cli.loggers import Logger
from trainer_cli.messages import Logging
from trainer_cli.optim import (
    Freezing,
    OptimizerModes,
    Patterns,
    Schedulers,
    TrainedParameters,
    make_optimizers,
    name_schedulers,
)
from trainer_cli.parallel import Agreement
from trainer_cli.policy import Stop
from trainer_cli.schema import CheckpointConfig, LoopConfig, ModelCall, PrecisionConfig, TrainConfig
from trainer_cli.signatures import check_type, checks_argument_names
from trainer_cli.state import find_none_buffers
from trainer_cli.steps import Progress
from trainer_cli.strategies import Single, Strategy
from trainer_cli.trainer import setup, state
from trainer_cli.trainer.callback_set import CallbackSet, load_first_state
from trainer_cli.trainer.ctrl_c import CTRL_C, CtrlC
from trainer_cli.trainer.evaluate import Evaluations, LoaderMetrics, evaluate_all, sanity_check
from trainer_cli.trainer.hooks import Callback, CheckpointSaver
from trainer_cli.trainer.loading import UNSET, Loading, Unset
from trainer_cli.trainer.metric_logger import MetricLogger
from trainer_cli.trainer.module_modes import ModuleModes
from trainer_cli.trainer.precision import LossScaler, Precision
from trainer_cli.trainer.prefetch import close_at_the_end
from trainer_cli.trainer.recording import Recording
from trainer_cli.trainer.requests import Requests
from trainer_cli.trainer.step_modules import adopt_modules
from trainer_cli.trainer.train_step import TrainStep
from trainer_cli.trainer.training_loop import FitResult, TrainingLoop
from trainer_cli.trainer.validation_loop import ValidationLoop
from trainer_cli.values import check_values

if TYPE_CHECKING:
    from trainer_cli.checkpoint import Checkpointer

Factory = Callable[..., Any]
OF_PARTS = {
    "lr": "It is an argument of the optimizer.",
    "weight_decay": "It is an argument of the optimizer.",
    "batch_size": "It is an argument of the loader: give a trainer_cli.Loader.",
    "num_workers": "It is an argument of the loader: give a trainer_cli.Loader.",
} | {
    field.name: f"Write Trainer({argument.format(f'{field.name}=…')})."
    for section, argument in (
        (Logging, "logging=Logging({})"),
        (CheckpointConfig, "checkpoint=CheckpointerCallback({})"),
        (PrecisionConfig, "precision=Precision({})"),
        (LoopConfig, "loop=TrainingLoop({})"),
    )
    for field in dataclasses.fields(section)
}
"""Arguments that people give a trainer or its methods -> how they are given."""
OF_FIT = {
    "train_loader": "Write trainer.fit(train_loader=…).",
    "val_loader": "Write trainer.fit(train_loader=…, val_loader=…).",
    "ckpt_path": "Write trainer.fit(train_loader=…, ckpt_path=…).",
}
C = TypeVar("C", bound=Callback)


def _refer_to_constructor(eval_steps: str = OF_PARTS["eval_steps"]) -> Callable[[], Mapping[str, str]]:
    """A function that returns, for arguments wrongly given to a method, how to give them: argument -> sentence.

    Args:
        eval_steps: the sentence for `eval_steps`, which some methods take in another way.
    """
    # A function, because `Trainer` is not defined yet.
    return lambda: {
        **OF_PARTS,
        **{name: f"Write Trainer({name}=…)." for name in signature(Trainer).parameters},
        "eval_steps": eval_steps,
    }


class Trainer:
    """Trains a model and evaluates it. The module `trainer_cli.trainer.hooks` lists what callbacks may read of it.

    Args:
        model: a module, or a class or function without arguments that makes one. Its forward takes a batch and
            returns a loss, `(loss, outputs)`, or a mapping with `loss`; every other scalar of a mapping is a metric.
        optimizer: an optimizer over the model's parameters, a function `model -> optimizer`, or a mapping of names
            to either. None: the trainer can only validate.
        schedulers: a schedule, a function `optimizer -> schedule`, or a list or mapping by name of either; each
            steps at the interval of its kind, or of `Scheduled(schedule, interval)`. The name is the key of its saved
            state. For several optimizers, a function that is called for each, or a mapping of their names to what one
            optimizer may have. `scheduler_factory(WarmupCosine, loop, warmup="1ep")` makes a function that knows the
            length of the run.
        model_call: `batch`: the model is called as `model(batch)`; `args`: `model(*batch)`; `kwargs`: `model(**batch)`.
        freeze: globs of parameter names, or `re:` and a regular expression: these parameters are not trained, and no
            optimizer has them. Norms whose running statistics match stay in evaluation mode. A mapping of them to
            durations, such as `{"backbone.*": "3ep"}`: frozen until these have passed.
        eval_modules: globs of module names, or `re:` and a regular expression: these modules, with those inside them,
            stay in evaluation mode while the model is trained. All others are put into training mode by `model.train()`
            before the first step and after each evaluation.
        compile: arguments of torch.compile for the model's forward, such as `{"mode": "max-autotune"}`; None: it is
            not compiled.
        step: forward, backward and optimizer steps of one batch; None: one loss, all optimizers stepped together. What
            it holds of modules and parameters is a part of the model, under the name `train_step`.
        precision: number format, loss scaling and clipping.
        sparsity: which weights are held at zero, such as `trainer_cli.GMP(0.8)`, or a function without
            arguments that makes it; None: none. It is called before all callbacks.
        loop: lengths and intervals of the training; or a ValidationLoop, for a trainer that only validates.
        checkpoint: the CheckpointerCallback (or a subclass); it is called after all other callbacks.
        callbacks, loggers: sequences, or mappings by name. The name is the key of a callback's saved state.
        logging: what is printed, and how metrics are shown while the trainer works: by default a bar and a table on a
            terminal and in a notebook, and nothing elsewhere; `Logging(console="off")`, or `{"console": None}` among
            the loggers, shows none.
        seed: seeds python, numpy and torch before a `model` that is a class or a function is called. A module that was
            made before has its weights already. What other code draws outside of a fit changes no fit.
        deterministic: only deterministic kernels, for the whole process.
        device: `auto`, or a torch device's name.
        strategy: how many processes train the model; None: this one alone.
        run_dir, name: where loggers write, and the run's name.
        config, hparams: for loggers: the run's config as YAML, and the values that tell it from other runs.
    """

    scaler: LossScaler | None = None
    stop_reason: str | None = None
    sanity_checking = False
    fitting = False
    """Whether a fit is in progress."""
    evaluating: ValidationLoop | None = None
    """The loop that evaluates, or has evaluated last."""
    _train_loader: Any = None
    _val_loaders: Mapping[str, Any] | None = None
    """Of the last fit."""

    @checks_argument_names("Trainer", lambda: OF_PARTS | OF_FIT)
    def __init__(
        self,
        *,
        model: nn.Module | Callable[[], nn.Module],
        optimizer: torch.optim.Optimizer | Factory | Mapping[str, torch.optim.Optimizer | Factory] | None = None,
        schedulers: Any = None,
        model_call: str = ModelCall.batch,
        freeze: Patterns | None = None,
        eval_modules: Sequence[str] = (),
        compile: Mapping[str, Any] | None = None,
        step: TrainStep | None = None,
        precision: Precision | None = None,
        sparsity: Callback | Callable[[], Callback] | None = None,
        loop: TrainingLoop | ValidationLoop | None = None,
        checkpoint: CheckpointSaver | None = None,
        callbacks: Mapping[str, Callback] | Sequence[Callback] = (),
        loggers: Mapping[str, Logger | None] | Sequence[Logger] = (),
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
        values |= {"eval_modules": eval_modules} if seed is None else {"eval_modules": eval_modules, "seed": seed}
        checked = check_values(TrainConfig, values)
        self.model_call: ModelCall = checked["model_call"]
        self.seed: int | None = checked.get("seed")
        self.precision = setup.make_default("precision", precision, Precision)
        self._only_validates = isinstance(loop, ValidationLoop)
        self.loop = setup.make_default("loop", None if isinstance(loop, ValidationLoop) else loop, TrainingLoop)
        if isinstance(loop, ValidationLoop):
            self.loop.validation = loop
        self.checkpoint, self.step = checkpoint, setup.make_default("step", step, TrainStep)
        self._callback_set = CallbackSet(callbacks, sparsity, checkpoint, self.loop, self.step, self.precision)
        # Attributes rather than properties: the loop reads them at every event.
        self.callbacks, self.hooks = self._callback_set.callbacks, self._callback_set.hooks
        self.strategy: Strategy = check_type("strategy", Single() if strategy is None else strategy, Strategy)
        group = self.strategy.group
        self.logging = setup.make_default("logging", logging, Logging)
        self.loggers: dict[str, Logger] = setup.name_loggers(loggers, self.logging.console, is_main=group.is_main)
        self.recording = Recording(self, self.loggers)
        self.agreement = Agreement(group) if self.strategy.world_size > 1 else None
        """What the ranks exchange at each step; None for one process."""
        self.requests = Requests(
            group, self.agreement, checkpoint, may_hold=self.loop.settings.min_duration is not None
        )
        self.loading, self.device = Loading(self), setup.pick_device(device)
        self.run_dir = None if run_dir is None else as_path(run_dir, "run_dir", local=True)
        self.name, self.config, self.hparams = name, config, setup.check_logged(config, hparams)
        self._model_source, self._scheduler_source, self._fitted_loop = model, schedulers, self.loop
        self.progress, self.schedulers, self.sample_check = Progress(), Schedulers(), SampleCheck()
        if checked["deterministic"]:
            setup.use_deterministic_kernels()
        setup.warn_of_earlier_weights(self.seed, model)
        setup.seed_everything(self.seed)
        # Before the model is made: a callback may change what it is made of.
        self.hooks.call("pre_setup", self)
        self._make(optimizer, checked["freeze"], checked["eval_modules"], compile)
        self.hooks.call("setup", self)
        self.hooks.call("post_setup", self)
        self.trained = TrainedParameters(self.model, self.freezing)
        self._callback_set.keep_first_states(self.callbacks)
        self._callback_set.keep_first_state(self.step)
        self.loading.keep_generators()

    def _make(
        self, optimizer: Any, freeze: Patterns | None, eval_modules: Sequence[str], compile: Mapping[str, Any] | None
    ) -> None:
        """Make the model and the optimizers over its parameters."""
        # Again: a callback may have drawn numbers in `pre_setup`, and `_reset` must make the same model.
        setup.seed_everything(self.seed)
        model = setup.make_model(self._model_source, optimizer)
        adopt_modules(model, self.step)
        self.first_none = find_none_buffers(model)
        """The buffers that the model creates later."""
        self.freezing = Freezing(model, freeze)
        self.module_modes = ModuleModes(model, eval_modules)
        self.model: nn.Module = self.strategy.place(model, self.device)
        setup.compile_model(self.model, compile)
        # After `place`: a strategy may replace parameters by shards of them.
        self.optimizers = make_optimizers(optimizer, self.model)
        setup.prepare_optimizers(self.optimizers.values(), drops_frozen=self.freezing.is_permanent)
        self.freezing.check_optimizers(self.model, self.optimizers)
        self.first_settings = {name: setup.settings_of(optimizer) for name, optimizer in self.optimizers.items()}
        self.modes = OptimizerModes(self.optimizers.values())
        if self.optimizers:
            self.scaler = self.precision.scaler(self.device)
            name_schedulers(self._scheduler_source, self.optimizers)

    @checks_argument_names("Trainer.fit", _refer_to_constructor())
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
            keep_settings: optimizer settings (such as `lr`, or `NAME.lr` of a named optimizer) that stay as configured,
                not as in the checkpoint.

        Raises:
            UserError: no optimizer, an empty loader, a model or a loader that breaks its contract.
            CheckpointError: the checkpoint named is not valid, or does not fit.
            NotFiniteError: the loss, or the weights at the end, are not finite.
            KeyboardInterrupt: after the first Ctrl-C, with a `checkpoint` once the step is made and saved.
        """
        check_type("load", load, LoadOptions)
        setup.check_texts("keep_settings", keep_settings)
        if not self.optimizers:
            raise UserError("this trainer has no optimizer, so it can only validate", cure="Give it an optimizer.")
        if self._only_validates:
            raise UserError("loop is a ValidationLoop, so this trainer can only validate", cure="Give a TrainingLoop.")
        self._join_global_callbacks()
        self._callback_set.check_owned(self.step)
        settings = setup.loader_settings(self.seed, self.device, self.strategy.group)
        self._train_loader = train = as_loader(train_loader, shuffle=True, **settings)
        self._val_loaders = val = as_val_loaders(val_loader, **settings)
        setup.check_data(train, val)
        self.loop.evaluations.check(val)
        self._prepare_loop(anew=ckpt_path is None)
        self.loading.is_untouched, self.fitting, self.recording.loaders = False, True, tuple(val)
        ctrl_c = CtrlC(partial(self.stop, CTRL_C, finished=False))
        try:
            with ExitStack() as stack:
                if self.checkpoint is not None:
                    stack.enter_context(ctrl_c)
                stack.enter_context(self.logging.shown())
                for loader in (train, *val.values()):
                    if (close := getattr(loader, "close", None)) is not None:
                        stack.callback(close_at_the_end, close)
                self.hooks.call("on_enter_fit", self, stack, train, val, self.loop)
                self.modes.train()
                # On the way out: whoever evaluates or saves the model next finds the weights to evaluate.
                stack.callback(self.modes.eval)
                self.loading.load_or_start(ckpt_path, load, keep_settings, train)
                if self.progress.step > 0:
                    self.trained.keep()
                # Callbacks that refuse to start do so here, before loggers are rewound.
                self.hooks.call("on_fit_start", self, train, val, self.loop)
                setup.warn_of_narrow_weights(self.model)
                sanity_check(self, val)
                self.recording.start()
                # A resume restores the generators of each rank instead.
                if self.loading.rng is None and self.progress.step == 0:
                    setup.seed_rank(self.seed or 0, self.strategy.group.data_rank)
                stop = self.loop.run(self, val)
                self.hooks.call_all("on_fit_end", self, self.loop)
        except BaseException as error:
            self.recording.end_failed_fit(error)
            raise
        finally:
            self.fitting = False
            # Also after an error: a stop was for this fit, and must not end the next one.
            self.requests.clear()
        # A resumed fit without a step is that of a finished run, whose end was logged before.
        writes_rest = not self.recording.first_step_recorded or self.step.step_idx >= 0
        self.recording.end_fit(stop.status, writes_rest=writes_rest)
        # On every rank, whichever one it reached: the others would go on alone.
        if ctrl_c.came or stop.reason == CTRL_C:
            raise KeyboardInterrupt(f"stopped at step {self.progress.step}")
        return FitResult(
            stop.finished, stop.reason, self.progress.step, self.loading.last_metrics(), stop.by, stop.comes_again
        )

    def _prepare_loop(self, *, anew: bool) -> None:
        """Give the loop the state that this fit begins with, and drop the gradients of an earlier one."""
        # None asks for a training from the beginning; a trainer as it was made is at one.
        if self.loading.is_untouched:
            # An earlier trainer may have had the same loop.
            self.loop.reset()
        elif anew:
            self._reset()
        elif self.loop is not self._fitted_loop:
            self.loop.follow(self._fitted_loop)
        self._fitted_loop = self.loop
        self.loading.restore_generators()
        # Gradients that an interrupted fit left would be added to the first step's.
        for optimizer in self.optimizers.values():
            optimizer.zero_grad()

    @checks_argument_names(
        "Trainer.validate",
        _refer_to_constructor("Write trainer.validate(val_loader=…, loop=ValidationLoop(eval_steps=…))."),
    )
    def validate(
        self,
        val_loader: Any,
        ckpt_path: str | Path | Unset | None = UNSET,
        *,
        loop: ValidationLoop | None = None,
        load: LoadOptions = WEIGHTS,
    ) -> LoaderMetrics:
        """Evaluate on each loader: loader -> metrics.

        Args:
            ckpt_path: whose weights; not given: those of the trainer if it has trained or loaded something, else of
                the newest valid checkpoint of this run, if there is one; None: those of the trainer.
            loop: evaluates each loader; None: those of `TrainingLoop`.
        """
        paths = ckpt_path if isinstance(ckpt_path, Unset) else [ckpt_path]
        rows = self._evaluate_all(val_loader, paths, load, loop)
        return LoaderMetrics((row.loader, row.metrics) for row in rows)

    @checks_argument_names(
        "Trainer.validate_all",
        _refer_to_constructor("Write trainer.validate_all(val_loaders=…, loop=ValidationLoop(eval_steps=…))."),
    )
    def validate_all(
        self,
        val_loaders: Any = None,
        ckpt_paths: str | Path | Iterable[str | Path | None] | Unset = UNSET,
        *,
        loop: ValidationLoop | None = None,
        load: LoadOptions = WEIGHTS,
    ) -> Evaluations:
        """Evaluate every checkpoint on every loader; each checkpoint is loaded once, over the whole model.

        Args:
            val_loaders: as `val_loader` of `fit`; not given: those of the last fit, if it had any.
            ckpt_paths: paths, and globs such as `runs/x/checkpoints/step*`, which are expanded before any work, in the
                order of steps; None: the present weights; not given: every checkpoint of this run, or in a fit, and
                without one, the present weights.
            loop: evaluates each loader; None: those of `TrainingLoop`.
            load: the rules for names; of the states the weights are loaded, and callbacks that evaluate.

        Raises:
            NoCheckpointError: a glob matches no checkpoint.
        """
        has_loaders = val_loaders is not None or self._val_loaders is not None
        if not has_loaders and not self.hooks["run_validation"]:
            raise UserError("validate_all has no val_loaders, and this trainer was not fitted", cure="Give a loader.")
        val_loaders = (self._val_loaders or {}) if val_loaders is None else val_loaders
        return self._evaluate_all(val_loaders, ckpt_paths, load, loop, every=True)

    def _evaluate_all(
        self, val_loaders: Any, ckpt_paths: Any, load: LoadOptions, loop: ValidationLoop | None, *, every: bool = False
    ) -> Evaluations:
        """What `validate` and `validate_all` share; see `evaluate_all`."""
        check_type("load", load, LoadOptions)
        self._join_global_callbacks()
        return evaluate_all(self, val_loaders, ckpt_paths, load, loop, every=every)

    @checks_argument_names("Trainer.predict", _refer_to_constructor("Give a loader of fewer samples."))
    def predict(
        self,
        loader: Any,
        ckpt_path: str | Path | Unset | None = UNSET,
        *,
        outputs: str | Sequence[str] = (),
        load: LoadOptions = WEIGHTS,
    ) -> list[dict[str, Any]]:
        """The model's outputs for each sample, in the order of the loader: name -> value, tensors on the CPU.

        Several ranks divide the samples, and each rank returns the rows of all of them. Collective.

        Args:
            loader: a Dataset, a DataLoader, or a loader of `trainer_cli.data`. A dataset is not shuffled.
            ckpt_path: whose weights, as of `validate`.
            outputs: globs of the names of outputs; empty: all that have a value for each sample. If no output has
                one, a UserError says what the model returned.
        """
        check_type("load", load, LoadOptions)
        setup.check_texts("outputs", [outputs] if isinstance(outputs, str) else outputs)
        self._join_global_callbacks()
        # Not above: most trainers never predict.
        from trainer_cli.trainer.predict import predict_all

        return predict_all(self, loader, ckpt_path, outputs, load)

    def stop(self, reason: str, *, finished: bool = True, by: Callback | None = None) -> None:
        """Request an end after the current step.

        Args:
            finished: the run is finished, and stays so when it is started again, unless with a longer `max_duration`.
                Before `loop.min_duration` the request is held until then. False: the run ends with exit code 75, to
                be resumed.
            by: the callback that decided it. If its `end_rule` has changed, a run started again continues.
        """
        if by is not None:
            check_type("by", by, Callback, "Give the callback that decided it.")
        name = next((name for name, callback in self.callbacks.items() if callback is by), None)
        self.requests.stop(Stop(reason, finished, name, () if by is None else tuple(by.end_rule())))

    @cached_property
    def checkpointer(self) -> Checkpointer:
        """Reads checkpoints, and saves those of the run."""
        return self.loading.new_checkpointer() if self.checkpoint is None else self.checkpoint.checkpointer

    @property
    def stop_request(self) -> Stop | None:
        """The stop that is requested for the end of the current step."""
        return self.requests.stop_request

    def ask_for_save(self) -> None:
        """Request a save after the current step; from any thread."""
        self.requests.save()

    def ask_for_evaluation(self) -> None:
        """Request an evaluation after the current step; from any thread."""
        self.requests.evaluate()

    def ask_to_roll_back(self) -> None:
        """Request to go back, after the current step, to the newest checkpoint, and on with the data after this step.

        Those of stops are passed over. Without one whose weights are finite the training ends with a NotFiniteError.
        """
        self.requests.roll_back()

    def interrupt(self) -> None:
        """Let the loop handle requests after the current step, on every rank; from any thread."""
        self.requests.interrupt()

    @property
    def metric_logger(self) -> MetricLogger:
        """The record of the current step, the last record, and the rate of the training."""
        return self.recording.metric_logger

    def log_metrics(self, metrics: Mapping[str, float | Tensor] | None = None, **named: float | Tensor) -> None:
        """Add metrics to the record of the current step, from anywhere. Tensors on a device are read at the next log
        step, evaluation or save, so that no step waits for them. Inside a `name_scope` their names begin with it.
        """
        self.recording.log_metrics({**check_type("metrics", metrics or {}, Mapping), **named})

    def log_text(self, name: str, text: str) -> None:
        """Add a text, which may be Markdown, to the record of the current step."""
        self.recording.log_text(name, text)

    def log_image(self, name: str, image: Any) -> None:
        """Add an image of shape (height, width) or (channels, height, width); see `Recording.log_image`."""
        self.recording.log_image(name, image)

    def log_histogram(self, name: str, values: Any) -> None:
        """Add the distribution of the finite values to the record of the current step."""
        self.recording.log_histogram(name, values)

    def log_table(self, name: str, columns: Sequence[str], rows: Iterable[Sequence[Any]], matrix: bool = False) -> None:
        """Add a table to the record of the current step; `matrix`: of a label and numbers a row, shown in shades."""
        self.recording.log_table(name, columns, rows, matrix)

    def name_scope(self, name: str) -> AbstractContextManager[str]:
        """Put `name/` before the names of what is logged inside the block; see `Recording.name_scope`."""
        return self.recording.name_scope(name)

    @property
    def name_scope_path(self) -> str:
        """What names begin with now: each scope with a `/` after it; empty outside of any."""
        return self.recording.name_scope_path

    def get_callbacks(self, kind: type[C]) -> dict[str, C]:
        """The callbacks of a class, or of subclasses, by name."""
        return {name: callback for name, callback in self.callbacks.items() if isinstance(callback, kind)}

    def get_callback(self, kind: type[C]) -> C | None:
        """The first callback of a class, or None."""
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

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer, the first if there are many, or None."""
        return next(iter(self.optimizers.values()), None)

    @property
    def loaded_from(self) -> Path | None:
        """The checkpoint that the present state, or a part of it, was loaded from."""
        return self.loading.path

    @property
    def loaded_step(self) -> int:
        """The step of that checkpoint; 0 without one."""
        return self.loading.step

    @property
    def resumed(self) -> bool:
        """Whether the training continues from an earlier step."""
        return self.loading.resumed

    def train_mode(self) -> None:
        """Put the model into training mode, except for `eval_modules` and frozen norms."""
        self.model.train()
        self.module_modes.keep_evaluating()
        self.freezing.keep_norms(self.progress)

    def set_evaluating(self, loop: ValidationLoop) -> None:
        """Set the loop that evaluates, before it runs."""
        self.evaluating = loop

    def set_sanity_checking(self, active: bool) -> None:
        """Set whether the evaluations before the first step are in progress."""
        self.sanity_checking = active

    def set_scaler(self, scaler: LossScaler) -> None:
        """Scale losses, also where the precision needs no scale; for callbacks that skip steps by it."""
        self.scaler = scaler

    def note_stop(self, stop: Stop | None) -> None:
        """Set `stop_reason` before a save; None: the training continues."""
        self.stop_reason = None if stop is None else stop.reason

    # Saves call it by this name too: a subclass may add to what its checkpoints hold.
    checkpoint_state = state.checkpoint_state

    def save_checkpoint(self, path: str | Path | None = None) -> Path:
        """Save the present state durably, and return the checkpoint's path. Collective.

        Args:
            path: where, with the variables of `checkpoint.name` and `{rank}`; one that is there is replaced. Not in
                this run's own folder of checkpoints, where the CheckpointerCallback saves and removes. Not given:
                there, by it, under the name of the present step, and not over a checkpoint of this step; after a fit,
                not in one, where `ask_for_save` saves.

        Raises:
            SaveError: nothing was committed; what was there before still is.
        """
        self._callback_set.check_owned(self.step)
        return self.loading.save(path)

    def load_checkpoint(
        self, path: str | Path | Unset = UNSET, load: LoadOptions = WHOLE, keep_settings: Sequence[str] = ()
    ) -> None:
        """Load a checkpoint of this program or of another one. The RNG state is restored when training begins.

        Args:
            path: which; not given: the newest valid one of this run.
            load: what to load, and under which names.
            keep_settings: optimizer settings (such as `lr`) that stay as they are configured now.

        Raises:
            NoCheckpointError: no path was given, and this run has no valid checkpoint.
        """
        check_type("load", load, LoadOptions)
        setup.check_texts("keep_settings", keep_settings)
        path = self.loading.newest_or_refuse() if isinstance(path, Unset) else path
        self.loading.load(path, load, keep_settings, self._train_loader)

    def make_schedulers(self) -> None:
        """Make the schedules once: made over a trained optimizer, they would start from its present rates."""
        if not self.schedulers.live:
            self.schedulers = Schedulers(self._scheduler_source, self.optimizers)

    def _join_global_callbacks(self) -> None:
        """Adopt global callbacks that were added or removed since the last fit or evaluation."""
        added = self._callback_set.update()
        self.callbacks, self.hooks = self._callback_set.callbacks, self._callback_set.hooks
        self._callback_set.set_up(added, self)
        self._callback_set.check_owned()

    def _reset(self) -> None:
        """Undo the changes of an earlier fit. A model given as an instance, and modules of the step, keep weights."""
        setup.reset_model(self.model, self._model_source, self.seed)
        setup.reset_optimizers(self.optimizers, self.first_settings)
        self.progress, self.schedulers, self.scaler = Progress(), Schedulers(), self.precision.scaler(self.device)
        self._callback_set.load_first_states()
        load_first_state(self.step)
        self.recording.reset()
        self.loop.reset()
        self.module_modes.load_state_dict({})
        if not isinstance(self._model_source, nn.Module):
            self.trained.load_state_dict({})
        self.loading.clear()
