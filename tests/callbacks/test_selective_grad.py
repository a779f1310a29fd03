"""SelectiveGrad: only the chosen elements move, and they are the same after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Noisy, StopAt, everything, loader, same, trainer

from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.callbacks.skip_samples import SelectiveGrad


def _fit(callback: SelectiveGrad, *others: Any, folder: Path | None = None) -> Any:
    made = trainer(
        Noisy, callbacks=[callback, *others], settings={"max_duration": 8},
        checkpoint=None if folder is None else CheckpointerCallback(folder, save_interval=3),
    )  # fmt: skip
    made.fit(loader())
    return made


@pytest.mark.parametrize("init", ["random", "magnitude"])
def test_only_the_chosen_elements_move(init: str) -> None:
    before = trainer(Noisy).model.state_dict()
    made = _fit(SelectiveGrad(0.25, ["body.0.*"], init=init))
    after = made.model.state_dict()
    moved = (before["body.0.weight"] != after["body.0.weight"]).sum()
    assert 0 < int(moved) <= 4
    assert 0 < int((before["body.0.bias"] != after["body.0.bias"]).sum()) <= 2
    assert (before["body.4.weight"] != after["body.4.weight"]).all(), "others are trained as usual"
    if init == "magnitude":
        largest = before["body.0.weight"].abs().flatten().topk(4).indices
        still = torch.ones(16, dtype=torch.bool).index_fill(0, largest, False)
        assert torch.equal(before["body.0.weight"].flatten()[still], after["body.0.weight"].flatten()[still])


def test_a_resume_goes_on_with_the_same_elements(tmp_path: Path) -> None:
    whole = _fit(SelectiveGrad(0.25, ["body.0.*"]), folder=tmp_path / "whole")
    _fit(SelectiveGrad(0.25, ["body.0.*"]), StopAt(4), folder=tmp_path / "parts")
    resumed = _fit(SelectiveGrad(0.25, ["body.0.*"]), folder=tmp_path / "parts")
    assert same(everything(whole), everything(resumed)) == []
