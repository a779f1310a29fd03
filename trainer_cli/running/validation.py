"""Evaluate the checkpoints that `ckpt=` names, and write the results.

    expand every pattern, check all matches before any work, and hold them against removal
    for each config among them: read it from the checkpoint, build its data once
        for each checkpoint: a new model, its weights, every validation loader
    write the results, print the table

With `validate.watch` each checkpoint is evaluated soon after its commit, until the run ends.
"""

from __future__ import annotations

import hashlib
import logging
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_cli.catalog import Catalog, ForeignKind
from trainer_cli.components import EVALUATED
from trainer_cli.config import Composed, compose, from_yaml, given_value
from trainer_cli.errors import CheckpointError, ConfigError, ExitCode, UnfitStateError, UserError, without_secrets
from trainer_cli.files import as_path, is_url
from trainer_cli.layout import CONFIG_FILE
from trainer_cli.loads import LoadOptions
from trainer_cli.messages import to_console
from trainer_cli.origin import EvaluatedOrigin, naming_project, of_source, other_source, use_source_of
from trainer_cli.running.results import Results
from trainer_cli.runs import BestSettings, RunDir, ValidationRow
from trainer_cli.schema import TrainConfig
from trainer_cli.selection import Holds, Selection, StoredCheckpoint, provide_steps, run_holding, select
from trainer_cli.signals import StopSignals
from trainer_cli.steps import RunStatus
from trainer_cli.storage import DOWNLOADS
from trainer_cli.terminal import clear_status, is_terminal, show_status
from trainer_cli.user_cache import is_cached

if TYPE_CHECKING:
    from trainer_cli.running.build import Builder, Data
    from trainer_cli.trainer import Evaluation

log = logging.getLogger(__name__)

_WATCH_POLL_S = 2.0
"""Seconds between two listings of the disk or the store while watching."""
_ENDS = (RunStatus.finished, RunStatus.failed, RunStatus.interrupted)


def validate(
    overrides: Sequence[str],
    *,
    config_dir: Path | None = None,
    config_name: str = "config",
    allow_pickle: bool = False,
    replays: bool = False,
    show: Callable[[Results], None] | None = None,
) -> int:
    """Evaluate what `ckpt=` names, write and show the results, and return the exit code.

    Args:
        allow_pickle: checkpoints of other programs may run any code when they are loaded.
        replays: whether a step that `RUN@stepN` names is computed if no checkpoint of it is there.
        show: prints the results at the end; None: as a table.
    """
    # The other overrides may name keys that only the configs of the checkpoints have.
    keys = ("ckpt=", "load.", "logging.", "validate.")
    command_overrides = [override for override in overrides if override.lstrip("+").startswith(keys)]
    settings: dict[str, Any] = {"config_dir": config_dir, "config_name": config_name}
    command = compose(command_overrides, **settings, missing_ok=True, sections=()).config
    to_console(command.logging.level)
    DOWNLOADS.configure(command.load)
    if command.ckpt is None:
        example = given_value(overrides, "experiment") or "digits"
        raise UserError(
            "validate needs ckpt=, which checkpoints to evaluate",
            cure=f"For example: train validate ckpt='runs/{example}/checkpoints/step*' (ckpt=none for random weights).",
        )
    # Not optimizer and loggers: a checkpoint is evaluated where their packages are missing.
    settings["sections"] = EVALUATED
    validation = _Validation(overrides, command, settings, allow_pickle=allow_pickle, show=show)
    if command.ckpt == "none":
        composed = compose(overrides, **settings)
        composed.refuse_shipped_default()
        return validation.run_random_weights(composed)
    patterns = [command.ckpt] if isinstance(command.ckpt, str) else command.ckpt
    provide_steps(patterns, replays=replays, overrides=of_source(overrides), config_dir=config_dir)
    return validation.run_watching(patterns) if command.validate.watch else validation.run(patterns)


