"""Starts a script on several ranks at once, as torchrun would, and trains on them."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from command import LIMIT_S, start_program

HERE = Path(__file__).parent
IMPORTED = (
    "torch._dynamo.distributed", "torch.distributed.checkpoint", "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel", "torch.nn.parallel.distributed",
)  # fmt: skip
"""What ranks import besides what every command does: seconds for each rank."""


def on_ranks(world_size: int, program: Path, *arguments: str, imports: Sequence[str] = ()) -> list[tuple[int, str]]:
    """Run `python PROGRAM` once a rank. Returns each rank's exit code and output.

    `imports` are more heavy modules that the ranks need.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        start_program(
            program,
            arguments,
            {**shared, "WORLD_SIZE": str(world_size), "RANK": str(rank), "LOCAL_RANK": str(rank)},
            imports=(*IMPORTED, *imports),
        )
        for rank in range(world_size)
    ]
    try:
        outputs = [rank.communicate(timeout=LIMIT_S)[0] for rank in ranks]
        return [(rank.returncode or 0, output) for rank, output in zip(ranks, outputs, strict=True)]
    finally:
        for rank in ranks:
            rank.kill()
            with rank:
                pass


class Fits(NamedTuple):
    """Trainings that were made in one folder, on one start of the ranks."""

    folder: Path
    outputs: list[str]
    """What each rank printed."""
    ends: list[dict[str, str]]
    """By rank: run directory -> exit code or error. What follows in the same directory is `NAME again`."""

    def printed(self, mark: str) -> list[list[str]]:
        """By rank: what follows a mark at the beginning of lines."""
        return [re.findall(rf"^{mark} (.*)$", output, re.MULTILINE) for output in self.outputs]


def fit_on_ranks(world_size: int, jobs: list[list[str]], imports: Sequence[str] = ()) -> Fits:
    """Train each list of overrides in turn, in the current folder, by `fits.py`. `imports` is as of `on_ranks`."""
    names: list[str] = []
    for job in jobs:
        name = next((part[8:] for part in job if part.startswith("run_dir=")), job[-1])
        names.append(f"{name} again" if name in names else name)
    done = on_ranks(world_size, HERE / "fits.py", json.dumps(jobs), imports=imports)
    assert [code for code, _ in done] == [0] * world_size, done
    outputs = [output for _, output in done]
    ends = [json.loads(output.rpartition("ENDS")[2]) for output in outputs]
    return Fits(Path.cwd(), outputs, [dict(zip(names, of_rank, strict=True)) for of_rank in ends])


@contextmanager
def new_folder(tmp_path_factory: pytest.TempPathFactory, name: str) -> Iterator[Path]:
    """A new current folder, from which programs import the classes of `fits.py`."""
    folder = tmp_path_factory.mktemp(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(HERE))
        patch.chdir(folder)
        yield folder
