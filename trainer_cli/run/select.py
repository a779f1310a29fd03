"""Which checkpoints `ckpt=` names: paths, globs, and `RUN_DIR@latest`, `@best`, `@step500`."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trainer_cli.checkpoint.catalog import Entry
from trainer_cli.checkpoint.naming import CONFIG_FILE, MANIFEST_FILE, parse_step
from trainer_cli.checkpoint.policy import BestRule, Saved
from trainer_cli.checkpoint.soundness import catalog_of
from trainer_cli.config.globs import alternatives
from trainer_cli.config.schema import Mode
from trainer_cli.errors import CheckpointError, UserError

_AT = re.compile(r"(?P<run>.+)@(?P<which>latest|best|step\d+)")
_CONFIG_BYTES = 1_000_000


@dataclass(frozen=True, slots=True)
class Selection:
    """The checkpoints that patterns name, in order of run and step; what was passed over, and what is damaged."""

    paths: list[Path]
    skipped: dict[Path, str]
    damaged: dict[Path, str]


def select(patterns: Sequence[str]) -> Selection:
    """Expand every pattern before any work is done.

    A folder without a manifest is partial, and skipped; one whose manifest or sizes are wrong is damaged. A
    checkpoint that is named twice, also by another path, counts once.

    Raises:
        CheckpointError: a pattern matches nothing, or nothing valid.
        UserError: a pattern names a place that is no checkpoint.
    """
    found: dict[Path, tuple[str, int]] = {}
    skipped: dict[Path, str] = {}
    damaged: dict[Path, str] = {}
    seen: set[Path] = set()
    for pattern in patterns:
        matches = list(_matches(pattern))
        if not matches:
            raise CheckpointError(f"ckpt={pattern} matches nothing", cure=_nearby(pattern))
        for path in matches:
            if path.resolve() in seen:
                continue
            seen.add(path.resolve())
            entry = _entry(path)
            if entry.problem is not None:
                (skipped if entry.partial else damaged)[path] = entry.problem
            else:
                found[path] = (str(path.parent), entry.step)
    if not found:
        listed = "\n".join(f"  {path}: {problem}" for path, problem in {**skipped, **damaged}.items())
        raise CheckpointError(f"ckpt={', '.join(patterns)} matches no valid checkpoint:\n{listed}\n")
    return Selection(sorted(found, key=lambda path: found[path]), skipped, damaged)


def select_one(pattern: str | list[str]) -> Path:
    """The one checkpoint that a pattern names.

    Raises:
        UserError: it names several.
        CheckpointError: it names none.
    """
    chosen = select([pattern] if isinstance(pattern, str) else pattern).paths
    if len(chosen) > 1:
        raise UserError(
            f"ckpt={pattern} names {len(chosen)} checkpoints, and a run begins with one",
            cure=f"Name one of them, for example ckpt={chosen[-1]}.",
        )
    return chosen[0]


def all_of(pattern: str) -> list[Path]:
    """Every folder that a pattern names, valid or not; a run, or a folder of checkpoints, names all that are in it.

    Raises:
        CheckpointError: it names nothing.
    """
    found: list[Path] = []
    for path in _matches(pattern, whole_runs=True):
        if is_checkpoint(path) or parse_step(path.name) is not None:
            found.append(path)
        else:
            folder = checkpoints_of(path)
            found += [folder / name for name in catalog_of(folder).names()]
    if not found:
        raise CheckpointError(f"{pattern} names no checkpoint", cure=_nearby(pattern))
    return list(dict.fromkeys(found))


def is_checkpoint(path: Path) -> bool:
    """True for a folder with a manifest."""
    return (path / MANIFEST_FILE).is_file()


def checkpoints_of(run: Path) -> Path:
    """The folder of a run's checkpoints: `checkpoints/`, or what its config says; a folder of no run is its own."""
    if not (run / CONFIG_FILE).is_file() or is_checkpoint(run):
        return run
    config = run_config(run)
    section = config.get("checkpoint")
    named = section.get("folder") if isinstance(section, dict) else None
    return Path(named) if isinstance(named, str) and "${" not in named else run / "checkpoints"


