"""Import the classes of a run from the source that it keeps, where that of the project differs."""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from trainer_cli.config import Composed, given_value, project_root
from trainer_cli.errors import UserError, replace_in_messages
from trainer_cli.keys import SOURCE
from trainer_cli.origin.compare import DIFFERENT, name_files, report_source
from trainer_cli.origin.kept_source import DamagedSourceError, KeptSource, list_names
from trainer_cli.origin.source_files import find_imported_modules
from trainer_cli.parallel import ProcessGroup
from trainer_cli.ranks import is_restarted
from trainer_cli.runs import RunDir
from trainer_cli.scratch import scratch_folder
from trainer_cli.selection import StoredCheckpoint
from trainer_cli.source_view import ROOTS_FILE, VIEW_VARIABLE, find_project, in_view, is_view, stand_for
from trainer_cli.terminal import format_first

log = logging.getLogger(__name__)

USED = "the source is the one that the run keeps"
"""The beginning of the line that says so."""
SUBMITTED = "the source is the one that was submitted"
"""The beginning of the line that says that a submitted one is used."""
UNUSED = "the source kept in"
"""The beginning of the line that says why it is not used."""
NOTICES = f"{USED}|{UNUSED}|{DIFFERENT}"
"""A regular expression of the beginnings of the lines that say which source a command has used."""
_decided: dict[Path, Path | None] = {}
"""Projects whose source is chosen, with the folder of a kept one: a process imports from one."""


def use_source_of(checkpoint: Path, overrides: Sequence[str], config_dir: Path | None = None) -> None:
    """`use_kept_source` for the attempt that made a checkpoint."""
    manifest, run = StoredCheckpoint(checkpoint).manifest, StoredCheckpoint(checkpoint).find_run()
    if manifest is not None and run is not None:
        use_kept_source(RunDir(run), manifest.attempt, overrides, config_dir)


def of_source(overrides: Iterable[str]) -> list[str]:
    """The overrides that say which source is used, for a command that this one starts."""
    return [override for override in overrides if override.startswith((f"{SOURCE}=", "trust="))]


def use_kept_source(run: RunDir, attempt: int, overrides: Sequence[str], config_dir: Path | None = None) -> None:
    """Import the project from the source that an attempt of a run has kept, if it differs, and log that.

    Call it before the config of the run is composed. A process imports a project from one source: later calls change
    nothing but report what differs.

    Args:
        overrides: `source=project`, `resume_allow=[source]` and `experiment=` take the source of the project.

    Raises:
        UserError: the source is not to be trusted, and the project has none.
    """
    if of_project(overrides):
        return
    project = project_root(config_dir, Path.cwd())
    try:
        source = KeptSource.of_attempt(run, attempt)
    except DamagedSourceError as error:
        log.warning("%s; that of the project is used", error.what)
        return
    differing = {} if source is None else source.find_differences(project)
    is_decided = project in _decided or is_view(project)
    _decided.setdefault(project, None)
    # A job that was started again takes it even if it does not differ yet, see `use_submitted`.
    if source is None or not (differing or is_restarted(os.environ)):
        return
    if is_decided:
        report_source(f"attempt {attempt} of {run.path}", differing)
        return
    has_project = _has_project(source, differing)
    if not source.is_own and not _names(overrides, "trust", SOURCE):
        _refuse_foreign(source, differing, has_project=has_project)
        return
    if _use(source, project, differing) and differing:
        log.warning(
            "%s (%s): here %s; source=project takes what is here",
            USED, run.path, f"differs {name_files(differing)}" if has_project else f"in {project} is none",
        )  # fmt: skip


def read_source_of(run: RunDir, overrides: Sequence[str], project: Path) -> KeptSource | None:
    """The source that the last attempt of a run keeps; None if it has none, or overrides choose that of the project.

    Raises:
        DamagedSourceError: it is not what was written.
        UserError: it is not to be trusted.
    """
    attempt = run.attempts[-1].get("attempt") if run.attempts and not of_project(overrides) else None
    source = None if attempt is None else KeptSource.of_attempt(run, attempt)
    if source is None or not source.files:
        return None
    if not source.is_own and not _names(overrides, "trust", SOURCE):
        differing = source.find_differences(project)
        if not differing:
            return None
        _refuse_foreign(source, differing, has_project=False)
    return source


def use_submitted(folder: Path, config_dir: Path | None) -> None:
    """Compose and import the project from the source that `keep_project` returned, and log what differs by now.

    Also if nothing differs: the project may be edited before the last of its modules is imported.

    Raises:
        DamagedSourceError: it is not what was kept.
    """
    project, source = project_root(config_dir, Path.cwd()), KeptSource.read(folder)
    differing = source.find_differences(project)
    if _use(source, project, differing) and differing:
        log.warning("%s: here differs %s; source=project takes what is here", SUBMITTED, name_files(differing))


