"""Whether a checkpoint is, byte for byte, what was written; and which is the newest that is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from threading import Thread

from trainer_cli.checkpoint.catalog import Catalog, Entry
from trainer_cli.checkpoint.format.verified_file import verify
from trainer_cli.checkpoint.manifest import DamagedCheckpoint, Manifest
from trainer_cli.checkpoint.storage.interfaces import ReadableFolder, Storage
from trainer_cli.checkpoint.storage.registry import open_storage
from trainer_cli.errors import CheckpointError

log = logging.getLogger(__name__)

_LISTED = 20
_PATIENCE_S = 2.0
"""How long a start that is broken off waits for what reads for it."""


def why_damaged(storage: Storage, entry: Entry, meanwhile: Callable[[], object] | None = None) -> str | None:
    """What is wrong with a checkpoint, every file read and digested; None where nothing is.

    `meanwhile` is called while another thread reads: what is loaded next comes from memory then.

    Raises:
        OSError: it cannot be read just now, which says nothing of what is written there.
    """
    if entry.problem is not None or entry.manifest is None:
        return entry.problem or "it has no manifest"
    try:
        with storage.reading(entry.name) as folder:
            _verify_beside(meanwhile, folder, entry.manifest)
    except DamagedCheckpoint as error:
        return str(error)
    return None


def is_intact(storage: Storage, entry: Entry) -> bool:
    """True where nothing is wrong with a checkpoint and it can be read just now."""
    try:
        return why_damaged(storage, entry) is None
    except OSError:
        return False


def _verify_beside(meanwhile: Callable[[], object] | None, folder: ReadableFolder, manifest: Manifest) -> None:
    if meanwhile is None:
        verify(folder, manifest)
        return
    found: list[BaseException] = []

    def read() -> None:
        try:
            verify(folder, manifest)
        except BaseException as error:  # Raised in the thread that waits for the result.
            found.append(error)

    reader = Thread(target=read, name="checkpoint-proof", daemon=True)
    reader.start()
    try:
        meanwhile()
        reader.join()
    except BaseException:
        reader.join(_PATIENCE_S)
        raise
    if found:
        raise found[0]


def newest_intact(
    catalog: Catalog,
    run_id: str,
    where: str,
    *,
    limit: int | None = None,
    meanwhile: Callable[[], object] | None = None,
) -> Entry | None:
    """The newest checkpoint of a run that is sound and whose weights are finite; None where there are none at all.

    Newer ones of the run that are unfit for good are set aside, aloud. One whose manifest cannot be read may be
    anybody's, and one that cannot be read now may be read later: these are reported, and left alone. Those of a step
    beyond `limit` were left behind when the training went back. `meanwhile` is called once, while the first is read.

    Raises:
        CheckpointError: there are checkpoints in `where`, but none that will do; nothing was touched.
    """
    unfit: dict[str, str] = {}
    unread: dict[str, str] = {}
    for entry in catalog.newest_first():
        if entry.manifest is None:
            if not entry.partial:
                unread[entry.name] = entry.problem or ""
            continue
        if entry.manifest.run_id != run_id:
            continue
        if limit is not None and entry.step > limit:
            log.warning("checkpoint %s is not used: the training went back to step %d", entry.name, limit)
            continue
        try:
            problem: str | None = "its weights are not finite"
            if entry.manifest.finite:
                beside, meanwhile = meanwhile, None
                problem = why_damaged(catalog.storage, entry, beside)
        except OSError as error:
            unread[entry.name] = f"it cannot be read: {error}"
            continue
        if problem is None:
            _report_and_quarantine(catalog.storage, unfit, unread)
            return entry
        unfit[entry.name] = problem
    if unfit or unread:
        all_of_them = [f"  {name}: {problem}" for name, problem in {**unfit, **unread}.items()]
        more = [f"  … and {len(all_of_them) - _LISTED} more"] if len(all_of_them) > _LISTED else []
        listed = "\n".join(all_of_them[:_LISTED] + more)
        raise CheckpointError(
            f"{where} holds checkpoints, but none is valid:\n{listed}\n",
            cure="Restore one of them, or start another run, under another name or in another folder.",
        )
    return None


def _report_and_quarantine(storage: Storage, unfit: dict[str, str], unread: dict[str, str]) -> None:
    for name, problem in unread.items():
        log.warning("checkpoint %s is not used: %s", name, problem)
    for name, problem in unfit.items():
        log.warning("checkpoint %s is not used, and is set aside: %s", name, problem)
        storage.quarantine(name, problem)


def catalog_of(folder: Path) -> Catalog:
    """The checkpoints in a folder, for one who only reads."""
    return Catalog(open_storage(folder))
