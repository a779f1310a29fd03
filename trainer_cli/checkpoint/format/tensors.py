"""The default format: one safetensors file a rank, and one JSON file for all that is no tensor."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch

from trainer_cli.checkpoint.format import codec
from trainer_cli.checkpoint.format.dtensor import Targets
from trainer_cli.checkpoint.format.file_layout import FileLayout, check_booleans, lay_out, memory_of, new_tensor
from trainer_cli.checkpoint.format.header import parsed_header, state_file, tensor_file
from trainer_cli.checkpoint.format.sharded import is_sharded, read_sharded
from trainer_cli.checkpoint.format.verified_file import VerifiedFile
from trainer_cli.checkpoint.manifest import DamagedCheckpoint, Manifest

if TYPE_CHECKING:
    from trainer_cli.checkpoint.storage.interfaces import ReadableFolder


class TensorsFormat:
    """Any safetensors reader can open the tensor file; tied tensors and overlapping views are in it once.

    Tensors are written straight from their memory, without holes between them; the header is padded so that they begin
    at a multiple of 4,096 bytes. They come back as plain tensors on the CPU: contiguous, each with memory of its own,
    but for views, which share it.
    """

    name = "tensors"

    def plan(self, tree: Mapping[str, Any], *, shapes_only: bool = False) -> FileLayout:
        return lay_out(*codec.encode(tree), shapes_only=shapes_only)

    def read(
        self,
        folder: ReadableFolder,
        manifest: Manifest,
        only: Collection[str] | None = None,
        rank: int = 0,
        targets: Targets | None = None,
    ) -> dict[str, Any]:
        if is_sharded(manifest) or targets is not None:
            return read_sharded(folder, manifest, only, targets)
        with VerifiedFile(folder, manifest, state_file(rank)) as file:
            text = file.rest()
        try:
            decoder = codec.decode(text, only)
            return decoder.tree(_read_tensors(folder, manifest, tensor_file(rank), decoder.wanted))
        except codec.Undecodable as error:
            where = str(folder.path / state_file(rank))
            raise DamagedCheckpoint(f"the small states cannot be read: {error}", where=where) from None


def _read_tensors(
    folder: ReadableFolder, manifest: Manifest, file_name: str, wanted: Collection[str]
) -> dict[str, torch.Tensor]:
    """The tensors of these names; tied ones are one tensor. The whole file is digested."""
    aliases = manifest.aliases.get(file_name, {})
    stored = {name: aliases.get(name, name) for name in wanted}
    found = read_file(folder, manifest, file_name, set(stored.values()))
    if missing := set(stored.values()) - found.keys() | set(stored.values()) & set(aliases):
        what = f"a file of the checkpoint is damaged: it lacks the tensor {min(missing)[:80]!r}"
        raise DamagedCheckpoint(what, where=str(folder.path / file_name))
    return {name: found[stored[name]] for name in wanted}


def read_file(
    folder: ReadableFolder, manifest: Manifest, file_name: str, kept: Collection[str]
) -> dict[str, torch.Tensor]:
    """Those of these tensors that a file has. The whole file is digested."""
    with VerifiedFile(folder, manifest, file_name) as file:
        layout = parsed_header(file)
        found = {entry.name: new_tensor(file, entry, entry.shape) for entry in layout if entry.name in kept}
        file.read(memory_of(found[e.name]) if e.name in kept else e.size_bytes for e in layout if e.size_bytes)
    for name, tensor in found.items():
        check_booleans(file.path, name, tensor)
    return found