def run_config(run: Path) -> dict[str, Any]:
    """The written config of a run, unresolved; empty where it cannot be read."""
    try:
        with (run / CONFIG_FILE).open("rb") as file:
            found = yaml.safe_load(file.read(_CONFIG_BYTES))
    except (OSError, yaml.YAMLError, UnicodeDecodeError):
        return {}
    return found if isinstance(found, dict) else {}


def _matches(pattern: str, *, whole_runs: bool = False) -> Iterator[Path]:
    if match := _AT.fullmatch(pattern):
        yield _of_run(Path(match["run"]), match["which"])
        return
    if Path(pattern).exists():
        yield Path(pattern) if whole_runs else _checkpoint_folder(Path(pattern))
        return
    for alternative in alternatives(pattern):
        for name in glob.glob(alternative, recursive=True):
            if Path(name).is_dir():
                yield Path(name)


def _checkpoint_folder(path: Path) -> Path:
    """A path as it was named, unless it is plainly something else than a checkpoint."""
    if (path / "checkpoints").is_dir():
        raise UserError(
            f"ckpt={path} is a run directory",
            cure=f"Name its checkpoints: ckpt='{path}/checkpoints/step*', or ckpt={path}@latest.",
        )
    if not path.is_dir():
        raise UserError(f"ckpt={path} is a file, but a checkpoint is a directory")
    return path if path.name not in ("", "..") else path.resolve()


def _of_run(run: Path, which: str) -> Path:
    folder = checkpoints_of(run)
    if not folder.is_dir():
        raise CheckpointError(f"ckpt={run}@{which}: there is no {folder}", cure=_nearby(str(run)))
    valid = catalog_of(folder).valid()
    if which == "latest":
        chosen = valid[-1] if valid else None
    elif which == "best":
        chosen = best_of(valid, run)
        if chosen is None:
            raise CheckpointError(
                f"ckpt={run}@best: no checkpoint was saved at an evaluation, so none has a loss of one"
            )
    else:
        chosen = next((entry for entry in valid if f"step{entry.step}" == which), None)
    if chosen is None:
        have = ", ".join(entry.name for entry in valid) or "no valid checkpoint"
        raise CheckpointError(f"ckpt={run}@{which}: there is none", cure=f"{folder} holds {have}.")
    return folder / chosen.name


def best_of(valid: Sequence[Entry], run: Path) -> Entry | None:
    """The best by the run's own `checkpoint.keep_best`, else the one with the smallest validation loss; of equal ones
    the newer."""
    saved = {one.name: entry for entry in valid if (one := entry.saved()) is not None}
    facts = [one for entry in valid if (one := entry.saved()) is not None]
    rule = _best_rule(run) or _usual_rule(facts)
    ranked = rule.ranked(facts) if rule is not None else []
    return saved[ranked[0].name] if ranked else None


def _best_rule(run: Path) -> BestRule | None:
    section = run_config(run).get("checkpoint")
    best = section.get("keep_best") if isinstance(section, dict) else None
    if not isinstance(best, dict) or not isinstance(best.get("metric"), str):
        return None
    return BestRule(best["metric"], Mode.max if best.get("mode") == "max" else Mode.min)


def _usual_rule(facts: Sequence[Saved]) -> BestRule | None:
    losses = sorted({key for one in facts for key in one.metrics if _is_validation_loss(key)})
    return BestRule(losses[0]) if losses else None


def _is_validation_loss(key: str) -> bool:
    return key.endswith("/loss") and not key.startswith("train/")


def _entry(path: Path) -> Entry:
    return catalog_of(path.parent).entry(path.name)


def _nearby(pattern: str) -> str | None:
    """What there is where the pattern looks."""
    folder = Path(re.split(r"[*?\[{@]", pattern, maxsplit=1)[0])
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        return None
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))[:8]
    return f"{folder} holds {', '.join(names)}." if names else f"{folder} is empty."
