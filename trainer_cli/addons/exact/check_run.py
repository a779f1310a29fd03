"""Check that a run's directory is what its code, config and data give: make stretches of it again, and compare.

A stretch lies between two kept checkpoints that follow one another, or between the start of the run and the first.
`train replay` makes it in a process of its own, in as many ranks as the run had, and compares every record and every
tensor at its end bit for bit.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from trainer_cli.addons.exact.replay_plan import find_boundary
from trainer_cli.addons.exact.replay_process import replay_in_process
from trainer_cli.catalog import Entry
from trainer_cli.environment import timestamp, versions
from trainer_cli.errors import CheckpointError, TrainError, UserError
from trainer_cli.layout import MANIFEST_FILE
from trainer_cli.manifest import Manifest
from trainer_cli.origin import DamagedSourceError, KeptSource, of_project, other_source
from trainer_cli.runs import Run, RunDir, write_json
from trainer_cli.storage import open_storage
from trainer_cli.terminal import format_count

CHECK_FILE = "check.json"
_NOT_MADE = "cannot be made: "


@dataclass(frozen=True, slots=True)
class ReplayedStretch:
    """The outcome of making steps again, from the checkpoint of step `start` to that of step `last`."""

    start: int
    last: int
    records: int = 0
    """Number of the run's records that were compared."""
    problem: str | None = None
    """The first difference, or why the steps could not be made; None if all is equal."""

    def __str__(self) -> str:
        outcome = f"equal at {format_count(self.records, 'record')}" if self.problem is None else self.problem
        return f"steps {self.start + 1:,} to {self.last:,}: {outcome}"


@dataclass(frozen=True, slots=True)
class RunCheck:
    """Outcomes of the replayed stretches of a run, and facts about the run."""

    run: Path
    stretches: Sequence[ReplayedStretch]
    of: int
    """Number of stretches that the run has."""
    facts: Mapping[str, Any]
    """Digests of the config, the samples, the source and the manifests; versions then and now."""

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return all(stretch.problem is None for stretch in self.stretches)

    def __str__(self) -> str:
        if not self.equal:
            problems = [stretch.problem for stretch in self.stretches if stretch.problem is not None]
            not_made = sum(problem.startswith(_NOT_MADE) for problem in problems)
            parts = {"not equal": len(problems) - not_made, "cannot be made": not_made}
            found = ", ".join(f"{count} {what}" for what, count in parts.items() if count)
            return f"not verified: of {format_count(len(self.stretches), 'stretch')} {found}"
        steps = sum(stretch.last - stretch.start for stretch in self.stretches)
        verified = f"{len(self.stretches)} of {format_count(self.of, 'stretch')}, {format_count(steps, 'step')}"
        return f"verified: {verified}, equal in every record and tensor"

    def as_dict(self) -> dict[str, Any]:
        """The content of `check.json`."""
        stretches = [{**asdict(stretch), "equal": stretch.problem is None} for stretch in self.stretches]
        return {"run": str(self.run), "equal": self.equal, **self.facts, "stretches": stretches, "of": self.of}


def check_run(
    run: Path,
    count: int | None,
    *,
    show: Callable[[str], None],
    output: Path | None = None,
    overrides: Sequence[str] = (),
) -> RunCheck:
    """Make stretches of a run again, and write `check.json`.

    Args:
        count: how many, spread evenly over the run; the last is one of them. None: all.
        show: called with a line for each stretch before and after it is made.
        output: the file to write; by default `RUN/replayed/check.json`.
        overrides: of the run's config.

    Raises:
        UserError: there is no such run.
        TrainError: the file cannot be written.
        CheckpointError: no two checkpoints of it are left, nor its start and one checkpoint.
    """
    directory = RunDir.open(run)
    history = Run.open(run)
    kept, begins_at_0 = history.entries, history.first_step == 0
    all_stretches = list_stretches([entry.step for entry, _ in kept], begins_at_0=begins_at_0)
    for start, last in list(all_stretches):
        if (boundary := find_boundary(history, start, last)) is not None:
            show(f"steps {start + 1:,} to {last:,} are left out: {boundary[1]}, whose checkpoint is gone")
            all_stretches.remove((start, last))
    if not all_stretches:
        raise CheckpointError(
            f"{run} has {format_count(len(kept), 'valid checkpoint')}, and no steps between two",
            cure="A stretch needs a checkpoint at its start and one at its end.",
        )
    file = output or directory.replayed_folder / CHECK_FILE
    _check_writable(file)
    facts = _collect_facts(directory, kept)
    # A replay uses the source that the run keeps, or says why not.
    uses_kept = not of_project(overrides) and _is_source_kept(directory, kept[-1][0].manifest)
    if (changed := facts["source"]["changed"]) and not uses_kept:
        show(f"the source has changed since: {', '.join(f'{name} ({how})' for name, how in changed.items())}")
    outcomes = []
    for start, last in spread_evenly(all_stretches, count):
        show(f"replays steps {start + 1:,} to {last:,}")
        outcomes.append(_replay_stretch(run, start, last, overrides))
        show(str(outcomes[-1]))
    check = RunCheck(run, outcomes, len(all_stretches), facts)
    write_json(file, check.as_dict())
    show(f"written: {file}")
    return check


