"""The first Ctrl-C in Python ends a fit after its step, with a save; the second one at once."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from tiny import loader, on, trainer

from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.trainer.ctrl_c import CTRL_C


def _fit_with_ctrl_c(folder: Path | None, times: int, at: int = 3) -> Any:
    def press(made: Any, *_: Any) -> None:
        if made.progress.step == at - 1:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)

    return trainer(
        callbacks=[on(on_train_step_start=press)],
        settings={"max_duration": 8},
        checkpoint=None if folder is None else CheckpointerCallback(folder),
    )


@pytest.mark.parametrize(
    ("saves", "times", "step", "saved"),
    [(True, 1, 3, ["step0", "step3"]), (True, 2, 2, ["step0"]), (False, 1, 2, [])],
    ids=["first", "second", "without checkpoints"],
)
def test_a_fit_is_interrupted_after_its_step_was_saved(
    saves: bool, times: int, step: int, saved: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    made = _fit_with_ctrl_c(tmp_path if saves else None, times)
    with pytest.raises(KeyboardInterrupt):
        made.fit(loader())
    assert made.progress.step == step
    assert sorted(path.name for path in tmp_path.glob("step*")) == saved
    assert capfd.readouterr().err.count("Ctrl-C again stops at once") == saves
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if saved[1:]:
        assert _fit_with_ctrl_c(tmp_path, 0).fit(loader()).step == 8


def test_a_handler_of_the_script_stays(tmp_path: Path) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        assert _fit_with_ctrl_c(tmp_path, 1).fit(loader()).step == 8
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIGINT]


def test_a_fit_in_a_thread_installs_no_handler(tmp_path: Path) -> None:
    handlers: list[Any] = []
    watched = on(on_train_step_start=lambda *_: handlers.append(signal.getsignal(signal.SIGINT)))
    made = trainer(callbacks=[watched], settings={"max_duration": 2}, checkpoint=CheckpointerCallback(tmp_path))
    thread = threading.Thread(target=made.fit, args=(loader(),))
    thread.start()
    thread.join(60)
    assert handlers == [signal.default_int_handler] * 2


def test_a_rank_whose_peer_was_interrupted_is_interrupted_too(tmp_path: Path) -> None:
    # As the ranks agree on it: the reason alone reaches a rank without a signal of its own.
    stops = on(on_train_step_start=lambda made, *_: made.stop(CTRL_C, finished=False))
    made = trainer(callbacks=[stops], settings={"max_duration": 8}, checkpoint=CheckpointerCallback(tmp_path))
    with pytest.raises(KeyboardInterrupt, match="stopped at step 1"):
        made.fit(loader())
