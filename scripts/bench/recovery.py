"""Seconds from a `kill -9` of a training to its first new step, by what they are spent on."""

from __future__ import annotations

from collections.abc import Sequence

from killed import Stamp, after_each_kill, attempts
from settings import Settings
from table import Column, Row, Table
from timing import Samples, Skipped, interleaved

COMMAND, FIRST, LATER = "the same command again", "restarts.max, first restart", "restarts.max, later ones"
EVERY = 5
KILLS = (8, 13)
PARTS = ("detect", "start", "import", "read and verify", "first new step")


def measure(settings: Settings) -> list[Table]:
    """One table."""
    millions = settings.pick(smoke=0.1, quick=1.0, whole=15.0)
    overrides = [
        f"model.millions={millions}", f"loop.max_duration={KILLS[-1] + 2}", "checkpoint.save_interval=null",
        # Not in the background: killed three small steps later, such a save would not be committed yet.
        f"checkpoint.ephemeral_save_interval={EVERY}", "checkpoint.save_async=false",
    ]  # fmt: skip

    def by_command() -> Samples:
        return {f"{COMMAND}: {part}": [took] for part, took in _split(_gaps(settings, overrides, KILLS[:1])[0]).items()}

    def by_restarts() -> Samples:
        first, later = _gaps(settings, [*overrides, "restarts.max=3", "restarts.backoff=null"], KILLS)
        found = {f"{FIRST}: {part}": [took] for part, took in _split(first).items()}
        return found | {f"{LATER}: {part}": [took] for part, took in _split(later).items()}

    measures = {COMMAND: by_command, FIRST: by_restarts}
    samples, skipped = interleaved(measures, settings.rounds_or(2, 4), warm=settings.warm, needed=list(measures))
    together = {key: values for found in samples.values() for key, values in found.items()}
    columns = [Column("all", "s", 2, resolution=0.05), *(Column(part, "s", 2, 0.05, ratio=False) for part in PARTS)]
    rows = [
        Row(name, {column.name: together[f"{name}: {column.name}"] for column in columns})
        for name in (COMMAND, FIRST, LATER)
    ]
    notes = [
        f"A state of {millions * 12 / 1e3:.2g} GB, saved every {EVERY} steps; killed three steps after a save. "
        "`detect`: until another interpreter begins; `start`: until it runs Python (a fork of a warm process has "
        "neither; all until then counts as `import`); `import`: torch, the config, the user's module; `read and "
        "verify`: model, optimizer, every byte of the newest checkpoint; `first new step`: one step. Three steps are "
        "also trained again, which no row counts. `restarts.backoff` is null."
    ]
    settled = {"millions": millions, "kills": list(KILLS)}
    return [Table("recovery", "From a kill to the first new step", COMMAND, columns, rows, settled, skipped, notes)]


def _gaps(settings: Settings, overrides: Sequence[str], kills: Sequence[int]) -> list[list[Stamp]]:
    return after_each_kill(attempts(settings.scratch, overrides, kills=kills))


def _split(gap: Sequence[Stamp]) -> dict[str, float]:
    """The parts of the time from a kill to the next step; a fork is neither born nor started as an interpreter is."""
    killed = gap[0].at
    imported, loaded, stepped = (next(one.at for one in gap if one.what == what) for what in _ORDER)
    if not any(one.what == "loaded" and one.step % EVERY == 0 < one.step for one in gap):
        raise Skipped("no checkpoint was loaded")
    fresh = [one for one in gap if one.what in ("born", "started") and one.at < imported]
    if len(fresh) not in (0, 2):
        raise Skipped(f"{len(fresh) // 2} interpreters were started")
    born, started = (fresh[0].at, fresh[1].at) if fresh else (killed, killed)
    parts = [born - killed, started - born, imported - started, loaded - imported, stepped - loaded]
    return {"all": stepped - killed, **dict(zip(PARTS, parts, strict=True))}


_ORDER = ("imported", "loaded", "stepped")