def share_source(composed: Composed, group: ProcessGroup) -> Composed:
    """Import the project from the source that rank 0 does, which composed the config. Collective."""
    if group.world_size == 1:
        return composed
    root = composed.project_root
    project, folder = group.on_main(lambda: (find_project(root), _decided.get(find_project(root))))
    if folder is not None and in_view(project) == project:
        source = KeptSource.read(folder)
        _use(source, project, source.find_differences(project))
    return composed._replace(project_root=in_view(project))


def _has_project(source: KeptSource, differing: Mapping[str, str]) -> bool:
    """Whether a project has a file of the source, by what differs there."""
    return any(how == "changed" for how in differing.values()) or len(differing) < len(source.files)


def _use(source: KeptSource, project: Path, differing: Mapping[str, str]) -> bool:
    """Import a project from a source. Returns whether this process has made the view, not one that has started it."""
    _decided[project] = source.folder
    is_new = not _join_view(source, project)
    if is_new:
        recorded = Path(source.facts.project_root)
        is_elsewhere = not _has_project(source, differing) and recorded.is_dir()
        _make_view(source, project, recorded if is_elsewhere else project)
    return is_new


def _refuse_foreign(source: KeptSource, differing: Iterable[str], *, has_project: bool) -> None:
    message = f"{UNUSED} {source.folder} is not signed by this user's key, so it is not run"
    cure = f"If you trust whoever wrote it, add 'trust=[{SOURCE}]'."
    if not has_project:
        raise UserError(message, cure=cure)
    files = format_first([*differing])
    log.warning("%s; that of the project is used, which differs in %s. %s", message, files, cure)


def of_project(overrides: Sequence[str]) -> bool:
    """Whether overrides choose the source of the project."""
    chosen = given_value(overrides, SOURCE) == "project"
    return chosen or _names(overrides, "resume_allow", SOURCE) or given_value(overrides, "experiment") is not None


def _names(overrides: Iterable[str], key: str, word: str) -> bool:
    """Whether an override puts a word into a list."""
    values = (re.fullmatch(rf"\+*{key}\+?=(.*)", override, re.DOTALL) for override in overrides)
    return any(value is not None and word in re.findall(r"[\w.*]+", value[1]) for value in values)


def _join_view(source: KeptSource, project: Path) -> bool:
    """Use the view of the process that has started this one, if it is of this source."""
    try:
        digest, of, view = json.loads(os.environ.get(VIEW_VARIABLE, "null"))
    except (ValueError, TypeError):
        return False
    if (digest, of) != (source.digest, str(project)) or not Path(view).is_dir():
        return False
    _enter(project, Path(view))
    return True


def _make_view(source: KeptSource, project: Path, beside: Path) -> None:
    """Write a view, which is removed when this process ends, and use it in this process and those that it starts."""
    stack, owner = ExitStack(), os.getpid()
    # A fork that ends leaves the view to this process.
    atexit.register(lambda: stack.close() if os.getpid() == owner else None)
    try:
        folder = stack.enter_context(scratch_folder("train-source-"))
        # The lock of the folder lies beside what stands for the project's parent.
        view = folder.resolve() / "of" / project.name
        view.mkdir(parents=True, exist_ok=True)
        stack.callback(_move_written, source, view, beside)
        stack.callback(_report_others, source, view)
        # Code that looks for data or packages beside its project, by its own path, finds them.
        for name in list_names(beside.parent):
            if name != project.name:
                os.symlink(beside.parent / name, view.parent / name)
        # A training that goes on must not lack what it imports later by a name that no import statement has.
        source.write_view(view, beside, with_others=bool(source.config) and is_restarted(os.environ))
    except OSError as error:
        raise UserError(
            f"the source that the run keeps cannot be written to a temporary folder: {error}",
            cure=f"Set TMPDIR to a folder with space, or add {SOURCE}=project to take the source of the project.",
        ) from None
    os.environ[VIEW_VARIABLE] = json.dumps([source.digest, str(project), str(view)])
    _enter(project, view)


def _report_others(source: KeptSource, view: Path) -> None:
    """Log which modules were imported that were not kept."""
    if others := sorted({file for file in find_imported_modules(view).values() if file not in source.files}):
        log.warning("not kept with the source, and imported from the project: %s", format_first(others))


def _move_written(source: KeptSource, view: Path, project: Path) -> None:
    """Move to the project what its code has written beside itself."""
    kept = {view / path for path in (*source.files, ROOTS_FILE)}
    for file in view.rglob("*"):
        if not (file.is_symlink() or file.is_dir() or file.suffix == ".pyc" or file in kept):
            target = project / file.relative_to(view)
            with suppress(OSError):
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(file, target)


def _enter(project: Path, view: Path) -> None:
    # Modules that the resolvers of the configs have imported are of today.
    for name in find_imported_modules(project):
        # Workers and pickles ask for the script that runs.
        if name != "__main__":
            del sys.modules[name]
    stand_for(project, view)
    # Messages and tracebacks name files that are there when this process has ended.
    replace_in_messages(str(view), str(project))
    assert in_view(project) == view
