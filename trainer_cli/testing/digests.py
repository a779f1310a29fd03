"""Short names for the values of live objects: equal where every bit is, and different where one is not."""

from __future__ import annotations

import random
import sys
import sysconfig
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler

from trainer_cli.checkpoint.format.dtensor import local_of
from trainer_cli.checkpoint.format.file_layout import bytes_of

_PLAIN = (bool, int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device, np.generic)
_DEPTH = 4
_MANY = 1000
"""Longer containers are described by their length: a list of a million file names is no state."""
_LARGE = 1 << 20
"""Larger numpy arrays, whose changes nothing reports, are read once."""
_OURS = "trainer_cli"


class Digests:
    """Digests of values; a hidden tensor that has not changed since is not read again."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, str]] = {}

    def tree(self, value: Any, name: str) -> Iterator[tuple[str, str]]:
        """Every leaf of a tree of mappings and lists, with its name."""
        if isinstance(value, Mapping):
            for key, item in value.items():
                yield from self.tree(item, f"{name}.{key}")
        elif isinstance(value, tuple) and hasattr(value, "_fields"):
            for key, item in zip(value._fields, value, strict=True):
                yield from self.tree(item, f"{name}.{key}")
        elif isinstance(value, list | tuple) and len(value) <= _MANY:
            for number, item in enumerate(value):
                yield from self.tree(item, f"{name}[{number}]")
        else:
            yield name, self.one(value) or type(value).__name__

    def whole(self, value: Any) -> str:
        """One digest of a whole tree."""
        return _hash("".join(f"{name}={digest};" for name, digest in self.tree(value, "")).encode())

    def one(self, value: Any) -> str | None:
        """The digest of one value; None for what has no value to compare, such as a function."""
        if isinstance(value, Tensor):
            return _tensor(value)
        if isinstance(value, np.ndarray):
            return f"array {value.dtype}{list(value.shape)} {_hash(np.ascontiguousarray(value).tobytes())}"
        if isinstance(value, _PLAIN):
            text = repr(value)
            return text if len(text) <= 80 else _hash(text.encode())
        if (state := _generator_state(value)) is not None:
            return f"generator {_hash(state)}"
        if isinstance(value, set | frozenset):
            return self._many(sorted(value, key=repr), len(value))
        if isinstance(value, list | tuple | deque):
            return self._many(value, len(value))
        if isinstance(value, Mapping):
            return self._many([part for item in value.items() for part in item], len(value))
        return None

    def hidden(self, value: Any, name: str, seen: set[int], depth: int = _DEPTH) -> Iterator[tuple[str, str]]:
        """What a user's object keeps in its attributes, and the objects in them, as far as they are the user's."""
        if (digest := self._kept(value)) is not None:
            yield name, digest
        elif depth and id(value) not in seen and is_users(type(value).__module__):
            seen.add(id(value))
            for key, item in _attributes(value):
                yield from self.hidden(item, f"{name}.{key}", seen, depth - 1)

    def of_model(self, model: nn.Module) -> Iterator[tuple[str, str]]:
        """Attributes of its modules that are neither parameters nor buffers, and which parameters are trained."""
        seen: set[int] = set()
        for path, module in model.named_modules():
            name = ".".join(part for part in ("model", path) if part)
            for key, value in vars(module).items():
                if key == "training" or key not in _MODULE:
                    yield from self.hidden(value, f"{name}.{key}", seen)
        for path, parameter in model.named_parameters():
            yield f"model.{path}.requires_grad", str(parameter.requires_grad)

    def of_object(self, value: Any, name: str, besides: Collection[str] = ()) -> Iterator[tuple[str, str]]:
        """Attributes of an object, but for those named."""
        seen = {id(value)}
        for key, item in _attributes(value):
            if key not in besides:
                yield from self.hidden(item, f"{name}.{key}", seen)

    def of_data(self, value: Any, name: str, seen: set[int], depth: int = 6) -> Iterator[tuple[str, str]]:
        """What the user's part of a loader keeps; what is ours or torch's is looked through."""
        if not depth or id(value) in seen or isinstance(value, type):
            return
        top = type(value).__module__.partition(".")[0]
        if top == _OURS or isinstance(value, DataLoader | Sampler):
            seen.add(id(value))
            for key, item in _attributes(value):
                inner = name if top == _OURS or key == "dataset" else f"{name}.{key}"
                if top != _OURS and _generator_state(item) is not None:
                    yield inner, str(self.one(item))
                else:
                    yield from self.of_data(item, inner, seen, depth - 1)
        elif is_users(type(value).__module__):
            yield from self.hidden(value, name, seen)

    def of_modules(self) -> Iterator[tuple[str, str]]:
        """Numbers, texts and generators that the user's modules keep as globals."""
        for module_name, module in sorted(sys.modules.items()):
            if module is None or not is_users(module_name):
                continue
            for key, value in list(vars(module).items()):
                if not key.startswith("__") and (digest := self._kept(value)) is not None:
                    yield f"{module_name}.{key}", digest

    def _kept(self, value: Any) -> str | None:
        """As `one`, but large arrays and tensors that did not change are not read again."""
        if isinstance(value, Tensor):
            mark: Any = (value.data_ptr(), value._version) if not value.is_inference() and not value.is_sparse else None
        elif isinstance(value, np.ndarray) and value.nbytes > _LARGE:
            mark = (value.ctypes.data, value.shape)
        else:
            return self.one(value)
        known = self._known.get(id(value))
        if known is None or mark is None or known[0] != mark:
            known = self._known[id(value)] = (mark, str(self.one(value)))
        return known[1]

    def _many(self, values: Iterable[Any], length: int) -> str | None:
        if length > _MANY:
            return f"{length} items"
        parts = [self.one(value) for value in values]
        if parts and all(part is None for part in parts):
            return None
        text = f"[{', '.join(part or '-' for part in parts)}]"
        return text if len(text) <= 80 else f"{length} items {_hash(text.encode())}"


