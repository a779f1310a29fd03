"""Keep the source of an attempt in its run's directory, and that of a submission for the processes that start later."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer_cli.config import Composed, shipped_folder
from trainer_cli.errors import UserError, without_secrets
from trainer_cli.keys import whole_values, why_may_change
from trainer_cli.origin.compare import DataAndSource
from trainer_cli.origin.kept_source import KeptSource, SourceFacts, list_names
from trainer_cli.origin.source_files import (
    add_imports,
    find_ignored,
    find_import_roots,
    find_imported_modules,
    find_search_roots,
    is_installed,
    list_sources,
)
from trainer_cli.runs import RunDir
from trainer_cli.source_view import find_project
from trainer_cli.terminal import format_bytes, format_count, format_first

log = logging.getLogger(__name__)

_LARGE_BYTES = 20_000_000


def keep_source(
    run: RunDir,
    composed: Composed,
    config_text: str,
    origin: DataAndSource,
    environment: Mapping[str, Any],
    *,
    begins: bool,
) -> str | None:
    """Keep the files of the project that this process imports, or may import later; returns the digest.

    A failure is a warning, and the digest is None: no training ends because of it.

    Args:
        config_text: the config as the run stores it.
        environment: that of the attempt.
        begins: whether the attempt makes step 1.
    """
    try:
        facts, files, values = _collect(composed, origin, environment)
        return KeptSource.write(run, facts, files, config_text, values, begins=begins)
    except (OSError, UserError) as error:
        log.warning("the source of the run is not kept: %s", without_secrets(str(error)))
        return None


def keep_project(folder: Path, root: Path, config_dirs: Sequence[Path]) -> Path | None:
    """Keep the Python files and configs of a project as they are, and return where; None if it has none.

    A failure is a warning, and None: what starts later takes the project as it is then.

    Args:
        folder: keeps it in its subfolder `source`.
        config_dirs: the folders of configs. Those outside of the project are not kept, and named in a warning.
    """
    run, not_kept = RunDir(folder), dict[str, str]()
    own = [path for path in config_dirs if path != shipped_folder("configs") and not is_installed(path, root)]
    if outside := [str(path) for path in own if not path.is_relative_to(root)]:
        log.warning("configs outside of the project are not kept, so edits of them count: %s", format_first(outside))
    try:
        files = _read_files(root, list_sources(root, [os.path.relpath(path, root) for path in own]), not_kept)
        for folder in {Path(file).parent for file in files}:
            beside = {f"{folder / name}" for name in list_names(root / folder) if name.endswith(".py")}
            not_kept |= dict.fromkeys(beside - files.keys(), "ignored by git")
        facts = SourceFacts(
            str(find_project(root)), find_search_roots(root), platform.python_version(), {}, {}, not_kept
        )
        return run.source_folder / KeptSource.write(run, facts, files, "", {}) if files else None
    except (OSError, UserError) as error:
        log.warning(
            "the source is not kept, so edits count until the last run has started: %s", without_secrets(str(error))
        )
        return None


def _read_files(root: Path, paths: Iterable[str], not_kept: dict[str, str]) -> dict[str, bytes]:
    """The contents of files; why one cannot be read is added to `not_kept`."""
    files: dict[str, bytes] = {}
    for path in paths:
        try:
            files[path] = (root / path).read_bytes()
        except OSError as error:
            not_kept[path] = str(error.strerror)
    if (size_bytes := sum(map(len, files.values()))) > _LARGE_BYTES:
        log.warning("the source of the run has %s in %s", format_bytes(size_bytes), format_count(len(files), "file"))
    return files


def _collect(
    composed: Composed, origin: DataAndSource, environment: Mapping[str, Any]
) -> tuple[SourceFacts, dict[str, bytes], dict[str, Any]]:
    """The facts, the files, and the values of the config of which another one is another source."""
    root = composed.project_root
    modules = find_imported_modules(root)
    import_roots = find_import_roots(modules)
    imported = set(modules.values())
    later = add_imports(root, imported, import_roots) - imported
    project = find_project(root)
    not_kept = dict.fromkeys(find_ignored(project, later), "ignored by git")
    files = _read_files(root, sorted((imported | later) - not_kept.keys()), not_kept)
    facts = SourceFacts(
        project_root=str(project),
        import_roots=import_roots,
        python=str(environment.get("python")),
        versions=dict(environment.get("versions") or {}),
        samples=origin.samples,
        not_kept=not_kept,
    )
    leaves = whole_values(composed.raw)
    values = {key: value for path, value in leaves if why_may_change(key := ".".join(path)) is None}
    return facts, files, values