def _check_writable(file: Path) -> None:
    """Make the folder of the result, before stretches are made.

    Raises:
        TrainError: no file can be written there.
    """
    try:
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        file.parent.mkdir(parents=True, exist_ok=True)
        # By a file: rights alone do not tell whether a filesystem is read-only.
        tempfile.TemporaryFile(dir=file.parent).close()
    except OSError as error:
        raise TrainError(
            f"{file} cannot be written: {error.strerror}", cure="Name another file for the result: --output FILE."
        ) from None


def list_stretches(steps: Sequence[int], *, begins_at_0: bool) -> list[tuple[int, int]]:
    """Pairs of checkpoints that follow one another.

    Args:
        steps: of the checkpoints, in ascending order.
        begins_at_0: whether the run began at step 0, from which steps can be made without a checkpoint.
    """
    start = [0] if begins_at_0 and steps and steps[0] != 0 else []
    return list(pairwise([*start, *steps]))


def spread_evenly(stretches: Sequence[tuple[int, int]], count: int | None) -> list[tuple[int, int]]:
    """At most `count` of the stretches, in equal distances, with the last one; None: all."""
    total = len(stretches)
    if count is None or count >= total:
        return list(stretches)
    return [stretches[total * (index + 1) // count - 1] for index in range(count)]


def _replay_stretch(run: Path, start: int, last: int, overrides: Sequence[str]) -> ReplayedStretch:
    """Make the steps in a process of its own, so that nothing of one stretch reaches the next."""
    try:
        outcome = replay_in_process(run, start + 1, last, overrides)
    except (UserError, CheckpointError) as error:
        return ReplayedStretch(start, last, problem=f"{_NOT_MADE}{error}")
    return ReplayedStretch(start, last, outcome["records"], _find_problem(run, outcome, start, last))


def _find_problem(run: Path, outcome: Mapping[str, Any], start: int, last: int) -> str | None:
    """Why the JSON of `train replay` proves nothing of a stretch; None if it does."""
    if not outcome["equal"]:
        return str(outcome["result"])
    began_with = outcome["start"]
    if outcome["start_step"] != start or (began_with and Path(began_with).parent == RunDir(run).replayed_folder):
        return f"the checkpoint of step {start}, with which it begins, is damaged, or was removed meanwhile"
    if str(last) not in outcome["states"]:
        return f"the checkpoint of step {last} was not compared"
    return None


def _collect_facts(run: RunDir, kept: Sequence[tuple[Entry, Path]]) -> dict[str, Any]:
    """What a reader needs to hold the run against another: nothing here depends on where it lies."""
    newest = kept[-1][0].manifest
    assert newest is not None
    return {
        "checked": timestamp(time.time()),
        "run_id": run.run_id,
        "config": newest.config_digest,
        "samples": newest.samples,
        "source": {
            "digest": _digest_of(json.dumps(newest.source, sort_keys=True).encode()),
            "files": newest.source,
            "changed": other_source(newest.source, Path.cwd()),
        },
        "versions": {"run": run.environment_of(newest.attempt).get("versions"), "now": versions()},
        "manifests": _chain_digests(kept),
    }


def _chain_digests(kept: Sequence[tuple[Entry, Path]]) -> list[dict[str, Any]]:
    """For each checkpoint the digest of its manifest, which holds those of its files, and of all manifests so far."""
    chain, so_far = [], ""
    for entry, path in kept:
        digest = _digest_of(open_storage(path.parent).peek(path.name, MANIFEST_FILE) or b"")
        so_far = _digest_of(f"{so_far}{digest}".encode())
        chain.append({"step": entry.step, "digest": digest, "chain": so_far})
    return chain


def _digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _is_source_kept(run: RunDir, manifest: Manifest | None) -> bool:
    """Whether a run keeps the source of the attempt that made one of its checkpoints."""
    try:
        source = None if manifest is None else KeptSource.of_attempt(run, manifest.attempt)
    except DamagedSourceError:
        return False
    return manifest is not None and source is not None and not other_source(manifest.source, source.root)
