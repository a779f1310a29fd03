"""Files of torch.save: the format `torch_file`, and safe loading of files that any program wrote.

A file is scanned before it is loaded: its pickle may name only classes that tensors consist of, and must not take
unbounded time or memory. Code in a file runs only where the user allows it.
"""

from __future__ import annotations

import io
import mmap
import pickle
import pickletools
import struct
import zipfile
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from encodings import normalize_encoding
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol, cast

import torch

from trainer_cli.errors import CheckpointError
from trainer_cli.format import FileLayout, decode, encode, lay_out
from trainer_cli.manifest import DamagedCheckpoint, Manifest
from trainer_cli.tensor_files import TORCH_DTYPES, TensorEntry, bytes_of, memory_of, read_verified

if TYPE_CHECKING:
    from trainer_cli.storage import FileWriter, ReadableFolder, WritableFolder

ZIP_BEGIN = b"PK\x03\x04"
_LARGEST_PICKLE = 256 * 1024 * 1024
_ZIP_END_BYTES = 22
_ZIP64_END_BYTES = 98
"""Size of the three records at the end of a large archive."""
_BLOCK_BYTES = 4 * 1024 * 1024
_PICKLES_OF_OLD_FILE = 5
"""Magic number, version, system, the object, the keys of its storages; the storages follow them."""
_TENSORS_AND_CONTAINERS = frozenset(
    {
        "_codecs encode", "__builtin__ complex", "__builtin__ set", "builtins complex", "builtins set",
        "collections Counter", "collections OrderedDict",
        "torch Size", "torch Tensor", "torch device", "torch.nn.parameter Parameter",
        "torch._tensor _rebuild_from_type_v2", "torch.serialization _get_layout",
        "torch._utils _rebuild_parameter", "torch._utils _rebuild_parameter_with_state",
        "torch._utils _rebuild_tensor", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_tensor_v3",
    }
)  # fmt: skip
"""The classes and functions that torch allows and that dense tensors on the CPU consist of."""
_MOST_OPCODES = 10_000_000
"""Each may create an object of about 100 bytes."""
_LARGEST_TUPLE = 2**20
"""Maximum cost of hashing a tuple, in elements. A level of nesting doubles the cost, so this limits the depth to 20."""
_MOST_WORK = 50_000_000
"""Maximum cost of hashing every object that is put into a container or passed to a call."""
_MARK = 0
_TUPLES = frozenset({"TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"})
_PUTS = frozenset({"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"})
_GETS = frozenset({"GET", "BINGET", "LONG_BINGET"})
_SLOW_CODECS = frozenset({"punycode", "idna"})
"""Codecs whose time grows with the square of the length of a string."""


class Ignored:
    """Replaces an object without weights: accepts any arguments and state, and keeps none."""

    __slots__ = ()

    def __new__(cls, *args: Any) -> Ignored:
        return object.__new__(cls)

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


def _new_dict(*_: Any) -> dict[Any, Any]:
    return {}


_STAND_INS: dict[str, Any] = {
    "collections defaultdict": _new_dict,
    **dict.fromkeys(
        (
            "argparse Namespace", "datetime timedelta", "pathlib PosixPath", "pathlib._local PosixPath",
            "torch.torch_version TorchVersion", "numpy dtype", "numpy ndarray", "numpy._core.multiarray _reconstruct",
            "numpy.core.multiarray _reconstruct", "numpy._core.multiarray scalar", "numpy.core.multiarray scalar",
            "__builtin__ dict", "__builtin__ list", "builtins dict", "builtins list",
        ),
        Ignored,
    ),
}  # fmt: skip
"""Class without weights in checkpoints of Lightning, Composer and timm -> replacement.

`dict` and `list` occur as the factories of a `defaultdict`.
"""


@dataclass(frozen=True, slots=True)
class TorchLayout(FileLayout):
    """A layout that is written by torch.save."""

    @property
    def container(self) -> str:
        """The name of the one file."""
        return _file_of(self.rank)

    def write(self, folder: WritableFolder, image: memoryview | None = None) -> dict[str, Mapping[str, str]]:
        """Write one file of torch.save. Without an image, the bytes of the tensors are those of the state itself."""
        tensors: dict[str, torch.Tensor] = {}
        leaf_at = {span.offset: span.leaf for span in self.spans}
        offset = len(self.header)
        for entry in self.entries:
            if image is not None:
                content = image[offset : offset + entry.size_bytes]
            else:
                content = bytes_of(leaf_at[offset]).data if entry.size_bytes else memoryview(b"")
            tensors[entry.name] = _copy_tensor(content, entry)
            offset += entry.size_bytes
        tensors |= {alias: tensors[name] for alias, name in self.aliases.items()}
        tensors |= decode(self.text).views_of(tensors)
        saved = {"tensors": tensors, "state": self.text.decode("utf-8")}
        with folder.create(self.container) as file:
            torch.save(saved, _WriteStream(file))  # type: ignore[arg-type]
        return {}


