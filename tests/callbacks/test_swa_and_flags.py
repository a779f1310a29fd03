"""SWA: the mean of some weights is evaluated, and resumed. ScopedFlags: set for a while, and set back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Noisy, StopAt, everything, loader, same, trainer
from torch import nn
from torch.optim.swa_utils import AveragedModel

from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.callbacks.ema import EMA, SWA
from trainer_cli.callbacks.skip_samples import ScopedFlags
from trainer_cli.errors import ConfigError
from trainer_cli.trainer.hooks import Callback

FLAG = "torch.backends.cudnn.benchmark"


class AsTorchDoes(Callback):
    """The average by torch's own class."""

    def __init__(self, steps: list[int]) -> None:
        self.steps, self.model, self.evaluated = steps, None, None

    def on_train_batch_end(self, trainer: Any, model: nn.Module, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.progress.step in self.steps:
            if self.model is None:
                self.model = AveragedModel(model, use_buffers=True)
            self.model.update_parameters(model)

    def on_validate_end(self, trainer: Any, model: nn.Module, loop: Any) -> None:
        self.evaluated = {name: value.clone() for name, value in model.state_dict().items()}


def _fit(swa: SWA, *callbacks: Callback, folder: Path | None = None) -> Any:
    made = trainer(
        Noisy,
        callbacks={"swa": swa, **{type(one).__name__: one for one in callbacks}},
        settings={"max_duration": "4ep", "eval_interval": "1ep"},
        checkpoint=None if folder is None else CheckpointerCallback(folder, save_interval=2),
    )
    made.fit(loader(), loader(6, shuffle=False))
    return made


@pytest.mark.parametrize(("start", "every", "steps"), [("2ep", "1ep", [6, 9, 12]), (5, 2, [5, 6, 8, 10, 12])])
def test_the_average_is_that_of_torch(start: Any, every: Any, steps: list[int]) -> None:
    torchs = AsTorchDoes(steps)
    _fit(SWA(start, every), torchs)
    assert torchs.model is not None
    assert torchs.evaluated is not None
    for name, value in torchs.model.module.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(torchs.evaluated[name], value)


def test_of_several_averages_the_last_is_evaluated() -> None:
    seen: dict[int, Any] = {}

    class Looks(Callback):
        def on_validate_start(self, trainer: Any, model: nn.Module, loader: Any, loop: Any) -> None:
            seen[trainer.progress.step] = model.state_dict()["body.0.weight"].clone()

    ema, swa = EMA(0.5), SWA(2, 2)
    weights = _fit(swa, ema, Looks()).model.state_dict()["body.0.weight"]
    averages = [one.state_dict()["average"]["body.0.weight"] for one in (ema, swa)]
    assert torch.equal(seen[12], averages[0])
    assert not any(torch.equal(one, seen[12]) for one in (averages[1], weights))


@pytest.mark.parametrize("stop", [4, 7, 10])
def test_a_resume_averages_on(stop: int, tmp_path: Path) -> None:
    whole = _fit(SWA("2ep", 2), folder=tmp_path / "whole")
    _fit(SWA("2ep", 2), StopAt(stop), folder=tmp_path / "resumed")
    resumed = _fit(SWA("2ep", 2), folder=tmp_path / "resumed")
    assert same(everything(whole), everything(resumed)) == []


def test_flags_are_set_while_their_part_lasts_and_restored_after_an_error() -> None:
    class Watch(Callback):
        def __init__(self) -> None:
            self.seen: list[tuple[str, bool, bool]] = []

        def on_train_step_start(self, *args: Any) -> None:
            self.seen.append(("train", torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic))

        def on_validate_step_start(self, *args: Any) -> None:
            self.seen.append(("validate", torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic))
            raise RuntimeError("no more")

    before = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    assert before == (False, False)
    watch, flags = Watch(), ScopedFlags(fit={"torch.backends.cudnn.deterministic": True}, train={FLAG: True})
    made = trainer(callbacks=[flags, watch], settings={"max_duration": 2, "eval_interval": 1})
    with pytest.raises(RuntimeError, match="no more"):
        made.fit(loader(), loader(6, shuffle=False))
    assert watch.seen == [("train", True, True), ("validate", False, True)]
    assert (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic) == before
    seen: list[bool] = []

    class Look(Callback):
        def on_validate_step_start(self, *args: Any) -> None:
            seen.append(torch.backends.cudnn.benchmark)

    trainer(callbacks=[ScopedFlags(validate={FLAG: True}), Look()]).validate(loader(4, shuffle=False))
    assert (seen, torch.backends.cudnn.benchmark) == ([True], False)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"os.sep": "x"}, "'os.sep' is no attribute of torch"),
        ({"torch.backends.cudnn.benchmarks": True}, "there is no 'torch.backends.cudnn.benchmarks'"),
        ({"torch.nowhere.flag": True}, "there is no 'torch.nowhere.flag'"),
        ({"torch.load": 1}, "is a function or a class"),
        ({FLAG: 1}, "is False, so it cannot be 1"),
    ],
)
def test_only_flags_of_torch_are_set(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ScopedFlags(fit=flags)
