"""Files of torch.save: plain ones, and those of Lightning and Composer. Nothing in them is run by default."""

from __future__ import annotations

import io
import mmap
import pickle
import struct
import zipfile
from pathlib import Path
from typing import IO, Any

import torch

from trainer_cli.checkpoint.format.pickle_check import Ignored, names_in
from trainer_cli.errors import CheckpointError

ZIP_BEGIN = b"PK\x03\x04"
_LARGEST_PICKLE = 256 * 1024 * 1024
_ZIP_END_BYTES = 22
_ZIP64_END_BYTES = 98
"""Of the three records at the end of a large archive."""
_BLOCK_BYTES = 4 * 1024 * 1024
_PICKLES_OF_OLD_FILE = 5
"""Magic number, version, system, the object, the keys of its storages; then the storages follow."""
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
"""Of what torch allows: what dense tensors on the CPU are made of."""


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
"""Classes found in checkpoints of Lightning, Composer, timm that hold no weights -> what is made instead.

`dict` and `list` are named as what a `defaultdict` makes.
"""


class NeedsPickleError(CheckpointError):
    """A file can be loaded only by running what is in it."""


def load_torch_file(path: Path, *, allow_pickle: bool = False) -> Any:
    """The object in a file of torch.save, its tensors on the CPU.

    Args:
        allow_pickle: run what is in the file where it cannot be loaded otherwise.

    Raises:
        NeedsPickleError: it can be loaded only by running what is in it, which was not allowed.
        CheckpointError: it is damaged, or no file of torch.save.
    """
    try:
        with path.open("rb") as file:
            is_zip, unknown = _looked_through(file, path.stat().st_size)
        if not unknown:
            return _load(path, is_zip_file=is_zip)
        refusal = _needs_pickle(path, f" ({', '.join(sorted(unknown)[:5])[:200]})")
    except OSError:
        raise
    except pickle.UnpicklingError:
        refusal = _needs_pickle(path, "")
    except Exception as error:  # Whatever torch raises while it reads bytes that it did not write.
        raise _unreadable(path, error) from None
    if not allow_pickle:
        raise refusal
    try:
        return torch.load(path, map_location="cpu", weights_only=False)
    except Exception as error:  # Classes that cannot be imported, among others.
        raise _unreadable(path, error) from error


def load_torch_bytes(content: bytes) -> Any:
    """The object in the bytes of a file of torch.save.

    Raises:
        ValueError: it can be loaded only by running what is in it.
        Exception: whatever torch raises while it reads damaged bytes.
    """
    file = io.BytesIO(content)
    _, unknown = _looked_through(file, len(content))
    if unknown:
        raise ValueError(f"it names {min(unknown)[:80]}, which is no tensor")
    file.seek(0)
    try:
        return _load(file)
    except pickle.UnpicklingError:
        raise ValueError("it holds more than a tensor") from None


def _load(file: Path | IO[bytes], *, is_zip_file: bool = False) -> Any:
    stand_ins: list[Any] = [(one, name.replace(" ", ".")) for name, one in _STAND_INS.items()]
    with torch.serialization.safe_globals(stand_ins):
        return torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip_file)


def _looked_through(file: IO[bytes], size: int) -> tuple[bool, list[str]]:
    """Whether it is a zip archive, and the classes and functions that it names beyond those of weights.

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
    module, _, own = name.partition(" ")
    if module in ("torch", "torch.cuda", "torch.storage"):
        own_kind = own.endswith("Storage") or isinstance(vars(torch).get(own), torch.dtype)
        return own_kind or name in _TENSORS_AND_CONTAINERS
    return name in _TENSORS_AND_CONTAINERS or name in _STAND_INS


def _pickle_in_zip(file: IO[bytes], size: int) -> bytes:
    """The pickle of an archive, all of whose members were checked: none is larger than the file, or damaged.

    torch finds a member in any letter case.
    """
    with zipfile.ZipFile(file) as archive:
        _check_end(file, size, archive.start_dir)
        members = archive.infolist()
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
            raise ValueError("what is no tensor in it takes too much memory")
        for member in members:
            if member.CRC == 0:  # torch writes 0 where it does not compute it.
                member.CRC = None  # type: ignore[assignment]
            with archive.open(member) as opened:
                while opened.read(_BLOCK_BYTES):
                    pass
        return archive.read(pickles[0])


def _check_end(file: IO[bytes], size: int, directory: int) -> None:
    """Refuse an archive in which torch may find another directory than the one at `directory`.

    Raises:
        ValueError: its end is not as torch writes it.
    """
    file.seek(max(0, size - _ZIP64_END_BYTES))
    end = file.read()
    sign, *_, size_bytes, begin, comment = struct.unpack("<4s4HLLH", end[-_ZIP_END_BYTES:])
    ends_at = size - _ZIP_END_BYTES
    if end[-42:-38] == b"PK\x06\x07":
        (place,) = struct.unpack("<Q", end[-34:-26])
        size_bytes, begin = struct.unpack("<QQ", end[40:56])
        ends_at = size - _ZIP64_END_BYTES
        if place != ends_at or not end.startswith(b"PK\x06\x06"):
            raise ValueError("it has two ends")
    if sign != b"PK\x05\x06" or comment or begin != directory or begin + size_bytes != ends_at:
        raise ValueError("it does not end as a file of torch.save")


def _needs_pickle(path: Path, names: str) -> NeedsPickleError:
    return NeedsPickleError(
        f"the file holds more than dense tensors and plain values{names}: loading it can run any code",
        where=str(path),
        cure="If you trust the file, add --allow-pickle.",
    )


def _unreadable(path: Path, error: Exception) -> CheckpointError:
    said = (str(error).splitlines() or [""])[0][:200]
    said = said if isinstance(error, ValueError) and said else f"{type(error).__name__}: {said}"
    return CheckpointError(
        f"the file cannot be read by torch: {said}",
        where=str(path),
        cure="It may be damaged, or cut short: compare its size with that of the original.",
    )