class TorchFileFormat:
    """`torch.load(file, weights_only=True)["tensors"]` has every tensor; tied ones are the same, views share memory."""

    name = "torch_file"

    def plan(self, tree: Mapping[str, Any], *, shapes_only: bool = False) -> FileLayout:
        """Lay out the file of a state."""
        base = lay_out(*encode(tree), shapes_only=shapes_only, dtypes=TORCH_DTYPES)
        return TorchLayout(**{field.name: getattr(base, field.name) for field in fields(base)})

    def read(self, folder: ReadableFolder, manifest: Manifest, only: Collection[str] | None = None) -> dict[str, Any]:
        """Read the state, or the keys `only` of it."""
        return self._read(folder, manifest, only)

    def read_values(self, folder: ReadableFolder, manifest: Manifest, only: Collection[str]) -> dict[str, Any]:
        """Read keys of the state that hold no tensors."""
        return self._read(folder, manifest, only, with_tensors=False)

    @staticmethod
    def _read(
        folder: ReadableFolder, manifest: Manifest, only: Collection[str] | None, *, with_tensors: bool = True
    ) -> dict[str, Any]:
        """Read the state, or the keys `only` of it. DamagedCheckpoint if torch cannot."""
        file = _file_of(0)
        content = read_verified(folder, manifest, file)
        try:
            loaded = load_torch_bytes(content)
            decoder = decode(loaded["state"].encode("utf-8"), only)
            if not with_tensors:
                return decoder.values()
            return decoder.tree({name: loaded["tensors"][name] for name in decoder.wanted})
        except Exception as error:  # torch raises errors of many types for bytes that it did not write.
            where = str(folder.path / file)
            raise DamagedCheckpoint(f"the file cannot be read: {str(error)[:200]}", where=where) from None


def _file_of(rank: int) -> str:
    return f"rank{rank}.pt"


def _copy_tensor(content: memoryview, entry: TensorEntry) -> torch.Tensor:
    """A tensor with a copy of these bytes."""
    # A copy, because torch.save writes whole storages.
    tensor = torch.empty(entry.shape, dtype=TORCH_DTYPES[entry.code])
    if entry.size_bytes:
        memory_of(tensor)[:] = content
    return tensor


class NeedsPickleError(CheckpointError):
    """A file can be loaded only by running what is in it."""


def load_torch_file(path: Path, *, allow_pickle: bool = False) -> Any:
    """Load a file of torch.save, with its tensors on the CPU.

    Args:
        allow_pickle: run code in the file if it cannot be loaded otherwise.

    Raises:
        NeedsPickleError: the file can be loaded only by running code in it, which was not allowed.
        CheckpointError: it is damaged, or not a file of torch.save.
    """
    try:
        with path.open("rb") as file:
            is_zip, unknown_names = _scan(file, path.stat().st_size)
        if not unknown_names:
            return _load(path, is_zip_file=is_zip)
        refusal = _needs_pickle(path, f" ({', '.join(sorted(unknown_names)[:5])[:200]})")
    except OSError:
        raise
    except pickle.UnpicklingError:
        refusal = _needs_pickle(path, "")
    except Exception as error:  # torch raises errors of many types for bytes that it did not write.
        raise _unreadable(path, error) from None
    if not allow_pickle:
        raise refusal
    try:
        return torch.load(path, map_location="cpu", weights_only=False)
    except Exception as error:  # Classes that cannot be imported, among others.
        raise _unreadable(path, error) from error


def load_torch_bytes(content: bytes) -> Any:
    """Load the bytes of a file of torch.save.

    Raises:
        ValueError: the file can be loaded only by running code in it.
        Exception: the bytes are damaged; torch raises errors of many types.
    """
    file = io.BytesIO(content)
    _, unknown_names = _scan(file, len(content))
    if unknown_names:
        raise ValueError(f"it names {min(unknown_names)[:80]}, which is not a tensor")
    file.seek(0)
    try:
        return _load(file)
    except pickle.UnpicklingError:
        raise ValueError("it holds more than a tensor") from None