@cache
def is_users(module_name: str) -> bool:
    """True for modules that are neither ours, nor python's, nor an installed package's."""
    if module_name.partition(".")[0] == _OURS:
        return False
    file = getattr(sys.modules.get(module_name), "__file__", None)
    return file is not None and is_users_file(file)


@cache
def is_users_file(file: str) -> bool:
    """True for a source file that is neither ours, nor python's, nor an installed package's."""
    return not file.startswith(("<", *_INSTALLED)) and Path(file).is_file()


_INSTALLED = tuple(
    f"{path}/"
    for path in {*(sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")),
                 str(Path(__file__).parents[1])}
)  # fmt: skip
_MODULE = frozenset(vars(nn.Module()))


def _attributes(value: Any) -> list[tuple[str, Any]]:
    return list(getattr(value, "__dict__", {}).items())


def _hash(data: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(data)


def _tensor(value: Tensor) -> str:
    value = local_of(value).detach()
    if value.layout is not torch.strided or value.is_quantized:
        value = value.to_dense() if value.layout is not torch.strided else value.int_repr()
    if value.numel() == 1 and value.dtype in (torch.float32, torch.float64, torch.int64):
        # float32 is exact in the double that is shown.
        return f"{value.item()!r}"
    if value.is_meta:
        return f"{value.dtype}{list(value.shape)}"
    data = bytes_of(value) if value.numel() else b""
    name = str(value.dtype).removeprefix("torch.")
    return f"{name}{list(value.shape)} {xxhash.xxh3_64_hexdigest(data)}"  # type: ignore[arg-type]


def _generator_state(value: Any) -> bytes | None:
    """The state of a random generator; None for all else."""
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, random.SystemRandom):
        return b""
    if isinstance(value, random.Random):
        return repr(value.getstate()).encode()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state).encode()
    if isinstance(value, np.random.RandomState):
        return repr([part.tobytes() if isinstance(part, np.ndarray) else part for part in value.get_state()]).encode()
    return None
