"""`train data`: the samples that it names are those that each step trained on."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from recording_parts import BASE, LINE, PLAIN, TRUST, indices_of, own

from trainer_cli.addons.exact.run_data import open_data
from trainer_cli.addons.exact.samples import StepSamples
from trainer_cli.addons.exact.step_positions import read_records
from trainer_cli.addons.exact.step_samples import find_sample, read_order, read_step_samples
from trainer_cli.commands.command_line import main
from trainer_cli.errors import UserError

# As many steps in an epoch as with all samples, so that the epochs in the records do not tell.
DROPPING = [*PLAIN, "data.drop_last=true", "loop.grad_accum_steps=4"]


def fit(*overrides: str, code: int = 0) -> None:
    base = [part for part in BASE if part.partition("=")[0] not in [other.partition("=")[0] for other in overrides]]
    assert main(["fit", *base, *overrides]) == code


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
    return read_step_samples(Path("run"), first, last, overrides=TRUST)


def told(steps: Iterator[StepSamples], rank: int = 0) -> dict[tuple[int, int], list[Any]]:
    return {
        (step.step, batch.number): [sample.index for sample in batch.samples]
        for step in steps
        for batch in step.batches
        if batch.rank == rank
    }


LOADERS = [
    pytest.param(PLAIN, 14, id="a dataset, with an uneven last batch"),
    pytest.param([*PLAIN, "loop.grad_accum_steps=4"], 5, id="accumulation, with a short last step"),
    pytest.param(DROPPING, 5, id="samples left out"),
    pytest.param([*PLAIN, "loop.limit_train_batches=4"], 11, id="a cut epoch"),
    pytest.param([*PLAIN, "data.batch_size=null", "+data.global_batch_size=6"], 9, id="a global batch size"),
    pytest.param([*PLAIN, "+data.overfit_batches=2"], 6, id="the same few samples"),
    pytest.param(own("shuffle"), 14, id="a loader that shuffles"),
    pytest.param(own("generator"), 14, id="a loader with a generator"),
    pytest.param(own("generator", workers=2), 14, id="a loader with a generator and workers"),
    pytest.param(own("drop_last"), 12, id="a loader that drops the last batch"),
    pytest.param(own("weighted"), 14, id="a loader that draws with replacement"),
]


@pytest.mark.parametrize(("overrides", "steps"), LOADERS)
def test_the_indices_of_each_step_are_those_that_it_trained_on(
    empty_folder: Path, overrides: list[str], steps: int
) -> None:
    fit(*overrides, f"loop.max_duration={steps}")
    trained = {key: indices_of(content) for key, content in seen().items()}
    assert told(read(1, steps)) == trained
    assert {step for step, _ in trained} == set(range(1, steps + 1))
    uses = list(find_sample(Path("run"), "3", overrides=TRUST))
    expected = [key for key, indices in trained.items() for index in indices if index == 3]
    assert [(use.step, use.batch) for use in uses] == expected
    data = open_data(read_records(Path("run")), TRUST)
    for step in read_step_samples(Path("run"), 1, steps, data=data):
        for batch in step.batches:
            if step.step not in (1, steps // 2 + 1, steps):
                continue
            contents = [int(content) for _, content in data.load(step, batch)]
            assert contents == [sample.index for sample in batch.samples], step.step


def test_the_order_of_a_plain_dataset_needs_no_data(empty_folder: Path) -> None:
    fit(*PLAIN, "loop.max_duration=14")
    assert read_order(read_records(Path("run"))) is not None
    # Not even the project is there: the target is not trusted.
    assert told(read_step_samples(Path("run"), 1, 14)) == {key: indices_of(value) for key, value in seen().items()}


@pytest.mark.addon("text")
def test_the_windows_of_a_text_are_those_that_each_step_trained_on(empty_folder: Path) -> None:
    Path("text.txt").write_text("It was a dark and stormy night. " * 4)
    data = "data={_target_: trainer_cli.Text, path: text.txt, context: 8, val_fraction: 0.2, batch_size: 24}"
    fit(*LINE, data, "loop.max_duration=9")
    opened = open_data(read_records(Path("run")), TRUST)
    for step in read(1, 9):
        (batch,) = step.batches
        tokens = [opened.dataset[sample.key][0].tolist() for sample in batch.samples]
        assert seen()[step.step, 1][0] == tokens
        assert opened.dataset.describe(batch.samples[0].key) == "".join(map(chr, tokens[0]))


@pytest.mark.addon("text")
def test_the_documents_of_a_packed_mixture_are_those_that_each_step_trained_on(empty_folder: Path) -> None:
    for name in "ab":
        Path(f"{name}.txt").write_text("".join(f"{name}{number:03}{'x' * (number % 7)}\n" for number in range(20)))
    documents = "{{_target_: trainer_cli.Documents, path: {0}.txt, document: line}}"
    source = f"{{{{_target_: trainer_cli.Packing, length: 24, source: {documents}}}}}"
    fit(
        *LINE,
        f"data={{_target_: trainer_cli.Mixture, sources: {{a: {source.format('a')}, b: {source.format('b')}}}, "
        "weights: {a: 1, b: 1}, epoch_samples: 10, batch_size: 4}",
        "loop.max_duration=7",
    )
    for step in read(1, 7):
        (batch,) = step.batches
        rows = ["".join(map(chr, row)) for row in seen()[step.step, 1]["tokens"]]
        for row, sample in zip(rows, batch.samples, strict=True):
            assert re.findall(r"[ab]\d{3}", row) == [
                f"{sample.source}{document.index:03}" for document in sample.documents if not document.first_token
            ]
    epoch = [sample for step in read(1, 3) for batch in step.batches for sample in batch.samples]
    assert {sample.source for sample in epoch} == {"a", "b"}
    use = next(iter(find_sample(Path("run"), f"{epoch[5].source}:{epoch[5].index}", overrides=TRUST)))
    assert use.step <= 2


@pytest.mark.parametrize("step", [1, 7, 14])
def test_the_batches_of_a_stream_with_two_workers_are_made_again(streamed: Path, step: int) -> None:
    for samples in read(step, min(step + 3, 14)):
        (batch,) = samples.batches
        assert batch.content.tolist() == seen()[samples.step, 1]
        assert batch.size == len(batch.content)
        assert samples.epoch == (samples.step - 1) // 6


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of two epochs of a stream, in the current folder."""
    before, folder = Path.cwd(), tmp_path_factory.mktemp("streamed")
    os.chdir(folder)
    fit(*LINE, "data={_target_: recording_parts.Stream, batch_size: 4, num_workers: 2}", "loop.max_duration=14")
    yield folder
    os.chdir(before)


