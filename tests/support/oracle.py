"""The rules of saving and removal written a second time, as plainly as possible: what must be on the disk.

Nothing is shared with the code under test: durations are parsed by hand, counts are integers, and each rule is a loop
over all checkpoints. `past` lists the states of the disk during one event in order: the last is the outcome, the others
are where a kill may leave it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

Counts = dict[str, int]
"""How much was done, by unit: `st` steps, `ep` whole epochs, `sp` samples, `tok` tokens, `s` quarters of a second."""
Seen = tuple[str, bool, bool, bool, frozenset[str]]
"""Of one checkpoint: kind, pinned, finished, finite, names of its metrics."""
NOTHING_DONE: Counts = {"st": 0, "ep": 0, "sp": 0, "tok": 0, "s": 0}


class RefusedError(Exception):
    """This attempt must not begin, and nothing is touched."""


@dataclass
class Folder:
    """One checkpoint of the run, with what was counted at its step and one step before."""

    name: str
    step: int
    kind: str
    now: Counts
    before: Counts
    metrics: dict[str, float] = field(default_factory=dict)
    finite: bool = True
    finished: bool = False
    pinned: bool = False
    sound: bool = True
    """False: some bytes are not what was written, which only reading tells."""
    whole: bool = True
    """False: a file is cut short, which a look at its size tells."""

    @property
    def seen(self) -> Seen:
        return self.kind, self.pinned, self.finished, self.finite, frozenset(self.metrics)


def read_length(text: int | str) -> tuple[int, int, str]:
    """A length as numerator, denominator and unit: `0.5ep` is 5, 10, `ep`."""
    if isinstance(text, int):
        return text, 1, "st"
    number = text.rstrip("abcdefghijklmnopqrstuvwxyz")
    digits, _, part = number.partition(".")
    return int(digits + part), 10 ** len(part), text[len(number) :]


def crosses(length: int | str | None, before: Counts, now: Counts, epoch_steps: int | None) -> bool:
    """True where the step from `before` to `now` reached or passed a multiple of `length`.

    `epoch_steps` is None where the number of steps of an epoch is unknown.
    """
    if length is None or now["st"] == 0:
        return False
    above, below, unit = read_length(length)
    if unit == "s":
        above *= 4
    if unit == "ep" and epoch_steps is not None:
        above *= epoch_steps
        unit = "st"
    low, high = before[unit], now[unit]
    if unit == "st":
        low = high - 1
    multiple = above
    while multiple <= low * below:
        multiple += above
    return multiple <= high * below


class Oracle:
    """A run's checkpoints as they must be. `epoch_steps` as in `crosses`."""

    def __init__(self, epoch_steps: int | None) -> None:
        self.epoch_steps = epoch_steps
        self.folders: dict[str, Folder] = {}
        self.apart: str | None = None
        """The one kept apart after an exception."""
        self.past: list[dict[str, Folder]] = []
        self._forget()

    def _forget(self) -> None:
        """What a process knows, and loses with its end."""
        self.last: int | None = None
        self.save_requested = False
        self.failures = 0

    def _note(self) -> None:
        self.past.append({name: replace(folder) for name, folder in self.folders.items()})

    def _drop(self, name: str) -> None:
        del self.folders[name]
        self._note()

    @property
    def seen(self) -> dict[str, Seen]:
        return {name: folder.seen for name, folder in self.folders.items()}

    def by_age(self) -> list[Folder]:
        """The oldest first."""
        return sorted(self.folders.values(), key=lambda folder: folder.step)

    def killed(self, found: Mapping[str, Seen]) -> bool:
        """Take over what a kill left, where that is one of the states on the way; False where it is none."""
        for folders in self.past:
            if {name: folder.seen for name, folder in folders.items()} == found:
                self.folders = folders
                return True
        return False

    # How an attempt begins.

    def newest(self) -> Folder | None:
        """The one to go on from: the newest whose bytes and weights are good. Newer ones no longer stand in its way."""
        self.past = []
        self._note()
        unfit: list[str] = []
        for folder in reversed(self.by_age()):
            if folder.sound and folder.whole and folder.finite:
                for name in unfit:
                    self._drop(name)
                return folder
            unfit.append(folder.name)
        if unfit:
            raise RefusedError("none is valid")
        return None

    def begin(self, settings: Mapping[str, Any], step: int, gone_on_from: Folder | None) -> None:
        """A process begins at `step`. What is not this run's future goes, or the process is refused."""
        self._forget()
        if not self.past:
            self._note()
        self.settings = settings
        present = [folder for folder in self.by_age() if folder.whole]
        if gone_on_from is None and not any(folder.step > 0 or folder.pinned for folder in present):
            # No step was made from a first checkpoint that is not continued.
            for folder in present:
                self._drop(folder.name)
            present = []
        if present and gone_on_from is None:
            raise RefusedError("the checkpoints that are there would be left behind")
        newer = [folder for folder in present if folder.step > step and folder.sound]
        if newer and settings.get("newer") != "trash":
            raise RefusedError("newer ones are there")
        if any(folder.pinned for folder in newer):
            raise RefusedError("a newer one is pinned")
        for folder in reversed(newer):
            self._drop(folder.name)
        for folder in self.by_age():
            if folder.whole and folder.step <= step:
                self.last = folder.step
        self._clear()

    # What is due at one moment.

    def moment(
        self,
        occasion: str,
        before: Counts,
        now: Counts,
        *,
        metrics: Mapping[str, float],
        finite: bool = True,
        loaded: bool = False,
        held: bool = False,
        fault: str | None = None,
    ) -> str:
        """What comes of a moment: `saved`, `completed`, `nothing`, `passed over`, or `raised`.

        `fault`: how a save would fail here; `rest` means after the checkpoint has its name, `None` not at all.
        """
        self.past = []
        self._note()
        if self.last == now["st"]:
            return self._complete(occasion, before, now, metrics, held=held)
        kind = self._kind(occasion, before, now, metrics, loaded=loaded, held=held)
        if kind is None:
            return "nothing"
        name = f"step{now['st']}"
        if name in self.folders:  # a damaged one is in the way
            self._drop(name)
        if fault is None or fault == "rest":
            self.folders[name] = Folder(
                name, now["st"], kind, dict(now), dict(before), dict(metrics), finite, finished=occasion == "final"
            )
            self._note()
        if fault is not None:
            self.failures += 1
            if fault == "rest":
                # It is there, so it counts as saved; nothing goes for it, since a power cut may take it away.
                self.last, self.save_requested = now["st"], False
            over = self.failures > self.settings.get("max_save_errors", 3) or occasion not in ("pre_train", "step")
            return "raised" if over or self.settings.get("on_save_error") != "warn" else "passed over"
        self.last = now["st"]
        self.failures = 0
        self.save_requested = False
        self._clear()
        return "saved"

    def _kind(
        self, occasion: str, before: Counts, now: Counts, metrics: Mapping[str, float], *, loaded: bool, held: bool
    ) -> str | None:
        """As what this step is to be saved, or None."""
        rules = self.settings
        if now["st"] in rules.get("fixed_steps", []):
            return "permanent"
        if occasion == "pre_train":
            wanted = rules.get("pre_train_checkpoint")
            return "permanent" if wanted or (wanted is None and not loaded) else None
        if crosses(rules.get("save_interval"), before, now, self.epoch_steps):
            return "permanent"
        if occasion in ("final", "last_stop") and rules.get("save_final", True):
            return "permanent"
        if self.save_requested:
            return "permanent"
        if self._enters_the_best(now["st"], metrics):
            return "ephemeral"
        if occasion in ("stop", "last_stop") and rules.get("save_on_stop", True):
            return "ephemeral"
        if crosses(rules.get("ephemeral_save_interval"), before, now, self.epoch_steps) and not held:
            cooldown = rules.get("ephemeral_cooldown")
            if cooldown is None or self.last is None or now["st"] >= self.last + cooldown:
                return "ephemeral"
        return None

    def _complete(self, occasion: str, before: Counts, now: Counts, metrics: Mapping[str, float], *, held: bool) -> str:
        """A step that is saved is not saved again, but what came late is added: its evaluation, and the run's end."""
        first_moment = occasion == "pre_train"
        asked, self.save_requested = self.save_requested, self.save_requested and first_moment
        folder = self.folders.get(f"step{now['st']}")
        if folder is None or not folder.whole:
            return "nothing"
        more = [name for name in metrics if name not in folder.metrics]
        ends = occasion == "final" and not folder.finished
        if not more and not ends:
            return "nothing"
        self.save_requested = asked and not first_moment
        kind = self._kind("step" if first_moment else occasion, before, now, metrics, loaded=False, held=held)
        self.save_requested = asked and first_moment
        if folder.kind == "ephemeral" and kind is not None:
            folder.kind = kind
        folder.metrics = {**folder.metrics, **metrics}
        folder.finished = folder.finished or ends
        self._note()
        self._clear()
        return "completed"

    def _enters_the_best(self, step: int, metrics: Mapping[str, float]) -> bool:
        best = self.settings.get("keep_best")
        if best is None or best["metric"] not in metrics or not math.isfinite(metrics[best["metric"]]):
            return False
        better = 0
        for folder in self.counted():
            other = folder.metrics.get(best["metric"], math.nan)
            if folder.step != step and folder.finite and math.isfinite(other):
                if best["mode"] == "max" and other > metrics[best["metric"]]:
                    better += 1
                if best["mode"] == "min" and other < metrics[best["metric"]]:
                    better += 1
        return better < int(best.get("count", 1))

    # What may stay.

    def counted(self) -> list[Folder]:
        """Those with a say, the newest first: whole, and not newer than where this training stands."""
        newest_first = list(reversed(self.by_age()))
        return [f for f in newest_first if f.whole and (self.last is None or f.step <= self.last)]

    def _clear(self) -> None:
        """All that need not stay goes, the oldest first."""
        kept = self.kept()
        for folder in reversed(self.counted()):
            if folder.name not in kept:
                self._drop(folder.name)

    def kept(self) -> set[str]:
        """The names of those that stay."""
        rules, counted = self.settings, self.counted()
        remove = rules.get("remove", "ephemeral_only")
        if remove == "never":
            return {folder.name for folder in counted}
        kept: set[str] = set()
        good = [folder for folder in counted if folder.finite]
        permanent = [folder for folder in good if folder.kind == "permanent"]
        for newest in (counted[:1], good[:1]):
            kept.update(folder.name for folder in newest)
        for folder in counted:
            if folder.pinned or folder.step in rules.get("fixed_steps", []):
                kept.add(folder.name)
        kept.update(folder.name for folder in self._best(good))
        most = rules.get("max_checkpoints")
        for place, folder in enumerate(permanent):
            if most is not None and place < most:
                kept.add(folder.name)
            if most is None and remove == "ephemeral_only":
                kept.add(folder.name)
            if crosses(rules.get("keep_every"), folder.before, folder.now, self.epoch_steps):
                kept.add(folder.name)
            if any(folder in self._newest_of_spans(permanent, *age) for age in rules.get("keep_by_age", {}).items()):
                kept.add(folder.name)
            if remove == "all_without_rule":
                if folder.step == 0:
                    kept.add(folder.name)
                if crosses(rules.get("save_interval"), folder.before, folder.now, self.epoch_steps):
                    kept.add(folder.name)
        return kept

    def _newest_of_spans(self, permanent: list[Folder], length: str, count: int) -> list[Folder]:
        """The newest of each of the newest `count` spans of time that have one; the newest is given first."""
        above, below, _ = read_length(length)
        chosen: dict[int, Folder] = {}
        for folder in permanent:
            span = folder.now["s"] * below // (4 * above)
            if span not in chosen and len(chosen) < count:
                chosen[span] = folder
        return list(chosen.values())

    def _best(self, good: list[Folder]) -> list[Folder]:
        best = self.settings.get("keep_best")
        if best is None:
            return []
        left = [folder for folder in good if math.isfinite(folder.metrics.get(best["metric"], math.nan))]
        chosen: list[Folder] = []
        while left and len(chosen) < best.get("count", 1):
            first = left[0]
            for folder in left:  # the newest first, so that only what is better takes its place
                one, other = folder.metrics[best["metric"]], first.metrics[best["metric"]]
                if (one < other) if best["mode"] == "min" else (one > other):
                    first = folder
            left.remove(first)
            chosen.append(first)
        return chosen

    # What people and failures do.

    def failed(self, step: int) -> None:
        """The training raised an exception: what there is is kept apart, unless the step is saved."""
        if self.last != step:
            self.apart = f"step{step}"
