"""The errors people see, and the exit code of each.

    TrainError              1   the training failed
    ├── SaveError           1   a checkpoint could not be written; older ones are intact
    │   ├── NotDurableError 1   it is written, but a power cut may take it away
    │   └── NoSpaceError    1   the disk is full
    ├── FullDiskError      75   the disk is full, and the attempt has committed a checkpoint
    ├── StoreAwayError      1   an object store does not answer; an OSError too
    │   └── StoreRefusedError 1 it refuses a run that has reached it before
    ├── NotFiniteError      1   loss or weights hold NaN or infinity
    ├── UserError           2   a mistake in a command, a value, a file that is not there
    │   ├── ConfigError     2   a mistake in the composed config: location, source, code, message, hint
    │   └── UnfitStateError 2   a state does not fit what it is loaded into; a ValueError too
    ├── CheckpointError     3   checkpoints were demanded or exist, and none is valid
    │   ├── NoCheckpointError   there is nothing at its path; a FileNotFoundError too
    │   └── MissingStateError   it lacks what was asked for; a RuntimeError and a ValueError too
    └── RunDirectoryError   4   the run directory is in use, or another run's

Every message says what is wrong, where, and the cure. It is shown without a traceback (`commands/print_errors.py`); any
other exception is a fault of this program (or of the model) and is shown with its traceback.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum, StrEnum
from typing import Any

LOST = "lost:"
"""Beginning of the note of an error that says how much of the training is lost."""
HELP = "help:"
"""Beginning of the note of an error that says what to do, if it is known though the error is not of this package."""


class ExitCode(IntEnum):
    """Exit codes of the process, for schedulers and scripts."""

    DONE = 0
    FAILED = 1
    USER = 2
    NO_CHECKPOINT = 3
    RUN_DIRECTORY = 4
    STOPPED_EARLY = 75
    INTERRUPTED = 130


def describe_exit(code: int) -> str:
    """How a process ended: `exit code 1`, or `signal 9` for a negative code."""
    return f"signal {-code}" if code < 0 else f"exit code {code}"


class TrainError(Exception):
    """A failure reported in one message: `message (location). cure`. A message that ends in a new line is a table."""

    exit_code: ExitCode = ExitCode.FAILED
    source: str | None = None
    """Where the value that `where` names was set: `file:line` or `command line`."""

    def __init__(self, message: str, *, where: str | None = None, cure: str | None = None) -> None:
        super().__init__(message, where, cure)
        self.what = message
        self.where = where
        self.cure = cure

    def __reduce__(self) -> tuple[Any, ...]:
        # Pickle would call the constructor with `args`, but most of its parameters are keywords.
        state = dict(self.__dict__)
        if isinstance(self, OSError):
            state |= {name: getattr(self, name) for name in ("errno", "strerror", "filename")}
        return _restore_error, (type(self), self.args, state)

    @property
    def place(self) -> str:
        """Where it is wrong: the key path, unless the message names it already, and the source of its value."""
        where = self.where or ""
        is_in_message = f"'{where}'" in self.what or (self.source is not None and self.what.startswith(where))
        location = None if is_in_message else self.where
        return ", ".join(text for text in (location, self.source) if text)

    def __str__(self) -> str:
        # A table ends in a new line, which the location must not follow.
        text = self.what.rstrip()
        if location := self.place:
            text = f"{text.rstrip('.')} ({location})"
        # A table: the cure would be read as one more row if it stood on the last line.
        if self.what.endswith("\n"):
            return f"{text}\n{self.cure}" if self.cure else text
        if not text.endswith((".", "!", "?", ":")):
            text += "."
        return f"{text} {self.cure}" if self.cure else text


def _restore_error(kind: type[TrainError], args: tuple[Any, ...], state: dict[str, Any]) -> TrainError:
    """Make an error from what `TrainError.__reduce__` has stored."""
    error = kind.__new__(kind)
    error.args = args
    for name, value in state.items():
        setattr(error, name, value)
    return error


def as_clause(error: BaseException) -> str:
    """The message of an error without its final stop, for the middle of a sentence."""
    return (str(error) or type(error).__name__).rstrip(".")


_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"'`])|\n")


def first_sentence(text: str) -> str:
    """The first sentence of a text, which says what went wrong; the next ones say what to do."""
    return _SENTENCE_END.split(text.strip(), maxsplit=1)[0]


_MIN_SECRET_LETTERS = 6
"""Shorter values are words such as `cuda` or counts, which occur in messages on their own."""
_shown_for: dict[str, str] = {}
"""Value -> what is shown for it: for one from the environment its expression, such as `${oc.env:TOKEN}`."""
_shown_paths: list[str] = []


def replace_in_messages(value: str, shown: str) -> None:
    """Show another text in place of a value in all messages of this process from now on: in place of a value from the
    environment its expression, and of a temporary folder the one that it stands for."""
    if len(value) >= _MIN_SECRET_LETTERS and not any(value in path for path in _shown_paths):
        # Messages quote values, which escapes some characters.
        _shown_for.update(dict.fromkeys((value, repr(value)[1:-1]), shown))


def show_values_in(*paths: str | None) -> None:
    """Show the values in these paths as they are, now and when they are read again."""
    _shown_paths.extend(path for path in paths if path)
    for value in [value for value in _shown_for if any(value in path for path in _shown_paths)]:
        del _shown_for[value]


def forget_secrets() -> None:
    """Forget the values that an earlier command of this process has read."""
    _shown_for.clear()
    _shown_paths.clear()


def without_secrets(text: str) -> str:
    """A message with the expression in place of each value from the environment."""
    # The longest first: one value may be a part of another.
    for value in sorted(_shown_for, key=len, reverse=True):
        text = text.replace(value, _shown_for[value])
    return text


def one_line(text: str) -> str:
    """A text from a file, safe in a message: line ends and control characters, which a terminal obeys, become `?`."""
    return "".join(char if char.isprintable() else "?" for char in text)


class SaveError(TrainError):
    """A checkpoint could not be written. What was committed before is untouched."""


class NotDurableError(SaveError):
    """A checkpoint has its name and all its bytes, but the fsync of the directory that holds it failed."""


class NoSpaceError(SaveError):
    """A checkpoint could not be written because the disk, or the user's share of it, is full."""


