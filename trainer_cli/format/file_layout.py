"""The layout of one rank's files: the element types, the order and the bytes of tensors and arrays."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from trainer_cli.dtensor import local_of, undistributed
from trainer_cli.format.rank_files import FilesOfRank
from trainer_cli.layout import Shard
from trainer_cli.manifest import UnsavableState
from trainer_cli.schema import CheckpointFormat
from trainer_cli.tensor_files import DTYPES, LINE, TORCH_DTYPES, Leaf, TensorEntry, bytes_of, memory_key, render_header

if TYPE_CHECKING:
    from trainer_cli.storage import Bytes, WritableFolder

_CODES = {dtype: (code, dtype.itemsize) for code, dtype in TORCH_DTYPES.items()}
"""Type of torch -> its name in files, and the bytes of an element."""
_NOT_ARRAYS = ("BF16", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "C32", "F8_E8M0")
_ARRAY_CODES = {
    np.dtype(str(dtype).removeprefix("torch.")): code for code, dtype in TORCH_DTYPES.items() if code not in _NOT_ARRAYS
}
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_LEAST_FROZEN_BYTES = 1 << 20
"""Minimum size of the frozen tensors for a file of their own: a smaller one is written as fast as it is fsynced."""
_PAGE = 4096
"""A file in the image begins at a multiple of this, so that it can be written past the page cache."""


@dataclass(frozen=True, slots=True)
class TensorSpan:
    """A tensor with at least one byte, and its position in the tensor file."""

    leaf: Leaf
    offset: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class FileLayout:
    """Content of one rank's files, and the position of each tensor: known before any tensor is copied.

    A snapshot copies `header` and the tensors of `spans` into one memory, the image, for any format. This class writes
    the image itself as the file of safetensors. The layout of a format with other files overrides

    - `write`, which gets the image, or None where the tensors themselves are written. The tensors of `entries` follow
      `header` in the image in their order, without holes;
    - `container`, if its tensors are in a file of another name;
    - `total_bytes`, if its size is known; otherwise it is an estimate, and `CheckpointFormat.uncounted_bytes` says so.
    """

    text: bytes
    """All values but tensors, as `tree.encode` returns them."""
    header: bytes
    """The beginning of the image: the header of a file of safetensors."""
    entries: list[TensorEntry]
    """The tensors that the header names, in order."""
    spans: list[TensorSpan]
    """The tensors after the header, in order and without holes."""
    aliases: dict[str, str]
    """Name of a tied tensor -> name under which it is stored."""
    rank: int = field(default=0, kw_only=True)
    parts: Mapping[str, Shard] = field(default_factory=dict, kw_only=True)
    """Of a distributed run: the part of each tensor in this file, by name."""
    per_rank: bytes = field(default=b"", kw_only=True)
    """Of a distributed run: content of the file of the states that this rank saves for itself."""
    frozen: FileLayout | None = field(default=None, kw_only=True)
    """Header and tensors of a second tensor file, which is expected to be that of the checkpoint before. It is not
    written by `write`, but by `Snapshot.write`."""

    @property
    def file_bytes(self) -> int:
        """The size of the tensor file."""
        return self.spans[-1].offset + self.spans[-1].size_bytes if self.spans else len(self.header)

    @property
    def frozen_offset(self) -> int:
        """Where the file of frozen tensors begins in the image."""
        return self.file_bytes + -self.file_bytes % _PAGE

    @property
    def image_bytes(self) -> int:
        """The size of the image: the tensor file, and behind it that of the frozen tensors."""
        return self.file_bytes if self.frozen is None else self.frozen_offset + self.frozen.file_bytes

    @property
    def image_headers(self) -> dict[int, bytes]:
        """Offset in the image -> the header there."""
        return {0: self.header} | ({} if self.frozen is None else {self.frozen_offset: self.frozen.header})

    @property
    def image_spans(self) -> list[TensorSpan]:
        """All tensors with their positions in the image."""
        frozen = () if self.frozen is None else self.frozen.spans
        return [*self.spans, *(replace(span, offset=span.offset + self.frozen_offset) for span in frozen)]

    @property
    def parts_of_files(self) -> dict[str, Mapping[str, Shard]]:
        """Of a distributed run: file -> the part of each tensor in it."""
        parts = {self.container: self.parts}
        if self.frozen is not None:
            parts[FilesOfRank(self.rank).frozen] = self.frozen.parts
        return {file: table for file, table in parts.items() if table}

    @property
    def container(self) -> str:
        """The name of the file that contains the tensors. With several ranks, the manifest has `parts` under it."""
        return FilesOfRank(self.rank).tensors

    @property
    def _small_files(self) -> dict[str, bytes]:
        """The files that this class writes beside the tensor file, by name."""
        contents = {FilesOfRank(self.rank).state: self.text, FilesOfRank(self.rank).own: self.per_rank}
        return {name: content for name, content in contents.items() if content}

    @property
    def total_bytes(self) -> int:
        """The size of all files."""
        frozen_bytes = 0 if self.frozen is None else self.frozen.file_bytes
        return len(self.text) + len(self.per_rank) + self.file_bytes + frozen_bytes

    @property
    def least_bytes(self) -> int:
        """What the files take on the disk at least; 0 if that is unknown before they are written."""
        # The frozen tensors take nothing if their file is a link.
        return self.total_bytes - (0 if self.frozen is None else self.frozen.file_bytes)

    def split_off(self, tensors: Iterable[torch.Tensor]) -> FileLayout:
        """The same layout with these tensors in a file of their own, if they are large and the format has such files.

        Args:
            tensors: are found by their memory; those that the layout lacks do not matter.
        """
        if type(self) is not FileLayout:
            return self
        local = [part for part in map(local_of, tensors) if type(part) in _PLAIN and part.layout is torch.strided]
        if not local:
            return self
        keys = set(map(memory_key, local))
        filled = [entry.name for entry in self.entries if entry.size_bytes]
        leaves = {name: span.leaf for name, span in zip(filled, self.spans, strict=True)}
        names = {name for name, leaf in leaves.items() if memory_key(leaf) in keys}
        moved = [entry for entry in self.entries if entry.name in names]
        if sum(entry.size_bytes for entry in moved) < _LEAST_FROZEN_BYTES:
            return self
        entries = [entry for entry in self.entries if entry.name not in names]
        header, spans = _place(entries, leaves)
        parts = {name: shard for name, shard in self.parts.items() if name not in names}
        moved_parts = {name: shard for name, shard in self.parts.items() if name in names}
        moved_header, moved_spans = _place(moved, leaves)
        frozen = FileLayout(b"", moved_header, moved, moved_spans, {}, rank=self.rank, parts=moved_parts)
        return replace(self, header=header, entries=entries, spans=spans, parts=parts, frozen=frozen)

    def content(self, image: memoryview | None) -> Iterator[Bytes]:
        """The bytes of the tensor file, in pieces.

        Args:
            image: a copy of them, possibly with other bytes behind; None: they are read from the tensors.
        """
        if image is not None:
            yield image[: self.file_bytes]
            return
        yield self.header
        for span in self.spans:
            yield bytes_of(span.leaf).data

    def write(self, folder: WritableFolder, image: memoryview | None = None) -> dict[str, Mapping[str, str]]:
        """Write the files.

        Args:
            image: a copy of `header` and all tensors; without it the tensors themselves are written.

        Returns:
            For the manifest, name of a file -> its aliases; empty without tied tensors, or if the file itself says
            which they are.
        """
        with folder.create(FilesOfRank(self.rank).tensors) as file:
            for piece in self.content(image):
                file.write(piece)
        for name, content in self._small_files.items():
            with folder.create(name) as file:
                file.write(content)
        return {FilesOfRank(self.rank).tensors: self.aliases} if self.aliases else {}


def lay_out(
    text: bytes, tensors: Mapping[str, Leaf], *, shapes_only: bool = False, dtypes: Mapping[str, torch.dtype] = DTYPES
) -> FileLayout:
    """The layout of a state's files, from its text and its tensors by name.

    Tied tensors are stored once, under the first name.

    Args:
        shapes_only: accept tensors on the device `meta`, which have no bytes to write.
        dtypes: the element types of the format, by name.

    Raises:
        UnsavableState: a tensor cannot be saved; the message names it.
    """
    tensors = undistributed(tensors)
    entries_by_size: dict[tuple[bool, int], list[TensorEntry]] = {}
    aliases: dict[str, str] = {}
    name_of_memory: dict[tuple[Any, ...], str] = {}
    for name, leaf in tensors.items():
        code, element_bytes = _code_of(name, leaf, shapes_only)
        if code not in dtypes:
            formats = CheckpointFormat.names_where(lambda format: format.holds_every_dtype)
            raise UnsavableState(
                f"{name} is of {leaf.dtype}, which this format of checkpoints cannot hold",
                cure=f"Write checkpoint.format={formats}, or save it as another type.",
            )
        shape = tuple(leaf.shape)
        count = math.prod(shape)
        if count and (memory := memory_key(leaf)) is not None:
            first_name = name_of_memory.setdefault(memory, name)
            if first_name != name:
                aliases[name] = first_name
                continue
        entry = TensorEntry(name, code, shape, count * element_bytes)
        entries_by_size.setdefault((entry.size_bytes % LINE == 0, element_bytes), []).append(entry)
    # Alignment without holes, which safetensors refuses: tensors of whole cache lines first, so that each begins at a
    # line; in either group the largest elements first, so that each begins at a multiple of its element size.
    entries = [entry for key in sorted(entries_by_size, reverse=True) for entry in entries_by_size[key]]
    header, spans = _place(entries, tensors)
    return FileLayout(text, header, entries, spans, aliases)


def _place(entries: list[TensorEntry], leaves: Mapping[str, Leaf]) -> tuple[bytes, list[TensorSpan]]:
    """The header of a tensor file, and the positions of its tensors behind it."""
    # A part of a list of entries is as well aligned as the whole.
    header = render_header(entries)
    spans, offset = [], len(header)
    for entry in entries:
        if entry.size_bytes:
            spans.append(TensorSpan(leaves[entry.name], offset, entry.size_bytes))
        offset += entry.size_bytes
    return header, spans


_CURE = "Give it as plain, dense tensors. A buffer that the model computes when it is made may have persistent=False."


def _code_of(name: str, leaf: Leaf, shapes_only: bool) -> tuple[str, int]:
    """The name of the element type, and the bytes of an element.

    Raises:
        UnsavableState: no format supports the tensor.
    """
    if isinstance(leaf, np.ndarray):
        code = _ARRAY_CODES.get(leaf.dtype)
        if code is None or not leaf.dtype.isnative:
            raise UnsavableState(
                f"{name} is an array of {leaf.dtype}, which cannot be saved in a checkpoint",
                cure="Give it as an array of numbers in the machine's byte order, or as a list of numbers or strings.",
            )
        return code, leaf.dtype.itemsize
    is_plain = type(leaf) in _PLAIN or isinstance(leaf, torch.nn.Parameter | torch.nn.Buffer)
    if not is_plain or torch.nn.parameter.is_lazy(leaf):
        kind = f"{type(leaf).__module__}.{type(leaf).__qualname__}"
        raise UnsavableState(f"{name} is a {kind}, which cannot be saved in a checkpoint", cure=_CURE)
    lacks_memory = leaf.is_meta and not shapes_only
    is_dense = leaf.layout is torch.strided and not leaf.is_nested and not leaf.is_quantized
    code_and_size = _CODES.get(leaf.dtype)
    if lacks_memory or not is_dense or code_and_size is None:
        description = f"a tensor of {leaf.dtype}, {'nested' if leaf.is_nested else leaf.layout}"
        description = "a tensor without memory" if lacks_memory else description
        raise UnsavableState(f"{name} is {description}, which cannot be saved in a checkpoint", cure=_CURE)
    return code_and_size
