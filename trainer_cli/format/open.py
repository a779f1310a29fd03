"""Find a format by its name in a manifest or a config."""

from __future__ import annotations

from trainer_cli.addon import each_addon, find_part
from trainer_cli.errors import CheckpointError
from trainer_cli.format.base import Format
from trainer_cli.format.sharded import TensorsFormat
from trainer_cli.parts import explain_missing
from trainer_cli.schema import CheckpointFormat, Compression

_PREFIX = "format."
"""Prefix of the names under which add-ons register formats."""


def new_format(name: str, compression: Compression = Compression.none, *, where: str | None = None) -> Format:
    """The format of this name.

    Args:
        compression: of the archives that the format writes.
        where: the checkpoint whose manifest has the name, for the error.

    Raises:
        CheckpointError: no format has this name.
    """
    if name == TensorsFormat.name:
        return TensorsFormat()
    make = find_part(_PREFIX + name)
    if make is None:
        if (error := explain_missing(f"the format {name!r}", "parts", _PREFIX + name, where)) is not None:
            raise error
        keys = [key for _, addon in each_addon() for key in addon.parts if key.startswith(_PREFIX)]
        names = ", ".join(map(repr, [TensorsFormat.name, *(key.removeprefix(_PREFIX) for key in keys)]))
        raise CheckpointError(f"the format {name[:40]!r} is unknown; known is {names}", where=where)
    format: Format = make(compression) if name == CheckpointFormat.archive else make()
    return format
