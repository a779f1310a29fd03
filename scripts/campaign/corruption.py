"""Damaged checkpoints: flipped bits, cut, zeroed, longer, exchanged, stale and missing files, and names of others."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random

from acts import checkpointer_on, save
from command import train
from states import same, small_state

from campaign.fault_class import FaultClass, Size, Trials
from campaign.kills import COMPOSED
from campaign.oracle import HANG_S, Reference, check_end, make_reference, resumed_step
from campaign.verdict import PASSED, Outcome, Verdict
from trainer_cli.catalog.catalog import Catalog, newest_intact
from trainer_cli.errors import CheckpointError
from trainer_cli.storage.disk import Disk
from trainer_cli.storage.local import LocalStorage

Damage = Callable[[Path, Random], None]
"""Damages one file of a checkpoint. The folder of the checkpoint before it is its neighbour."""
TRAINING = (
    "experiment=digits_mlp", "model.hidden=[4]", "loop.max_duration=12", "loop.log_interval=1",
    "loop.eval_interval=4", "loop.eval_steps=1", "checkpoint.save_interval=2", "checkpoint.max_checkpoints=3",
    "run_dir=run",
)  # fmt: skip
STOPPED_AT = 8


def flip_bit(file: Path, chance: Random) -> None:
    """Flip a random bit."""
    content = bytearray(file.read_bytes())
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    file.write_bytes(content)


def flip_low_bit_at_end(file: Path, chance: Random) -> None:
    """Flip the lowest bit of a byte of the last tensor, or of the last value."""
    content = bytearray(file.read_bytes())
    content[-chance.randint(1, min(16, len(content)))] ^= 1
    file.write_bytes(content)


def truncate(file: Path, chance: Random) -> None:
    """Cut it to a random shorter size."""
    os.truncate(file, chance.randrange(file.stat().st_size))


def zero(file: Path, chance: Random) -> None:
    """Overwrite up to a page with zeros, in a place where there are other bytes."""
    content = bytearray(file.read_bytes())
    start = chance.choice([index for index, byte in enumerate(content) if byte])
    end = min(len(content), start + 4096)
    content[start:end] = bytes(end - start)
    file.write_bytes(content)


def append(file: Path, chance: Random) -> None:
    """Append random bytes."""
    with open(file, "ab") as stream:
        stream.write(chance.randbytes(chance.randint(1, 5000)))


def exchange(file: Path, chance: Random) -> None:
    """Give it the content of another file of the checkpoint, and that file its own."""
    other = chance.choice(sorted(path for path in file.parent.iterdir() if path != file))
    content = file.read_bytes()
    file.write_bytes(other.read_bytes())
    other.write_bytes(content)


def make_stale(file: Path, _chance: Random) -> None:
    """Put the file of the same name of the checkpoint before in its place."""
    shutil.copy(neighbour(file.parent) / file.name, file)


def remove(file: Path, _chance: Random) -> None:
    """Remove it."""
    file.unlink()


DAMAGES: tuple[Damage, ...] = (
    flip_bit, flip_low_bit_at_end, truncate, zero, append, exchange, make_stale, remove,
)  # fmt: skip


def neighbour(checkpoint: Path) -> Path:
    """The checkpoint before this one."""
    step = int(checkpoint.name.removeprefix("step"))
    others = [path for path in checkpoint.parent.glob("step*") if int(path.name.removeprefix("step")) < step]
    return max(others, key=lambda path: int(path.name.removeprefix("step")))


def damage(checkpoint: Path, number: int) -> str:
    """Damage a file of a checkpoint as the number says, and say what was done; never nothing."""
    chance = Random(f"damage {number}")
    act = DAMAGES[number % len(DAMAGES)]
    files = sorted(path for path in checkpoint.iterdir() if path.stat().st_size)
    before = content_of(checkpoint)
    while content_of(checkpoint) == before:
        # A file that has not changed since the checkpoint before, such as config.yaml, cannot be stale.
        file = chance.choice(files)
        act(file, chance)
    return f"{act.__name__} of {file.name}"


def content_of(folder: Path) -> dict[str, bytes | str]:
    """Everything below a folder: bytes of files, targets of links, "" for folders."""
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else ""
        for path in sorted(folder.rglob("*"))
    }


@contextmanager
def prepare_files(folder: Path, count: int, _size: Size) -> Iterator[Trials]:
    """Save three checkpoints to copy. Every tenth trial has names of others around whole checkpoints instead."""
    template = folder / "template"
    template.mkdir()
    for step in (1, 2, 3):
        save(template, step, Disk())

    def run_trial(number: int) -> Outcome:
        root = folder / f"trial{number}"
        shutil.copytree(template, root)
        outcome = find_among_strangers(root, number) if number % 10 == 9 else find_undamaged(root, number)
        shutil.rmtree(root)
        return outcome

    yield Trials(count, run_trial)


def find_undamaged(root: Path, number: int) -> Outcome:
    """Damage the newest checkpoint: no load gives other values, and the one before it is found and loaded."""
    what = damage(root / "step3", number)
    damaged = content_of(root / "step3")
    reader = checkpointer_on(Disk(), attempt=2)
    # A load reads config.yaml not at all, and may return the values where only that is damaged.
    with suppress(CheckpointError):
        if not same(dict(reader.load(root / "step3")), small_state(3)):
            return Outcome(Verdict.diverged, f"{what}: it is loaded with other values")
    storage = LocalStorage(root, run_id="run", attempt=2)
    entry = newest_intact(Catalog(storage), "run")
    if entry is None or entry.name != "step2":
        return Outcome(Verdict.lost, f"{what}: {entry} is found, not step2")
    if not same(dict(reader.load(root / "step2")), small_state(2)):
        return Outcome(Verdict.diverged, f"{what}: step2 is loaded with other values")
    left = [path for path in root.iterdir() if path.name not in ("step1", "step2")]
    if [content_of(path) for path in left] != [damaged]:
        return Outcome(Verdict.lost, f"{what}: the damaged one is not kept as it is: {left}")
    return PASSED


def find_among_strangers(root: Path, number: int) -> Outcome:
    """Put what is none of the run's beside its checkpoints: the newest is found, and all else stays as it is."""
    chance = Random(f"strangers {number}")
    add_strangers(root, chance)
    before = content_of(root)
    storage = LocalStorage(root, run_id="run", attempt=2)
    entry = newest_intact(Catalog(storage), "run")
    if entry is None or entry.name != "step3":
        return Outcome(Verdict.lost, f"{entry} is found among {sorted(before)}, not step3")
    storage.sweep()
    if content_of(root) != before:
        return Outcome(Verdict.lost, f"files of others were touched: {set(before) ^ set(content_of(root))}")
    return PASSED


