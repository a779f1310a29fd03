"""Short names for the values of live objects: equal where every bit is, and different where one is not.

Calls of the user's code that no digest can show, to a clock, an unseeded generator or the number of a worker, are
listed by their lines.
"""

from __future__ import annotations

import inspect
import json
import os
import random
import sys
import sysconfig
from collections import deque
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import Enum, StrEnum
from functools import cache, partial
from pathlib import Path
from types import FrameType, FunctionType, MemberDescriptorType, MethodType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler
from torch.utils.weak import WeakIdKeyDictionary

from trainer_cli.containers import Container, container_of
from trainer_cli.data import Workers
from trainer_cli.dtensor import local_of
from trainer_cli.leaves import named_values
from trainer_cli.state import unwrap
from trainer_cli.tensor_files import bytes_of
from trainer_cli.trainer import capture

if TYPE_CHECKING:
    from trainer_cli.trainer import Trainer


class Asks(StrEnum):
    """What a call asks for."""

    clock = "clock"
    chance = "chance"
    worker = "worker"


@dataclass(frozen=True, slots=True)
class Call:
    """A call in a user's file."""

    asks: Asks
    function: str
    where: str
    """file:line"""


_WATCHED: Mapping[str, tuple[Asks, str, str | None]] = {
    **{f"time.{name}": (Asks.clock, f"time.{name}()", None) for name in (
        "time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time", "localtime",
    )},
    **{f"None.{kind}.{name}": (Asks.clock, f"datetime.{kind}.{name}()", None) for kind, name in (
        ("datetime", "now"), ("datetime", "utcnow"), ("datetime", "today"), ("date", "today"),
    )},
    "posix.urandom": (Asks.chance, "os.urandom()", None),
    "posix.getrandom": (Asks.chance, "os.getrandom()", None),
    "None.Generator.seed": (Asks.chance, "torch.Generator.seed()", None),
    "random.Random.__init__": (Asks.chance, "random.Random()", "x"),
    "random.Random.seed": (Asks.chance, "random.seed()", "a"),
    "uuid.uuid4": (Asks.chance, "uuid.uuid4()", None),
    "torch.random.seed": (Asks.chance, "torch.seed()", None),
    "posix.getpid": (Asks.worker, "os.getpid()", None),
    "torch.utils.data._utils.worker.get_worker_info": (Asks.worker, "torch.utils.data.get_worker_info()", None),
}  # fmt: skip
"""Module and name of a function -> what a call asks for, how a user writes it, and the argument for a seed, with which
it gives the same numbers in every process."""


@contextmanager
def record_calls(file: Path, root: Path) -> Generator[None, None, None]:
    """Record such calls in a file while entered, each line of code once; in forked worker processes too.

    It uses the interpreter's profiling hook, which sees a function under any name that it was imported by.
    """
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    done: set[tuple[str, int, str]] = set()

    def note(asks: Asks, function: str, frame: FrameType | None) -> None:
        # A library may use the clock as it likes: only calls from the user's files are of interest.
        if frame is None or not is_users_file(frame.f_code.co_filename):
            return
        file_name, line = frame.f_code.co_filename, frame.f_lineno
        if (file_name, line, function) in done:
            return
        done.add((file_name, line, function))
        path = Path(file_name)
        shown = path.relative_to(root) if path.is_relative_to(root) else path
        # One write, so that lines of forked workers do not mix.
        os.write(descriptor, json.dumps(asdict(Call(asks, function, f"{shown}:{line}"))).encode() + b"\n")

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call":
            name = f"{getattr(argument, '__module__', None)}.{getattr(argument, '__qualname__', '')}"
        elif event == "call":
            name = f"{frame.f_globals.get('__name__')}.{frame.f_code.co_qualname}"
        else:
            return
        if name in _WATCHED:
            asks, function, seed = _WATCHED[name]
            if seed is None or frame.f_locals.get(seed) is None:
                # The frame of a python function is its own, and that of a builtin the caller's.
                note(asks, function, frame if event == "c_call" else frame.f_back)

    default_rng = np.random.default_rng

    def watched(seed: Any = None) -> Any:
        if seed is None:
            note(Asks.chance, "numpy.random.default_rng()", sys._getframe(1))
        return default_rng(seed)

    # Written in C and without arguments in the frame, so the hook cannot see whether it is seeded.
    np.random.default_rng = watched
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        np.random.default_rng = default_rng
        os.close(descriptor)


def read_calls(file: Path) -> list[Call]:
    """The calls noted in a file, each once."""
    if not file.exists():
        return []
    lines = (json.loads(line) for line in file.read_text("utf-8").splitlines())
    return list(dict.fromkeys(Call(Asks(line["asks"]), line["function"], line["where"]) for line in lines))


