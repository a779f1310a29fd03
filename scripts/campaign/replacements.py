"""kill -9 at every change of a command that replaces something: a damaged checkpoint that is set aside, newer ones that
a resume replaces, a removal, an exported file, and copies in a second folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from command import flip_a_byte, train

from campaign.fault_class import FaultClass, Size, Trials
from campaign.kill_points import ALL, SYNCHRONOUS, TRAINING, run_mortal, spread
from campaign.oracle import HANG_S, Reference, check_end, check_kept, make_reference, sound_checkpoints
from campaign.verdict import PASSED, Outcome, Verdict

PERMANENT = (
    *TRAINING, SYNCHRONOUS, "checkpoint.save_interval=2", "checkpoint.ephemeral_save_interval=null",
)  # fmt: skip
"""Steps 2, 4 and 6, all kept."""
FIT = ("fit", *PERMANENT)
COPIES = "checkpoint.copy_to.folder=copies"
DAMAGED = "checkpoints/step6/rank0.safetensors"
EXPORT = ("ckpt", "export", "--format", "safetensors", "--output", "out.safetensors", "--overwrite")
FIRST_RECORD = "write run/metrics.jsonl"
"""The first change after a start. Kills after it are those of campaign.kill_points."""
MISSING = 3
"""Exit code of a command on a checkpoint that is not there: the removal was done before the kill."""


def _leave(_folder: Path, _reference: Path) -> str | None:
    """Nothing more to check."""
    return None


@dataclass(frozen=True)
class Replacement:
    """A command that replaces something in a folder with a finished run, killed at each of its changes.

    Args:
        command: what is killed, and then called again.
        kept: the step that the fault may not cost.
        make_ready: what happens to the folder before it.
        changes: only changes of paths with this in them are points to kill at.
        until: only those before the first change of this path are.
        check: (the folder, that of the undisturbed command) -> what is wrong, after the run was started once more.
    """

    command: tuple[str, ...]
    kept: int
    make_ready: Callable[[Path], None] = lambda folder: None
    changes: str = ""
    until: str = "no such path"
    check: Callable[[Path, Path], str | None] = _leave


def _damage(folder: Path) -> None:
    flip_a_byte(folder / "run" / DAMAGED)


def _check_set_aside(folder: Path, reference: Path) -> str | None:
    """The damaged checkpoint is kept under a hidden name, as it was."""
    asides = [sorted(place.glob("run/checkpoints/.aside.step6.*")) for place in (folder, reference)]
    contents = [[(path / Path(DAMAGED).name).read_bytes() for path in paths] for paths in asides]
    for path in asides[0]:
        shutil.rmtree(path)
    return None if contents[0] == contents[1] else f"{len(contents[0])} set aside, or others than the damaged one"


def _empty_trash(folder: Path, _reference: Path) -> str | None:
    """Remove what a removal had begun to remove, as the next attempt to train does; a finished run makes none."""
    for path in folder.glob("run/checkpoints/.trash.step4.*"):
        shutil.rmtree(path)
    return None


def _export_old(folder: Path) -> None:
    assert train(*EXPORT, "run/checkpoints/step2", cwd=folder).code == 0


def _check_export(folder: Path, reference: Path) -> str | None:
    """The new file, whole. The hidden one of the killed command stays: it might be that of another command."""
    exports = [(place / "out.safetensors").read_bytes() for place in (folder, reference)]
    return None if exports[0] == exports[1] else "the exported file has another content"


def _remove_run(folder: Path) -> None:
    shutil.rmtree(folder / "run")


def _check_copies(folder: Path, reference: Path) -> str | None:
    """The copies of the undisturbed run, each of them sound."""
    copies = []
    for place in (folder, reference):
        (place / "as_run").mkdir(exist_ok=True)
        link = place / "as_run/checkpoints"
        if not link.is_symlink():
            link.symlink_to(place / "copies")
        copies.append(set(sound_checkpoints(place / "as_run")))
    return None if copies[0] == copies[1] != set() else f"copies of steps {copies[0]}, not {copies[1]}"


REPLACEMENTS = (
    Replacement(FIT, kept=4, make_ready=_damage, until=FIRST_RECORD, check=_check_set_aside),
    Replacement((*FIT, "resume=run/checkpoints/step2", "checkpoint.newer=trash"), kept=2, until=FIRST_RECORD),
    Replacement(("ckpt", "rm", "run/checkpoints/step4", "--yes"), kept=6, check=_empty_trash),
    Replacement((*EXPORT, "run/checkpoints/step6"), kept=6, make_ready=_export_old, check=_check_export),
    Replacement((*FIT, COPIES), kept=0, make_ready=_remove_run, changes="copies", check=_check_copies),
)


@contextmanager
def prepare(folder: Path, count: int, _size: Size) -> Iterator[Trials]:
    """Run each command without a fault, and list its changes."""
    digests = make_reference(folder, *PERMANENT, disk={}).digests
    points: list[tuple[int, int]] = []
    for number, replacement in enumerate(REPLACEMENTS):
        template, done = folder / f"template{number}", folder / f"done{number}"
        shutil.copytree(folder / "reference", template)
        replacement.make_ready(template)
        shutil.copytree(template, done)
        result = run_mortal(0, *replacement.command, cwd=done)
        assert result.code == 0, result.err
        changes = [line for line in result.operations if not line.startswith("committed")]
        end = next((at for at, line in enumerate(changes, 1) if replacement.until in line), len(changes))
        points += [(number, at) for at, line in enumerate(changes[:end], 1) if replacement.changes in line]
        # Where the command set a checkpoint aside, the oracle wants no trace of it.
        if replacement.check is _check_set_aside:
            shutil.copytree(done, folder / "with_aside")
            _check_set_aside(done, done)
    chosen = spread(range(len(points)), count)

    def run_trial(trial: int) -> Outcome:
        number, at = points[chosen[trial]]
        place = folder / f"trial{trial}"
        shutil.copytree(folder / f"template{number}", place)
        replacement = REPLACEMENTS[number]
        undisturbed = folder / ("with_aside" if replacement.check is _check_set_aside else f"done{number}")
        outcome = kill_at(at, replacement, place, undisturbed, Reference(folder / f"done{number}/run", digests))
        if outcome.verdict is Verdict.passed:
            shutil.rmtree(place)
        return outcome

    yield Trials(len(chosen), run_trial)


def kill_at(at: int, replacement: Replacement, folder: Path, undisturbed: Path, reference: Reference) -> Outcome:
    """Kill the command at this change, call it again, and start the run once more."""
    kept = [replacement.kept] if replacement.kept else []
    run_mortal(at, *replacement.command, cwd=folder)
    outcome = check_kept(folder / "run", reference, kept)
    if outcome.verdict is not Verdict.passed:
        return outcome
    again = train(*replacement.command, cwd=folder, limit_s=HANG_S)
    if again.code not in (0, MISSING) or (again.code == MISSING and "rm" not in replacement.command):
        return Outcome(Verdict.hard_fail, f"called again it ends with {again.code}: {again.err}")
    if wrong := replacement.check(folder, undisturbed):
        return Outcome(Verdict.lost, wrong)
    outcome = check_end(folder / "run", reference, kept, train(*FIT, cwd=folder, disk={}, limit_s=HANG_S))
    return PASSED if outcome.verdict is Verdict.passed else outcome


CLASSES = (
    FaultClass(
        "replacements",
        "`kill -9` at every change of what replaces or copies a checkpoint",
        "The process is killed in the start that sets a damaged checkpoint aside, `resume=` of an older one, `train "
        "ckpt rm`, "
        "`train ckpt export --overwrite`, and copies into a second folder; each is called again.",
        "L1 L2 L4 L5 L6",
        {Size.quick: 15, Size.full: ALL, Size.nightly: ALL},
        prepare,
        share=5.0,
    ),
)
