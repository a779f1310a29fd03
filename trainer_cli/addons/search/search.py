"""A search: its trials, their record on the disk, and which of them train now."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainer_cli.addons.search.trials import Trials
from trainer_cli.errors import UserError
from trainer_cli.files import AppendedFile, read_rows, replace
from trainer_cli.search_parts import Trial


class Search:
    """Chooses trials one by one; each row of the record is written before anything follows from it.

    Args:
        file: the record, which a sweep that was killed continues.
        rules: keys of the config by which is decided -> values, which must stay as they are.
        begin: gets the trials so far, by KEY; returns KEY and values of another one, or None if there is none.
        restore: whether a recorded trial, of this KEY and these values, is one of this command.
    """

    def __init__(
        self,
        file: Path,
        rules: Mapping[str, Any],
        begin: Callable[[Mapping[str, Trial]], tuple[str, Mapping[str, Any]] | None],
        restore: Callable[[str, Mapping[str, Any]], bool],
    ) -> None:
        self._begin = begin
        first, *rows = read_rows(file) or [dict(rules)]
        if changed := [key for key, value in rules.items() if first.get(key) != value]:
            raise UserError(
                f"{file} was made with {changed[0]}={first.get(changed[0])}, not {rules[changed[0]]}",
                where=changed[0],
                cure="What was decided remains: set it as before, or begin another search with name=OTHER.",
            )
        own = {row["trial"] for row in rows if row["event"] == "begin" and restore(row["trial"], row["values"])}
        prune, eta, rungs = (rules[f"sweep.{name}"] for name in ("prune", "eta", "rungs"))
        self._trials = Trials(prune, eta, rungs, (row for row in rows if row["trial"] in own))
        # Again as a whole: a power failure may have left a part of the last row.
        replace(file, (_to_line(row) for row in (first, *rows)))
        self._file = AppendedFile(file)
        self._running: set[str] = set()
        self._left: set[str] = set()
        """Trials that have failed, or were stopped, in this command."""
        self._killed: set[str] = set()

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left to train."""
        trials = self._trials
        return not trials.list_unfinished() and trials.choose(is_idle=True) is None and self._draw() is None

    def choose(self) -> tuple[str, str | None] | None:
        """KEY of the trial to train now, and the rung at which it pauses, None for its end; None if none can."""
        key = self._choose()
        if key is None:
            return None
        self._running.add(key)
        rungs, aim = self._trials.rungs, self._trials.aims[key]
        return key, rungs[aim] if aim < len(rungs) else None

    def measure(self, key: str, metric: str, loss: float | None, step: int | None) -> None:
        """Record that a trial has reached its rung, or its end.

        Args:
            loss: the metric, turned so that less is better; None if it is not finite.
        """
        aim = self._trials.aims[key]
        row = {"event": "measure", "trial": key, "rung": aim, "loss": loss, "metric": metric, "step": step}
        self._record(row)
        self._running.discard(key)

    def follow(self, key: str, step: int | None) -> None:
        """A paused trial that has been trained further than its rung, by hand, goes on to its end.

        Its best value until the next rung is unknown.
        """
        trials = self._trials
        if step is not None and step > trials.paused_at.get(key, step):
            why = f"it was trained to step {step} by hand"
            self._record({"event": "go on", "trial": key, "rung": len(trials.rungs), "why": why})

    def leave(self, key: str, *, is_killed: bool = False) -> None:
        """A trial has failed, or was stopped: the next command begins with it. A killed one is chosen again once."""
        self._running.discard(key)
        # Before any other, so that one kill changes no decision.
        if is_killed and key not in self._killed:
            self._killed.add(key)
        else:
            self._left.add(key)

    def why_paused(self, key: str) -> str | None:
        """Why a trial that has reached a rung does not train further; None if it has ended, or never was there."""
        if key not in self._trials.aims or self._trials.has_ended(key):
            return None
        return self._trials.why_paused(key) or "goes on"

    def _choose(self) -> str | None:
        """The trial to train now: one that was interrupted, one that is good enough, or a new one."""
        trials = self._trials
        unfinished = [key for key in trials.list_unfinished() if key not in self._left]
        if waiting := [key for key in unfinished if key not in self._running]:
            return waiting[0]
        row = trials.choose()
        if row is None and (drawn := self._draw()) is not None:
            row = {"event": "begin", "trial": drawn[0], "values": drawn[1]}
        if row is None and not unfinished:
            row = trials.choose(is_idle=True)
        if row is None:
            return None
        self._record(row)
        return str(row["trial"])

    def _draw(self) -> tuple[str, Mapping[str, Any]] | None:
        return self._begin(dict(zip(self._trials.values, self._trials.list_trials(), strict=True)))

    def _record(self, row: Mapping[str, Any]) -> None:
        self._file.append(_to_line(row))
        self._file.sync()
        self._trials.apply(row)


def _to_line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row).encode() + b"\n"
