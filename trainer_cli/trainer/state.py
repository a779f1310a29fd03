"""The state of a training as one tree, and back: model, optimizer, schedules, counts, data, callbacks, RNG.

Loading has two phases: every part reports what does not fit, in one table; only if the table is empty is anything
loaded.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_cli.errors import TrainError, UnfitStateError, UserError
from trainer_cli.layout import MODEL_CONFIG_FILE
from trainer_cli.loads import LOG_MARKS, VERSIONS, LoadOptions, LoadReport, list_by_owner
from trainer_cli.optim import ONLY
from trainer_cli.outputs import WeightedMeans
from trainer_cli.state import (
    Fitting,
    capture_model,
    capture_optimizer,
    capture_rng,
    clean_name,
    find_evaluated_average,
    find_versions,
    fit_model,
    fit_optimizer,
    rng_kept,
    select_weights,
    unwrap,
)
from trainer_cli.steps import Progress
from trainer_cli.trainer.setup import seed_rank

if TYPE_CHECKING:
    from torch import nn

    from trainer_cli.checkpoint import CheckpointMetadata
    from trainer_cli.trainer.hooks import Callback
    from trainer_cli.trainer.trainer import Trainer


log = logging.getLogger(__name__)

_SETTINGS = "settings"
"""The key of the settings in a state."""

_MANY = "optimizers"
"""The key of the states of named optimizers; the state of a single optimizer is under `optimizer`."""
ADVICE = (
    "Resume with the config and the code of the checkpoint, begin another run with name=OTHER, or this one anew with "
    "resume=anew."
)
_ADVICE_IN_PYTHON = "Resume with the settings and the code of the checkpoint, or save into another folder."
_LOAD_LESS = "Load with the config and the code of the checkpoint, or less of it: load.states=[model]."


def _key_of(optimizer: str) -> str:
    """The key of an optimizer's state in the tree."""
    return ONLY if optimizer == ONLY else f"{_MANY}/{optimizer}"


class Tree(dict[str, Any]):
    """A state being assembled: an existing key must not be replaced."""

    def __setitem__(self, key: str, value: Any) -> None:
        if key in self:
            raise UserError(
                f"the state to be saved has a '{key}' already, and it would be replaced", cure="Choose another name."
            )
        super().__setitem__(key, value)

    def update(self, *entries: Any, **named_entries: Any) -> None:
        """Add entries, as `dict.update` does."""
        # dict.update does not call `__setitem__`.
        for key, value in dict(*entries, **named_entries).items():
            self[key] = value

    def __ior__(self, entries: Any) -> Tree:  # type: ignore[override,misc]
        self.update(entries)
        return self


def checkpoint_state(trainer: Trainer) -> dict[str, Any]:
    """The state that a resume needs, as one tree, with what hooks added. Of sharded tensors it has this rank's part."""
    tree = capture(trainer, with_data=trainer.loop.has_data)
    trainer.hooks.call("on_save_checkpoint", trainer, tree)
    # From here on keys may be replaced.
    state = dict(tree)
    trainer.hooks.call("postprocess_checkpoint", trainer, state)
    return state


def describe(trainer: Trainer) -> CheckpointMetadata:
    """The facts about the present step, for the manifest of a checkpoint."""
    from trainer_cli.checkpoint import CheckpointMetadata

    return CheckpointMetadata(
        step=trainer.progress.step,
        epoch=trainer.progress.epoch,
        progress=trainer.progress.state_dict(),
        world_size=trainer.strategy.world_size,
        average=find_evaluated_average(trainer.callbacks),
        files=model_files(trainer.model),
    )


def capture(trainer: Trainer, *, with_data: bool) -> Tree:
    """The state after the step just made, with or without the position in the data. Tensors in it are the live ones."""
    # Some optimizers train other weights than they evaluate: the checkpoint contains those to evaluate.
    weights = trainer.modes.evaluation_weights()
    state = Tree(
        model=_captured_model(trainer.model, weights),
        model_versions=find_versions(trainer.model),
        schedulers=trainer.schedulers.state_dict(),
        progress=trainer.progress.state_dict(),
        loop=trainer.loop.state_dict(),
        callbacks={name: saved for name, callback in trainer.callbacks.items() if (saved := callback.state_dict())},
        # Before the first step of a resume, and outside of a fit, the generators are not restored yet.
        rng=trainer.loading.kept_generators() or capture_rng(),
    )
    captured = {
        name: capture_optimizer(trainer.model, optimizer, weights, len(trainer.first_settings[name]))
        for name, optimizer in trainer.optimizers.items()
    }
    if ONLY in captured:
        state[ONLY] = captured[ONLY]
    elif captured:
        state[_MANY] = captured
    if step_state := trainer.step.state_dict():
        state["step"] = step_state
    if trainer.loop.microbatches is not None and trainer.loop.microbatches.is_auto:
        state["microbatch"] = trainer.loop.microbatches.size
    if trainer.scaler is not None:
        state["scaler"] = trainer.scaler.state_dict()
    if modes := trainer.module_modes.state_dict():
        state["modes"] = modes
    state["requires_grad"] = {"changed": trainer.trained.state_dict(), "continues": trainer.module_modes.continues}
    if with_data:
        state["data"] = trainer.loop.data_state(trainer)
    return state


