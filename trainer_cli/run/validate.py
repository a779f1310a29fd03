"""The story of `train validate`.

expand every pattern, and check all of them before any work
for each run among them: recover its config from the checkpoint, build its data once
    for each checkpoint: a model as new, its weights, every validation loader
write the results, show the table
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import logging
import math
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from trainer_cli.checkpoint.format.verified import read_verified
from trainer_cli.checkpoint.naming import CONFIG_FILE
from trainer_cli.checkpoint.soundness import catalog_of
from trainer_cli.config.compose import Composed, compose, from_yaml
from trainer_cli.errors import CheckpointError, ExitCode, UserError
from trainer_cli.loggers.base import Record, RunFacts
from trainer_cli.loggers.files import replace
from trainer_cli.run import report
from trainer_cli.run.rundir import RunDir
from trainer_cli.run.select import Selection, select

if TYPE_CHECKING:
    from trainer_cli.run.build import Builder, Data
    from trainer_cli.trainer.trainer import Evaluation

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Row:
    """One checkpoint on one loader."""

    checkpoint: str
    step: int
    loader: str
    metrics: dict[str, float]


def validate(overrides: Sequence[str], *, config_dir: Path | None = None, config_name: str = "config") -> int:
    """Evaluate what `ckpt=` names, write and show the results, and return the exit code."""
    ours = [override for override in overrides if _is_about_us(override)]
    asked = compose(ours, config_dir=config_dir, config_name=config_name, missing_ok=True)
    report.to_console(asked.config.logging.level)
    ckpt = asked.config.ckpt
    if ckpt is None:
        raise UserError(
            "validate needs ckpt=, which checkpoints to evaluate",
            cure="For example: train validate ckpt='runs/digits/checkpoints/step*' (ckpt=none for random weights).",
        )
    if ckpt == "none":
        composed = compose(overrides, config_dir=config_dir, config_name=config_name)
        rows, failed = _evaluate(composed, [None])
        folder = Path(composed.config.validate.folder or "runs/validation-none")
    else:
        selection = select([ckpt] if isinstance(ckpt, str) else ckpt)
        for path, problem in selection.skipped.items():
            log.warning("skipped %s: %s", path, problem)
        for path, problem in selection.damaged.items():
            log.error("%s: %s", path, problem)
        rest = [override for override in overrides if not override.lstrip("+").startswith("ckpt=")]
        rows = []
        told = asked.config.validate.folder
        groups = _by_experiment(selection, rest)
        failed = bool(selection.damaged)
        for source, paths in groups:
            composed = from_yaml(source, rest, config_dir=config_dir, config_name=config_name)
            more, wrong = _evaluate(composed, paths)
            rows += more
            failed = failed or wrong
            told = told or composed.config.validate.folder
        folder = Path(told or _folder(selection.paths))
    if rows:
        _write(rows, folder)
        _show(rows)
        print(f"results: {folder}/validation.jsonl, {folder}/validation.csv")
    return ExitCode.FAILED if failed or not rows else ExitCode.DONE


def _is_about_us(override: str) -> bool:
    return override.lstrip("+").startswith(("ckpt=", "logging.", "validate."))


def _by_experiment(selection: Selection, overrides: list[str]) -> list[tuple[Path | str, list[Path]]]:
    """The checkpoints that follow one another in one run under one config, and the file that holds the config.

    A checkpoint carries its own, whose digest is verified; where that is damaged, the checkpoint is too.
    """
    known: list[tuple[Path, Path | str, str]] = []
    for path in selection.paths:
        try:
            source, text = _config_of(path)
        except CheckpointError as error:
            log.error("%s: %s", path, error)
            selection.damaged[path] = str(error)
            continue
        if not source and not any(override.lstrip("+").startswith("experiment=") for override in overrides):
            raise CheckpointError(
                f"{path} carries no {CONFIG_FILE}", cure="Say which experiment it is: experiment=NAME."
            )
        known.append((path, source, text))
    groups = [list(group) for _, group in groupby(known, key=lambda one: (one[0].parent, one[2]))]
    return [(group[0][1], [path for path, _, _ in group]) for group in groups]


def _config_of(path: Path) -> tuple[Path | str, str]:
    """The file that says which experiment a checkpoint is of, and its text; both empty where there is none."""
    catalog = catalog_of(path.parent)
    manifest = catalog.entry(path.name).manifest
    if manifest is not None and CONFIG_FILE in manifest.files:
        with catalog.storage.reading(path.name) as folder:
            return path / CONFIG_FILE, read_verified(folder, manifest, CONFIG_FILE).decode()
    beside = RunDir(path.parent.parent)
    return (beside.config_file, beside.read_config()) if beside.config_file.is_file() else ("", "")


def _evaluate(composed: Composed, paths: Sequence[Path | None]) -> tuple[list[Row], bool]:
    """Rows of each checkpoint; True where one could not be evaluated (the others are, all the same)."""
    from trainer_cli.run.build import Builder

    if str(composed.project_root) not in sys.path:
        sys.path.insert(0, str(composed.project_root))
    rows: list[Row] = []
    failed = False
    with composed.placing():
        builder = Builder(composed.config, composed.trust)
        data = builder.data()
        if not data.val:
            raise UserError("the data has no validation part (val)", where="data")
        for path in paths:
            name = "random weights" if path is None else str(path)
            log.info("evaluating %s", name)
            try:
                rows += [_row(one, name) for one in _one(builder, data, path)]
            except CheckpointError as error:
                log.error("%s: %s", name, error)
                failed = True
    return rows, failed


def _one(builder: Builder, data: Data, path: Path | None) -> list[Evaluation]:
    trainer = builder.evaluator(data)
    try:
        return trainer.validate_all(data.val, [path])
    finally:
        trainer.close()


def _row(one: Evaluation, name: str) -> Row:
    return Row(name, one.step, one.loader, one.metrics)


def _folder(paths: Sequence[Path]) -> Path:
    """Where results go: into the run's directory, or beside the runs where there are several."""
    runs = sorted({path.parent.parent for path in paths})
    if len(runs) == 1:
        return runs[0] / "validation"
    digest = hashlib.sha256("\n".join(map(str, runs)).encode()).hexdigest()[:8]
    return Path("runs") / f"validation-{digest}"


