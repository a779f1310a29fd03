"""The folders in which a run has checkpoints: its own, and the one that `checkpoint.copy_to` names."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer_cli.checkpoint.catalog import Catalog, Check, Entry, newest_intact
from trainer_cli.checkpoint.format.verified_file import verify
from trainer_cli.errors import CheckpointError, ConfigError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """A folder of checkpoints."""

    folder: Path
    catalog: Catalog


def check_copies(folder: Path, copies: Path) -> None:
    """Refuse a folder for copies that is the folder of the checkpoints, or inside it.

    Raises:
        ConfigError: with the folder.
    """
    if copies.resolve() == folder.resolve() or folder.resolve() in copies.resolve().parents:
        raise ConfigError(
            f"checkpoint.copy_to.folder is {copies}, which is in the folder of the checkpoints, {folder}",
            location="checkpoint.copy_to.folder",
            hint="Name one on another disk or in an object store.",
        )


def reachable(primary: Place, copies: Sequence[Place], run_id: str | None) -> list[Place]:
    """A run's own folder, and those of the copies that can be listed. One that cannot is left out with a warning.

    Raises:
        CheckpointError: one cannot be listed, and the run's own folder has no valid checkpoint: where the run stands
            is unknown.
    """
    places = [primary]
    for location in copies:
        try:
            location.catalog.names()
        except OSError as error:
            if primary.catalog.newest_valid(run_id) is None:
                raise CheckpointError(
                    f"{primary.folder} holds no valid checkpoint, and whether copies are in {location.folder} "
                    f"cannot be seen: {error}",
                    where="checkpoint.copy_to.folder",
                    cure="To start without them, set checkpoint.copy_to.folder=null.",
                ) from error
            log.warning("the copies in %s cannot be listed, so none is resumed: %s", location.folder, error)
        else:
            places.append(location)
    return places


def newest_of_all(
    places: Sequence[Place],
    run_id: str,
    *,
    limit: int | None = None,
    check: Check = verify,
    quarantine: bool = True,
) -> tuple[Place, Entry] | None:
    """The newest intact checkpoint of a run in its own folder, which is the first, and in those of its copies; of equal
    steps the first one. None if there is none. See `newest_intact` for the arguments.

    Raises:
        CheckpointError: there are checkpoints, but none can be used.
    """
    newest: tuple[Place, Entry] | None = None
    failure: CheckpointError | None = None
    for location in places:
        step = -1 if newest is None else newest[1].step
        # A copy is downloaded and verified only if it would be taken.
        if location is not places[0] and not any(entry.step > step for entry in location.catalog.valid(run_id)):
            continue
        try:
            entry = newest_intact(
                location.catalog, run_id, str(location.folder), limit=limit, check=check, quarantine=quarantine
            )
        except CheckpointError as error:
            failure = failure or error
            continue
        if entry is not None and entry.step > step:
            newest = location, entry
    if newest is None and failure is not None:
        raise failure
    if newest is not None and newest[0] is not places[0]:
        log.warning(
            "%s is taken from the copies in %s: %s holds no valid checkpoint of this step or a later one",
            newest[1].name,
            newest[0].folder,
            places[0].folder,
        )
    return newest
