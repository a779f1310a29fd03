"""LoRA: only adapters are trained, a resume is exact, and an export holds the model without them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from trainer_cli.callbacks.checkpointer import CheckpointerCallback
from trainer_cli.checkpoint.export import ExportFormat
from trainer_cli.data.loader import Loader
from trainer_cli.errors import CheckpointError, ConfigError, UserError
from trainer_cli.models.lora import lora
from trainer_cli.runs.export import export_one
from trainer_cli.trainer.trainer import Trainer
from trainer_cli.trainer.training_loop import TrainingLoop

pytest.importorskip("peft")


class Two(nn.Module):
    """A linear layer, one as transformers' GPT-2 has them, and a head."""

    def __init__(self) -> None:
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        self.first, self.second, self.head = nn.Linear(3, 4), Conv1D(4, 4), nn.Linear(4, 1)

    def guess(self, x: Tensor) -> Any:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))

    def forward(self, batch: Tensor) -> Any:
        return (self.guess(batch).squeeze(-1) - batch.sum(1)).square().mean()


def _model(**settings: Any) -> nn.Module:
    torch.manual_seed(7)
    base = Two()
    return lora(base, **{"targets": ["first", "second"], "r": 2, "alpha": 6, "train": ["head.*"], **settings})


def _fit(folder: Path, steps: int) -> Trainer:
    made = Trainer(
        model=_model, optimizer=lambda model: torch.optim.Adam(model.parameters(), 0.05),
        loop=TrainingLoop(max_duration=6, hard_stop=steps, eval_interval=None, log_interval=None),
        checkpoint=CheckpointerCallback(folder, save_interval=3), seed=0, device="cpu",
    )  # fmt: skip
    made.fit(Loader(torch.randn(12, 3, generator=torch.Generator().manual_seed(1)), 4, shuffle=True, seed=0))
    return made


def test_adapters_and_chosen_parameters_are_trained_and_nothing_else(tmp_path: Path) -> None:
    first, trained = _model().state_dict(), _fit(tmp_path, 6).model.state_dict()
    moved = {name for name in first if not torch.equal(first[name], trained[name])}
    adapters = {f"{layer}.lora_{part}.default.weight" for layer in ("first", "second") for part in "AB"}
    assert moved == adapters | {"head.weight", "head.bias"}


def test_a_resumed_fine_tune_is_exact(tmp_path: Path) -> None:
    whole = _fit(tmp_path / "whole", 6)
    _fit(tmp_path / "parts", 3)
    resumed = _fit(tmp_path / "parts", 6)
    assert all(torch.equal(whole.model.state_dict()[name], value) for name, value in resumed.model.state_dict().items())


def test_a_merged_export_is_the_model_without_adapters(tmp_path: Path) -> None:
    made = _fit(tmp_path, 6)
    written = export_one(tmp_path / "step6", ExportFormat.safetensors, tmp_path / "merged.safetensors", merge_lora=True)
    plain = Two()
    plain.load_state_dict(load_file(written.path), strict=True)
    made.model.eval()
    x = torch.randn(5, 3)
    torch.testing.assert_close(plain.guess(x), made.model.guess(x))
    with pytest.raises(CheckpointError, match="no LoRA adapters"):
        export_one(written.path, ExportFormat.torch, tmp_path / "again.pt", merge_lora=True)


def test_mistakes_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no linear layer matches"):
        _model(targets=["attention.*"])
    with pytest.raises(ConfigError, match=r"no parameter matches 'tail\.\*'"):
        _model(train=["tail.*"])
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match="needs the package peft"):
        _model()