def watched(
    patterns: Sequence[str], wait: Callable[[float], object], stopped: Callable[[], bool] = lambda: False
) -> Iterator[Selection]:
    """Yield the checkpoints that the patterns name, then new ones as they appear, each once.

    It ends when every run that saves them has ended and all its checkpoints were yielded. A run that was stopped early
    or killed may be resumed, so it has not ended. Partial checkpoints are examined again later.

    Args:
        wait: sleeps for a number of seconds.
        stopped: whether to end at the next listing.
    """
    seen: set[Path] = set()
    has_logged = False
    while not stopped():
        # This comes before the listing: a checkpoint that is saved in between is then found in the next round.
        ended = _ended(patterns, seen)
        try:
            selection = select(patterns)
        except CheckpointError as error:
            if ended:
                raise
            if not has_logged:
                has_logged = True
                log.info("waiting: %s", error.what.rstrip(":\n"))
            selection = Selection([], {}, {})
        new = [path for path in selection.paths if path not in seen]
        damaged = {path: problem for path, problem in selection.damaged.items() if path not in seen}
        # Not the partial ones: they are looked at again until they are complete.
        seen.update(new, damaged)
        if new or damaged:
            yield Selection(new, {}, damaged)
        elif ended:
            return
        else:
            wait(_WATCH_POLL_S)


def _ended(patterns: Sequence[str], seen: set[Path]) -> bool:
    """Whether every run that may save matching checkpoints has ended."""
    folders = {path.parent for path in seen}
    folders |= {folder for folder in map(_folder, patterns) if folder is not None}
    return bool(folders) and all(map(_is_complete, folders))


def _folder(pattern: str) -> Path | None:
    """The folder of a run's checkpoints that a pattern looks into; None if it does not exist."""
    path = as_path(re.split(r"[*?\[{@]", pattern, maxsplit=1)[0])
    for folder in (path, path.parent, path / "checkpoints"):
        if not is_url(folder) and run_holding(folder) is not None:
            return folder
    return None


def _is_complete(folder: Path) -> bool:
    """Whether the run that saves into a folder has ended."""
    if not is_url(folder) and (run := run_holding(folder)) is not None:
        # Not its lock: that of a run which was stopped or killed, and may be resumed, is free too.
        return RunDir(run).read_summary().get("status") in _ENDS
    entries = Catalog.of(folder).entries()
    return any(entry.manifest is not None and entry.manifest.finished is not None for entry in entries)


