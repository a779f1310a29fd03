"""The state of a training as one tree, and back: model, optimizer, schedules, counts, data, callbacks, RNG.

Loading has two phases: every part reports what does not fit, in one table; only if the table is empty is anything
loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_cli.checkpoint import model_state
from trainer_cli.checkpoint.format.sharded import RANKS
from trainer_cli.checkpoint.model_state import Fitting, weights_of
from trainer_cli.checkpoint.optimizer_state import capture_optimizer, fit_optimizer
from trainer_cli.core.load_options import LoadOptions, LoadReport, advice
from trainer_cli.core.progress import Progress
from trainer_cli.errors import TrainError, UserError
from trainer_cli.trainer.metrics import merge_sums
from trainer_cli.trainer.optimizers import ONLY
from trainer_cli.trainer.schedulers import MOVED
from trainer_cli.trainer.setup import seed_rank

if TYPE_CHECKING:
    from torch import nn

    from trainer_cli.trainer.hooks import Callback
    from trainer_cli.trainer.trainer import Trainer


log = logging.getLogger(__name__)

_SEVERAL = "optimizers"
"""The states of several optimizers, by name; that of a single one is under `optimizer`."""
ADVICE = "Resume with the config and the code of the checkpoint, or begin another run: name=OTHER."
_LOAD_LESS = "Load with the config and the code of the checkpoint, or less of it: load.states=[model]."


def later(trainer: Trainer) -> tuple[str, ...]:
    """Tensors that are read into their destination after all checks."""
    return ("model", *(f"{_place_of(name)}/state" for name in trainer.optimizers))


def _place_of(optimizer: str) -> str:
    """The key of an optimizer's state in the tree."""
    return ONLY if optimizer == ONLY else f"{_SEVERAL}/{optimizer}"


class Tree(dict[str, Any]):
    """A state being assembled: an existing key must not be replaced."""

    def __setitem__(self, key: str, value: Any) -> None:
        if key in self:
            raise UserError(
                f"the state to be saved has a '{key}' already, and it would be replaced", cure="Choose another name."
            )
        super().__setitem__(key, value)

    def update(self, *given: Any, **named: Any) -> None:
        """Add several."""
        for key, value in dict(*given, **named).items():
            self[key] = value

    def __ior__(self, given: Any) -> Tree:  # type: ignore[override,misc]
        self.update(given)
        return self


def capture(trainer: Trainer, train_loader: Any) -> Tree:
    """The state after the step just made. Tensors in it are the live ones."""
    weights = trainer.modes.evaluation_weights()
    state = Tree(
        model=_captured_model(trainer.model, weights),
        schedulers=trainer.schedulers.state_dict(),
        progress=trainer.progress.state_dict(),
        loop=trainer.loop.state_dict(),
        callbacks={name: own for name, call in trainer.callbacks.items() if (own := call.state_dict())},
        rng=trainer.rng or model_state.capture_rng(),
    )
    captured = {
        name: capture_optimizer(trainer.model, one, weights, len(trainer.first_settings[name]))
        for name, one in trainer.optimizers.items()
    }
    if ONLY in captured:
        state[ONLY] = captured[ONLY]
    elif captured:
        state[_SEVERAL] = captured
    if own := trainer.step.state_dict():
        state["step"] = own
    if trainer.loop.microbatches is not None and trainer.loop.microbatches.is_auto:
        state["microbatch"] = trainer.loop.microbatches.size
    if trainer.scaler is not None:
        state["scaler"] = trainer.scaler.state_dict()
    if train_loader is not None:
        state["data"] = trainer.loop.data_state(trainer)
    return state


def _captured_model(model: nn.Module, weights: Mapping[nn.Parameter, Any]) -> dict[str, Any]:
    """The model's state with these weights in place of its parameters'."""
    state = model_state.capture_model(model)
    if weights:
        for name, parameter in model_state.unwrapped(model).named_parameters(remove_duplicate=False):
            if parameter in weights:
                state[model_state.clean_name(name)] = weights[parameter]
    return state


