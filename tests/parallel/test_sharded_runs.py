"""Runs whose model two ranks share: saved in parts, resumed by other numbers of processes, evaluated by one."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ranks import HERE, on_ranks
from trainer_cli.checkpoint.checkpointer import make_sync_checkpointer
from trainer_cli.cli.main import main

sys.path.insert(0, str(HERE.parent / "integration"))
from compare import metrics

pytestmark = pytest.mark.slow

BASE = [
    "experiment=digits_mlp", "model.dropout=0", "parallel=fsdp", "parallel.wrap_min_parameters=1000",
    "data.batch_size=4", "+data.global_batch_size=16", "callbacks=[default,ema]", "callbacks.ema.decay=0.9",
    "loop.max_duration=12", "loop.eval_interval=4", "loop.log_interval=1", "loggers.tensorboard=null",
    "checkpoint.save_interval=4", "checkpoint.max_checkpoints=null", "logging.console=off",
]  # fmt: skip
FULL = ["+callbacks.full._target_=fits.FullDisk", "+callbacks.full.rank=1", "+callbacks.full.step=7"]
DAMAGED = "damaged/checkpoints/step8/rank1.safetensors"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One start of two ranks, and of what they saved one process goes on."""
    folder, before = tmp_path_factory.mktemp("sharded"), Path.cwd()
    os.environ["PYTHONPATH"], path = str(HERE), os.environ.get("PYTHONPATH")
    os.chdir(folder)
    try:
        jobs: list[list[str]] = [
            [*BASE, "run_dir=whole"],
            [*BASE, *FULL, "run_dir=full", "checkpoint.on_save_error=warn"],
            [*BASE, *FULL, "run_dir=fails"],
            [*BASE, "run_dir=damaged", "loop.max_duration=8", "scheduler=null"],
            ["damage", DAMAGED],
            [*BASE, "run_dir=damaged", "scheduler=null"],
            [*BASE, "run_dir=undamaged", "scheduler=null"],
        ]
        ends = on_ranks(2, [HERE / "fits.py", json.dumps(jobs)])
        (folder / "output.json").write_text(json.dumps([output for _, output in ends]))
        assert [code for code, _ in ends] == [0, 0], ends
        yield folder
    finally:
        os.chdir(before)
        os.environ.pop("PYTHONPATH") if path is None else os.environ.update(PYTHONPATH=path)


@pytest.fixture(scope="module")
def outputs(runs: Path) -> list[str]:
    return json.loads((runs / "output.json").read_text())


def ends(output: str) -> list[str]:
    return json.loads(output.rpartition("ENDS")[2])


def steps(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step")) for path in run.glob("checkpoints/step*"))


def test_each_rank_has_written_about_half(runs: Path) -> None:
    for step in (4, 8, 12):
        folder = runs / "whole" / "checkpoints" / f"step{step}"
        sizes = [(folder / f"rank{rank}.safetensors").stat().st_size for rank in range(2)]
        assert abs(sizes[0] - sizes[1]) < sum(sizes) / 5
        assert make_sync_checkpointer().verify(folder).world_size == 2


def test_one_process_evaluates_as_the_ranks_did(runs: Path) -> None:
    """The moving average, which the ranks hold in parts too."""
    assert main(["validate", "ckpt=whole/checkpoints/step8", "validate.folder=checked"]) == 0
    row = json.loads((runs / "checked" / "validation.jsonl").read_text().splitlines()[0])
    logged: dict[str, Any] = next(record for record in metrics(runs / "whole") if record["step"] == 8)
    assert row["val/loss"] == pytest.approx(logged["val/loss"], rel=1e-6)
    assert row["val/accuracy"] == pytest.approx(logged["val/accuracy"], rel=1e-6)


def test_one_process_goes_on_with_the_same_samples(runs: Path) -> None:
    shutil.copytree(runs / "whole", runs / "alone")
    shutil.rmtree(runs / "alone" / "checkpoints" / "step12")
    alone = [override for override in BASE if not override.startswith("parallel")]
    assert main(["fit", *alone, "run_dir=alone"]) == 0
    after, wanted = metrics(runs / "alone"), metrics(runs / "whole")
    assert [record["step"] for record in after] == [record["step"] for record in wanted]
    for one, other in zip(after, wanted, strict=True):
        for key, value in other.items():
            assert one[key] == pytest.approx(value, rel=1e-4), (one["step"], key)
    states = [make_sync_checkpointer().read(runs / name / "checkpoints" / "step12") for name in ("alone", "whole")]
    assert states[0]["data"] == states[1]["data"]
    compared = 0
    for part in ("model", "callbacks/ema/average"):
        one, other = states
        for key in part.split("/"):
            one, other = one[key], other[key]
        for name, value in other.items():
            torch.testing.assert_close(one[name], value, rtol=1e-4, atol=1e-5)
            compared += 1
    assert compared == 8


def test_a_full_disk_of_one_rank_costs_that_save_alone(runs: Path, outputs: list[str]) -> None:
    assert ends(outputs[0])[1] == ends(outputs[1])[1] == "0"
    assert steps(runs / "full") == [0, 4, 12]
    assert "rank 1: the checkpoint could not be saved: No space left on device" in outputs[0]
    assert metrics(runs / "full") == metrics(runs / "whole")


def test_a_full_disk_of_one_rank_ends_both_if_it_must(runs: Path, outputs: list[str]) -> None:
    assert ends(outputs[0])[2].startswith("SaveError: rank 1: the checkpoint could not be saved: No space left")
    assert ends(outputs[1])[2] == "PeerError: rank 0 failed"
    assert steps(runs / "fails") == [0, 4]


def test_a_damaged_part_makes_both_ranks_resume_the_older_checkpoint(runs: Path, outputs: list[str]) -> None:
    assert "checkpoint step8 is not used, and is quarantined" in outputs[0]
    assert "resuming at step 4" in outputs[0]
    assert metrics(runs / "damaged") == metrics(runs / "undamaged")
    one, other = (
        make_sync_checkpointer().read(runs / name / "checkpoints/step12") for name in ("damaged", "undamaged")
    )
    for name, value in other["model"].items():
        assert torch.equal(one["model"][name], value), name


def test_the_parts_are_shown_and_compared_as_whole_tensors(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    logging.getLogger().handlers.clear()
    assert main(["ckpt", "show", "whole/checkpoints/step8"]) == 0
    assert "[128, 64]" in capfd.readouterr().out
    assert main(["ckpt", "diff", "whole/checkpoints/step8", "damaged/checkpoints/step12"]) == 0
    assert main(["ckpt", "verify", "whole/checkpoints/step*"]) == 0
    assert main(["ckpt", "export", "whole/checkpoints/step8", "--format", "torch", "--output", "whole.pt"]) == 0
    exported = torch.load(runs / "whole.pt", weights_only=True)
    loaded = make_sync_checkpointer().read(runs / "whole/checkpoints/step8", ["model"])["model"]
    assert all(torch.equal(exported[name], value) for name, value in loaded.items())
