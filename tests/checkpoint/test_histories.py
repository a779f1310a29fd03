"""Many random histories: after every step the real callback leaves on the disk what the oracle says.

`TRAIN_HISTORIES=20000 pytest tests/checkpoint/test_histories.py` plays more of them.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from attempts import ELSEWHERE, EPOCH_STEPS, FAULTS, METRIC, Attempts, Step, quiet
from hypothesis import HealthCheck, Phase, given, note, seed, settings, strategies as st
from oracle import read_length

from trainer_cli.checkpoint.checkpointer import CheckpointMetadata, SyncCheckpointer

HISTORIES = int(os.environ.get("TRAIN_HISTORIES", "150"))
SHRINKS = os.environ.get("TRAIN_SHRINKS", "yes") == "yes"

LENGTHS = [1, 2, 3, 4, 5, "1ep", "2ep", "4sp", "9sp", "10sp", "7tok", "20tok", "1s", "2.5s", "4s"]
FRACTIONS = ["0.5ep", "0.25ep", "1.5ep"]
VALUES = st.sampled_from([None, None, None, 1.0, 2.0, 3.0, 1.0, 2.0, math.nan, math.inf, -math.inf])
HANDS = st.tuples(st.sampled_from(["pin", "pin", "unpin", "delete", "flip", "cut", "partial"]), st.integers(0, 3))

# What each part of the histories is about. All else happens there too, but seldom.
PARTS = ("cadences", "best", "stops", "hands", "faults", "kills")


def rules(part: str) -> st.SearchStrategy[dict[str, Any]]:
    """Settings of the callback."""
    lengths = st.sampled_from([*LENGTHS, *FRACTIONS])
    best = st.fixed_dictionaries(
        {"metric": st.just(METRIC), "mode": st.sampled_from(["min", "max"]), "count": st.integers(1, 3)}
    )
    often = {"keep_best": best} if part in ("best", "stops") else {}
    seldom = {} if often else {"keep_best": best}
    return st.fixed_dictionaries(
        {
            "save_interval": st.one_of(st.none(), lengths),
            "newer": st.sampled_from(["refuse", "trash", "trash"]),
            "on_save_error": st.sampled_from(["warn", "warn", "warn", "raise"]),
            **often,
        },
        optional={
            "ephemeral_save_interval": st.sampled_from([1, 1, 2, 3, *LENGTHS]),
            "ephemeral_cooldown": st.integers(1, 4),
            "fixed_steps": st.sets(st.sampled_from([0, 2, 3, 5, 6, 8]), max_size=3).map(sorted),
            "pre_train_checkpoint": st.sampled_from([None, True, False]),
            "save_final": st.booleans(),
            "save_on_stop": st.booleans(),
            "remove": st.sampled_from(["ephemeral_only", "all_without_rule", "all_without_rule", "never"]),
            "max_checkpoints": st.integers(1, 3),
            "keep_every": lengths,
            "keep_by_age": st.dictionaries(st.sampled_from(["1s", "2.5s", "4s"]), st.integers(1, 3), min_size=1),
            "max_save_errors": st.integers(0, 2),
            **seldom,
        },
    )


def legal(found: dict[str, Any], epoch_steps: int | None) -> dict[str, Any]:
    """The settings without what is refused: an ephemeral interval as long as the other, and what has no effect.

    `epoch_steps` is None where nobody knows how many steps an epoch has.
    """
    save, often = found["save_interval"], found.get("ephemeral_save_interval")
    if save is not None and often is not None:
        (permanent, unit), (ephemeral, same_unit) = _length(save, epoch_steps), _length(often, epoch_steps)
        if unit == same_unit and ephemeral >= permanent:
            often = None
    unused = {"ephemeral_save_interval", "ephemeral_cooldown"} if often is None else set()
    if "max_checkpoints" not in found and found.get("remove") != "all_without_rule":
        unused |= {"keep_by_age"}
    unused |= {"max_save_errors"} if found["on_save_error"] == "raise" else set()
    return {name: value for name, value in found.items() if name not in unused}


def _length(text: int | str, epoch_steps: int | None) -> tuple[Fraction, str]:
    """A length and its unit; epochs as steps where it is known how many they have."""
    above, below, unit = read_length(text)
    length = Fraction(above, below)
    return (length * epoch_steps, "st") if unit == "ep" and epoch_steps is not None else (length, unit)


def whole(found: dict[str, Any]) -> dict[str, Any]:
    """The settings without parts of epochs, for where nobody knows how long an epoch is."""
    return {name: "1ep" if value in FRACTIONS else value for name, value in found.items()}


def steps(part: str) -> st.SearchStrategy[list[Step]]:
    """What happens at the steps of an attempt: often nothing but a step, at times two things at once."""
    nothing: st.SearchStrategy[dict[str, Any]] = st.just({})
    faults = st.sampled_from([{"fault": name} for name in FAULTS])
    hands = HANDS.map(lambda hand: {"hand": hand})
    deaths = st.integers(0, 80).map(lambda lives: {"lives": lives})
    odd = st.one_of(
        st.sampled_from([{"asks": True}, {"holds": True}, {"holds": False}, {"finite": False}, {"quarters": 9}]),
        hands,
        hands if part == "hands" else nothing,
        {"faults": faults, "kills": deaths}.get(part, nothing),
    )
    seldom = odd if part not in ("best", "stops") else st.one_of(nothing, odd)
    happenings = st.tuples(
        VALUES, st.integers(1, 9), st.one_of(nothing, seldom), st.one_of(nothing, nothing, faults, odd)
    )
    some = happenings.map(lambda drawn: Step(**{"value": drawn[0], "quarters": drawn[1], **drawn[2], **drawn[3]}))
    return st.lists(st.one_of(st.builds(Step, value=VALUES), some), min_size=2, max_size=9)


def attempts(part: str) -> st.SearchStrategy[dict[str, Any]]:
    """One attempt: how it begins, its steps, and how the last of them ends it."""
    ends = ["stop", "owing", "final", "last_owing", None]
    ends += ["owing", "last_owing", "last_owing"] if part == "stops" else ["crash"]
    return st.fixed_dictionaries(
        {
            "rules": st.one_of(st.none(), rules(part)),
            "start": st.sampled_from(["auto"] * 8 + ["weights", "all", "anew"]),
            "back_to": st.sampled_from([None, None, None, 0, 1, 2]),
            "lives": st.one_of(st.none(), st.integers(0, 200)) if part == "kills" else st.none(),
            "ends": st.sampled_from([False] * (2 if part == "stops" else 6) + [True]),
            "steps": steps(part),
            "end": st.sampled_from(ends),
        }
    )


@pytest.fixture
def theirs(memory_path: Path) -> Path:
    """What is not ours, to lie beside: a checkpoint of another run, its remains, a folder, a file, a link."""
    folder = memory_path / "theirs"
    facts = CheckpointMetadata(run_id="theirs", step=77)
    SyncCheckpointer().save({"model": {}}, folder / "step77", metadata=facts)
    (folder / "notes").mkdir()
    (folder / "notes" / "step3").write_text("mine")
    (folder / "README.txt").write_text("mine")
    (folder / ".tmp.step5.theirs.1").mkdir()
    (folder / "link").symlink_to("notes")
    return folder


def contents(folder: Path) -> dict[str, bytes | None]:
    """All that is in a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def play(world: Attempts, history: list[dict[str, Any]], first: dict[str, Any]) -> None:
    """One history."""
    current = first
    for attempt in history:
        current = attempt["rules"] or current
        start, back_to = attempt["start"], attempt["back_to"]
        if not world.oracle.folders and start == "anew":
            start = "auto"
        back_to = back_to if start == "auto" and world.oracle.folders else None
        ends = attempt["ends"] and bool(world.oracle.folders)
        settings = legal(current, EPOCH_STEPS) if world.knows_epochs else legal(whole(current), None)
        if not world.begin(settings, back_to=back_to, start=start, lives=attempt["lives"], ends=ends):
            if world.refusals > 1:
                world.clear_by_hand()
            continue
        for number, step in enumerate(attempt["steps"]):
            last = number == len(attempt["steps"]) - 1
            if not world.step(Step(**{**_fields(step), "end": attempt["end"] if last else None})):
                break
        world.alive = False


