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
from trainer_cli.strict_json import strict_json
from trainer_cli.terminal import clear_status, line_width, painted, wrapped_message

_OURS = ("trainer_cli", "hydra", "omegaconf")
"""This package, and packages that only it calls: an error inside them is a fault of this package too."""
_MODULE_CALLS = ("_wrapped_call_impl", "_call_impl")
"""Functions by which torch calls each module."""
_COLOURS = {LOST: "yellow", HELP: "cyan"}
"""Label that begins a note -> its colour."""
_LEFT_OUT = "Calls within train and torch are left out; TRAIN_FULL_ERROR=1 shows them.\n"
_WORKER_TRACEBACK = "Original Traceback (most recent call last):\n"
"""In the message of an error from a data worker, the line before the traceback of the worker."""
_FRAME = re.compile(
    r'  File "(?P<file>.+)", line (?P<line>\d+), in (?P<function>.+)\n(?:    (?P<text>.+)\n)?(?:    .*\n)*'
)


def print_error(error: TrainError, *, whole: bool = False) -> None:
    """Print an error to stderr: the message, `-->` with the place, `help:` with the cure.

    Several mistakes are printed one after the other, followed by their number. With `whole` the traceback comes first.
    """
    if whole:
        print(without_secrets("".join(traceback.format_exception(error))), end="", file=sys.stderr)
    clear_status()
    mistakes = error.mistakes if isinstance(error, ConfigErrors) else (error,)
    blocks = ["\n".join(_format_error(mistake)) for mistake in mistakes]
    if len(mistakes) > 1:
        blocks.append(f"Found {len(mistakes)} mistakes.")
    print("\n\n".join(blocks), file=sys.stderr)


def print_json_error(error: Exception, exit_code: int) -> None:
    """Print an error to stdout as JSON on one line, with each mistake of the user."""
    if isinstance(error, TrainError):
        message, mistakes = str(error), error.mistakes if isinstance(error, ConfigErrors) else (error,)
    else:
        message, mistakes = f"{type(error).__name__}: {error}", ()
    names = {"message": "what", "where": "where", "source": "source", "cure": "cure", "code": "code"}
    listed = [{name: _plain(getattr(one, of, None)) for name, of in names.items()} for one in mistakes]
    print(strict_json({"error": without_secrets(message), "exit_code": exit_code, "mistakes": listed}))


def _plain(value: object) -> str | None:
    return None if value is None else without_secrets(str(value).rstrip())


def record_for_torchrun(error: TrainError) -> None:
    """Write the error into the file from which torchrun takes the root cause of a failed process.

    The format is that of `torch.distributed.elastic.multiprocessing.errors.record`.
    """
    if not (file := os.environ.get("TORCHELASTIC_ERROR_FILE")):
        return
    text = without_secrets(str(error))
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    # A failed write is ignored: torchrun also reports a process without this file.
    with suppress(OSError):
        Path(file).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}), "utf-8")


def _format_error(error: TrainError) -> Iterator[str]:
    """The lines of one mistake."""
    yield _wrap_after_label("error:", "red", without_secrets(error.what.rstrip()))
    if error.place:
        yield _format_location(error.place)
    if error.cure:
        yield _wrap_after_label("help:", "cyan", without_secrets(error.cure))


def _wrap_after_label(label: str, colour: str, text: str) -> str:
    """A text after a coloured label, wrapped to the terminal."""
    wrapped_text = wrapped_message(f"{label} {text}", line_width(sys.stderr))
    return f"{painted(label, colour, sys.stderr)}{wrapped_text.removeprefix(label)}"


def _format_location(location: str) -> str:
    """The line that says where a mistake is."""
    text = wrapped_message(f"  --> {without_secrets(location)}", line_width(sys.stderr))
    return text.replace("-->", painted("-->", "blue", sys.stderr), 1)


class _Crash(NamedTuple):
    """What is printed of an unexpected error."""

    traceback: str
    """Without the error itself."""
    message: str
    notes: list[str]
    frames: list[re.Match[str]]


