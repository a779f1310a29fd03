"""Verify a checkpoint by several ranks: each reads some of its files, and rank 0 decides."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from trainer_cli.layout import spread
from trainer_cli.storage import Disk, LocalReadableFolder
from trainer_cli.tensor_files import verify

if TYPE_CHECKING:
    from trainer_cli.manifest import Manifest
    from trainer_cli.parallel import ProcessGroup
    from trainer_cli.storage import ReadableFolder

log = logging.getLogger(__name__)


class GroupVerifier:
    """Verifies checkpoints by all ranks of a group.

    Rank 0 calls `verify` within `group.leading(verifier)`; the other ranks follow with verifiers of their own.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def verify(self, folder: ReadableFolder, manifest: Manifest) -> None:
        """Verify a checkpoint as `verified_file.verify` does; rank 0 alone, if it is in a cache of its own machine.

        Rank 0 reads again what another rank could not read: that rank may not see the folder, or its machine may be
        faulty.

        Raises:
            DamagedCheckpoint: naming the first file that is not what was written.
        """
        # Which parts of tensors a file has is most of a large manifest, and is not needed here.
        if self._group.machines > 1 and not folder.is_shared:
            verify(folder, manifest)
            return
        small_manifest = replace(manifest, shards={}, aliases={})
        path = folder.path.absolute()
        self._group.have_followers_call(self.verify_share, path, small_manifest)
        unverified = self.verify_share(path, small_manifest)
        verify(folder, manifest, unverified)
        if unverified:
            log.warning("%s could be verified by rank 0 only, and not by another that tried to", ", ".join(unverified))

    def verify_share(self, path: Path, manifest: Manifest) -> list[str]:
        """Verify this rank's share of the files of the checkpoint at `path`. Returns the files that some rank could not
        verify, sorted. Collective."""
        folder = LocalReadableFolder(path, Disk())
        unverified = []
        for file in share_of(manifest, self._group.rank, self._group.world_size):
            try:
                verify(folder, manifest, [file])
            except Exception:  # Rank 0 reads it again, and reports the error.
                unverified.append(file)
        return sorted(file for rank_files in self._group.gather(unverified) for file in rank_files)


def share_of(manifest: Manifest, rank: int, world_size: int) -> list[str]:
    """The files that a rank verifies, so that all ranks read about as many bytes."""
    rank_of_file = spread({file: entry.size_bytes for file, entry in manifest.files.items()}, range(world_size))
    return [file for file in sorted(manifest.files) if rank_of_file[file] == rank]
