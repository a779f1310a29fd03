"""Which checkpoint a start resumes, and why; and which changes of the config it accepts."""

from __future__ import annotations

import logging
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer_cli.checkpoint.catalog import Catalog, Check, Entry, catalog_of, why_damaged
from trainer_cli.checkpoint.copies import Place, newest_of_all
from trainer_cli.checkpoint.format.verified_file import verify
from trainer_cli.config.arguments import steps_by_evaluation, steps_by_log
from trainer_cli.config.compose import Composed, diff, to_yaml
from trainer_cli.config.diff import Change, changed_env_values, line_of_digests
from trainer_cli.config.fields import BY_GLOBAL_BATCH_SIZE, GLOBAL_BATCH_SIZE, matches_any, why_may_change
from trainer_cli.core.checkpoint_config import CheckpointConfig, Newer
from trainer_cli.core.url_path import as_path
from trainer_cli.errors import CheckpointError, ConfigError, UserError
from trainer_cli.runs.run_dir import RunDir, RunStatus
from trainer_cli.runs.select import ckpt_argument
from trainer_cli.terminal import table

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Choice:
    """The checkpoint to resume, or None to start at step 0, the reason as a sentence, and where it is."""

    entry: Entry | None
    reason: str
    place: Place


def folder_of_checkpoints(run: RunDir, now: CheckpointConfig, before: CheckpointConfig) -> Path:
    """The folder to resume from: where this start saves, or, if that is empty, where the earlier attempts saved."""
    saves, saved = run.folder_for(now.folder), run.folder_for(before.folder)
    return saves if saves == saved or run.catalog(saves).names() else saved


def frozen(composed: Composed, run_id: str) -> str:
    """The config as a run stores it, in its directory and in its checkpoints."""
    return to_yaml(composed) + line_of_digests(composed.raw, run_id)


def changes_since(run: RunDir, stored: Composed, composed: Composed) -> list[Change]:
    """The changes from the config that a run was trained with."""
    return [*diff(stored.raw, composed.raw), *changed_env_values(run.read_config(), composed.raw, run.run_id)]


def holds_training(run: RunDir, folder: Path, now: CheckpointConfig) -> bool:
    """Whether a run has a checkpoint in its folder or a copy of one, or is finished. Without, any config may replace
    its own."""
    if run.read_summary().get("status") == RunStatus.finished or run.catalog(folder).names():
        return True
    copies = now.copy_to.folder
    return copies is not None and bool(catalog_of(as_path(copies), run.copies_cache).names())


def refuse_changes(changes: Sequence[Change], composed: Composed, run_dir: Path) -> None:
    """Refuse changes that a resume does not accept (config/fields.py and `resume_allow`).

    Raises:
        ConfigError: with a table of the changes, the source of each new value, and what to do.
    """
    allowed, provenance = composed.config.resume_allow, composed.provenance
    verdicts = [(one, why_may_change(one.key, allowed)) for one in changes]
    if (composed.config.data or {}).get(GLOBAL_BATCH_SIZE) is not None:
        verdicts = [
            (one, "data.global_batch_size fixes a step's samples" if one.key in BY_GLOBAL_BATCH_SIZE else why)
            for one, why in verdicts
        ]
    if steps_by_evaluation(composed.config.scheduler):
        # Then an evaluation more or less is another training.
        verdicts = [
            (one, None if one.key.startswith("loop.eval_") and not matches_any(one.key, allowed) else why)
            for one, why in verdicts
        ]
    if steps_by_log(composed.config.scheduler):
        # Then another window of the mean is another training.
        verdicts = [
            (one, None if one.key == "loop.log_interval" and not matches_any(one.key, allowed) else why)
            for one, why in verdicts
        ]
    refused = [_quoted(one.key) for one, why in verdicts if why is None]
    if not refused:
        return
    verdicts.sort(key=lambda verdict: verdict[1] is not None)
    rows = [
        (f"may change ({why})" if why else "refused", one.key, one.values, str(one.origin(provenance) or ""))
        for one, why in verdicts
    ]
    leave = shlex.quote(f"resume_allow=[{','.join(refused)}]")
    raise ConfigError(
        f"the config differs from the one that {run_dir} was trained with:\n{table([''] * 4, rows, indent='  ')}\n",
        hint=(
            f"To go on all the same, add {leave}. To train this as another run, add "
            f"name=OTHER, and {ckpt_argument(f'{run_dir}@latest')} to begin it with the weights of this one."
        ),
    )


