"""Checkpointers without a trainer, and small states that they save."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from trainer_cli import (
    AsyncCheckpointer,
    Checkpointer,
    SyncCheckpointer,
    make_async_checkpointer,
    make_sync_checkpointer,
)
from trainer_cli.checkpoint.save import CheckpointWriter

WAIT_S = 60
MAKERS: dict[str, Callable[..., Checkpointer]] = {"sync": make_sync_checkpointer, "async": make_async_checkpointer}
CLASSES: dict[str, Callable[..., Checkpointer]] = {"sync": SyncCheckpointer, "async": AsyncCheckpointer}


@contextmanager
def closing(checkpointer: Checkpointer) -> Iterator[Checkpointer]:
    try:
        yield checkpointer
    finally:
        checkpointer.close()


def save(checkpointer: Checkpointer, state: Any, path: Path, **arguments: Any) -> None:
    """Save, and wait until it is written."""
    saving = checkpointer.save(state, path, **arguments)
    if saving is not None:
        saving.written.result(WAIT_S)


def state_of(seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model": {"layer.weight": torch.randn(3, 2, generator=generator), "layer.bias": torch.zeros(3)},
        "optimizer": {"param_groups": [{"lr": 0.1}]},
        "epoch": 4 + seed,
    }


def assert_same(loaded: Any, expected: Any) -> None:
    torch.testing.assert_close(loaded, expected, rtol=0, atol=0)


class Writer(CheckpointWriter):
    """Notes the further arguments of each save; fails on demand."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error, self.noted = error, list[dict[str, Any]]()

    def write(self, *arguments: Any, custom_arg: str = "", another_arg: int = 0, **named: Any) -> None:
        self.noted.append({"custom_arg": custom_arg, "another_arg": another_arg})
        if self.error is not None:
            raise self.error
        super().write(*arguments, **named)