def _fields(step: Step) -> dict[str, Any]:
    return {name: getattr(step, name) for name in Step.__dataclass_fields__}


@pytest.fixture
def _silence() -> Iterator[None]:
    with quiet():
        yield


@pytest.mark.usefixtures("_silence")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", PARTS)
def test_after_every_step_of_any_history_the_disk_holds_what_the_rules_say(
    part: str, memory_path: Path, theirs: Path
) -> None:
    beside = contents(theirs)
    serial = iter(range(10**9))

    @seed(PARTS.index(part))
    @settings(
        max_examples=HISTORIES // len(PARTS) + 1,
        phases=(Phase.generate, Phase.shrink) if SHRINKS else (Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.booleans(), st.booleans(), rules(part), st.lists(attempts(part), min_size=2, max_size=4))
    def history(knows_epochs: bool, behind: bool, first: dict[str, Any], those: list[dict[str, Any]]) -> None:
        root = memory_path / str(next(serial))
        world = Attempts(root, knows_epochs=knows_epochs, behind=behind)
        shutil.copytree(theirs, world.root, symlinks=True)
        try:
            play(world, those, first)
            there = contents(world.root)
            assert {name: there.get(name) for name in beside} == beside, "what is not ours is never touched"
            assert not (root / ELSEWHERE).exists()
        finally:
            note("\n".join(world.story))
            shutil.rmtree(root)

    history()
