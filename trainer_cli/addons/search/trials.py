"""Which trial of a sweep trains next, and how far: from rows that record what was begun, measured and decided.

    {"event": "begin", "trial": KEY, "values": {…}}           a trial trains to the first rung
    {"event": "measure", "trial": KEY, "rung": 0, "loss": …}  it has reached it, and is paused
    {"event": "go on", "trial": KEY, "rung": 1, "why": "…"}   it is to train to the next one

A rung is a length at which trials are compared; the last is the end of the run. Nothing is forgotten: the same rows
always give the same next row.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from trainer_cli.search_parts import Trial

_FEWEST = 3
"""So many trials at a rung all go on: their median says little."""


class Trials:
    """The trials that are known so far.

    Args:
        prune, eta, rungs: the values of `sweep.prune`, `sweep.eta` and `sweep.rungs`.
        rows: what was recorded.
    """

    def __init__(self, prune: str, eta: int, rungs: Sequence[str], rows: Iterable[Mapping[str, Any]] = ()) -> None:
        self._prune, self._eta = prune, eta
        self.rungs = rungs if prune != "none" else []
        self.values: dict[str, Mapping[str, Any]] = {}
        """KEY -> values, in the order in which they were begun."""
        self.aims: dict[str, int] = {}
        """KEY -> the rung to which it trains, or at which it is paused."""
        self.paused_at: dict[str, int] = {}
        """KEY -> the step at which it is paused."""
        self._losses: list[dict[str, float]] = [{} for _ in range(len(self.rungs) + 1)]
        for row in rows:
            self.apply(row)

    def apply(self, row: Mapping[str, Any]) -> None:
        """Take over a row."""
        key = row["trial"]
        if row["event"] == "begin":
            self.values[key], self.aims[key] = row["values"], 0
        elif row["event"] == "go on":
            self.aims[key] = row["rung"]
            self.paused_at.pop(key, None)
        else:
            loss = row["loss"]
            if row["rung"] < len(self.rungs) and row.get("step") is not None:
                self.paused_at[key] = row["step"]
            self._losses[row["rung"]][key] = math.inf if loss is None else loss

    def list_unfinished(self) -> list[str]:
        """The trials that have not reached their rung."""
        return [key for key, rung in self.aims.items() if key not in self._losses[rung]]

    def choose(self, *, is_idle: bool = False) -> Mapping[str, Any] | None:
        """The row by which a paused trial goes on, of the highest rung first; None if none is good enough.

        Args:
            is_idle: no trial is left to begin or to wait for. The best one then goes on, however few there are.
        """
        for rung in reversed(range(len(self.rungs))):
            count = self._count(rung)
            for key in self._rank(rung)[:count]:
                if self.aims[key] == rung:
                    return self._go_on(key, self._describe(rung))
        highest = max((rung for rung, losses in enumerate(self._losses) if losses), default=len(self.rungs))
        # The best one may have gone on already, and failed: the next command begins with it.
        if (
            is_idle
            and highest < len(self.rungs)
            and (best := self._rank(highest)[:1])
            and self.aims[best[0]] == highest
        ):
            count = len(self._losses[highest])
            return self._go_on(best[0], f"the best of {count} goes on at {self.rungs[highest]}: no other was left")
        return None

    def has_ended(self, key: str) -> bool:
        """Whether a trial is trained to its end."""
        return key in self._losses[-1]

    def why_paused(self, key: str) -> str | None:
        """Why a trial waits at a rung; None if it does not."""
        rung = self.aims[key]
        if rung == len(self.rungs) or key not in self._losses[rung]:
            return None
        if self._count(rung):
            return f"{self._describe(rung)}, not this one"
        at = f"of {len(self._losses[rung])} goes on at {self.rungs[rung]}"
        # Of too few the best one goes on once nothing else is left.
        has_gone_on = any(self.aims[other] > rung for other in self._losses[rung])
        return f"the best {at}, not this one" if has_gone_on else f"none {at} yet"

    def list_trials(self) -> Iterator[Trial]:
        """The trials for the next draw."""
        for key, values in self.values.items():
            losses = [losses[key] for losses in self._losses if key in losses]
            yield Trial(values, losses, self.has_ended(key))

    def _count(self, rung: int) -> int:
        """How many of the trials at a rung go on."""
        count = len(self._losses[rung])
        if self._prune == "asha":
            return count // self._eta
        return max((count + 1) // 2, _FEWEST)

    def _rank(self, rung: int) -> list[str]:
        """The trials that have reached a rung with a finite loss, the best first; of equal ones the earlier."""
        losses = self._losses[rung]
        return sorted((key for key, loss in losses.items() if math.isfinite(loss)), key=losses.__getitem__)

    def _describe(self, rung: int) -> str:
        count = len(self._losses[rung])
        return f"the best {min(self._count(rung), count)} of {count} go on at {self.rungs[rung]}"

    def _go_on(self, key: str, why: str) -> Mapping[str, Any]:
        return {"event": "go on", "trial": key, "rung": self.aims[key] + 1, "why": why}
