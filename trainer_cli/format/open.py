"""Find a format by its name in a manifest or a config."""

from __future__ import annotations

from trainer_cli.addon import each_addon, find_part
from trainer_cli.errors import CheckpointError
from trainer_cli.format.base import Format
from trainer_cli.format.sharded import TensorsFormat
from trainer_cli.parts import explain_missing
from trainer_cli.schema import CheckpointFormat, Compression

_PART = "format."
"""Begins the names of parts of add-ons that are formats."""


def new_format(name: str, compression: Compression = Compression.none, *, where: str | None = None) -> Format:
    """The format of this name.

    Args:
        compression: of archives that are written.
        where: the checkpoint whose manifest has the name, for the error.

    Raises:
        CheckpointError: no format has this name.
    """
    if name == TensorsFormat.name:
        return TensorsFormat()
    make = find_part(_PART + name)
    if make is None:
        if (error := explain_missing(f"the format {name!r}", "parts", _PART + name, where)) is not None:
            raise error
        parts = [part for _, addon in each_addon() for part in addon.parts if part.startswith(_PART)]
        names = ", ".join(map(repr, [TensorsFormat.name, *(part.removeprefix(_PART) for part in parts)]))
        raise CheckpointError(f"the format {name[:40]!r} is unknown; known is {names}", where=where)
    format: Format = make(compression) if name == CheckpointFormat.archive else make()
    return format
