"""Sparse training on two ranks, under DDP, FSDP and tensor parallelism: masks are the same on all ranks, as in one
process, and a resume with sharded masks is exact. So are the elements that SelectiveGrad trains."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import checkpoints, final_state, metrics
from ranks import Fits, fit_on_ranks, new_folder

from trainer_cli.checkpoint.checkpointer import make_sync_checkpointer
from trainer_cli.commands.command_line import main

pytestmark = pytest.mark.slow

HOW = {
    "ddp": ["parallel=ddp", "data.batch_size=8"],
    "fsdp": ["parallel=fsdp", "data.batch_size=8", "parallel.wrap_min_parameters=500"],
}
SPARSE = [
    "experiment=digits_mlp", "device=cpu", "loop.eval_interval=null", "loop.log_interval=3", "loop.max_duration=9",
    "loggers.tensorboard=null", "logging.console=off", "checkpoint.save_interval=null", "model.hidden=[32]",
    "+callbacks.sums._target_=fits.Sums",
]  # fmt: skip
METHODS = {
    "static": ["sparsity=static"],
    "gmp": ["sparsity=gmp", "sparsity.start=2", "sparsity.every=3"],
    "set": ["sparsity=set", "sparsity.every=3"],
    "rigl": ["sparsity=rigl", "sparsity.every=3"],
    "part": ["+callbacks.part={_target_: trainer_cli.SelectiveGrad, share: 0.5}"],
}
MASKS = [name for name in METHODS if name != "part"]


@pytest.fixture(scope="module")
def fits(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fits]:
    """All runs of this file: some in this process, the others on one start of two ranks."""
    with new_folder(tmp_path_factory, "sparsity") as folder:
        for name, method in METHODS.items():
            assert main(["fit", "data.batch_size=16", *SPARSE, *method, f"run_dir={folder}/one/{name}"]) == 0
        rigl = [*SPARSE, *METHODS["rigl"]]
        yield fit_on_ranks(
            2,
            [
                *([*SPARSE, *HOW[how], *METHODS[name], f"run_dir={how}/{name}"] for how, name in product(HOW, METHODS)),
                [*rigl, "parallel=fsdp", "parallel.tensor_size=2", "data.batch_size=16", "run_dir=tensor/rigl"],
                [*rigl, *HOW["fsdp"], "run_dir=fsdp/parts", "loop.hard_stop=5"],
                [*rigl, *HOW["fsdp"], "run_dir=fsdp/parts"],
            ],
        )


@pytest.fixture
def runs(fits: Fits) -> Path:
    return fits.folder


def state(run: Path) -> dict[str, Any]:
    return make_sync_checkpointer().read(run / "checkpoints" / checkpoints(run)[-1])


def test_each_run_ends_the_same_on_both_ranks(fits: Fits) -> None:
    for of_rank in fits.ends:
        expected = dict.fromkeys(of_rank, "0") | {"fsdp/parts": of_rank["fsdp/parts"]}
        assert of_rank == expected
    assert fits.ends[0] == fits.ends[1]


def test_weights_and_masks_are_the_same_on_both_ranks(fits: Fits) -> None:
    sums = fits.printed("SUMS")
    assert len(sums[0]) == 2 * len(METHODS) + 3
    assert sums[0] == sums[1]


@pytest.mark.parametrize(("how", "method"), [*product(HOW, MASKS), ("tensor", "rigl")])
def test_masks_are_those_of_one_process(runs: Path, how: str, method: str) -> None:
    one, two = (state(runs / who / method) for who in ("one", how))
    masks = one["callbacks"]["sparsity"]["masks"]
    assert masks.keys() == two["callbacks"]["sparsity"]["masks"].keys()
    for name, mask in masks.items():
        assert torch.equal(two["callbacks"]["sparsity"]["masks"][name], mask), name
        assert not two["model"][name][~mask].any()
        torch.testing.assert_close(two["model"][name], one["model"][name], rtol=1e-4, atol=1e-5)
    ratios = [metrics(runs / who / method)[-1]["train/sparsity"] for who in ("one", how)]
    assert ratios == [pytest.approx(0.8, abs=0.01)] * 2


def test_a_resume_with_sharded_masks_is_exact(runs: Path) -> None:
    parts, whole = (final_state(runs / "fsdp" / name) for name in ("parts", "rigl"))
    assert parts == whole


@pytest.mark.parametrize("how", HOW)
def test_the_elements_that_are_trained_are_those_of_one_process(runs: Path, how: str) -> None:
    one, two = (state(runs / who / "part") for who in ("one", how))
    assert one["callbacks"]["part"]
    torch.testing.assert_close(two["callbacks"]["part"], one["callbacks"]["part"], rtol=0, atol=0)
    torch.testing.assert_close(two["model"], one["model"], rtol=1e-4, atol=1e-5)
