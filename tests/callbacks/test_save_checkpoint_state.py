"""SaveCheckpointState: chosen states of some checkpoints, in files that stay and that others start from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny import Noisy, StopAt, loader, same, trainer

from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.callbacks.save_checkpoint_state import SaveCheckpointState
from trainer_cli.loads.options import LoadOptions


def _fit(folder: Path, saver: SaveCheckpointState, *callbacks: Any, **more: Any) -> Any:
    made = trainer(
        Noisy, callbacks=[saver, *callbacks], run_dir=folder, settings={"max_duration": 11},
        optimizer=lambda model: torch.optim.Adam(model.parameters(), 0.01),
        checkpoint=CheckpointerCallback(
            folder / "ckpt", save_interval=2, ephemeral_save_interval=1, max_checkpoints=1, remove="all_without_rule",
        ),
        **more,
    )  # fmt: skip
    made.fit(loader())
    return made


def _names(folder: Path) -> list[str]:
    return sorted((path.name for path in folder.iterdir()), key=lambda name: int(name[4:]))


def test_weights_of_every_kth_checkpoint_and_of_the_last_stay(tmp_path: Path) -> None:
    made = _fit(tmp_path, SaveCheckpointState(every=4))
    assert _names(tmp_path / "states") == ["step4", "step8", "step11"]
    state = made.checkpointer.read(tmp_path / "states/step11")
    assert set(state) == {"model", "model_versions", "progress"}
    assert same(state["model"], made.model.state_dict()) == []
    rows = trainer(Noisy).validate_all(loader(6, shuffle=False), sorted((tmp_path / "states").iterdir()))
    assert sorted({row.step for row in rows}) == [4, 8, 11]


def test_a_stop_is_no_end_and_a_resume_goes_on(tmp_path: Path) -> None:
    _fit(tmp_path, SaveCheckpointState(every=4), StopAt(7))
    assert _names(tmp_path / "states") == ["step4"]
    _fit(tmp_path, SaveCheckpointState(every=4))
    assert _names(tmp_path / "states") == ["step4", "step8", "step11"]


def test_a_run_starts_from_the_states_that_were_saved(tmp_path: Path) -> None:
    first = _fit(tmp_path, SaveCheckpointState(["model", "optimizer"], folder="parts"))
    assert _names(tmp_path / "parts") == ["step0", "step2", "step4", "step6", "step8", "step10", "step11"]
    other = trainer(Noisy, optimizer=lambda model: torch.optim.Adam(model.parameters(), 0.01))
    other.load_checkpoint(tmp_path / "parts/step11", LoadOptions(states=["model", "optimizer"]))
    assert same(other.model.state_dict(), first.model.state_dict()) == []
    assert same(list(other.optimizer.state.values()), list(first.optimizer.state.values())) == []
