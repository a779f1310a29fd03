"""The interface of a file format: a state tree becomes files in a folder, and is read from them.

A new format is a class with these methods, which usually encodes the tree by `tree.encode`, and decodes it by
`tree.decode`; a subclass of `FileLayout`, whose docstring has what to override; a value of `CheckpointFormat` with its
facts; and a part `format.NAME` of an add-on.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from trainer_cli.format.file_layout import FileLayout
    from trainer_cli.manifest import Manifest
    from trainer_cli.storage import ReadableFolder


class Format(Protocol):
    """Turns a state tree into files in a folder, and back. Every rank calls it with its own rank."""

    @property
    def name(self) -> str:
        """Name in the manifest."""
        ...

    def plan(self, tree: Mapping[str, Any], *, shapes_only: bool = False) -> FileLayout:
        """The layout of one rank's files, with the offset of each tensor. Nothing is copied or written.

        Args:
            shapes_only: accept tensors on the device `meta`, to compute the size.

        Raises:
            UnsavableState: a value cannot be saved; the message names its owner.
        """
        ...

    def read(self, folder: ReadableFolder, manifest: Manifest, only: Collection[str] | None = None) -> dict[str, Any]:
        """The tree as written, or only its top-level keys in `only`, after the digests of its files were verified.

        Raises:
            DamagedCheckpoint: a file differs from its digest; the message names it.
        """
        ...

    def read_values(self, folder: ReadableFolder, manifest: Manifest, only: Collection[str]) -> dict[str, Any]:
        """The top-level keys of the tree in `only`, as rank 0 saved them, with None in place of tensors.

        Only small files are read where the format has them.

        Raises:
            DamagedCheckpoint: a file differs from its digest; the message names it.
        """
        ...
