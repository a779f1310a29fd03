"""Hostile files of torch.save by name: their pickles run code, take years or memory; their archives lie."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile import (
    Raw,
    build,
    call,
    dcp,
    doubled,
    edited,
    named,
    opcodes,
    pickled,
    saved,
    storage,
    tensor,
    torch_old,
    torch_zip,
)

Case = Callable[[Path], Path]
"""Makes a checkpoint in an empty folder, and returns its path."""
HUGE = 3 << 30
MARKER = "ran"
"""The file, beside the folders of the cases, that code in a checkpoint makes."""


def _code(marker: Path) -> dict[str, bytes]:
    """Pickles that make the file `marker` where they are loaded by `pickle.load`; in each way that opcodes have."""
    shell, text = named("os", "system"), f"touch '{marker}'"
    python = f"open({str(marker)!r}, 'w')"
    return {
        "REDUCE of os.system": pickled(call(shell, text)),
        "REDUCE of eval": pickled(call(named("builtins", "eval"), python)),
        "REDUCE of getattr": pickled(call(call(named("builtins", "getattr"), named("os", "path"), "os"), text)),
        "REDUCE of runpy": pickled(call(named("runpy", "_run_code"), python, {})),
        "REDUCE of torch": pickled(call(named("torch.utils.collect_env", "run"), text)),
        "REDUCE of torch.load": pickled(call(named("torch", "load"), str(marker))),
        "REDUCE within weights": pickled({"w": tensor(), "more": [call(shell, text)]}),
        "REDUCE by a rebuild function": pickled(
            call(named("torch._tensor", "_rebuild_from_type_v2"), shell, named("torch", "Tensor"), (text,), {})
        ),
        "NEWOBJ": pickled(Raw(opcodes(named("subprocess", "Popen")) + opcodes((["touch", str(marker)],)) + b"\x81")),
        "OBJ": pickled(Raw(b"(" + opcodes(shell) + opcodes(text) + b"o")),
        "INST": pickled(Raw(b"(" + opcodes(text) + b"ios\nsystem\n")),
        "BUILD": pickled(build(Raw(opcodes(named("types", "SimpleNamespace")) + b")R"), {"__setstate__": shell})),
        "STACK_GLOBAL": pickled(Raw(opcodes("os") + opcodes("system") + b"\x93" + opcodes((text,)) + b"R")),
        "EXT": pickled(Raw(b"\x82\x01" + opcodes((text,)) + b"R")),
        "a second pickle": pickled({"w": tensor()}) + pickled(call(shell, text)),
        "protocol 0": b"cos\nsystem\n(S" + repr(text).encode() + b"\ntR.",
    }


def _torch_zip(data: bytes, folder: Path) -> Path:
    return torch_zip(folder / "x.pt", data)


def _torch_old(data: bytes, folder: Path, keys: Any = None) -> Path:
    return torch_old(folder / "x.pt", data, keys)


def _in_folder(folder: Path, make: Callable[[Path], Path]) -> Path:
    make(folder / "pytorch_model.bin")
    return folder


def code_cases() -> dict[str, Case]:
    """Pickles that run code, in each kind of file that holds pickles."""
    kinds: dict[str, Callable[[Path, bytes], Path]] = {
        "torch zip": lambda folder, data: _torch_zip(data, folder),
        "old torch file": lambda folder, data: _torch_old(data, folder),
        "pytorch_model.bin": lambda folder, data: _in_folder(folder, lambda path: torch_zip(path, data)),
        "DCP metadata": lambda folder, data: written(dcp(folder), ".metadata", data),
        "DCP part": lambda folder, data: dcp(folder, content=_torch_zip(data, folder).read_bytes()),
    }
    second = "a second pickle"  # Where only the first is read, it holds the weights.
    return {
        f"{kind}: {way}": partial(lambda make, way, folder: make(folder, _code(_marker(folder))[way]), make, way)
        for kind, make in kinds.items()
        for way in _code(Path(MARKER))
        if way != second or kind in ("old torch file", "DCP part")
    }


def _marker(folder: Path) -> Path:
    return folder.parent / MARKER


def written(folder: Path, file: str, content: bytes) -> Path:
    (folder / file).write_bytes(content)
    return folder


REBUILD = "torch._utils"
TENSORS: dict[str, Any] = {
    "a storage smaller than its tensor": tensor(size=(100,)),
    "a storage larger than its record": tensor(numel=10**6, size=(10**6,)),
    "a negative offset": tensor(offset=-1),
    "an offset past the storage": tensor(offset=4),
    "a huge offset": tensor(offset=2**62),
    "a negative stride": tensor(stride=(-1,)),
    "a negative size": tensor(size=(-4,)),
    "a huge size": tensor(size=(2**62,)),
    "a huge size with stride 0": tensor(size=(2**40,), stride=(0,)),
    "a size that overflows": tensor(size=(2**33, 2**33), stride=(2**33, 1)),
    "a stride that overflows": tensor(size=(2, 2), stride=(2**62, 2**62)),
    "a size without stride": tensor(size=(2, 2), stride=(1,)),
    "a size of fractions": tensor(size=(4.0,)),
    "a size of text": tensor(size="4"),
    "a negative storage": tensor(numel=-4),
    "a storage of text": tensor(numel="4"),
    "a huge storage": tensor(numel=2**62, size=(2**62,)),
    "a storage of no type": tensor(kind="FalseStorage"),
    "an object for a storage": tensor({"dtype": 3}),
    "a tensor for a storage": tensor(tensor()),
    "a meta tensor": call(
        named(REBUILD, "_rebuild_meta_tensor_no_storage"), named("torch", "float32"), (2**40,), (1,), False
    ),
    "a sparse tensor whose check never ends": call(
        named(REBUILD, "_rebuild_sparse_tensor"),
        named("torch", "sparse_coo"),
        (tensor(kind="LongStorage", numel=2, size=(1, 2**40), stride=(0, 0)), tensor(size=(2**40,), stride=(0,)), (9,)),
    ),
    "a quantized tensor": call(
        named(REBUILD, "_rebuild_qtensor"),
        storage(kind="QInt8Storage"),
        *(0, (4,), (1,), (named("torch", "per_tensor_affine"), 1.0, 0), False, {}),
    ),
    "a nested tensor past its buffer": call(
        named(REBUILD, "_rebuild_nested_tensor"), *(tensor() for _ in range(4))
    ),
    "a wrapper without memory": call(
        named(REBUILD, "_rebuild_wrapper_subclass"),
        *(named("torch", "Tensor"), named("torch", "float32"), (4,), (1,), 0),
        *(call(named("torch.serialization", "_get_layout"), "torch.strided"), call(named("torch", "device"), "cpu")),
        False,
    ),
    "a tensor of an array": call(
        named(REBUILD, "_rebuild_device_tensor_from_numpy"), [1.0], named("torch", "float32"), "cpu", False
    ),
    "a tensor without values": call(named("torch", "Tensor"), HUGE // 4),
    "a state that is not a tensor's": build(tensor(), (1, 2, 3)),
}  # fmt: skip
BOMBS: dict[str, Any] = {
    "a key that takes years to hash": {doubled(60): 1},
    "a set that takes years to hash": {"a": call(named("builtins", "set"), [doubled(60)])},
    "a counter that takes years to hash": {"a": call(named("collections", "Counter"), [doubled(60)])},
    "a storage key that takes years to hash": {"w": tensor(key=doubled(60))},
    "a layout that takes years to hash": {"w": call(named("torch.serialization", "_get_layout"), doubled(60))},
    "a key that is hashed often": Raw(b"}(" + opcodes(doubled(8)) + b"q\x7eN" + b"h\x7eN" * 50_000 + b"u"),
    "a key too deep to hash": Raw(b"}" + b")" + b"\x85" * 1_000_000 + b"Ns"),
    "a key too large to show": {doubled(8): 1},
    "lists nested 200,000 deep": Raw(b"]" * 200_000 + b"a" * 199_999),
    "marks a million deep": Raw(b"(" * 1_000_000),
    "a bytearray of zeros": {"a": call(named("__builtin__", "bytearray"), HUGE)},
    "an array of objects": {
        "a": call(named("numpy._core.multiarray", "_reconstruct"), named("numpy", "ndarray"), (HUGE // 8,), "O")
    },
    "an array type of negative size": {
        "a": build(call(named("numpy", "dtype"), "V8", False, True), (3, "|", None, None, None, -9, 1, 0))
    },
    "a codec that takes minutes": {
        "a": call(named("_codecs", "encode"), "".join(map(chr, range(0x3400, 0x9000))) * 4, "punycode")
    },
    "a codec under another name": {
        "a": call(named("_codecs", "encode"), "".join(map(chr, range(0x3400, 0x9000))) * 4, "-PunyCode ")
    },
    "a mapping whose methods are hidden": build(
        call(named("collections", "OrderedDict")), {"get": 3, "items": 3, "keys": 3, "__iter__": 3}
    ),
    "no weights": {"a\nb\x1b[2J": 3},
    "a class whose name moves the cursor": {"a": named("os\x1b[2J", "system")},
    "no object": Raw(b""),
    "an object that is not there": Raw(b"h\x05"),
    "a tuple of nothing": Raw(b"\x87"),
    "an unknown opcode": Raw(b"\xfe"),
    "a text longer than the file": Raw(b"X\xff\xff\xff\xff"),
    "bytes longer than memory": Raw(b"\x8e" + b"\xff" * 8),
    "a number longer than the file": Raw(b"\x8b\xff\xff\xff\x7f"),
    "invalid UTF-8": Raw(b"X\x02\0\0\0\xff\xfe"),
}


def object_cases() -> dict[str, Case]:
    """Pickles without code, in both kinds of torch files."""
    cases: dict[str, Case] = {}
    for name, value in TENSORS.items():
        cases[f"torch zip: {name}"] = partial(_torch_zip, pickled({"w": value}))
    for name, value in BOMBS.items():
        cases[f"torch zip: {name}"] = partial(_torch_zip, pickled(value))
        cases[f"old torch file: {name}"] = partial(_torch_old, pickled(value), keys=[])
    settings: dict[str, dict[str, Any]] = {
        "a storage smaller than its tensor": {"size": (100,)},
        "a storage larger than the file": {"numel": 2**29, "size": (2**29,)},
        "a huge size with stride 0": {"size": (2**40,), "stride": (0,)},
        "a negative offset": {"offset": -1},
        "a negative stride": {"stride": (-1,)},
    }
    for name, more in settings.items():
        cases[f"old torch file: {name}"] = partial(_torch_old, pickled({"w": tensor(old=True, **more)}))
    good = pickled({"w": tensor(old=True)})
    cases["old torch file: storage keys of nothing"] = partial(_torch_old, good, keys=["1"])
    cases["old torch file: storage keys that take years"] = partial(_torch_old, good, keys=[doubled(60)])
    cases["old torch file: no end of the object"] = partial(_torch_old, good[:-1])
    cases["old torch file: cut off"] = lambda folder: cut(_torch_old(good, folder))
    return cases


def cut(path: Path) -> Path:
    path.write_bytes(path.read_bytes()[:-20])
    return path


GOOD = pickled({"w": tensor()})
CENTRAL, LOCAL, END = b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06"


def _zip(*edits: tuple[bytes, int, bytes], more: dict[str, bytes] | None = None, **how: Any) -> Case:
    return lambda folder: edited(torch_zip(folder / "x.pt", GOOD, more, **how), *edits)


def _as_torch(edit: Callable[[bytearray], bytes | bytearray]) -> Case:
    """An archive as torch writes it, with the three records at its end, edited."""
    return lambda folder: written(folder, "x.pt", bytes(edit(bytearray(saved({"w": torch.zeros(4)}))))) / "x.pt"


def _second_directory(content: bytearray) -> bytes:
    """A copy of the directory at the end, where zipfile looks, while torch takes the first, which the locator names."""
    record, locator, end = content[-98:-42], content[-42:-22], content[-22:]
    begin, size_bytes = (int.from_bytes(record[at : at + 8], "little") for at in (48, 40))
    directory = content[begin : begin + size_bytes]
    at = len(content) - 42
    second = record[:48] + at.to_bytes(8, "little")
    end[16:20] = at.to_bytes(4, "little")
    return bytes(content[:-42] + directory + second + locator + end)


def _twice(path: Path) -> Path:
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(path, "a") as archive:
        archive.writestr("archive/data.pkl", pickled({"other": tensor()}))
    return path


ARCHIVES: dict[str, Case] = {
    "a member outside the folder": _zip(more={"../../x": b"1"}),
    "an absolute root": _zip(root="/tmp"),
    "a root outside the folder": _zip(root="../.."),
    "a name twice": lambda folder: _twice(torch_zip(folder / "x.pt", GOOD)),
    "a name twice in another case": _zip(more={"DATA.PKL": pickled({"other": tensor()})}),
    "a bomb": _zip(more={"data/1": bytes(300 << 20)}, compression=zipfile.ZIP_DEFLATED),
    "a bomb of bzip2": _zip(more={"data/1": bytes(30 << 20)}, compression=zipfile.ZIP_BZIP2),
    "a bomb of xz": _zip(more={"data/1": bytes(30 << 20)}, compression=zipfile.ZIP_LZMA),
    "a method that does not exist": _zip((CENTRAL, 10, b"\x63\x00")),
    "a size larger than the file": _zip((CENTRAL, 20, b"\xf0\xff\xff\xff\xf0\xff\xff\xff")),
    "two sizes": _zip((CENTRAL, 24, b"\xf0\xff\x00\x00")),
    "members that overlap": _zip((CENTRAL, 42, b"\0\0\0\0"), (CENTRAL, 16, b"\0\0\0\0")),
    "a member past the file": _zip((CENTRAL, 42, b"\xf0\xff\xff\x7f")),
    "an encrypted member": _zip((CENTRAL, 8, b"\x01\x00")),
    "another name before the member": _zip((LOCAL, 30, b"x")),
    "a checksum that differs": _zip((CENTRAL, 16, b"\1\2\3\4")),
    "a comment with another end": _zip((END, 20, b"\x04\x00")),
    "too many members": _zip((END, 8, b"\xff\x00\xff\x00")),
    "too few members": _zip((END, 8, b"\x01\x00\x01\x00")),
    "a directory before the file": _zip((END, 16, b"\xf0\xff\xff\x7f")),
    "a directory of other size": _zip((END, 12, b"\x01\x00\x00\x00")),
    "no members": lambda folder: written(folder, "x.pt", LOCAL + END + bytes(18)) / "x.pt",
    "a beginning and nothing more": lambda folder: written(folder, "x.pt", LOCAL) / "x.pt",
    "no pickle": lambda folder: edited(torch_zip(folder / "x.pt", GOOD), (b"data.pkl", 0, b"data.xyz")),
    "no storage": _zip((b"data/0", 0, b"data/7")),
    "a program of TorchScript": _zip(more={"constants.pkl": GOOD, "code/__torch__.py": b"raise SystemExit"}),
    "another order of bytes": _zip(more={"byteorder": b"middle"}),
    "an alignment that is not a number": _zip(more={".storage_alignment": b"x" * 99}),
    "a second directory": _as_torch(_second_directory),
    "a locator past the file": _as_torch(lambda one: one[:-34] + b"\xff" * 8 + one[-26:]),
    "a record of other size": _as_torch(lambda one: one[:-58] + b"\xff" * 8 + one[-50:]),
    "bytes after the end": _as_torch(lambda one: one + b"\0" * 30),
    "bytes before the directory": _as_torch(lambda one: one[:64] + b"\0" * 7 + one[64:]),
    "the half of it": _as_torch(lambda one: one[: len(one) // 2]),
}  # fmt: skip