NOT_PERSISTENT = " (not persistent)"
"""Ends the name of a buffer that no checkpoint holds."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device, np.generic)
_DEPTH = 4
_MANY = 1000
"""Longer containers are described by their length: a list of a million file names is no state."""
_LARGE = 1 << 20
"""Larger numpy arrays, whose changes nothing reports, are read once."""
_OURS = "trainer_cli"
_CYCLE = "contains itself"


class Digests:
    """Digests of values; a hidden tensor that has not changed since is not read again."""

    def __init__(self) -> None:
        self._known: MutableMapping[Any, tuple[tuple[Any, ...], str]] = WeakIdKeyDictionary()
        """Large tensor or array, as long as it lives -> its mark, and its digest while it has that mark."""
        self._open: set[int] = set()
        """Containers that are being read: one that contains itself is named once."""

    def tree(self, value: Any, name: str) -> Iterator[tuple[str, str]]:
        """Every leaf of a tree, with its name; a long list is one."""
        kind = container_of(value)
        if kind is None or (kind is Container.sequence and len(value) > _MANY):
            yield name, self.digest(value) or type(value).__name__
            return
        if id(value) in self._open:
            yield name, _CYCLE
            return
        self._open.add(id(value))
        try:
            for inner, item in named_values(value, name):
                yield from self.tree(item, inner)
        finally:
            self._open.discard(id(value))

    def whole(self, value: Any) -> str:
        """One digest of a whole tree."""
        return _hash("".join(f"{name}={digest};" for name, digest in self.tree(value, "")).encode())

    def digest(self, value: Any) -> str | None:
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
            # The order of a set differs from one process to the next, without any difference in value.
            return self._many(value, sorted(value, key=repr))
        if isinstance(value, list | tuple | deque):
            return self._many(value, value)
        if isinstance(value, Mapping):
            return self._many(value, [element for item in value.items() for element in item])
        return None

    def hidden(self, value: Any, name: str, seen: set[int], depth: int = _DEPTH) -> Iterator[tuple[str, str]]:
        """What a user's object keeps in its attributes, and the objects in them, as far as they are the user's."""
        if not self._holds_objects(value) and (digest := self._kept(value)) is not None:
            yield name, digest
        elif depth and id(value) not in seen:
            seen.add(id(value))
            for key, item in _inside(value):
                yield from self.hidden(item, f"{name}{key}", seen, depth - 1)

    def of_generators(self, states: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
        """The states of random generators."""
        for generator, value in states.items():
            yield f"random.{generator}", self.whole(value)

    def of_state(self, trainer: Trainer) -> Iterator[tuple[str, str]]:
        """All state that a checkpoint holds, but for that of the data, and buffers that it does not hold."""
        state = capture(trainer, with_data=False)
        yield from self.of_generators(state.pop("rng"))
        for section, value in state.items():
            yield from self.tree(value, section)
        for name, buffer in unwrap(trainer.model).named_buffers():
            if name not in state["model"]:
                yield f"model.{name}{NOT_PERSISTENT}", str(self.digest(buffer))

    def of_model(self, model: nn.Module) -> Iterator[tuple[str, str]]:
        """Attributes of its modules that are neither parameters nor buffers, and which parameters are trained."""
        seen: set[int] = set()
        for path, module in model.named_modules():
            name = f"model.{path}" if path else "model"
            for key, value in _attributes(module):
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
        # The processes of a loader of ours have a generator, on which no sample depends.
        if not depth or id(value) in seen or isinstance(value, type | Workers):
            return
        top = type(value).__module__.partition(".")[0]
        if top == _OURS or isinstance(value, DataLoader | Sampler):
            seen.add(id(value))
            for key, item in _attributes(value):
                inner = name if top == _OURS or key == "dataset" else f"{name}.{key}"
                if top != _OURS and _generator_state(item) is not None:
                    yield inner, str(self.digest(item))
                else:
                    yield from self.of_data(item, inner, seen, depth - 1)
        elif is_users(type(value).__module__):
            yield from self.hidden(value, name, seen)

    def of_modules(self) -> Iterator[tuple[str, str]]:
        """Numbers, texts and generators that the user's modules keep as globals."""
        # Sorted: the order of imports may differ after a resume.
        for module_name, module in sorted(sys.modules.items()):
            if module is None or not is_users(module_name):
                continue
            # A copy: another thread of the user's may add a global meanwhile.
            for key, value in list(vars(module).items()):
                if not key.startswith("__"):
                    for inner, item in _parts_of_global(value, module_name):
                        if (digest := self._kept(item)) is not None:
                            yield f"{module_name}.{key}{inner}", digest

    def _holds_objects(self, value: Any) -> bool:
        """Whether a container has items without a value to compare, which are looked into one by one."""
        if not isinstance(value, Mapping | list | tuple) or len(value) > _MANY:
            return False
        items = value.values() if isinstance(value, Mapping) else value
        return any(self.digest(item) is None for item in items)

    def _kept(self, value: Any) -> str | None:
        """The digest of a value; a large tensor without a new version, or a large array, is not read again."""
        mark = _mark(value)
        if mark is None:
            return self.digest(value)
        known = self._known.get(value)
        if known is None or known[0] != mark:
            known = self._known[value] = mark, str(self.digest(value))
        return known[1]

    def _many(self, container: Collection[Any], values: Iterable[Any]) -> str | None:
        length = len(container)
        if length > _MANY:
            return f"{length} items"
        if id(container) in self._open:
            return _CYCLE
        self._open.add(id(container))
        try:
            digests = [self.digest(value) for value in values]
        finally:
            self._open.discard(id(container))
        # Functions and other objects alone, which have no value to compare.
        if digests and all(digest is None for digest in digests):
            return None
        text = f"[{', '.join(digest or '-' for digest in digests)}]"
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
    if file.startswith(("<", *_INSTALLED)) or not Path(file).is_file():
        return False
    return not any(_holds_packages(folder) for folder in sys.path if folder and file.startswith(f"{folder}/"))