class FullDiskError(TrainError):
    """The disk is full. The run can be resumed from a checkpoint of this attempt once there is space."""

    exit_code = ExitCode.STOPPED_EARLY


NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
OF_ONE_FILE = (errno.EACCES, errno.EPERM, errno.ENAMETOOLONG)
"""Errors that say nothing about a disk: a user's code may meet them at any file."""
DISK_CURES = {
    errno.ENOSPC: "Free some space on the disk.",
    errno.EDQUOT: "Free some space, or have the quota raised.",
    errno.EFBIG: "Raise the limit on the size of a file (ulimit -f).",
    errno.EIO: "Check the disk and its file system.",
    errno.EROFS: "The file system is read-only: check it and its disk, or mount it for writing.",
    errno.EBUSY: "It is in use: try again later.",
    errno.ESTALE: "Check the file system and the server that it is mounted from.",
    errno.EACCES: "Check who may read and write the file and its directory.",
    errno.EPERM: "Check that the directory is writable, and that the file is not immutable.",
    errno.ENAMETOOLONG: "Choose a shorter name or path.",
}
"""What to do about errors of a disk, by errno; none of these is a fault of the program."""


def disk_cure(error: OSError) -> str:
    """What to do about an error of writing to a directory, or of sending to an object store."""
    if isinstance(error, StoreAwayError):
        return str(error.cure)
    return DISK_CURES.get(error.errno or 0, "Check that the directory is writable.")


