"""Evaluate checkpoints.

expand every pattern, and check all of them before any work
for each run among them: read its config from the checkpoint, build its data once
    for each checkpoint: a new model, its weights, every validation loader
write the results, print the table

Checkpoints are held against removal by the run that saves them, from the listing until they are read. With
`validate.watch` each checkpoint is evaluated as it is committed, until the run ends.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from trainer_cli.checkpoint.catalog import catalog_of
from trainer_cli.checkpoint.foreign.kind import kind_of
from trainer_cli.checkpoint.storage.download import is_cached
from trainer_cli.config.arguments import EVALUATED
from trainer_cli.config.compose import Composed, compose, from_yaml
from trainer_cli.core.load_options import LoadOptions
from trainer_cli.core.naming import CONFIG_FILE
from trainer_cli.core.schema import TrainConfig
from trainer_cli.core.url_path import as_path, is_url
from trainer_cli.errors import CheckpointError, ConfigError, ExitCode, UserError
from trainer_cli.runs.metrics import shared_keep_best
from trainer_cli.runs.origin import EvaluatedOrigin
from trainer_cli.runs.results import Results, Row, show_table
from trainer_cli.runs.select import Selection, select
from trainer_cli.runs.signals import StopSignals
from trainer_cli.runs.start import config_of, load_options
from trainer_cli.runs.watch import watched
from trainer_cli.trainer.messages import to_console

if TYPE_CHECKING:
    from trainer_cli.runs.build import Builder, Data
    from trainer_cli.runs.results import Results
    from trainer_cli.trainer.evaluate import Evaluation


_MOST = 256
"""Checkpoints held at a time: each takes a file descriptor. The others may be removed before they are read."""
_TRIES = 5
_PAUSE_S = 0.05


class Holds:
    """Shared locks on checkpoints of local folders. A run removes a checkpoint once it is released."""

    def __init__(self) -> None:
        self._locks: dict[Path, ExitStack] = {}

    def __enter__(self) -> Holds:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for path in list(self._locks):
            self.release(path)

    def take(self, path: Path) -> bool:
        """Hold a checkpoint; False if it was removed. Those of stores and of other programs are not held."""
        if path in self._locks or len(self._locks) >= _MOST or is_url(path) or kind_of(path) is not None:
            return True
        with ExitStack() as stack:
            try:
                stack.enter_context(catalog_of(path.parent).storage.reading(path.name))
            except FileNotFoundError:
                return False
            self._locks[path] = stack.pop_all()
        return True

    def release(self, path: Path) -> None:
        """Let go of a checkpoint, if it is held."""
        if (stack := self._locks.pop(path, None)) is not None:
            stack.close()


def select_held(patterns: Sequence[str], holds: Holds) -> tuple[Selection, list[Path]]:
    """What `select` finds, held; and what was removed before it could be held. Where a run removed all of it
    meanwhile, it looks again, a few times.

    Raises:
        CheckpointError: as of `select`; or each was removed.
    """
    for attempt in range(_TRIES):
        try:
            selection = select(patterns)
        except CheckpointError:
            if attempt == _TRIES - 1:
                raise
        else:
            removed = [path for path in selection.paths if not holds.take(path)]
            left = [path for path in selection.paths if path not in removed]
            if left or selection.damaged:
                return Selection(left, selection.skipped, selection.damaged), removed
        time.sleep(_PAUSE_S)
    raise CheckpointError(
        f"ckpt={', '.join(patterns)}: each checkpoint was removed before it was read", cure="Give the command again."
    )


log = logging.getLogger(__name__)


def validate(
    overrides: Sequence[str],
    *,
    config_dir: Path | None = None,
    config_name: str = "config",
    allow_pickle: bool = False,
    show: Callable[[Results], None] = show_table,
) -> int:
    """Evaluate what `ckpt=` names, write and show the results, and return the exit code.

    Args:
        allow_pickle: checkpoints of other programs may run any code when they are loaded.
        show: prints the results at the end.
    """
    ours = [one for one in overrides if one.lstrip("+").startswith(("ckpt=", "load.", "logging.", "validate."))]
    command = compose(ours, config_dir=config_dir, config_name=config_name, missing_ok=True, sections=())
    to_console(command.config.logging.level)
    ckpt = command.config.ckpt
    if ckpt is None:
        raise UserError(
            "validate needs ckpt=, which checkpoints to evaluate",
            cure="For example: train validate ckpt='runs/digits/checkpoints/step*' (ckpt=none for random weights).",
        )
    settings: dict[str, Any] = {"config_dir": config_dir, "config_name": config_name, "sections": EVALUATED}
    if ckpt == "none":
        composed = compose(overrides, **settings)
        experiment = _Experiment(composed, load_options(composed.config.load))
        results = Results(
            Path(composed.config.validate.folder or "runs/validation-none"), show, _keep_best([composed.config])
        )
        failures = experiment.evaluate([None], results)
        results.finish()
        return failures[0] if failures else ExitCode.DONE
    return _Validation(overrides, command.config, settings, allow_pickle, show).run(ckpt)


class _Validation:
    """The evaluation of all that `ckpt=` names, one experiment after another."""

    def __init__(
        self,
        overrides: Sequence[str],
        command: TrainConfig,
        settings: Mapping[str, Any],
        allow_pickle: bool,
        show: Callable[[Results], None],
    ) -> None:
        self.overrides = [override for override in overrides if not override.lstrip("+").startswith("ckpt=")]
        self.command, self.settings, self.allow_pickle, self.show = command, settings, allow_pickle, show
        self.experiments: dict[str, _Experiment] = {}
        """By the text of the config that was recovered."""
        self.results: Results | None = None
        self.failures: list[ExitCode] = []
        self.holds = Holds()
        self.named: set[Path] = set()
        """Checkpoints that are named one by one, not by a glob or a run."""
        self.stopped: Callable[[], bool] = lambda: False

    def run(self, ckpt: str | list[str]) -> int:
        """Evaluate, write and show the results; the exit code."""
        patterns, watches = [ckpt] if isinstance(ckpt, str) else ckpt, self.command.validate.watch
        self.named = set() if watches else {as_path(pattern) for pattern in patterns}
        with ExitStack() as stack:
            stack.callback(self._finish)
            if watches:
                signals = stack.enter_context(StopSignals("stopping after this checkpoint"))
                self.stopped = lambda: signals.stop_request is not None
            self.holds = stack.enter_context(Holds())
            if not watches:
                selection, removed = select_held(patterns, self.holds)
                for path in removed:
                    self._pass_over(path)
                self._evaluate(selection)
                return self._code()
            for selection in watched(patterns, time.sleep, self.stopped):
                self._evaluate(selection)
        return self._code()

    def _code(self) -> int:
        if not self.failures:
            return ExitCode.DONE
        return ExitCode.FAILED if self.results is not None and self.results.rows else self.failures[0]

    def _pass_over(self, path: Path) -> None:
        """Report a checkpoint that its run removed after it was listed; one that was named itself is demanded."""
        if path in self.named:
            log.error("%s was removed before it was evaluated", path)
            self.failures.append(ExitCode.NO_CHECKPOINT)
        else:
            log.warning("%s was removed before it was evaluated", path)

    def _finish(self) -> None:
        if self.results is not None:
            self.results.finish()

    def _evaluate(self, selection: Selection) -> None:
        for path, problem in selection.skipped.items():
            log.warning("skipped %s: %s", path, problem)
        for path, problem in selection.damaged.items():
            log.error("%s: %s", path, problem)
        groups = _by_experiment(selection, self.overrides, self._pass_over)
        experiments = [self._experiment(source, text) for source, text, _ in groups]
        if self.results is None:
            folders = (self.command.validate.folder, *(one.composed.config.validate.folder for one in experiments))
            self.results = Results(
                Path(next(filter(None, folders), None) or _folder(selection.paths)),
                self.show,
                _keep_best(experiment.composed.config for experiment in experiments),
            )
        self.failures += [ExitCode.NO_CHECKPOINT for _ in selection.damaged]
        for experiment, (_, _, paths) in zip(experiments, groups, strict=True):
            self.failures += experiment.evaluate(
                paths,
                self.results,
                pass_over=self._pass_over,
                release=self.holds.release,
                shows_each=self.command.validate.watch,
                stopped=self.stopped,
            )

    def _experiment(self, source: Path | str, text: str) -> _Experiment:
        if text not in self.experiments:
            composed = from_yaml(source, self.overrides, **self.settings)
            # What the run of a recovered config began with is no rule for its own checkpoints.
            load = self.command.load if source else composed.config.load
            self.experiments[text] = _Experiment(composed, load_options(load, allow_pickle=self.allow_pickle))
        return self.experiments[text]


def _by_experiment(
    selection: Selection, overrides: list[str], pass_over: Callable[[Path], None]
) -> list[tuple[Path | str, str, list[Path]]]:
    """The file that holds the config, its text, and the checkpoints that follow one another in one run under it.

    A checkpoint holds its config, whose digest is verified; if that is damaged, the checkpoint is. `pass_over` is
    called for each that was removed meanwhile.
    """
    known: list[tuple[Path, Path | str, str]] = []
    for path in selection.paths:
        try:
            source, text = config_of(path)
        except (CheckpointError, OSError) as error:
            if _is_removed(path):
                pass_over(path)
                continue
            if not isinstance(error, CheckpointError):
                raise
            log.error("%s: %s", path, error)
            selection.damaged[path] = str(error)
            continue
        if not source and not any(override.lstrip("+").startswith("experiment=") for override in overrides):
            raise CheckpointError(f"{path} carries no {CONFIG_FILE}", cure="Name its experiment: experiment=NAME.")
        known.append((path, source, text))
    groups = [list(group) for _, group in groupby(known, key=lambda one: (one[0].parent, one[2]))]
    return [(group[0][1], group[0][2], [path for path, _, _ in group]) for group in groups]


class _Experiment:
    """One config; its data is made once, before the first checkpoint is evaluated."""

    def __init__(self, composed: Composed, load: LoadOptions) -> None:
        self.composed, self.load = composed, load
        self._made: tuple[Builder, Data] | None = None
        self._origin: EvaluatedOrigin | None = None

    def evaluate(
        self,
        paths: Sequence[Path | None],
        results: Results,
        *,
        pass_over: Callable[[Path], None] = lambda path: None,
        release: Callable[[Path], None] = lambda path: None,
        shows_each: bool = False,
        stopped: Callable[[], bool] = lambda: False,
    ) -> list[ExitCode]:
        """Evaluate each checkpoint. A failure is reported and does not stop the others. Returns their exit codes.

        Args:
            pass_over: called for a checkpoint that was removed meanwhile.
            release: called after each checkpoint.
            shows_each: the numbers of each are logged.
            stopped: whether to leave out the checkpoints that follow.
        """
        failures = []
        with self.composed.placing():
            for path in paths:
                if stopped():
                    break
                name = "random weights" if path is None else str(path)
                log.info("evaluating %s", name)
                try:
                    rows = [Row(name, one.step, one.loader, one.metrics) for one in self._one(path)]
                except ConfigError:
                    raise
                except (CheckpointError, UserError) as error:
                    if path is not None and _is_removed(path):
                        pass_over(path)
                        continue
                    log.error("%s", error if str(error).startswith(name) else f"{name}: {error}")
                    failures.append(error.exit_code)
                else:
                    results.add(rows)
                    for row in rows if shows_each else ():
                        numbers = ", ".join(f"{key} {value:.4f}" for key, value in row.metrics.items())
                        log.info("%s on %s: %s", name, row.loader, numbers)
                finally:
                    if path is not None:
                        release(path)
        return failures

    def _one(self, path: Path | None) -> list[Evaluation]:
        builder, data = self._parts()
        if path is not None:
            self._origin = self._origin or EvaluatedOrigin(self.composed, data.val)
            self._origin.compare(path)
        trainer = builder.evaluator(data)
        return trainer.validate_all(data.val, [path], load=self.load)

    def _parts(self) -> tuple[Builder, Data]:
        if self._made is None:
            from trainer_cli.runs.build import Builder

            self.composed.check_targets(EVALUATED)
            builder = Builder(self.composed.config, self.composed.trust)
            data = builder.data()
            if not data.val:
                raise ConfigError("the data has no validation part (val)", location="data")
            self._made = builder, data
        return self._made


def _keep_best(configs: Iterable[TrainConfig]) -> Mapping[str, Any] | None:
    return shared_keep_best(asdict(config.checkpoint.keep_best) for config in configs)


def _is_removed(path: Path) -> bool:
    return kind_of(path) is None and catalog_of(path.parent).entry(path.name).removed


def _folder(paths: Sequence[Path]) -> Path:
    """Where results go: into the run's directory, or beside the runs where there are several, or none."""
    foreign = any(kind_of(path) is not None or is_url(path) or is_cached(path) for path in paths)
    runs = sorted({path if foreign else path.parent.parent for path in paths})
    if len(runs) == 1 and not foreign:
        return runs[0] / "validation"
    digest = hashlib.sha256("\n".join(map(str, runs)).encode()).hexdigest()[:8]
    return Path("runs") / f"validation-{digest}"
