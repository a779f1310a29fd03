"""Batches in parts: the gradient of the whole, and the same result after memory has run out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Line, assert_resumes_exactly, everything, loader, recorder, same, trainer
from torch import nn

from trainer_cli.batches.split import split_batch
from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.errors import ConfigError, TrainError, UserError
from trainer_cli.schema.sections import LoopConfig
from trainer_cli.trainer.hooks import Callback
from trainer_cli.trainer.train_step import TrainStep


class Narrow(nn.Module):
    """Has memory for so many samples; beyond, the forward fails halfway, or the backward does."""

    def __init__(self, most: int, *, in_backward: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.dropout = nn.Dropout(dropout)
        self.most, self.in_backward, self.sizes = most, in_backward, []  # type: ignore[var-annotated]

    def forward(self, batch: Any) -> Any:
        x, y = batch
        self.sizes.append(len(x))
        hidden = self.first(x)
        if self.training:
            self.norm.eval()  # Its statistics would depend on the parts.
            self.norm.num_batches_tracked += 1
        hidden = self.dropout(self.norm(hidden))
        if self.training and len(x) > self.most:
            if not self.in_backward:
                _fail()
            hidden.register_hook(_fail)
        error = self.last(hidden).squeeze(-1) - y
        return {"loss": error.square().mean(), "mae": error.abs().mean(), "tokens": len(x)}


def _fail(gradient: Any = None) -> None:
    raise torch.OutOfMemoryError("it is too large")


def _fit(model: nn.Module, microbatch: Any, **more: Any) -> Any:
    settings = {"max_duration": 5, "microbatch": microbatch, **more.pop("settings", {})}
    made = trainer(model, settings=settings, lr=0.05, **more)
    made.fit(loader(24, 8))
    return made


def _model(*args: Any, **named: Any) -> Narrow:
    torch.manual_seed(1)
    return Narrow(*args, **named)


@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
def test_a_batch_that_ran_out_of_memory_is_trained_in_halves_with_the_same_result(
    in_backward: bool, caplog: pytest.LogCaptureFixture
) -> None:
    whole = _fit(_model(99), None)
    halved = _fit(_model(3, in_backward=in_backward), "auto")
    assert halved.model.sizes == [8, 4, *[2] * (4 * 5)]
    for name, value in whole.model.state_dict().items():
        if name != "norm.num_batches_tracked":
            assert torch.allclose(value, halved.model.state_dict()[name], atol=1e-6), name
    assert int(halved.model.norm.num_batches_tracked) == 4 * 5, "buffers are as before the failed batch"
    assert (halved.progress.step, halved.progress.samples, halved.progress.tokens) == (5, 40, 40)
    assert [one.message for one in caplog.records if "out of memory" in one.message] == [
        f"out of memory with {n} samples at once: the batch is trained in parts of {n // 2}" for n in (8, 4)
    ]


def test_a_retry_draws_the_same_random_numbers_as_a_first_try() -> None:
    fixed, halved = _fit(_model(99, dropout=0.5), 4), _fit(_model(4, dropout=0.5), "auto")
    assert same(everything(fixed)["model"], everything(halved)["model"]) == []
    assert same(everything(fixed)["rng"], everything(halved)["rng"]) == []


def test_a_fixed_size_has_the_gradient_of_the_whole_batch_with_accumulation_too() -> None:
    whole = _fit(_model(99), None, settings={"grad_accum_steps": 2})
    parts = _fit(_model(99), 3, settings={"grad_accum_steps": 2})
    assert set(parts.model.sizes) == {3, 2}
    assert torch.allclose(whole.model.first.weight, parts.model.first.weight, atol=1e-6)
    assert parts.progress.tokens == whole.progress.tokens


def test_the_size_that_fits_is_resumed(tmp_path: Path) -> None:
    def fit(folder: Path, *callbacks: Callback) -> Any:
        return _fit(_model(4), "auto", callbacks=callbacks, checkpoint=CheckpointerCallback(folder, save_interval=2))

    _, resumed = assert_resumes_exactly(fit, tmp_path, 2)
    assert resumed.model.sizes == [4] * 6


def test_no_memory_for_one_sample_ends_the_training() -> None:
    with pytest.raises(TrainError, match="no memory for one sample: it is too large"):
        _fit(_model(0), "auto")


class Own(TrainStep):
    def train_batch(self, batch: Any) -> Any:
        return super().train_batch(batch)


def test_what_cannot_be_split_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"loop\.microbatch is auto, and loop\.grad_accum_steps is above 1"):
        LoopConfig(microbatch="auto", grad_accum_steps=2)
    with pytest.raises(ConfigError, match="microbatch is 0"):
        LoopConfig(microbatch=0)
    with pytest.raises(UserError, match="Own has a train_batch of its own"):
        _fit(Line(), 2, step=Own())
    with pytest.raises(UserError, match=r"has a tensor of shape \(3,\), which cannot be split"):
        list(split_batch({"x": torch.zeros(4, 2), "y": torch.zeros(3)}, 4, 2))
    batch = {"x": torch.arange(4), "names": ["a", "b", "c", "d"], "pair": (torch.arange(4), 7), "one": torch.tensor(1)}
    parts = [part for part, _ in split_batch(batch, 4, 3)]
    assert [part["names"] for part in parts] == [["a", "b", "c"], ["d"]]
    assert [part["pair"][1] for part in parts] == [7, 7]


def test_hooks_see_each_part_and_one_step() -> None:
    book: list[str] = []
    _fit(_model(99), 4, callbacks=[recorder(book)], settings={"max_duration": 1})
    hooks = [hook for hook in book if hook in ("on_after_backward", "on_after_optimizer_step")]
    assert hooks == ["on_after_backward", "on_after_backward", "on_after_optimizer_step"]
