"""`train data` as a command: what it prints, and what it says of likely mistakes."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image

from trainer_cli.addons.exact.sample_content import describe_content
from trainer_cli.commands.command_line import main

BASE = [
    "logging.console=off", "loop.eval_interval=null", "loop.log_interval=5", "checkpoint.save_interval=10",
    "checkpoint.ephemeral_save_interval=null", "loggers.tensorboard=null",
]  # fmt: skip
LINE = ["optimizer=sgd", "scheduler=null", "model=null", "model={_target_: words.Line}", "data=null"]
PARTS = '''
import torch

class Words(torch.utils.data.Dataset):
    """Numbers, of which the dataset tells the names."""

    def __init__(self, size, bad=None):
        self.size, self.bad = size, bad

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index == self.bad:
            raise ValueError("a torn file")
        return torch.full((2, 8), float(index)), index % 10

    def describe(self, index):
        return f"the number {index}"

class Data:
    def __init__(self, size=64, bad=None):
        self.train = Words(size, bad)

class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))

    def forward(self, batch):
        return (batch[0].float().mean() * self.weight * 1e-3).square().sum()
'''


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of 20 steps, in the current folder."""
    before, folder = Path.cwd(), tmp_path_factory.mktemp("data")
    os.chdir(folder)
    (folder / "configs").mkdir()
    (folder / "words.py").write_text(PARTS)
    digits = ["experiment=digits_mlp", "data.batch_size=64", "loop.max_duration=20", "run_dir=run"]
    assert main(["fit", *BASE, *digits]) == 0
    yield folder
    os.chdir(before)


