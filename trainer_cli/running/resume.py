"""Which checkpoint a start resumes, and why; and which changes of the config it accepts."""

from __future__ import annotations

import logging
import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer_cli.catalog import Catalog, Check, CheckpointHistory, Entry, Life, newest_of_all, verify_and_decode
from trainer_cli.components import SECTIONS, is_node
from trainer_cli.config import Change, Composed, diff
from trainer_cli.elsewhere import hint_on
from trainer_cli.errors import CheckpointError, ConfigError, UserError
from trainer_cli.files import as_path, is_url, read_last_row, read_rows
from trainer_cli.runs import RunDir
from trainer_cli.schema import RESUME_WORDS, CheckpointConfig, Newer, TrainConfig
from trainer_cli.selection import ckpt_argument, named_path, suggest_nearby
from trainer_cli.steps import RunStatus
from trainer_cli.terminal import format_count, table

log = logging.getLogger(__name__)

FIRST_ONLY = "it has no checkpoint after step 0"
"""Why a run begins anew."""


@dataclass(frozen=True, slots=True)
class ChosenCheckpoint:
    """The checkpoint to resume (None: start at step 0), the reason as a sentence, and the catalog of its folder."""

    entry: Entry | None
    reason: str
    catalog: Catalog


def folder_of_checkpoints(run: RunDir, now: CheckpointConfig, before: CheckpointConfig) -> Path:
    """The folder to resume from: the one in which this attempt saves or, if that is empty, the one of earlier attempts.

    `now` and `before` are the sections `checkpoint` of the config and of the run's stored config.
    """
    folder, earlier_folder = run.folder_for(now.folder), run.folder_for(before.folder)
    has_checkpoints = folder == earlier_folder or run.catalog(folder).names()
    return folder if has_checkpoints else earlier_folder


def stored_config(composed: Composed, run_id: str) -> str:
    """The text of the config that a run stores in its directory and in its checkpoints."""
    return composed.to_stored(run_id)


def changes_since(run: RunDir, stored: Composed, composed: Composed) -> list[Change]:
    """The changes from the config that a run was trained with."""
    changes = diff(stored.raw, composed.raw)
    if os.path.normpath(stored.config.run_dir) == os.path.normpath(composed.config.run_dir):
        # Written in another way, such as by `${name}`.
        changes = [change for change in changes if change.key != "run_dir"]
    return [*changes, *composed.changed_env_values(run.read_config(), run.run_id)]


def holds_training(run: RunDir, folder: Path, now: CheckpointConfig, stored: TrainConfig) -> bool:
    """Whether a run is finished, or has a checkpoint to continue from; if not, it begins anew under any config."""
    if run.read_summary().get("status") == RunStatus.finished:
        return True
    catalogs = [run.catalog(folder)]
    if now.copy_to.folder is not None:
        catalogs.append(Catalog.of(as_path(now.copy_to.folder), run.copies_cache))
    # A checkpoint of step 0 counts if its weights are not those of a new model.
    was_named = any(attempt.get("resume") is not None for attempt in run.attempts)
    counts_first = was_named or stored.ckpt is not None
    return any(catalog.holds_steps(run.run_id, counts_first=counts_first) for catalog in catalogs)


def refuse_absent_folder(run: RunDir, catalog: Catalog) -> None:
    """Refuse to begin anew while the run's checkpoints may be on a disk that is not mounted.

    That can be if their folder is outside of the run's directory, or a link. A folder inside was emptied by its user.

    Raises:
        CheckpointError: the folder holds none after step 0, though the run has saved some that it has not removed.
    """
    # A checkpoint of step 0 is not needed, and may be found: saved before the disk was mounted over it.
    folder, saved = catalog.folder, [life for life in _list_unremoved(run) if life.step]
    is_inside = Path(os.path.realpath(run.path)) in Path(os.path.realpath(folder)).parents
    if saved and (is_url(folder) or not is_inside):
        raise CheckpointError(
            f"{folder} holds no checkpoint after step 0 now, but the run has saved {saved[-1].name}",
            where=str(run.path),
            cure="Mount its disk, or restore the folder. To begin anew, use name=OTHER or resume=anew.",
        )


