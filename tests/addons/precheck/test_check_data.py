"""`train check data` finds what is wrong with samples, and nothing where nothing is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command import EXPERIMENTS

from trainer_cli.commands.command_line import main
from trainer_cli.errors import ExitCode

PARTS = """
import math

import torch
from torch.utils.data import IterableDataset


class Points:
    def __init__(self, first=0, count=60):
        self.first, self.count = first, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.tensor([self.first + index, 1.0]), (self.first + index) % 3


class Data:
    def __init__(self):
        self.train, self.val = Points(), Points(100, 20)


def changed(function, **sets):
    '''Data whose samples of these sets are changed by a function of the index and the sample.'''

    class Changed(Points):
        def __getitem__(self, index):
            return function(index, super().__getitem__(index))

    data = Data()
    for name in sets or ("train",):
        setattr(data, name, Changed(getattr(data, name).first, getattr(data, name).count))
    return data


class Stream(IterableDataset):
    def __iter__(self):
        yield from (Points()[index % 30] for index in range(60))


class Line(torch.nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.out = torch.nn.Linear(2, classes)

    def forward(self, batch):
        return torch.nn.functional.cross_entropy(self.out(batch[0]), batch[1])
"""
EXPERIMENT = """# @package _global_
model: {_target_: parts.Line, classes: 3}
data: {_target_: parts.MAKE, batch_size: 4}
optimizer: {_target_: torch.optim.Adam, lr: 0.01}
loop: {max_duration: 8}
"""
Found = list[tuple[str, str, str]]
Check = Callable[..., tuple[int, Any]]


@pytest.fixture
def check(check_project: Check) -> Check:
    """Checks a project whose data is made by this function; returns the exit code and the report as JSON."""
    experiment = EXPERIMENT.replace("MAKE", "make")
    return lambda make, *words: check_project("data", experiment, f"{PARTS}\n\n{make}\n", *words)


FAULTS = [
    ("make = lambda: changed(lambda i, s: Points()[i + 100])", "val, train", "certain", "20 samples in both: val["),
    ("make = lambda: changed(lambda i, s: Points()[min(i, 57)])", "train", "likely", "2 samples equal to another: ["),
    ("make = lambda: changed(lambda i, s: Points()[i % 5])", "train", "hint", "55 samples equal to another"),
    ("make = lambda: changed(lambda i, s: (s[0], 2))", "train", "certain", "every label is 2"),
    ("make = lambda: changed(lambda i, s: (s[0], 1), val=1)", "val", "certain", "every label is 1"),
    ("make = lambda: changed(lambda i, s: (s[0], i % 2))", "train", "likely", "no sample of class 2 of the model's 3"),
    ("make = lambda: changed(lambda i, s: (s[0], i % 4))", "train", "certain", "labels 3, and the model has 3 classes"),
    ("make = lambda: changed(lambda i, s: (s[0], [1.0, math.nan][i == 7]))", "train", "certain", "infinity in [1]"),
    ("make = lambda: changed(lambda i, s: (s[0], [1, None][i == 7]))", "train", "certain", "1 have no label ([1]"),
    ("make = lambda: changed(lambda i, s: (s[0] / (i != 9), s[1]))", "train", "certain", "infinity in [0]: [9]"),
    ("make = lambda: changed(lambda i, s: (s[0][: 1 + (i != 3)], s[1]))", "train", "certain", "[0] differs: "),
    ("make = lambda: changed(lambda i, s: (s[0].double() if i == 3 else s[0], 1))", "train", "likely", "float64"),
    ("make = lambda: changed(lambda i, s: s[:1] if i == 3 else s)", "train", "certain", "a sample differs: "),
    ("make = lambda: changed(lambda i, s: {'x': s[0], 'label': 1})", "train", "certain", "every label is 1"),
    ("make = lambda: changed(lambda i, s: s if i != 4 else 1 / 0)", "train", "certain", "(ZeroDivisionError): [4: "),
]  # fmt: skip


@pytest.mark.parametrize(("make", "where", "sureness", "what"), FAULTS)
def test_each_fault_is_found_with_its_place_and_a_cure(
    check: Check, make: str, where: str, sureness: str, what: str
) -> None:
    code, report = check(make)
    assert code == ExitCode.FAILED
    matches = [each for each in report["findings"] if what in each["what"]]
    assert [(each["where"], each["sureness"]) for each in matches] == [(where, sureness)], report
    assert matches[0]["cure"]


SOUND = {
    "data that is as it should be": "make = Data",
    "points that are drawn at each reading": "make = lambda: changed(lambda i, s: (s[0] + torch.rand(2), s[1]))",
    "samples that are drawn whatever their number is": "make = lambda: changed(lambda i, s: (torch.rand(2), i % 3))",
    "targets of a regression": "make = lambda: changed(lambda i, s: (s[0], i * 0.5), train=1, val=1)",
}


@pytest.mark.parametrize("make", SOUND.values(), ids=SOUND)
def test_nothing_is_found_where_nothing_is_wrong(check: Check, make: str) -> None:
    code, report = check(make)
    assert (code, report["findings"]) == (0, [])
    assert report["looked_at"] == ["val: 20 of 20 samples looked at", "train: 60 of 60 samples looked at"]


def test_samples_that_are_drawn_are_compared_within_their_set_and_it_is_said_that_no_others_are(check: Check) -> None:
    code, report = check("make = lambda: changed(lambda i, s: (Points()[i // 2][0] + torch.rand(2), i // 2 % 3))")
    assert code == ExitCode.FAILED
    assert [(each["where"], each["what"][:28]) for each in report["findings"]] == [
        ("train", "30 samples equal to another:")
    ]
    assert "samples of train are drawn anew at each reading" in report["notes"][0]


def test_the_time_is_kept_and_what_was_not_looked_at_is_said(check: Check) -> None:
    _, report = check("make = lambda: changed(lambda i, s: s)", "--seconds", "1e-9")
    assert report["looked_at"] == ["val: 1 of 20 samples looked at", "train: 1 of 60 samples looked at"]


def test_a_stream_is_looked_at_from_its_beginning(check: Check) -> None:
    code, report = check("def make():\n    data = Data()\n    data.train = Stream()\n    return data")
    assert (code, report["looked_at"][1]) == (ExitCode.FAILED, "train: 60 of 60 samples looked at")
    assert [each["what"][:11] for each in report["findings"]] == ["30 samples "]


def test_a_stream_is_looked_at_up_to_its_error(check: Check) -> None:
    fails = "class Fails(Stream):\n    def __iter__(self):\n        yield Points()[0]\n        1 / 0\n"
    code, report = check(
        f"{fails}\n\ndef make():\n    data = Data()\n    data.train = Fails()\n    return data", "--all"
    )
    assert (code, report["looked_at"][1]) == (ExitCode.FAILED, "train: 1 of the samples of a stream looked at")
    assert "1 cannot be read (ZeroDivisionError): [1: division by zero]" in [
        each["what"] for each in report["findings"]
    ]


def test_a_loader_of_batches_is_named_as_not_looked_at(check: Check) -> None:
    batches = "class Batches:\n    def __iter__(self):\n        yield Points()[0]\n"
    code, report = check(
        f"{batches}\n\ndef make():\n    data = Data()\n    data.val = Batches()\n    return data", "~data.batch_size"
    )
    assert (code, report["looked_at"]) == (0, ["train: 60 of 60 samples looked at"])
    assert report["notes"] == ["val: its loader makes batches of its own, whose samples are not looked at"]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.campaign) if name in ("digits", "text") else name for name in EXPERIMENTS],
)
def test_the_data_of_an_experiment_that_ships_is_sound(
    empty_folder: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("text.txt").write_text(" ".join(str(number**2) for number in range(20000)))
    path = ["data.path=text.txt"] if name == "char_gpt" else []
    assert main(["check", "data", name, "--seconds", "4", *path]) == 0, capsys.readouterr().out
    assert capsys.readouterr().out.endswith("nothing found\n")


def test_a_time_that_is_none_is_refused(empty_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "data", "digits_mlp", "--seconds", "0"]) == ExitCode.USER
    assert "--seconds is 0, but it must be above 0" in capsys.readouterr().err
