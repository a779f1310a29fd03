"""Verify every byte of a checkpoint, and find the newest intact one."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from pathlib import Path
from threading import Thread

from trainer_cli.checkpoint.catalog import Catalog, Entry
from trainer_cli.checkpoint.format.verified_file import verify
from trainer_cli.checkpoint.manifest import DamagedCheckpoint, Manifest, new_digest
from trainer_cli.checkpoint.storage.interfaces import ReadableFolder, Storage
from trainer_cli.checkpoint.storage.registry import open_storage
from trainer_cli.errors import CheckpointError

log = logging.getLogger(__name__)

_LISTED = 20
_PATIENCE_S = 2.0
"""How long an interrupted start waits for the thread that verifies."""


Check = Callable[[ReadableFolder, Manifest], object]
"""Verifies every file of a checkpoint, as `verify`."""


def why_damaged(storage: Storage, entry: Entry, check: Check = verify) -> str | None:
    """What is wrong with a checkpoint, after every file was read, digested and decoded; None for an intact one.

    Raises:
        OSError: it cannot be read now, so it is unknown whether it is damaged.
    """
    if entry.problem is not None or entry.manifest is None:
        return entry.problem or "it has no manifest"
    try:
        with storage.reading(entry.name) as folder:
            check(folder, entry.manifest)
            # After the check, during which torch is imported.
            from trainer_cli.checkpoint.readable import check_readable

            check_readable(folder, entry.manifest)
    except CheckpointError as error:
        return str(error)
    except MemoryError as error:
        raise OSError(errno.ENOMEM, "there is not enough memory to read it") from error
    return None


def read_small(storage: Storage, name: str, file: str, manifest: Manifest) -> bytes:
    """The content of a small file of a checkpoint, whose digest is verified; its other files are not read.

    Raises:
        DamagedCheckpoint: it is missing, or not what was written.
    """
    content, entry = storage.peek(name, file), manifest.files[file]
    digest = new_digest(entry.algorithm)
    digest.update(content or b"")
    if content is None or f"{entry.algorithm}:{digest.hexdigest()}" != entry.digest:
        raise DamagedCheckpoint(f"{file} is missing, or not what was written", where=storage.location(name))
    return content


def is_intact(storage: Storage, entry: Entry) -> bool:
    """Whether a checkpoint can be read and every digest is right."""
    try:
        return why_damaged(storage, entry) is None
    except OSError:
        return False


def verify_beside(meanwhile: Callable[[], object], folder: ReadableFolder, manifest: Manifest) -> None:
    """As `verify`, in another thread while `meanwhile` is called in this one."""
    found: list[BaseException] = []

    def read() -> None:
        try:
            verify(folder, manifest)
        except BaseException as error:  # Raised in the thread that waits for the result.
            found.append(error)

    reader = Thread(target=read, name="checkpoint-verifying", daemon=True)
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
    check: Check = verify,
    quarantine: bool = True,
) -> Entry | None:
    """The newest intact checkpoint of a run whose weights are finite; None if the run has no checkpoint.

    Newer ones of the run that are damaged or not finite are quarantined, with a warning. One whose manifest cannot be
    read may belong to another run, and one that cannot be read now may be readable later: both are reported and stay.

    Args:
        limit: later steps are not used: the training went back to this one.
        quarantine: False changes nothing on the disk.

    Raises:
        CheckpointError: there are checkpoints in `where`, but none can be used; nothing was changed.
    """
    unfit: dict[str, str] = {}
    unread: dict[str, str] = {}
    for entry in reversed(catalog.entries()):
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
                problem = why_damaged(catalog.storage, entry, check)
        except OSError as error:
            unread[entry.name] = f"it cannot be read: {error}"
            continue
        if problem is None:
            if quarantine:
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
        log.warning("checkpoint %s is not used, and is quarantined: %s", name, problem)
        storage.quarantine(name, problem)


def catalog_of(folder: Path, cache: Path | None = None) -> Catalog:
    """The checkpoints in a folder, to be read; `cache` as of `open_storage`."""
    return Catalog(open_storage(folder, cache=cache))
