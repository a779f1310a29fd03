"""The default format: one safetensors file a rank, and one JSON file for all that is no tensor."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from trainer_cli.checkpoint.format import codec
from trainer_cli.checkpoint.format.image import TensorsImage
from trainer_cli.checkpoint.format.layout import rendered_header, state_file, tensor_file
from trainer_cli.checkpoint.format.leaves import bytes_of, laid_out
from trainer_cli.checkpoint.format.pending import Pending
from trainer_cli.checkpoint.format.port import FormatRecord
from trainer_cli.checkpoint.format.reading import read_state
from trainer_cli.checkpoint.manifest import Manifest

if TYPE_CHECKING:
    from trainer_cli.checkpoint.process.port import Carrier
    from trainer_cli.checkpoint.storage.port import ReadableFolder, WritableFolder


class TensorsFormat:
    """Any safetensors reader can open the tensor file; tied tensors are in it once.

    Tensors are written straight from their memory, without holes between them; the
    header is padded so that they begin at a multiple of 4,096 bytes. They are read straight into the
    memory where they are wanted, or into memory of their own. Parameters come back as plain tensors, in
    contiguous layout, on the CPU.
    """

    name = "tensors"

    def trial(self, tree: Mapping[str, Any]) -> int:
        return self._size_bytes(tree, shapes_only=False)

    def size_bytes(self, tree: Mapping[str, Any]) -> int:
        """The bytes of a tree's files, of whose tensors some may have a shape but no memory (device `meta`)."""
        return self._size_bytes(tree, shapes_only=True)

    def _size_bytes(self, tree: Mapping[str, Any], *, shapes_only: bool) -> int:
        text, tensors = codec.encode(tree)
        layout, _ = laid_out(tensors, shapes_only=shapes_only)
        return len(text) + len(rendered_header(layout)) + sum(entry.size_bytes for entry in layout)

    def write(self, folder: WritableFolder, tree: Mapping[str, Any], rank: int = 0) -> FormatRecord:
        text, tensors = codec.encode(tree)
        layout, aliases = laid_out(tensors)
        with folder.create(tensor_file(rank)) as sink:
            sink.write(rendered_header(layout))
            for entry in layout:
                if entry.size_bytes:
                    sink.write(bytes_of(tensors[entry.name]).data)
        with folder.create(state_file(rank)) as sink:
            sink.write(text)
        return FormatRecord({tensor_file(rank): aliases} if aliases else {})

    def image(self, *, lent_to: Carrier | None = None) -> TensorsImage:
        return TensorsImage(lent_to=lent_to)

    def read(
        self,
        folder: ReadableFolder,
        manifest: Manifest,
        only: Collection[str] | None = None,
        later: Collection[str] = (),
        rank: int = 0,
    ) -> Pending:
        return read_state(folder, manifest, only, later, rank)
