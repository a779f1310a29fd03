"""Progress: carried whole, or refused."""

from __future__ import annotations

import pytest

from trainer_cli.steps.progress import Progress


def test_progress_comes_back_as_it_was_saved() -> None:
    saved = Progress(step=7, epoch=2, batch=1, epoch_samples=4, samples=24, tokens=96, seconds=1.5, last_samples=20)
    found = Progress()
    found.load_state_dict(saved.state_dict())
    assert found == saved


@pytest.mark.parametrize("change", [{"era": 3}, {"step": None}])
def test_a_count_that_is_missing_or_unknown_is_named(change: dict[str, int | None]) -> None:
    state = {**Progress().state_dict(), **change}
    state = {name: value for name, value in state.items() if value is not None}
    with pytest.raises(ValueError, match=next(iter(change))):
        Progress().load_state_dict(state)
