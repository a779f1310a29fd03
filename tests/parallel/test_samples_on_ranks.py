"""`train data` names the samples of every rank, also after a resume with another number of ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ranks import fit_on_ranks, new_folder
from recording_parts import BASE, LINE, PLAIN, TRUST, indices_of, own

from trainer_cli.addons.exact.samples import StepSamples
from trainer_cli.addons.exact.step_samples import read_step_samples
from trainer_cli.commands.command_line import main

pytestmark = pytest.mark.slow

STREAM = [*LINE, "data={_target_: recording_parts.Stream, batch_size: 4}"]
STEPS = {"plain": 8, "accumulating": 5, "own": 8, "workers": 8, "stream": 8, "mixed": 14}
JOBS = {
    "plain": PLAIN,
    "accumulating": [*PLAIN, "loop.grad_accum_steps=2"],
    "own": own("drop_last"),
    "workers": own("shuffle", workers=1),
    "stream": STREAM,
}


def job(name: str, overrides: list[str], steps: int, *more: str) -> list[str]:
    base = [part for part in BASE if not part.startswith(("run_dir", "+callbacks.seen"))]
    seen = f"+callbacks.seen={{_target_: recording_parts.Recording, file: {name}-seen}}"
    return [*base, *overrides, seen, f"run_dir={name}", f"loop.max_duration={steps}", *more]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Runs of two ranks, and `mixed`, of one rank up to step 4, of two up to step 9, and then of one again."""
    with new_folder(tmp_path_factory, "samples") as folder:
        assert main(["fit", *job("mixed", PLAIN, 14, "loop.hard_stop=4")]) == 0
        two = [job(name, [*overrides, "parallel=ddp"], STEPS[name]) for name, overrides in JOBS.items()]
        change = ("parallel=ddp", "resume_allow=[parallel.strategy]")
        two.append(job("mixed", [*PLAIN, *change], 14, "loop.hard_stop=9"))
        fits = fit_on_ranks(2, two)
        assert all(set(ends.values()) == {"0"} for ends in fits.ends), fits
        assert main(["fit", *job("mixed", [*PLAIN, "resume_allow=[parallel.strategy]"], 14)]) == 0
        yield folder


def seen(name: str) -> dict[tuple[int, int, int], Any]:
    """(step, rank, batch) -> what was trained on."""
    return {
        (record["step"], rank, record["batch"]): record["content"]
        for rank in (0, 1)
        if (file := Path(f"{name}-seen{rank}.jsonl")).exists()
        for record in map(json.loads, file.read_text().splitlines())
    }


def read(name: str, last: int) -> Iterator[StepSamples]:
    return read_step_samples(Path(name), 1, last, overrides=TRUST)


@pytest.mark.parametrize("name", [name for name in STEPS if name != "stream"])
def test_the_indices_of_each_rank_are_those_that_it_trained_on(runs: Path, name: str) -> None:
    told = {
        (step.step, batch.rank, batch.number): [sample.index for sample in batch.samples]
        for step in read(name, STEPS[name])
        for batch in step.batches
    }
    assert told == {key: indices_of(content) for key, content in seen(name).items()}


def test_the_batches_of_a_stream_are_those_of_each_rank(runs: Path) -> None:
    told = {
        (step.step, batch.rank, batch.number): batch.content.tolist()
        for step in read("stream", STEPS["stream"])
        for batch in step.batches
    }
    assert told == {key: content for key, content in seen("stream").items() if content}