def with_settings(trainer: Trainer, state: Mapping[str, Any]) -> dict[str, Any]:
    """A state to save, with the settings that affect the training: a resume reports a change of them."""
    # Not above: only what is saved needs it.
    from trainer_cli.keys import why_may_change

    settings = {key: value for key, value in _settings_of(trainer).items() if why_may_change(key) is None}
    return {_SETTINGS: settings, **state}


def _settings_of(trainer: Trainer) -> dict[str, str]:
    """The settings of loop, precision, batch size and scheduled rates: key of the config -> value."""
    values = {f"loop.{key}": value for key, value in asdict(trainer.loop.settings).items()}
    values |= {f"precision.{key}": value for key, value in asdict(trainer.precision.settings).items()}
    if trainer._train_loader is not None:
        batch_size = getattr(trainer._train_loader, "batch_size", None)
        values["data.batch_size"] = batch_size if isinstance(batch_size, int) else None
    for name, groups in trainer.first_settings.items():
        # The other settings of an optimizer come from the checkpoint.
        if trainer.schedulers.of(name):
            values[f"{_key_of(name)}.lr"] = groups[0].get("lr")
    return {key: str(value) for key, value in values.items()}


def _captured_model(model: nn.Module, weights: Mapping[nn.Parameter, Any]) -> dict[str, Any]:
    """The model's state with these weights in place of its parameters'."""
    state = capture_model(model)
    if weights:
        for name, parameter in unwrap(model).named_parameters(remove_duplicate=False):
            if parameter in weights:
                state[clean_name(name)] = weights[parameter]
    return state


def rank_state_of(state: Mapping[str, Any], trainer: Trainer) -> Mapping[str, Any]:
    """The part of a checkpoint's state that is for this rank.

    If another number of ranks has saved it, every rank takes the data position of rank 0, the sums of metrics are added
    up in rank 0, and a rank that the checkpoint does not have is seeded anew. The ranks of a tensor group share a part.
    """

    from trainer_cli.format import RANKS

    if RANKS not in state:
        return state
    rank, ranks = trainer.strategy.group.data_rank, state[RANKS]
    rank_state = {key: value for key, value in state.items() if key != RANKS}
    if 0 < rank < len(ranks):
        if "rng" in state:
            rank_state["rng"] = ranks[rank]["rng"]
    elif rank and "rng" in state:
        # Generators are restored only after all states are loaded, so seeding here must leave them as they are.
        with rng_kept():
            seed_rank(trainer.seed or 0, rank, int(state["progress"]["step"]))
            rank_state["rng"] = capture_rng()
    if "loop" in state and state["loop"]["meter"] is not None:
        meters = [saved["loop"]["meter"] for saved in ranks[1:] if saved["loop"]["meter"] is not None]
        # Empty on other ranks than 0: the means add up the sums of all ranks.
        merged = WeightedMeans.merge(state["loop"]["meter"], meters, empty=rank > 0)
        rank_state["loop"] = {**state["loop"], "meter": merged}
    return rank_state


def load_weights(
    trainer: Trainer, state: dict[str, Any], options: LoadOptions, path: Path, average: str | None = None
) -> None:
    """Load the model alone.

    Args:
        average: name of a callback in the state whose average takes the place of the weights.

    Raises:
        UserError: with a table of all that does not fit; the model is then untouched.
    """
    if average is not None:
        state["model"] = select_weights(state, str(path), average)
        log.info(
            "%s: the average of callback '%s', which was evaluated; load.average=false takes the trained weights",
            path,
            average,
        )
    fitting, report = _fit_model(trainer, state, options, cast=True)
    _load({"model": fitting}, path, report.advice)
    step = state.get("progress", {}).get("step")
    _log_weights(report, f"{path}{'' if step is None else f' step {step}'}")


