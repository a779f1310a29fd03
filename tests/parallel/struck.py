"""Ranks that are killed or stopped at several moments: the run ends as if undisturbed. `scripts/ranks` runs this."""

from __future__ import annotations

from pathlib import Path

import pytest
from compare import final_state, metrics
from striking import KILLED, RAISED, STOPPED, fit, strike

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    fit(folder, "+callbacks.ask.rank=9", "+callbacks.ask.at=never")
    return folder / "run"


@pytest.mark.parametrize(
    ("rank", "at", "number", "torchrun"),
    [
        (1, "step", KILLED, True),
        (1, "save", KILLED, False),
        (1, "evaluation", KILLED, False),
        (1, "start", KILLED, False),
        (0, "step", KILLED, False),
        (1, "step", STOPPED, False),
        (0, "save", STOPPED, False),
        (1, "load", STOPPED, False),
        (1, "step", RAISED, False),
    ],
)
def test_the_run_ends_as_an_undisturbed_one(
    tmp_path: Path, undisturbed: Path, rank: int, at: str, number: str, torchrun: bool
) -> None:
    strike(tmp_path, rank, at, number, torchrun=torchrun)
    assert final_state(tmp_path / "run") == final_state(undisturbed)
    assert metrics(tmp_path / "run") == metrics(undisturbed)
