"""The run directory: its files, its lock, its run id, and the record of each attempt.

    runs/NAME/
      config.yaml  overrides.yaml     as trained
      provenance.json                 where the values of config.yaml were set
      decisions.json                  what was measured for values that were `auto`
      environment.json                written once: the run's id, versions, git, argv, host
      train.log  metrics.jsonl  tensorboard/  validation/  checkpoints/
      summary.json                    how it ended, and the list of attempts
      checkpoints.jsonl               each save and removal, and why
      notes.md                        yours: train serve and report show it
      replayed/                       checkpoints of steps that were computed again
      source/                         the source that made it, once for each that differs (origin/kept_source.py)
      .lock                           held while a process trains here, as environment.json is

`config.yaml` is written last when a directory is made, so one without it was never a run.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from trainer_cli.bounds import is_amount, is_bounded, is_count, is_list, is_table, is_text, keep_sound
from trainer_cli.catalog import Catalog
from trainer_cli.environment import timestamp
from trainer_cli.errors import RunDirectoryError, UserError
from trainer_cli.files import as_path, close_private, is_url, open_private, replace, sync
from trainer_cli.goodput import Seconds, compute_goodput, sum_attempts
from trainer_cli.layout import CONFIG_FILE, COPIES_CACHE, MANIFEST_FILE, SWEEP_FOLDER, in_runs, is_run_id
from trainer_cli.patterns import did_you_mean
from trainer_cli.runs.run_lock import RunLock, is_file_at, lock_file
from trainer_cli.runs.spent_time import seconds_of, seconds_of_killed
from trainer_cli.runs.stored_values import parse_values, read_text
from trainer_cli.steps import RunStatus
from trainer_cli.storage import open_storage
from trainer_cli.strict_json import strict_json

TRASH_FOLDER = ".trash"
"""Beside a run: the folder to which `resume=anew` moves it. Nothing that looks for runs enters a folder with a dot."""
_CONFIG_BYTES = 1_000_000
# The files that a `create` leaves behind that crashed before its last file.
_CREATED_FIRST = frozenset({"overrides.yaml", "environment.json"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How an attempt ended. `wall_time_s` is that of this attempt; the summary has the sum of all attempts."""

    status: RunStatus
    reason: str
    step: int
    wall_time_s: float
    best_metrics: Mapping[str, Any] = field(default_factory=dict)
    """Metric -> its best value and step."""
    last_metrics: Mapping[str, float] = field(default_factory=dict)
    """Metric -> its newest value."""
    ended_by: str | None = None
    """Name of the callback that decided the end; None: none did."""
    average: str | None = None
    """Name of the callback whose average of the weights was evaluated; None: the trained weights were."""
    throughput: Mapping[str, float] = field(default_factory=dict)
    checkpoints: Sequence[Mapping[str, Any]] = ()
    """The checkpoints on the disk at the end, each with the reason why it was kept."""
    time_s: Seconds = field(default_factory=dict)
    """Seconds of this attempt by activity; the summary has those of all attempts, with what was lost."""
    kept_s: float = 0.0
    """Seconds of training over all attempts that have led to the state at the end."""


def is_checkpoint(path: Path) -> bool:
    """Whether a folder has a manifest."""
    if is_url(path):
        return open_storage(path.parent).peek(path.name, MANIFEST_FILE) is not None
    return (path / MANIFEST_FILE).is_file()