def load_for_evaluation(trainer: Trainer, state: Mapping[str, Any], options: LoadOptions, path: Path) -> None:
    """Load the model, and the state of every callback that changes evaluations, if the checkpoint has callbacks.

    Without `options.average` such a callback gets no state: an average that has not begun changes no evaluation.
    """
    fitting, report = _fit_model(trainer, state, options, cast=True, reshape_buffers=True)
    fittings = {"model": fitting}
    saved = state.get("callbacks") if options.average else {}
    for name, callback in trainer.callbacks.items():
        if callback.evaluates and saved is not None:
            fittings[f"callbacks.{name}"] = _fit_callback(callback, saved.get(name, {}))
        elif callback.evaluates:
            log.warning("%s has no state of callback '%s': its weights are evaluated", path, name)
    _load(fittings, path, report.advice)
    if report.lines:
        _log_weights(report, str(path))


def load_all(
    trainer: Trainer,
    train_loader: Any,
    state: Mapping[str, Any],
    options: LoadOptions,
    keep_settings: Sequence[str],
    path: Path,
) -> None:
    """Load all states, or those that `options` name; the RNG state is kept until the first step.

    Callbacks and a loss scale that only the checkpoint or only the trainer has are logged, not refused.

    Raises:
        UserError: with a table of all that does not fit; nothing is loaded then.
    """
    fittings: dict[str, Fitting] = {}
    report = LoadReport()
    state = rank_state_of(state, trainer)
    # The states are loaded in the order in which they are added here.
    if options.takes("model"):
        fittings["model"], report = _fit_model(
            trainer, state, options, cast=not options.resumes, reshape_buffers=options.resumes
        )
    if options.takes("optimizer"):
        fittings |= _fit_optimizers(trainer, state, options, keep_settings)
    if options.takes("schedulers"):
        fit = partial(
            trainer.schedulers.fit,
            progress=state.get("progress"),
            steps_per_epoch=trainer.loop.steps_per_epoch,
            with_rates=options.takes("optimizer"),
        )
        fittings["schedulers"] = _fit_saved(state, "schedulers", fit)
    if options.takes("optimizer"):
        if "step" in state:
            fittings["step"] = Fitting([], lambda: trainer.step.load_state_dict(state["step"]))
        fittings["scaler"] = _fit_scaler(trainer, state)
        microbatches = trainer.loop.microbatches
        if microbatches is not None and microbatches.is_auto and "microbatch" in state:
            fittings["microbatch"] = Fitting([], lambda: setattr(microbatches, "size", state["microbatch"]))
    if options.takes("progress"):
        fittings["progress"] = _fit_saved(state, "progress", partial(_fit_progress, trainer.progress))
        fittings["loop"] = _fit_saved(state, "loop", partial(_fit_loop, trainer))
        fittings["modes"] = Fitting([], lambda: trainer.module_modes.load_state_dict(state.get("modes", {})))
        fittings["requires_grad"] = _fit_trained(trainer, state.get("requires_grad"), options)
        # Without them, as in old checkpoints, a resume reads the whole log files.
        fittings[LOG_MARKS] = Fitting([], partial(_load_marks, trainer, state))
    if options.takes("rng"):
        fittings["rng"] = _fit_saved(state, "rng", _fit_rng)
    if options.takes("callbacks"):
        fittings |= _fit_callbacks(trainer, state.get("callbacks", {}), options)
    if options.takes("progress") and train_loader is not None:
        fittings["data"] = _fit_saved(state, "data", partial(_fit_data, train_loader))
    # Only now anything is changed: all parts have been compared.
    _load(fittings, path, _advice(trainer, path, report, fittings))
    for line in _unmatched_states(trainer, state, options):
        log.warning("%s", line)
    if options.takes("rng"):
        # Building loaders and warming up draws numbers, so the loop restores it right before the first step.
        trainer.loading.keep_rng(state["rng"])
    if not options.whole:
        log.info("loaded %s from %s", ", ".join(options.states), path)
    if report.lines:
        _log_weights(report, str(path))


def _advice(trainer: Trainer, path: Path, report: LoadReport, fittings: Mapping[str, Fitting]) -> str:
    """What to do about a state that does not fit: `load` is for checkpoints of other runs alone."""
    saver = trainer.checkpoint
    is_of_this_run = saver is not None and path.parent.absolute() == saver.folder.absolute()
    if is_of_this_run:
        return ADVICE if trainer.config else _ADVICE_IN_PYTHON
    return report.advice if "model" in fittings and fittings["model"].faults else _LOAD_LESS