def note_gone_checkpoints(run: RunDir, folder: Path) -> None:
    """Record as removed the checkpoints that a run lacks when it begins anew.

    Otherwise a later start, from another folder, would take them for checkpoints on a disk that is not mounted.
    """
    history, names = CheckpointHistory(run.history_file), run.catalog(folder).names()
    for life in _list_unremoved(run):
        if life.name not in names:
            history.removed(life.name, "it was gone when the run began anew")


def keep_records(run: RunDir, attempt: int, *, begins_anew: bool) -> None:
    """Keep the records of a run that starts at step 0 again in a file of their own.

    Args:
        begins_anew: True if no checkpoint is resumed, so that no record stays valid. The resume of a checkpoint of step
            0 drops the records of later steps itself.
    """
    step = read_last_row(run.metrics_file).get("step")
    if step:
        kept = run.metrics_file.with_suffix(f".before_attempt{attempt}.jsonl")
        if begins_anew:
            os.replace(run.metrics_file, kept)
        else:
            shutil.copyfile(run.metrics_file, kept)
        log.info("the records of the %s before are kept in %s", format_count(step, "step"), kept)


def _list_unremoved(run: RunDir) -> list[Life]:
    """The checkpoints that a run has saved and, by its history, not removed."""
    return [life for life in Life.read_all(read_rows(run.history_file)) if life.removed_at is None]


def refuse_changes(changes: Sequence[Change], composed: Composed, run_dir: Path, *, in_sweep: bool = False) -> None:
    """Refuse changes that a resume does not accept (keys/config_keys.py and `resume_allow`).

    Args:
        in_sweep: whether the command is one of a sweep, whose jobs cannot begin with the weights of one run.

    Raises:
        ConfigError: with a table of the changes, the source of each new value, and what to do.
    """
    verdicts = [(change, change.why_accepted(composed.config)) for change in changes]
    refused = [change for change, why in verdicts if why is None]
    if not refused:
        return
    # An argument that a class does not take, or of another type, is a mistake even if a resume would allow it.
    set_sections = {change.path[0] for change in changes if not change.is_removal}
    if changed := [name for name in SECTIONS if name in set_sections]:
        composed.check_targets(changed)
    # The refused changes first: they are what the user must act on. The sort is stable.
    verdicts.sort(key=lambda verdict: verdict[1] is not None)
    tree = composed.tree
    rows = [
        (f"may change ({why})" if why else "refused", change.key, change.values, str(change.origin(tree) or ""))
        for change, why in verdicts
    ]
    resume = composed.config.resume
    weights = f"{run_dir}@latest" if resume in RESUME_WORDS else resume
    if fixed := [change.key for change in refused if _is_fixed(change)]:
        allow = f"No checkpoint can be continued with another {' or '.join(fixed)}."
    else:
        leave = shlex.quote(f"resume_allow=[{','.join(_quote_item(change.key) for change in refused)}]")
        is_of_model = any(change.path[0] == "model" for change in refused)
        purpose = "with parameters of the same names and shapes" if is_of_model else "anyway"
        allow = f"To continue {purpose}, add {leave}."
    trash = RunDir(run_dir).trash
    is_of_shapes = any(change.path[0] == "model" and _is_size(change.new) for change in refused)
    if in_sweep:
        alternatives = (
            "To train this as another sweep, add name=OTHER. "
            f"To begin all runs anew, add resume=anew: they are moved to {trash}, and nothing is deleted."
        )
    else:
        # Weights of other shapes are not loaded.
        fork = "" if is_of_shapes else f", and {ckpt_argument(weights)} to begin it with the weights of this one"
        alternatives = (
            f"To train this as another run, add name=OTHER{fork}. "
            f"To begin this run anew, add resume=anew: it is moved to {trash}, and nothing is deleted."
        )
    raise ConfigError(
        f"the config differs from the one that {run_dir} was trained with:\n{table([''] * 4, rows, indent='  ')}\n",
        hint=f"{alternatives} {allow}" if is_of_shapes else f"{allow} {alternatives}",
    )


