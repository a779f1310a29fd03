"""Callbacks on two ranks, under DDP and FSDP: what they decide, compute and write is as in one process.

A NaN on one rank is one of all: each policy does what it says, and nothing that is not finite is saved.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from compare import checkpoints, final_state, metrics
from ranks import Fits, fit_on_ranks, new_folder

import trainer_cli
from trainer_cli.checkpoint.checkpointer import make_sync_checkpointer
from trainer_cli.commands.command_line import main
from trainer_cli.state.weights import select_weights

pytestmark = pytest.mark.slow

HOW = ("ddp", "fsdp")
BASE = [
    "experiment=digits_mlp", "device=cpu", "loop.eval_interval=6", "loop.eval_steps=4", "loop.log_interval=3",
    "loggers.tensorboard=null", "logging.console=off", "checkpoint.save_interval=4", "model.hidden=[32]",
]  # fmt: skip
FINITE = [*BASE, "loop.max_duration=12"]
SUMS = "+callbacks.sums._target_=fits.Sums"
SHOWN = [
    *BASE, "loop.max_duration=12",
    "callbacks=[confusion_matrix,duration_profiler,ema,learning_rate_monitor,memory_monitor,norms,parameter_table,"
    "throughput,torch_profiler]",
    "callbacks.norms.per_layer=true", "callbacks.throughput.flops=true", "callbacks.throughput.peak_tflops=2",
    "callbacks.torch_profiler.wait=0", "callbacks.torch_profiler.warmup=1", "callbacks.torch_profiler.active=1",
    "+callbacks.dump={_target_: trainer_cli.DumpActivations, modules: [layers.1], every: 3}",
    "+callbacks.statistics={_target_: trainer_cli.ActivationStatistics}",
    "+callbacks.states={_target_: trainer_cli.SaveCheckpointState}",
    "+callbacks.swa={_target_: trainer_cli.SWA, start: 2, every: 1}",
    "+callbacks.skip={_target_: trainer_cli.SkipSamples, samples: 32}",
    "+callbacks.enough={_target_: trainer_cli.ThresholdStopper, metric: val/loss, threshold: 99}",
    SUMS, "+callbacks.outputs={_target_: fits.Outputs}",
]  # fmt: skip
GPT = [
    "experiment=char_gpt", "device=cpu", "data.path=text", "model.layers=1", "model.width=16", "model.heads=2",
    "data.context=16", "loop.max_duration=2", "loop.eval_interval=1", "logging.console=off",
    "loggers.tensorboard=null", "callbacks=text_samples", "callbacks.text_samples.length=3",
    "callbacks.text_samples.temperature=0", "callbacks.text_samples.prompts=[It]", "checkpoint.enabled=false",
]  # fmt: skip
HAS_TEXT = "GPT" in trainer_cli.__all__
"""Its add-on may have been deleted."""
STOPS = ["+callbacks.ask={_target_: fits.Stopping, rank: 1, step: 8, ask: stop}"]
NORMED = ["experiment=digits", "model.channels=[2,2]", "checkpoint.ephemeral_save_interval=null", *BASE[1:-1]]


def finite(policy: str, how: str = "input", batch: int = 5, **more: int) -> list[str]:
    """A NaN in the batches of the sixth step, which is noticed after it."""
    own = ", ".join(f"{key}: {value}" for key, value in {"policy": policy, **more}.items())
    return [
        f"+callbacks.bad={{_target_: fits.Plant, batch: {batch}, how: {how}}}",
        f"+callbacks.finite={{_target_: trainer_cli.CheckFinite, {own}}}",
    ]


def ranks_jobs() -> list[list[str]]:
    """Each step has 16 samples, as in one process; in `skip_loss` in four batches."""
    jobs = []
    for how in HOW:
        job = [f"parallel={how}", "data.batch_size=8"]
        job += ["parallel.wrap_min_parameters=500"] if how == "fsdp" else []
        accumulated = ["data.batch_size=4", "data.global_batch_size=16"]
        jobs += [
            [*FINITE, *job, *finite("raise"), f"run_dir={how}/raise"],
            [*FINITE, *job, *finite("skip", "loss", 10), *accumulated, SUMS, f"run_dir={how}/skip_loss"],
            [*FINITE, *job, *finite("roll_back"), SUMS, f"run_dir={how}/roll_back"],
            [*FINITE, *job, *finite("roll_back"), SUMS, f"run_dir={how}/stopped", *STOPS],
            [*FINITE, *job, *finite("roll_back"), SUMS, f"run_dir={how}/stopped", *STOPS],
            [*SHOWN, *job, f"run_dir={how}/shown"],
            *([[*GPT, *job[:1], f"run_dir={how}/gpt"]] if HAS_TEXT else []),
        ]
    return [
        *jobs,
        [*FINITE, "parallel=ddp", "data.batch_size=8", *finite("skip", max_times=0), "run_dir=ddp/skip_bounded"],
        [*FINITE, "parallel=ddp", "data.batch_size=8", *finite("roll_back", max_times=0), "run_dir=ddp/back_bounded"],
        [*FINITE, *job, *finite("skip"), "run_dir=fsdp/skip"],
        [*NORMED, "parallel=ddp", "loop.max_duration=6", *finite("skip"), "run_dir=ddp/normed"],
        [*FINITE, "parallel=ddp", "+callbacks.ask={_target_: fits.Stopping, rank: 1, step: 7, ask: roll_back}",
         "run_dir=ddp/asked"],
        [*FINITE, "parallel=ddp", "+callbacks.f1={_target_: trainer_cli.Metrics, metrics: {n: {_target_: fits.Count}}}",
         "run_dir=ddp/metric"],
    ]  # fmt: skip


REFUSED = (
    "UserError: the metric 'n' is a Count, which has the samples of one of 2 processes. "
    "Use a metric of torchmetrics, derive it from torchmetrics.Metric, or return sums or means from the "
    "model's forward."
)


@pytest.fixture(scope="module")
def fits(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fits]:
    """All runs of this file: some in this process, the others on one start of two ranks."""
    with new_folder(tmp_path_factory, "callbacks") as folder:
        (folder / "text").write_text("It is a truth universally acknowledged, that a single man, in possession. " * 8)
        alone = [
            [*FINITE, *finite("skip"), "run_dir=one/skip"],
            [*FINITE, *finite("roll_back"), "run_dir=one/roll_back"],
            [*SHOWN, "run_dir=one/shown"],
            *([[*GPT, "run_dir=one/gpt"]] if HAS_TEXT else []),
        ]
        assert [main(["fit", "data.batch_size=16", *job]) for job in alone] == [0] * len(alone)
        yield fit_on_ranks(2, ranks_jobs())


@pytest.fixture
def runs(fits: Fits) -> Path:
    return fits.folder


def state(run: Path) -> dict[str, Any]:
    return make_sync_checkpointer().read(run / "checkpoints" / checkpoints(run)[-1])


def leaves(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    for one in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from leaves(one)


def test_each_run_ends_the_same_on_both_ranks(fits: Fits) -> None:
    expected = dict.fromkeys(fits.ends[0], "0")
    del expected["ddp/metric"]
    assert fits.ends[0]["ddp/metric"] == REFUSED
    assert fits.ends[1]["ddp/metric"].startswith("PeerError: rank 0 failed")
    for how in HOW:
        expected[f"{how}/stopped"] = "75"
        expected[f"{how}/raise"] = "the loss or the weights are not finite at step 6."
    expected["ddp/skip_bounded"] = "the run skipped 1 step up to step 6 for values that are not finite."
    expected["ddp/back_bounded"] = "the run went back 0 times, and is not finite at step 6."
    for of_rank in fits.ends:
        for name, end in expected.items():
            assert end in of_rank[name], (name, of_rank[name])


@pytest.mark.parametrize(("how", "name"), [*product(HOW, ["skip_loss", "roll_back"]), ("fsdp", "skip")])
def test_a_nan_on_one_rank_has_the_effect_that_it_has_in_one_process(runs: Path, how: str, name: str) -> None:
    one, two = state(runs / "one" / name.removesuffix("_loss")), state(runs / how / name)
    for part in ("model", "optimizer"):
        for alone, both in zip(leaves(one[part]), leaves(two[part]), strict=True):
            torch.testing.assert_close(both, alone, rtol=1e-4, atol=1e-5)
    for count in ("step", "samples", "epoch", "epoch_samples"):
        assert one["progress"][count] == two["progress"][count], count
    assert one["callbacks"]["finite"] == two["callbacks"]["finite"] == {"times": 1}
    assert {own["progress"].get("passed_over", 0) for own in (one, two)} == {2 if name == "roll_back" else 0}
    if name != "roll_back":
        assert metrics(runs / how / name)[-1]["train/skipped_steps"] == 1


def test_weights_are_the_same_on_both_ranks(fits: Fits) -> None:
    sums = fits.printed("SUMS")
    assert len(sums[0]) == sum(SUMS in job for job in ranks_jobs()) == 10
    assert sums[0] == sums[1]


@pytest.mark.parametrize("how", HOW)
def test_a_resume_after_a_roll_back_is_exact(runs: Path, how: str) -> None:
    assert final_state(runs / how / "stopped") == final_state(runs / how / "roll_back")
    assert metrics(runs / how / "stopped") == metrics(runs / how / "roll_back")


def test_nothing_that_is_not_finite_is_saved(runs: Path) -> None:
    looked_at = 0
    for how in (*HOW, "one"):
        for run in (runs / how).glob("*/checkpoints"):
            for name in checkpoints(run.parent):
                saved = make_sync_checkpointer().read(run / name)
                assert all(bool(torch.isfinite(one.float()).all()) for one in leaves(saved)), run / name
                assert json.loads((run / name / "manifest.json").read_text())["finite"]
                looked_at += 1
    assert looked_at > 50
    assert {name for how in HOW for name in checkpoints(runs / how / "raise")} <= {"step0", "step4"}


def test_one_rank_may_ask_to_go_back(runs: Path) -> None:
    assert state(runs / "ddp" / "asked")["progress"]["passed_over"] in (3, 4)


@pytest.mark.parametrize("how", HOW)
def test_what_callbacks_log_is_of_all_ranks(runs: Path, how: str) -> None:
    one, two = metrics(runs / "one" / "shown"), metrics(runs / how / "shown")
    assert [record["step"] for record in one] == [3, 6], "stopped by the first evaluation"
    own = ("train/throughput", "train/time", "train/memory", "train/activations")  # of the clock, or of one rank
    compared = set()
    for alone, both in zip(one, two, strict=True):
        assert alone.keys() == both.keys()
        for key, value in alone.items():
            if not key.startswith(own):
                assert both[key] == pytest.approx(value, rel=1e-4), (alone["step"], key)
                compared.add(key)
    assert {"train/norm/gradients", "train/norm/weights", "train/norm/weights/layers.1", "val/loss"} <= compared
    averages = [state(runs / who / "shown")["callbacks"] for who in ("one", how)]
    for name in ("ema", "swa"):
        for values in zip(leaves(averages[1][name]), leaves(averages[0][name]), strict=True):
            torch.testing.assert_close(*values, rtol=1e-4, atol=1e-5)
    last = [records[-1] for records in (one, two)]
    for record, devices in zip(last, (1, 2), strict=True):
        share = record["train/throughput/tflops_per_s"] / 2 / devices
        assert record["train/throughput/mfu"] == pytest.approx(share)


@pytest.mark.parametrize("how", HOW)
def test_each_rank_has_the_predictions_of_all(runs: Path, how: str) -> None:
    one, *both = [
        json.loads((runs / name / f"shown/outputs{rank}.json").read_text())
        for name, rank in (("one", 0), (how, 0), (how, 1))
    ]
    assert both[0] == both[1]
    assert len(one) == 65
    torch.testing.assert_close(torch.tensor(both[0]), torch.tensor(one), rtol=1e-4, atol=1e-5)


def test_the_confusion_matrix_counts_the_samples_of_all_ranks(fits: Fits) -> None:
    counts = fits.printed("COUNTS")
    assert counts[0] == counts[1]
    assert [sum(json.loads(of_evaluation)) for of_evaluation in counts[0]] == [4 * 16] * 2


@pytest.mark.parametrize("how", HOW)
def test_files_are_written_by_one_rank_each(runs: Path, how: str) -> None:
    run = runs / how / "shown"
    assert sorted(path.name for path in (run / "activations").iterdir()) == ["step3.npz", "step6.npz"]
    assert sorted(path.name for path in (run / "profile").iterdir()) == ["trace-step2-rank1.json", "trace-step2.json"]
    copied, saved = make_sync_checkpointer().read(run / "states" / "step6")["model"], state(run)
    # What evaluations saw.
    for name, value in select_weights(saved, str(run), "swa").items():
        assert torch.equal(copied[name], value)


@pytest.mark.addon("text")
def test_text_samples_of_whole_and_of_sharded_weights_are_the_same(fits: Fits) -> None:
    samples = re.findall(r"sample 0 at step (\d): (.*)", fits.outputs[0])
    assert [step for step, _ in samples] == ["1", "2"] * 2
    assert samples[:2] == samples[2:]
