"""Print errors to stderr: a user's mistake as a message, anything else with its traceback."""

from __future__ import annotations

import json
import os
import re
import sys
import sysconfig
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import trainer_cli
from trainer_cli.errors import HELP, LOST, ConfigErrors, TrainError, without_secrets
from trainer_cli.terminal import clear_status, line_width, painted, wrapped_message

_OURS = ("trainer_cli", "hydra", "omegaconf")
"""This package, and packages that only it calls: an error inside them is a fault of this package too."""
_MODULE_CALLS = ("_wrapped_call_impl", "_call_impl")
"""Functions by which torch calls each module."""
_COLOURS = {LOST: "yellow", HELP: "cyan"}
"""Of the label that begins a note."""
_LEFT_OUT = "Calls within train and torch are left out; TRAIN_FULL_ERROR=1 shows them.\n"
_OF_WORKER = "Original Traceback (most recent call last):\n"
"""In the message of an error that a data worker has sent, what its own traceback follows."""
_FRAME = re.compile(
    r'  File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)\n(?:    (?P<text>.+)\n)?(?:    .*\n)*'
)


def print_error(error: TrainError, *, whole: bool = False) -> None:
    """Print an error to stderr: the message, `-->` with the place, `help:` with the cure.

    A list of mistakes is printed one after the other, followed by their number. `whole`: after the traceback.
    """
    if whole:
        print(without_secrets("".join(traceback.format_exception(error))), end="", file=sys.stderr)
    clear_status()
    mistakes = error.mistakes if isinstance(error, ConfigErrors) else (error,)
    blocks = ["\n".join(_lines(mistake)) for mistake in mistakes]
    if len(mistakes) > 1:
        blocks.append(f"Found {len(mistakes)} mistakes.")
    print("\n\n".join(blocks), file=sys.stderr)


def record_for_torchrun(error: TrainError) -> None:
    """Write the error into the file from which torchrun takes the root cause of a failed process, in the format of
    `torch.distributed.elastic.multiprocessing.errors.record`."""
    if not (file := os.environ.get("TORCHELASTIC_ERROR_FILE")):
        return
    text = without_secrets(str(error))
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    # torchrun shows a process without this file too.
    with suppress(OSError):
        Path(file).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}), "utf-8")


def _lines(error: TrainError) -> Iterator[str]:
    yield _wrapped_after("error:", "red", without_secrets(error.what.rstrip()))
    if error.place:
        yield _place_line(error.place)
    if error.cure:
        yield _wrapped_after("help:", "cyan", without_secrets(error.cure))


def _wrapped_after(label: str, colour: str, text: str) -> str:
    shown = wrapped_message(f"{label} {text}", line_width(sys.stderr))
    return f"{painted(label, colour, sys.stderr)}{shown.removeprefix(label)}"


def _place_line(place: str) -> str:
    shown = wrapped_message(f"  --> {without_secrets(place)}", line_width(sys.stderr))
    return shown.replace("-->", painted("-->", "blue", sys.stderr), 1)


class _Crash(NamedTuple):
    """What is printed of an unexpected error."""

    traceback: str
    """Without the error itself."""
    message: str
    notes: list[str]
    frames: list[re.Match[str]]


def print_crash(error: BaseException, *, whole: bool = False) -> None:
    """Print the traceback of an unexpected error; then the error, the last line of the user's own code, and what was
    lost; or how to report it if it is a fault of this package.

    Unless `whole`, the traceback begins at the first call of code that is neither of this package nor of torch, in
    most cases the user's, and leaves out the functions by which torch calls modules.
    """
    clear_status()
    crash = _read_crash(error, whole=whole)
    print(without_secrets(crash.traceback), end="", file=sys.stderr)
    if _is_ours(error.__traceback__):
        print(without_secrets("\n".join([crash.message, *crash.notes])), file=sys.stderr)
        print_error(
            TrainError(
                "this is a fault of train, not of your config or code",
                cure="Please report it, with the traceback above and the output of `train env`.",
            )
        )
        return
    own = [frame for frame in crash.frames if _is_own(frame["file"])]
    lines = [_wrapped_after("error:", "red", without_secrets(crash.message))]
    if own:
        line = f": {own[-1]['text']}" if own[-1]["text"] else ""
        place = f"{_shown_path(own[-1]['file'])}:{own[-1]['line']}, in {own[-1]['function']}{line}"
        lines.append(_place_line(place))
    for note in crash.notes:
        label = next((label for label in _COLOURS if note.startswith(label)), "")
        text = wrapped_message(without_secrets(note), line_width(sys.stderr))
        lines.append(f"{painted(label, _COLOURS[label], sys.stderr)}{text.removeprefix(label)}" if label else text)
    print("\n".join(lines), file=sys.stderr)


