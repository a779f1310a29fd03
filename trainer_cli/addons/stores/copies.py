"""The folders that hold checkpoints of a run: its own, and that of its copies."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from trainer_cli.catalog import Catalog
from trainer_cli.errors import CheckpointError, ConfigError

log = logging.getLogger(__name__)


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


def reachable(primary: Catalog, copies: Sequence[Catalog], run_id: str | None) -> list[Catalog]:
    """Of a run's own folder, and of those of its copies that can be listed. One that cannot is left out with a warning.

    Raises:
        CheckpointError: one cannot be listed, and the run's own folder has no valid checkpoint: where the run stands
            is unknown.
    """
    catalogs = [primary]
    for catalog in copies:
        try:
            # A listing alone: manifests of copies are read only if one of them may be newer.
            catalog.names()
        except OSError as error:
            if primary.newest_valid(run_id) is None:
                raise CheckpointError(
                    f"{primary.folder} holds no valid checkpoint, and whether copies are in {catalog.folder} "
                    f"cannot be seen: {error}",
                    where="checkpoint.copy_to.folder",
                    cure="To start without them, set checkpoint.copy_to.folder=null.",
                ) from error
            log.warning("the copies in %s cannot be listed, so none is resumed: %s", catalog.folder, error)
        else:
            catalogs.append(catalog)
    return catalogs
