"""Commit a checkpoint: its files are written and fsynced, then the manifest, then the folder is renamed."""

from __future__ import annotations

import errno
import logging
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from trainer_cli.checkpoint.catalog import examine
from trainer_cli.checkpoint.format.verified_file import verify
from trainer_cli.checkpoint.manifest import DamagedCheckpoint, Manifest
from trainer_cli.checkpoint.naming import MANIFEST_FILE, parse_step
from trainer_cli.checkpoint.policy import Kind
from trainer_cli.checkpoint.storage.interfaces import UnsyncedError
from trainer_cli.config.schema import DigestAlgorithm
from trainer_cli.errors import NO_SPACE, NotDurableError, SaveError, disk_cure

if TYPE_CHECKING:
    from trainer_cli.checkpoint.format.interfaces import FormatRecord
    from trainer_cli.checkpoint.storage.interfaces import Storage, WritableFolder

logger = logging.getLogger(__name__)

INTACT = "Older checkpoints are intact."


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointMetadata:
    """What the caller says of a checkpoint, for its manifest."""

    run_id: str = ""
    attempt: int = 0
    step: int = 0
    epoch: int = 0
    kind: Kind = Kind.permanent
    reason: str = "saved by hand"
    finished: str | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    finite: bool = True
    config_digest: str | None = None
    target_packages: tuple[str, ...] = ()
    world_size: int = 1
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions beyond those of python, torch and numpy."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Small files to put beside the state, such as config.yaml."""
    progress: Mapping[str, int | float] = field(default_factory=dict)


def metadata_of(name: str) -> CheckpointMetadata:
    """What a checkpoint's name alone says of it."""
    return CheckpointMetadata(step=parse_step(name) or 0)


def commit(
    storage: Storage,
    name: str,
    metadata: CheckpointMetadata,
    put: Callable[[WritableFolder], FormatRecord],
    *,
    format: str,
    digest: DigestAlgorithm,
    size_bytes: int,
    final_metadata: Callable[[CheckpointMetadata], CheckpointMetadata] = lambda metadata: metadata,
) -> None:
    """Write a checkpoint with `put` and commit it. An intact checkpoint of the same run and step is left as it is.

    Args:
        format: the name of the format that `put` writes, for the manifest.
        size_bytes: what `put` writes, for the message of a full disk.
        final_metadata: called when all else is written, before the manifest is made.

    Raises:
        NotDurableError: the checkpoint is there, but a power cut may take it away.
        SaveError: nothing was committed. In both cases older checkpoints are intact.
    """
    where = storage.location(name)
    try:
        if _is_saved(storage, name, metadata):
            storage.fsync_names()
            logger.info("%s is there already, and is not written again", where)
            return
        with storage.writing(name, digest=digest) as folder:
            record = put(folder)
            for file, content in metadata.files.items():
                with folder.create(file) as writer:
                    writer.write(content)
            metadata = final_metadata(metadata)
            if not metadata.finite:
                logger.warning("the weights of step %d are not finite: no resume takes %s", metadata.step, name)
            with folder.create(MANIFEST_FILE) as writer:
                writer.write(_manifest(metadata, format, folder, record).to_bytes())
    except OSError as error:
        size_bytes += sum(len(content) for content in metadata.files.values())
        raise disk_error(error, where, size_bytes, storage.free_bytes()) from error
    logger.debug("saved %s (%s)", where, metadata.reason)


def _manifest(metadata: CheckpointMetadata, format: str, folder: WritableFolder, record: FormatRecord) -> Manifest:
    return Manifest(
        run_id=metadata.run_id,
        attempt=metadata.attempt,
        step=metadata.step,
        epoch=metadata.epoch,
        kind=metadata.kind,
        reason=metadata.reason,
        finished=metadata.finished,
        metrics=metadata.metrics,
        finite=metadata.finite,
        world_size=metadata.world_size,
        config_digest=metadata.config_digest,
        target_packages=metadata.target_packages,
        versions={**_versions(), **metadata.versions},
        format=format,
        files=dict(folder.files),
        aliases=record.aliases,
        progress=metadata.progress,
    )


def _is_saved(storage: Storage, name: str, metadata: CheckpointMetadata) -> bool:
    """True where an intact checkpoint of the same run and step is there; a damaged one is quarantined."""
    if storage.peek(name, MANIFEST_FILE) is None:
        return False
    manifest, problem = examine(storage, name)
    if manifest is not None and problem is None:
        try:
            with storage.reading(name) as folder:
                verify(folder, manifest)
        except DamagedCheckpoint as error:
            problem = str(error)
    if manifest is None or problem is not None:
        storage.quarantine(name, problem or "it has no manifest")
        return False
    if (manifest.run_id, manifest.step) == (metadata.run_id, metadata.step):
        return True
    raise SaveError(
        "another checkpoint is in the way: it is valid, so it is not replaced. "
        f"It is step {manifest.step} of run {manifest.run_id or 'unknown'}",
        where=storage.location(name),
        cure="Use another run directory, or move that checkpoint away.",
    )


def disk_error(
    error: OSError, where: str | Path, size_bytes: int | None = None, free_bytes: int | None = None
) -> SaveError:
    """An error of the disk as the failure of a save: which checkpoint, what the system said, and what to do.

    Args:
        size_bytes: what the checkpoint would have taken.
        free_bytes: what the file system has left.
    """
    said = error.strerror or str(error)
    cure = f"{INTACT} {disk_cure(error)}"
    if isinstance(error, UnsyncedError):
        what = f"the checkpoint is there, but may not survive a power cut: its directory could not be fsynced: {said}"
        return NotDurableError(what, where=str(where), cure=cure)
    what = f"the checkpoint could not be saved: {said}"
    if error.filename is not None and Path(where).absolute().parent not in Path(error.filename).absolute().parents:
        what += f": {error.filename}"
    elif error.errno in NO_SPACE and size_bytes is not None:
        what += f"; it needs {size_bytes:,} bytes"
        # Of a quota this says nothing.
        if error.errno == errno.ENOSPC and free_bytes is not None:
            what += f", {free_bytes:,} bytes are free"
    return SaveError(what, where=str(where), cure=cure)


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), "torch": str(torch.__version__), "numpy": np.__version__}
