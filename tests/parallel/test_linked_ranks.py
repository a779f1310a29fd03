"""Ranks whose frozen tensors are in files that their checkpoints share: as without links, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import Fits, fit_on_ranks, new_folder
from tiny import same

from trainer_cli.catalog.catalog import Catalog
from trainer_cli.checkpoint.checkpointer import Checkpointer
from trainer_cli.commands.command_line import main

pytestmark = pytest.mark.slow

BASE = [
    "experiment=digits_mlp", "model.hidden=[1024,1024]", "model.dropout=0", "freeze=[layers.1.*,layers.4.*]",
    "data.batch_size=8", "data.global_batch_size=16", "scheduler=null", "loop.max_duration=6",
    "loop.eval_interval=null", "loggers.tensorboard=null",
    "checkpoint.save_interval=2", "checkpoint.remove=never", "logging.console=off",
]  # fmt: skip
"""Frozen matrices of 4 MiB and 256 KiB, which two ranks divide."""
WAYS = {
    "ddp": ["parallel=ddp"],
    "fsdp": ["parallel=fsdp", "parallel.wrap_min_parameters=1000"],
}
STEPS = (0, 2, 4, 6)


@pytest.fixture(scope="module")
def fits(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fits]:
    with new_folder(tmp_path_factory, "linked"):
        jobs: list[list[str]] = []
        for name, way in WAYS.items():
            jobs += [
                [*BASE, *way, f"run_dir={name}"],
                [*BASE, *way, f"run_dir={name}_written", "checkpoint.link_frozen=false"],
                [*BASE, *way, f"run_dir={name}_parts", "loop.hard_stop=4"],
                [*BASE, *way, f"run_dir={name}_parts"],
            ]
        yield fit_on_ranks(2, jobs)


def inodes(run: Path) -> dict[str, set[int]]:
    """Name of a file of frozen tensors -> the inodes that its checkpoints have."""
    found: dict[str, set[int]] = {}
    for path in run.glob("checkpoints/step*/*.frozen.safetensors"):
        found.setdefault(path.name, set()).add(path.stat().st_ino)
    return found


@pytest.mark.parametrize("way", WAYS)
def test_each_rank_writes_its_frozen_tensors_once_also_over_a_resume(fits: Fits, way: str) -> None:
    for run in (way, f"{way}_parts"):
        found = inodes(fits.folder / run)
        # Under DDP one rank has the large matrix, and the other the rest, which is below 1 MiB.
        assert len(found) == (2 if way == "fsdp" else 1)
        assert [len(inodes) for inodes in found.values()] == [1] * len(found)
        assert len(list((fits.folder / run).glob("checkpoints/step*/*.frozen.safetensors"))) == 4 * len(found)
    assert inodes(fits.folder / f"{way}_written") == {}


@pytest.mark.parametrize("way", WAYS)
def test_every_checkpoint_is_intact_and_the_one_without_links(fits: Fits, way: str) -> None:
    for run in (way, f"{way}_parts"):
        catalog = Catalog.of(fits.folder / run / "checkpoints")
        assert [entry.step for entry in catalog.entries()] == list(STEPS)
        assert [catalog.why_damaged(entry) for entry in catalog.entries()] == [None] * len(STEPS)
        for step in STEPS:
            linked, written = (
                Checkpointer().read(fits.folder / name / f"checkpoints/step{step}", ["model", "optimizer"])
                for name in (run, f"{way}_written")
            )
            assert same(written, linked) == []


@pytest.mark.parametrize("way", WAYS)
def test_one_process_goes_on_from_what_two_have_linked(fits: Fits, way: str) -> None:
    assert main(["validate", f"ckpt={way}/checkpoints/step6", f"validate.folder=checked_{way}"]) == 0
    assert main(["fit", *BASE, f"run_dir={way}", "loop.max_duration=8", "data.batch_size=16"]) == 0
    model = Checkpointer().read(Path(way, "checkpoints/step8"), ["model"])["model"]
    before = Checkpointer().read(Path(way, "checkpoints/step6"), ["model"])["model"]
    frozen = [name for name in model if name.startswith(("layers.1.", "layers.4."))]
    assert frozen
    assert same({name: before[name] for name in frozen}, {name: model[name] for name in frozen}) == []
    assert Path(way, "checkpoints/step8/rank0.frozen.safetensors").exists()
