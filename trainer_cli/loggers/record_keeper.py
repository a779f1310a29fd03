"""Keep the records that a logger cannot write, for example on a full disk, and write them later.

A service must end up with each record once, although it cannot remove any. After a resume the keeper asks it for its
last step: what an earlier process could not send is sent from `metrics.jsonl`, and what it has is not sent again.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing

from trainer_cli.errors import TrainError
from trainer_cli.loggers.base import Logger, Record, RunFacts
from trainer_cli.steps import RunStatus
from trainer_cli.terminal import format_count

log = logging.getLogger(__name__)

_MOST_BYTES = 64 * 1024 * 1024
"""Limit of the estimated memory of the records kept for one logger."""
_RETRY_S = 10.0
_RETRY_FACTOR = 20
"""Multiple of the time of a failed attempt before the next one: a training waits for a service 5 % of its time."""
_WRITE_S = 1.0
"""Limit of the time in which kept records are written. The training then continues for at least as long before the next
attempt, because a stop, and other ranks, wait for the end of a step."""
_CLOSE_S = 60.0
"""The same limit at the end of a run, where no step waits."""
_MOST_REFUSALS = 3
"""Refusals by a service after which a record is dropped, so that it does not block the records after it."""

_OF_PATH = (FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)
"""Errors at a path that the user may have given. FileNotFoundError is not among them: the run directory may be gone."""


class RecordKeeper:
    """Passes records to one logger, in order and each once. All methods but `flush` are called by the main thread.

    Failures of a service never end a training. Those of a disk do unless `tolerant`.

    Args:
        name: name of the logger, for messages.
        clock: returns seconds.
    """

    def __init__(self, name: str, logger: Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self.name, self.logger = name, logger
        self.tolerant = False
        self._clock = clock
        self._kept: deque[Record] = deque()
        self._kept_bytes = self._dropped = self._refusals = 0
        self._retry_at = 0.0
        self._failing = False
        self._is_started = False
        self._unstarted: RunFacts | None = None
        """The facts of a start that failed and is retried."""
        self._rewound_to: int | None = None
        """The step of the last rewind; None before the first."""
        self._sent_step = -1
        """Records up to this step are at the service already, with the same values."""

    def start(self, facts: RunFacts, keep: int | None) -> None:
        """Start the logger, after a rewind of it and of the kept records to step `keep` (None: no rewind).

        Raises:
            TrainError: a service cannot be reached at the start of a new run.
        """
        if keep is not None:
            self._kept = deque(record for record in self._kept if record.step <= keep)
            self._kept_bytes = sum(map(_size_bytes, self._kept))
            # The record that was refused may be dropped now.
            self._refusals = 0
            if facts.run_dir is not None:
                self.logger.rewind(facts.run_dir, keep)
            else:
                self.logger.rewind_shared(keep)
        self._rewound_to, self._sent_step = keep, -1
        began = self._clock()
        try:
            self._start(facts)
        except TrainError:
            # A mistake of the user, such as a package that is not installed: a retry would not help.
            raise
        except Exception as error:
            if not self._tolerates(error) and not isinstance(error, _OF_PATH):
                raise
            if facts.start_step == 0 or not self._tolerates(error):
                cure = f"Check its settings, or switch it off: loggers.{self.name}=null."
                raise TrainError(f"the logger {self.name} cannot be started: {_line(error)}", cure=cure) from error
            self._unstarted = facts
            self._fail(error, began)
        else:
            self._unstarted = None
            if self._kept:
                self._write()

    def log(self, record: Record) -> None:
        """Write a record, after those kept from before."""
        if record.step <= self._sent_step:
            return
        if not self._kept and not self._failing:
            began = self._clock()
            try:
                self.logger.log(record)
                return
            except Exception as error:
                if not self._tolerates(error):
                    raise
                self._fail(error, began)
        # Kept first, so that it is written after the records before it.
        self._keep_record(record)
        if self._clock() >= self._retry_at:
            self._write()

    def flush(self, *, durable: bool) -> None:
        """See `Logger.flush`. Another thread may call it with `durable`."""
        # Not if `durable`, where this may be another thread: the kept records belong to the main thread.
        if not durable and self._kept and self._clock() >= self._retry_at:
            self._write()
        if self._unstarted is not None:
            return
        try:
            self.logger.flush(durable)
        except Exception as error:
            if not self._tolerates(error):
                raise
            self._warn(error)

    def close(self, status: RunStatus | None = None) -> None:
        """Try to write the kept records once more, and close the logger.

        Args:
            status: how the run ended; None: it has not.
        """
        try:
            if self._kept:
                self._write(_CLOSE_S)
        except BaseException as error:
            status = status and RunStatus.after(error)
            raise
        finally:
            if self._kept or self._dropped:
                lost = format_count(len(self._kept) + self._dropped, "record")
                log.error("%s lacks %s, which could not be written", self.name, lost)
            self._close_logger(status)

    def _close_logger(self, status: RunStatus | None) -> None:
        """Note how the run ended, if it has, and close the logger. An error of a service is logged."""
        try:
            with closing(self.logger):
                is_started, self._is_started = self._is_started, False
                if status is not None and is_started:
                    self.logger.note_end(status)
        except Exception as error:
            if not self._tolerates(error):
                raise
            if not self._failing:
                log.warning("%s cannot be closed: %s", self.name, _line(error))

    def _start(self, facts: RunFacts) -> None:
        """Start the logger. After a rewind, compare the last step of a service with it: keep the records that the
        service lacks, and do not send those again that it has already."""
        self.logger.start(facts)
        self._is_started = True
        if not self.logger.is_remote or self._rewound_to is None:
            return
        if (last_step := self.logger.last_step()) is None:
            return
        if last_step <= self._rewound_to:
            self._keep_missing(facts, last_step)
        elif facts.repeats:
            self._sent_step = last_step
            log.info("%s has the records up to step %d, which are not sent again", self.name, last_step)
        else:
            log.warning(
                "%s has records up to step %d of an earlier attempt. From step %d on they may have other values now: "
                "they are sent again, beside those",
                self.name, last_step, self._rewound_to + 1,
            )  # fmt: skip

    def _keep_missing(self, facts: RunFacts, last_step: int) -> None:
        """Keep the records that an earlier process has logged after `last_step` and up to the rewind, to be written
        before all others."""
        # Not above: only after a resume, and only with a service.
        from trainer_cli.loggers.text_files import METRICS_FILE, read_records

        assert self._rewound_to is not None
        until = min([self._rewound_to, *(record.step - 1 for record in self._kept)])
        if facts.run_dir is None or last_step >= until:
            return
        later_records, self._kept, self._kept_bytes = self._kept, deque(), 0
        count = 0
        try:
            for record in read_records(facts.run_dir / METRICS_FILE, last_step, until):
                self._keep_record(record)
                count += 1
        finally:
            # Also after a failed read.
            for record in later_records:
                self._keep_record(record)
        if count:
            records = format_count(count, "record")
            log.info("%s lacks %s up to step %d, sent now from %s", self.name, records, until, METRICS_FILE)
        elif not (facts.run_dir / METRICS_FILE).exists():
            log.warning(
                "%s may lack records up to step %d: there is no %s from which to send them",
                self.name, until, METRICS_FILE,
            )  # fmt: skip

    def _write(self, limit_s: float = _WRITE_S) -> None:
        """Write kept records until one cannot be written, or the limit of the time is reached."""
        began = self._clock()
        try:
            if self._unstarted is not None:
                self._start(self._unstarted)
                self._unstarted = None
            while self._kept and self._clock() - began < limit_s:
                # Removed only after it is written: an error in between must not lose it.
                if self._kept[0].step > self._sent_step:
                    self.logger.log(self._kept[0])
                self._kept_bytes -= _size_bytes(self._kept.popleft())
                self._refusals = 0
        except Exception as error:
            if not self._tolerates(error):
                raise
            self._fail(error, began)
            if self._refusals >= _MOST_REFUSALS:
                self._drop_oldest()
        else:
            if self._failing:
                self._failing = False
                log.info("%s is written again", self.name)
            now = self._clock()
            self._retry_at = now + (now - began)

    def _keep_record(self, record: Record) -> None:
        """Keep a record, and drop the oldest ones if all take too much memory."""
        self._kept.append(record)
        self._kept_bytes += _size_bytes(record)
        while self._kept_bytes > _MOST_BYTES and len(self._kept) > 1:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        """Drop the oldest kept record, with a warning at the first one."""
        self._kept_bytes -= _size_bytes(self._kept.popleft())
        self._dropped, self._refusals = self._dropped + 1, 0
        if self._dropped == 1:
            log.warning("%s: the oldest records that could not be written are dropped", self.name)

    def _tolerates(self, error: Exception) -> bool:
        """Whether an error of the logger does not end the training."""
        return self.logger.is_remote or (self.tolerant and isinstance(error, OSError))

    def _fail(self, error: Exception, began: float) -> None:
        """Count a failed attempt, warn if the one before had succeeded, and set the time of the next attempt.

        Args:
            began: when the attempt began; the training has waited since.
        """
        # An OSError means that nothing can be written now; another error may be about the oldest record.
        self._refusals += self._unstarted is None and not isinstance(error, OSError)
        now = self._clock()
        self._retry_at = now + max(_RETRY_S, _RETRY_FACTOR * (now - began))
        if not self._failing:
            self._failing = True
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        """Warn that records are kept until the logger can write them."""
        log.warning(
            "%s cannot be written: %s. Training continues; the records are kept and written later",
            self.name, _line(error),
        )  # fmt: skip
        log.debug("%s failed", self.name, exc_info=error)


def _line(error: Exception) -> str:
    """The first line of an error, at most 300 characters."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def _size_bytes(record: Record) -> int:
    """Estimated memory of a record."""
    arrays = sum(array.nbytes for media in (record.images, record.histograms) for array in media.values())
    texts = sum(map(len, record.texts.values())) + 100 * sum(len(table.rows) for table in record.tables.values())
    return 500 + 150 * len(record.metrics) + arrays + texts
