"""The config of a fit: composed, or that of the run which `resume=` names. Mistakes are raised at once.

Nothing is imported here but what that needs, since a mistake is answered before all else.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainer_cli.config import search_path
from trainer_cli.config.compose import Composed, compose, from_yaml
from trainer_cli.config.override_syntax import unquoted
from trainer_cli.config.provenance import DEFAULT, label
from trainer_cli.config.sweep import text_of
from trainer_cli.errors import UserError

_LISTED = 8


def compose_fit(overrides: Sequence[str], *, config_dir: Path | None = None, config_name: str = "config") -> Composed:
    """The config of a fit; with `resume=RUN_DIR` the run's own, overrides on top."""
    named = [unquoted(override.partition("=")[2]) for override in overrides if override.startswith("resume=")]
    if named and named[-1] not in ("auto", "never", "must"):
        from trainer_cli.run.run_dir import RunDir

        directory = RunDir(named[-1])
        if directory.exists_as_run():
            rest = [override for override in overrides if not override.startswith("resume=")]
            rest += [f"run_dir={text_of(str(directory.path))}", "resume=must"]
            return from_yaml(directory.config_file, rest, config_dir=config_dir, config_name=config_name)
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
    if shipped is None or any(path[0] == "experiment" and one.label for path, one in choices):
        return
    here, shipped = Path.cwd().resolve(), shipped.resolve()
    own_dirs = [folder for folder in composed.config_dirs if folder != shipped]
    experiments = list(search_path.options(own_dirs, "experiment"))
    if not experiments or any(_is_own(composed, section, label(shipped, here)) for section in ("model", "data")):
        return
    listed = ", ".join(f"experiment={name}" for name in experiments[:_LISTED])
    more = ", … (see train list experiment)" if len(experiments) > _LISTED else ""
    raise UserError(
        "no experiment is chosen, and without one the model and data are the shipped ones, not this project's",
        where=f"{label(own_dirs[0], here)}/experiment",
        cure=f"Choose one: {listed}{more}; or a model or data: model=NAME, data=NAME.",
    )


def _is_own(composed: Composed, section: str, shipped: str) -> bool:
    """Whether the command line or a file of the user's chose, holds or sets the component of a section."""
    choice = composed.provenance.choices.get((section,))
    places = [composed.provenance.exact((section, "_target_")).place]
    places += [] if choice is None else [choice.origin.place, choice.label]
    return any(place and place != DEFAULT and not place.startswith(f"{shipped}/") for place in places)
