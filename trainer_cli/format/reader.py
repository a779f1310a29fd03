"""The reader of a checkpoint: the part of a checkpointer that a user can replace."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Protocol

from trainer_cli.dtensor import Targets, distributed
from trainer_cli.format.base import Format
from trainer_cli.format.open import new_format
from trainer_cli.format.sharded import DividedFormat, ShardedFormat, TensorsFormat
from trainer_cli.manifest import Manifest

if TYPE_CHECKING:
    from trainer_cli.storage import ReadableFolder
    from trainer_cli.tensor_files import LiveTensors


class StateReader(Protocol):
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
        live: LiveTensors | None = None,
    ) -> dict[str, Any]:
        """See `StateReader.read`.

        Args:
            live: what it selects is in the result instead of new tensors, and filled by `live.read`.
        """
        format = self.format
        if format is None or format.name != manifest.format:
            format = new_format(manifest.format, where=str(folder.path))
        if self.sharded is not None and isinstance(format, DividedFormat):
            format = format.of_rank(self.sharded)
        if targets is None:
            if live is not None and type(format) is TensorsFormat:
                return format.read(folder, manifest, only, live=live)
            return format.read(folder, manifest, only)
        if isinstance(format, DividedFormat):
            return format.read(folder, manifest, only, targets=targets)
        # The other formats are read as a whole.
        tree: dict[str, Any] = distributed(format.read(folder, manifest, only), targets)
        return tree
