"""Which lines of the user's files read a clock, an unseeded generator, or the worker they run in."""

from __future__ import annotations

import json
import os
import random
import sys
import uuid
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from types import FrameType
from typing import Any


class Asks(StrEnum):
    """What a call asks for."""

    clock = "clock"
    chance = "chance"
    worker = "worker"


@dataclass(frozen=True, slots=True)
class Call:
    """A call in a user's file."""

    asks: Asks
    what: str
    where: str
    """file:line"""


_BUILTIN: Mapping[str, tuple[Asks, str]] = {
    **{f"time.{name}": (Asks.clock, f"time.{name}()") for name in (
        "time", "time_ns", "perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "process_time", "localtime",
    )},
    **{f"None.{kind}.{name}": (Asks.clock, f"datetime.{kind}.{name}()") for kind, name in (
        ("datetime", "now"), ("datetime", "utcnow"), ("datetime", "today"), ("date", "today"),
    )},
    "posix.urandom": (Asks.chance, "os.urandom()"),
    "posix.getrandom": (Asks.chance, "os.getrandom()"),
    "None.Generator.seed": (Asks.chance, "torch.Generator.seed()"),
    "posix.getpid": (Asks.worker, "os.getpid()"),
}  # fmt: skip


@contextmanager
def recorded(file: Path, root: Path) -> Generator[None, None, None]:
    """Record such calls in a file while entered, each line of code once; in forked worker processes too.

    It uses the interpreter's profiling hook, which sees a function whatever name it was imported by.
    """
    import numpy as np
    import torch.utils.data

    from trainer_cli.testing.digests import is_users_file

    python = {
        random.Random.__init__.__code__: (Asks.chance, "random.Random()", "x"),
        random.Random.seed.__code__: (Asks.chance, "random.seed()", "a"),
        uuid.uuid4.__code__: (Asks.chance, "uuid.uuid4()", None),
        torch.seed.__code__: (Asks.chance, "torch.seed()", None),
        torch.utils.data.get_worker_info.__code__: (Asks.worker, "torch.utils.data.get_worker_info()", None),
    }
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    done: set[tuple[str, int, str]] = set()

    def note(asks: Asks, what: str, frame: FrameType | None) -> None:
        if frame is None or not is_users_file(frame.f_code.co_filename):
            return
        place = (frame.f_code.co_filename, frame.f_lineno, what)
        if place in done:
            return
        done.add(place)
        path = Path(place[0])
        shown = path.relative_to(root) if path.is_relative_to(root) else path
        os.write(descriptor, json.dumps(asdict(Call(asks, what, f"{shown}:{place[1]}"))).encode() + b"\n")

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        if event == "c_call":
            module = getattr(argument, "__module__", None)
            found = _BUILTIN.get(f"{module}.{getattr(argument, '__qualname__', '')}")
            if found is not None:
                note(*found, frame)
        elif event == "call" and (seen := python.get(frame.f_code)) is not None:
            asks, what, seed = seen
            if seed is None or frame.f_locals.get(seed) is None:
                note(asks, what, frame.f_back)

    default_rng = np.random.default_rng

    def watched(seed: Any = None) -> Any:
        if seed is None:
            note(Asks.chance, "numpy.random.default_rng()", sys._getframe(1))
        return default_rng(seed)

    np.random.default_rng = watched
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)
        np.random.default_rng = default_rng
        os.close(descriptor)


def read(file: Path) -> list[Call]:
    """The calls noted in a file, each once."""
    if not file.exists():
        return []
    lines = (json.loads(line) for line in file.read_text("utf-8").splitlines())
    return list(dict.fromkeys(Call(Asks(line["asks"]), line["what"], line["where"]) for line in lines))