def data(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    capsys.readouterr()
    assert main(["data", *arguments]) == code
    captured = capsys.readouterr()
    return captured.err if code else captured.out


def test_a_step_is_printed_with_its_indices(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, positions, indices = data(capsys, "run", "20").splitlines()
    assert first == "step 20: 64 samples, epoch 0 (attempt 1)"
    assert positions == "  positions 1,216 to 1,279 of the epoch"
    (step,) = json.loads(data(capsys, "run", "20", "--json"))
    samples = step["batches"][0]["samples"]
    assert indices.split() == [str(sample["index"]) for sample in samples]
    assert samples[0] == {"index": samples[0]["index"], "position": 1216}
    assert data(capsys, "run", "19..20").splitlines()[3:] == [first, positions, indices]


def test_a_sample_is_found_where_it_was_used(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (step,) = json.loads(data(capsys, "run", "20", "--json"))
    index = step["batches"][0]["samples"][0]["index"]
    uses = json.loads(data(capsys, "run", "--find", str(index), "--json"))
    assert uses == [{"step": 20, "epoch": 0, "rank": 0, "batch": 1, "attempt": 1, "past": True}]
    assert data(capsys, "run", "--find", str(index)).splitlines() == [
        f"sample {index} was used 1 time", "  step 20: epoch 0",
    ]  # fmt: skip


def test_images_are_saved_and_texts_are_shown(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (step,) = json.loads(data(capsys, "run", "20", "--show", "--images", "seen", "--json"))
    batch = step["batches"][0]
    assert len(batch["contents"]) == 64
    first = batch["contents"][0]
    assert first["values"][0].startswith("[0]: float32 (1, 8, 8) from 0 to ")
    with Image.open(first["images"][0]) as image:
        assert (image.size, image.mode) == ((8, 8), "L")
    lines = data(capsys, "run", "20", "--show")
    assert f"saved as run-samples/step20-{batch['samples'][0]['index']}.png" in lines


def test_the_datasets_own_description_is_shown(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "data={_target_: words.Data, batch_size: 4}"
    assert main(["fit", *BASE, *LINE, words, "run_dir=words", "loop.max_duration=2"]) == 0
    (step,) = json.loads(data(capsys, "words", "2", "--show", "--json"))
    indices = [sample["index"] for sample in step["batches"][0]["samples"]]
    assert [content["text"] for content in step["batches"][0]["contents"]] == [f"the number {i}" for i in indices]
    # Data of another length has another order.
    assert main(["data", "words", "2", "+data.size=70", "--show"]) == 0
    captured = capsys.readouterr()
    assert "the data is not what words was trained with: length was 64 and is 70" in captured.err
    assert "not certain" in captured.out


@pytest.mark.parametrize(("shape", "bad", "where"), [((12, 2), [3, 8], ", in [3], [8]"), ((24,), [3], "")])
def test_what_is_not_finite_in_a_batch_is_shown_with_the_index_of_its_samples(
    shape: tuple[int, ...], bad: list[int], where: str
) -> None:
    batch = torch.zeros(shape)
    batch[bad] = torch.nan
    (line,) = describe_content(batch)
    assert line.endswith(f"{int(batch.isnan().sum())} not finite{where}")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_raises_is_named_below_the_list_of_its_step(
    runs: Path, workers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"data={{_target_: words.Data, batch_size: 32, bad: 7, num_workers: {workers}}}"
    assert main(["fit", *BASE, *LINE, words, f"run_dir=torn{workers}", "loop.max_duration=2"]) == 1
    hint = capsys.readouterr().err.partition("and `train ")[2].partition("` lists the samples.")[0]
    run, step = hint.split()[1:]
    assert (run, hint.split()[0]) == (f"torn{workers}", "data")
    title, positions, *indices = data(capsys, run, step).splitlines()
    assert "7" in " ".join(indices).split()
    shown = data(capsys, run, step, "--show").splitlines()
    assert shown == [title, "  raised  while loading sample 7 of epoch 0: ValueError: a torn file", positions, *indices]
    (facts,) = json.loads(data(capsys, run, step, "--show", "--json"))
    assert facts["batches"][0]["raised"] == "while loading sample 7 of epoch 0: ValueError: a torn file"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "0"], "step 0 is the state before the first step: the first is 1"),
        (["run", "21"], "step 21 is after the end of run, which is step 20"),
        (["run", "18..21"], "step 21 is after the end of run, which is step 20"),
        (["run", "9..3"], "9..3 ends before it begins"),
        (["run", "last"], "'last' is not a step"),
        (["run"], "data needs a step, or --find INDEX"),
        (["run", "3", "--find", "4"], "data takes a step or --find INDEX, not both"),
        (["run", "--find", "2000"], "there is no sample '2000'"),
        (["run", "3", "--images", "here"], "--images has no effect without --show"),
        (["configs", "3"], "configs holds no run"),
        (["rnu", "3"], "rnu holds no run"),
        (["rnu", "3"], "Did you mean 'run'?"),
        (["run/checkpoints/step20", "3"], "Name the run itself: run."),
        (["run@step3", "3"], "Name the run itself: run."),
        (["run", "3", "data.sede=1", "--show"], "sede"),
    ],
)
def test_a_mistake_is_one_message(
    runs: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert message in data(capsys, *arguments, code=2)


def test_without_checkpoints_the_data_is_built(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree("run", "bare")
    shutil.rmtree("bare/checkpoints")
    expected = data(capsys, "run", "20")
    assert data(capsys, "bare", "20") == expected


@pytest.mark.addon("text")
def test_missing_data_is_one_message(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 9)
    text = "data={_target_: trainer_cli.Text, path: text.txt, context: 8, batch_size: 4}"
    assert main(["fit", *BASE, *LINE, text, "run_dir=text", "loop.max_duration=2"]) == 0
    Path("text.txt").rename("moved.txt")
    assert data(capsys, "text", "2").startswith("step 2: 4 samples"), "the order needs no data"
    assert "text.txt" in data(capsys, "text", "2", "--show", code=2)
    shown = data(capsys, "text", "2", "data.path=moved.txt", "--show")
    assert "      | " in shown