def _fit_optimizers(
    trainer: Trainer, state: Mapping[str, Any], options: LoadOptions, keep_settings: Sequence[str]
) -> dict[str, Fitting]:
    """Compare the saved state of each optimizer with it: key of the state -> fitting."""
    fittings = {}
    saved = {ONLY: state[ONLY]} if ONLY in state else state.get(_MANY, {})
    for name, optimizer in trainer.optimizers.items():
        configured = trainer.first_settings[name]
        keep = [key.removeprefix(f"{name}.") for key in keep_settings if "." not in key or key.startswith(f"{name}.")]
        fit = partial(
            fit_optimizer,
            trainer.model,
            optimizer,
            options=options,
            keep_settings=keep,
            moved=trainer.schedulers.moved_settings(name),
            configured=configured,
        )
        fittings[_key_of(name)] = _fit_saved(saved, name, fit)
    if trainer.optimizers:
        fittings |= {
            _key_of(name): Fitting(["not in this run"], _nothing) for name in saved if name not in trainer.optimizers
        }
    return fittings


def _log_weights(report: LoadReport, source: str) -> None:
    """Log how many weights were loaded, and warn of those that are not as in the checkpoint."""
    log.info("weights from %s (%s)", source, report)
    if report.lines:
        log.warning("%s", list_by_owner(f"not all weights are as in {source}", {"": report.lines}))


def _nothing() -> None:
    """Load nothing."""


def _load(fittings: Mapping[str, Fitting], path: Path, advice: str = ADVICE) -> None:
    """Load all states; raise UnfitStateError with a table of all faults, and load nothing, if one does not fit."""
    faults = {owner: fitting.faults for owner, fitting in fittings.items() if fitting.faults}
    if faults:
        text = list_by_owner(f"{path} does not fit this run", faults)
        raise UnfitStateError(f"{text}\n", cure=f"Nothing was loaded. {advice}")
    # In this order: an optimizer may put the trained weights over those that the model has loaded.
    for fitting in fittings.values():
        fitting.load()


def _fit_saved(state: Mapping[str, Any], owner: str, fit: Callable[[Any], Fitting]) -> Fitting:
    """Compare the saved state of an owner by `fit`; a state of another layout is a fault, not an error."""
    if owner not in state:
        return Fitting(["missing in the checkpoint"], _nothing)
    try:
        return fit(state[owner])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        return Fitting([f"is not what this version saves: {type(error).__name__}: {error}"], _nothing)


def _fit_model(
    trainer: Trainer, state: Mapping[str, Any], options: LoadOptions, *, cast: bool, reshape_buffers: bool = False
) -> tuple[Fitting, LoadReport]:
    """Compare saved weights with the model. Returns what loads them, and a report of what they lack."""
    reports = [LoadReport()]
    # An old checkpoint has no versions of its modules: assume those of this run.
    versions = state.get(VERSIONS, find_versions(trainer.model) if reshape_buffers else None)

    def fit(weights: Any) -> Fitting:
        fitting, report = fit_model(
            trainer.model,
            weights,
            options,
            versions=versions,
            cast=cast,
            reshape_buffers=reshape_buffers,
            first_none=trainer.first_none,
        )
        reports.append(report)
        return fitting

    return _fit_saved(state, "model", fit), reports[-1]


def _fit_scaler(trainer: Trainer, state: Mapping[str, Any]) -> Fitting:
    """The loss scale; nothing is loaded if the checkpoint or this trainer has none."""
    scaler, saved = trainer.scaler, state.get("scaler")
    if scaler is None or saved is None:
        return Fitting([], _nothing)
    return Fitting(scaler.check_state(saved), lambda: scaler.load_state_dict(saved))


def _load_marks(trainer: Trainer, state: Mapping[str, Any]) -> None:
    """Take over where the files of loggers ended, and the training time."""
    trained_s = float(state["progress"].get("seconds", 0.0))
    trainer.metric_logger.load_state_dict(state.get(LOG_MARKS), trained_s=trained_s)


def _fit_rng(saved: Any) -> Fitting:
    return Fitting([f"{name}: missing in the checkpoint" for name in capture_rng() if name not in saved], _nothing)


def _fit_progress(progress: Progress, counts: Any) -> Fitting:
    """The counts of steps, batches, samples and tokens."""
    try:
        # Into another object: nothing is loaded before every state fits.
        Progress().load_state_dict(counts)
    except ValueError as error:
        return Fitting([str(error)], _nothing)
    return Fitting([], lambda: progress.load_state_dict(counts))