def _load(file: Path | IO[bytes], *, is_zip_file: bool = False) -> Any:
    """Load a file that was scanned; objects without weights are replaced by stand-ins."""
    stand_ins: list[Any] = [(stand_in, name.replace(" ", ".")) for name, stand_in in _STAND_INS.items()]
    # mmap: a tensor that is not used is never read. torch maps zip files only.
    with torch.serialization.safe_globals(stand_ins):
        return torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip_file)


def _scan(file: IO[bytes], size: int) -> tuple[bool, list[str]]:
    """Whether a file is a zip archive, and the classes and functions in its pickles that are not known to be data.

    Raises:
        ValueError, zipfile.BadZipFile: it is damaged, or takes too much time or memory to load.
    """
    is_zip = file.read(4) == ZIP_BEGIN
    if is_zip:
        names = names_in(io.BytesIO(_pickle_in_zip(file, size)))
    else:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            names = {name for _ in range(_PICKLES_OF_OLD_FILE) for name in names_in(content)}
    return is_zip, [name.replace(" ", ".") for name in names if not _is_data(name)]


def _is_data(name: str) -> bool:
    """Whether a name, as `module name`, is a class or function that runs no code of the file."""
    module, _, attribute = name.partition(" ")
    if module in ("torch", "torch.cuda", "torch.storage"):
        is_type = attribute.endswith("Storage") or isinstance(vars(torch).get(attribute), torch.dtype)
        return is_type or name in _TENSORS_AND_CONTAINERS
    return name in _TENSORS_AND_CONTAINERS or name in _STAND_INS


def _pickle_in_zip(file: IO[bytes], size: int) -> bytes:
    """The pickle of a zip archive, after its members were checked: undamaged, and not larger than the file.

    Raises:
        ValueError, zipfile.BadZipFile: a member is damaged, or torch would read it differently.
    """
    with zipfile.ZipFile(file) as archive:
        _check_end(file, size, archive.start_dir)
        members = archive.infolist()
        # torch ignores the letter case of names.
        names = [member.filename.lower() for member in members]
        pickles = [member for member in members if member.filename.lower().endswith("/data.pkl")]
        if len(set(names)) != len(names) or len(pickles) != 1:
            raise ValueError("a name occurs twice in it, or it has no data.pkl")
        if any(name.startswith("/") or ".." in name.split("/") for name in names):
            raise ValueError("a name in it leads out of it")
        if any(member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1 for member in members):
            raise ValueError("it is compressed or encrypted")
        if any(member.file_size != member.compress_size for member in members):
            raise ValueError("a member has two sizes")
        if sum(member.file_size for member in members) > size:
            raise ValueError("its parts are larger than the file")
        if pickles[0].file_size > _LARGEST_PICKLE:
            raise ValueError("its content other than tensors takes too much memory")
        for member in members:
            if member.CRC == 0:  # torch writes 0 if it does not compute the checksum.
                member.CRC = None  # type: ignore[assignment]
            with archive.open(member) as opened:
                while opened.read(_BLOCK_BYTES):
                    pass
        return archive.read(pickles[0])


def _check_end(file: IO[bytes], size: int, directory: int) -> None:
    """Refuse an archive in which torch may read another directory than the one at `directory`, which was checked.

    Raises:
        ValueError: its end is not as torch writes it.
    """
    file.seek(max(0, size - _ZIP64_END_BYTES))
    end = file.read()
    sign, *_, size_bytes, begin, comment = struct.unpack("<4s4HLLH", end[-_ZIP_END_BYTES:])
    # Where the directory must end, if nothing is hidden between it and the records of the end.
    ends_at = size - _ZIP_END_BYTES
    if end[-42:-38] == b"PK\x06\x07":
        (locator,) = struct.unpack("<Q", end[-34:-26])
        size_bytes, begin = struct.unpack("<QQ", end[40:56])
        ends_at = size - _ZIP64_END_BYTES
        if locator != ends_at or not end.startswith(b"PK\x06\x06"):
            raise ValueError("it has two ends")
    if sign != b"PK\x05\x06" or comment or begin != directory or begin + size_bytes != ends_at:
        raise ValueError("it does not end as a file of torch.save")


