"""`train bisect`: the first step at which a condition holds, by few evaluations."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from small_parts import note

from trainer_cli.addons.exact.bisect import Condition, search
from trainer_cli.addons.exact.step_samples import find_sample
from trainer_cli.commands.command_line import main
from trainer_cli.errors import UserError
from trainer_cli.runs.run_dir import RunDir

pytestmark = pytest.mark.usefixtures("forked_replays")

PARTS = '''
import pathlib

import torch

class Points(torch.utils.data.Dataset):
    """Points of a line, of which one is poisoned."""

    def __init__(self, poisoned=None):
        self.poisoned = poisoned

    def __len__(self):
        return 80

    def __getitem__(self, index):
        x = torch.tensor([index / 80])
        return x, x * 2 + (1e4 if index == self.poisoned else 0)

class Data:
    def __init__(self):
        self.train, self.val = Points(poisoned=13), Points()

class Once(torch.utils.data.Dataset):
    """Points of which one that a file names is poisoned, for a run that uses each of them once."""

    def __init__(self, size, poisoned=None):
        self.size, self.poisoned = size, poisoned

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        x = torch.tensor([index / self.size])
        return x, x * 2 + (1e9 if index == self.poisoned else 0)

class LongData:
    def __init__(self, size, path):
        self.train, self.val = Once(size, int(pathlib.Path(path).read_text())), Once(20)

class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)

    def forward(self, batch):
        x, y = batch
        return (self.linear(x) - y).square().mean()
'''


@pytest.mark.parametrize(
    ("text", "value", "holds"),
    [
        ("val/loss > 2", 2.5, True),
        ("val/loss>2", 2.0, False),
        ("val/loss <= 2e-1", 0.2, True),
        ("val/loss > 2", math.nan, False),
        ("val/loss is not finite", math.nan, True),
        ("val/loss is not finite", 1.0, False),
    ],
)
def test_a_condition_is_read_and_tested(text: str, value: float, holds: bool) -> None:
    condition = Condition.parse(text)
    assert condition.metric == "val/loss"
    assert condition.holds(value) is holds


@pytest.mark.parametrize(
    ("text", "form"),
    [
        *((text, "'val/loss > 2', or") for text in ("", "val/loss", "val/loss > ", "val/loss > high", "val/loss >> 2")),
        ("> 2", "'val/loss > 2', or"),
        ("train/loss == nan", "'train/loss is not finite'."),
        ("val/acc != NaN", "'val/acc is not finite'."),
    ],
)
def test_what_is_no_condition_is_refused(text: str, form: str) -> None:
    with pytest.raises(UserError, match="is not a condition") as caught:
        Condition.parse(text)
    assert f"Write it as {form}" in str(caught.value)


@pytest.mark.parametrize("interval", [1, 250, 500, 1000, 5000])
def test_one_step_of_5000_is_found_with_at_most_14_tests(interval: int) -> None:
    kept = range(0, 5001, interval)
    for bad in (1, 2, 499, 500, 501, 2500, 3333, 4999, 5000):
        tests: list[int] = []
        found = search(0, 5000, kept, partial(lambda bad, tests, step: note(tests, step) or step >= bad, bad, tests))
        assert found == bad
        assert len(tests) <= 14
        # Kept ones are read, and all others replayed.
        assert len([step for step in tests if step not in kept]) <= math.ceil(math.log2(interval)) or interval == 1


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of 24 steps, of which one trained on the poisoned sample, in the current folder."""
    before, folder = Path.cwd(), tmp_path_factory.mktemp("poisoned")
    os.chdir(folder)
    (folder / "configs").mkdir()
    (folder / "poison.py").write_text(PARTS)
    parts = ["model={_target_: poison.Line}", "data={_target_: poison.Data, batch_size: 4}"]
    settings = [
        "model=null", "data=null", "optimizer=sgd", "optimizer.lr=0.01", "scheduler=null", "loop.max_duration=24",
        "loop.eval_interval=2", "loop.log_interval=2", "checkpoint.save_interval=12", "logging.console=off",
        "checkpoint.ephemeral_save_interval=null", "loggers.tensorboard=null", "run_dir=run",
    ]  # fmt: skip
    assert main(["fit", *settings, *parts]) == 0
    yield folder
    os.chdir(before)