def of_this_rank(state: Mapping[str, Any], trainer: Trainer) -> Mapping[str, Any]:
    """The state as the checkpoint has it for this rank; if it was made by another number of ranks, what is nearest.

    The positions of the data are then rank 0's, sums of metrics are added up in rank 0, and a rank that the checkpoint
    does not know has new random numbers. What is said of a rank holds for each of a tensor group.
    """
    if RANKS not in state:
        return state
    rank, ranks = trainer.strategy.group.data_rank, state[RANKS]
    own = {key: value for key, value in state.items() if key != RANKS}
    if 0 < rank < len(ranks):
        own |= {"rng": ranks[rank]["rng"]} if "rng" in state else {}
    elif rank and "rng" in state:
        before = model_state.capture_rng()
        seed_rank(trainer.seed or 0, rank, int(state["progress"]["step"]))
        own["rng"] = model_state.capture_rng()
        model_state.restore_rng(before)
    if "loop" in state and state["loop"]["meter"] is not None:
        meters = [one["loop"]["meter"] for one in ranks[1:] if one["loop"]["meter"] is not None]
        own["loop"] = {**state["loop"], "meter": merge_sums(state["loop"]["meter"], meters, empty=rank > 0)}
    return own


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
        state["model"] = weights_of(state, str(path), average)
        log.info(
            "%s: the average of callback '%s', which was evaluated; load.average=false takes the trained weights",
            path,
            average,
        )
    fitting, report = _of_model(trainer, state, options, cast=True)
    _load({"model": fitting}, path, advice(report))
    step = state.get("progress", {}).get("step")
    _log_weights(report, f"{path}{'' if step is None else f' step {step}'}")


def load_for_evaluation(trainer: Trainer, state: Mapping[str, Any], options: LoadOptions, path: Path) -> None:
    """Load the model, and the state of every callback that changes evaluations, if the checkpoint has callbacks."""
    fitting, report = _of_model(trainer, state, options, cast=True)
    fittings = {"model": fitting}
    saved = state.get("callbacks")
    for name, callback in trainer.callbacks.items():
        if callback.evaluates and saved is not None:
            fittings[f"callbacks.{name}"] = _of_callback(callback, saved.get(name, {}))
        elif callback.evaluates:
            log.warning("%s has no state of callback '%s': its weights are evaluated", path, name)
    _load(fittings, path, advice(report))
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
    state = of_this_rank(state, trainer)
    if options.takes("model"):
        fittings["model"], report = _of_model(trainer, state, options, cast=not options.resumes)
    if options.takes("optimizer"):
        fittings |= _of_optimizers(trainer, state, options, keep_settings)
    if options.takes("schedulers"):
        fit = partial(
            trainer.schedulers.fit,
            progress=state.get("progress"),
            steps_per_epoch=trainer.loop.steps_per_epoch,
            with_rates=options.takes("optimizer"),
        )
        fittings["schedulers"] = _of(state, "schedulers", fit)
    if options.takes("optimizer"):
        if "step" in state:
            fittings["step"] = Fitting([], lambda: trainer.step.load_state_dict(state["step"]))
        fittings["scaler"] = _of_scaler(trainer, state)
        if (parts := trainer.loop.microbatches) is not None and parts.is_auto and "microbatch" in state:
            fittings["microbatch"] = Fitting([], lambda: setattr(parts, "size", state["microbatch"]))
    if options.takes("progress"):
        fittings["progress"] = _of(state, "progress", lambda own: _of_progress(trainer.progress, own))
        fittings["loop"] = _of(state, "loop", lambda own: _of_loop(trainer, own))
    if options.takes("rng"):
        fittings["rng"] = _of(state, "rng", lambda own: Fitting(model_state.rng_faults(own), _nothing))
    if options.takes("callbacks"):
        of_callbacks = state.get("callbacks", {})
        for name, callback in trainer.callbacks.items():
            if name in of_callbacks:
                fittings[f"callbacks.{name}"] = _of_callback(callback, of_callbacks[name])
    if options.takes("progress") and train_loader is not None:
        fittings["data"] = _of(state, "data", lambda own: _of_data(train_loader, own))
    _load(fittings, path, _advice(trainer, path, report, fittings))
    for line in _one_sided(trainer, state, options):
        log.warning("%s", line)
    if options.takes("rng"):
        trainer.loading.keep_rng(state["rng"])
    if not options.whole:
        log.info("loaded %s from %s", ", ".join(options.states), path)
    if report.lines:
        _log_weights(report, str(path))


def _advice(trainer: Trainer, path: Path, report: LoadReport, fittings: Mapping[str, Fitting]) -> str:
    """What to do about a state that does not fit: `load` is for checkpoints of other runs alone."""
    if trainer.checkpoint is not None and path.parent.absolute() == trainer.checkpoint.folder.absolute():
        return ADVICE
    return advice(report) if "model" in fittings and fittings["model"].faults else _LOAD_LESS


