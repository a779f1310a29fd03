"""What holds on a GPU as on the CPU: exact resumes in each number format, and saves of the state of their step.

`scripts/gpu` runs this on a CUDA device; on the CPU the same code runs with fewer formats.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer_cli import CheckpointerCallback, Precision, Trainer, TrainingLoop
from trainer_cli.data.loader import Loader
from trainer_cli.outputs.metrics import WeightedMeans
from trainer_cli.parallel.distributed_group import join_processes
from trainer_cli.strategies.fsdp import FSDP

STEPS, HALF = 6, 3
CUDA = pytest.mark.gpu
WAYS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"precision": Precision(dtype="bf16", clip_norm=1.0)},
    "fp16": {"precision": Precision(dtype="fp16", clip_norm=1.0)},
    "compiled": {"precision": Precision(dtype="bf16"), "compile": {}},
}


class Tokens:
    """Rows of random tokens, the same each time."""

    deterministic = True

    def __init__(self) -> None:
        self.rows = torch.randint(32, (8 * STEPS, 17), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.rows[index, :-1], self.rows[index, 1:]


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pytest.importorskip("trainer_cli.addons.text.gpt")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def _fit(folder: Path, device: str, *, hard_stop: int | None = None, save_async: bool = True, **settings: Any) -> Any:
    gpt = pytest.importorskip("trainer_cli.addons.text.gpt").GPT
    trainer = Trainer(
        model=lambda: gpt(vocab_size=32, context=16, layers=2, heads=2, width=32, dropout=0.1),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
        loop=TrainingLoop(max_duration=STEPS, hard_stop=hard_stop, eval_interval=None, log_interval=2),
        checkpoint=CheckpointerCallback(folder, save_interval=1, save_async=save_async),
        seed=0,
        device=device,
        **settings,
    )
    assert trainer.fit(Loader(Tokens(), 8, shuffle=True, seed=0)).finished
    return trainer


def _weights(trainer: Any) -> dict[str, Tensor]:
    values = {name: getattr(value, "_local_tensor", value) for name, value in trainer.model.state_dict().items()}
    return {name: value.detach().cpu().clone() for name, value in values.items()}


@pytest.mark.parametrize(("device", "way"), [("cpu", "bf16"), *(pytest.param("cuda", way, marks=CUDA) for way in WAYS)])
def test_a_resume_on_this_device_is_bit_identical(device: str, way: str, tmp_path: Path) -> None:
    straight = _fit(tmp_path / "straight", device, **WAYS[way])
    _fit(tmp_path / "resumed", device, hard_stop=HALF, **WAYS[way])
    resumed = _fit(tmp_path / "resumed", device, **WAYS[way])
    assert resumed.resumed
    torch.testing.assert_close(_weights(resumed), _weights(straight), rtol=0, atol=0)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=CUDA)])
def test_what_is_written_behind_the_training_is_the_state_of_its_step(device: str, tmp_path: Path) -> None:
    _fit(tmp_path / "behind", device)
    _fit(tmp_path / "at once", device, save_async=False)
    files = sorted(path.relative_to(tmp_path / "at once") for path in (tmp_path / "at once").rglob("*.safetensors"))
    assert len({path.parts[0] for path in files}) == STEPS + 1
    for file in files:
        assert (tmp_path / "behind" / file).read_bytes() == (tmp_path / "at once" / file).read_bytes(), file


@CUDA
def test_fully_sharded_on_one_gpu_trains_as_unsharded_and_resumes_exactly(tmp_path: Path) -> None:
    group = join_processes({}, alone_too=True)
    try:
        plain = _fit(tmp_path / "plain", "cuda")
        straight = _fit(tmp_path / "straight", "cuda", strategy=FSDP(group))
        _fit(tmp_path / "resumed", "cuda", hard_stop=HALF, strategy=FSDP(group))
        resumed = _fit(tmp_path / "resumed", "cuda", strategy=FSDP(group))
        torch.testing.assert_close(_weights(resumed), _weights(straight), rtol=0, atol=0)
        torch.testing.assert_close(_weights(straight), _weights(plain), rtol=1e-4, atol=1e-5)
    finally:
        group.close()


@CUDA
def test_the_loss_for_displays_is_copied_without_waiting_for_the_device() -> None:
    means = WeightedMeans(torch.device("cuda"))
    loss = torch.tensor(3.0, device="cuda")
    means.add(loss, {}, 2)
    torch.cuda.set_sync_debug_mode("error")
    try:
        means.live_loss.request()
        means.add(loss, {}, 2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    means.live_loss.request()
    means.add(loss, {}, 2)
    assert means.live_loss.request() == 3.0
