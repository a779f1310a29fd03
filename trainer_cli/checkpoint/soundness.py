"""Whether a checkpoint is, byte for byte, what was written; and which is the newest that is."""

from __future__ import annotations

import logging
from pathlib import Path

from trainer_cli.checkpoint.catalog import Catalog, Entry
from trainer_cli.checkpoint.format.verified import Verified
from trainer_cli.checkpoint.manifest import DamagedCheckpoint
from trainer_cli.checkpoint.storage.local import LocalStorage
from trainer_cli.checkpoint.storage.port import Storage

log = logging.getLogger(__name__)


def why_unsound(storage: Storage, entry: Entry) -> str | None:
    """What is wrong with a checkpoint, every file read and digested; None where nothing is."""
    if entry.problem is not None or entry.manifest is None:
        return entry.problem or "it has no manifest"
    try:
        with storage.reading(entry.name) as folder:
            for file in entry.manifest.files:
                with Verified(folder, entry.manifest, file):
                    pass
    except DamagedCheckpoint as error:
        return str(error)
    except OSError as error:
        return f"it cannot be read: {error}"
    return None


def newest_sound(catalog: Catalog, run_id: str) -> tuple[Entry | None, dict[str, str]]:
    """The newest checkpoint of a run that is sound and whose weights are finite.

    Returns it with the names and problems of the newer ones that were passed over. One whose manifest cannot be
    read may be anybody's: it is told, and left alone.
    """
    passed_over: dict[str, str] = {}
    for entry in reversed(catalog.entries()):
        if entry.manifest is None:
            if not entry.partial:
                log.warning("checkpoint %s is not used: %s", entry.name, entry.problem)
            continue
        if entry.manifest.run_id != run_id:
            continue
        problem = why_unsound(catalog.storage, entry) if entry.manifest.finite else "its weights are not finite"
        if problem is None:
            return entry, passed_over
        passed_over[entry.name] = problem
    return None, passed_over


def catalog_of(folder: Path) -> Catalog:
    """The checkpoints in a folder, for one who only reads."""
    return Catalog(LocalStorage(folder))
