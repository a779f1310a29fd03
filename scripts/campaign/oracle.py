"""The one oracle: what a run that met a fault has kept, and whether it ends as the undisturbed run."""

from __future__ import annotations

import atexit
import hashlib
import json
import re
import shutil
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from command import Result, train
from compare import assert_same_run, metrics, tensors

from campaign.runner import folder_of_trials
from campaign.verdict import Outcome, Verdict
from trainer_cli.catalog.catalog import Catalog
from trainer_cli.layout.naming import parse_step

HANG_S = 600.0
"""A start that takes longer has hung. A whole training takes seconds of a core, and a core may be shared by many."""
EVERY_STEP = (
    "checkpoint.save_interval=1", "checkpoint.ephemeral_save_interval=null", "checkpoint.remove=never",
    "checkpoint.max_checkpoints=null", "checkpoint.save_async=false",
)  # fmt: skip


@dataclass(frozen=True)
class Reference:
    """The undisturbed run, at its end."""

    run: Path
    digests: Mapping[int, str]
    """Step -> digest of all tensors after it: weights, optimizer, random generators. Empty where they are unknown."""


def make_reference(folder: Path, *overrides: str, disk: Mapping[str, object] | None = None) -> Reference:
    """Copy the run without a fault into `folder / "reference"`. Classes with the same training share it.

    Args:
        overrides: those of the run with the fault; its directory is `run_dir=run` in a folder of its own.
        disk: as of `train`.
    """
    undisturbed = _train_undisturbed(overrides, None if disk is None else json.dumps(disk))
    shutil.copytree(undisturbed.run.parent, folder / "reference")
    return Reference(folder / "reference/run", undisturbed.digests)


@cache
def _train_undisturbed(overrides: tuple[str, ...], disk: str | None) -> Reference:
    """Train as asked, and with a checkpoint of every step for the tensors of each."""
    folder = make_kept_folder()
    for name, more in (("reference", ()), ("every_step", EVERY_STEP)):
        (folder / name).mkdir()
        done = train("fit", *overrides, *more, cwd=folder / name, disk=None if disk is None else json.loads(disk))
        assert done.code == 0, done.err
    steps = {parse_step(path.name): path for path in (folder / "every_step/run/checkpoints").glob("step*")}
    digests = {step: digest_of(path) for step, path in steps.items() if step is not None}
    shutil.rmtree(folder / "every_step")
    return Reference(folder / "reference/run", digests)


def make_kept_folder() -> Path:
    """Make a folder that is deleted when this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="faults-", dir=folder_of_trials()))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def digest_of(checkpoint: Path) -> str:
    """Of the name, type, shape and bytes of each tensor of a checkpoint."""
    digest = hashlib.sha256()
    for file in sorted(checkpoint.glob("*.safetensors")):
        for name, (kind, shape, content) in sorted(tensors(file).items()):
            digest.update(f"{name} {kind} {shape}\n".encode())
            digest.update(content)
    return digest.hexdigest()


def verdict_of(
    run: Path,
    reference: Reference,
    announced: Sequence[int],
    go_on: Callable[[], Result],
    *,
    foreign: Mapping[Path, bytes] | None = None,
    same_checkpoints: bool = True,
) -> Outcome:
    """Check what is on the disk after a fault, start the run again, and check the end.

    Args:
        announced: the steps of which `committed step N` was read before the fault.
        go_on: starts the run again, to its end.
        foreign: files in or beside the run that are not its own, with their content.
        same_checkpoints: as of `assert_same_run`.
    """
    outcome = check_kept(run, reference, announced)
    if outcome.verdict is not Verdict.passed:
        return outcome
    try:
        result = go_on()
    except subprocess.TimeoutExpired as error:
        return Outcome(Verdict.hard_fail, f"the start after the fault hangs: {error}", len(announced))
    outcome = check_end(run, reference, announced, result, same_checkpoints=same_checkpoints)
    changed = [path for path, content in (foreign or {}).items() if not _holds(path, content)]
    if changed:
        return Outcome(Verdict.lost, f"foreign files were touched: {changed}", len(announced))
    return outcome


def check_kept(run: Path, reference: Reference, announced: Sequence[int]) -> Outcome:
    """Check that the newest valid checkpoint is no older than the last announced, and that all are of this run."""
    kept = sound_checkpoints(run)
    last = max(announced, default=0)
    if max(kept, default=0) < last:
        return Outcome(Verdict.lost, f"step {last} was announced, the newest valid is of {max(kept, default=None)}")
    wrong = [
        step for step, path in kept.items() if reference.digests and digest_of(path) != reference.digests.get(step)
    ]
    if wrong:
        return Outcome(Verdict.diverged, f"the tensors of steps {wrong} differ from those of the undisturbed run")
    return Outcome(Verdict.passed, announced=len(announced))


def check_end(
    run: Path, reference: Reference, announced: Sequence[int], result: Result, *, same_checkpoints: bool = True
) -> Outcome:
    """Check that a start went on from what was announced, and ended as the undisturbed run."""
    count = len(announced)
    if result.code != 0:
        return Outcome(Verdict.hard_fail, f"the start after the fault ends with {result.code}: {result.err}", count)
    if resumed_step(result) < max(announced, default=0):
        return Outcome(Verdict.lost, f"steps {announced} were announced; went on at {resumed_step(result)}", count)
    steps = [record["step"] for record in metrics(run)]
    if steps != (wanted := [record["step"] for record in metrics(reference.run)]):
        return Outcome(Verdict.lost, f"records of steps {steps}, not {wanted}", count)
    try:
        assert_same_run(run, reference.run, same_checkpoints=same_checkpoints)
    except AssertionError as error:
        line = traceback.extract_tb(error.__traceback__)[-1].line
        return Outcome(Verdict.diverged, f"the run does not end as the undisturbed one: {line} {error}", count)
    return Outcome(Verdict.passed, announced=count)


def sound_checkpoints(run: Path) -> dict[int, Path]:
    """The checkpoints whose every byte is as it was written, by step."""
    if not (run / "checkpoints").is_dir():
        return {}
    catalog = Catalog.of(run / "checkpoints")
    entries = [entry for entry in catalog.entries() if catalog.why_damaged(entry) is None]
    return {entry.step: run / "checkpoints" / entry.name for entry in entries}


def announced_steps(result: Result) -> list[int]:
    """The steps of which a start said that they are saved."""
    return [int(step) for step in re.findall(r"^committed step (\d+)", result.err, re.MULTILINE)]


def resumed_step(result: Result) -> int:
    """The step that a start went on from, or found to be the last."""
    match = re.search(r"^(?:resuming|\S+ is finished) at step (\d+)", result.err + result.out, re.MULTILINE)
    return int(match[1]) if match else 0


def _holds(path: Path, content: bytes) -> bool:
    return path.is_file() and path.read_bytes() == content
