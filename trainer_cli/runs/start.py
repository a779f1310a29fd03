"""Where a `fit` begins: the run, its identity, and the checkpoint that it resumes.

Read the config of a run directory, a checkpoint, or `RUN@latest`.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from trainer_cli.checkpoint.catalog import Catalog, Check, Entry, catalog_of, read_small, verify_beside
from trainer_cli.checkpoint.copies import Place, check_copies, reachable
from trainer_cli.checkpoint.foreign.kind import kind_of, refuse_foreign
from trainer_cli.checkpoint.format.verified_file import read_verified, verify
from trainer_cli.checkpoint.group_verify import verify_by_all
from trainer_cli.checkpoint.storage.open import open_storage
from trainer_cli.config.compose import OF_ONE_COMMAND, Composed, diff, from_yaml
from trainer_cli.config.diff import Change
from trainer_cli.core.checkpoint_config import CheckpointConfig
from trainer_cli.core.left_out import can_resume, check_load
from trainer_cli.core.load_options import WHOLE, LoadOptions
from trainer_cli.core.manifest import Manifest
from trainer_cli.core.naming import CONFIG_FILE
from trainer_cli.core.schema import LoadConfig
from trainer_cli.core.stopping import reopens
from trainer_cli.core.url_path import as_path, is_url
from trainer_cli.errors import CheckpointError, ConfigError, RunDirectoryError, TrainError, UserError
from trainer_cli.parallel.process_group import ALONE, ProcessGroup
from trainer_cli.runs.find_runs import refuse_nested
from trainer_cli.runs.resume import (
    changes_since,
    choose,
    folder_of_checkpoints,
    holds_training,
    refuse_changes,
    unsaved_end,
    why_finished,
)
from trainer_cli.runs.run_dir import RunDir, RunStatus
from trainer_cli.runs.select import is_checkpoint, select_one


def config_file(name: str) -> Path | None:
    """The config of the run directory, checkpoint or file that is named; None if it names neither.

    Raises:
        CheckpointError: no such checkpoint, one that is damaged, or one that carries no config.
        UserError: a folder that is neither run nor checkpoint.
    """
    path = Path(name)
    if path.is_file():
        return path
    if RunDir(path).config_file.is_file() and not (path / "manifest.json").is_file():
        return RunDir(path).config_file
    if not path.is_dir() and not _is_of_a_run(name):
        return None
    if path.is_dir() and not is_checkpoint(path):
        cure = "Name a run directory, which holds a config.yaml, a checkpoint in one, or RUN@latest."
        raise UserError(f"{name} is neither a run directory nor a checkpoint", where="--diff", cure=cure)
    try:
        checkpoint = select_one(name)
        source, _ = config_of(checkpoint)
    except TrainError as error:
        error.where = "--diff"
        raise
    if not source:
        raise CheckpointError(f"{checkpoint} carries no {CONFIG_FILE}")
    return Path(source)


def manifest_of(checkpoint: Path) -> Manifest | None:
    """The manifest of a checkpoint; None if it cannot be read, or the checkpoint is of another program."""
    return None if kind_of(checkpoint) is not None else catalog_of(checkpoint.parent).entry(checkpoint.name).manifest


def small_file(checkpoint: Path, file: str) -> bytes | None:
    """A side file of a checkpoint of this program, its digest verified; None if there is none of that name."""
    catalog = catalog_of(checkpoint.parent)
    manifest = catalog.entry(checkpoint.name).manifest
    if manifest is None or file not in manifest.files:
        return None
    if is_url(checkpoint):
        # Without its other files, which may be large.
        return read_small(catalog.storage, checkpoint.name, file, manifest)
    with catalog.storage.reading(checkpoint.name) as folder:
        return read_verified(folder, manifest, file)


def is_on_disk(name: str) -> bool:
    """Whether a name with `=` is a path: the name of a sweep's run has one."""
    return Path(name).is_file() or RunDir(name).config_file.is_file() or is_checkpoint(Path(name)) or _is_of_a_run(name)


