"""The model as Hugging Face's libraries read it, and the rest of the state in the default format beside it."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from trainer_cli.checkpoint.format import tree as codec
from trainer_cli.checkpoint.format.header import TensorEntry, rendered_header, state_file, tensor_file
from trainer_cli.checkpoint.format.sharded import read_file
from trainer_cli.checkpoint.format.tensor_file import FileLayout, bytes_of, lay_out
from trainer_cli.checkpoint.format.verified_file import VerifiedFile
from trainer_cli.core.manifest import DamagedCheckpoint, Manifest

if TYPE_CHECKING:
    from trainer_cli.checkpoint.storage.base import ReadableFolder, WritableFolder

SHARD_BYTES = 5_000_000_000
INDEX_FILE = "model.safetensors.index.json"
_MODEL = "model/"


class _Placed(NamedTuple):
    """A tensor, and where it lies in the image of the whole state."""

    entry: TensorEntry
    offset: int


@dataclass(frozen=True, slots=True)
class HuggingFaceLayout(FileLayout):
    """A layout whose tensors of the model are written into files of their own, under their names in the model."""

    shard_bytes: int = SHARD_BYTES

    @property
    def total_bytes(self) -> int:
        files = self._model_files()
        size_bytes = len(self.text) + len(_index(files))
        for tensors in (*files.values(), self._rest()):
            entries = [one.entry for one in tensors]
            size_bytes += len(rendered_header(entries)) + sum(entry.size_bytes for entry in entries)
        return size_bytes

    def write(self, folder: WritableFolder, image: memoryview | None = None) -> dict[str, Mapping[str, str]]:
        files = self._model_files()
        for name, own in files.items():
            self._write_tensors(folder, name, own, image)
        if index := _index(files):
            with folder.create(INDEX_FILE) as file:
                file.write(index)
        self._write_tensors(folder, tensor_file(self.rank), self._rest(), image)
        with folder.create(state_file(self.rank)) as file:
            file.write(self.text)
        return {tensor_file(self.rank): self.aliases} if self.aliases else {}

    def _model_files(self) -> dict[str, list[_Placed]]:
        """By name: the tensors of the model, under their names in it, in files of at most `shard_bytes`."""
        shards: list[list[_Placed]] = []
        size_bytes = 0
        for entry, offset in self._placed():
            if not entry.name.startswith(_MODEL):
                continue
            if not shards or size_bytes + entry.size_bytes > self.shard_bytes:
                shards.append([])
                size_bytes = 0
            shards[-1].append(_Placed(replace(entry, name=entry.name.removeprefix(_MODEL)), offset))
            size_bytes += entry.size_bytes
        if len(shards) == 1:
            return {"model.safetensors": shards[0]}
        return {f"model-{one:05}-of-{len(shards):05}.safetensors": shard for one, shard in enumerate(shards, 1)}

    def _rest(self) -> list[_Placed]:
        return [one for one in self._placed() if not one.entry.name.startswith(_MODEL)]

    def _placed(self) -> Iterator[_Placed]:
        offset = len(self.header)
        for entry in self.entries:
            yield _Placed(entry, offset)
            offset += entry.size_bytes

    def _write_tensors(
        self, folder: WritableFolder, name: str, tensors: list[_Placed], image: memoryview | None
    ) -> None:
        leaf_at = {span.offset: span.leaf for span in self.spans}
        with folder.create(name) as file:
            file.write(rendered_header([one.entry for one in tensors]))
            for entry, offset in tensors:
                if image is not None:
                    file.write(image[offset : offset + entry.size_bytes])
                elif entry.size_bytes:
                    file.write(bytes_of(leaf_at[offset]).data)


def _index(files: Mapping[str, list[_Placed]]) -> bytes:
    """The file that says which tensor is where; nothing for a single file."""
    if len(files) < 2:
        return b""
    total = sum(one.entry.size_bytes for own in files.values() for one in own)
    weight_map = {one.entry.name: name for name, own in files.items() for one in own}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2).encode() + b"\n"


class HuggingFaceFormat:
    """`model.safetensors`, or shards with an index, that `from_pretrained` reads; tied weights are in it once."""

    name = "huggingface"

    def plan(self, tree: Mapping[str, Any], *, shapes_only: bool = False) -> FileLayout:
        # Views are written in full: `from_pretrained` looks for each weight under its own name.
        base = lay_out(*codec.encode(tree, share_views=False), shapes_only=shapes_only)
        return HuggingFaceLayout(**{one.name: getattr(base, one.name) for one in fields(base)})

    def read(
        self, folder: ReadableFolder, manifest: Manifest, only: Collection[str] | None = None, rank: int = 0
    ) -> dict[str, Any]:
        with VerifiedFile(folder, manifest, state_file(rank)) as file:
            text = file.rest()
        try:
            decoder = codec.decode(text, only)
            aliases = manifest.aliases.get(tensor_file(rank), {})
            stored = {name: aliases.get(name, name) for name in decoder.wanted}
            found: dict[str, torch.Tensor] = {}
            for name in manifest.files:
                if not name.endswith(".safetensors"):
                    continue
                prefix = "" if name == tensor_file(rank) else _MODEL
                kept = {one.removeprefix(prefix) for one in stored.values() if one.startswith(prefix)}
                if kept:
                    found |= {prefix + one: own for one, own in read_file(folder, manifest, name, kept).items()}
            if missing := set(stored.values()) - found.keys():
                raise codec.Undecodable(f"the tensor {min(missing)[:80]!r} is in none of the files")
            return decoder.tree({name: found[stored[name]] for name in decoder.wanted})
        except codec.Undecodable as error:
            where = str(folder.path / state_file(rank))
            raise DamagedCheckpoint(f"the small states cannot be read: {error}", where=where) from None