class StoreAwayError(TrainError, OSError):
    """An object store did not answer, or refused, as often as was tried."""

    def __init__(
        self, message: str, *, where: str, cure: str = "Check the network and the address of the store."
    ) -> None:
        super().__init__(message, where=where, cure=cure)
        # OSError's own constructor takes the arguments of TrainError for those of its own.
        self.errno, self.strerror, self.filename = errno.EIO, message, None


class StoreRefusedError(StoreAwayError):
    """An object store refuses a run that has reached it before, for example because its credentials have expired."""


class NotFiniteError(TrainError):
    """The loss, or the weights at the end, are NaN or infinite, so training cannot continue."""

    rows: tuple[int, ...] = ()
    """Positions in the last batch of samples that hold NaN, as far as they were looked for."""


class UserError(TrainError):
    """A mistake that the user can correct: nothing was lost."""

    exit_code = ExitCode.USER


class UnfitStateError(UserError, ValueError):
    """A state does not fit the objects that it would be loaded into."""


class Code(StrEnum):
    """Kind of mistake that a ConfigError reports, for programs that read it."""

    unknown_key = "unknown_key"
    unknown_option = "unknown_option"
    wrong_type = "wrong_type"
    wrong_value = "wrong_value"
    not_given = "not_given"
    unresolved = "unresolved"
    no_effect = "no_effect"
    yaml = "yaml"
    defaults_list = "defaults_list"
    override = "override"
    target = "target"
    argument = "argument"
    several = "several"


class ConfigError(UserError):
    """A mistake in the config.

    `location` is the key path, `source` where its value was set (`file:line`, `command line`, `default`).
    """

    def __init__(
        self,
        message: str,
        *,
        location: str | None = None,
        source: str | None = None,
        code: Code = Code.wrong_value,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, where=location, cure=hint)
        self.source = source
        self.code = code

    @property
    def message(self) -> str:
        """What is wrong."""
        return self.what

    @property
    def location(self) -> str | None:
        """The key path, if the mistake is at one."""
        return self.where

    @property
    def hint(self) -> str | None:
        """What to write instead."""
        return self.cure

    def at(self, source: str) -> ConfigError:
        """A copy of this error with the source of its value."""
        return ConfigError(self.message, location=self.location, source=source, code=self.code, hint=self.hint)


class ConfigErrors(ConfigError):
    """Several mistakes in the config, reported together."""

    def __init__(self, mistakes: Sequence[ConfigError]) -> None:
        listed = "\n".join(f"  - {mistake}" for mistake in mistakes)
        super().__init__(f"{len(mistakes)} mistakes:\n{listed}\n", code=Code.several)
        self.mistakes = tuple(mistakes)


def raise_all(mistakes: Sequence[ConfigError]) -> None:
    """Raise the mistakes as one error, without repetitions; return if the list is empty."""
    # Several checks may find one mistake. A dict keeps the first of equal ones in its place.
    mistakes = list({str(mistake): mistake for mistake in mistakes}.values())
    if len(mistakes) > 1:
        raise ConfigErrors(mistakes)
    if mistakes:
        raise mistakes[0]


class CheckpointError(TrainError):
    """No valid checkpoint where one was demanded, or where there are only damaged ones."""

    exit_code = ExitCode.NO_CHECKPOINT


class NoCheckpointError(CheckpointError, FileNotFoundError):
    """There is nothing at the path of a checkpoint."""

    def __init__(self, message: str, *, where: str | None = None, cure: str | None = None) -> None:
        super().__init__(message, where=where, cure=cure)
        self.errno, self.filename = errno.ENOENT, where


class MissingStateError(CheckpointError, RuntimeError, ValueError):
    """A checkpoint lacks what was asked for."""


class RunDirectoryError(TrainError):
    """The run directory is in use by another process, or belongs to something else."""

    exit_code = ExitCode.RUN_DIRECTORY


@contextmanager
def second_to(first: BaseException) -> Iterator[None]:
    """Add an exception inside the block as a note to `first`, instead of raising it."""
    try:
        yield
    except Exception as error:
        first.add_note(f"and then {type(error).__name__}: {error}")