@cache
def _holds_packages(folder: str) -> bool:
    """Whether pip has installed into a folder, such as one on PYTHONPATH."""
    return next(Path(folder).glob("*.dist-info"), None) is not None


_INSTALLED = tuple(
    f"{path}/"
    for path in {*(sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")),
                 str(Path(__file__).parents[2])}
)  # fmt: skip
_MODULE = frozenset(vars(nn.Module()))


def _mark(value: Any) -> tuple[Any, ...] | None:
    """What changes with a large tensor, or with the memory of a large array; None for what is read each time.

    Small tensors are: `tensor.data` and views of numpy change them without a new version.
    """
    if isinstance(value, np.ndarray):
        return (value.ctypes.data, value.shape) if value.nbytes > _LARGE else None
    if not isinstance(value, Tensor) or value.is_inference() or value.layout is not torch.strided:
        return None
    return (value.data_ptr(), value._version) if value.nbytes > _LARGE else None


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """Attributes of an object, and those of its classes that the user wrote."""
    attributes = dict(_slots(value))
    # From the base to the class itself, whose attributes hide those of the base.
    for owner in reversed(type(value).__mro__):
        if is_users(owner.__module__):
            attributes |= _class_attributes(owner)
    return list({**attributes, **getattr(value, "__dict__", {})}.items())


def _parts_of_global(value: Any, module_name: str) -> Iterator[tuple[str, Any]]:
    """A global of a module, and what is kept in a class or a function that is defined there; each with how it is
    written after the name."""
    yield "", value
    if isinstance(value, type) and value.__module__ == module_name:
        yield from ((f".{attribute}", item) for attribute, item in _class_attributes(value))
    elif isinstance(value, FunctionType) and value.__module__ == module_name:
        yield from _inside(value)


def _slots(value: Any) -> Iterator[tuple[str, Any]]:
    for owner in type(value).__mro__:
        for name, entry in vars(owner).items():
            if isinstance(entry, MemberDescriptorType) and is_users(owner.__module__) and hasattr(value, name):
                yield name, getattr(value, name)


def _class_attributes(owner: type) -> Iterator[tuple[str, Any]]:
    """What a class itself keeps: no methods, properties or other descriptors."""
    for name, entry in list(vars(owner).items()):
        if not name.startswith("__") and not callable(entry) and not hasattr(type(entry), "__get__"):
            yield name, entry


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """The parts of an object of the user's, of a container, and of a function that closes over variables; each with
    how it is written after the name."""
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in list(value.items())[:_MANY])
    elif isinstance(value, list | tuple):
        yield from ((f"[{number}]", item) for number, item in enumerate(value[:_MANY]))
    elif isinstance(value, MethodType):
        yield "", value.__self__
    elif isinstance(value, partial):
        yield from ((f"[{number}]", item) for number, item in enumerate((value.func, *value.args)))
        yield from ((f".{key}", item) for key, item in value.keywords.items())
    elif isinstance(value, FunctionType):
        if is_users(value.__module__):
            yield from ((f".{key}", item) for key, item in inspect.getclosurevars(value).nonlocals.items())
    elif not isinstance(value, type) and is_users(type(value).__module__):
        yield from ((f".{key}", item) for key, item in _attributes(value))


def _hash(data: bytes) -> str:
    return xxhash.xxh3_64_hexdigest(data)


def _tensor(value: Tensor) -> str:
    # The shard of this rank: to gather all of them would need every rank to take part.
    value = local_of(value).detach()
    if value.is_nested:
        return f"[{' '.join(_tensor(item) for item in value.unbind())}]"
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
        # It has no state: its getstate raises.
        return b""
    if isinstance(value, random.Random):
        return repr(value.getstate()).encode()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state).encode()
    if isinstance(value, np.random.RandomState):
        state = value.get_state()
        # The repr of a long array leaves its middle out.
        return repr([item.tobytes() if isinstance(item, np.ndarray) else item for item in state]).encode()
    return None