def _is_of_a_run(name: str) -> bool:
    """Whether a name is `RUN@latest`, and not an override: the name of a sweep's run has `=` too."""
    run, at, which = name.rpartition("@")
    return bool(at) and "=" not in which and ("=" not in run or Path(run).is_dir())


def config_of(checkpoint: Path) -> tuple[Path | str, str]:
    """The config file of a checkpoint, else of its run, and its text; the text twice for one in an object store, and
    both empty if there is none."""
    if kind_of(checkpoint) is not None:
        return "", ""
    if (content := small_file(checkpoint, CONFIG_FILE)) is not None:
        return content.decode() if is_url(checkpoint) else checkpoint / CONFIG_FILE, content.decode()
    beside = RunDir(checkpoint.parent.parent)
    return (beside.config_file, beside.read_config()) if beside.config_file.is_file() else ("", "")


@dataclass(slots=True)
class Start:
    """What is known before anything is built: the run, its identity, and the checkpoint to resume."""

    run: RunDir
    run_id: str
    attempt: int
    entry: Entry | None
    folder: Path
    """The folder of that checkpoint. No catalog: this goes to the other ranks, and an open storage cannot."""
    reason: str
    """Why it resumes that checkpoint, or none."""
    is_new: bool
    changes: tuple[Change, ...] = ()
    """Accepted changes from the config that the run was trained with."""
    keep_settings: tuple[str, ...] = ()
    """Optimizer settings changed since the checkpoint, allowed by `resume_allow`."""
    finished: str | None = None
    """Why the run ended, if it was killed between its final checkpoint and its summary."""

    @property
    def path(self) -> Path | None:
        """The checkpoint to resume."""
        return None if self.entry is None else self.folder / self.entry.name


@dataclass(frozen=True, slots=True)
class Done:
    """A run that is finished, also under this config."""

    step: int
    reason: str


def refuse_no_optimizer(composed: Composed) -> None:
    """Refuse a config that can only be evaluated, before anything is made for it."""
    if not composed.config.optimizer:
        choice = composed.provenance.choices.get(("optimizer",))
        raise ConfigError(
            "optimizer is null, but nothing trains without",
            source=choice.origin.source if choice is not None and not choice.label else composed.where("optimizer"),
            hint="Choose one with optimizer=NAME; `train list optimizer` shows them.",
        )


def of_existing(
    run: RunDir,
    composed: Composed,
    *,
    meanwhile: Callable[[], object] | None = None,
    group: ProcessGroup = ALONE,
    read_only: bool = False,
) -> Start | Done:
    """The start of a run that exists, or its end if nothing is left to do.

    The caller holds the lock, unless this is `read_only`: damaged checkpoints are quarantined. One process calls
    `meanwhile` while the chosen checkpoint is read; of several each reads some of it, as `verify_by_all` says.

    Raises:
        TrainError: the run cannot resume, or not with this config.
    """
    config = composed.config
    stored, changes, folder = accepted_changes(run, composed)
    run_id = run.run_id
    attempt = len(run.attempts) + 1
    catalog = Catalog(open_storage(folder, cache=run.checkpoints_folder, run_id=run_id, attempt=attempt))
    summary = run.read_summary()
    ended = not reopens(stored.config.loop, config.loop)
    if config.resume in ("auto", "must") and ended:
        end = unsaved_end(catalog, run_id, summary, stored.config.checkpoint)
        if end is not None:
            return Done(*end)
    saves = run.folder_for(config.checkpoint.folder)
    places = _places(run, Place(folder, catalog), run_id, attempt, config.checkpoint)
    saving = places[0] if saves == folder else Place(saves, run.catalog(saves))
    refuse_other_runs([saving, *places[1:]], run_id, config.checkpoint)
    choice = choose(
        config.resume,
        places,
        run_id,
        newer=config.checkpoint.newer,
        attempts=run.attempts,
        check=_check(None if ended and summary.get("status") == RunStatus.finished else meanwhile, group),
        quarantine=not read_only,
    )
    finished = None
    if choice.entry is not None:
        finished = why_finished(choice.entry, summary)
        if finished is not None:
            # The checkpoint's own config: the run's may be that of an attempt to reopen it.
            source, _ = config_of(choice.place.folder / choice.entry.name)
            trained = from_yaml(source, trusted=True, missing_ok=True)
            if reopens(trained.config.loop, config.loop):
                finished = None
            elif summary.get("status") == RunStatus.finished:
                return Done(choice.entry.step, finished)
        options_of(choice.entry, choice.place.folder, config.load)
    return Start(
        run,
        run_id,
        attempt,
        choice.entry,
        choice.place.folder,
        choice.reason,
        is_new=False,
        changes=tuple(change for change in changes if change.key not in OF_ONE_COMMAND),
        keep_settings=_kept_settings(changes),
        finished=finished,
    )