def _is_size(value: object) -> bool:
    """Whether a value of the model may be the size of a layer, or a list of sizes."""
    values = value if isinstance(value, list) else [value]
    return bool(values) and all(isinstance(item, int) and not isinstance(item, bool) for item in values)


def _is_fixed(change: Change) -> bool:
    """Whether no checkpoint can be loaded after a change: of the seed, or the class of an optimizer or schedule."""
    if change.path[0] not in ("optimizer", "scheduler"):
        return change.path == ("seed",)
    return change.path[-1] == "_target_" or any(is_node(value) for value in (change.old, change.new))


def choose(
    resume: str,
    catalogs: Sequence[Catalog],
    run_id: str,
    *,
    begins_anew: bool = False,
    newer: Newer = Newer.refuse,
    attempts: Sequence[Mapping[str, Any]] = (),
    check: Check = verify_and_decode,
    quarantine: bool = True,
) -> ChosenCheckpoint:
    """Choose the checkpoint of this run to resume, and verify its bytes by `check`.

    If `resume=PATH`, or `resume=RUN@step500`, is repeated after the attempt that it began has saved, the newest of its
    checkpoints is resumed. If that attempt has saved nothing, PATH is loaded again, and newer checkpoints of earlier
    attempts are ignored.

    Args:
        catalogs: of the folder in which the run saves, then of the folder of its copies.
        begins_anew: whether a checkpoint of step 0 is resumed only if `resume` names it; see `holds_training`.

    Raises:
        CheckpointError: none is valid, though `resume=must` or some exist.
        UserError: `resume=never` although the run exists, or a path that is no checkpoint of the run.
    """
    folder = catalogs[0].folder
    if resume == "never":
        raise UserError(
            f"resume=never, but {folder.parent} holds a run already",
            cure="Start another run with name=OTHER, or begin this one anew with resume=anew.",
        )
    last_return = _find_last_return(attempts)
    has_saved_since = last_return is not None and any(
        _is_saved_since(entry, last_return.attempt) for catalog in catalogs for entry in catalog.newest_first(run_id)
    )
    is_repeated = has_saved_since and bool(attempts) and attempts[-1].get("resume") == resume
    if resume not in ("auto", "must") and not is_repeated:
        path = named_path(resume)
        # The path is resolved: it may lead through a link or be relative.
        holders = (catalog for catalog in catalogs if catalog.folder.resolve() == path.resolve().parent)
        catalog = next(holders, catalogs[0])
        entries = [entry for entry in catalog.entries() if entry.may_be_of(run_id)]
        return _choose_named(path, entries, catalog, newer, check)
    if begins_anew and any(not entry.partial for catalog in catalogs for entry in catalog.newest_first(run_id)):
        return ChosenCheckpoint(None, f"anew: {FIRST_ONLY}", catalogs[0])
    # Until the attempt that returned has saved, later checkpoints are those of steps that it abandoned.
    limit = None if last_return is None or has_saved_since else last_return.step
    newest = newest_of_all(catalogs, run_id, limit=limit, check=check, quarantine=quarantine)
    if newest is not None:
        note = f"; the previous attempt resumed from {resume}, and has saved since" if is_repeated else ""
        holder = newest[0].folder
        if holder.name == "checkpoints":
            # The folder in the run's directory: the run itself is named.
            holder = holder.parent
        return ChosenCheckpoint(newest[1], f"the newest valid checkpoint of {holder}{note}", newest[0])
    if resume == "must":
        raise CheckpointError(f"resume=must, but {folder} holds no checkpoint")
    return ChosenCheckpoint(None, f"{folder} holds no checkpoint yet", catalogs[0])


