"""`train validate`: evaluate checkpoints.

expand every pattern, and check all of them before any work
for each run among them: read its config from the checkpoint, build its data once
    for each checkpoint: a new model, its weights, every validation loader
write the results, print the table
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from trainer_cli.checkpoint.foreign.kind import kind_of
from trainer_cli.checkpoint.load_options import LoadOptions
from trainer_cli.checkpoint.naming import CONFIG_FILE
from trainer_cli.checkpoint.storage.url_path import is_url
from trainer_cli.config.arguments import EVALUATED
from trainer_cli.config.compose import Composed, compose, from_yaml
from trainer_cli.config.schema import LoadConfig
from trainer_cli.errors import CheckpointError, ConfigError, ExitCode, UserError
from trainer_cli.run import report
from trainer_cli.run.recover import config_of
from trainer_cli.run.results import Results, Row
from trainer_cli.run.select import Selection, select
from trainer_cli.run.start import load_options

if TYPE_CHECKING:
    from trainer_cli.run.build import Builder, Data
    from trainer_cli.trainer.trainer import Evaluation

log = logging.getLogger(__name__)


def validate(
    overrides: Sequence[str],
    *,
    config_dir: Path | None = None,
    config_name: str = "config",
    allow_pickle: bool = False,
) -> int:
    """Evaluate what `ckpt=` names, write and show the results, and return the exit code.

    Args:
        allow_pickle: checkpoints of other programs may run any code when they are loaded.
    """
    ours = [one for one in overrides if one.lstrip("+").startswith(("ckpt=", "load.", "logging.", "validate."))]
    command = compose(ours, config_dir=config_dir, config_name=config_name, missing_ok=True, sections=())
    report.to_console(command.config.logging.level)
    ckpt = command.config.ckpt
    if ckpt is None:
        raise UserError(
            "validate needs ckpt=, which checkpoints to evaluate",
            cure="For example: train validate ckpt='runs/digits/checkpoints/step*' (ckpt=none for random weights).",
        )
    damaged: dict[Path, str] = {}
    jobs: list[tuple[Composed, LoadConfig, Sequence[Path | None]]] = []
    if ckpt == "none":
        composed = compose(overrides, config_dir=config_dir, config_name=config_name, sections=EVALUATED)
        jobs.append((composed, composed.config.load, [None]))
        usual = Path("runs/validation-none")
    else:
        selection = select([ckpt] if isinstance(ckpt, str) else ckpt)
        for path, problem in selection.skipped.items():
            log.warning("skipped %s: %s", path, problem)
        for path, problem in selection.damaged.items():
            log.error("%s: %s", path, problem)
        rest = [override for override in overrides if not override.lstrip("+").startswith("ckpt=")]
        for source, paths in _by_experiment(selection, rest):
            composed = from_yaml(source, rest, config_dir=config_dir, config_name=config_name, sections=EVALUATED)
            # What the run of a recovered config began with is no rule for its own checkpoints.
            jobs.append((composed, command.config.load if source else composed.config.load, paths))
        damaged, usual = selection.damaged, _folder(selection.paths)
    configured = next((folder for composed, *_ in jobs if (folder := composed.config.validate.folder)), None)
    results = Results(Path(command.config.validate.folder or configured or usual))
    failures = [ExitCode.NO_CHECKPOINT for _ in damaged]
    try:
        for composed, load, checkpoints in jobs:
            failures += _evaluate(composed, load_options(load, allow_pickle=allow_pickle), checkpoints, results)
    finally:
        results.finish()
    if not failures:
        return ExitCode.DONE
    return ExitCode.FAILED if results.rows else failures[0]


def _by_experiment(selection: Selection, overrides: list[str]) -> list[tuple[Path | str, list[Path]]]:
    """The checkpoints that follow one another in one run under one config, and the file that holds the config.

    A checkpoint holds its config, whose digest is verified; if that is damaged, the checkpoint is.
    """
    known: list[tuple[Path, Path | str, str]] = []
    for path in selection.paths:
        try:
            source, text = config_of(path)
        except CheckpointError as error:
            log.error("%s: %s", path, error)
            selection.damaged[path] = str(error)
            continue
        if not source and not any(override.lstrip("+").startswith("experiment=") for override in overrides):
            raise CheckpointError(f"{path} carries no {CONFIG_FILE}", cure="Name its experiment: experiment=NAME.")
        known.append((path, source, text))
    groups = [list(group) for _, group in groupby(known, key=lambda one: (one[0].parent, one[2]))]
    return [(group[0][1], [path for path, _, _ in group]) for group in groups]


def _evaluate(composed: Composed, load: LoadOptions, paths: Sequence[Path | None], results: Results) -> list[ExitCode]:
    """Evaluate each checkpoint. A failure is reported and does not stop the others. Returns their exit codes."""
    from trainer_cli.run.build import Builder

    composed.check_targets(EVALUATED)
    failures = []
    with composed.placing():
        builder = Builder(composed.config, composed.trust)
        data = builder.data()
        if not data.val:
            raise UserError("the data has no validation part (val)", where="data")
        for path in paths:
            name = "random weights" if path is None else str(path)
            log.info("evaluating %s", name)
            try:
                rows = [Row(name, one.step, one.loader, one.metrics) for one in _one(builder, data, load, path)]
            except ConfigError:
                raise
            except (CheckpointError, UserError) as error:
                log.error("%s", error if str(error).startswith(name) else f"{name}: {error}")
                failures.append(error.exit_code)
            else:
                results.add(rows)
    return failures


def _one(builder: Builder, data: Data, load: LoadOptions, path: Path | None) -> list[Evaluation]:
    trainer = builder.evaluator(data)
    try:
        return trainer.validate_all(data.val, [path], load=load)
    finally:
        trainer.close()


def _folder(paths: Sequence[Path]) -> Path:
    """Where results go: into the run's directory, or beside the runs where there are several, or none."""
    foreign = any(kind_of(path) is not None or is_url(path) for path in paths)
    runs = sorted({path if foreign else path.parent.parent for path in paths})
    if len(runs) == 1 and not foreign:
        return runs[0] / "validation"
    digest = hashlib.sha256("\n".join(map(str, runs)).encode()).hexdigest()[:8]
    return Path("runs") / f"validation-{digest}"
