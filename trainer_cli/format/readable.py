"""Checks that a checkpoint can be decoded, without keeping its tensors: `ckpt verify` and a resume share it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from trainer_cli.errors import CheckpointError
from trainer_cli.format import tree as codec
from trainer_cli.format.open import new_format
from trainer_cli.format.rank_files import FilesOfRank
from trainer_cli.format.sharded import DividedFormat, decode_own, is_sharded
from trainer_cli.layout import PartTable
from trainer_cli.manifest import DamagedCheckpoint, Manifest
from trainer_cli.schema import CheckpointFormat
from trainer_cli.tensor_files import VerifiedFile, read_verified

if TYPE_CHECKING:
    from trainer_cli.storage import ReadableFolder


def check_readable(folder: ReadableFolder, manifest: Manifest) -> None:
    """Decode the small states, and look for every tensor that they name. Files of torch and archives are read whole.

    Raises:
        DamagedCheckpoint: it cannot be decoded.
        OSError: it could not be read now, and may be readable later.
    """
    format = new_format(manifest.format, where=str(folder.path))
    try:
        if isinstance(format, DividedFormat):
            _check_tensor_files(*format.files_of(folder, manifest))
        elif CheckpointFormat(manifest.format).has_tensor_files:
            _check_tensor_files(folder, manifest)
        else:
            format.read(folder, manifest)
    except (OSError, CheckpointError, MemoryError):
        raise
    except Exception as error:
        raise DamagedCheckpoint.from_error(error, folder.path) from error


def _check_tensor_files(folder: ReadableFolder, manifest: Manifest) -> None:
    """Check that every tensor and view of the state is in a tensor file, by the headers of these."""
    decoder = codec.decode(read_verified(folder, manifest, FilesOfRank(0).state))
    aliases = {alias: name for table in manifest.aliases.values() for alias, name in table.items()}
    # Name of a stored tensor -> its number of elements.
    stored: dict[str, int] = {}
    # At most one rank a file: a manifest that was altered may give any number.
    count = min(manifest.world_size, len(manifest.files))
    ranks = {file for rank in range(count) for file in FilesOfRank(rank).with_tensors}
    for file_name in manifest.files:
        is_of_rank = file_name in ranks
        if is_of_rank or (manifest.format == "huggingface" and file_name.endswith(".safetensors")):
            file = VerifiedFile(folder, manifest, file_name)
            with file.without_digest():
                elements = {entry.name: math.prod(entry.shape) for entry in file.read_entries()}
            stored |= elements if is_of_rank else {f"model/{name}": count for name, count in elements.items()}
    if is_sharded(manifest):
        for rank in range(manifest.world_size):
            decode_own(read_verified(folder, manifest, FilesOfRank(rank).own))
        if problem := PartTable.of(manifest.shards).why_uncovered(decoder.wanted, aliases):
            raise codec.Undecodable(problem)
    for name in decoder.wanted:
        if aliases.get(name, name) not in stored:
            raise codec.Undecodable(f"the tensor {name[:80]!r} is in none of the files")
    for view in decoder.views.values():
        view.check_fits(stored[aliases.get(view.base, view.base)])