class RunDir:
    """Layout and records of one run directory. The constructor does not touch the disk."""

    def __init__(self, path: str | Path) -> None:
        # The path of an object store stays one.
        self.path = Path(path) if isinstance(path, str) else path
        self.config_file = self.path / "config.yaml"
        self.overrides_file = self.path / "overrides.yaml"
        self.provenance_file = self.path / "provenance.json"
        self.decisions_file = self.path / "decisions.json"
        self.environment_file = self.path / "environment.json"
        self.log_file = self.path / "train.log"
        self.metrics_file = self.path / "metrics.jsonl"
        self.system_file = self.path / "system.jsonl"
        self.summary_file = self.path / "summary.json"
        self.tensorboard_folder = self.path / "tensorboard"
        self.validation_folder = self.path / "validation"
        self.checkpoints_folder = self.path / "checkpoints"
        self.replayed_folder = self.path / "replayed"
        self.searches_folder = self.replayed_folder / "bisect"
        """What `train bisect` has evaluated."""
        self.source_folder = self.path / "source"
        self.copies_cache = self.checkpoints_folder / COPIES_CACHE
        self.history_file = self.path / "checkpoints.jsonl"
        self.report_file = self.path / "report.html"
        self.notes_file = self.path / "notes.md"
        self.lock_file = self.path / ".lock"
        self.trash = self.path.parent / TRASH_FOLDER

    def folder_for(self, configured: str | None) -> Path:
        """The folder of checkpoints for a value of `checkpoint.folder`."""
        return self.checkpoints_folder if configured is None else as_path(configured)

    def catalog(self, folder: Path) -> Catalog:
        """The checkpoints in a folder. Those of an object store are downloaded into this run's directory when read."""
        return Catalog.of(folder, self.checkpoints_folder)

    def read_source(self) -> Mapping[str, str]:
        """Digests of the project's files with which its newest checkpoint was made."""
        newest = Catalog.of(self.checkpoints_folder).newest_valid()
        return {} if newest is None or newest.manifest is None else newest.manifest.source

    def exists_as_run(self) -> bool:
        """Whether the directory holds a run whose creation was completed."""
        return self.config_file.is_file() and self.environment_file.is_file()

    def lock(self) -> RunLock:
        """Lock the directory against other processes, without waiting.

        `environment.json`, which is written once, is locked too: people remove files that are called locks, and a
        second process would lock a new `.lock`.

        Raises:
            RunDirectoryError: another process trains here (named), or the filesystem has no locks.
        """
        try:
            # It is not truncated: until it is locked it names the holder.
            descriptor = open_private(self.lock_file, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise RunDirectoryError(
                f"{self.path} cannot be locked: {error.strerror}",
                cure="The run directory must be writable; choose another with run_dir=.",
            ) from error
        try:
            lock_file(descriptor)
            if not is_file_at(descriptor, self.lock_file):
                close_private(descriptor)
                raise RunDirectoryError(f"{self.path} has just been moved by another process", cure="Start again.")
            return RunLock([descriptor, *self._lock_environment()])
        except OSError as error:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
            close_private(descriptor)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES) and not self.is_locked():
                raise RunDirectoryError(
                    f"{self.path} is being replayed by another process", cure="Wait until that command has ended."
                ) from None
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise RunDirectoryError(
                    f"{self.path} is in use by {holder or 'another process'}",
                    cure="Wait for it, or start a run of another name with name=.",
                ) from None
            raise RunDirectoryError(
                f"{self.path} cannot be locked: {error.strerror}",
                cure="Its filesystem has no file locks; choose a run_dir= on another.",
            ) from error

    def _lock_environment(self) -> list[int]:
        """Lock `environment.json`; empty without it, or if it cannot be locked: then `.lock` alone decides.

        Raises:
            BlockingIOError: another process holds it.
        """
        for flag in (os.O_RDWR, os.O_RDONLY):
            with suppress(OSError):
                descriptor = open_private(self.environment_file, flag)
                break
        else:
            return []
        try:
            lock_file(descriptor)
        except OSError as error:
            close_private(descriptor)
            if isinstance(error, BlockingIOError):
                raise
            return []
        return [descriptor]

    def share(self) -> RunLock | None:
        """Hold off trainings, beside other readers; None while a training holds the directory. Nothing is written."""
        try:
            return RunLock(self._lock_shared())
        except BlockingIOError:
            return None

    def is_locked(self) -> bool:
        """Whether a process trains here now.

        Nothing is written. A free lock is held as shared for an instant, and `lock` waits that long.
        """
        try:
            # The lock is shared, so readers do not see each other as a training.
            descriptors = self._lock_shared()
        except BlockingIOError:
            return True
        for descriptor in descriptors:
            # Closing ends the lock.
            close_private(descriptor)
        return False

    def _lock_shared(self) -> list[int]:
        """Lock beside other readers, without waiting, the files that are there and can be locked.

        Raises:
            BlockingIOError: a process trains here now.
        """
        descriptors: list[int] = []
        for path in (self.lock_file, self.environment_file):
            try:
                descriptor = open_private(path, os.O_RDONLY)
            except OSError:
                continue
            descriptors.append(descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                for descriptor in descriptors:
                    close_private(descriptor)
                raise
            except OSError:
                pass  # Its file system has no locks.
        return descriptors

    def create(
        self,
        config_yaml: str,
        overrides: Sequence[str],
        environment: Mapping[str, Any],
        *,
        places: Mapping[str, str] | None = None,
        with_checkpoints: bool = False,
    ) -> RunLock:
        """Create a new run here and return its lock, held. `environment` may hold its `run_id`.

        Files of an earlier `create` that crashed are overwritten. Files of any other run are never touched.

        Args:
            places: where the values of the config were set, by dotted key.
            with_checkpoints: the folder of checkpoints may exist: it is that of a run whose directory was lost.

        Raises:
            RunDirectoryError: the directory holds a run, or parts of one, or another process holds it.
        """
        self.make_directory(self.path)
        allowed = frozenset([self.checkpoints_folder.name]) if with_checkpoints else frozenset()
        # Before the lock, which would create a file in a directory that is not ours.
        if not self.lock_file.exists():
            self._refuse_foreign_directory(allowed)
        lock = self.lock()
        try:
            # Checked again under the lock: another process may have created its run in between.
            self._refuse_foreign_directory(allowed | _CREATED_FIRST)
            lock.name_holder()
            replace(self.overrides_file, [_yaml_list(overrides).encode()])
            write_json(self.provenance_file, places or {})
            write_json(self.environment_file, {"run_id": secrets.token_hex(8), **environment})
            for descriptor in self._lock_environment():
                lock.hold(descriptor)
            # Last, because a directory without a config is no run.
            replace(self.config_file, [config_yaml.encode()])
            # The entry of the directory itself must survive a power failure too.
            sync(self.path.parent)
        except BaseException:
            lock.release()
            raise
        return lock

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """The directory of a run that was created.

        Raises:
            UserError: the path is not a run.
        """
        directory = cls(path)
        if not directory.exists_as_run():
            raise UserError(f"{path} is not a run's directory", cure=cls.advise(path))
        return directory

    @classmethod
    def advise(cls, path: Path) -> str:
        """How to name the run that a path means which is not a run's directory."""
        name, at, _ = str(path).partition("@")
        for folder in [Path(name)] if at else path.parents[:3]:
            if cls(folder).exists_as_run():
                return f"Name the run itself: {folder}."
        if (path_in_runs := in_runs(str(path))) is not None:
            return f"Did you mean '{path_in_runs}'?"
        names = [run.parent.name for run in path.parent.glob(f"*/{CONFIG_FILE}")]
        return f"Name the folder that holds its {CONFIG_FILE}.{did_you_mean(path.name, names)}"

    def is_run(self) -> bool:
        """Whether the folder holds the config of a run, and is no checkpoint, which may hold one too."""
        return self.config_file.is_file() and not is_checkpoint(self.path)

    @property
    def known_id(self) -> str | None:
        """The id of the run, or None if it is unknown."""
        try:
            return self.run_id
        except RunDirectoryError:
            return None

    @property
    def values(self) -> dict[str, Any]:
        """The stored config, unresolved; empty if it cannot be read. Callers do not change it."""
        try:
            with self.config_file.open("rb") as file:
                # A bound: a config in a shared folder may come from anybody.
                return parse_values(file.read(_CONFIG_BYTES))
        except OSError:
            return {}

    def stored_checkpoints(self) -> Path:
        """The folder of its checkpoints, as its config says; without one `checkpoints`, or the directory itself.

        Raises:
            UserError: the config refers to a value that is unknown.
        """
        if not self.is_run():
            # A trainer in Python writes no config.
            has_folder = self.checkpoints_folder.is_dir() and not Catalog.of(self.path).names()
            return self.checkpoints_folder if has_folder else self.path
        config = self.values
        try:
            configured = read_text(config, "checkpoint.folder")
        except ValueError as error:
            raise UserError(
                f"checkpoint.folder is unknown: {error}",
                where=str(self.config_file),
                cure="Name the folder of its checkpoints instead of the run.",
            ) from None
        if configured is None:
            return self.checkpoints_folder
        return as_path(configured.replace("{run_name}", str(config.get("name") or "default")))

    def read_config(self) -> str:
        """The text of `config.yaml`."""
        try:
            return self.config_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RunDirectoryError(f"{self.config_file} cannot be read: {error}") from error

    def write_config(self, config_yaml: str, overrides: Sequence[str], places: Mapping[str, str] | None = None) -> None:
        """Replace the config of a resumed run. Values that its stored config set keep their recorded source."""
        before, stored_file, provenance = self.read_provenance(), os.path.realpath(self.config_file), {}
        for key, source in (places or {}).items():
            if not before or os.path.realpath(source.rpartition(":")[0]) != stored_file:
                provenance[key] = source
            elif key in before:
                provenance[key] = before[key]
        replace(self.overrides_file, [_yaml_list(overrides).encode()])
        write_json(self.provenance_file, provenance)
        # The config is written last: after a kill in between, the next start still compares with the old one.
        replace(self.config_file, [config_yaml.encode()])

    def check_movable(self) -> None:
        """Refuse to move a run away that is in use, or whose directory cannot be moved, or not alone.

        Raises:
            RunDirectoryError: another process trains here.
            UserError: it is a link, or holds a sweep or the current directory.
        """
        if self.is_locked():
            # Raises, and names the process; a free lock is not taken, because that would write.
            self.lock().release()
        # Once x is moved, x/../x and the current directory in x lead elsewhere.
        leads_through_itself = os.path.normpath(self.path) != str(self.path)
        if self.path.is_symlink() or leads_through_itself or Path.cwd().is_relative_to(self.path.resolve()):
            raise UserError(
                f"{self.path} is not moved: it is a link, holds the current directory, or its path leads through ..",
                where="resume=anew",
                cure="Name the directory itself by run_dir=, from outside of it, or begin another run with name=OTHER.",
            )
        if (self.path / SWEEP_FOLDER).exists():
            raise UserError(
                f"{self.path} holds the runs of a sweep, which would be moved with it",
                where="resume=anew",
                cure=f"Move {self.path / SWEEP_FOLDER} away first, or begin another run with name=OTHER.",
            )

    def move_to_trash(self) -> Path:
        """Move the run to the first free `.trash/NAME-N` beside it; the new path.

        Raises:
            TrainError: see `check_movable`.
        """
        self.check_movable()
        with self.lock():
            self.make_directory(self.trash)
            candidates = (self.trash / f"{self.path.name}-{number}" for number in count(1))
            target = next(path for path in candidates if not os.path.lexists(path))
            try:
                os.rename(self.path, target)
            except OSError as error:
                raise UserError(
                    f"{self.path} cannot be moved to {target}: {error.strerror}",
                    where="resume=anew",
                    cure="Move it away yourself, or begin another run with name=OTHER.",
                ) from error
            # The new entry is synced first: after a power failure it is in one place, or in both.
            sync(self.trash)
            sync(self.path.parent)
        return target

    @staticmethod
    def describe_moved(path: Path) -> str:
        """The place of a run in the trash, with how to get it back."""
        # The parser of overrides reads a second `=`, as in the runs of a sweep, only in quotes.
        override = shlex.quote(f'resume="{path}"' if "=" in str(path) else f"resume={path}")
        return f"{path}: it is a whole run, move it back, or continue it there with {override} alone"

    @staticmethod
    def make_directory(path: Path) -> None:
        """Make a directory of runs, and those above it.

        Raises:
            UserError: it cannot be made; then none of them is.
        """
        missing = [folder for folder in (path, *path.parents) if not os.path.lexists(folder)]
        created: list[Path] = []
        try:
            for folder in reversed(missing):
                # Another process may be faster.
                with suppress(FileExistsError):
                    folder.mkdir()
                    created.append(folder)
            # Raises where a file has the name.
            path.mkdir(exist_ok=True)
        except BaseException as error:
            for folder in reversed(created):
                with suppress(OSError):
                    folder.rmdir()
            if not isinstance(error, OSError):
                raise
            message = f"{path} cannot be made: {error.strerror}"
            raise UserError(message, cure="Choose another directory with run_dir=.") from error

    def config_files(self) -> dict[Path, bytes]:
        """The files that `write_config` replaces."""
        files = (self.overrides_file, self.provenance_file, self.config_file)
        return {file: file.read_bytes() for file in files if file.exists()}

    def read_provenance(self) -> dict[str, str]:
        """Where the values of the config were set, by dotted key: `file:line` or `command line`.

        Defaults are left out. It is empty if the file is missing or damaged.
        """
        provenance = read_json(self.provenance_file) or {}
        return {key: source for key, source in provenance.items() if isinstance(source, str)}

    @staticmethod
    def restore_config(files: Mapping[Path, bytes]) -> None:
        """Undo a `write_config`."""
        for file, content in files.items():
            replace(file, [content])

    @property
    def run_id(self) -> str:
        """The id of the run, which its checkpoints carry."""
        run_id = self.read_environment().get("run_id")
        if not isinstance(run_id, str) or not is_run_id(run_id):
            raise RunDirectoryError(
                f"{self.environment_file} names no run_id, so {self.path} is not a run's directory",
                cure="Choose another with name= or run_dir=.",
            )
        return run_id

    def read_environment(self) -> dict[str, Any]:
        """The contents of `environment.json`."""
        environment = read_json(self.environment_file)
        if environment is None:
            raise RunDirectoryError(
                f"{self.environment_file} is missing or damaged, so it is unknown which run {self.path} holds",
                cure="Restore the file, or choose another directory with name= or run_dir=.",
            )
        return environment

    def environment_of(self, attempt: int) -> dict[str, Any]:
        """The recorded environment of an attempt."""
        changed = next((entry for entry in self.attempts if entry.get("attempt") == attempt), {})
        return {**self.read_environment(), **(changed.get("changed_environment") or {})}

    def read_summary(self) -> dict[str, Any]:
        """The contents of `summary.json`; empty if it is missing or damaged, since it is only a report."""
        return sound_summary(read_json(self.summary_file))

    @property
    def project_roots(self) -> list[Path]:
        """The known project roots from which attempts were started, without duplicates."""
        environments = [read_json(self.environment_file) or {}]
        environments += [attempt.get("changed_environment") or {} for attempt in self.attempts]
        roots = [environment.get("project_root") for environment in environments]
        return list(dict.fromkeys(Path(root) for root in roots if isinstance(root, str)))

    @property
    def attempts(self) -> list[dict[str, Any]]:
        """Every attempt so far, in order."""
        return attempts_of(self.read_summary())

    def begin_attempt(
        self, *, name: str, start_step: int, now: float, environment: Mapping[str, Any], **more: Any
    ) -> int:
        """Add an attempt to the summary and return its number, from 1. Call it with the lock held.

        An earlier attempt that is still `running` was killed, and is marked so.

        Args:
            environment: of this process; the attempt records what differs from the first attempt's.
            more: further entries of the attempt; None is left out.
        """
        first = self.read_environment()
        attempts = self.attempts
        # The caller holds the lock, so no process of an earlier attempt can be alive.
        for attempt in attempts:
            if attempt.get("status") == RunStatus.running:
                status, reason = how_ended(attempt)
                attempt.update(status=status, reason=reason, time_s=seconds_of_killed(self, attempt))
        # Damaged entries are left out of the list, so its length may be a number that was used before.
        number = 1 + max((int(attempt.get("attempt") or 0) for attempt in attempts), default=0)
        attempts.append(
            {
                "attempt": number,
                "status": RunStatus.running,
                "reason": None,
                "started": timestamp(now),
                "start_step": start_step,
                **{key: value for key, value in more.items() if value is not None},
                "pid": os.getpid(),
                "changed_environment": {
                    key: value for key, value in environment.items() if key != "time" and first.get(key) != value
                },
            }
        )
        summary = {
            **self.read_summary(),
            "run_id": self.run_id,
            "name": name,
            "status": RunStatus.running,
            "reason": None,
            "step": start_step,
            "attempts": attempts,
        }
        self._write_summary(summary)
        return number

    def record_total_steps(self, total_steps: int | None) -> None:
        """Write the last step of the training into the summary; None if it is unknown."""
        self._write_summary({**self.read_summary(), "total_steps": total_steps})

    def end_attempt(self, outcome: Outcome, *, now: float) -> None:
        """Write how the newest attempt ended, and so the state of the run."""
        summary, attempts = self.read_summary(), self.attempts
        facts = asdict(outcome)
        attempt_facts = {key: facts[key] for key in ("status", "reason", "step", "wall_time_s", "throughput", "time_s")}
        if attempts:
            attempts[-1].update(attempt_facts, ended=timestamp(now))
        summary.update(facts, attempts=attempts)
        summary["wall_time_s"] = sum(float(attempt.get("wall_time_s") or 0.0) for attempt in attempts)
        summary["time_s"] = sum_attempts(map(seconds_of, attempts), summary.pop("kept_s"))
        summary["goodput"] = compute_goodput(summary["time_s"])
        self._write_summary(summary)

    def _write_summary(self, summary: Mapping[str, Any]) -> None:
        """Replace `summary.json`; the list of attempts, the long part, comes last."""
        facts = {key: value for key, value in summary.items() if key != "attempts"}
        write_json(self.summary_file, {**facts, "attempts": summary.get("attempts", [])})

    def _refuse_foreign_directory(self, allowed: frozenset[str]) -> None:
        """Refuse a directory that holds a run, or files of one whose names are not in `allowed`."""
        files = (
            self.config_file, self.overrides_file, self.environment_file, self.log_file, self.metrics_file,
            self.summary_file, self.tensorboard_folder, self.validation_folder, self.checkpoints_folder,
            self.history_file,
        )  # fmt: skip
        existing = [file.name for file in files if file.exists() and file.name not in allowed and not _is_empty(file)]
        if self.exists_as_run():
            raise RunDirectoryError(
                f"{self.path} already holds a run", cure="Choose another directory with name= or run_dir=."
            )
        if existing:
            raise RunDirectoryError(
                f"{self.path} is not a complete run directory, yet it holds {', '.join(existing)}",
                cure="Move these away, or choose another directory with name= or run_dir=.",
            )


def _is_empty(path: Path) -> bool:
    """Whether it is a folder without content, such as the one for checkpoints where a rank of another machine saved."""
    return path.is_dir() and not any(path.iterdir())


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file atomically and durably."""
    replace(path, [strict_json(value, indent=2).encode() + b"\n"])


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; None if the file is missing or damaged, or nested deeper than `DEEPEST`."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) and is_bounded(content) else None


_ATTEMPT_CHECKS: Mapping[str, Callable[[object], bool]] = {
    **dict.fromkeys(("attempt", "start_step", "step", "differs_until", "pid"), is_count),
    **dict.fromkeys(("status", "reason", "started", "ended", "source"), is_text),
    **dict.fromkeys(("changed_environment", "forked_from", "throughput", "time_s"), is_table),
    "wall_time_s": is_amount,
}
_SUMMARY_CHECKS: Mapping[str, Callable[[object], bool]] = {
    **dict.fromkeys(("step", "total_steps"), is_count),
    **dict.fromkeys(("status", "reason", "run_id", "name"), is_text),
    **dict.fromkeys(("best_metrics", "last_metrics", "throughput", "time_s"), is_table),
    **dict.fromkeys(("checkpoints", "attempts"), is_list),
    **dict.fromkeys(("wall_time_s", "goodput"), is_amount),
}


def sound_summary(content: Any) -> dict[str, Any]:
    """The contents of `summary.json` without values of another kind than this program writes."""
    summary = keep_sound(content, _SUMMARY_CHECKS) if is_table(content) else {}
    if attempts := summary.get("attempts"):
        summary["attempts"] = [keep_sound(attempt, _ATTEMPT_CHECKS) for attempt in attempts if is_table(attempt)]
    return summary


def _yaml_list(values: Sequence[str]) -> str:
    """A YAML list of strings; each is written as JSON, which is YAML too."""
    return "".join(f"- {json.dumps(value, ensure_ascii=False)}\n" for value in values) or "[]\n"


def how_ended(entry: Mapping[str, Any]) -> tuple[str | None, str]:
    """How a run or an attempt has ended, and why, by its summary or entry, while no process holds the lock.

    A killed process writes no summary; its lock ends with it.
    """
    if entry.get("status") == RunStatus.running:
        return RunStatus.killed, "the process ended without a summary"
    return entry.get("status"), str(entry.get("reason") or "")


def attempts_of(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Every attempt in what `sound_summary` returned, in order."""
    return [*(summary.get("attempts") or ())]
