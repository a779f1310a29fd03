"""Find a format by its name in a manifest or a config."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from trainer_cli.addons.formats.archive import ArchiveFormat
from trainer_cli.addons.formats.huggingface import HuggingFaceFormat
from trainer_cli.addons.formats.torch_file import TorchFileFormat
from trainer_cli.errors import CheckpointError
from trainer_cli.format.base import Format
from trainer_cli.format.sharded import ShardedFormat, TensorsFormat
from trainer_cli.schema import Compression

FORMATS: Mapping[str, Callable[[], Format]] = {
    "tensors": TensorsFormat,
    "torch_file": TorchFileFormat,
    "archive": ArchiveFormat,
    "huggingface": HuggingFaceFormat,
}


def new_format(name: str, compression: Compression = Compression.none, *, where: str | None = None) -> Format:
    """The format of this name.

    Args:
        compression: of archives that are written.
        where: the checkpoint whose manifest has the name, for the error.

    Raises:
        CheckpointError: no format has this name.
    """
    if name not in FORMATS:
        names = ", ".join(map(repr, FORMATS))
        raise CheckpointError(f"the format {name[:40]!r} is unknown; known is {names}", where=where)
    return ArchiveFormat(compression) if name == ArchiveFormat.name else FORMATS[name]()


def format_of_rank(format: Format, sharded: ShardedFormat) -> Format | None:
    """The sharded variant of a format, for one rank of a distributed run; None if the format has no such variant."""
    if isinstance(format, ArchiveFormat):
        return ArchiveFormat(format.compression, sharded)
    return sharded if isinstance(format, TensorsFormat | ShardedFormat) else None
