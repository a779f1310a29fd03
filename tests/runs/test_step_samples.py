"""`train data`: the samples that it names are those that each step trained on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainer_cli.commands.main import main
from trainer_cli.runs.samples import StepSamples
from trainer_cli.runs.step_samples import read_step_samples

BASE = [
    "optimizer=sgd", "scheduler=null", "loop.log_interval=1", "loop.eval_interval=null", "logging.console=off",
    "loggers.tensorboard=null", "checkpoint.save_interval=5", "checkpoint.ephemeral_save_interval=null",
    "+callbacks.seen={_target_: recording_parts.Recording, file: seen}", "run_dir=run", "deterministic=false",
]  # fmt: skip
LINE = ["model=null", "model={_target_: recording_parts.Line}", "data=null"]
PLAIN = [*LINE, "data={_target_: recording_parts.Plain, batch_size: 4}"]


def own(kind: str, workers: int = 0) -> list[str]:
    return [*LINE, f"data={{_target_: recording_parts.Own, kind: {kind}, workers: {workers}}}"]


def fit(*overrides: str) -> None:
    assert main(["fit", *BASE, *overrides]) == 0


def seen(rank: int = 0) -> dict[tuple[int, int], Any]:
    """(step, batch) -> what was trained on; what a later attempt did again counts."""
    lines = Path(f"seen{rank}.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    last = {record["step"]: number for number, record in enumerate(records) if record["batch"] == 1}
    return {
        (record["step"], record["batch"]): record["content"]
        for number, record in enumerate(records)
        if number >= last[record["step"]]
    }


def read(first: int, last: int | None = None) -> Iterator[StepSamples]:
    return read_step_samples(Path("run"), first, last, overrides=["trust=[recording_parts]"])


def indices_of(content: Any) -> list[int]:
    return [int(value) for (value,) in content]


def told(steps: Iterator[StepSamples], rank: int = 0) -> dict[tuple[int, int], list[Any]]:
    return {
        (step.step, batch.number): [sample.index for sample in batch.samples]
        for step in steps
        for batch in step.batches
        if batch.rank == rank
    }


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        pytest.param(PLAIN, 14, id="a dataset, with an uneven last batch"),
        pytest.param([*PLAIN, "loop.grad_accum_steps=4"], 5, id="accumulation, with a short last step"),
        pytest.param([*PLAIN, "loop.limit_train_batches=4"], 11, id="a cut epoch"),
        pytest.param([*PLAIN, "data.batch_size=null", "data.global_batch_size=6"], 9, id="a global batch size"),
        pytest.param([*PLAIN, "data.overfit_batches=2"], 6, id="the same few samples"),
        pytest.param(own("shuffle"), 14, id="a loader that shuffles"),
        pytest.param(own("generator"), 14, id="a loader with a generator"),
        pytest.param(own("generator", workers=2), 14, id="a loader with a generator and workers"),
        pytest.param(own("drop_last"), 12, id="a loader that drops the last batch"),
        pytest.param(own("weighted"), 14, id="a loader that draws with replacement"),
    ],
)
def test_the_indices_of_each_step_are_those_that_it_trained_on(
    empty_folder: Path, overrides: list[str], steps: int
) -> None:
    fit(*overrides, f"loop.max_duration={steps}")
    trained = {key: indices_of(content) for key, content in seen().items()}
    assert told(read(1, steps)) == trained
    assert {step for step, _ in trained} == set(range(1, steps + 1))
