"""One file of torch.save a rank: the tensors by name, and the small states as JSON. It loads with weights_only."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch

from trainer_cli.checkpoint.format import codec
from trainer_cli.checkpoint.format.file_layout import TORCH_DTYPES, FileLayout, bytes_of, lay_out
from trainer_cli.checkpoint.format.header import TensorEntry
from trainer_cli.checkpoint.format.torch_pickle import load_torch_bytes
from trainer_cli.checkpoint.format.verified_file import VerifiedFile
from trainer_cli.checkpoint.manifest import DamagedCheckpoint, Manifest

if TYPE_CHECKING:
    from trainer_cli.checkpoint.storage.interfaces import FileWriter, ReadableFolder, WritableFolder


class _Stream:
    """A file for torch.save, which needs no more than this."""

    def __init__(self, file: FileWriter) -> None:
        self._file = file

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._file.write(view)
        return len(view)

    def flush(self) -> None:
        """The folder flushes."""


@dataclass(frozen=True, slots=True)
class TorchLayout(FileLayout):
    """A layout that is written by torch.save."""

    def write(self, folder: WritableFolder, image: memoryview | None = None) -> dict[str, Mapping[str, str]]:
        tensors: dict[str, torch.Tensor] = {}
        at = {span.offset: span for span in self.spans}
        offset = len(self.header)
        for entry in self.entries:
            if image is not None:
                flat = _bytes(image[offset : offset + entry.size_bytes])
            else:
                flat = torch.from_numpy(bytes_of(at[offset].leaf).copy()) if entry.size_bytes else _bytes(b"")
            tensors[entry.name] = _typed(flat, entry)
            offset += entry.size_bytes
        tensors |= {alias: tensors[name] for alias, name in self.aliases.items()}
        tensors |= codec.decode(self.text).views_of(tensors)
        with folder.create(_file_of(self.rank)) as file:
            torch.save({"tensors": tensors, "state": self.text.decode("utf-8")}, _Stream(file))  # type: ignore[arg-type]
        return {}


class TorchFileFormat:
    """`torch.load(file, weights_only=True)["tensors"]` has every tensor; tied ones are one, and views share memory."""

    name = "torch_file"

    def plan(self, tree: Mapping[str, Any], *, shapes_only: bool = False) -> FileLayout:
        base = lay_out(*codec.encode(tree), shapes_only=shapes_only, dtypes=TORCH_DTYPES)
        return TorchLayout(**{one.name: getattr(base, one.name) for one in fields(base)})

    def read(
        self, folder: ReadableFolder, manifest: Manifest, only: Collection[str] | None = None, rank: int = 0
    ) -> dict[str, Any]:
        where = str(folder.path / _file_of(rank))
        with VerifiedFile(folder, manifest, _file_of(rank)) as file:
            content = file.rest()
        try:
            loaded = load_torch_bytes(content)
            decoder = codec.decode(loaded["state"].encode("utf-8"), only)
            found = {name: loaded["tensors"][name] for name in decoder.wanted}
            return decoder.tree(found)
        except Exception as error:  # Whatever torch raises for bytes that it did not write.
            raise DamagedCheckpoint(f"the file cannot be read: {str(error)[:200]}", where=where) from None


def _file_of(rank: int) -> str:
    return f"rank{rank}.pt"


def _bytes(data: memoryview | bytes) -> torch.Tensor:
    return torch.frombuffer(data, dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)


def _typed(flat: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    """The bytes as the tensor that they are, with memory of its own: torch.save writes whole storages."""
    dtype = TORCH_DTYPES[entry.code]
    if not entry.size_bytes:
        return torch.empty(entry.shape, dtype=dtype)
    own = torch.empty(entry.shape, dtype=dtype)
    own.reshape(-1).view(torch.uint8).copy_(flat)
    return own
