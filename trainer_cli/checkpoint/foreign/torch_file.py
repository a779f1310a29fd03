"""Files of torch.save: plain ones, and those of Lightning and Composer. Nothing in them is run by default."""

from __future__ import annotations

import argparse
import datetime
import pathlib
import pickle
import zipfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.torch_version import TorchVersion

from trainer_cli.errors import CheckpointError

_LARGEST_PICKLE = 256 * 1024 * 1024
_SAFE = [
    argparse.Namespace, datetime.timedelta, defaultdict, pathlib.PosixPath, TorchVersion,
    np.ndarray, np.dtype, np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
    *{type(np.dtype(code)) for code in "?bBhHiIlLqQefd"},
]  # fmt: skip
"""Beside tensors and containers: classes that hold data alone, as found in checkpoints of Lightning, Composer, timm."""


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
    is_zip = zipfile.is_zipfile(path)
    if is_zip:
        _check_zip(path)
    try:
        with torch.serialization.safe_globals(_SAFE):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except pickle.UnpicklingError as error:
        if not allow_pickle:
            raise NeedsPickleError(
                f"the file holds more than tensors and plain values{_unsafe(path, error)}: loading it can run any code",
                where=str(path),
                cure="If you trust the file, add --allow-pickle.",
            ) from None
    except Exception as error:  # Whatever torch raises while it reads bytes that it did not write.
        raise _unreadable(path, error) from None
    try:
        return torch.load(path, map_location="cpu", weights_only=False)
    except Exception as error:  # Classes that cannot be imported, among others.
        raise _unreadable(path, error) from error


def _check_zip(path: Path) -> None:
    """Refuse an archive whose members are compressed, so that none is larger than the file."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError) as error:
        raise _unreadable(path, error) from None
    names = [member.filename for member in members]
    if len(set(names)) != len(names):
        raise _unreadable(path, "a name occurs twice in it")
    if any(member.compress_type != zipfile.ZIP_STORED for member in members):
        raise _unreadable(path, "it is compressed")
    if sum(member.file_size for member in members) > path.stat().st_size:
        raise _unreadable(path, "its parts are larger than the file")
    if any(one.file_size > _LARGEST_PICKLE for one in members if one.filename.endswith("data.pkl")):
        raise _unreadable(path, "what is no tensor in it takes too much memory")


def _unsafe(path: Path, error: Exception) -> str:
    """The classes and functions that the file names, as far as they can be told."""
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(str(path))
    except Exception:  # An older file.
        names = []
    if not names:
        _, found, rest = str(error).partition("GLOBAL ")
        names = [rest.split()[0]] if found else []
    return f" ({', '.join(sorted(names)[:5])[:200]})" if names else ""


def _unreadable(path: Path, why: Exception | str) -> CheckpointError:
    said = why if isinstance(why, str) else f"{type(why).__name__}: {why}"
    return CheckpointError(f"the file cannot be read by torch: {said.splitlines()[0][:200]}", where=str(path))
