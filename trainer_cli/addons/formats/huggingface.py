"""The format of Hugging Face's libraries for the model, with the other states in the default format beside it."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from trainer_cli.format import FileLayout, FilesOfRank, Undecodable, decoded_state, encode, lay_out
from trainer_cli.manifest import Manifest
from trainer_cli.tensor_files import TensorEntry, bytes_of, read_tensors, render_header

if TYPE_CHECKING:
    from trainer_cli.storage import ReadableFolder, WritableFolder

SHARD_BYTES = 5_000_000_000
INDEX_FILE = "model.safetensors.index.json"
_MODEL = "model/"


class _Located(NamedTuple):
    """A tensor, and its position in the image of the whole state."""

    entry: TensorEntry
    offset: int


@dataclass(frozen=True, slots=True)
class HuggingFaceLayout(FileLayout):
    """A layout that writes the tensors of the model to separate files, under their names in the model."""

    shard_bytes: int = SHARD_BYTES

    @property
    def total_bytes(self) -> int:
        """The size of all files together."""
        files = self._model_files()
        size_bytes = len(self.text) + len(_index(files))
        for tensors in (*files.values(), self._other_tensors()):
            entries = [tensor.entry for tensor in tensors]
            size_bytes += len(render_header(entries)) + sum(entry.size_bytes for entry in entries)
        return size_bytes

    def write(self, folder: WritableFolder, image: memoryview | None = None) -> dict[str, Mapping[str, str]]:
        """Write the files of the model and their index, then the other tensors, then the rest of the state."""
        files = self._model_files()
        for name, tensors in files.items():
            self._write_tensors(folder, name, tensors, image)
        if index := _index(files):
            with folder.create(INDEX_FILE) as file:
                file.write(index)
        self._write_tensors(folder, FilesOfRank(self.rank).tensors, self._other_tensors(), image)
        with folder.create(FilesOfRank(self.rank).state) as file:
            file.write(self.text)
        return {FilesOfRank(self.rank).tensors: self.aliases} if self.aliases else {}

    def _model_files(self) -> dict[str, list[_Located]]:
        """The tensors of the model by file name, under their names in the model, in files of at most `shard_bytes`."""
        shards: list[list[_Located]] = []
        size_bytes = 0
        for entry, offset in self._located_tensors():
            if not entry.name.startswith(_MODEL):
                continue
            # A tensor larger than a shard has one of its own, since a tensor is never divided.
            if not shards or size_bytes + entry.size_bytes > self.shard_bytes:
                shards.append([])
                size_bytes = 0
            shards[-1].append(_Located(replace(entry, name=entry.name.removeprefix(_MODEL)), offset))
            size_bytes += entry.size_bytes
        if len(shards) == 1:
            return {"model.safetensors": shards[0]}
        return {f"model-{number:05}-of-{len(shards):05}.safetensors": shard for number, shard in enumerate(shards, 1)}

    def _other_tensors(self) -> list[_Located]:
        """The tensors that are no part of the model."""
        return [tensor for tensor in self._located_tensors() if not tensor.entry.name.startswith(_MODEL)]

    def _located_tensors(self) -> Iterator[_Located]:
        """All tensors, in the order of the image, where they follow the header."""
        offset = len(self.header)
        for entry in self.entries:
            yield _Located(entry, offset)
            offset += entry.size_bytes

    def _write_tensors(
        self, folder: WritableFolder, name: str, tensors: list[_Located], image: memoryview | None
    ) -> None:
        """Write a file of safetensors: bytes of the image, or of the tensors themselves if there is no image."""
        leaf_at = {span.offset: span.leaf for span in self.spans}
        with folder.create(name) as file:
            file.write(render_header([tensor.entry for tensor in tensors]))
            for entry, offset in tensors:
                if image is not None:
                    file.write(image[offset : offset + entry.size_bytes])
                elif entry.size_bytes:
                    file.write(bytes_of(leaf_at[offset]).data)


def _index(files: Mapping[str, list[_Located]]) -> bytes:
    """The index file, which maps tensors to files; empty for a single file."""
    if len(files) < 2:
        return b""
    total = sum(tensor.entry.size_bytes for tensors in files.values() for tensor in tensors)
    weight_map = {tensor.entry.name: name for name, tensors in files.items() for tensor in tensors}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2).encode() + b"\n"


class HuggingFaceFormat:
    """`model.safetensors`, or shards with an index, that `from_pretrained` reads; tied weights are stored once."""

    name = "huggingface"

    def plan(self, tree: Mapping[str, Any], *, shapes_only: bool = False) -> FileLayout:
        """Lay out the files of a state."""
        # Views are written in full: `from_pretrained` looks for each weight under its own name.
        base = lay_out(*encode(tree, share_views=False), shapes_only=shapes_only)
        return HuggingFaceLayout(**{field.name: getattr(base, field.name) for field in fields(base)})

    def read(self, folder: ReadableFolder, manifest: Manifest, only: Collection[str] | None = None) -> dict[str, Any]:
        """Read the state, or the keys `only` of it, from files of safetensors."""
        with decoded_state(folder, manifest, only) as decoder:
            aliases = manifest.aliases.get(FilesOfRank(0).tensors, {})
            stored = {name: aliases.get(name, name) for name in decoder.wanted}
            tensors: dict[str, torch.Tensor] = {}
            for file in manifest.files:
                if not file.endswith(".safetensors"):
                    continue
                # In files of the model the names lack the prefix, as other libraries expect.
                prefix = "" if file == FilesOfRank(0).tensors else _MODEL
                names = {name.removeprefix(prefix) for name in stored.values() if name.startswith(prefix)}
                if names:
                    in_file = read_tensors(folder, manifest, file, names)
                    tensors |= {prefix + name: tensor for name, tensor in in_file.items()}
            if missing := set(stored.values()) - tensors.keys():
                raise Undecodable(f"the tensor {min(missing)[:80]!r} is in none of the files")
            return decoder.tree({name: tensors[stored[name]] for name in decoder.wanted})

    def read_values(self, folder: ReadableFolder, manifest: Manifest, only: Collection[str]) -> dict[str, Any]:
        """Read keys of the state that hold no tensors."""
        with decoded_state(folder, manifest, only) as decoder:
            return decoder.values()
