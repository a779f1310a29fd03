"""Runs whose model two ranks share: saved in parts, resumed by other numbers of processes, evaluated by one."""

from __future__ import annotations

import json
import logging
import re
import shutil
import tarfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import final_state, metrics
from ranks import Fits, fit_on_ranks, new_folder
from s3 import new_bucket, s3_server
from small_parts import present

from trainer_cli.checkpoint.checkpointer import make_sync_checkpointer
from trainer_cli.checkpoint.group_verify import share_of
from trainer_cli.commands.command_line import main
from trainer_cli.manifest import Manifest
from trainer_cli.parallel.distributed_group import join_processes
from trainer_cli.strategies.fsdp import FSDP

pytestmark = pytest.mark.slow

BASE = [
    "experiment=digits_mlp", "model.dropout=0", "parallel=fsdp", "parallel.wrap_min_parameters=1000",
    "data.batch_size=4", "data.global_batch_size=16", "callbacks=[default,ema]", "callbacks.ema.decay=0.9",
    "loop.max_duration=6", "loop.eval_interval=2", "loop.log_interval=1", "loggers.tensorboard=null",
    "checkpoint.save_interval=2", "checkpoint.max_checkpoints=null", "logging.console=off",
]  # fmt: skip
FULL = ["+callbacks.full._target_=fits.FullDisk", "+callbacks.full.rank=1", "+callbacks.full.step=3"]
HYBRID = [*BASE, "parallel.shard_size=1", "model.hidden=[512,64]", "loop.max_duration=4"]
ARCHIVES = ["checkpoint.format=archive", "checkpoint.compression=gz"]
MIXED = [
    "experiment=digits", "model.channels=[4,8]", "parallel=fsdp", "data.batch_size=16", "loop.max_duration=4",
    "loop.log_interval=1", "loop.eval_interval=2", "checkpoint.save_interval=2", "logging.console=off",
    "loggers.tensorboard=null", "precision=bf16", "scheduler=null", "checkpoint.ephemeral_save_interval=null",
]  # fmt: skip
UNSAVED = ["+callbacks.bad._target_=fits.UnsavedState", "+callbacks.bad.rank=1", "+callbacks.bad.step=4"]
DAMAGED = "damaged/checkpoints/step4/rank1.safetensors"


@pytest.fixture(scope="module")
def fits(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fits]:
    """One start of two ranks, and of what they saved one process goes on."""
    with new_folder(tmp_path_factory, "sharded"), s3_server() as endpoint:
        in_store = [*BASE, "run_dir=stored", f"checkpoint.folder=s3://{new_bucket(endpoint)}/stored"]
        apart = ["machines", *BASE, "run_dir=apart", f"checkpoint.folder=s3://{new_bucket(endpoint)}/apart"]
        jobs: list[list[str]] = [
            [*BASE, "run_dir=whole"],
            [*BASE, *FULL, "run_dir=full", "checkpoint.on_save_error=warn"],
            [*BASE, *FULL, "run_dir=fails"],
            [*BASE, "run_dir=damaged", "loop.max_duration=4", "scheduler=null"],
            ["damage", DAMAGED],
            [*BASE, "run_dir=damaged", "scheduler=null"],
            [*BASE, "run_dir=undamaged", "scheduler=null"],
            [*HYBRID, "run_dir=hybrid"],
            [*HYBRID, "run_dir=hybrid_cut", "loop.hard_stop=2"],
            [*HYBRID, "run_dir=hybrid_cut"],
            [*MIXED, "run_dir=bf16"],
            [*MIXED, "run_dir=mixed", "parallel.mixed_precision=true"],
            [*MIXED, "run_dir=mixed_cut", "parallel.mixed_precision=true", "loop.hard_stop=2"],
            [*MIXED, "run_dir=mixed_cut", "parallel.mixed_precision=true"],
            [*BASE, *UNSAVED, "run_dir=unsaved"],
            [*BASE, *UNSAVED, "run_dir=unsaved_goes_on", "checkpoint.on_save_error=warn"],
            [*BASE, "run_dir=file", "checkpoint.format=torch_file"],
            [*in_store, "loop.hard_stop=4"],
            in_store,
            [*apart, "loop.hard_stop=4", "checkpoint.max_checkpoints=1"],
            ["lose", "machine0/apart"],
            [*apart, "logging.rank_files=true"],
            [*HYBRID, *ARCHIVES, "run_dir=archives", "loop.hard_stop=2"],
            [*HYBRID, *ARCHIVES, "run_dir=archives"],
        ]
        yield fit_on_ranks(2, jobs)


