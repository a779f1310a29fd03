"""Traces which modules hand one piece of work on: from the function where it begins to those in which it is done.

The definition of a walk is that of docs/architecture.md.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import trainer_cli

_ROOT = f"{Path(trainer_cli.__file__).parent}/"
_NOT_COUNTED = ("models/", "policy/", "schema/", "signatures/", "steps/", "values/", "layout/", "loads/", "files/")
_DOORS = ("config", "format", "storage")
_OTHER_WORK = {"trainer/training_log.py:TrainingLog.write"}
"""Where work begins that is none of the walks, and passes some of their stations."""
_SUBMIT, _RUN = "checkpoint/writer_thread.py:WriterThread.submit", "checkpoint/writer_thread.py:_run"
"""A job of the writer thread continues the stack of the call that submitted it."""


@dataclass(frozen=True, slots=True)
class Walk:
    """One piece of work, and what a trace of it found.

    Args:
        begins: the functions where it begins, as `folder/module.py:Class.method`.
        stations: the functions in which it is done, or for those outside of the package, `module:Class.method`.
    """

    begins: Collection[str]
    stations: Collection[str]
    callers: dict[str, str] = field(default_factory=dict)
    """Each module on a stack from a station up to a beginning -> the function that called into it."""
    reached: set[str] = field(default_factory=set)
    """The stations that the trace has met."""


@contextmanager
def traced(walks: Mapping[str, Walk]) -> Iterator[None]:
    """Trace walks while the block runs, in all threads that it starts."""
    tracer = _Tracer(walks.values())
    before = sys.getprofile()
    threading.setprofile(tracer)
    sys.setprofile(tracer)
    try:
        yield
    finally:
        sys.setprofile(before)
        threading.setprofile(None)


class _Tracer:
    """A profile function: it looks at the stack only where a station or a submit is called."""

    def __init__(self, walks: Collection[Walk]) -> None:
        self._walks = walks
        self._submitted: dict[int, list[str]] = {}
        """Job -> the functions on the stack of the call that submitted it."""
        self._names: dict[CodeType, str] = {}
        self._beginnings = {name for walk in walks for name in walk.begins} | _OTHER_WORK
        self._wanted = {_SUBMIT, *(station for walk in walks for station in walk.stations)}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call" or (name := self._name(frame)) not in self._wanted:
            return
        stack = self._stack(frame)
        if name == _SUBMIT:
            self._submitted[id(frame.f_locals["job"])] = stack
        for walk in self._walks:
            if name in walk.stations:
                _add(walk, name, stack, self._beginnings)

    def _name(self, frame: FrameType) -> str:
        code = frame.f_code
        if (name := self._names.get(code)) is None:
            file = code.co_filename
            module = file.removeprefix(_ROOT) if file.startswith(_ROOT) else frame.f_globals.get("__name__", "")
            name = self._names[code] = f"{module}:{code.co_qualname}"
        return name

    def _stack(self, frame: FrameType | None) -> list[str]:
        """The functions that led to a call, its own first; those of the submitting thread after those of a job."""
        names: list[str] = []
        while frame is not None:
            names.append(name := self._name(frame))
            if name == _RUN:
                return names + self._submitted.get(id(frame.f_locals["job"]), [])
            frame = frame.f_back
        return names


def make_signal_sender(step: int) -> Any:
    """A callback that sends SIGTERM to this process in a step, which is counted from 1."""
    from trainer_cli import Callback, Trainer

    class SignalSender(Callback):
        def on_train_step_end(self, trainer: Trainer, *_: Any) -> None:
            if trainer.progress.step == step - 1:
                signal.raise_signal(signal.SIGTERM)

    return SignalSender()


def _add(walk: Walk, station: str, stack: list[str], beginnings: Collection[str]) -> None:
    """Add the modules between a station and the nearest beginning above it, if that is one of this walk."""
    end = next((index for index, name in enumerate(stack) if name in beginnings), None)
    if end is None or stack[end] not in walk.begins:
        return
    walk.reached.add(station)
    # The functions of libraries between two modules of the package are no modules to open.
    names = [name for name in stack[: end + 1] if _module(name) is not None]
    for name, caller in zip(names, [*names[1:], "the test"], strict=True):
        module = _module(name)
        assert module is not None
        if module != _module(caller):
            walk.callers.setdefault(module, caller)


def _module(name: str) -> str | None:
    """The module of a function, or the folder behind whose door it is; None for what a walk does not count."""
    path = name.partition(":")[0]
    if "/" not in path or path.startswith(_NOT_COUNTED):
        return None
    return next((door for door in _DOORS if path.startswith(f"{door}/")), path)
