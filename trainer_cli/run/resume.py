"""Which checkpoint a start goes on from, and why; and whether the config may have changed meanwhile."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer_cli.checkpoint.catalog import Catalog, Entry
from trainer_cli.checkpoint.soundness import catalog_of, newest_sound, why_unsound
from trainer_cli.config.difference import Change
from trainer_cli.config.origins import Origins
from trainer_cli.config.resumable import why_may_change
from trainer_cli.config.schema import CheckpointConfig, LoopConfig
from trainer_cli.errors import CheckpointError, ConfigError, UserError
from trainer_cli.run.rundir import RunDir, RunStatus
from trainer_cli.trainer.duration import Duration

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Choice:
    """The checkpoint to go on from, or None for a fresh start, and the reason as a sentence."""

    entry: Entry | None
    reason: str


def holds_training(run: RunDir) -> bool:
    """True where a run has something to go on from, or an end. Without either, another config takes nothing away."""
    return bool(catalog_of(run.checkpoints_folder).entries()) or run.read_summary().get("status") == RunStatus.finished


def refuse_changes(changes: Sequence[Change], allowed: Sequence[str], run_dir: Path, origins: Origins) -> None:
    """Pass what may change on a resume (config/resumable.py and `allowed`); with one change that may not, refuse all.

    Raises:
        ConfigError: with a table of the changes and where each new value comes from, and the ways out.
    """
    verdicts = [(one, why_may_change(one.key, allowed)) for one in changes]
    refused = [_quoted(one.key) for one, why in verdicts if why is None]
    if not refused:
        return
    verdicts.sort(key=lambda verdict: verdict[1] is not None)
    rows = [
        (f"may change ({why})" if why else "refused", one.key, one.values, str(one.origin(origins) or ""))
        for one, why in verdicts
    ]
    raise ConfigError(
        f"the config differs from the one that {run_dir} was trained with:\n{_table(rows)}\n",
        cure=(
            f"To go on all the same, add 'resume_allow=[{','.join(refused)}]'. To train this as another run, add "
            f"name=OTHER, and ckpt={run_dir}@latest to begin it with the weights of this one."
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


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [min(50, max(map(len, column))) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  " + "  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _quoted(key: str) -> str:
    """A key as an item of a list on the command line."""
    return key if re.fullmatch(r"[\w.*?/-]+", key) else f'"{key}"'