@pytest.mark.parametrize(
    ("steps", "saved_every", "evaluated_every"),
    [(120, 2, 40), pytest.param(5000, 500, 5000, marks=pytest.mark.campaign)],
)
def test_the_step_of_a_poisoned_sample_is_found(
    poisoned: Path, capsys: pytest.CaptureFixture[str], steps: int, saved_every: int, evaluated_every: int
) -> None:
    run, size = f"long{steps}", 4 * steps
    bad = str(size * 5 // 7)
    Path("bad.txt").write_text(bad)
    arguments = [
        "fit", "model=null", "data=null", "model={_target_: poison.Line}", "optimizer=sgd", "optimizer.lr=1e-5",
        f"data={{_target_: poison.LongData, batch_size: 4, size: {size}, path: bad.txt}}", "scheduler=null",
        f"loop.max_duration={steps}", f"loop.eval_interval={evaluated_every}", "loop.log_interval=25",
        f"checkpoint.save_interval={saved_every}", "checkpoint.ephemeral_save_interval=null", "logging.console=off",
        "loggers.tensorboard=null", f"run_dir={run}",
    ]  # fmt: skip
    assert main(arguments) == 0
    bad_step = next(find_sample(Path(run), bad)).step
    # The data has moved since.
    Path("bad.txt").rename("moved.txt")
    capsys.readouterr()
    assert main(["bisect", run, "val/loss > 100", "data.path=moved.txt", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step"] == bad_step
    assert found["evaluations"] <= math.ceil(math.log2(steps)) + 1
    replayed = sorted(path.name for path in Path(run, "replayed").glob("step*"))
    assert set(replayed) <= {f"step{bad_step - 1}", f"step{bad_step}"}
    assert main(["data", run, str(bad_step), "data.path=moved.txt", "--show", "--json"]) == 0
    ((step,), samples) = json.loads(capsys.readouterr().out), found["samples"]
    assert [sample["index"] for batch in samples["batches"] for sample in batch["samples"]].count(int(bad)) == 1
    poisoned_samples = [sample for sample in step["batches"][0]["contents"] if "1000000" in str(sample["values"])]
    assert [sample["name"] for sample in poisoned_samples] == [bad]
    # Again: every step that was evaluated is known.
    for path in Path(run, "replayed").glob("step*"):
        (path / "manifest.json").unlink()
    assert main(["bisect", run, "val/loss > 100", "data.path=moved.txt"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"val/loss > 100: not at step {bad_step - 1}, but at step {bad_step}" in "\n".join(lines)
    assert lines[-2:] == [f"  train replay {run} {bad_step}", f"  train data {run} {bad_step} --show"]


def test_a_batch_is_found_after_a_resume_with_another_config(
    poisoned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [
        "model=null", "data=null", "model={_target_: poison.Line}", "data={_target_: poison.Data, batch_size: 4}",
        "optimizer=sgd", "optimizer.lr=1e-9", "scheduler=null", "seed=0", "loop.log_interval=100", "run_dir=longer",
        "loop.eval_interval=null", "checkpoint.save_interval=12", "logging.console=off", "loggers.tensorboard=null",
    ]  # fmt: skip
    for end in (12, 24):
        assert main(["fit", *settings, f"loop.max_duration={end}"]) == 0
    bad_step = next(find_sample(Path("longer"), "13")).step
    assert 12 < bad_step <= 20
    capsys.readouterr()
    words = ["bisect", "longer", "train/loss > 1e6", "--first", "9", "--last", "24", "--json"]
    lines = [json.loads(line) for line in Path("longer/metrics.jsonl").read_text().splitlines()]
    Path("longer/metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines if line["step"] > 12))
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], [test["step"] for test in found["tests"]]) == (bad_step, list(range(10, bad_step + 1)))


def test_a_command_decides_by_its_exit_code(poisoned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("probe.py").write_text("import sys\nsys.exit(int(sys.argv[1]) >= 24)\n")
    probe = f"{sys.executable} probe.py {{step}}"
    assert main(["bisect", "run", "--command", f"{sys.executable} -c exit(125)", "--last", "24"]) == 2
    assert "the command ended with 125 at step 24" in capsys.readouterr().err
    assert main(["bisect", "run", "--command", probe, "--first", "12", "--last", "12"]) == 2
    assert "there is nothing between step 12 and step 12" in capsys.readouterr().err
    assert main(["bisect", "run", "--command", probe, "--last", "12"]) == 2
    assert "the condition does not hold at step 12" in capsys.readouterr().err


def test_a_command_that_was_corrected_is_asked_again(poisoned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bisect", "run", "--command", f"{sys.executable} corrected.py {{step}}"]
    # Python ends with 2 where there is no such file, which is as if the condition held.
    assert main(command) == 2
    assert "the condition holds at step 0 already" in capsys.readouterr().err
    for last_good, end in ((24, "does not hold at step 24"), (-1, "holds at step 0 already")):
        Path("corrected.py").write_text(f"import sys\nsys.exit(int(sys.argv[1]) > {last_good})  # {end}\n")
        assert main(command) == 2
        assert end in capsys.readouterr().err


def test_what_a_module_said_is_forgotten_if_it_cannot_be_right(
    poisoned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bisect", "run", "--command", f"{sys.executable} -m judge {{step}}"]
    assert main(command) == 2
    Path("judge.py").write_text("")
    assert main(command) == 2
    assert "the condition does not hold at step 24" in capsys.readouterr().err


def test_the_step_that_ended_a_run_with_an_error_is_not_searched(
    poisoned: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "fit", "model=null", "data=null", "model={_target_: poison.Line}",
        "data={_target_: poison.Data, batch_size: 4}",
        "optimizer=sgd", "optimizer.lr=1e30", "scheduler=null", "loop.max_duration=24", "loop.log_interval=1",
        "logging.console=off", "loggers.tensorboard=null", "run_dir=burst",
    ]  # fmt: skip
    assert main(arguments) == 1
    newest = RunDir(Path("burst")).read_summary()["step"]
    capsys.readouterr()
    assert main(["bisect", "burst", "val/loss is not finite", "--json"]) == 0
    assert 1 <= json.loads(capsys.readouterr().out)["step"] < newest
    # All of its steps are in records, so none is replayed.
    assert main(["bisect", "burst", "train/loss < 0"]) == 2
    assert "the condition holds at no record of train/loss" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "--command", "python 'probe.py"], "is not a command: No closing quotation"),
        (["run", "--command", ""], "the command is empty"),
        (["run", "--command", "true", "val/loss > 2"], "needs either a condition or --command"),
        (["run", "--command", "true", "data.batch_size=4"], "the condition does not hold at step 24"),
        (["run", "val/los > 2", "+data.nowhere=3"], "nowhere"),
        (["run"], "bisect needs either a condition or --command"),
        (["run", "val/loss"], "is not a condition"),
        (["run", "val/loss > 1e9"], "the condition does not hold at step 24"),
        (["run", "val/loss > -1"], "the condition holds at step 0 already"),
        (["run", "val/los > 2"], "no evaluation measures 'val/los'"),
        (["run", "train/loss > 1e12"], "the condition holds at no record of train/loss"),
        (["run", "train/lr > 0"], "no step measures 'train/lr'"),
        (["run", "val/loss > 2", "--last", "25"], "the run has steps 1 to 24"),
        (["configs", "val/loss > 2"], "configs holds no run"),
        (["run@attempt1", "val/loss > 2"], "run@attempt1 is not a run's directory"),
    ],
)
def test_a_mistake_is_one_message(
    poisoned: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    capsys.readouterr()
    assert main(["bisect", *arguments]) == 2
    assert message in capsys.readouterr().err