@dataclass(frozen=True, slots=True)
class _Return:
    """The last attempt that returned to an earlier step by `resume=PATH`."""

    attempt: int
    step: int


def _is_saved_since(entry: Entry, attempt: int) -> bool:
    """Whether a checkpoint is valid and was saved by this attempt or a later one."""
    return entry.valid and entry.manifest is not None and entry.manifest.attempt >= attempt


def _find_last_return(attempts: Sequence[Mapping[str, Any]]) -> _Return | None:
    """The newest attempt that returned to an earlier step: it abandoned what came from earlier returns."""
    for attempt in reversed(attempts):
        number, step = attempt.get("attempt"), attempt.get("start_step")
        if attempt.get("resume") is not None and isinstance(number, int) and isinstance(step, int):
            return _Return(number, step)
    return None


def why_finished(entry: Entry, summary: dict[str, object]) -> str | None:
    """Why the run had ended at this checkpoint, by its manifest or the run's summary; None if it had not."""
    assert entry.manifest is not None
    finished = entry.manifest.finished
    if finished is None and summary.get("status") == "finished" and summary.get("step") == entry.manifest.step:
        finished = str(summary.get("reason"))
    return finished


def unsaved_end(catalog: Catalog, run_id: str, summary: dict[str, object], settings: CheckpointConfig) -> int | None:
    """The step at which the run ended, if only the summary records it and no checkpoint; else None.

    The final checkpoint is missing if the weights were not finite, or if the config disabled the final save. A run
    whose final checkpoint was lost is not finished.
    """
    step = summary.get("step")
    if summary.get("status") != "finished" or not isinstance(step, int):
        return None
    last = next((entry for entry in catalog.newest_first(run_id) if entry.valid), None)
    # A checkpoint of that step that lacks states cannot be resumed: the summary alone records the end.
    if last is not None and last.step == step:
        return None if last.resumable else step
    return None if settings.enabled and settings.save_final else step


def _choose_named(
    path: Path, entries: Sequence[Entry], catalog: Catalog, newer: Newer, check: Check
) -> ChosenCheckpoint:
    """Choose the checkpoint that `resume=PATH` names among those of the run in a catalog, and verify it.

    Raises:
        UserError: it is not among them, or newer ones exist and `newer` refuses that.
        CheckpointError: it is damaged or cannot be read.
    """
    folder = catalog.folder
    entry = next((entry for entry in entries if (folder / entry.name).resolve() == path.resolve()), None)
    if entry is None:
        nearby = None if path.exists() else suggest_nearby(str(folder / path.name))
        fork = "To begin a new run with the weights of another, use ckpt=PATH."
        raise UserError(
            f"resume={path} is neither {', '.join(RESUME_WORDS)}, a run directory, nor a checkpoint in {folder}",
            where="resume",
            cure=hint_on("resume", str(path)) or nearby or fork,
        )
    try:
        problem = catalog.why_damaged(entry, check)
    except OSError as error:
        problem = f"it cannot be read: {error}"
    if problem is not None:
        raise CheckpointError(f"{path} is not valid: {problem}", cure="Name another, or use resume=auto.")
    # Partial and damaged ones are no loss, so they do not stop a return.
    newer_entries = [other for other in entries if other.problem is None and other.step > entry.step]
    if newer_entries and newer is not Newer.trash:
        raise UserError(
            f"resume={path} goes back, but newer checkpoints exist: {', '.join(other.name for other in newer_entries)}",
            where="checkpoint.newer",
            cure="To remove them, add checkpoint.newer=trash; to keep them, begin another run with name=OTHER "
            f"{ckpt_argument(path)} 'load.states=[all]'.",
        )
    return ChosenCheckpoint(entry, "it was named", catalog)


def _quote_item(key: str) -> str:
    """Quote a key for a list on the command line, if needed."""
    return key if re.fullmatch(r"[\w.*?/-]+", key) else f'"{key}"'