@pytest.fixture
def runs(fits: Fits) -> Path:
    return fits.folder


def steps(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step")) for path in run.glob("checkpoints/step*"))


def test_each_rank_has_written_about_half(runs: Path) -> None:
    for step in (2, 4, 6):
        folder = runs / "whole" / "checkpoints" / f"step{step}"
        sizes = [(folder / f"rank{rank}.safetensors").stat().st_size for rank in range(2)]
        assert abs(sizes[0] - sizes[1]) < sum(sizes) / 5
        assert make_sync_checkpointer().verify(folder).world_size == 2


def test_one_process_evaluates_as_the_ranks_did(runs: Path) -> None:
    """The moving average, which the ranks hold in parts too."""
    assert main(["validate", "ckpt=whole/checkpoints/step4", "validate.folder=checked"]) == 0
    row = json.loads((runs / "checked" / "validation.jsonl").read_text().splitlines()[0])
    logged: dict[str, Any] = next(record for record in metrics(runs / "whole") if record["step"] == 4)
    assert row["val/loss"] == pytest.approx(logged["val/loss"], rel=1e-6)
    assert row["val/accuracy"] == pytest.approx(logged["val/accuracy"], rel=1e-6)


def test_one_process_goes_on_with_the_same_samples(runs: Path) -> None:
    shutil.copytree(runs / "whole", runs / "alone")
    shutil.rmtree(runs / "alone" / "checkpoints" / "step6")
    alone = [override for override in BASE if not override.startswith("parallel")]
    assert main(["fit", *alone, "run_dir=alone"]) == 0
    after, wanted = metrics(runs / "alone"), metrics(runs / "whole")
    assert [record["step"] for record in after] == [record["step"] for record in wanted]
    for one, other in zip(after, wanted, strict=True):
        for key, value in other.items():
            assert one[key] == pytest.approx(value, rel=1e-4), (one["step"], key)
    states = [make_sync_checkpointer().read(runs / name / "checkpoints" / "step6") for name in ("alone", "whole")]
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


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("full", "rank 1: the checkpoint could not be saved: No space left on device"),
        ("unsaved_goes_on", "rank 1: ZeroDivisionError: the callback's own"),
    ],
)
def test_a_save_that_fails_on_one_rank_costs_that_save_alone(fits: Fits, name: str, error: str) -> None:
    assert fits.ends[0][name] == fits.ends[1][name] == "0"
    assert steps(fits.folder / name) == [0, 2, 6]
    assert error in fits.outputs[0]
    assert metrics(fits.folder / name) == metrics(fits.folder / "whole")


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("fails", "FullDiskError: rank 1: the checkpoint could not be saved: No space left"),
        ("unsaved", "SaveError: rank 1: ZeroDivisionError: the callback's own."),
    ],
)
def test_a_save_that_fails_on_one_rank_ends_both_if_it_must(fits: Fits, name: str, error: str) -> None:
    assert fits.ends[0][name].startswith(error)
    assert fits.ends[1][name] == "PeerError: rank 0 failed"
    assert steps(fits.folder / name) == [0, 2]
    summary = json.loads((fits.folder / name / "summary.json").read_text())
    reason, status = ("NoSpaceError", "stopped") if name == "fails" else ("SaveError", "failed")
    assert (summary["reason"].partition(": ")[0], summary["status"]) == (reason, status)


def test_a_damaged_part_makes_both_ranks_resume_the_older_checkpoint(fits: Fits) -> None:
    runs, output = fits.folder, fits.outputs[0]
    whole = make_sync_checkpointer().manifest(runs / "undamaged/checkpoints/step4")
    assert Path(DAMAGED).name in share_of(whole, 1, 2), "rank 1 finds the damage"
    assert re.search(r"step4 is quarantined as .*the digest differs", output)
    assert "resuming at step 2" in output
    assert metrics(runs / "damaged") == metrics(runs / "undamaged")
    one, other = (make_sync_checkpointer().read(runs / name / "checkpoints/step6") for name in ("damaged", "undamaged"))
    for name, value in other["model"].items():
        assert torch.equal(one["model"][name], value), name


