"""One training by one, two and four processes in turn, some sharded or with divided layers; for `scripts/ranks`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from compare import metrics
from ranks import HERE, on_ranks

from trainer_cli.checkpoint.checkpointer import make_sync_checkpointer
from trainer_cli.commands.command_line import main

pytestmark = pytest.mark.slow

BASE = [
    "experiment=digits_mlp", "model.dropout=0", "data.batch_size=4", "data.global_batch_size=16", "scheduler=null",
    "callbacks=[default,ema]", "callbacks.ema.decay=0.9", "loop.eval_interval=4", "loop.log_interval=1",
    "loggers.tensorboard=null", "checkpoint.save_interval=4", "checkpoint.max_checkpoints=null", "logging.console=off",
]  # fmt: skip
TENSOR = ["parallel=fsdp", "parallel.tensor_size=2"]
STAGES: list[tuple[int, list[str]]] = [
    (2, ["parallel=fsdp", "parallel.wrap_min_parameters=1000"]),
    (1, []),
    (4, ["parallel=fsdp"]),
    (2, ["parallel=ddp"]),
    (4, ["parallel=fsdp", "parallel.shard_size=2"]),
    (2, [*TENSOR, "parallel.wrap_min_parameters=1000"]),
    (1, ["parallel=fsdp"]),
    (4, TENSOR),
    (2, TENSOR),
    (4, [*TENSOR, "parallel.shard_size=2"]),
    (1, []),
]
"""Processes, and how they share the work; four steps each."""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder, before = tmp_path_factory.mktemp("chain"), Path.cwd()
    os.chdir(folder)
    try:
        for number, (world_size, parallel) in enumerate(STAGES, 1):
            overrides = [*BASE, *parallel, f"loop.max_duration={4 * number}", "run_dir=chain"]
            if world_size > 1:
                ends = on_ranks(world_size, HERE / "fits.py", json.dumps([overrides]))
                assert all(code == 0 and 'ENDS ["0"]' in output for code, output in ends), ends
            else:
                subprocess.run([sys.executable, "-m", "trainer_cli", "fit", *overrides], check=True)
        assert main(["fit", *BASE, f"loop.max_duration={4 * len(STAGES)}", "run_dir=straight"]) == 0
        yield folder
    finally:
        os.chdir(before)


def test_the_losses_are_those_of_one_process(runs: Path) -> None:
    chain, straight = metrics(runs / "chain"), metrics(runs / "straight")
    assert [record["step"] for record in chain] == [record["step"] for record in straight]
    for one, other in zip(chain, straight, strict=True):
        for key, value in other.items():
            assert one[key] == pytest.approx(value, rel=1e-4), (one["step"], key)


def test_each_checkpoint_says_who_made_it(runs: Path) -> None:
    found = [
        make_sync_checkpointer().verify(runs / "chain" / "checkpoints" / f"step{4 * number}").world_size
        for number in range(1, len(STAGES) + 1)
    ]
    assert found == [world_size for world_size, _ in STAGES]


def test_the_position_of_the_data_is_that_of_one_process(runs: Path) -> None:
    for number in range(1, len(STAGES) + 1):
        chain, straight = (
            make_sync_checkpointer().read(runs / name / "checkpoints" / f"step{4 * number}", ["data", "progress"])
            for name in ("chain", "straight")
        )
        assert chain["data"] == straight["data"]
        for key in ("step", "epoch", "samples", "epoch_samples"):
            assert chain["progress"][key] == straight["progress"][key], (number, key)


def test_one_process_evaluates_every_checkpoint_as_it_was_logged(runs: Path) -> None:
    assert main(["validate", "ckpt=chain/checkpoints/step*", "validate.folder=checked"]) == 0
    rows = [json.loads(line) for line in (runs / "checked" / "validation.jsonl").read_text().splitlines()]
    logged: dict[int, Any] = {record["step"]: record for record in metrics(runs / "chain")}
    compared = 0
    for row in rows:
        if "val/loss" in logged.get(row["step"], {}):
            assert row["val/loss"] == pytest.approx(logged[row["step"]]["val/loss"], rel=1e-6), row["step"]
            compared += 1
    assert compared == len(STAGES)


def test_a_model_of_transformers_is_divided_by_its_own_plan(runs: Path) -> None:
    config = (
        "{_target_: transformers.LlamaConfig, vocab_size: 48, hidden_size: 16, intermediate_size: 32, "
        "num_hidden_layers: 1, num_attention_heads: 4, num_key_value_heads: 2, bos_token_id: 0, eos_token_id: 0}"
    )
    job = [
        "model=null", f"model={{_target_: transformers.LlamaForCausalLM, config: {config}}}", "model_call=kwargs",
        "data=null", "data={_target_: fits.Counting, batch_size: 8}", "optimizer=adamw", "precision.clip_norm=1.0",
        "loop.max_duration=20", "loop.log_interval=1", "loggers.tensorboard=null", "logging.console=off",
    ]  # fmt: skip
    code, output = on_ranks(1, HERE / "fits.py", json.dumps([[*job, "run_dir=llama/one"]]))[0]
    assert (code, 'ENDS ["0"]' in output) == (0, True), output
    ends = on_ranks(2, HERE / "fits.py", json.dumps([[*job, *TENSOR, "run_dir=llama/two"]]))
    assert "tensor_size=2 divides 9 layers, with 99 % of the parameters" in ends[0][1], ends
    one, two = metrics(runs / "llama/one"), metrics(runs / "llama/two")
    assert len(one) == len(two) == 20
    for alone, both in zip(one, two, strict=True):
        for key, value in alone.items():
            assert both[key] == pytest.approx(value, rel=1e-5), (alone["step"], key)
