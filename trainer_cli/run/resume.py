"""Which checkpoint a start goes on from, and why; and whether the config may have changed meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from trainer_cli.checkpoint.catalog import Catalog, Entry
from trainer_cli.checkpoint.soundness import newest_sound, why_unsound
from trainer_cli.config.compose import Change
from trainer_cli.config.schema import CheckpointConfig, LoopConfig
from trainer_cli.errors import CheckpointError, ConfigError, UserError
from trainer_cli.trainer.duration import Duration

log = logging.getLogger(__name__)

MAY_CHANGE = (
    "name", "run_dir", "device", "resume", "resume_allow", "ckpt", "trust", "load.*", "validate.*",
    "loop.max_duration", "loop.hard_stop", "loop.max_time", "loop.eval_*", "loop.log_interval",
    "logging.*", "loggers", "loggers.*", "checkpoint.*", "data.num_workers",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Choice:
    """The checkpoint to go on from, or None for a fresh start, and the reason as a sentence."""

    entry: Entry | None
    reason: str


def refuse_changes(changes: Sequence[Change], allowed: Sequence[str], run_dir: Path) -> None:
    """Pass what may change on a resume; refuse the rest, all of it at once.

    Raises:
        ConfigError: with a table of the changes and the ways out.
    """
    patterns = (*MAY_CHANGE, *allowed)
    refused = [change for change in changes if not any(fnmatchcase(change.key, pattern) for pattern in patterns)]
    if not refused:
        return
    width = max(len(change.key) for change in refused)
    rows = "\n".join(f"  {change.key:<{width}}  {_shown(change.old)} -> {_shown(change.new)}" for change in refused)
    keys = ",".join(change.key for change in refused)
    raise ConfigError(
        f"the config differs from the one that {run_dir} was trained with:\n{rows}\n",
        cure=(
            "To train another model, start another run with name=OTHER (and ckpt=PATH to begin with these weights); "
            f"to go on all the same, add 'resume_allow=[{keys}]'."
        ),
    )


def choose(resume: str, catalog: Catalog, run_id: str, folder: Path) -> Choice:
    """Which checkpoint of this run to go on from, its bytes verified.

    Raises:
        CheckpointError: one is demanded, or some exist, and none is valid.
        UserError: `never` although the run exists, or a path that is no way back.
    """
    if resume == "never":
        raise UserError(
            f"resume=never, but {folder.parent} holds a run already",
            cure="Start another run with name=OTHER, or remove the directory.",
        )
    entries = [one for one in catalog.entries() if one.manifest is None or one.manifest.run_id == run_id]
    if resume not in ("auto", "must"):
        return _named(Path(resume), entries, catalog, folder)
    newest = newest_sound(catalog, run_id, str(folder))
    if newest is not None:
        return Choice(newest, f"the newest valid checkpoint of {folder.parent}")
    if resume == "must":
        raise CheckpointError(f"resume=must, but {folder} holds no checkpoint")
    return Choice(None, f"{folder} holds no checkpoint yet")


def why_finished(entry: Entry, summary: dict[str, object]) -> str | None:
    """Why the run had ended at this checkpoint, or None."""
    assert entry.manifest is not None
    finished = entry.manifest.finished
    if finished is None and summary.get("status") == "finished" and summary.get("step") == entry.manifest.step:
        finished = str(summary.get("reason"))
    return finished


def unsaved_end(
    catalog: Catalog, run_id: str, summary: dict[str, object], settings: CheckpointConfig
) -> tuple[int, str] | None:
    """Step and reason of an end that no checkpoint to go on from can tell, or None.

    Its weights are not finite, or the config did not want it saved. Where the checkpoint of an end was lost, the
    run is not finished.
    """
    step, reason = summary.get("step"), str(summary.get("reason"))
    if summary.get("status") != "finished" or not isinstance(step, int):
        return None
    own = catalog.valid(run_id)
    last = own[-1] if own else None
    if last is not None and last.step == step:
        return None if last.resumable else (step, reason)
    return None if settings.enabled and settings.save_final else (step, reason)


def reopens(old: LoopConfig, new: LoopConfig) -> bool:
    """True where a finished run goes on: a longer `max_duration`, or another `hard_stop`."""
    if old.hard_stop != new.hard_stop:
        return True
    before, now = Duration.parse(old.max_duration), Duration.parse(new.max_duration)
    return now.unit is not before.unit or now.value > before.value


def _named(path: Path, entries: Sequence[Entry], catalog: Catalog, folder: Path) -> Choice:
    entry = next((one for one in entries if (folder / one.name).resolve() == path.resolve()), None)
    if entry is None:
        raise UserError(
            f"resume={path} is neither auto, never, must, a run directory, nor a checkpoint in {folder}",
            where="resume",
            cure="To begin a new run with the weights of another, use ckpt=PATH.",
        )
    try:
        problem = why_unsound(catalog.storage, entry)
    except OSError as error:
        problem = f"it cannot be read: {error}"
    if problem is not None:
        raise CheckpointError(f"{path} is not valid: {problem}", cure="Name another, or use resume=auto.")
    newer = [one.name for one in entries if one.problem is None and one.step > entry.step]
    if newer:
        raise UserError(
            f"resume={path} goes back, but newer checkpoints exist: {', '.join(newer)}",
            cure="Move them out of the folder first, so that the abandoned branch cannot win later.",
        )
    return Choice(entry, "it was named")


def _shown(value: object) -> str:
    return "null" if value is None else str(value)
