"""The reader of a checkpoint: the part of a checkpointer that a user can replace, and its errors."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from trainer_cli.checkpoint.catalog import examine
from trainer_cli.checkpoint.foreign.kind import kind_of
from trainer_cli.checkpoint.format.archive import ArchiveFormat
from trainer_cli.checkpoint.format.base import Format
from trainer_cli.checkpoint.format.dtensor import Targets, distributed
from trainer_cli.checkpoint.format.open import format_of_rank, new_format
from trainer_cli.checkpoint.format.sharded import ShardedFormat, TensorsFormat
from trainer_cli.checkpoint.readable import undecodable
from trainer_cli.checkpoint.storage.base import ReadableFolder, Storage
from trainer_cli.core.manifest import DamagedCheckpoint, Manifest
from trainer_cli.errors import CheckpointError, NoCheckpointError, TrainError


class Reader(Protocol):
    """Reads the state of a checkpoint."""

    def read(
        self,
        folder: ReadableFolder,
        manifest: Manifest,
        only: Collection[str] | None = None,
        *,
        targets: Targets | None = None,
    ) -> dict[str, Any]:
        """The tree as saved, or those of its top-level keys that are in `only`.

        Args:
            targets: the live tensors of which this rank has a part; of what is for them, that part is read.

        Raises:
            DamagedCheckpoint: naming the file that is not what was written.
        """
        ...


class CheckpointReader:
    """Reads a checkpoint by the format that its manifest names; a format given is used for its own name.

    Args:
        sharded: the format of this rank if several ranks read.
    """

    def __init__(self, format: Format | None = None, sharded: ShardedFormat | None = None) -> None:
        self.format, self.sharded = format, sharded

    def read(
        self,
        folder: ReadableFolder,
        manifest: Manifest,
        only: Collection[str] | None = None,
        *,
        targets: Targets | None = None,
    ) -> dict[str, Any]:
        format = self.format
        if format is None or format.name != manifest.format:
            format = new_format(manifest.format, str(folder.path))
        if self.sharded is not None:
            format = format_of_rank(format, self.sharded) or format
        if targets is None:
            return format.read(folder, manifest, only)
        if isinstance(format, TensorsFormat | ShardedFormat | ArchiveFormat):
            return format.read(folder, manifest, only, targets=targets)
        # The other formats are read as a whole.
        tree: dict[str, Any] = distributed(format.read(folder, manifest, only), targets)
        return tree


@contextmanager
def errors_of_reading(storage: Storage, name: str) -> Iterator[None]:
    """Raise errors of the storage as errors that name the checkpoint."""
    where = storage.location(name)
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        if (kind := kind_of(Path(where))) is not None:
            raise CheckpointError(
                f"this is a {kind}, not a checkpoint with a manifest",
                where=where,
                cure="load_checkpoint(path, model, finetune=True) loads its weights.",
            ) from None
        if name in storage.names():
            raise DamagedCheckpoint("the checkpoint has no manifest, so it is partial", where=where) from None
        raise NoCheckpointError("there is no checkpoint", where=where) from None
    except OSError as error:
        raise DamagedCheckpoint(f"the checkpoint cannot be read: {error}", where=where) from error
    except (TrainError, MemoryError):
        raise
    except Exception as error:
        raise undecodable(error, where) from error


def read_valid_manifest(storage: Storage, name: str) -> Manifest:
    """The manifest of a checkpoint all of whose files exist with the right sizes.

    Raises:
        DamagedCheckpoint: it is not so.
    """
    manifest, problem = examine(storage, name)
    if manifest is None or problem is not None:
        raise DamagedCheckpoint(f"the checkpoint is not valid: {problem}", where=storage.location(name))
    return manifest
