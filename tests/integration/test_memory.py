"""How much host memory a training takes with saves, beyond what it takes without: one copy of the state, not more."""

from __future__ import annotations

from pathlib import Path

import pytest
from command import LIMIT_S, environment, start_program

STATE_BYTES = 3 * 4 * (60_000 * 256)
MORE_BYTES = 200 << 20
TRAIN = """
import sys
import torch
from trainer_cli import CheckpointerCallback, Trainer, TrainingLoop

folder, saves, steps = sys.argv[1], sys.argv[2] == "saves", int(sys.argv[3])


class Table(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.zeros(60_000, 256))

    def forward(self, batch):
        return (self.table.sum() - batch[0].sum()).square()


data = torch.utils.data.TensorDataset(torch.ones(64, 2))
checkpoint = CheckpointerCallback(folder, save_interval=2, max_checkpoints=1, save_async=True) if saves else None
trainer = Trainer(
    model=Table,
    optimizer=lambda model: torch.optim.Adam(model.parameters(), fused=True),
    loop=TrainingLoop(max_duration=steps, log_interval=None, eval_interval=None),
    checkpoint=checkpoint,
    device="cpu",
)
trainer.fit(data)
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def peak_bytes(folder: Path, what: str, steps: int) -> int:
    """The most memory that a process held which trained, with or without saves."""
    program = folder.with_suffix(".py")
    program.write_text(TRAIN)
    with start_program(program, [str(folder), what, str(steps)], environment()) as process:
        output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, output
    return int(output.splitlines()[-1]) * 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell a process's peak")
def test_saves_take_one_copy_of_the_state_and_a_resume_no_more(tmp_path: Path) -> None:
    bare = peak_bytes(tmp_path / "bare", "bare", 5)
    saving = peak_bytes(tmp_path / "saving", "saves", 5)
    resumed = peak_bytes(tmp_path / "saving", "saves", 9)
    print(f"MB: bare {bare >> 20}, with saves {saving >> 20}, resumed {resumed >> 20}, state {STATE_BYTES >> 20}")
    assert bare > STATE_BYTES
    assert saving - bare > STATE_BYTES // 2, "the check sees the copy"
    assert max(saving, resumed) <= bare + STATE_BYTES + MORE_BYTES
