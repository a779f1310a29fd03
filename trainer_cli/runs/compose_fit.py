"""The config of a fit: composed, or that of the run which `resume=` names.

A file of its own, because a mistake in the config is reported before torch and the rest of a training are imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainer_cli.config import search_path
from trainer_cli.config.compose import Composed, compose, from_yaml
from trainer_cli.config.overrides import strip_quotes
from trainer_cli.config.provenance import DEFAULT, label
from trainer_cli.config.sweep import text_of
from trainer_cli.errors import UserError
from trainer_cli.runs.run_dir import RunDir

_LISTED = 8


def compose_fit(overrides: Sequence[str], *, config_dir: Path | None = None, config_name: str = "config") -> Composed:
    """Compose the config of a fit. With `resume=RUN_DIR` it is the config of that run, with the overrides on top."""
    named = [strip_quotes(override.partition("=")[2]) for override in overrides if override.startswith("resume=")]
    if named and named[-1] not in ("auto", "never", "must"):
        directory = RunDir(named[-1])
        if directory.exists_as_run():
            changes = [override for override in overrides if not override.startswith("resume=")]
            # The run may have been moved: its config still names the directory in which it began.
            changes += [f"run_dir={text_of(str(directory.path))}", "resume=must"]
            return from_yaml(directory.config_file, changes, config_dir=config_dir, config_name=config_name)
    composed = compose(overrides, config_dir=config_dir, config_name=config_name)
    refuse_shipped_default(composed)
    return composed


def refuse_shipped_default(composed: Composed) -> None:
    """Refuse model and data that the shipped config alone chose, in a project with experiments of its own.

    Raises:
        UserError: no experiment is chosen; it lists the project's.
    """
    shipped = search_path.shipped_configs(search_path.PACKAGE)
    choices = composed.provenance.choices.items()
    if shipped is None or any(path[0] == "experiment" and choice.label for path, choice in choices):
        return
    folder, shipped = Path.cwd().resolve(), shipped.resolve()
    project_dirs = [config_dir for config_dir in composed.config_dirs if config_dir != shipped]
    experiments = list(search_path.options(project_dirs, "experiment"))
    if not experiments or any(
        _is_chosen_by_user(composed, section, label(shipped, folder)) for section in ("model", "data")
    ):
        return
    listed = ", ".join(f"experiment={name}" for name in experiments[:_LISTED])
    more = ", … (see train list experiment)" if len(experiments) > _LISTED else ""
    raise UserError(
        "no experiment is chosen, and without one the model and data are the shipped ones, not this project's",
        where=f"{label(project_dirs[0], folder)}/experiment",
        cure=f"Choose one: {listed}{more}; or a model or data: model=NAME, data=NAME.",
    )


def _is_chosen_by_user(composed: Composed, section: str, shipped: str) -> bool:
    """Whether the command line or one of the user's files chooses, holds or sets the component of a section."""
    choice = composed.provenance.choices.get((section,))
    origins = [composed.provenance.exact((section, "_target_")).source]
    origins += [] if choice is None else [choice.origin.source, choice.label]
    return any(origin and origin != DEFAULT and not origin.startswith(f"{shipped}/") for origin in origins)
