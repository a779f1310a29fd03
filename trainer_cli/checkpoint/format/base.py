"""What checkpointing asks of a file format: a state tree becomes files in a folder, and comes back."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from trainer_cli.checkpoint.format.tensor_file import FileLayout
    from trainer_cli.checkpoint.storage.base import ReadableFolder
    from trainer_cli.core.manifest import Manifest


class Format(Protocol):
    """Turns a state tree into files in a folder, and back. Every rank calls it with its own rank."""

    @property
    def name(self) -> str:
        """What the manifest calls it."""
        ...

    def plan(self, tree: Mapping[str, Any], *, shapes_only: bool = False) -> FileLayout:
        """What the files of one rank will hold, and where each tensor goes; nothing is copied or written.

        Args:
            shapes_only: tensors on the device `meta` are accepted, to learn the size.

        Raises:
            UnsavableState: naming the owner of what cannot be saved.
        """
        ...

    def read(self, folder: ReadableFolder, manifest: Manifest, only: Collection[str] | None = None) -> dict[str, Any]:
        """The tree as written, or its top-level keys in `only` alone, after the digests of its files were verified.

        Raises:
            DamagedCheckpoint: naming the file that is not what was written.
        """
        ...