def test_the_parts_are_shown_and_compared_as_whole_tensors(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    logging.getLogger().handlers.clear()
    assert main(["ckpt", "show", "whole/checkpoints/step4"]) == 0
    assert "[128, 64]" in capfd.readouterr().out
    assert main(["ckpt", "diff", "whole/checkpoints/step4", "damaged/checkpoints/step6"]) == 0
    assert main(["ckpt", "verify", "whole/checkpoints/step*"]) == 0
    export = ["ckpt", "export", "whole/checkpoints/step4", "--format", "torch", "--ema", "none"]
    assert main([*export, "--output", "whole.pt"]) == 0
    exported = torch.load(runs / "whole.pt", weights_only=True)
    loaded = make_sync_checkpointer().read(runs / "whole/checkpoints/step4", ["model"])["model"]
    assert all(torch.equal(exported[name], value) for name, value in loaded.items())


def test_replicas_of_a_hybrid_sharding_are_written_once(runs: Path) -> None:
    """Small tensors are in the file of every rank, so that it reads no other for them."""
    manifest = Manifest.parse((runs / "hybrid/checkpoints/step4/manifest.json").read_bytes())
    where: dict[str, list[str]] = {}
    for file, parts in manifest.shards.items():
        for name in parts:
            where.setdefault(name, []).append(file)
    large = [f"model/layers.{number}.weight" for number in (1, 4)]
    assert [len(where[name]) for name in large] == [1, 1]
    assert where[large[0]] != where[large[1]]
    assert len(where["model/layers.1.bias"]) == 2


@pytest.mark.parametrize("run", ["hybrid", "mixed"])
def test_a_resume_of_a_hybrid_or_a_mixed_precision_training_is_bit_identical(runs: Path, run: str) -> None:
    assert final_state(runs / f"{run}_cut") == final_state(runs / run)
    assert metrics(runs / f"{run}_cut") == metrics(runs / run)


def test_one_process_evaluates_a_hybrid_sharding_as_the_ranks_did(runs: Path) -> None:
    assert main(["validate", "ckpt=hybrid/checkpoints/step4", "validate.folder=hybrid_checked"]) == 0
    row = json.loads((runs / "hybrid_checked" / "validation.jsonl").read_text().splitlines()[0])
    assert row["val/loss"] == pytest.approx(metrics(runs / "hybrid")[-1]["val/loss"], rel=1e-6)


def test_mixed_precision_of_the_parameters_is_near_that_of_the_activations(runs: Path) -> None:
    one, other = ([record["train/loss"] for record in metrics(runs / name)] for name in ("mixed", "bf16"))
    assert len(one) == 4
    assert one == pytest.approx(other, rel=1e-2)
    weights = make_sync_checkpointer().read(runs / "mixed/checkpoints/step4", ["model"])["model"]
    assert {value.dtype for name, value in weights.items() if name.endswith("weight")} == {torch.float32}


def test_mixed_precision_may_not_change_on_a_resume(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    logging.getLogger().handlers.clear()
    assert main(["fit", *MIXED, "run_dir=mixed", "loop.max_duration=5"]) == 2
    assert "refused                          parallel.mixed_precision  true -> false" in capfd.readouterr().err


def test_a_format_of_one_process_is_refused_with_the_cure(fits: Fits) -> None:
    assert fits.ends[0]["file"] == (
        "UserError: checkpoint.format=torch_file saves the state of one process, and this run has 2. "
        "Use checkpoint.format=tensors or archive; train ckpt export writes the others."
    )
    assert fits.ends[1]["file"].startswith("PeerError: rank 0 failed: UserError: checkpoint.format")
    assert not (fits.folder / "file").exists()


def test_ranks_of_one_machine_save_to_an_object_store_and_resume_from_it(fits: Fits) -> None:
    assert fits.ends[0]["stored again"] == fits.ends[1]["stored again"] == "0"
    assert metrics(fits.folder / "stored") == metrics(fits.folder / "whole")
    assert "resuming at step 4" in fits.outputs[0]


def test_machines_that_share_no_folder_save_to_an_object_store_and_resume_from_it(fits: Fits) -> None:
    """The run directory of rank 0 is lost in between."""
    assert [ends["apart again"] for ends in fits.ends] == ["0", "0"]
    straight = {record["step"]: record for record in metrics(fits.folder / "whole")}
    resumed = metrics(fits.folder / "machine0" / "apart")
    assert resumed[0]["step"] == 5
    assert [record == straight[record["step"]] for record in resumed] == [True] * len(resumed)
    assert "(apart is gone, but s3://" in fits.outputs[0]
    assert sorted(path.name for path in (fits.folder / "machine1" / "apart").iterdir()) == [
        "checkpoints", "train.rank1.log"
    ]  # fmt: skip


def test_a_resume_from_an_archive_a_rank_is_bit_identical(runs: Path) -> None:
    archives = sorted((runs / "archives/checkpoints/step4").glob("rank*"))
    assert [path.name for path in archives] == ["rank0.tar.gz", "rank1.tar.gz"]
    unpacked = runs / "archives_unpacked"
    for path in archives:
        with tarfile.open(path) as archive:
            archive.extractall(unpacked / "checkpoints/step4", filter="data")
    shutil.copy(archives[0].parent / "manifest.json", unpacked / "checkpoints/step4")
    whole = runs / "hybrid/checkpoints/step4"
    for file in whole.glob("rank*"):
        # It has the seconds, too.
        if file.name != "rank0.json":
            assert (unpacked / "checkpoints/step4" / file.name).read_bytes() == file.read_bytes(), file.name
    assert final_state(unpacked) == final_state(runs / "hybrid")
    assert metrics(runs / "archives") == metrics(runs / "hybrid")


def test_one_process_reads_an_archive_a_rank(runs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    logging.getLogger().handlers.clear()
    assert main(["ckpt", "verify", "archives/checkpoints/step*"]) == 0
    capfd.readouterr()
    assert main(["ckpt", "diff", "archives/checkpoints/step4", "hybrid/checkpoints/step4"]) == 0
    assert "30 of 30 common tensors are the same, bit for bit" in capfd.readouterr().out
    assert main(["ckpt", "show", "archives/checkpoints/step4"]) == 0
    assert "[512, 64]" in capfd.readouterr().out
    assert main(["validate", "ckpt=archives/checkpoints/step4", "validate.folder=archives_checked"]) == 0
    row = json.loads((runs / "archives_checked" / "validation.jsonl").read_text().splitlines()[0])
    assert row["val/loss"] == pytest.approx(metrics(runs / "hybrid")[-1]["val/loss"], rel=1e-6)


def test_fsdp_in_one_process_trains_and_resumes_as_one_process_without(runs: Path) -> None:
    alone = [*BASE, "loop.max_duration=6"]
    fsdp = [*alone, "parallel.cpu_offload=true", "run_dir=one_fsdp"]
    assert main(["fit", *[one for one in alone if not one.startswith("parallel")], "run_dir=one"]) == 0
    assert main(["fit", *fsdp, "loop.hard_stop=4"]) == 0
    assert main(["fit", *fsdp]) == 0
    assert final_state(runs / "one_fsdp") == final_state(runs / "one")


def test_with_mixed_precision_all_but_batch_norms_compute_in_16_bits() -> None:
    seen = {}

    def look(name: str, module: torch.nn.Module, batch: object) -> None:
        seen[name] = next(module.parameters()).dtype

    group = join_processes({}, alone_too=True)
    try:
        model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.Conv2d(2, 2, 3))
        placed = FSDP(group, dtype=torch.bfloat16).place(model, torch.device("cpu"))
        for name, module in placed.named_children():
            module.register_forward_pre_hook(partial(look, name))
        placed(torch.randn(2, 1, 8, 8)).sum().backward()
    finally:
        group.close()
    assert seen == {"0": torch.bfloat16, "1": torch.float32, "2": torch.bfloat16}
    assert {present(parameter.grad).dtype for parameter in placed.parameters()} == {torch.float32}