def print_crash(error: BaseException, *, whole: bool = False) -> None:
    """Print the traceback of an unexpected error, then the error, the last line of the user's own code, and its notes.

    For a fault of this package it prints how to report it instead. Unless `whole`, the traceback begins at the first
    call of code that is neither of this package nor of torch, in most cases the user's, and leaves out the functions by
    which torch calls modules.
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
    users_frames = [frame for frame in crash.frames if _is_users_file(frame["file"])]
    lines = [_wrap_after_label("error:", "red", without_secrets(crash.message))]
    for frame in users_frames[-1:]:
        line = f": {frame['text']}" if frame["text"] else ""
        lines.append(_format_location(f"{_shorten_path(frame['file'])}:{frame['line']}, in {frame['function']}{line}"))
    for note in crash.notes:
        label = next((label for label in _COLOURS if note.startswith(label)), "")
        text = wrapped_message(without_secrets(note), line_width(sys.stderr))
        lines.append(f"{painted(label, _COLOURS[label], sys.stderr)}{text.removeprefix(label)}" if label else text)
    print("\n".join(lines), file=sys.stderr)


def _read_crash(error: BaseException, *, whole: bool) -> _Crash:
    """What is printed of an error: of one from a data worker, the traceback of the worker."""
    begin = None if whole else _first_foreign_call(error.__traceback__)
    summary = traceback.TracebackException(type(error), error, begin or error.__traceback__)
    heading = ""
    if begin is not None:
        # torch calls each module through two functions, which would fill a deep model's traceback.
        frames = [frame for frame in summary.stack if frame.name not in _MODULE_CALLS]
        summary.stack = traceback.StackSummary.from_list(frames)
        heading = _LEFT_OUT
    end, notes = "".join(summary.format_exception_only()), list(getattr(error, "__notes__", ()))
    text = f"{heading}{''.join(summary.format())}".removesuffix(end)
    caught, mark, worker_text = str(error).partition(_WORKER_TRACEBACK)
    worker_frames = list(_FRAME.finditer(worker_text)) if mark and not whole else []
    if worker_frames:
        stop = worker_frames[-1].end()
        # The worker's notes are further lines of its message.
        message, *worker_notes = worker_text[stop:].rstrip().split("\n")
        notes_of_both = [*worker_notes, *notes]
        # The calls in this process say nothing: those of the worker are shown from the user's first one on.
        users_frame = next((frame for frame in worker_frames if _is_users_file(frame["file"])), None)
        if users_frame is not None:
            calls = worker_text[users_frame.start() : stop]
            return _Crash(f"{caught}{_WORKER_TRACEBACK}{calls}", message, notes_of_both, worker_frames)
        if f"\n{HELP}" in worker_text:
            return _Crash(_LEFT_OUT, message, notes_of_both, [])
    if begin is None and not whole and any(note.startswith(HELP) for note in notes):
        # A note says what to do, and no call is the user's: the traceback would not help.
        text = _LEFT_OUT
    message = end.rstrip().removesuffix("\n".join(notes)).rstrip()
    return _Crash(text, message, notes, list(_FRAME.finditer(text)))


def _is_users_file(file: str) -> bool:
    """Whether a file is the user's: not of this package, an installed one, or Python."""
    folders = (str(Path(trainer_cli.__file__).parent), sysconfig.get_path("stdlib"))
    installed = {"site-packages", "dist-packages"}
    return not file.startswith((*folders, "<")) and installed.isdisjoint(Path(file).parts)


def _shorten_path(file: str) -> str:
    """The path, relative to the current folder if it is below it."""
    return os.path.relpath(file) if Path(file).is_relative_to(Path.cwd()) else file


def _is_ours(trace: TracebackType | None) -> bool:
    """Whether an error was raised by this package, rather than by a user's code or a library that it called."""
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    return _package_of(trace) in _OURS


def is_without_user_code(trace: TracebackType | None) -> bool:
    """Whether only this package, torch and Python's own modules were in the calls that led to an error."""
    known_packages = {*_OURS, "torch", "__main__", *sys.stdlib_module_names}
    while trace is not None and _package_of(trace) in known_packages:
        trace = trace.tb_next
    return trace is None


def _first_foreign_call(trace: TracebackType | None) -> TracebackType | None:
    """The first call of code outside this package and torch, or None."""
    while trace is not None and _package_of(trace) in (*_OURS, "torch", "__main__"):
        trace = trace.tb_next
    return trace


def _package_of(trace: TracebackType) -> str:
    """The top-level package whose code made a call."""
    return str(trace.tb_frame.f_globals.get("__name__")).partition(".")[0]