def _fit_loop(trainer: Trainer, saved: Any) -> Fitting:
    """The state of the training loop, whose keys must be those of this one."""
    # `ended` is in the state only of a run whose end was requested, `owed_at_end` where its evaluation is pending.
    expected = set(trainer.loop.state_dict()) | ({"ended", "owed_at_end"} & set(saved))
    rows = [f"{key}: missing in the checkpoint" for key in sorted(expected - set(saved))]
    rows += [f"{key}: not in this loop" for key in sorted(set(saved) - expected)]
    return Fitting(rows, lambda: trainer.loop.load_state_dict(saved))


def _fit_data(train_loader: Any, position: Mapping[str, Any]) -> Fitting:
    """The position in the data, which the loader must be able to go to."""
    try:
        # Without the position in a user's loader: `check_state` keeps that one, and another state may not fit.
        train_loader.check_state({**position, "loader": None})
    except TrainError as error:
        return Fitting([error.what], _nothing)
    return Fitting([], lambda: train_loader.check_state(position))


def _fit_trained(trainer: Trainer, saved: Any, options: LoadOptions) -> Fitting:
    """Compare the saved changes of `requires_grad`, and whether the next step belongs to the same stretch."""
    if saved is None:
        # An earlier version has saved it: all is as built, and as hooks change it at the start.
        return Fitting([], lambda: trainer.trained.load_state_dict(None))
    saved = dict(saved) if isinstance(saved, Mapping) else {}
    fitting = _fit_saved(saved, "changed", partial(trainer.trained.fit, options=options))

    def load() -> None:
        fitting.load()
        trainer.module_modes.continues = bool(saved.get("continues"))

    return Fitting(fitting.faults, load)


def _fit_callbacks(trainer: Trainer, saved: Mapping[str, Any], options: LoadOptions) -> dict[str, Fitting]:
    """Compare the saved states of callbacks; one that `options` name must be in the checkpoint and in the run."""
    fittings = {}
    for name, callback in trainer.callbacks.items():
        if name in saved and options.takes_callback(name):
            fittings[f"callbacks.{name}"] = _fit_callback(callback, saved[name])
    for name in options.named_callbacks:
        fault = "not in this run" if name not in trainer.callbacks else "missing in the checkpoint"
        fittings.setdefault(f"callbacks.{name}", Fitting([fault], _nothing))
    return fittings


def _fit_callback(callback: Callback, saved: dict[str, Any]) -> Fitting:
    return Fitting(list(callback.check_state(saved)), lambda: callback.load_state_dict(saved))


def _unmatched_states(trainer: Trainer, state: Mapping[str, Any], options: LoadOptions) -> Iterator[str]:
    """One line for each state that only the checkpoint has, or only the trainer, and for each changed setting."""
    if options.takes("progress") and _SETTINGS in state:
        saved, present = state[_SETTINGS], _settings_of(trainer)
        for key in present:
            if key in saved and saved[key] != present[key]:
                yield f"{key} was {saved[key]} in the steps before, and is {present[key]} from here on"
    if options.takes("callbacks"):
        saved = state.get("callbacks", {})
        for name in filter(options.takes_callback, saved):
            if name not in trainer.callbacks:
                yield f"the checkpoint has state of callback '{name}', which this run does not have: it is dropped"
        for name, callback in trainer.callbacks.items():
            if name not in saved and options.takes_callback(name) and callback.state_dict():
                yield f"callback '{name}' has state, but the checkpoint has none for it: it starts new"
    if not options.takes("optimizer"):
        return
    if "step" not in state and trainer.step.state_dict():
        yield "the step has state, but the checkpoint has none for it: it starts new"
    if trainer.scaler is None and "scaler" in state:
        yield "the checkpoint has a loss scale, but this precision uses none: it is dropped"
    if trainer.scaler is not None and "scaler" not in state:
        yield "the checkpoint has no loss scale: scaling starts new"


def model_files(model: nn.Module) -> dict[str, bytes]:
    """The small files that belong to the weights: the `config.json` of a model of transformers, none of another."""
    model = unwrap(model)
    to_json = getattr(getattr(model, "config", None), "to_json_string", None)
    if to_json is None or not hasattr(model, "save_pretrained"):
        return {}
    settings = {**json.loads(to_json()), "architectures": [type(model).__name__]}
    return {MODEL_CONFIG_FILE: json.dumps(settings, indent=2, sort_keys=True).encode() + b"\n"}
