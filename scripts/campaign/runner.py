"""Runs the trials of classes one after the other, within a time; a call that was broken off goes on with the next."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from campaign.fault_class import FaultClass, Size, Trials
from campaign.verdict import Outcome, Verdict

LIMIT_S = {Size.quick: 165.0, Size.full: 570.0, Size.nightly: 3540.0}
"""Of all classes together. The rest of 3, 10 and 60 minutes is for the trials that run when it is over."""
SAVE_EVERY_S = 5.0
State = dict[str, Any]
"""commit, size, and by key of a class: count (None: not known yet), seconds, over (no trial is left to run), skipped,
trials: number -> the fields of an Outcome, prepared_s: what its last preparation took."""
_ROUNDS = 3
_LEAST_S = 3.0
"""A class is not prepared for less, nor for less than its preparation takes."""
_MEMORY, _MEMORY_BYTES = Path("/dev/shm"), 4 << 30
"""Where trials run if there is so much room, unless TMPDIR says where: a process that is killed leaves the same there
as on a disk, and a trial does not wait for the disk. What tests a disk brings its own file system."""


@dataclass(frozen=True)
class Campaign:
    """Classes to run, and where their state is kept."""

    classes: Sequence[FaultClass]
    size: Size
    commit: str
    state: Path
    limit_s: float
    clock: Callable[[], float] = time.monotonic

    def run(self) -> State:
        """Run what is left of each class; returns the state, which is also on the disk.

        Each class gets its share of the time; what is left then is shared by those that it was too short for.
        """
        state = self._unfinished()
        rows = state["classes"]
        for fault in self.classes:
            if self.size in fault.counts:
                rows.setdefault(
                    fault.key,
                    {"count": None, "seconds": 0.0, "over": False, "trials": {}, "skipped": None, "prepared_s": 0.0},
                )
        for _ in range(_ROUNDS):
            unfinished = [fault for fault in self.classes if fault.key in rows and not rows[fault.key]["over"]]
            for number, fault in enumerate(unfinished):
                left_s = self.limit_s - sum(row["seconds"] for row in rows.values())
                class_s = left_s * fault.share / sum(later.share for later in unfinished[number:])
                if class_s > max(_LEAST_S, rows[fault.key]["prepared_s"]):
                    self._run_class(fault, rows[fault.key], class_s, left_s, lambda: self._save(state))
                    self._save(state)
        return state

    def _run_class(
        self, fault: FaultClass, row: State, class_s: float, left_s: float, save: Callable[[], None]
    ) -> None:
        """Run trials for `class_s` seconds with the preparation, or half of that after a long one. None starts
        `left_s` seconds after now."""
        began, before = self.clock(), row["seconds"]
        # Counted, too: for other savers it starts their processes.
        row["skipped"] = fault.skipped()
        if row["skipped"] is None:
            saved = began

            def on_trial() -> None:
                nonlocal saved
                now = self.clock()
                row["seconds"] = round(before + now - began, 1)
                print_progress(fault, row)
                if now - saved > SAVE_EVERY_S:
                    saved = now
                    save()

            with tempfile.TemporaryDirectory(
                prefix="faults-", dir=folder_of_trials(), ignore_cleanup_errors=True
            ) as folder:
                print_progress(fault, row)
                try:
                    with fault.prepare(Path(folder), fault.counts.get(self.size, 0), self.size) as trials:
                        row["count"], row["prepared_s"] = trials.count, round(self.clock() - began, 1)
                        until = began + min(max(class_s, row["prepared_s"] + class_s / 2), left_s)
                        run_trials(trials, row["trials"], lambda: self.clock() < until, on_trial)
                except Exception as error:
                    row["trials"]["-1"] = [Verdict.hard_fail, f"not prepared: {describe(error)}", 0, 0.0]
                    row["count"] = 1
        row["seconds"] = round(before + self.clock() - began, 1)
        row["over"] = row["skipped"] is not None or len(row["trials"]) >= row["count"]
        print_progress(fault, row, is_end=True)

    def _unfinished(self) -> State:
        """What earlier calls have run of this commit in this size; else a beginning."""
        if self.state.exists():
            earlier: State = json.loads(self.state.read_text(encoding="utf-8"))
            if (earlier["commit"], earlier["size"]) == (self.commit, self.size):
                return earlier
        return {"commit": self.commit, "size": self.size, "classes": {}}

    def _save(self, state: State) -> None:
        self.state.parent.mkdir(parents=True, exist_ok=True)
        new = self.state.with_suffix(".new")
        new.write_text(json.dumps(state) + "\n", encoding="utf-8")
        os.replace(new, self.state)


def folder_of_trials() -> Path:
    """Where the folders of trials are made."""
    if "TMPDIR" not in os.environ and _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > _MEMORY_BYTES:
        return _MEMORY
    return Path(tempfile.gettempdir())


def run_trials(
    trials: Trials, outcomes: dict[str, Any], may_start: Callable[[], bool], on_trial: Callable[[], None]
) -> None:
    """Run the trials that have no outcome yet, several at once, and start none when `may_start` is False.

    In a fixed random order, so that what is left out for want of time is spread over an enumeration.
    """
    order = [number for number in range(trials.count) if str(number) not in outcomes]
    random.Random(0).shuffle(order)
    pending: dict[Future[Outcome], int] = {}
    with ThreadPoolExecutor(trials.together) as executor:
        while (order and may_start()) or pending:
            while order and len(pending) < trials.together and may_start():
                number = order.pop()
                pending[executor.submit(run_one, trials, number)] = number
            done, _ = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                outcome = future.result()
                outcomes[str(pending.pop(future))] = astuple(outcome)
            on_trial()


def run_one(trials: Trials, number: int) -> Outcome:
    """One trial; an exception is a HARD_FAIL."""
    try:
        return trials.run(number)
    except Exception as error:
        return Outcome(Verdict.hard_fail, describe(error))


def describe(error: BaseException) -> str:
    """An exception in a line, with the place of its last frame."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}"


def print_progress(fault: FaultClass, row: State, *, is_end: bool = False) -> None:
    """Rewrite the line of a class: how many trials, how many of each verdict, the time."""
    counts = Counter(verdict for verdict, *_ in row["trials"].values())
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    text = f"{fault.key}: {len(row['trials'])} of {row['count'] or '?'}, {row['seconds']:.0f} s: {verdicts}"
    if row["skipped"]:
        text = f"{fault.key}: skipped: {row['skipped']}"
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}")
    elif is_end:
        sys.stderr.write(text)
    if is_end:
        sys.stderr.write("\n")
    sys.stderr.flush()
