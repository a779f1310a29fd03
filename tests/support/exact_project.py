"""A user's project whose resume is exact; the tests add faults to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from command import LIMIT_S, environment, start_program

if TYPE_CHECKING:
    from trainer_cli.addons.exact.report import ResumeReport

Check: TypeAlias = "Callable[..., ResumeReport]"
"""The check of that project with this code added, and these overrides."""

POINTS = '''
import torch
from torch import nn


class Points(torch.utils.data.Dataset):
    """Points of a line; augmented by noise that is drawn for each sample."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        x = torch.tensor([index / 40, 1.0]) + 0.1 * torch.rand(2)
        return x, x.sum() * 3


class Data:
    def __init__(self):
        self.train, self.val = Points(), Points()
'''
"""Its data, which needs no other import."""

PARTS = f"""
import random, time

import numpy as np

from trainer_cli import Callback
{POINTS}

class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.out = nn.Linear(2, 8), nn.Linear(8, 1)
        self.dropout = nn.Dropout(0.2)

    def guess(self, x):
        return self.out(self.dropout(torch.relu(self.hidden(x)))).squeeze(1)

    def forward(self, batch):
        x, y = batch
        return {{"loss": ((self.guess(x) - y) ** 2).mean()}}
"""

EXPERIMENT = """# @package _global_
model: {_target_: parts.Line}
data: {_target_: parts.Data, batch_size: 4}
optimizer: {_target_: torch.optim.Adam, lr: 0.01}
loop: {max_duration: 100st}
"""


class WarmProbes:
    """Runs the processes of a check in one folder as forks of the process that all tests share, in place of `Probes`,
    whose two interpreters import torch for each check. All have one hash seed."""

    PROGRAM = Path(__file__).with_name("probe.py")

    def __init__(self, cwd: Path, imports: Sequence[str] = ()) -> None:
        self._cwd, self._imports = cwd, ("trainer_cli.addons.exact.recorder", *imports)

    def __call__(self, plan: Path, output: Path) -> int:
        with start_program(self.PROGRAM, [str(plan)], environment(), self._imports, cwd=self._cwd) as process:
            text, _ = process.communicate(timeout=LIMIT_S)
        output.write_text(text)
        return process.returncode or 0

    def close(self) -> None:
        """The shared process goes on."""