def accepted_changes(run: RunDir, composed: Composed) -> tuple[Composed, list[Change], Path]:
    """The config that a run was trained with, the changes from it, and the folder of the checkpoints to resume.

    Raises:
        ConfigError: a resume does not accept the changes.
    """
    stored = from_yaml(run.config_file, trusted=True, missing_ok=True)
    changes = changes_since(run, stored, composed)
    folder = folder_of_checkpoints(run, composed.config.checkpoint, stored.config.checkpoint)
    if holds_training(run, folder, composed.config.checkpoint):
        refuse_changes(changes, composed, run.path)
    return stored, changes, folder


def of_new(
    run: RunDir,
    composed: Composed,
    *,
    meanwhile: Callable[[], object] | None = None,
    group: ProcessGroup = ALONE,
    read_only: bool = False,
) -> Start | Done:
    """The start of a run whose directory does not exist: a new one, or one whose directory was lost, but not the folder
    of its checkpoints.

    Raises:
        TrainError: `resume` demands a run, or an empty directory.
    """
    config = composed.config
    refuse_nested(run.path)
    folder = run.folder_for(config.checkpoint.folder)
    own = Place(folder, Catalog(open_storage(folder, cache=run.checkpoints_folder)))
    places = _places(run, own, None, 0, config.checkpoint)
    if config.resume in ("auto", "must"):
        for place in places if config.checkpoint.folder is not None else places[1:]:
            run_id = _lost_run(place, config.run_dir)
            if run_id is not None:
                return _of_lost(run, composed, places, run_id, _check(meanwhile, group), read_only)
    refuse_other_runs(places, None, config.checkpoint)
    if config.resume == "must":
        raise CheckpointError(f"resume=must, but {run.path} holds no run")
    if config.resume not in ("auto", "never"):
        if not Path(config.resume).exists():
            raise UserError(f"resume={config.resume}: there is no such directory", where="resume")
        raise UserError(
            f"resume={config.resume}, but {run.path} holds no run to go back in",
            where="resume",
            cure="To begin a new run with these weights, use ckpt=PATH.",
        )
    if config.resume == "never" and run.path.is_dir() and any(run.path.iterdir()):
        raise UserError(f"resume=never, but {run.path} is not empty", cure="Choose another run_dir= or name=.")
    return Start(run, secrets.token_hex(8), 1, None, own.folder, f"{run.path} holds no run yet", is_new=True)


def _places(run: RunDir, own: Place, run_id: str | None, attempt: int, config: CheckpointConfig) -> list[Place]:
    """The run's own folder, and that of its copies if there is one and it can be listed.

    Raises:
        TrainError: as of `check_copies` and `reachable`.
    """
    if config.copy_to.folder is None:
        return [own]
    folder = as_path(config.copy_to.folder)
    check_copies(run.folder_for(config.folder), folder)
    storage = open_storage(folder, cache=run.copies_cache, run_id=run_id or "local", attempt=attempt)
    return reachable(own, [Place(folder, Catalog(storage))], run_id)


def refuse_other_runs(places: Sequence[Place], run_id: str | None, config: CheckpointConfig) -> None:
    """Refuse to save, or to copy checkpoints to, where another run has saved: its steps would stand in the way.

    A run that has saved there already may go on, beside the other one.

    Args:
        places: the folder of the checkpoints, and that of the copies if there is one.

    Raises:
        RunDirectoryError: one holds checkpoints, and none of this run.
    """
    if not config.enabled:
        return
    for place, configured, key in zip(
        places, (config.folder, config.copy_to.folder), ("folder", "copy_to.folder"), strict=False
    ):
        entries = [] if configured is None else place.catalog.entries()
        saved = [(entry.name, entry.manifest.run_id) for entry in entries if entry.manifest is not None]
        if saved and run_id not in [owner for _, owner in saved]:
            raise RunDirectoryError(
                f"{place.folder} holds checkpoints of another run, such as {saved[-1][0]}",
                where=f"checkpoint.{key}",
                cure="Choose another folder: with {run_name} in it each run has its own.",
            )


