"""Keep the source that makes the steps of an attempt in the run's directory."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from trainer_cli.config import Composed
from trainer_cli.errors import UserError, without_secrets
from trainer_cli.keys import whole_values, why_may_change
from trainer_cli.origin.compare import DataAndSource
from trainer_cli.origin.kept_source import KeptSource, SourceFacts
from trainer_cli.origin.source_files import add_imports, find_ignored, find_import_roots, find_imported_modules
from trainer_cli.runs import RunDir
from trainer_cli.terminal import format_bytes, format_count

log = logging.getLogger(__name__)

_LARGE_BYTES = 20_000_000


def keep_source(
    run: RunDir, composed: Composed, config_text: str, origin: DataAndSource, environment: Mapping[str, Any]
) -> str | None:
    """Keep the files of the project that this process imports, or may import later; returns the digest.

    A failure is a warning, and the digest is None: no training ends because of it.

    Args:
        config_text: the config as the run stores it.
        environment: that of the attempt.
    """
    try:
        return _keep(run, composed, config_text, origin, environment)
    except (OSError, UserError) as error:
        log.warning("the source of the run is not kept: %s", without_secrets(str(error)))
        return None


def _keep(
    run: RunDir, composed: Composed, config_text: str, origin: DataAndSource, environment: Mapping[str, Any]
) -> str:
    root = composed.project_root
    modules = find_imported_modules(root)
    import_roots = find_import_roots(modules)
    imported = set(modules.values())
    later = add_imports(root, imported, import_roots) - imported
    not_kept = dict.fromkeys(find_ignored(root, later), "ignored by git")
    files: dict[str, bytes] = {}
    for path in sorted((imported | later) - not_kept.keys()):
        try:
            files[path] = (root / path).read_bytes()
        except OSError as error:
            not_kept[path] = str(error.strerror)
    if (size_bytes := sum(map(len, files.values()))) > _LARGE_BYTES:
        log.warning("the source of the run has %s in %s", format_bytes(size_bytes), format_count(len(files), "file"))
    facts = SourceFacts(
        project_root=str(root),
        import_roots=import_roots,
        python=str(environment.get("python")),
        versions=dict(environment.get("versions") or {}),
        samples=origin.samples,
        not_kept=not_kept,
    )
    by_key = {".".join(path): value for path, value in whole_values(composed.raw)}
    values = {key: value for key, value in by_key.items() if why_may_change(key) is None}
    return KeptSource.write(run, facts, files, config_text, values)
