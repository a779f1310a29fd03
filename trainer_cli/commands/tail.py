"""`train tail RUN [-f]`: the last log lines and metrics of a run, merged by time, and new ones until the run ends."""

from __future__ import annotations

import argparse
import heapq
import sys
import time
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path

from trainer_cli.errors import UserError, one_line
from trainer_cli.files import GrowingFile
from trainer_cli.layout import in_runs
from trainer_cli.patterns import did_you_mean
from trainer_cli.runs import MessageFilter, Run, RunDir, RunsBelow
from trainer_cli.strict_json import strict_json
from trainer_cli.terminal import line_width, wrapped

EXAMPLES = """examples:
  train tail runs/digits         the last 10 lines
  train tail -n 50 runs/digits   the last 50
  train tail -f runs/digits      and those that follow, until the run ends
  train tail --json runs/digits  for programs: one JSON object a line
"""
_POLL_S = 0.5
"""Pause between two reads of the files."""
_RUNS = Path("runs")
_FIRST_LINES = 100
_RESUME_RECORDS = 1000
"""Records to read again after a resume has cut the file back: more than a run makes between two reads."""
_HIDDEN = ("step", "epoch", "time")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="a run's directory")
    parser.add_argument("-f", "--follow", action="store_true", help="print new lines as they come, until the run ends")
    parser.add_argument("-n", "--lines", type=int, default=10, metavar="N", help="begin with the last N lines (10)")
    parser.add_argument(
        "--json", action="store_true", help="print JSON: time and text of each message, metrics of each record"
    )


def run(args: argparse.Namespace) -> int:
    """Print the lines. With `--follow` Ctrl-C ends it too."""
    if args.lines < 0:
        raise UserError(f"--lines is {args.lines}, but it cannot be negative")
    if not RunDir(args.run_dir).exists_as_run():
        raise no_run(args.run_dir)
    try:
        _print(args.run_dir, args.lines, follow=args.follow, as_json=args.json)
    except KeyboardInterrupt:
        if not args.follow:
            raise
    return 0


def _print(path: Path, most: int, *, follow: bool, as_json: bool) -> None:
    """Print the last `most` lines, with `follow` new ones until the run ends, then the state of an ended run."""
    tail, run = Tail(path, most, as_json=as_json), RunDir(path)
    while True:
        # This comes before reading: the last lines of a run that ends now must be printed.
        continues = follow and run.is_locked()
        lines = tail.read()
        if lines:
            print(wrapped("\n".join(lines), line_width(sys.stdout), indent=4), flush=True)
        if not continues:
            break
        time.sleep(_POLL_S)
    # The log has the error that ended a run only as a traceback, at the level debug.
    view = Run(path).look(time.time())
    if view is not None and (view.state == view.UNREADABLE or not run.is_locked()):
        if as_json:
            print(strict_json({"state": view.state, "step": view.step, "reason": view.reason, "problem": view.problem}))
            return
        step = "" if view.step is None else f" at step {view.step:,}"
        print(f"{view.state}{step}" + (f": {view.reason}" if view.reason else ""))
        if view.problem:
            print(view.problem)


def no_run(path: Path) -> UserError:
    """The error for a path without a run, with the nearest run below `runs`."""
    known_runs = [str(run.path) for run in RunsBelow(_RUNS).find()]
    path_in_runs = in_runs(str(path))
    cure = did_you_mean(str(path), known_runs).strip()
    if path_in_runs is not None:
        cure = f"Did you mean '{path_in_runs.partition('@')[0]}'?"
    return UserError(f"{path} holds no run", cure=cure or "`train top DIR` lists the runs below a folder.")


class Tail:
    """Follows `train.log` and `metrics.jsonl` of a run. With `as_json` a line is a JSON object.

    Messages of the level debug are shown only with `logging.level=debug`.
    """

    def __init__(self, run: Path, most: int, *, as_json: bool = False) -> None:
        self._most: int | None = most
        self._as_json = as_json
        section = RunDir(run).values.get("logging")
        self._shows_debug = isinstance(section, dict) and section.get("level") == "debug"
        self._messages = MessageFilter(shows_debug=self._shows_debug)
        self._log_file = RunDir(run).log_file
        self._log: GrowingFile | None = None
        # More than are shown: the records before a resume's cut must be known, or they would be printed twice.
        self._metrics = GrowingFile(RunDir(run).metrics_file, max(most, _RESUME_RECORDS))
        self._metrics_time = 0.0

    def read(self) -> list[str]:
        """The last `most` lines at the first call, then those that were added since the last call.

        A resume drops the records after its checkpoint. Those that it makes again are returned again.

        Raises:
            OSError: a file cannot be read.
        """
        # Each file is in the order of time already, so that nothing needs to be sorted.
        merged = heapq.merge(self._read_log(), self._read_records(), key=lambda line: line[0])
        lines = [text for _, text in merged]
        # Only the first call is limited: later ones return what was added, however much it is.
        most, self._most = self._most, None
        return lines if most is None else lines[max(0, len(lines) - most) :]

    def _read_log(self) -> list[tuple[float, str]]:
        """Time and text of the lines of the log: at the first call at least the last `most`, then new ones."""
        if self._log is not None:
            return list(self._filter_messages(self._log.read().lines))
        count, most = _FIRST_LINES, self._most or 0
        while True:
            # As many lines as it takes: any number of them may belong to messages that are not shown.
            self._log = GrowingFile(self._log_file, count)
            self._messages = MessageFilter(shows_debug=self._shows_debug)
            lines = self._log.read().lines
            shown = list(self._filter_messages(lines))
            if len(shown) >= most or len(lines) < count:
                return shown
            count *= 4

    def _filter_messages(self, lines: Iterable[bytes]) -> Iterator[tuple[float, str]]:
        """Time and text of the lines of the log that are shown."""
        for time_s, text in self._messages.shown(lines):
            yield time_s, strict_json({"time": time_s, "message": text}) if self._as_json else one_line(text)

    def _read_records(self) -> Iterator[tuple[float, str]]:
        """Time and text of the new records."""
        try:
            new = self._metrics.read_rows("step", "time")
        except OSError:
            # The state of the run, which is printed last, says why; the log is shown all the same.
            return
        last_shown = self._metrics_time
        for record in new.rows:
            at, step = record["time"], record["step"]
            try:
                values = {name: float(value) for name, value in record.items() if name not in _HIDDEN}
            except (ValueError, TypeError, OverflowError):
                # Not written by this package.
                continue
            # After a resume has cut the file, it is read from its beginning.
            if new.restarted and at <= last_shown:
                continue
            self._metrics_time = at
            if self._as_json:
                yield at, strict_json(record)
                continue
            day = datetime.fromtimestamp(at).isoformat(" ", "milliseconds").replace(".", ",")
            words = [f"step {step:,}", *(f"{name} {value:.4g}" for name, value in values.items())]
            yield at, f"{day} METRICS {'  '.join(words)}"
