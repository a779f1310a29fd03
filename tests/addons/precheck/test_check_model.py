"""`train check model` finds what is wrong with a model, and nothing where nothing is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command import EXPERIMENTS

from trainer_cli.commands.command_line import main
from trainer_cli.errors import ExitCode

PARTS = """
import torch
from torch import nn
from torch.nn import functional


class Points:
    def __len__(self):
        return 24

    def __getitem__(self, index):
        label = index % 3
        return torch.tensor([label - 1.0, index / 24]), label


class Data:
    def __init__(self):
        self.train = self.val = Points()


class Sound(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.out, self.extra = nn.Linear(2, 16), nn.Linear(16, 3), None
        self.make()

    def make(self):
        pass

    def features(self, x):
        return torch.relu(self.hidden(x))

    def loss(self, logits, labels):
        return functional.cross_entropy(logits, labels)

    def forward(self, batch):
        logits = self.out(self.features(batch[0]))
        return {"loss": self.loss(logits, batch[1]), "logits": logits}

"""
EXPERIMENT = """# @package _global_
model: {_target_: parts.Model}
data: {_target_: parts.Data, batch_size: 12}
optimizer: {_target_: torch.optim.Adam, lr: 0.05}
loop: {max_duration: 8}
"""
Check = Callable[..., tuple[int, Any]]


@pytest.fixture
def check(check_project: Check) -> Check:
    """Checks a project whose model is `Sound` with this body; returns the exit code and the report as JSON."""

    def check(body: str, *words: str) -> tuple[int, Any]:
        parts = f"{PARTS}\nclass Model(Sound):\n{body}\n"
        return check_project("model", EXPERIMENT, parts, "--seconds", "60", *words)

    return check


def features(expression: str, made: str = "pass") -> str:
    return f"    def make(self):\n        {made}\n\n    def features(self, x):\n        return {expression}"


HIDDEN = "torch.relu(self.hidden(x))"
FAULTS = [
    (features(f"{HIDDEN} - x.mean(0).sum()"), "logits", "certain", "depends on the others of its batch"),
    (features("torch.softmax(self.hidden(x), dim=0)"), "logits", "certain", "depends on the others of its batch"),
    (features(HIDDEN, "self.extra = nn.Linear(2, 2)"), "extra.weight", "certain", "its module is never called"),
    (features(f"({HIDDEN}, self.extra(x))[0]", "self.extra = nn.Linear(2, 2)"), "extra.bias", "certain", "not reach"),
    (features(f"{HIDDEN}.detach()"), "hidden.weight", "certain", "no gradient: its output does not reach the loss"),
    (features("torch.relu(self.hidden(x) - 1e6)"), "hidden.weight", "likely", "gradient 0 in 100 steps"),
    (features(f"{HIDDEN} * 1e3"), "loss", "likely", "that of a constant answer 1.099"),
    (features(f"functional.dropout({HIDDEN})"), "logits, loss", "likely", "gives other values"),
    (
        features(f"({HIDDEN}, self.seen.add_(1))[0]", "self.register_buffer('seen', torch.zeros(1))"),
        "seen", "certain", "an evaluation changes it",
    ),
    (
        "    def loss(self, logits, labels):\n        return functional.cross_entropy(logits, labels, reduction='sum')",
        "loss", "hint", "not the mean of the losses of two halves",
    ),
    (
        "    def loss(self, logits, labels):\n        return functional.cross_entropy(logits * 0.0, labels)",
        "loss", "likely", "on one batch alone the loss goes from 1.099 to 1.099",
    ),
    (
        "    def loss(self, logits, labels):\n        return functional.cross_entropy(logits, labels) * float('inf')",
        "loss", "certain", "on one batch alone the loss goes from inf",
    ),
    (
        "    def loss(self, logits, labels):\n        return functional.mse_loss(logits[:, 0], labels + 30.0)",
        "loss", "likely", "that of a constant answer 0.",
    ),
    (
        "    def loss(self, logits, labels):\n"
        "        return functional.cross_entropy(logits + 9 * functional.one_hot(labels, 3), labels)",
        "loss", "hint", "that of a constant answer 1.099",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("body", "where", "sureness", "what"), FAULTS)
def test_each_fault_is_found_with_its_place_and_a_cure(
    check: Check, body: str, where: str, sureness: str, what: str
) -> None:
    code, report = check(body)
    assert code == ExitCode.FAILED
    matches = [each for each in report["findings"] if what in each["what"] and each["where"] == where]
    assert [each["sureness"] for each in matches] == [sureness], report
    assert matches[0]["cure"]


SOUND = {
    "a model that is as it should be": "    pass",
    "dropout that follows the mode": features(f"functional.dropout({HIDDEN}, training=self.training)"),
    "batch norm": features(f"self.extra({HIDDEN})", "self.extra = nn.BatchNorm1d(16)"),
    "a frozen part": features(HIDDEN, "self.extra = nn.Linear(2, 2).requires_grad_(False)"),
    "a layer that begins with zeros": features(HIDDEN, "nn.init.zeros_(self.out.weight)"),
    "a loss of one's own": "    def loss(self, logits, labels):\n        return ((logits[:, 0] - labels) ** 2).mean()",
}


@pytest.mark.parametrize("body", SOUND.values(), ids=SOUND)
def test_nothing_is_found_where_nothing_is_wrong(check: Check, body: str) -> None:
    code, report = check(body)
    assert (code, report["findings"]) == (0, [])
    assert report["looked_at"][-1].startswith("on one batch alone the loss goes from ")


def test_batch_norm_is_named_as_mixing_in_training_by_design(check: Check) -> None:
    _, report = check(SOUND["batch norm"])
    assert report["notes"] == ["in training BatchNorm mixes samples of a batch by design: extra"]


@pytest.mark.parametrize(
    ("body", "sure"), [("    pass", "likely"), ("    def make(self): self.hidden.requires_grad_(False)", "hint")]
)
def test_a_loss_that_stays_is_a_hint_where_a_part_is_frozen(check: Check, body: str, sure: str) -> None:
    code, report = check(body, "optimizer.lr=1e-6")
    assert code == 1
    (finding,) = report["findings"]
    assert (finding["where"], finding["sureness"]) == ("loss", sure)
    assert "on one batch alone the loss goes from" in finding["what"]


def test_too_few_steps_prove_nothing(check: Check) -> None:
    code, report = check(features(HIDDEN), "optimizer.lr=1e-9", "--seconds", "1e-9", "--steps", "30")
    assert (code, report["findings"]) == (0, [])
    assert report["notes"][-1] == "too few steps to say whether a batch can be fitted: give --seconds"


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_the_model_of_an_experiment_that_ships_is_sound(
    empty_folder: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("text.txt").write_text(" ".join(str(number**2) for number in range(20000)))
    path = ["data.path=text.txt"] if name == "char_gpt" else []
    assert main(["check", "model", name, "--steps", "20", "--seconds", "60", *path]) == 0, capsys.readouterr().out
    assert capsys.readouterr().out.endswith("nothing found\n")
    assert sorted(path.name for path in empty_folder.iterdir()) == ["text.txt"]