def _of_optimizers(
    trainer: Trainer, state: Mapping[str, Any], options: LoadOptions, keep_settings: Sequence[str]
) -> dict[str, Fitting]:
    fittings = {}
    saved = {ONLY: state[ONLY]} if ONLY in state else state.get(_SEVERAL, {})
    for name, optimizer in trainer.optimizers.items():
        moved = MOVED if trainer.schedulers.of(name) else ()
        configured = trainer.first_settings[name]
        keep = [key.removeprefix(f"{name}.") for key in keep_settings if "." not in key or key.startswith(f"{name}.")]
        fit = partial(
            fit_optimizer,
            trainer.model,
            optimizer,
            options=options,
            keep_settings=keep,
            moved=moved,
            configured=configured,
        )
        fittings[_place_of(name)] = _of(saved, name, fit)
    if trainer.optimizers:
        fittings |= {
            _place_of(name): Fitting(["not in this training"], _nothing)
            for name in saved
            if name not in trainer.optimizers
        }
    return fittings


def _log_weights(report: LoadReport, source: str) -> None:
    log.info("weights from %s (%s)", source, report)
    if report.lines:
        log.warning("%s", model_state.table(f"not all weights are as in {source}", {"": report.lines}))


def _nothing() -> None:
    """Load nothing."""


def _load(fittings: Mapping[str, Fitting], path: Path, advice: str = ADVICE) -> None:
    faults = {owner: fitting.faults for owner, fitting in fittings.items() if fitting.faults}
    if faults:
        text = model_state.table(f"{path} does not fit this training", faults)
        raise UserError(f"{text}\n", cure=f"Nothing was loaded. {advice}")
    for fitting in fittings.values():
        fitting.load()


def _of(state: Mapping[str, Any], owner: str, fit: Callable[[Any], Fitting]) -> Fitting:
    if owner not in state:
        return Fitting(["missing in the checkpoint"], _nothing)
    try:
        return fit(state[owner])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        return Fitting([f"is not what this version saves: {type(error).__name__}: {error}"], _nothing)


def _of_model(
    trainer: Trainer, state: Mapping[str, Any], options: LoadOptions, *, cast: bool
) -> tuple[Fitting, LoadReport]:
    reports = [LoadReport()]

    def fit(own: Any) -> Fitting:
        fitting, report = model_state.fit_model(trainer.model, own, options, cast=cast)
        reports.append(report)
        return fitting

    return _of(state, "model", fit), reports[-1]


def _of_scaler(trainer: Trainer, state: Mapping[str, Any]) -> Fitting:
    scaler, own = trainer.scaler, state.get("scaler")
    if scaler is None or own is None:
        return Fitting([], _nothing)
    return Fitting(scaler.check_state(own), lambda: scaler.load_state_dict(own))


def _of_progress(progress: Progress, own: Any) -> Fitting:
    try:
        Progress().load_state_dict(own)
    except ValueError as error:
        return Fitting([str(error)], _nothing)
    return Fitting([], lambda: progress.load_state_dict(own))


def _of_loop(trainer: Trainer, own: Any) -> Fitting:
    wanted = set(trainer.loop.state_dict()) | ({"ended"} & set(own))
    rows = [f"{key}: missing in the checkpoint" for key in sorted(wanted - set(own))]
    rows += [f"{key}: not in this loop" for key in sorted(set(own) - wanted)]
    return Fitting(rows, lambda: trainer.loop.load_state_dict(own))


def _of_data(train_loader: Any, own: Mapping[str, Any]) -> Fitting:
    try:
        # Without the loader's own position: a loader keeps that once the rest fits.
        train_loader.check_state({**own, "loader": None})
    except TrainError as error:
        return Fitting([error.what], _nothing)
    return Fitting([], lambda: train_loader.check_state(own))


def _of_callback(callback: Callback, own: dict[str, Any]) -> Fitting:
    return Fitting(list(callback.check_state(own)), lambda: callback.load_state_dict(own))


def _one_sided(trainer: Trainer, state: Mapping[str, Any], options: LoadOptions) -> Iterator[str]:
    """What only the checkpoint has, or only the trainer, a line each."""
    if options.takes("callbacks"):
        saved = state.get("callbacks", {})
        for name in saved:
            if name not in trainer.callbacks:
                yield f"the checkpoint has state of callback '{name}', which this training does not have: it is dropped"
        for name, callback in trainer.callbacks.items():
            if name not in saved and callback.state_dict():
                yield f"callback '{name}' has state, but the checkpoint has none for it: it starts new"
    if not options.takes("optimizer"):
        return
    if "step" not in state and trainer.step.state_dict():
        yield "the step has state, but the checkpoint has none for it: it starts new"
    if trainer.scaler is None and "scaler" in state:
        yield "the checkpoint has a loss scale, but there is none in this precision: it is dropped"
    if trainer.scaler is not None and "scaler" not in state:
        yield "the checkpoint has no loss scale: scaling starts new"
