"""The default format: one safetensors file a rank, and one JSON file for all that is no tensor."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from trainer_cli.checkpoint.format import codec
from trainer_cli.checkpoint.format.file_layout import FileLayout, lay_out
from trainer_cli.checkpoint.format.lazy_state import LazyState
from trainer_cli.checkpoint.format.tensor_reader import read_state
from trainer_cli.checkpoint.manifest import Manifest

if TYPE_CHECKING:
    from trainer_cli.checkpoint.storage.interfaces import ReadableFolder


class TensorsFormat:
    """Any safetensors reader can open the tensor file; tied tensors are in it once.

    Tensors are written straight from their memory, without holes between them; the
    header is padded so that they begin at a multiple of 4,096 bytes. They are read straight into the
    memory where they are wanted, or into memory of their own. Parameters come back as plain tensors, in
    contiguous layout, on the CPU.
    """

    name = "tensors"

    def plan(self, tree: Mapping[str, Any]) -> FileLayout:
        return lay_out(*codec.encode(tree))

    def size_bytes(self, tree: Mapping[str, Any]) -> int:
        """The size of a tree's files, whose tensors may have a shape but no memory (device `meta`)."""
        return lay_out(*codec.encode(tree), shapes_only=True).total_bytes

    def read(
        self,
        folder: ReadableFolder,
        manifest: Manifest,
        only: Collection[str] | None = None,
        later: Collection[str] = (),
        rank: int = 0,
    ) -> LazyState:
        return read_state(folder, manifest, only, later, rank)
