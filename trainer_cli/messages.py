"""Handle this package's log messages: print them to stderr, and write them to a file."""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trainer_cli.errors import without_secrets
from trainer_cli.schema import LoggingConfig
from trainer_cli.signatures import checks_argument_names
from trainer_cli.terminal import clear_status, columns, is_terminal, painted, stamp, wrapped
from trainer_cli.values import check_values

if TYPE_CHECKING:
    from trainer_cli.files import AppendedFile

log = logging.getLogger(__name__)

ROOT = "trainer_cli"
SILENT = "critical"
"""The level at which nothing is printed."""
_COLOURS = {"warning": "yellow", "error": "red"}


class _StderrHandler(logging.Handler):
    """Write messages to sys.stderr: wrapped on a terminal, with the time in front elsewhere.

    Messages about what a progress bar shows are left out, unless the level is debug.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Write one message."""
        if getattr(record, "in_bar", False) and self.level > logging.DEBUG:
            return
        # Looked up at each message: tests and notebooks replace sys.stderr.
        stream, level = sys.stderr, record.levelname.lower()
        prefix = "" if record.levelno == logging.INFO else f"{level}: "
        try:
            text = f"{stamp(stream)}{prefix}{without_secrets(record.getMessage())}"
            if is_terminal(stream):
                clear_status()
                label_width = getattr(record, "indent", 0)
                text = wrapped(text, columns(stream) - 1, label_width or 2)
                # A row of a table begins with its label.
                if label_width:
                    text = painted(text[:label_width], "dim", stream) + text[label_width:]
                if level in _COLOURS:
                    text = painted(prefix[:-1], _COLOURS[level], stream) + text.removeprefix(prefix[:-1])
            stream.write(f"{text}\n")
        except OSError:
            self.handleError(record)


_MAX_KEPT = 10_000
"""Messages that are kept while the file cannot be written."""


class _Formatter(logging.Formatter):
    """Leaves values from the environment out, also of tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        return without_secrets(super().format(record))


class _FileHandler(logging.Handler):
    """Write messages to a file. If that fails, report it once; messages are kept, and written once that is possible."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._file: AppendedFile | None = None
        # The number is bounded: a full disk must not fill the memory.
        self._kept: deque[bytes] = deque(maxlen=_MAX_KEPT)
        self._failed = False

    def emit(self, record: logging.LogRecord) -> None:
        """Write the messages that were kept, and this one."""
        try:
            self._kept.append(f"{self.format(record)}\n".encode(errors="backslashreplace"))
            if self._file is None:
                # Imported here: only a run has a file of messages.
                from trainer_cli.files import AppendedFile

                self._file = AppendedFile(self._path)
            # A message is removed only after it is written, so that a failed write keeps it.
            while self._kept:
                self._file.append(self._kept[0])
                self._kept.popleft()
            self._failed = False
        except OSError as error:
            # Logging must not end a training, and the disk may have space again later.
            self._report_failure(error)
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        """Close the file. An error is reported, and not raised."""
        file, self._file = self._file, None
        try:
            if file is not None:
                file.close()
        except OSError as error:
            self._report_failure(error)
        super().close()

    def _report_failure(self, error: OSError) -> None:
        """Report the first error since the last message that was written."""
        if not self._failed:
            self._failed = True
            log.error("%s could not be written: %s. The run continues without it.", self._path, error.strerror)


def to_console(level: str) -> None:
    """Print messages of this package from `level` on to stderr; other packages' logging is unchanged."""
    logger = logging.getLogger(ROOT)
    for earlier in _find_stderr_handlers(logger):
        logger.removeHandler(earlier)
    handler = _StderrHandler()
    handler.setLevel(level.upper())
    logger.addHandler(handler)
    # The handlers filter: the file gets all messages.
    logger.setLevel(logging.DEBUG)
    logger.propagate = False


@contextmanager
def to_file(path: Path) -> Iterator[None]:
    """Write all messages of this package to the run's log as well; the file is made for the first."""
    handler = _FileHandler(path)
    handler.setFormatter(_Formatter("%(asctime)s %(levelname)-7s %(message)s"))
    logger = logging.getLogger(ROOT)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        handler.close()


@checks_argument_names("Logging")
@dataclass(frozen=True, slots=True)
class Logging:
    """What is printed while a trainer fits or evaluates.

    Args:
        level: messages from this level on (debug, info, warning or error) go to stderr; None: as Python's logging is
            set up.
        file: where all messages are appended; None: nowhere.
        console: how metrics are shown: auto (a bar and a table on a terminal and in a notebook; elsewhere only if the
            trainer has a ConsoleLogger), rich (the bar), plain (lines) or off.
    """

    level: str | None = None
    file: str | Path | None = None
    console: str = "auto"

    def __post_init__(self) -> None:
        level = {} if self.level is None else {"level": self.level}
        check_values(LoggingConfig, {"console": self.console, **level}, "logging")

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Show the messages while the block runs."""
        with ExitStack() as stack:
            if self.level is not None:
                logger = logging.getLogger(ROOT)
                stack.callback(
                    _restore, logger, _find_stderr_handlers(logger), logger.level, propagate=logger.propagate
                )
                to_console(self.level)
            if self.file is not None:
                stack.enter_context(to_file(Path(self.file)))
            yield


def _find_stderr_handlers(logger: logging.Logger) -> list[_StderrHandler]:
    """The handlers that `to_console` has added."""
    return [handler for handler in logger.handlers if isinstance(handler, _StderrHandler)]


def _restore(logger: logging.Logger, handlers: list[_StderrHandler], level: int, *, propagate: bool) -> None:
    """Undo a `to_console`: put these handlers, this level and `propagate` back."""
    for handler in _find_stderr_handlers(logger):
        logger.removeHandler(handler)
    for handler in handlers:
        logger.addHandler(handler)
    logger.setLevel(level)
    logger.propagate = propagate
