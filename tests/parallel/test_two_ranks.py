"""Two ranks under DDP, FSDP or tensor parallelism train as one process does, stop together, and resume bit for bit.

`scripts/ranks` runs this with four ranks, of which two divide layers.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from compare import checkpoints, final_state, metrics
from ranks import HERE, Fits, fit_on_ranks, new_folder
from small_parts import present

import trainer_cli
from trainer_cli.catalog.history import Life
from trainer_cli.checkpoint.checkpointer import Checkpointer
from trainer_cli.commands.command_line import main
from trainer_cli.files.json_lines import read_rows
from trainer_cli.manifest import Manifest

pytestmark = pytest.mark.slow

# Add-ons, which may have been deleted.
HAS_AUTO = "find_batch_size" in trainer_cli.__all__
HAS_TEXT = "GPT" in trainer_cli.__all__
RANKS = int(os.environ.get("RANKS", "2"))
SHORT = ["loop.log_interval=1", "loggers.tensorboard=null", "logging.console=off"]
# 321 samples: the 11th and last batch of an epoch has one, and rank 1 none.
DIGITS = [
    "experiment=digits_mlp", "data.val_fraction=0.8214", "loop.max_duration=24", "loop.eval_interval=12",
    "+callbacks.norms._target_=trainer_cli.Norms",
    "+callbacks.seen={_target_: trainer_cli.Metrics, metrics: {seen: {_target_: seen.Seen}}}", *SHORT,
]  # fmt: skip
GPT = [
    "experiment=char_gpt", "data.path=text", "model.layers=1", "model.width=32", "model.heads=2",
    "+model.fused_qkv=false", "loop.max_duration=16", "loop.eval_interval=16", *SHORT,
]  # fmt: skip
WEIGHTED = [
    "experiment=digits_mlp", "model=null", "model={_target_: fits.Uneven}", "optimizer=sgd", "scheduler=null",
    "optimizer.lr=0.1", "loop.max_duration=2000tok", "loop.eval_interval=20", *SHORT,
]  # fmt: skip
LOSSES = [*WEIGHTED, "step={_target_: fits.SeveralLosses}", "data.global_batch_size=16"]
ONE = {
    "digits": [*DIGITS, "data.batch_size=32"],
    "gpt": [*GPT, "data.batch_size=8"],
    "weighted": [*WEIGHTED, "data.batch_size=16"],
    "losses": [*LOSSES, "data.batch_size=8"],
}
TWO = {
    "digits": [*DIGITS, f"data.batch_size={32 // RANKS}"],
    "gpt": [*GPT, f"data.batch_size={4 // RANKS}", "data.global_batch_size=8"],
    "weighted": [*WEIGHTED, f"data.batch_size={16 // RANKS}"],
    "losses": [*LOSSES, f"data.batch_size={8 // RANKS}"],
}
FSDP = ["parallel=fsdp", "checkpoint.enabled=false"]
SHARDED = {
    "digits": [*TWO["digits"], *FSDP, "parallel.wrap_min_parameters=1000", f"parallel.shard_size={RANKS // 2}"],
    "gpt": [*TWO["gpt"], *FSDP, "parallel.activation_checkpointing=true", "parallel.wrap=[Block]"],
    "weighted": [*TWO["weighted"], *FSDP, "parallel.cpu_offload=true"],
    "losses": [*TWO["losses"], *FSDP],
}
TENSOR = ["parallel=fsdp", "parallel.tensor_size=2"]
DATA = RANKS // 2
"""Into how many parts the samples are divided under tensor parallelism."""
DIVIDED = {
    "digits": [*DIGITS, *TENSOR, f"data.batch_size={32 // DATA}", "parallel.wrap_min_parameters=1000"],
    "gpt": [*GPT, *TENSOR, f"data.batch_size={4 // DATA}", "data.global_batch_size=8"],
}
if not HAS_TEXT:
    for jobs in (ONE, TWO, SHARDED, DIVIDED):
        del jobs["gpt"]
NOISY = [
    "experiment=digits", "parallel=ddp", "model.channels=[8,32,1024,8]", "data.batch_size=16", "loop.max_duration=25",
    *SHORT,
]  # fmt: skip
"""Its gradients are in two buckets."""
OWN_PARTS = [
    "model=null", "model={_target_: fits.Square}", "data=null", "optimizer=sgd", "optimizer.lr=0.1",
    "scheduler=null", "parallel=ddp", "loop.max_duration=14", "loop.eval_interval=7", "checkpoint.save_interval=7",
    *SHORT,
]  # fmt: skip
PARTS = {kind: [*OWN_PARTS, f"data={{_target_: fits.OwnParts, kind: {kind}}}"] for kind in ("sampler", "iterable")}
PARTS["stream"] = [*OWN_PARTS, "data={_target_: fits.OwnParts, kind: stream, batch_size: 4}"]
EPOCHS = [
    *OWN_PARTS, "data={_target_: fits.Growing}", "loop.max_duration=4ep", "loop.eval_interval=null",
    "scheduler={_target_: trainer_cli.WarmupCosine, warmup: 2ep, min_ratio: 0.1}", "checkpoint.save_interval=1ep",
]  # fmt: skip
"""Epochs of 1, 3, 1 and 5 steps."""
THAWED = ["experiment=digits_mlp", "freeze={layers.1.*: 8, layers.4.bias: 256sp}", "loop.max_duration=24", *SHORT]
"""Parameters that are frozen at first: gradients are averaged in other buckets later."""
SMALL = ["experiment=digits_mlp", "parallel=ddp", "data.batch_size=8", "loop.max_duration=20", *SHORT]
AUTO = [
    "experiment=digits_mlp", "parallel=ddp", "model=null", "model={_target_: fits.Hungry}", "data.batch_size=auto",
    "optimizer.lr=auto", "loop.max_duration=2", *SHORT,
]  # fmt: skip
STOPS = [
    "loop.log_interval=10", "loop.eval_interval=20", "checkpoint.save_interval=10",
    "checkpoint.ephemeral_save_interval=null",
    "+callbacks.ask._target_=fits.Stopping",
]  # fmt: skip


NUDGED = "features.0.weight differs between ranks 0 and 1 at step 20, so step20 is not saved"
OWN_STEP = (
    "UserError: OwnStep calls the model itself, so the gradients of the processes are not averaged. "
    "Call self.forward(batch) in train_batch."
)
APART = (
    "UserError: SeveralLosses adds a loss after the gradients of the processes were averaged. "
    "Call self.forward(batch) before each self.backward(loss), or add the losses."
)
HELD = [*LOSSES[:-2], "step={_target_: fits.SeveralLosses, holds: true}", LOSSES[-1]]
NOT_SHARDED = "the step holds the parameter scale, which parallel=fsdp cannot shard"
NO_GRADIENT = (
    "UserError: parameters (spare) got no gradient, so the gradients of the processes were not averaged "
    "(parallel.find_unused_parameters, command line). Set it to true, or freeze parameters that get none."
)
OWN_SAMPLES = (
    "UserError: ranks 0 and 1 divide layers between them, and have different samples (parallel.tensor_size, command "
    "line). A loader or sampler that takes a part of the samples must take part trainer.strategy.group.data_rank of "
    "data_size."
)
NO_PLAN = "parallel.tensor_size is 2, but Uneven has no method tensor_parallel_plan"


def ask(rank: int, step: int, what: str) -> list[str]:
    return [*STOPS, f"+callbacks.ask.rank={rank}", f"+callbacks.ask.step={step}", f"+callbacks.ask.ask={what}"]


@pytest.fixture(scope="module")
def fits(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fits]:
    """All runs of this file: ONE in this process, TWO and what follows on one start of two ranks."""
    spare = [*PARTS["sampler"], "+model.spare=true"]
    jobs = [[*job, f"run_dir=two/{name}", "parallel=ddp"] for name, job in TWO.items()]
    jobs += [[*job, f"run_dir=sharded/{name}"] for name, job in SHARDED.items()]
    jobs += [[*job, f"run_dir=divided/{name}"] for name, job in DIVIDED.items()]
    if HAS_TEXT:
        noisy = [*DIVIDED["gpt"], "model.dropout=0.1", "loop.max_duration=20"]
        jobs += [
            [*noisy, *ask(1, 99, "stop"), "run_dir=divided/whole"],
            [*noisy, *ask(1, 12, "stop"), "run_dir=divided/cut"],
            [*noisy, *ask(1, 12, "stop"), "run_dir=divided/cut"],
        ]
    if HAS_AUTO:
        jobs.append([*AUTO, "run_dir=auto"])
    jobs += [
        [*WEIGHTED, *TENSOR, "run_dir=divided/weighted"],
        [*PARTS["stream"], *TENSOR, "run_dir=divided/stream"],
        [*NOISY, *ask(1, 99, "stop"), "run_dir=whole"],
        [*NOISY, *ask(1, 16, "sigterm"), "run_dir=cut"],
        [*NOISY, *ask(1, 16, "sigterm"), "run_dir=cut"],
        [*SMALL, *ask(1, 13, "evaluate"), "run_dir=asked"],
        [*SMALL, *ask(1, 13, "log"), "run_dir=logged"],
        *[
            [
                *ask(1, at, "stop"),
                *THAWED,
                f"data.batch_size={16 // RANKS}",
                f"parallel={how}",
                f"run_dir=thawed/{name}",
            ]
            for at, how, name in ((99, "ddp", "ddp"), (12, "ddp", "cut"), (12, "ddp", "cut"), (99, "fsdp", "fsdp"))
        ],
        *[[*job, f"run_dir=parts/{kind}"] for kind, job in PARTS.items()],
        *[[*job, f"run_dir=cuts/{kind}", *cut] for kind, job in PARTS.items() for cut in (["loop.hard_stop=7"], [])],
        *[
            [*EPOCHS, f"data.batch_size={8 // RANKS}", f"run_dir={run}", f"loop.hard_stop={stop}"]
            for run, stop in (("epochs/whole", "null"), *(("epochs/cut", stop) for stop in (3, 5, "null")))
        ],
        [*TWO["digits"], "parallel=ddp", "step={_target_: fits.OwnStep}", "run_dir=own_step"],
        [*TWO["weighted"], "parallel=ddp", "step={_target_: fits.SeveralLosses, apart: true}", "run_dir=apart_step"],
        [*HELD, f"data.batch_size={8 // RANKS}", "parallel=ddp", "run_dir=held/two"],
        [*HELD, f"data.batch_size={8 // RANKS}", *FSDP, "run_dir=held/refused"],
        [*spare, "run_dir=spare/refused"],
        [*spare, "parallel.find_unused_parameters=true", "run_dir=spare/found"],
        [*NOISY, *ask(1, 13, "nudge"), "run_dir=nudged"],
        ["apart", *NOISY, "run_dir=unseen"],
    ]
    with new_folder(tmp_path_factory, "runs") as folder:
        (folder / "text").write_text("It is a truth universally acknowledged, that a single man, in possession. " * 40)
        jobs_of_one = {
            **ONE,
            "held": [*HELD, "data.batch_size=8"],
            "thawed": [*THAWED, "data.batch_size=16"],
            "epochs": [*EPOCHS, "data.batch_size=8"],
        }
        alone = [main(["fit", *job, f"run_dir=one/{name}"]) for name, job in jobs_of_one.items()]
        assert alone == [0] * len(jobs_of_one)
        yield fit_on_ranks(RANKS, jobs, imports=["torchmetrics"])


@pytest.fixture
def runs(fits: Fits) -> Path:
    return fits.folder


def test_each_run_ends_the_same_on_all_ranks(fits: Fits) -> None:
    host = socket.gethostname()
    blind = ", ".join(f"rank {rank} ({host})" for rank in range(1, RANKS))
    unseen = (
        f"UserError: {blind} cannot see {fits.folder / 'unseen'}, the run directory of rank 0 ({host}) "
        "(run_dir, command line). Choose a run_dir= on a file system that all machines share."
    )
    others = {
        "cut": "75", "thawed/cut": "75", "divided/stream": OWN_SAMPLES, "own_step": OWN_STEP,
        "apart_step": APART, "unseen": unseen, "spare/refused": NO_GRADIENT,
    }  # fmt: skip
    if HAS_TEXT:
        others["divided/cut"] = "75"
    for ends in fits.ends:
        no_plan, not_sharded = ends["divided/weighted"], ends["held/refused"]
        assert NOT_SHARDED in not_sharded
        nudged = ends["nudged"]
        assert nudged.startswith(f"UserError: {NUDGED}" if ends is fits.ends[0] else "PeerError: rank 0 failed")
        assert NO_PLAN in no_plan or no_plan == "PeerError: rank 0 failed"
        assert ends == {
            **dict.fromkeys(ends, "0"),
            **others,
            "divided/weighted": no_plan,
            "held/refused": not_sharded,
            "nudged": nudged,
        }


@pytest.mark.parametrize(("how", "name"), [*product(("two", "sharded"), TWO), *(("divided", name) for name in DIVIDED)])
def test_two_ranks_have_the_losses_of_one_process(runs: Path, name: str, how: str) -> None:
    one, two = metrics(runs / "one" / name), metrics(runs / how / name)
    assert len(one) >= 16
    assert [sorted(record) for record in one] == [sorted(record) for record in two]
    for alone, both in zip(one, two, strict=True):
        for key, value in alone.items():
            assert both[key] == pytest.approx(value, rel=1e-5), (name, alone["step"], key)
    counts = [json.loads((runs / who / name / "summary.json").read_text())["step"] for who in ("one", how)]
    assert counts[0] == counts[1]


@pytest.mark.parametrize(("run", "reason"), [("own_step", OWN_STEP), ("apart_step", APART)])
def test_a_step_whose_gradients_are_not_averaged_is_refused(runs: Path, run: str, reason: str) -> None:
    summary = json.loads((runs / run / "summary.json").read_text())
    assert (summary["status"], summary["reason"]) == ("failed", reason)


def test_parameters_without_a_gradient_are_refused_before_a_step_is_made_of_gradients_of_one_rank(runs: Path) -> None:
    refused = json.loads((runs / "spare/refused/summary.json").read_text())
    assert (refused["status"], refused["step"]) == ("failed", 0)
    found, without = metrics(runs / "spare/found"), metrics(runs / "parts/sampler")
    # Its bucket is another, in which four ranks add in another order.
    assert found == [pytest.approx(record, rel=1e-6) for record in without]


def test_a_parameter_of_the_step_is_trained_and_saved_as_by_one_process(runs: Path) -> None:
    one, two = metrics(runs / "one/held"), metrics(runs / "held/two")
    assert len(one) >= 16
    for alone, both in zip(one, two, strict=True):
        assert both == {key: pytest.approx(value, rel=1e-5) for key, value in alone.items()}, alone["step"]
    ends = [
        float(Checkpointer().read(run / "checkpoints" / checkpoints(run)[-1])["model"]["train_step.scale"])
        for run in (runs / "one/held", runs / "held/two")
    ]
    assert ends == [pytest.approx(ends[0], rel=1e-5)] * 2
    assert ends[0] != pytest.approx(1.0)


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_parameters_that_are_unfrozen_are_trained_as_by_one_process(runs: Path, how: str) -> None:
    one, two = metrics(runs / "one/thawed"), metrics(runs / "thawed" / how)
    assert len(one) == len(two) >= 24
    for alone, both in zip(one, two, strict=True):
        assert both["train/loss"] == pytest.approx(alone["train/loss"], rel=1e-5), alone["step"]


def test_a_resume_while_parameters_are_frozen_is_bit_identical(runs: Path) -> None:
    assert final_state(runs / "thawed/cut") == final_state(runs / "thawed/ddp")
    assert metrics(runs / "thawed/cut") == metrics(runs / "thawed/ddp")


def test_epochs_of_several_lengths_are_those_of_one_process_and_a_resume_is_bit_identical(runs: Path) -> None:
    one, whole = metrics(runs / "one/epochs"), metrics(runs / "epochs/whole")
    assert [record["step"] for record in one] == list(range(1, 11))
    # A whole length of four epochs of one step: the last rate for steps 5 to 10.
    assert len({record["train/lr"] for record in one[4:]}) == 1
    for alone, both in zip(one, whole, strict=True):
        assert both == {key: pytest.approx(value, rel=1e-5) for key, value in alone.items()}, alone["step"]
    assert metrics(runs / "epochs/cut") == whole
    assert final_state(runs / "epochs/cut") == final_state(runs / "epochs/whole")


@pytest.mark.parametrize("kind", PARTS)
def test_loaders_that_end_at_different_batches_end_together(runs: Path, kind: str) -> None:
    run, cut = runs / "parts" / kind, runs / "cuts" / kind
    progress = json.loads((run / "checkpoints/step14/manifest.json").read_text())["progress"]
    # Rank 0 has five batches, the last of two samples; each other rank six of four.
    whole = 18 + 20 * (RANKS - 1)
    assert (progress["epoch"], progress["batch"], progress["samples"]) == (2, 4, 2 * whole + 4 * 4 * RANKS)
    assert len(metrics(run)) == 14
    assert metrics(cut) == metrics(run)
    assert final_state(cut) == final_state(run)
    for rank in range(RANKS):
        # Random numbers, and the positions in the data, which differ between the ranks.
        own = [json.loads((one / f"checkpoints/step14/rank{rank}.own.json").read_text()) for one in (run, cut)]
        assert own[0] == own[1]


@pytest.mark.parametrize(("how", "name"), [*(("two", name) for name in TWO), *(("divided", name) for name in DIVIDED)])
def test_counts_are_those_of_all_ranks(runs: Path, how: str, name: str) -> None:
    counts = []
    for who in ("one", how):
        manifest = json.loads((max((runs / who / name).glob("checkpoints/step*/manifest.json"))).read_text())
        counts.append({key: manifest["progress"][key] for key in ("step", "epoch", "samples", "tokens")})
    assert counts[0] == counts[1]
    assert counts[0]["samples"] > 120


def test_a_resume_on_two_ranks_is_bit_identical(runs: Path) -> None:
    # Batch norm, dropout and augmentation: buffers, and random numbers of each rank.
    assert final_state(runs / "cut") == final_state(runs / "whole")
    assert metrics(runs / "cut") == metrics(runs / "whole")


@pytest.mark.addon("text")
def test_a_resume_of_divided_layers_is_bit_identical(runs: Path) -> None:
    cut, whole = (
        {path.name: path.read_bytes() for path in (runs / "divided" / name / "checkpoints" / "step20").glob("rank*")}
        for name in ("cut", "whole")
    )
    # It has the seconds, too.
    del cut["rank0.json"], whole["rank0.json"]
    assert len(cut) == 2 * RANKS
    assert cut == whole
    assert final_state(runs / "divided" / "cut") == final_state(runs / "divided" / "whole")
    assert metrics(runs / "divided" / "cut") == metrics(runs / "divided" / "whole")


@pytest.mark.addon("text")
def test_each_rank_writes_its_part_of_divided_layers(runs: Path) -> None:
    folder = runs / "divided" / "gpt" / "checkpoints" / "step16"
    manifest = Manifest.parse((folder / "manifest.json").read_bytes())
    assert (manifest.world_size, manifest.tensor_size) == (RANKS, 2)
    parts = {str(of_file["model/blocks.0.attention.query.weight"]) for of_file in manifest.shards.values()}
    size = 32 // RANKS
    assert parts == {f"[{size * rank}:{size * (rank + 1)}, 0:32] of [32, 32]" for rank in range(RANKS)}


def test_a_killed_rank_restarts_all_and_the_end_is_that_of_an_undisturbed_run(runs: Path) -> None:
    strike = ["+callbacks.ask._target_=fits.Striking", "+callbacks.ask.rank=1", "+callbacks.ask.at=step"]
    ranks = ["loop.log_interval=10", *STOPS[1:4], f"parallel.processes_per_node={RANKS}"]
    restarts = ["restarts.max=1", "restarts.backoff=null", "run_dir=struck_run"]
    command = [sys.executable, "-m", "trainer_cli", "fit", *NOISY, *ranks, *restarts, *strike]
    env = {**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=runs, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert "rank 1 was killed by SIGKILL" in done.stderr
    assert "; the others waited while step 14 was trained" in done.stderr
    assert "resuming at step 10" in done.stderr
    assert final_state(runs / "struck_run") == final_state(runs / "whole")


def test_each_rank_has_a_part_of_the_checkpoint(runs: Path) -> None:
    folder = runs / "whole" / "checkpoints" / "step25"
    own = [json.loads((folder / f"rank{rank}.own.json").read_text()) for rank in range(2)]
    assert [sorted(json.loads(one["state"])["state"]) for one in own] == [["data", "loop", "rng"]] * 2
    assert own[0]["tensors"] != own[1]["tensors"]
    manifest = Manifest.parse((folder / "manifest.json").read_bytes())
    assert manifest.world_size == RANKS
    assert all(str(part).startswith("[") for parts in manifest.shards.values() for part in parts.values())


def test_each_save_is_recorded_once_and_not_by_each_rank(runs: Path) -> None:
    run = runs / "whole"
    saved = [present(one.step) for one in Life.read_all(read_rows(run / "checkpoints.jsonl"))]
    assert saved == sorted(set(saved))
    assert 25 in saved


@pytest.mark.parametrize(
    ("name", "step", "reason"), [("cut", 16, "SIGTERM"), ("divided/cut", 12, "asked for by rank 1")]
)
def test_a_signal_or_a_stop_on_one_rank_stops_all_with_one_checkpoint(
    runs: Path, name: str, step: int, reason: str
) -> None:
    first = json.loads((runs / name / "summary.json").read_text())["attempts"][0]
    assert first["status"] == "stopped"
    # At the latest the step after the one in which it was asked for.
    assert first["step"] in (step, step + 1)
    assert reason in first["reason"]


def test_an_evaluation_asked_for_by_one_rank_is_made_by_both(runs: Path) -> None:
    assert [record["step"] for record in metrics(runs / "asked") if "val/loss" in record] in ([13, 20], [14, 20])


def test_only_rank_0_prints_and_metrics_logged_by_another_rank_alone_are_not_waited_for(fits: Fits) -> None:
    first, *others = fits.outputs
    assert "committed step 25" in first
    assert all(output.strip().startswith("ENDS") for output in others)
    records = metrics(fits.folder / "logged")
    assert [record["step"] for record in records if "train/loss" in record] == [10, 20]
    assert not any("seen" in record for record in records)


@pytest.mark.parametrize(("name", "step"), [("whole", 25), ("divided/whole", 20)])
def test_one_process_evaluates_the_checkpoint_as_the_ranks_did(runs: Path, name: str, step: int) -> None:
    checked = f"validate.folder=checked/{name}"
    assert main(["validate", f"ckpt={name}/checkpoints/step{step}", checked, "trust=[fits]"]) == 0
    row = json.loads((runs / "checked" / name / "validation.jsonl").read_text().splitlines()[0])
    logged: dict[str, Any] = next(record for record in metrics(runs / name) if record["step"] == step)
    assert row["val/loss"] == pytest.approx(logged["val/loss"], rel=1e-6)
    assert row["val/accuracy"] == pytest.approx(logged["val/accuracy"], rel=1e-6)


@pytest.mark.addon("auto")
def test_ranks_agree_on_a_batch_size_that_fits_on_each_and_on_a_rate(fits: Fits) -> None:
    assert [ends["auto"] for ends in fits.ends] == ["0"] * RANKS
    decisions = json.loads(Path("auto/decisions.json").read_text())
    assert list(decisions) == ["data.batch_size", "optimizer.lr"]
    decision = decisions["data.batch_size"]
    assert (decision["value"], decision["measured"]["sizes"]) == (8, [2, 4, 8, 16])
    assert decision["reason"].endswith(f"(the smallest of {RANKS} ranks)")
