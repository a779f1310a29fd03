"""The training that all contenders do: a small MLP on fixed points, the same steps in every run of a contender."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

STEPS = 48
EVERY = 4
"""Steps from save to save. It is also the length of an epoch, so that trainers that save at the end of one can."""
BATCH = 16
WIDTH = 256


class Points(Dataset[dict[str, Tensor]]):
    """The samples of an epoch."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(EVERY * BATCH, 64, generator=generator)
        self.targets = torch.randint(10, (EVERY * BATCH,), generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": self.inputs[index], "targets": self.targets[index]}


class Data:
    """For `train`."""

    def __init__(self) -> None:
        self.train = Points()


class Model(nn.Module):
    """1 MB of weights and state of AdamW."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)
        )
        _models.append(self)

    def forward(self, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """The loss of a batch, which all contenders read under this name."""
        return {"loss": nn.functional.cross_entropy(self.layers(inputs), targets)}


_models: list[Model] = []


def batch_of(points: Points, step: int) -> dict[str, Tensor]:
    """The batch of a step, counted from 0."""
    start = step * BATCH % len(points)
    return {"inputs": points.inputs[start : start + BATCH], "targets": points.targets[start : start + BATCH]}


def digest_weights() -> str:
    """Digest of the weights of the model that was made last."""
    return digest_tensors(_models[-1].state_dict().values())


def digest_tensors(tensors: Iterable[Tensor]) -> str:
    """Digest of the bytes of tensors."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest()[:16]


def announce(step: int) -> None:
    """Report that the save of a step has returned, in the words of `train`."""
    _write(f"committed step {step}")
    if os.environ.get("FAULTS_STOP_AT") == str(step):
        os._exit(0)


def report_resume(step: int) -> None:
    """Report from which step a training goes on."""
    _write(f"resuming at step {step}")


def report_end() -> None:
    """Report the weights at the end."""
    _write(f"end {digest_weights()}")


def _write(line: str) -> None:
    # In one call and unbuffered, so that a line is whole when the process is killed.
    os.write(1, f"{line}\n".encode())
