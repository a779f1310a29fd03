"""Every way of removing, with every rule of keeping in every unit and every pair of rules: exact at every step."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from attempts import METRIC, Attempts, Step, quiet

REMOVALS = ("ephemeral_only", "all_without_rule", "never")
RULES: dict[str, Any] = {
    "max_checkpoints": 2,
    "keep_every": {"st": 4, "ep": "2ep", "sp": "14sp", "tok": "30tok"},
    "keep_best": {"metric": METRIC, "mode": "min", "count": 2},
    "fixed_steps": [3, 8],
}
CHOICES = [(), *((rule,) for rule in RULES), *combinations(RULES, 2)]
INTERVALS = {"st": 2, "ep": "1ep", "sp": "7sp", "tok": "15tok"}
VALUES = (3.0, 1.0, math.nan, 1.0, 2.0, 5.0, 4.0, -math.inf, 0.5, 2.0, 0.5, 9.0)
ATTEMPTS = ((4, "stop"), (7, "owing"), (9, None), (12, "final"))
"""The last step of each attempt and how it ends: a stop, one before the evaluation, a kill, the end."""


@pytest.fixture
def root() -> Iterator[Path]:
    shared = "/dev/shm"
    with tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else None) as folder, quiet():
        yield Path(folder)


def settings(remove: str, rules: tuple[str, ...], unit: str) -> dict[str, Any]:
    chosen = {rule: RULES[rule] for rule in rules}
    if "keep_every" in chosen:
        chosen["keep_every"] = chosen["keep_every"][unit]
    return {"save_interval": INTERVALS[unit], "ephemeral_save_interval": 1, "remove": remove, **chosen}


def played(root: Path, rules: dict[str, Any], *, behind: bool = True) -> tuple[Attempts, list[list[int]]]:
    """All four attempts, and the steps on the disk after each. Each step is compared with the oracle."""
    world, after = Attempts(root, behind=behind), []
    for last, end in ATTEMPTS:
        assert world.begin(rules)
        while world.alive and world.now["st"] < last:
            step = world.now["st"] + 1
            world.step(Step(VALUES[step - 1], end=end if step == last else None))
        world.alive = False
        after.append(steps(world))
    return world, after


def steps(world: Attempts) -> list[int]:
    return sorted(int(name.removeprefix("step")) for name in world.found())


@pytest.mark.parametrize(
    ("rules", "unit"),
    [(rules, unit) for rules in CHOICES for unit in INTERVALS if len(rules) < 2 or unit == "st"],
    ids=lambda value: value if isinstance(value, str) else "+".join(value) or "none",
)
@pytest.mark.parametrize("remove", REMOVALS)
def test_the_disk_is_exact_at_every_step_at_the_end_and_over_three_resumes(
    root: Path, remove: str, rules: tuple[str, ...], unit: str
) -> None:
    world, after = played(root, settings(remove, rules, unit), behind=unit in ("st", "tok"))
    left = after[-1]
    assert left[-1] == 12
    if remove == "never":
        assert left == list(range(13))
    if "fixed_steps" in rules:
        assert {3, 8} <= set(left)
    if "keep_best" in rules:
        assert {9, 11} <= set(left), "of 0.5 and 0.5; neither NaN nor infinity is ever among the best"
    # Started once more with all steps made, nothing is written and nothing goes.
    written = {path: path.stat().st_mtime_ns for path in root.rglob("*")}
    assert not world.begin(settings(remove, rules, unit), ends=True)
    assert {path: path.stat().st_mtime_ns for path in root.rglob("*")} == written


EPHEMERAL, ALL = {"save_interval": 2}, {"save_interval": 2, "remove": "all_without_rule"}
BEST = {"metric": METRIC, "mode": "min", "count": 1}


@pytest.mark.parametrize(
    ("rules", "after"),
    [
        (EPHEMERAL, [[0, 2, 4], [0, 2, 4, 6, 7], [0, 2, 4, 6, 8], [0, 2, 4, 6, 8, 10, 12]]),
        ({**EPHEMERAL, "max_checkpoints": 2}, [[2, 4], [4, 6, 7], [6, 8], [10, 12]]),
        ({**EPHEMERAL, "max_checkpoints": 1, "keep_every": 4}, [[4], [4, 6, 7], [4, 8], [4, 8, 12]]),
        ({**EPHEMERAL, "max_checkpoints": 1, "fixed_steps": [3]}, [[3, 4], [3, 6, 7], [3, 8], [3, 12]]),
        ({**EPHEMERAL, "max_checkpoints": 1, "keep_best": BEST}, [[4], [4, 6, 7], [8, 9], [11, 12]]),
        ({**ALL, "max_checkpoints": 1}, [[0, 2, 4], [0, 2, 4, 6, 7], [0, 2, 4, 6, 8], [0, 2, 4, 6, 8, 10, 12]]),
        ({**ALL, "fixed_steps": [3]}, [[0, 2, 3, 4], [0, 2, 3, 4, 6, 7], [0, 2, 3, 4, 6, 8], None]),
        ({**EPHEMERAL, "remove": "never", "max_checkpoints": 1}, [[0, 2, 4], [0, 2, 4, 6, 7], None, None]),
        ({"save_interval": None, "ephemeral_save_interval": 3}, [[0, 4], [0, 7], [0, 9], [0, 12]]),
        ({"save_interval": None, "ephemeral_save_interval": 3, "save_final": False}, [[0, 4], [0, 7], [0, 9], [0, 12]]),
    ],
)
def test_what_is_left_after_each_attempt_reported_by_hand(
    root: Path, rules: dict[str, Any], after: list[list[int] | None]
) -> None:
    for found, wanted in zip(played(root, rules)[1], after, strict=True):
        assert wanted is None or found == wanted
