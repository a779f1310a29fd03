"""Errors of reading a checkpoint, each with the name of the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer_cli.catalog import Catalog, ForeignKind, examine
from trainer_cli.errors import CheckpointError, NoCheckpointError, TrainError
from trainer_cli.manifest import DamagedCheckpoint, Manifest
from trainer_cli.storage import Storage


@contextmanager
def errors_of_reading(storage: Storage, name: str) -> Iterator[None]:
    """Raise errors of the storage as errors that name the checkpoint."""
    where = storage.location(name)
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        # Torch's own files and those of other trainers have no manifest: the message says what they are.
        if (kind := ForeignKind.of(Path(where))) is not None:
            raise CheckpointError(
                f"this is a {kind}, not a checkpoint with a manifest",
                where=where,
                cure="load_checkpoint(path, model, finetune=True) loads its weights.",
            ) from None
        # Listed first: a listing that is older than the removal would show the checkpoint.
        exists, entry = name in storage.names(), Catalog(storage).entry(name)
        if exists and not entry.removed:
            raise DamagedCheckpoint("the checkpoint has no manifest, so it is partial", where=where) from None
        why = "the checkpoint is being removed" if exists else "there is no checkpoint"
        raise NoCheckpointError(why, where=where) from None
    except OSError as error:
        raise DamagedCheckpoint(f"the checkpoint cannot be read: {error}", where=where) from error
    except (TrainError, MemoryError):
        raise
    except Exception as error:
        raise DamagedCheckpoint.from_error(error, where) from error


def read_valid_manifest(storage: Storage, name: str) -> Manifest:
    """The manifest of a checkpoint all of whose files exist with the right sizes.

    Raises:
        DamagedCheckpoint: it is not so.
    """
    manifest, problem = examine(storage, name)
    if manifest is None or problem is not None:
        raise DamagedCheckpoint(f"the checkpoint is not valid: {problem}", where=storage.location(name))
    return manifest
