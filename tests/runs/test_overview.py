"""A machine with a GPU that trains on the CPU says why, unless the user has chosen that."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trainer_cli.running.overview import why_on_cpu


@pytest.mark.parametrize(
    ("setting", "device", "visible", "cuda", "why"),
    [
        ("auto", "cpu", None, None, "this torch has no CUDA"),
        ("auto", "cpu", "0", None, "this torch has no CUDA"),
        (
            "auto",
            "cpu",
            None,
            "13.0",
            "torch finds no usable GPU; `nvidia-smi` shows whether the driver works",
        ),
        ("cpu", "cpu", None, None, None),
        ("auto", "cpu", "", None, None),
        ("auto", "meta", None, None, None),
    ],
    ids=["a CPU build", "a CPU build, one GPU visible", "a CUDA build", "chosen", "GPUs are hidden", "another device"],
)
def test_a_machine_with_a_gpu_says_why_it_trains_on_the_cpu(
    setting: str, device: str, visible: str | None, cuda: str | None, why: str | None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.version, "cuda", cuda)
    gpu = tmp_path / "nvidia0"
    assert why_on_cpu(setting, torch.device(device), visible, [gpu]) is None, "there is no GPU"
    gpu.touch()
    assert why_on_cpu(setting, torch.device(device), visible, [gpu]) == why
