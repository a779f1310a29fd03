"""The config that a fit is asked for: composed, or that of the run which `resume=` names. A mistake comes at once.

Nothing is imported here but what that needs, since a mistake is answered before all else.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainer_cli.config.compose import Composed, compose, from_yaml
from trainer_cli.config.sweep import text_of
from trainer_cli.config.words import unquoted


def compose_fit(overrides: Sequence[str], *, config_dir: Path | None = None, config_name: str = "config") -> Composed:
    """The config of a fit; with `resume=RUN_DIR` the run's own, overrides on top."""
    named = [unquoted(override.partition("=")[2]) for override in overrides if override.startswith("resume=")]
    if named and named[-1] not in ("auto", "never", "must"):
        from trainer_cli.run.rundir import RunDir

        directory = RunDir(named[-1])
        if directory.exists_as_run():
            rest = [override for override in overrides if not override.startswith("resume=")]
            rest += [f"run_dir={text_of(str(directory.path))}", "resume=must"]
            return from_yaml(directory.config_file, rest, config_dir=config_dir, config_name=config_name)
    return compose(overrides, config_dir=config_dir, config_name=config_name)
