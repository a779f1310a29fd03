"""Where a `fit` begins: the run, its identity, and the checkpoint that it resumes."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

from trainer_cli.auto_values import AUTO, BATCH_SIZE, auto_keys, largest_batch_size
from trainer_cli.callbacks import open_copies
from trainer_cli.catalog import Catalog, Check, Entry, ForeignKind, refuse_foreign, verify_and_decode
from trainer_cli.checkpoint import GroupVerifier
from trainer_cli.config import Change, Composed, diff, from_yaml
from trainer_cli.elsewhere import hint_on
from trainer_cli.errors import CheckpointError, ConfigError, RunDirectoryError, UserError
from trainer_cli.keys import OF_ONE_COMMAND, whole_values
from trainer_cli.loads import WHOLE, LoadOptions, can_resume, check_load
from trainer_cli.manifest import Manifest
from trainer_cli.origin import other_source, report_source
from trainer_cli.parallel import ALONE, ProcessGroup
from trainer_cli.policy import RecordedEnd
from trainer_cli.running.resume import (
    FIRST_ONLY,
    ChosenCheckpoint,
    changes_since,
    choose,
    folder_of_checkpoints,
    holds_training,
    refuse_absent_folder,
    refuse_changes,
    unsaved_end,
    why_finished,
)
from trainer_cli.runs import RunDir, is_checkpoint, refuse_nested
from trainer_cli.schema import ANEW, CheckpointConfig, LoadConfig, TrainConfig
from trainer_cli.selection import StoredCheckpoint, run_holding, select_one, suggest_nearby
from trainer_cli.steps import Duration, Interval, Progress, RunStatus
from trainer_cli.storage import ReadableFolder, open_storage
from trainer_cli.tensor_files import verify


@dataclass(slots=True)
class Start:
    """The run, its identity, and the checkpoint to resume: all that is decided before objects are built."""

    run: RunDir
    run_id: str
    attempt: int
    entry: Entry | None
    folder: Path
    """The folder of that checkpoint. No catalog: rank 0 sends this object to the other ranks, and an open storage
    cannot be pickled."""
    reason: str
    """Why the run resumes that checkpoint, or starts at step 0."""
    is_new: bool
    changes: tuple[Change, ...] = ()
    """Accepted changes from the config that the run was trained with."""
    keep_settings: tuple[str, ...] = ()
    """Optimizer settings changed since the checkpoint, allowed by `resume_allow`."""
    finished: str | None = None
    """Why the run ended, if it was killed after its final checkpoint and before its summary."""
    stored_values: Mapping[str, Any] = field(default_factory=dict)
    """Values that the run found before, for keys that are `auto` in the config."""

    @property
    def path(self) -> Path | None:
        """The checkpoint to resume."""
        return None if self.entry is None else self.folder / self.entry.name

    def fork(self, composed: Composed) -> Path | None:
        """The checkpoint of `ckpt=`, whose weights a new run loads; None once the run has a checkpoint of its own."""
        # A checkpoint of the run itself already contains what the fork loaded.
        return None if self.entry is not None else fork_path(composed)


@dataclass(frozen=True, slots=True)
class Done:
    """A run that is finished, also under this config."""

    step: int
    end: RecordedEnd
    note: str = ""
    """In brackets: that the config asks for a shorter length than was trained; else empty."""


def refuse_no_optimizer(composed: Composed) -> None:
    """Refuse a config without an optimizer, before any object is built."""
    if not composed.config.optimizer:
        choice = composed.tree.choices.get(("optimizer",))
        chose_null = choice is not None and not choice.label
        raise ConfigError(
            "optimizer is null, but nothing trains without",
            source=choice.origin.source if choice is not None and chose_null else composed.where("optimizer"),
            hint="Choose one with optimizer=NAME; `train list optimizer` shows them.",
        )


def start_existing(
    run: RunDir,
    composed: Composed,
    *,
    meanwhile: Callable[[], object] | None = None,
    group: ProcessGroup = ALONE,
    read_only: bool = False,
) -> Start | Done:
    """Decide how an existing run starts: `Done` if nothing is left to do.

    Damaged checkpoints are quarantined unless `read_only`; otherwise the caller holds the lock.

    Args:
        meanwhile: called while the chosen checkpoint is read, if there is one process and the run does not stay
            finished. Several processes each read a share of it, see `GroupVerifier`.

    Raises:
        TrainError: the run cannot resume, or not with this config.
    """
    config = composed.config
    if config.resume == ANEW:
        return _start_anew(run, composed)
    # This comes first: a refused change of the config must not quarantine a checkpoint.
    accepted = accepted_changes(run, composed)
    stored, changes, folder = accepted.stored, accepted.changes, accepted.folder
    run_id = run.run_id
    attempt = len(run.attempts) + 1
    catalog = Catalog(open_storage(folder, cache=run.checkpoints_folder, run_id=run_id, attempt=attempt))
    summary = run.read_summary()
    recorded = RecordedEnd.of(str(summary.get("reason")), summary)
    stays_finished = not recorded.may_reopen(stored.config, config)
    if config.resume in ("auto", "must") and stays_finished:
        end = unsaved_end(catalog, run_id, summary, stored.config.checkpoint)
        if end is not None:
            return _make_done(end, recorded, catalog.newest_valid(run_id), composed)
    # Not always the folder to resume from: a changed checkpoint.folder is still empty.
    save_folder = run.folder_for(config.checkpoint.folder)
    catalogs = _open_catalogs(run, catalog, run_id, attempt, config.checkpoint)
    saved = catalog if save_folder == folder else run.catalog(save_folder)
    refuse_other_runs([saved, *catalogs[1:]], run_id, config.checkpoint)
    find = partial(
        choose,
        config.resume,
        catalogs,
        run_id,
        begins_anew=accepted.begins_anew,
        newer=config.checkpoint.newer,
        attempts=run.attempts,
    )
    has_ended = summary.get("status") == RunStatus.finished
    if has_ended and stays_finished and group.world_size == 1:
        # If the run stays finished nothing is loaded: right digests suffice, and torch is not imported to decode it.
        choice = find(check=verify, quarantine=False)
        final = _why_stays_finished(choice, summary, stored.config, config)
        # Any other choice has passed over later checkpoints or the original of a copy, which are reported below.
        is_last = choice.entry is not None and choice.entry.step == summary.get("step")
        is_in_own_folder = choice.catalog is catalogs[0]
        if choice.entry is not None and is_last and final is not None and is_in_own_folder:
            return _make_done(choice.entry.step, final, choice.entry, composed)
    choice = find(check=_make_check(meanwhile, group), quarantine=not read_only)
    finished = _why_stays_finished(choice, summary, stored.config, config)
    if choice.entry is None:
        refuse_absent_folder(run, catalog)
    else:
        if has_ended and finished is not None:
            return _make_done(choice.entry.step, finished, choice.entry, composed)
        options_of(choice.entry, choice.catalog.folder, config.load)
    return Start(
        run,
        run_id,
        attempt,
        choice.entry,
        choice.catalog.folder,
        choice.reason,
        is_new=False,
        changes=tuple(change for change in changes if change.key not in OF_ONE_COMMAND),
        keep_settings=kept_settings(changes),
        finished=None if finished is None else finished.reason,
        stored_values=accepted.stored_values,
    )


def _make_done(step: int, end: RecordedEnd, last: Entry | None, composed: Composed) -> Done:
    """The `Done` of a run whose newest checkpoint is `last`. Source files that have changed since are reported."""
    note = ""
    if last is not None and last.manifest is not None:
        report_source(last.name, other_source(last.manifest.source, composed.project_root))
        length, progress = composed.config.loop.max_duration, Progress.of(last.manifest.progress or {})
        duration = Duration.parse(length)
        # Rounded up to whole epochs: the steps of an epoch are known only in a training.
        duration = replace(duration, value=Fraction(math.ceil(duration.value)))
        if progress is not None and Interval(duration).passed(progress):
            note = f" (loop.max_duration={length} is below what is trained)"
    return Done(step, end, note)


def _start_anew(run: RunDir, composed: Composed) -> Start:
    """Decide how a run begins anew; its directory is moved away when the new one is made.

    Raises:
        TrainError: see `refuse_anew`.
    """
    refuse_anew(run, composed)
    folder = run.folder_for(composed.config.checkpoint.folder)
    return Start(run, secrets.token_hex(8), 1, None, folder, f"anew: the run is moved to {run.trash}", is_new=True)


def refuse_anew(run: RunDir, composed: Composed) -> None:
    """Refuse to begin a run anew that cannot be moved away with all its checkpoints.

    Raises:
        TrainError: it is in use, holds a sweep, has checkpoints elsewhere, or is the source of `ckpt=`.
    """
    run.check_movable()
    config = composed.config
    catalogs = _open_catalogs(run, run.catalog(run.folder_for(config.checkpoint.folder)), None, 0, config.checkpoint)
    refuse_other_runs(catalogs, None, config.checkpoint, moved_id=run.run_id)
    fork = fork_path(composed)
    if fork is not None and run.path.resolve() in fork.resolve().parents:
        raise UserError(
            f"ckpt={fork} is a checkpoint of the run that resume=anew moves away",
            where="ckpt",
            cure="Begin another run with name=OTHER.",
        )


def _why_stays_finished(
    choice: ChosenCheckpoint, summary: dict[str, object], stored: TrainConfig, config: TrainConfig
) -> RecordedEnd | None:
    """How the run had ended at the chosen checkpoint; None if it had not, or if the config lets it train further."""
    finished = None if choice.entry is None else why_finished(choice.entry, summary)
    if choice.entry is None or choice.entry.manifest is None or finished is None:
        return None
    if choice.entry.manifest.finished is not None:
        # The config in the checkpoint decides: an attempt to train further may have replaced the one of the run. If
        # only the summary records the end, the last attempt has made no step since, and the run's config is right.
        source, _ = StoredCheckpoint(choice.catalog.folder / choice.entry.name, choice.catalog).read_config()
        stored = from_yaml(source, trusted=True, missing_ok=True).config
    end = RecordedEnd.of(finished, summary)
    return None if end.may_reopen(stored, config) else end


class Accepted(NamedTuple):
    """What a resume of a run accepts: see `accepted_changes`."""

    stored: Composed
    """The config that the run was trained with."""
    changes: list[Change]
    """The changes from it."""
    folder: Path
    """The folder of the checkpoints to resume."""
    stored_values: dict[str, Any]
    """See `Start.stored_values`."""
    begins_anew: bool
    """See `holds_training`."""


def accepted_changes(run: RunDir, composed: Composed, *, in_sweep: bool = False) -> Accepted:
    """Compare a config with the one that a run was trained with.

    Args:
        in_sweep: see `refuse_changes`.

    Raises:
        ConfigError: a resume does not accept the changes.
    """
    stored = from_yaml(run.config_file, trusted=True, missing_ok=True)
    folder = folder_of_checkpoints(run, composed.config.checkpoint, stored.config.checkpoint)
    if not holds_training(run, folder, composed.config.checkpoint, stored.config):
        # It may have another model, so values for `auto` are found again.
        return Accepted(stored, changes_since(run, stored, composed), folder, {}, begins_anew=True)
    stored_values = values_found(composed, stored)
    composed = composed.with_values(stored_values)
    changes = changes_since(run, stored, composed)
    refuse_changes(changes, composed, run.path, in_sweep=in_sweep)
    return Accepted(stored, changes, folder, stored_values, begins_anew=False)


def values_found(composed: Composed, stored: Composed) -> dict[str, Any]:
    """The values that a stored config has for the keys that are `auto` in the composed one.

    A batch size above LIMIT of `auto:LIMIT` is left out, so that it is refused as a changed number is.
    """
    values = dict(whole_values(stored.raw))
    keys = {key: tuple(key.split(".")) for key in auto_keys(composed.config)}
    stored_values = {key: values[path] for key, path in keys.items() if path in values}
    size, limit = stored_values.get(BATCH_SIZE), composed.config.data.get("batch_size")
    if isinstance(size, int) and limit != AUTO and size > largest_batch_size(limit):
        del stored_values[BATCH_SIZE]
    return stored_values


def start_new(
    run: RunDir,
    composed: Composed,
    *,
    meanwhile: Callable[[], object] | None = None,
    group: ProcessGroup = ALONE,
    read_only: bool = False,
) -> Start | Done:
    """Decide how a run without a directory starts: anew, or from the checkpoints of a run whose directory was lost.

    Raises:
        TrainError: `resume` demands a run, or an empty directory.
    """
    config = composed.config
    refuse_nested(run.path)
    folder = run.folder_for(config.checkpoint.folder)
    # Without a run id, which is unknown yet: a lost run has the id in its checkpoints.
    catalogs = _open_catalogs(run, run.catalog(folder), None, 0, config.checkpoint)
    if config.resume in ("auto", "must"):
        # The default folder was in the lost directory: only another folder and the copies can still exist.
        for catalog in catalogs if config.checkpoint.folder is not None else catalogs[1:]:
            lost = _find_lost_run(catalog, config.run_dir)
            if lost is not None:
                return _start_lost(run, composed, catalogs, lost, _make_check(meanwhile, group), read_only)
    refuse_other_runs(catalogs, None, config.checkpoint)
    if config.resume == "must":
        raise CheckpointError(f"resume=must, but {run.path} holds no run")
    if config.resume not in ("auto", "never", ANEW):
        if not Path(config.resume).exists():
            message = f"resume={config.resume}: there is no such directory"
            raise UserError(
                message, where="resume", cure=hint_on("resume", config.resume) or suggest_nearby(config.resume)
            )
        if ForeignKind.of(Path(config.resume)) is None and not is_checkpoint(Path(config.resume)):
            message = f"resume={config.resume}: {config.resume} holds no run, and is not a checkpoint"
            raise UserError(message, where="resume", cure=suggest_nearby(config.resume))
        raise UserError(
            f"resume={config.resume} returns to a checkpoint of the run in {run.path}, which holds no run",
            where="resume",
            cure=f"To continue a run, write resume={run_holding(Path(config.resume).parent) or 'RUN'}; to begin one "
            f"with these weights, ckpt={config.resume}.",
        )
    if config.resume == "never" and run.path.is_dir() and any(run.path.iterdir()):
        raise UserError(f"resume=never, but {run.path} is not empty", cure="Choose another run_dir= or name=.")
    # The id is drawn here, before the directory exists: checkpoints, logs and the directory must agree on it.
    return Start(run, secrets.token_hex(8), 1, None, folder, "holds no run yet", is_new=True)


def _open_catalogs(
    run: RunDir, saved: Catalog, run_id: str | None, attempt: int, config: CheckpointConfig
) -> list[Catalog]:
    """The catalogs of the folder in which the run saves, `saved`, and of its copies, if they can be listed.

    Raises:
        TrainError: see `open_copies`, and `Copies.reachable`.
    """
    own = run.folder_for(config.folder)
    copies = open_copies(saved.storage, own, config, run_id=run_id or "local", attempt=attempt, cache=run.copies_cache)
    return [saved] if copies is None else copies.reachable(saved, run_id)


def refuse_other_runs(
    catalogs: Sequence[Catalog], run_id: str | None, config: CheckpointConfig, *, moved_id: str | None = None
) -> None:
    """Refuse to save or copy checkpoints into a folder where only another run has saved: the names would collide.

    Args:
        catalogs: of the folder of the checkpoints, then of the folder of the copies, if there is one.
        moved_id: id of the run that `resume=anew` moves away, without these folders.

    Raises:
        RunDirectoryError: one of the folders holds checkpoints, but none of this run.
    """
    if not config.enabled:
        return
    settings = (("folder", config.folder), ("copy_to.folder", config.copy_to.folder))
    for catalog, (key, configured) in zip(catalogs, settings, strict=False):
        entries = [] if configured is None else catalog.remembered()
        owners = {entry.name: entry.manifest.run_id for entry in entries if entry.manifest is not None}
        if owners and run_id not in owners.values():
            name, owner_id = [*owners.items()][-1]
            owner = "the run that resume=anew moves away" if owner_id == moved_id else "another run"
            raise RunDirectoryError(
                f"{catalog.folder} holds checkpoints of {owner}, such as {name}",
                where=f"checkpoint.{key}",
                cure="Choose another folder, or move them away. With {run_name} in it each run has its own.",
            )


def _make_check(meanwhile: Callable[[], object] | None, group: ProcessGroup) -> Check:
    """The function that verifies and decodes a checkpoint: by all ranks, or while `meanwhile` is called."""
    digests: Check = verify
    if group.world_size > 1:
        digests = GroupVerifier(group).verify
    elif meanwhile is not None:
        digests = partial(_verify_beside, meanwhile)
    return partial(verify_and_decode, digests=digests)


_JOIN_TIMEOUT_S = 2.0
"""How long an interrupted start waits for the thread that verifies."""


def _verify_beside(meanwhile: Callable[[], object], folder: ReadableFolder, manifest: Manifest) -> None:
    """Verify the digests of a checkpoint in another thread while `meanwhile` is called in this one.

    Raises:
        DamagedCheckpoint: as `verify`; an error of `meanwhile` comes first.
    """
    errors: list[BaseException] = []

    def read() -> None:
        try:
            verify(folder, manifest)
        except BaseException as error:  # The waiting thread raises it.
            errors.append(error)

    # A daemon: an interrupted start does not wait for a disk that hangs.
    reader = Thread(target=read, name="checkpoint-verifying", daemon=True)
    reader.start()
    try:
        meanwhile()
        reader.join()
    except BaseException:
        reader.join(_JOIN_TIMEOUT_S)
        raise
    if errors:
        raise errors[0]


class _LostRun(NamedTuple):
    """A run whose directory was lost, by its newest checkpoint."""

    run_id: str
    attempt: int
    is_fork: bool


def _find_lost_run(catalog: Catalog, run_dir: str) -> _LostRun | None:
    """The run in `run_dir` that saved the checkpoints of a folder; None if another run saved them."""
    # Only the newest valid one decides: earlier ones may be of a run that had the folder before.
    for entry in catalog.newest_first():
        if entry.manifest is not None and entry.valid:
            source, _ = StoredCheckpoint(catalog.folder / entry.name, catalog).read_config()
            config = from_yaml(source, trusted=True, missing_ok=True).config if source else None
            if config is not None and config.run_dir == run_dir:
                return _LostRun(entry.manifest.run_id, entry.manifest.attempt, config.ckpt is not None)
    return None


def _start_lost(
    run: RunDir,
    composed: Composed,
    catalogs: Sequence[Catalog],
    lost: _LostRun,
    check: Check,
    read_only: bool,
) -> Start | Done:
    """Decide how a run starts whose directory was lost, but not its checkpoints."""
    run_id = lost.run_id
    # Asked first: `choose` would download a checkpoint of step 0 into the new directory, and refuse a damaged one.
    if not any(catalog.holds_steps(run_id, counts_first=lost.is_fork) for catalog in catalogs):
        reason = f"anew: {FIRST_ONLY}"
        return Start(run, run_id, lost.attempt + 1, None, catalogs[0].folder, reason, is_new=True)
    choice = choose(composed.config.resume, catalogs, run_id, check=check, quarantine=not read_only)
    assert choice.entry is not None
    assert choice.entry.manifest is not None
    source, _ = StoredCheckpoint(choice.catalog.folder / choice.entry.name, choice.catalog).read_config()
    stored = from_yaml(source, trusted=True, missing_ok=True)
    stored_values = values_found(composed, stored)
    composed = composed.with_values(stored_values)
    changes = diff(stored.raw, composed.raw)
    refuse_changes(changes, composed, run.path)
    finished = choice.entry.manifest.finished
    end = None if finished is None else RecordedEnd(finished)
    if end is not None and not end.may_reopen(stored.config, composed.config):
        return _make_done(choice.entry.step, end, choice.entry, composed)
    options_of(choice.entry, choice.catalog.folder, composed.config.load)
    return Start(
        run,
        run_id,
        choice.entry.manifest.attempt + 1,
        choice.entry,
        choice.catalog.folder,
        f"{run.path} is gone, but {choice.catalog.folder} holds its checkpoints",
        is_new=True,
        changes=tuple(change for change in changes if change.key not in OF_ONE_COMMAND),
        keep_settings=kept_settings(changes),
        stored_values=stored_values,
    )


def kept_settings(changes: Sequence[Change]) -> tuple[str, ...]:
    """The optimizer settings among changes of the config: these stay as configured, not as in the checkpoint."""
    # A group with an `lr_scale` has an `lr` in the optimizer.
    keys = [change.key.removesuffix("_scale") if change.key.endswith(".lr_scale") else change.key for change in changes]
    settings = [key.removeprefix("optimizer.") for key in keys if key.startswith("optimizer.")]
    return (*settings, *(key.rpartition(".")[2] for key in keys if key.startswith("param_groups.")))


def options_of(entry: Entry, folder: Path, config: LoadConfig) -> LoadOptions:
    """What to load from the checkpoint to resume: everything or, if it lacks states, those that `load.states` names.

    Raises:
        CheckpointError: it lacks states, and `load.states` names all, or only the weights.
    """
    left_out = entry.manifest.left_out if entry.manifest is not None else ()
    options = LoadOptions(states=config.states) if left_out and can_resume(left_out, config.states) else WHOLE
    check_load(str(folder / entry.name), left_out, options)
    return options


def fork_path(composed: Composed) -> Path | None:
    """The checkpoint that `ckpt=` names, which the start of the run loads; None without it."""
    ckpt = composed.config.ckpt
    if ckpt is None:
        return None
    fork = select_one(ckpt)
    refuse_foreign(fork, composed.config.load.states)
    manifest = StoredCheckpoint(fork).manifest
    check_load(str(fork), () if manifest is None else manifest.left_out, composed.config.load.options())
    return fork


def describe_fork(checkpoint: Path | None, *, counts_on: bool) -> dict[str, Any] | None:
    """What the first attempt of a run records about the checkpoint of `ckpt=`; None without one of this program.

    Args:
        counts_on: whether the run continues at the step of the checkpoint; else it begins at step 0.
    """
    manifest = None if checkpoint is None else StoredCheckpoint(checkpoint).manifest
    if manifest is None:
        return None
    return {"run_id": manifest.run_id, "step": manifest.step, "shift": 0 if counts_on else manifest.step}
