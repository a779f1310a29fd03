"""What checkpointing asks of a file format: a state tree becomes files in a folder, and comes back."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from trainer_cli.checkpoint.format.file_layout import FileLayout
    from trainer_cli.checkpoint.format.lazy_state import LazyState
    from trainer_cli.checkpoint.manifest import Manifest
    from trainer_cli.checkpoint.storage.interfaces import ReadableFolder


class Format(Protocol):
    """Turns a state tree into files in a folder, and back. Every rank calls it with its own rank."""

    @property
    def name(self) -> str:
        """What the manifest calls it."""
        ...

    def plan(self, tree: Mapping[str, Any]) -> FileLayout:
        """What the files of one rank will hold, and where each tensor goes; nothing is copied or written.

        Raises:
            UnsavableState: naming the owner of what cannot be saved.
        """
        ...

    def read(
        self,
        folder: ReadableFolder,
        manifest: Manifest,
        only: Collection[str] | None = None,
        later: Collection[str] = (),
        rank: int = 0,
    ) -> LazyState:
        """The tree as written, or its top-level keys in `only` alone. Every digest is verified on the way.

        Tensors under the paths in `later` ("model", "optimizer/state"; "" is all) are lazy: they get their values in
        `LazyState.read`, which also verifies what is needed sooner. The folder must stay open until then.

        Raises:
            DamagedCheckpoint: naming the file that is not what was written.
        """
        ...