def choose(
    resume: str,
    places: Sequence[Place],
    run_id: str,
    *,
    newer: Newer = Newer.refuse,
    attempts: Sequence[Mapping[str, Any]] = (),
    check: Check = verify,
    quarantine: bool = True,
) -> Choice:
    """Which checkpoint of this run to resume, its bytes verified by `check`. `places` are the run's own folder, and
    that of its copies.

    `resume=PATH` repeated after it has saved resumes what it saved; repeated before it has saved anything, it loads
    PATH again. Checkpoints newer than PATH from before are ignored then.

    Raises:
        CheckpointError: one is demanded, or some exist, and none is valid.
        UserError: `never` although the run exists, or a path that is no checkpoint of the run.
    """
    own = places[0]
    folder = own.folder
    if resume == "never":
        raise UserError(
            f"resume=never, but {folder.parent} holds a run already",
            cure="Start another run with name=OTHER, or remove the directory.",
        )
    entries = {place.folder: _entries(place.catalog, run_id) for place in places}
    back = _went_back(attempts)
    saved_since = back is not None and any(_saved_by(one, back.attempt) for found in entries.values() for one in found)
    repeated = saved_since and bool(attempts) and attempts[-1].get("resume") == resume
    if resume not in ("auto", "must") and not repeated:
        path = as_path(resume)
        place = next((one for one in places if one.folder.resolve() == path.resolve().parent), own)
        return _named(path, entries[place.folder], place, newer, check)
    limit = None if back is None or saved_since else back.step
    newest = newest_of_all(places, run_id, limit=limit, check=check, quarantine=quarantine)
    if newest is not None:
        before = f"; the start before this one went back to {resume}, and saved since" if repeated else ""
        holder = folder.parent if newest[0] is own else newest[0].folder
        return Choice(newest[1], f"the newest valid checkpoint of {holder}{before}", newest[0])
    if resume == "must":
        raise CheckpointError(f"resume=must, but {folder} holds no checkpoint")
    return Choice(None, f"{folder} holds no checkpoint yet", own)


def _entries(catalog: Catalog, run_id: str) -> list[Entry]:
    return [one for one in catalog.entries() if one.manifest is None or one.manifest.run_id == run_id]


@dataclass(frozen=True, slots=True)
class _Back:
    """The last attempt that was started by `resume=PATH`."""

    attempt: int
    step: int


def _saved_by(entry: Entry, attempt: int) -> bool:
    """Whether an attempt, or one after it, saved this checkpoint."""
    return entry.valid and entry.manifest is not None and entry.manifest.attempt >= attempt


def _went_back(attempts: Sequence[Mapping[str, Any]]) -> _Back | None:
    for attempt in reversed(attempts):
        number, step = attempt.get("attempt"), attempt.get("start_step")
        if attempt.get("resume") is not None and isinstance(number, int) and isinstance(step, int):
            return _Back(number, step)
    return None


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
    """Step and reason of an end that no checkpoint records, or None.

    There is none if the weights were not finite, or if the config disabled the final save. If the final checkpoint was
    lost, the run is not finished.
    """
    step, reason = summary.get("step"), str(summary.get("reason"))
    if summary.get("status") != "finished" or not isinstance(step, int):
        return None
    own = catalog.valid(run_id)
    last = own[-1] if own else None
    if last is not None and last.step == step:
        return None if last.resumable else (step, reason)
    return None if settings.enabled and settings.save_final else (step, reason)


def _named(
    path: Path,
    entries: Sequence[Entry],
    place: Place,
    newer: Newer,
    check: Check,
) -> Choice:
    folder = place.folder
    entry = next((one for one in entries if (folder / one.name).resolve() == path.resolve()), None)
    if entry is None:
        raise UserError(
            f"resume={path} is neither auto, never, must, a run directory, nor a checkpoint in {folder}",
            where="resume",
            cure="To begin a new run with the weights of another, use ckpt=PATH.",
        )
    try:
        problem = why_damaged(place.catalog.storage, entry, check)
    except OSError as error:
        problem = f"it cannot be read: {error}"
    if problem is not None:
        raise CheckpointError(f"{path} is not valid: {problem}", cure="Name another, or use resume=auto.")
    later = [one for one in entries if one.problem is None and one.step > entry.step]
    if later and newer is not Newer.trash:
        raise UserError(
            f"resume={path} goes back, but newer checkpoints exist: {', '.join(one.name for one in later)}",
            where="checkpoint.newer",
            cure="To remove them, add checkpoint.newer=trash; to keep them, begin another run with name=OTHER "
            f"{ckpt_argument(path)} 'load.states=[all]'.",
        )
    return Choice(entry, "it was named", place)


def _quoted(key: str) -> str:
    """A key as an item of a list on the command line."""
    return key if re.fullmatch(r"[\w.*?/-]+", key) else f'"{key}"'
