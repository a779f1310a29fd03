"""Parts of hostile files: pickles opcode by opcode, archives of torch byte by byte, metadata of DCP with any values."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)


@dataclass(frozen=True)
class Raw:
    """Opcodes that leave one object on the stack."""

    opcodes: bytes


def named(module: str, name: str) -> Raw:
    """A class or function."""
    return Raw(f"c{module}\n{name}\n".encode())


def call(function: Any, *args: Any) -> Raw:
    return Raw(opcodes(function) + opcodes(args) + b"R")


def build(made: Any, state: Any) -> Raw:
    return Raw(opcodes(made) + opcodes(state) + b"b")


def opcodes(value: Any) -> bytes:
    """The opcodes that make a value, without a memo."""
    match value:
        case Raw():
            return value.opcodes
        case None:
            return b"N"
        case bool():
            return b"\x88" if value else b"\x89"
        case int():
            content = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            return b"\x8a" + bytes([len(content)]) + content
        case float():
            return b"G" + struct.pack(">d", value)
        case str():
            content = value.encode("utf-8")
            return b"X" + struct.pack("<I", len(content)) + content
        case tuple():
            return b"(" + b"".join(map(opcodes, value)) + b"t"
        case list():
            return b"](" + b"".join(map(opcodes, value)) + b"e"
        case dict():
            return b"}(" + b"".join(opcodes(key) + opcodes(one) for key, one in value.items()) + b"u"
    raise TypeError(type(value))


def pickled(value: Any) -> bytes:
    return b"\x80\x02" + opcodes(value) + b"."


def doubled(levels: int) -> Raw:
    """A tuple that holds another twice, that one a third twice, and so on: 2**levels when it is hashed or shown."""
    return Raw(b")" + b"".join(b"q" + bytes([one]) + b"h" + bytes([one]) + b"\x86" for one in range(levels)))


def storage(key: Any = "0", numel: Any = 4, kind: str = "FloatStorage", old: bool = False) -> Raw:
    more = (None,) if old else ()
    return Raw(opcodes(("storage", named("torch", kind), key, "cpu", numel, *more)) + b"Q")


def tensor(*held: Any, **how: Any) -> Raw:
    """A tensor as torch.save writes it; the archive has one storage of four floats."""
    return call(named("torch._utils", "_rebuild_tensor_v2"), *tensor_arguments(*held, **how))


def tensor_arguments(
    held: Any = None, offset: Any = 0, size: Any = (4,), stride: Any = (1,), old: bool = False, **of_storage: Any
) -> tuple[Any, ...]:
    hooks = call(named("collections", "OrderedDict"))
    return held or storage(old=old, **of_storage), offset, size, stride, False, hooks


def torch_zip(
    path: Path,
    data: bytes,
    more: Mapping[str, bytes] | None = None,
    *,
    root: str = "archive",
    compression: int = zipfile.ZIP_STORED,
) -> Path:
    """A file as torch.save writes it, with any pickle."""
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in {"data.pkl": data, "version": b"3\n", "data/0": bytes(16), **(more or {})}.items():
            archive.writestr(f"{root}/{name}", content)
    return path


def torch_old(path: Path, data: bytes, keys: Any = None) -> Path:
    """A file of torch before 1.6, with any pickle and one storage of four floats."""
    parts = (0x1950A86A20F9469CFC6C, 1001, {"protocol_version": 1001, "little_endian": True, "type_sizes": {}})
    end = struct.pack("<q", 4) + bytes(16)
    path.write_bytes(b"".join(map(pickled, parts)) + data + pickled(["0"] if keys is None else keys) + end)
    return path


def edited(path: Path, *edits: tuple[bytes, int, bytes]) -> Path:
    """Write over bytes of a file: each edit is (a text to find from the end, offset from it, the new bytes)."""
    content = bytearray(path.read_bytes())
    for text, after, new in edits:
        at = content.rindex(text) + after
        content[at : at + len(new)] = new
    path.write_bytes(content)
    return path


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def safetensors(path: Path, header: bytes, data: bytes = bytes(16), length: int | None = None) -> Path:
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)
    return path


def dcp(
    folder: Path,
    *,
    size: Any = (4,),
    dtype: Any = torch.float32,
    chunks: Sequence[tuple[Any, Any]] = (((0,), (4,)),),
    place: Mapping[str, Any] | None = None,
    content: bytes | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """A folder of DCP with one tensor, `w`, each of whose parts is at the same place of one file."""
    folder.mkdir(exist_ok=True)
    content = saved(torch.zeros(4)) if content is None else content
    # No case is refused for the sum of its parts alone.
    (folder / "__0_0.distcp").write_bytes(content * min(len(chunks), 4))
    properties = TensorProperties()
    properties.dtype = dtype
    where = {"relative_path": "__0_0.distcp", "offset": 0, "length": len(content), **(place or {})}
    fields = {
        "state_dict_metadata": {
            "w": TensorStorageMetadata(properties, size, [ChunkStorageMetadata(*one) for one in chunks])
        },
        "planner_data": {"w": ("w",)},
        "storage_data": {_index(offset, number): _StorageInfo(**where) for number, (offset, _) in enumerate(chunks)},
        **(metadata or {}),
    }
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata(**fields)))
    return folder


def _index(offset: Any, number: int) -> MetadataIndex:
    index = MetadataIndex("w", None, number)
    object.__setattr__(index, "offset", offset)
    return index


def pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def link(path: Path, target: str | Path) -> Path:
    path.symlink_to(target)
    return path
