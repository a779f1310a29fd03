"""Hostile checkpoints by name: each a function that makes one in an empty folder."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from hostile import (
    Raw,
    build,
    call,
    dcp,
    doubled,
    link,
    named,
    pickled,
    pipe,
    safetensors,
    saved,
    tensor,
    torch_zip,
)
from hostile_pickles import ARCHIVES, HUGE, Case, code_cases, cut, object_cases, written
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

from trainer_cli import manifest as manifests
from trainer_cli.checkpoint.checkpointer import make_sync_checkpointer


def entry(**fields: Any) -> bytes:
    return json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **fields}}).encode()


def _two(first: tuple[int, int], second: tuple[int, int]) -> bytes:
    return json.dumps(
        {
            name: {"dtype": "U8", "shape": [place[1] - place[0]], "data_offsets": place}
            for name, place in (("a", first), ("b", second))
        }
    ).encode()


HEADERS: dict[str, tuple[bytes, bytes] | tuple[bytes, bytes, int]] = {
    "a header longer than the file": (entry(), bytes(16), 99_999),
    "a header shorter than it is": (entry(), bytes(16), 20),
    "a name twice": (entry()[:-1] + b"," + entry()[1:], bytes(16)),
    "a hole": (_two((0, 4), (8, 16)), bytes(16)),
    "an overlap": (_two((0, 12), (8, 16)), bytes(16)),
    "negative offsets": (entry(data_offsets=[-16, 0]), bytes(16)),
    "offsets in reverse": (entry(data_offsets=[16, 0]), bytes(16)),
    "huge offsets": (entry(shape=[2**60], data_offsets=[0, 2**62]), bytes(16)),
    "offsets larger than numbers": (entry(data_offsets=[0, 2**64 + 16]), bytes(16)),
    "three offsets": (entry(data_offsets=[0, 16, 16]), bytes(16)),
    "one offset": (entry(data_offsets=[0]), bytes(16)),
    "offsets of text": (entry(data_offsets="04"), bytes(16)),
    "no offsets": (entry(data_offsets=None), bytes(16)),
    "offsets of fewer bytes than the shape": (entry(data_offsets=[0, 12]), bytes(12)),
    "offsets that begin after 0": (entry(data_offsets=[4, 20]), bytes(20)),
    "two tensors at one place": (_two((0, 16), (0, 16)), bytes(16)),
    "offsets of fractions": (entry(data_offsets=[0.0, 16.0]), bytes(16)),
    "an offset of NaN": (entry(data_offsets=[0, float("nan")]), bytes(16)),
    "a shape of NaN": (entry(shape=[float("nan")]), bytes(16)),
    "a shape of booleans": (entry(shape=[True, 4]), bytes(16)),
    "a negative shape": (entry(shape=[-4]), bytes(16)),
    "a shape of two negative sides": (entry(shape=[-1, -4]), bytes(16)),
    "a shape that is not a list": (entry(shape=4), bytes(16)),
    "a shape that overflows": (entry(shape=[2**32, 2**32, 4]), bytes(16)),
    "a shape of too many dimensions": (entry(shape=[1] * 70 + [4]), bytes(16)),
    "a shape with a huge empty side": (entry(shape=[0, 2**62, 2], data_offsets=[0, 0]), b""),
    "a type that does not exist": (entry(dtype="F33"), bytes(16)),
    "a type that is not a text": (entry(dtype=["F32"]), bytes(16)),
    "a type of other size": (entry(dtype="F64"), bytes(16)),
    "no type": (b'{"w":{"shape":[4],"data_offsets":[0,16]}}', bytes(16)),
    "one more field": (entry(code="import os"), bytes(16)),
    "deep JSON": (b'{"w":' + b"[" * 100_000 + b"]" * 100_000 + b"}", bytes(16)),
    "deep metadata": (b'{"__metadata__":' + b'{"a":' * 500 + b"1" + b"}" * 500 + b"}", b""),
    "metadata of numbers": (b'{"__metadata__":{"a":1}}', b""),
    "invalid UTF-8": (b'{"\xff\xfe":1}', bytes(16)),
    "a lone surrogate": (b'{"\\ud800":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}', bytes(16)),
    "a name that moves the cursor": (
        b'{"a\\n\\u001b[2J":{"dtype":"F32","shape":[5],"data_offsets":[0,16]}}',
        bytes(16),
    ),
    "a number of 5,000 digits": (b'{"w":' + b"9" * 5000 + b"}", bytes(16)),
    "a list": (b'{"w":[]}', bytes(16)),
    "a list of nothing": (b"[]", bytes(16)),
    "bytes after the tensors": (entry(), bytes(17)),
    "bytes missing": (entry(), bytes(15)),
}


def _index(table: Any, *, make: Callable[[Path], object] = lambda folder: None) -> Case:
    def case(folder: Path) -> Path:
        safetensors(folder / "a.safetensors", entry())
        content = table if isinstance(table, bytes) else json.dumps({"weight_map": table}).encode()
        written(folder, "model.safetensors.index.json", content)
        make(folder)
        return folder

    return case


INDEXES: dict[str, Case] = {
    "a file outside the folder": _index({"w": "../a.safetensors"}),
    "an absolute path": _index({"w": "/dev/zero"}),
    "a folder outside": _index({"w": ".."}),
    "no name": _index({"w": ""}),
    "a name that ends a line": _index({"w": "a\n.safetensors"}),
    "a zero in a name": _index({"w": "a\0.safetensors"}),
    "a hidden file": _index({"w": ".metadata"}),
    "a missing file": _index({"w": "b.safetensors"}),
    "itself": _index({"w": "model.safetensors.index.json"}),
    "a link to itself": _index({"w": "b"}, make=lambda folder: link(folder / "b", "b")),
    "a link to a device": _index({"w": "b"}, make=lambda folder: link(folder / "b", "/dev/zero")),
    "a link to a pipe": _index({"w": "b"}, make=lambda folder: link(folder / "b", pipe(folder / "c").name)),
    "a pipe": _index({"w": "b.safetensors"}, make=lambda folder: pipe(folder / "b.safetensors")),
    "a folder": _index({"w": "b.safetensors"}, make=lambda folder: (folder / "b.safetensors").mkdir()),
    "an empty file": _index({"w": "b.bin"}, make=lambda folder: (folder / "b.bin").touch()),
    "a tensor that is missing": _index({"v": "a.safetensors"}),
    "a file that is a number": _index({"w": 3}),
    "no table": _index(["w"]),
    "a name twice": _index(b'{"weight_map":{"w":"a.safetensors","w":"a.safetensors"}}'),
    "deep JSON": _index(b'{"weight_map":' + b"[" * 100_000),
    "invalid UTF-8": _index(b'{"weight_map":{"\xff":"a"}}'),
    "NaN": _index(b'{"weight_map":{"w":NaN}}'),
    "nothing": _index(b""),
}

TRANSFORMED = {"transform_descriptors": ["zstd"]}
DCPS: dict[str, Case] = {
    "a part outside the folder": lambda folder: dcp(folder, place={"relative_path": "../x"}),
    "a part at an absolute path": lambda folder: dcp(folder, place={"relative_path": "/dev/zero"}),
    "a part at no text": lambda folder: dcp(folder, place={"relative_path": 3}),
    "a part that is compressed": lambda folder: dcp(folder, place=TRANSFORMED),
    "a part that is missing": lambda folder: dcp(folder, place={"relative_path": "gone"}),
    "a part in a pipe": lambda folder: dcp(pipe(folder / "p").parent, place={"relative_path": "p"}),
    "a part in a link to itself": lambda folder: dcp(link(folder / "p", "p").parent, place={"relative_path": "p"}),
    "a part in a link to a device": lambda folder: dcp(
        link(folder / "p", "/dev/zero").parent, place={"relative_path": "p"}
    ),
    "a part past the file": lambda folder: dcp(folder, place={"offset": 10**6}),
    "a part before the file": lambda folder: dcp(folder, place={"offset": -8}),
    "a part larger than the file": lambda folder: dcp(folder, place={"length": 2**40}),
    "a part of negative length": lambda folder: dcp(folder, place={"length": -1}),
    "a part whose length is not a number": lambda folder: dcp(folder, place={"length": "9"}),
    "parts that overlap": lambda folder: dcp(folder, chunks=[((0,), (3,)), ((2,), (1,))]),
    "parts with a hole": lambda folder: dcp(folder, chunks=[((0,), (1,)), ((3,), (1,))]),
    "parts outside the tensor": lambda folder: dcp(folder, chunks=[((2,), (4,))]),
    "parts of negative size": lambda folder: dcp(folder, chunks=[((4,), (-4,)), ((0,), (8,))]),
    "parts of other dimensions": lambda folder: dcp(folder, chunks=[((0, 0), (2, 2))]),
    "parts without shape": lambda folder: dcp(folder, chunks=[(None, None)]),
    "parts of one place": lambda folder: dcp(folder, size=(4, 0), chunks=[((0, 0), (4, 0))] * 3),
    "thirty thousand parts": lambda folder: dcp(
        folder,
        size=(90_000,),
        chunks=[((at,), (3,)) for at in range(0, 90_000, 3)],
        content=saved(torch.zeros(90_000)),
        place={"length": 1},
    ),
    "a part of another type": lambda folder: dcp(folder, dtype=torch.int32),
    "a part of another size": lambda folder: dcp(folder, content=saved(torch.zeros(3))),
    "a part of a list": lambda folder: dcp(folder, content=saved([torch.zeros(4)])),
    "a part that is sparse": lambda folder: dcp(folder, content=saved(torch.zeros(4).to_sparse())),
    "a part that is a bomb": lambda folder: dcp(
        folder,
        content=torch_zip(
            folder / "x", pickled(tensor()), {"data/1": bytes(300 << 20)}, compression=zipfile.ZIP_DEFLATED
        ).read_bytes(),
    ),
    "a part that is not an archive": lambda folder: dcp(folder, content=b"hello" * 20),
    "a huge tensor": lambda folder: dcp(folder, size=(2**40,), chunks=[((0,), (2**40,))]),
    "a tensor of huge sides": lambda folder: dcp(folder, size=(0, 2**62, 9), chunks=[((0, 0, 0), (0, 2**62, 9))]),
    "a tensor of negative sides": lambda folder: dcp(folder, size=(-2, -2), chunks=[((0, 0), (-2, -2))]),
    "a tensor of 100 dimensions": lambda folder: dcp(folder, size=(1,) * 100, chunks=[((0,) * 100, (1,) * 100)]),
    "a size of booleans": lambda folder: dcp(folder, size=(True,) * 2),
    "a size of texts": lambda folder: dcp(folder, size=("4",)),
    "a type that is quantized": lambda folder: dcp(folder, dtype=torch.quint8),
    "a type that is text": lambda folder: dcp(folder, dtype="float32"),
    "two tensors of one name": lambda folder: dcp(
        folder,
        metadata={
            "state_dict_metadata": dict.fromkeys(("w", "v"), _tensor_metadata()),
            "planner_data": {"w": ("w",), "v": ("w",)},
        },
    ),
    "a place in the tree that is not a text": lambda folder: dcp(
        folder, metadata={"planner_data": {"w": (("a",), 3.5)}}
    ),
    "no places": lambda folder: dcp(folder, metadata={"storage_data": None}),
    "no tensors": lambda folder: dcp(folder, metadata={"state_dict_metadata": [3]}),
    "metadata that holds itself": lambda folder: dcp(folder, metadata={"planner_data": _loop()}),
    "metadata that is a mapping": lambda folder: written(dcp(folder), ".metadata", pickled({"w": 3})),
    "metadata of nothing": lambda folder: written(dcp(folder), ".metadata", b""),
    "metadata cut off": lambda folder: cut(dcp(folder) / ".metadata").parent,
    "metadata that changes torch": lambda folder: written(
        dcp(folder),
        ".metadata",
        pickled(build(named("torch.distributed.checkpoint.metadata", "Metadata"), (None, {"planner_data": 7}))),
    ),
    "metadata that takes years to hash": lambda folder: written(dcp(folder), ".metadata", pickled({doubled(60): 1})),
    "metadata that takes years to show": lambda folder: written(
        dcp(folder), ".metadata", pickled(call(named("torch", "Size"), [doubled(60)]))
    ),
    "metadata with an external object": lambda folder: written(dcp(folder), ".metadata", b"\x80\x02Pstorage\n."),
    "metadata too deep": lambda folder: written(
        dcp(folder), ".metadata", pickled(Raw(b"}" + b")" + b"\x85" * 1_000_000 + b"Ns"))
    ),
}


def _tensor_metadata() -> Any:
    return TensorStorageMetadata(
        TensorProperties(), torch.Size([4]), [ChunkStorageMetadata(torch.Size([0]), torch.Size([4]))]
    )


def _loop() -> dict[str, Any]:
    table: dict[str, Any] = {}
    table["w"] = [table]
    return table


def own_checkpoint(
    fields: Mapping[str, Any] | None = None, files: Mapping[str, bytes] | None = None, *, content: bytes | None = None
) -> Case:
    """One of our checkpoints, in which fields of the manifest and the content of files are others; digests fit."""

    def case(folder: Path) -> Path:
        path = folder / "step5"
        make_sync_checkpointer().save({"model": {"w": torch.zeros(4)}}, path)
        manifest = json.loads((path / "manifest.json").read_bytes())
        del manifest["digest"]
        for name, own in (files or {}).items():
            (path / name).write_bytes(own)
            digest = manifests.new_digest("sha256")
            digest.update(own)
            manifest["files"][name] = {"size_bytes": len(own), "digest": f"sha256:{digest.hexdigest()}"}
        manifest |= fields or {}
        (path / "manifest.json").write_bytes(manifests._add_digest(manifest) if content is None else content)
        return path

    return case


def _state(text: bytes) -> Case:
    return own_checkpoint(files={"rank0.json": b'{"version":1,"state":{"model":' + text + b"}}"})


def _tensors(header: bytes, data: bytes = bytes(16)) -> Case:
    return own_checkpoint(files={"rank0.safetensors": len(header).to_bytes(8, "little") + header + data})


def _huge_manifest(folder: Path) -> Path:
    path = own_checkpoint()(folder)
    with (path / "manifest.json").open("r+b") as file:
        file.truncate(HUGE)
    return path


def _listed(name: str, size_bytes: Any = 1) -> dict[str, Any]:
    return {"files": {name: {"size_bytes": size_bytes, "digest": "sha256:" + "0" * 64}}}


OWN: dict[str, Case] = {
    "a file outside the folder": own_checkpoint(_listed("../x")),
    "a file at an absolute path": own_checkpoint(_listed("/dev/zero")),
    "a file that is the folder": own_checkpoint(_listed(".")),
    "a file whose name moves the cursor": own_checkpoint(_listed("a\n\x1b[2J")),
    "a file of a huge size": own_checkpoint(_listed("rank0.json", 2**62)),
    "a file of negative size": own_checkpoint(_listed("rank0.json", -1)),
    "no files": own_checkpoint({"files": {}}),
    "a format that does not exist": own_checkpoint({"format": "pickle\n\x1b[2J"}),
    "a format that is a path": own_checkpoint({"format": "../../os"}),
    "a field that moves the cursor": own_checkpoint({"a\n\x1b[2J": 1}),
    "a kind that moves the cursor": own_checkpoint({"kind": "a\n\x1b[2J"}),
    "a schema that moves the cursor": own_checkpoint({"schema_version": "a\n\x1b[2J"}),
    "a step that is deep": own_checkpoint({"step": json.loads("[" * 400 + "]" * 400)}),
    "aliases in a circle": own_checkpoint({"aliases": {"rank0.safetensors": {"model/w": "v", "v": "model/w"}}}),
    "aliases of no file": own_checkpoint({"aliases": {"a\n\x1b[2J": {}}}),
    "a manifest of deep JSON": own_checkpoint(content=b'{"a":' + b"[" * 100_000),
    "a manifest with a name twice": own_checkpoint(content=b'{"schema_version":1,"schema_version":1}'),
    "a manifest of invalid UTF-8": own_checkpoint(content=b"\xff\xfe"),
    "a manifest of NaN": own_checkpoint(content=b'{"schema_version":NaN}'),
    "a manifest of 3 GB": _huge_manifest,
    "a deep state": _state(b"[" * 100_000),
    "a state of a tag that does not exist": _state(b'{"$":"object","v":"os.system\\n\\u001b[2J"}'),
    "a state of a tag with more": _state(b'{"$":"tensor","v":"model/w","call":"os.system"}'),
    "a state of a missing tensor": _state(b'{"$":"tensor","v":"a\\n\\u001b[2J"}'),
    "a state of a huge shape": _state(b'{"$":"size","v":[1e400]}'),
    "a state of a huge number": _state(b'{"$":"int","v":"0x' + b"f" * 10_000_000 + b'g"}'),
    "a state of no base64": _state(b'{"$":"bytes","v":"\\n\\u001b[2J"}'),
    "a state with a key that is a list": _state(b'{"$":"dict","v":[[[1],2]]}'),
    "a state of invalid UTF-8": _state(b'"\xff"'),
    "tensors of a header longer than the file": own_checkpoint(files={"rank0.safetensors": b"\xff" * 8 + entry()}),
    "tensors of a huge empty side": _tensors(
        b'{"model/w":{"dtype":"F32","shape":[0,4611686018427387904,2],"data_offsets":[0,0]}}', b""
    ),
    "tensors of a name that moves the cursor": _tensors(HEADERS["a name that moves the cursor"][0]),
    "booleans that are neither": _tensors(
        b'{"model/w":{"dtype":"BOOL","shape":[16],"data_offsets":[0,16]}}', b"\2" * 16
    ),
    "a file that links to itself": lambda folder: _linked(own_checkpoint()(folder), "rank0.json", "rank0.json"),
    "a file that links to a device": lambda folder: _linked(own_checkpoint()(folder), "rank0.json", "/dev/zero"),
    "a file that links to a pipe": lambda folder: _linked(
        own_checkpoint()(folder), "rank0.json", str(pipe(folder / "pipe"))
    ),
    "a manifest that links to itself": lambda folder: _linked(
        own_checkpoint()(folder), "manifest.json", "manifest.json"
    ),
    "a manifest that links to a pipe": lambda folder: _linked(
        own_checkpoint()(folder), "manifest.json", str(pipe(folder / "pipe"))
    ),
    "a manifest that links to a device": lambda folder: _linked(own_checkpoint()(folder), "manifest.json", "/dev/zero"),
}  # fmt: skip


def _linked(path: Path, file: str, target: str) -> Path:
    (path / file).unlink()
    link(path / file, target)
    return path


def _pipes(folder: Path, *names: str) -> Path:
    for name in names:
        pipe(folder / name)
    return folder


PLACES: dict[str, Case] = {
    "a pipe": lambda folder: pipe(folder / "x.pt"),
    "a link to a pipe": lambda folder: link(folder / "x.pt", pipe(folder / "pipe")),
    "a link to a device": lambda folder: link(folder / "x.pt", "/dev/zero"),
    "a link to itself": lambda folder: link(folder / "x.pt", "x.pt"),
    "a link to nothing": lambda folder: link(folder / "x.pt", "gone"),
    "an empty folder": lambda folder: folder,
    "a folder of pipes": lambda folder: _pipes(folder, "model.safetensors", ".metadata"),
    "an empty file": lambda folder: written(folder, "x.pt", b"") / "x.pt",
    "an archive of tar": lambda folder: written(folder, "x.pt", b"a" * 257 + b"ustar" + bytes(250)) / "x.pt",
    "bytes of 0x80": lambda folder: written(folder, "x.pt", b"\x80\x02" + b"\x80" * 9999) / "x.pt",
}


def foreign_cases() -> dict[str, Case]:
    """All checkpoints of other programs, by kind and fault."""
    return {
        **code_cases(),
        **object_cases(),
        **{f"torch zip: {name}": case for name, case in ARCHIVES.items()},
        **{
            f"safetensors: {name}": partial(lambda parts, folder: safetensors(folder / "x.safetensors", *parts), parts)
            for name, parts in HEADERS.items()
        },
        **{f"Hugging Face index: {name}": case for name, case in INDEXES.items()},
        **{f"DCP: {name}": case for name, case in DCPS.items()},
        **{f"place: {name}": case for name, case in PLACES.items()},
    }
