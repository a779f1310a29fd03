"""A training that waits for its data says so once, with the share and a cure, and no other training does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trainer_cli.running import data_wait
from trainer_cli.running.data_wait import DataWait


def check(logs: list[tuple[int, float, float]], loader: Any) -> None:
    """Checks at each log: the step, and the seconds of waiting and of computing until then."""
    wait = DataWait()
    wait.on_train_start(None, None, loader, None, 0)  # type: ignore[arg-type]
    for step, waited_s, computed_s in logs:
        time = SimpleNamespace(
            seconds=lambda waited_s=waited_s, computed_s=computed_s: {"data": waited_s, "training": computed_s}
        )
        trainer: Any = SimpleNamespace(metric_logger=SimpleNamespace(time=time), progress=SimpleNamespace(step=step))
        wait.on_log(trainer, {})


STARTED = (10, 5.0, 1.0)
"""The first log, before which workers have started."""
WAITS = [STARTED, (110, 9.0, 3.0), (210, 11.0, 8.0), (410, 30.0, 9.0)]


@pytest.mark.parametrize(
    ("workers", "cure"),
    [
        (0, "set data.num_workers=4, or =auto"),
        (3, "set data.num_workers=6, or =auto"),
        (8, "num_workers=8 is one for each core; store samples as they are used"),
        (None, "its loader makes its own batches; give it more workers"),
    ],
)
def test_the_share_of_the_first_window_with_a_large_one_is_told_once(
    workers: int | None, cure: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(data_wait, "usable_cores", lambda: 8)
    check(WAITS, SimpleNamespace(num_workers=workers) if workers is not None else object())
    assert caplog.messages == [f"training waited 46 % of the last 200 steps for data: {cure}"]


@pytest.mark.parametrize(
    "logs",
    [
        [STARTED, (20, 7.0, 4.0)],
        [STARTED, (20, 6.0, 14.0), (30, 7.9, 24.0)],
        [(10, 50.0, 1.0), (20, 50.0, 12.0)],
    ],
    ids=["a short window", "a small share", "the start of workers"],
)
def test_nothing_is_told_of(logs: list[tuple[int, float, float]], caplog: pytest.LogCaptureFixture) -> None:
    check(logs, SimpleNamespace(num_workers=0))
    assert not caplog.messages