def add_strangers(root: Path, chance: Random) -> None:
    """Add some files, folders and links with names that are nearly those of checkpoints."""
    strangers: Mapping[str, Callable[[Path], object]] = {
        "step9": lambda path: path.write_bytes(b"no folder"),
        "step10": lambda path: path.mkdir(),
        "step-1": lambda path: shutil.copytree(root / "step1", path),
        "step007": lambda path: shutil.copytree(root / "step1", path),
        "step3 (copy)": lambda path: shutil.copytree(root / "step3", path),
        "step４": lambda path: shutil.copytree(root / "step3", path),
        "latest": lambda path: path.symlink_to("nowhere"),
        "loop": lambda path: path.symlink_to("loop"),
        "step99999999999999999999": lambda path: path.mkdir(),
        ".tmp.mine": lambda path: path.mkdir(),
        ".trash": lambda path: path.write_bytes(b"mine"),
        "step3.bak": lambda path: path.write_bytes(b"mine"),
        "notes.txt": lambda path: path.write_bytes(b"mine"),
        "step3/notes.txt": lambda path: path.write_bytes(b"mine"),
    }
    for name in chance.sample(sorted(strangers), chance.randint(1, len(strangers))):
        strangers[name](root / name)


@contextmanager
def prepare_resumes(folder: Path, count: int, _size: Size) -> Iterator[Trials]:
    """Train to the end, and a second run that is stopped, to copy."""
    reference = make_reference(folder, *TRAINING, disk=COMPOSED)
    stopped = folder / "run"
    done = train("fit", *TRAINING, f"loop.hard_stop={STOPPED_AT}", cwd=folder)
    assert done.code == 0, done.err

    def run_trial(number: int) -> Outcome:
        trial = folder / f"trial{number}"
        trial.mkdir()
        shutil.copytree(stopped, trial / "run", symlinks=True)
        return resume_damaged(trial, reference, number)

    yield Trials(count, run_trial)


def resume_damaged(trial: Path, reference: Reference, number: int) -> Outcome:
    """Damage one, two or all three checkpoints of a stopped run, and start it again."""
    run = trial / "run"
    newest_first = sorted((run / "checkpoints").glob("step*"), key=lambda path: -int(path.name.removeprefix("step")))
    damaged = newest_first[: (1, 1, 1, 2, 3)[number % 5]]
    # Oldest last: a stale file is that of a checkpoint that may be damaged next.
    what = [damage(path, number // 5 + index) for index, path in enumerate(damaged) if path != newest_first[-1]]
    if len(damaged) == len(newest_first):
        flip_bit(newest_first[-1] / "rank0.safetensors", Random(number))
    contents = [content_of(path) for path in damaged]
    result = train("fit", *TRAINING, cwd=trial, disk=COMPOSED, limit_s=HANG_S)
    if len(damaged) == len(newest_first):
        if result.code == 3 and [content_of(path) for path in damaged] == contents and "Traceback" not in result.err:
            return PASSED
        return Outcome(Verdict.hard_fail, f"{what}: none is valid, and it ends with {result.code}: {result.err}")
    wanted = int(newest_first[len(damaged)].name.removeprefix("step"))
    if resumed_step(result) != wanted:
        return Outcome(Verdict.lost, f"{what}: goes on at {resumed_step(result)}, not {wanted}: {result.err}")
    # Quarantined, with all bytes; the undisturbed run has none, so they are taken away before the comparison.
    asides = sorted((run / "checkpoints").glob(".aside.*"), key=lambda path: path.stat().st_ctime_ns)
    if sorted(map(str, map(content_of, asides))) != sorted(map(str, contents)):
        return Outcome(Verdict.lost, f"{what}: the damaged ones are not kept as they are: {result.err}")
    for aside in asides:
        shutil.rmtree(aside)
    return check_end(run, reference, [], result)


CLASSES = (
    FaultClass(
        key="corruption",
        title="Damaged checkpoint",
        what="A file of the newest checkpoint has a flipped bit, is cut, zeroed, longer, exchanged with another, that "
        "of an earlier step, or gone; or foreign files lie between the checkpoints. Loads are in Python.",
        promises="L2 L5",
        counts={Size.quick: 100, Size.full: 800, Size.nightly: 20_000},
        prepare=prepare_files,
        share=1.5,
    ),
    FaultClass(
        key="corruption_resume",
        title="Damaged checkpoint, and the whole command",
        what="One, two or all checkpoints of a stopped run are damaged in these ways, and it is started again.",
        promises="L2 L4 L5 L6",
        counts={Size.quick: 10, Size.full: 200, Size.nightly: 1000},
        prepare=prepare_resumes,
        share=2.5,
    ),
)
