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
        """The tree as saved, or only its top-level keys in `only`.

        Args:
            targets: live tensors of which this rank has a part: of the tensors for them, only that part is read.

        Raises:
            DamagedCheckpoint: a file differs from its digest; the message names it.
        """
        ...


class CheckpointReader:
    """Reads a checkpoint by the format that its manifest names.

    Args:
        format: is used for manifests that name it, with its own settings.
        sharded: the format of this rank; None: one process reads.
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
            live: tensors of a live state that are in the result instead of new ones, and that `live.read` fills.
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
        # Other formats are read whole, and divided afterwards.
        tree: dict[str, Any] = distributed(format.read(folder, manifest, only), targets)
        return tree
