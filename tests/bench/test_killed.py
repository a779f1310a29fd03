"""What the stamps of killed trainings say of the time between a kill and the first new step; and forks as processes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import recovery
import timing
import warm_python
from killed import Stamp, after_each_kill


def _stamps(*pairs: tuple[str, float]) -> list[Stamp]:
    return [Stamp(what, at, step=5 if what == "loaded" else 8) for what, at in pairs]


FRESH = _stamps(("killed", 1.0), ("born", 1.5), ("started", 1.75), ("imported", 3.0), ("loaded", 3.5), ("stepped", 4.0))
FORK = _stamps(("killed", 4.5), ("imported", 5.0), ("loaded", 5.25), ("stepped", 5.5), ("ended", 6.0))


def test_stamps_are_split_at_the_kills() -> None:
    before = _stamps(("born", 0.0), ("imported", 0.5), ("loaded", 0.75))
    assert after_each_kill([*before, *FRESH, *FORK]) == [FRESH, FORK]


@pytest.mark.parametrize(
    ("gap", "parts"),
    [
        pytest.param(FRESH, [0.5, 0.25, 1.25, 0.5, 0.5], id="an interpreter"),
        pytest.param(FORK, [0.0, 0.0, 0.5, 0.25, 0.25], id="a fork"),
    ],
)
def test_the_parts_of_a_recovery_are_all_of_its_time(gap: list[Stamp], parts: list[float]) -> None:
    found = recovery._split(gap)
    assert [found[part] for part in recovery.PARTS] == parts
    assert found["all"] == sum(parts)


def test_a_recovery_that_began_anew_is_none() -> None:
    began_anew = [Stamp(stamp.what, stamp.at, step=0) for stamp in FRESH]
    with pytest.raises(timing.Skipped, match="no checkpoint was loaded"):
        recovery._split(began_anew)


def test_a_fork_of_the_warm_process_is_as_a_process_of_its_own(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import atexit, os, sys\natexit.register(print, 'end')\nprint(sys.argv[1:], os.getcwd())\n")
    failing = "import os, sys; print(os.environ['KEY'], file=sys.stderr); raise SystemExit(3)"
    commands = [
        (str(script), "a", "b"),
        ("-c", failing),
        ("-c", "raise OSError('full')"),
        ("-m", "json.tool", "absent"),
    ]
    with warm_python.start():
        forks = [
            timing.completed((sys.executable, *command), env={"KEY": "k"}, cwd=str(tmp_path)) for command in commands
        ]
    processes = [
        timing.completed((sys.executable, *command), env={"KEY": "k"}, cwd=str(tmp_path)) for command in commands
    ]
    assert [(fork.returncode, fork.stdout) for fork in forks] == [(own.returncode, own.stdout) for own in processes]
    assert [fork.returncode for fork in forks] == [0, 3, 1, 2]
    assert [timing.last_words(fork.stderr) for fork in forks] == [timing.last_words(own.stderr) for own in processes]