def _needs_pickle(path: Path, names: str) -> NeedsPickleError:
    """The error of a file that can be loaded only by running code in it; `names` are those of the code, or empty."""
    return NeedsPickleError(
        f"the file holds more than dense tensors and plain values{names}: loading it can run any code",
        where=str(path),
        cure="If you trust the file, add --allow-pickle.",
    )


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    """The error of a file that torch cannot read, with the first line of torch's own."""
    message = (str(error).splitlines() or [""])[0][:200]
    reason = message if isinstance(error, ValueError) and message else f"{type(error).__name__}: {message}"
    return CheckpointError(
        f"the file cannot be read by torch: {reason}",
        where=str(path),
        cure="It may be damaged, or cut short: compare its size with that of the original.",
    )


class Stream(Protocol):
    """A file, or a map of one in memory."""

    def read(self, n: int, /) -> bytes: ...

    def readline(self) -> bytes: ...

    def tell(self) -> int: ...


def names_in(pickle: Stream) -> set[str]:
    """The classes and functions that one pickle names, as `module name`. The stream is left at the end of the pickle.

    A tuple can contain another one several times, that one a third, and so on. A hash of the first visits the last
    exponentially often, and recurses in C without a limit. So the cost of hashing is computed from the opcodes alone.

    Raises:
        ValueError: it is malformed, or takes too much time or memory to load.
    """
    names: set[str] = set()
    try:
        _scan_opcodes(pickle, names)
    except LookupError:
        raise ValueError("its pickle is malformed: it uses an object that is missing") from None
    except (ValueError, OverflowError) as error:
        raise ValueError(f"its pickle is malformed or too large: {error}") from None
    if "_codecs encode" not in names:
        names.difference_update(f"_codecs {codec}" for codec in _SLOW_CODECS)
    return names


def _scan_opcodes(pickle: Stream, names: set[str]) -> None:
    """Follow the opcodes of a pickle without creating objects: add its names to `names`, and limit its cost."""
    stack: list[int] = []  # The cost of hashing each object; 0 is a mark.
    memo: dict[int, int] = {}
    work = 0
    opcodes = pickletools.genops(cast(Any, pickle))
    for count, (opcode, arg, _) in enumerate(cast(Iterable[tuple[pickletools.OpcodeInfo, Any, Any]], opcodes)):
        name = opcode.name
        if count > _MOST_OPCODES or work > _MOST_WORK:
            raise ValueError("it holds too many objects")
        if name == "MARK":
            stack.append(_MARK)
        elif name in _PUTS:
            memo[len(memo) if arg is None else arg] = stack[-1]
        elif name in _GETS:
            stack.append(memo[arg])
        elif name == "DUP":
            stack.append(stack[-1])
        elif not opcode.stack_before:
            if name == "GLOBAL":
                names.add(arg)
            elif isinstance(arg, str) and (codec := _slow_codec(arg)):
                names.add(f"_codecs {codec}")
            stack += [1] * len(opcode.stack_after)
        else:
            operands = _pop_operands(stack, opcode)
            if name == "INST":
                names.add(arg)
            if name in _TUPLES:
                size = 1 + sum(2 * cost if cost > 1 else 1 for cost in operands)
                if size > _LARGEST_TUPLE:
                    raise ValueError("it nests tuples too deep")
                stack.append(size)
            else:
                work += sum(operands)
                stack += [1] * len(opcode.stack_after)


def _slow_codec(text: str) -> str | None:
    """The slow codec that a string names. `codecs` ignores letter case, and punctuation around the name."""
    text = text.lower()
    return next((codec for codec in _SLOW_CODECS if codec in text and normalize_encoding(text) == codec), None)


def _pop_operands(stack: list[int], opcode: pickletools.OpcodeInfo) -> list[int]:
    """Pop the operands of an opcode from the stack."""
    kinds = opcode.stack_before
    operands: list[int] = []
    count = len(kinds)
    if pickletools.markobject in kinds:
        # All down to the mark, and as many below it as the opcode takes.
        count = kinds.index(pickletools.markobject)
        while (cost := stack.pop()) != _MARK:
            operands.append(cost)
    for _ in range(count):
        operands.append(stack.pop())
        if operands[-1] == _MARK:
            raise ValueError("it uses an object that is missing")
    return operands


class _WriteStream:
    """A file of a checkpoint as a file object, for libraries that write to one, such as torch.save."""

    def __init__(self, file: FileWriter) -> None:
        self._file = file

    def write(self, data: Any) -> int:
        """Write bytes, and return their number."""
        view = memoryview(data).cast("B")
        self._file.write(view)
        return len(view)

    def flush(self) -> None:
        """Nothing: the folder writes the file on exit."""