class _Validation:
    """The evaluation of everything that `ckpt=` names, one experiment after another."""

    def __init__(
        self,
        overrides: Sequence[str],
        command: TrainConfig,
        settings: Mapping[str, Any],
        *,
        allow_pickle: bool,
        show: Callable[[Results], None] | None,
    ) -> None:
        self.overrides = [override for override in overrides if not override.lstrip("+").startswith("ckpt=")]
        self.command, self.settings, self.allow_pickle, self.show = command, settings, allow_pickle, show
        self.experiments: dict[str, _Experiment] = {}
        """Text of a recovered config -> its experiment."""
        self.results: Results | None = None
        self.failures: list[ExitCode] = []
        self.holds = Holds()
        self.named: set[Path] = set()
        """Checkpoints that the command names one by one, not by a glob or a run."""
        self.stopped: Callable[[], bool] = lambda: False

    def run(self, patterns: Sequence[str]) -> int:
        """Evaluate the checkpoints that exist now. Returns the exit code."""
        self.named = {as_path(pattern) for pattern in patterns}
        with ExitStack() as stack:
            # The results are shown after an error too.
            stack.callback(self._finish)
            stack.enter_context(self.holds)
            selection, removed = self.holds.select(patterns)
            for path in removed:
                self._report_removed(path)
            self._evaluate(selection)
        return self._exit_code()

    def run_watching(self, patterns: Sequence[str]) -> int:
        """Evaluate the checkpoints that exist now, and each new one, until the run ends or a signal comes."""
        with ExitStack() as stack:
            stack.callback(self._finish)
            signals = stack.enter_context(StopSignals("stopping after this checkpoint"))
            self.stopped = lambda: signals.stop_request is not None
            stack.enter_context(self.holds)
            for selection in watched(patterns, time.sleep, self.stopped):
                self._evaluate(selection)
        return self._exit_code()

    def run_random_weights(self, composed: Composed) -> int:
        """Evaluate the model as it is initialized, without a checkpoint."""
        self._open_results(composed.config.validate.folder or "runs/validation-none", [composed.config])
        self._evaluate_paths(_Experiment(composed, composed.config.load.options()), [None])
        self._finish()
        return self._exit_code()

    def _open_results(self, folder: Path | str, configs: Iterable[TrainConfig]) -> Results:
        settings = BestSettings.common(BestSettings.of(asdict(config)) for config in configs)
        self.results = Results(Path(folder), self.show, settings)
        return self.results

    def _exit_code(self) -> int:
        if not self.failures:
            return ExitCode.DONE
        return ExitCode.FAILED if self.results is not None and self.results.rows else self.failures[0]

    def _report_removed(self, path: Path) -> None:
        """Report a checkpoint that its run removed after it was listed: an error if the command names it."""
        if path in self.named:
            log.error("%s was removed before it was evaluated", path)
            self.failures.append(ExitCode.NO_CHECKPOINT)
        else:
            log.warning("%s was removed before it was evaluated", path)

    def _finish(self) -> None:
        if self.results is not None:
            self.results.finish()

    def _evaluate(self, selection: Selection) -> None:
        """Evaluate checkpoints, those of one config after each other, and report those that are not evaluated."""
        for path, problem in selection.skipped.items():
            log.warning("skipped %s: %s", path, problem)
        for path, problem in selection.damaged.items():
            log.error("%s: %s", path, problem)
        groups = self._group_by_config(selection)
        if groups:
            # The newest: a process imports a project from one source.
            use_source_of(groups[-1][2][-1], self.overrides, self.settings["config_dir"])
        experiments = []
        for source, text, paths in groups:
            with naming_project(StoredCheckpoint(paths[0]).find_run(), self.settings["config_dir"]):
                experiments.append(self._find_experiment(source, text))
        if self.results is None and groups:
            # Imported here: it imports torch, which a wrong pattern need not wait for.
            from trainer_cli.running.reach import own_folder

            configs = [experiment.composed.config for experiment in experiments]
            folders = [self.command.validate.folder]
            for experiment, (_, _, paths) in zip(experiments, groups, strict=True):
                folder = experiment.composed.config.validate.folder
                folders.append(own_folder("validate.folder", folder, experiment.composed.trust, run_or_place(paths[0])))
            # One process imports one source: that of the newest checkpoint, or another.
            newest, root = StoredCheckpoint(groups[-1][2][-1]).manifest, experiments[-1].composed.project_root
            default = _default_folder(selection.paths)
            if newest is not None and other_source(newest.source, root):
                # Not `validation-…`, which a report of the folder reads.
                default = default.with_name(f"other-source-{default.name}")
            self._open_results(next(filter(None, folders), default), configs)
        self.failures += [ExitCode.NO_CHECKPOINT for _ in selection.damaged]
        for experiment, (_, _, paths) in zip(experiments, groups, strict=True):
            with naming_project(StoredCheckpoint(paths[0]).find_run(), self.settings["config_dir"]):
                self._evaluate_paths(experiment, paths)

    def _find_experiment(self, source: Path | str, text: str) -> _Experiment:
        """The experiment of a config, which is composed once for all its checkpoints."""
        if text not in self.experiments:
            composed = from_yaml(source, self.overrides, **self.settings)
            # `load` of a recovered config is for the checkpoint that its run started from, not for its own.
            load = self.command.load if source else composed.config.load
            self.experiments[text] = _Experiment(composed, load.options(allow_pickle=self.allow_pickle))
        return self.experiments[text]

    def _group_by_config(self, selection: Selection) -> list[tuple[Path | str, str, list[Path]]]:
        """Group consecutive checkpoints of a run that share a config: (its file, its text, their paths).

        The config is read from the checkpoint and its digest verified; a damaged config makes the checkpoint damaged.
        """
        sources: list[tuple[Path, Path | str, str]] = []
        for path in selection.paths:
            try:
                source, text = StoredCheckpoint(path).read_config()
            except (CheckpointError, OSError) as error:
                if _is_removed(path):
                    self._report_removed(path)
                    continue
                if not isinstance(error, CheckpointError):
                    raise
                log.error("%s: %s", path, error)
                selection.damaged[path] = str(error)
                continue
            if not source and not any(override.lstrip("+").startswith("experiment=") for override in self.overrides):
                cure = f"Name its experiment: train validate NAME ckpt={path}."
                raise CheckpointError(f"{path} holds no {CONFIG_FILE}", cure=cure)
            sources.append((path, source, text))
        # Consecutive ones only: the order by step must stay, since results are shown as they come.
        groups = [list(group) for _, group in groupby(sources, key=lambda row: (row[0].parent, row[2]))]
        return [(group[0][1], group[0][2], [path for path, _, _ in group]) for group in groups]

    def _evaluate_paths(self, experiment: _Experiment, paths: Sequence[Path | None]) -> None:
        """Evaluate each checkpoint; None stands for random weights. A failure does not stop the others."""
        assert self.results is not None
        with experiment.composed.placing():
            for number, path in enumerate(paths, start=1):
                if self.stopped():
                    break
                name = "random weights" if path is None else without_secrets(str(path))
                if is_terminal(sys.stderr):
                    show_status(f"evaluating {number} of {len(paths)}: {name}")
                else:
                    log.info("evaluating %s", name)
                try:
                    evaluations = experiment.evaluate(path)
                except ConfigError:
                    # A mistake in the config is the same for every checkpoint.
                    raise
                except (CheckpointError, UserError) as error:
                    if path is not None and _is_removed(path):
                        self._report_removed(path)
                        continue
                    message = without_secrets(str(error))
                    chosen = [line for line in self.overrides if line.lstrip("+").startswith(("model=", "data="))]
                    if chosen and isinstance(error, UnfitStateError):
                        message += f" Without {' '.join(chosen)} it is evaluated with its own."
                    log.error("%s", message if message.startswith(name) else f"{name}: {message}")
                    self.failures.append(error.exit_code)
                else:
                    rows = [
                        ValidationRow(name, result.step, result.loader, result.metrics, result.average)
                        for result in evaluations
                    ]
                    self.results.add(rows)
                    for row in rows if self.command.validate.watch and path is not None else ():
                        numbers = ", ".join(f"{key} {value:.4f}" for key, value in row.metrics.items())
                        log.info("%s on %s: %s", name, row.loader, numbers)
                # Released one by one: the run can remove a checkpoint as soon as it was evaluated.
                finally:
                    clear_status()
                    if path is not None:
                        self.holds.release(path)


