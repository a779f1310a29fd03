"""Verify a checkpoint by several ranks: each reads some of its files, and rank 0 decides."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from trainer_cli.checkpoint.format.verified_file import verify
from trainer_cli.checkpoint.storage.disk import Disk
from trainer_cli.checkpoint.storage.folder import LocalReadableFolder
from trainer_cli.core.shards import spread

if TYPE_CHECKING:
    from trainer_cli.checkpoint.storage.base import ReadableFolder
    from trainer_cli.core.manifest import Manifest
    from trainer_cli.parallel.process_group import ProcessGroup

log = logging.getLogger(__name__)


def verify_by_all(group: ProcessGroup, folder: ReadableFolder, manifest: Manifest) -> None:
    """As `verify`, by all ranks. Rank 0 calls it within `group.on_main(…, partial(verify_share, group))`.

    Rank 0 reads again what another rank could not read: that rank may not see the folder, or its machine may be faulty.

    Raises:
        DamagedCheckpoint: naming the first file that is not what was written.
    """
    # Which parts of tensors a file has is most of a large manifest, and is not needed here.
    small = replace(manifest, shards={}, aliases={})
    bad = group.together(partial(verify_share, group, folder, small))
    verify(folder, manifest, bad)
    if bad:
        log.warning("%s could be verified by rank 0 only, and not by another that tried to", ", ".join(bad))


def verify_share(
    group: ProcessGroup, folder: ReadableFolder | None = None, manifest: Manifest | None = None
) -> list[str]:
    """Verify this rank's share of the files of a checkpoint, which rank 0 names. Returns the files that some rank
    could not verify, sorted. Collective."""
    path, manifest = group.broadcast((None if folder is None else folder.path.absolute(), manifest))
    assert path is not None
    assert manifest is not None
    if folder is None:
        folder = LocalReadableFolder(path, Disk())
    bad = []
    for file in share_of(manifest, group.rank, group.world_size):
        try:
            verify(folder, manifest, [file])
        except Exception:  # Rank 0 reads it again, and reports the error.
            bad.append(file)
    return sorted(file for found in group.gather(bad) for file in found)


def share_of(manifest: Manifest, rank: int, world_size: int) -> list[str]:
    """The files that a rank verifies, so that all ranks read about as many bytes."""
    reader = spread({file: entry.size_bytes for file, entry in manifest.files.items()}, range(world_size))
    return [file for file in sorted(manifest.files) if reader[file] == rank]