def _read_crash(error: BaseException, *, whole: bool) -> _Crash:
    begin = None if whole else _first_foreign_call(error.__traceback__)
    summary = traceback.TracebackException(type(error), error, begin or error.__traceback__)
    first = ""
    if begin is not None:
        # torch calls each module through two functions, which would fill a deep model's traceback.
        frames = [frame for frame in summary.stack if frame.name not in _MODULE_CALLS]
        summary.stack = traceback.StackSummary.from_list(frames)
        first = _LEFT_OUT
    end, notes = "".join(summary.format_exception_only()), list(getattr(error, "__notes__", ()))
    text = f"{first}{''.join(summary.format())}".removesuffix(end)
    caught, is_of_worker, of_worker = str(error).partition(_OF_WORKER)
    if is_of_worker and not whole:
        # The calls in this process say nothing: the worker's begin at the user's own.
        frames_of_worker = list(_FRAME.finditer(of_worker))
        own = next((frame for frame in frames_of_worker if _is_own(frame["file"])), None)
        if own is not None:
            stop = frames_of_worker[-1].end()
            # Its notes are lines of the text, as those of the message.
            message, *more = of_worker[stop:].rstrip().split("\n")
            return _Crash(
                f"{caught}{_OF_WORKER}{of_worker[own.start() : stop]}", message, [*more, *notes], frames_of_worker
            )
        if frames_of_worker and f"\n{HELP}" in of_worker:
            message, *more = of_worker[frames_of_worker[-1].end() :].rstrip().split("\n")
            return _Crash(_LEFT_OUT, message, [*more, *notes], [])
    if begin is None and not whole and any(note.startswith(HELP) for note in notes):
        # What to do is known, and no call is the user's.
        text = _LEFT_OUT
    message = end.rstrip().removesuffix("\n".join(notes)).rstrip()
    return _Crash(text, message, notes, list(_FRAME.finditer(text)))


def _is_own(file: str) -> bool:
    """Whether a file is the user's: not of this package, an installed one, or Python."""
    folders = (str(Path(trainer_cli.__file__).parent), sysconfig.get_path("stdlib"))
    installed = {"site-packages", "dist-packages"}
    return not file.startswith((*folders, "<")) and installed.isdisjoint(Path(file).parts)


def _shown_path(file: str) -> str:
    """The path, relative to the current folder if it is below it."""
    return os.path.relpath(file) if Path(file).is_relative_to(Path.cwd()) else file


def _is_ours(trace: TracebackType | None) -> bool:
    """Whether an error was raised by this package, rather than by a user's code or a library that it called."""
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    return _package(trace) in _OURS


def is_without_user_code(trace: TracebackType | None) -> bool:
    """Whether only this package, torch and Python's own modules were in the calls that led to an error."""
    known = {*_OURS, "torch", "__main__", *sys.stdlib_module_names}
    while trace is not None and _package(trace) in known:
        trace = trace.tb_next
    return trace is None


def _first_foreign_call(trace: TracebackType | None) -> TracebackType | None:
    """The first call of code outside this package and torch, or None."""
    while trace is not None and _package(trace) in (*_OURS, "torch", "__main__"):
        trace = trace.tb_next
    return trace


def _package(trace: TracebackType) -> str:
    return str(trace.tb_frame.f_globals.get("__name__")).partition(".")[0]