class _Experiment:
    """One config; its data is built once, before the first checkpoint is evaluated."""

    def __init__(self, composed: Composed, load: LoadOptions) -> None:
        self.composed, self.load = composed, load
        self._parts: tuple[Builder, Data] | None = None
        self._origin: EvaluatedOrigin | None = None

    def evaluate(self, path: Path | None) -> list[Evaluation]:
        """Evaluate a checkpoint, or random weights, on every validation loader."""
        builder, data = self._build()
        if path is not None:
            self._origin = self._origin or EvaluatedOrigin(self.composed, data.val)
            self._origin.compare(path)
        return builder.evaluator(data).validate_all(data.val, [path], load=self.load)

    def _build(self) -> tuple[Builder, Data]:
        """The builder and the data of the config, which are made once."""
        if self._parts is None:
            from trainer_cli.running.build import Builder

            self.composed.check_targets(EVALUATED)
            builder = Builder(self.composed.config, self.composed.trust)
            data = builder.data()
            if not data.val:
                raise ConfigError("the data has no validation part (val)", location="data")
            self._parts = builder, data
        return self._parts


def _is_removed(path: Path) -> bool:
    return ForeignKind.of(path) is None and Catalog.of(path.parent).entry(path.name).removed


def _default_folder(paths: Sequence[Path]) -> Path:
    """`validation` in the run's directory; a folder in `runs` if the checkpoints do not belong to one run."""
    runs = [run_or_place(path) for path in paths]
    if len(set(runs)) == 1 and (run := runs[0]) is not None:
        return run / "validation"
    # They are sorted, so that the same checkpoints lead to the same folder.
    names = sorted({str(path if run is None else run) for path, run in zip(paths, runs, strict=True)})
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:8]
    return Path("runs") / f"validation-{digest}"


def run_or_place(path: Path) -> Path | None:
    """The run that saved a checkpoint. If it is not found: the folder in its place; None for a file of another program,
    a URL and an extracted archive."""
    if (run := StoredCheckpoint(path).find_run()) is not None:
        return run
    return None if ForeignKind.of(path) is not None or is_url(path) or is_cached(path) else path.parent.parent