def _write(rows: Sequence[Row], folder: Path) -> None:
    """Append to validation.jsonl, replace validation.csv, and add events at each checkpoint's own step."""
    from trainer_cli.loggers.tensorboard import TensorBoardLogger

    folder.mkdir(parents=True, exist_ok=True)
    now = round(time.time(), 3)
    lines = [
        {"checkpoint": row.checkpoint, "step": row.step, "loader": row.loader, "time": now, **_prefixed(row)}
        for row in rows
    ]
    with open(folder / "validation.jsonl", "a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    names = list(dict.fromkeys(key for row in rows for key in row.metrics))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["checkpoint", "step", "loader", *names])
    writer.writerows([row.checkpoint, row.step, row.loader, *(row.metrics.get(n, "") for n in names)] for row in rows)
    replace(folder / "validation.csv", [text.getvalue().encode()])
    with ExitStack() as stack:
        events = TensorBoardLogger("tensorboard")
        stack.callback(events.close)
        events.start(RunFacts(run_dir=folder))
        for row in sorted(rows, key=lambda row: row.step):
            events.log(Record(step=row.step, epoch=0, time=now, metrics=_prefixed(row)))


def _prefixed(row: Row) -> dict[str, float]:
    return {f"{row.loader}/{key}": value for key, value in row.metrics.items()}


def _show(rows: Sequence[Row]) -> None:
    """A table with a row for each checkpoint and loader; the smallest loss of each loader is marked."""
    names = list(dict.fromkeys(key for row in rows for key in row.metrics))
    best = _best(rows)
    lines = [["", "checkpoint", "step", "loader", *names]]
    for index, row in enumerate(rows):
        numbers = [f"{row.metrics[name]:.4f}" if name in row.metrics else "" for name in names]
        lines.append(["*" if index in best else "", row.checkpoint, str(row.step), row.loader, *numbers])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        left = (0, 1, 3)
        cells = [c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))]
        print("  ".join(cells).rstrip())
    if best:
        print("* smallest loss")


def _best(rows: Sequence[Row]) -> set[int]:
    """The row with the smallest finite loss of each loader; of equal ones the newest."""
    best: dict[str, int] = {}
    for index, row in enumerate(rows):
        loss = row.metrics.get("loss")
        if loss is None or not math.isfinite(loss):
            continue
        held = best.get(row.loader)
        if held is None or (loss, -row.step) < (rows[held].metrics["loss"], -rows[held].step):
            best[row.loader] = index
    return set(best.values())