def _check(meanwhile: Callable[[], object] | None, group: ProcessGroup) -> Check:
    """What verifies the files of a checkpoint."""
    if group.world_size > 1:
        return partial(verify_by_all, group)
    return verify if meanwhile is None else partial(verify_beside, meanwhile)


def _lost_run(place: Place, run_dir: str) -> str | None:
    """The id of the run whose checkpoints are in a folder, and whose directory was called so; None if there is none."""
    for entry in reversed(place.catalog.entries()):
        if entry.manifest is not None and entry.valid:
            source, _ = config_of(place.folder / entry.name)
            if source and from_yaml(source, trusted=True, missing_ok=True).config.run_dir == run_dir:
                return entry.manifest.run_id
    return None


def _of_lost(
    run: RunDir,
    composed: Composed,
    places: Sequence[Place],
    run_id: str,
    check: Check,
    read_only: bool,
) -> Start | Done:
    """The start of a run of which only the checkpoints are left."""
    choice = choose(composed.config.resume, places, run_id, check=check, quarantine=not read_only)
    assert choice.entry is not None
    assert choice.entry.manifest is not None
    source, _ = config_of(choice.place.folder / choice.entry.name)
    stored = from_yaml(source, trusted=True, missing_ok=True)
    changes = diff(stored.raw, composed.raw)
    refuse_changes(changes, composed, run.path)
    finished = choice.entry.manifest.finished
    if finished is not None and not reopens(stored.config.loop, composed.config.loop):
        return Done(choice.entry.step, finished)
    options_of(choice.entry, choice.place.folder, composed.config.load)
    return Start(
        run,
        run_id,
        choice.entry.manifest.attempt + 1,
        choice.entry,
        choice.place.folder,
        f"{run.path} is gone, but {choice.place.folder} holds its checkpoints",
        is_new=True,
        changes=tuple(change for change in changes if change.key not in OF_ONE_COMMAND),
        keep_settings=_kept_settings(changes),
    )


def _kept_settings(changes: Sequence[Change]) -> tuple[str, ...]:
    """The optimizer settings among accepted changes."""
    keys = [change.key for change in changes]
    settings = [key.removeprefix("optimizer.") for key in keys if key.startswith("optimizer.")]
    return (*settings, *(key.rpartition(".")[2] for key in keys if key.startswith("param_groups.")))


def load_options(config: LoadConfig, *, allow_pickle: bool = False) -> LoadOptions:
    """What to load from the checkpoint that `ckpt=` names."""
    return LoadOptions(**asdict(config), allow_pickle=allow_pickle)


def options_of(entry: Entry, folder: Path, config: LoadConfig) -> LoadOptions:
    """What to load from a checkpoint that is resumed: all, or, where it lacks states, those that `load.states` names.

    Raises:
        CheckpointError: it lacks states, and the config asks for all, or for the weights alone.
    """
    lacking = entry.manifest.left_out if entry.manifest is not None else ()
    options = LoadOptions(states=config.states) if lacking and can_resume(lacking, config.states) else WHOLE
    check_load(str(folder / entry.name), lacking, options)
    return options


def fork_of(composed: Composed, start: Start) -> Path | None:
    """The checkpoint whose weights a new run loads; used only while the run has none of its own."""
    ckpt = composed.config.ckpt
    if ckpt is None or start.entry is not None:
        return None
    fork = select_one(ckpt)
    refuse_foreign(fork, composed.config.load.states)
    manifest = catalog_of(fork.parent).entry(fork.name).manifest
    check_load(str(fork), () if manifest is None else manifest.left_out, load_options(composed.config.load))
    return fork