@pytest.mark.parametrize(
    ("change", "allow"),
    [("data.batch_size=3", True), ("loop.grad_accum_steps=2", True), ("callbacks.skip.samples=7", False)],
)
def test_each_attempt_has_its_own_settings(empty_folder: Path, change: str, allow: bool) -> None:
    base = [*PLAIN, "+callbacks.skip={_target_: trainer_cli.SkipSamples, samples: 0}", "checkpoint.fixed_steps=[8]"]
    fit(*base, "loop.max_duration=30", "loop.hard_stop=8")
    more = ["resume_allow=[data.batch_size,loop.grad_accum_steps,callbacks.skip.samples]"]
    fit(*base, change, *more, "loop.max_duration=30", "loop.hard_stop=16")
    trained = {key: indices_of(content) for key, content in seen().items()}
    assert told(read(1, 16)) == trained, "all are kept"
    for step in (0, 5, 10, 15):
        shutil.rmtree(f"run/checkpoints/step{step}")
    assert told(read(1, 16)) == trained, "one is kept"


def test_settings_of_an_attempt_without_checkpoints_are_those_of_the_next_if_its_position_fits(
    empty_folder: Path,
) -> None:
    for stop, batch_size in ((8, 4), (16, 4), (24, 3)):
        allow = [f"data.batch_size={batch_size}", "resume_allow=[data.batch_size]", "checkpoint.fixed_steps=[8,16]"]
        fit(*PLAIN, *allow, "loop.max_duration=30", f"loop.hard_stop={stop}")
    trained = {key: indices_of(content) for key, content in seen().items()}
    for step in (0, 5, 8):
        shutil.rmtree(f"run/checkpoints/step{step}")
    assert told(read(1, 24)) == trained
    for step in (10, 15, 16):
        shutil.rmtree(f"run/checkpoints/step{step}")
    assert {step.step for step in read(1, 24) if step.uncertainty} >= set(range(1, 17))


def test_data_that_a_roll_back_has_passed_over_is_not_named(empty_folder: Path) -> None:
    back = "+callbacks.back={_target_: recording_parts.RollBack, step: 8}"
    fit(*PLAIN, back, "loop.max_duration=16")
    assert told(read(1, 16)) == {key: indices_of(content) for key, content in seen().items()}
    # Without the checkpoint to which the run went back it is unknown where data was passed over.
    shutil.rmtree("run/checkpoints/step5")
    assert [step.uncertainty is not None for step in read(1, 16)] == [step <= 10 for step in range(1, 17)]


def test_steps_to_come_are_those_that_a_resume_trains_on(empty_folder: Path) -> None:
    fit(*PLAIN, "loop.max_duration=20", "+callbacks.stop={_target_: recording_parts.StopAt, step: 9}", code=75)
    predicted = told(read(10, 20))
    to_come = [use.step for use in find_sample(Path("run"), "3", overrides=TRUST) if not use.past]
    assert to_come == [step for (step, _), indices in predicted.items() if 3 in indices]
    fit(*PLAIN, "loop.max_duration=20", "+callbacks.stop={_target_: recording_parts.StopAt, step: 9}")
    assert predicted == {key: indices_of(content) for key, content in seen().items() if key[0] > 9}


def test_a_fork_goes_on_in_the_data_of_the_other_run(empty_folder: Path) -> None:
    fit(*PLAIN, "loop.max_duration=8")
    fork = ["ckpt=run@step5", "load.states=[all]", "run_dir=fork", "loop.max_duration=12"]
    fit(*PLAIN, *fork)
    trained = {key: indices_of(content) for key, content in seen().items() if key[0] > 5}
    assert told(read_step_samples(Path("fork"), 6, 12)) == trained
    with pytest.raises(UserError, match="fork began at step 5"):
        next(read_step_samples(Path("fork"), 5))


def test_settings_that_refer_to_other_keys_are_resolved(empty_folder: Path) -> None:
    fit(*LINE, "data={_target_: recording_parts.Plain, batch_size: '${seed}'}", "seed=5", "loop.max_duration=7")
    assert read_order(read_records(Path("run"))) is None
    assert told(read(1, 7)) == {key: indices_of(content) for key, content in seen().items()}
