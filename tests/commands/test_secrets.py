"""The value of `${oc.env:NAME}` stands in no message and no file of a run, whatever fails."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from trainer_cli.commands.command_line import main
from trainer_cli.errors import forget_secrets, replace_in_messages, without_secrets

SECRET = "S3CR3T'hush"
"""With a character that messages escape."""
PARTS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, token=None, fail=None):
        super().__init__()
        self.token, self.fail, self.layer = token, fail, nn.Linear(64, 10)
        if fail == "value":
            raise ValueError(f"token {token} was refused")
        if fail == "key":
            raise KeyError(token)

    def forward(self, batch):
        if self.fail == "step" or (self.fail == "evaluation" and not self.training):
            raise RuntimeError(f"request with {self.token!r} failed")
        return nn.functional.cross_entropy(self.layer(batch[0].flatten(1)), batch[1])
"""
EXPERIMENT = """# @package _global_
# A token in every kind of place
defaults: [override /data: digits]
model: {_target_: parts_with_a_token.Net, token: "${oc.env:TOKEN}"}
notes: "x ${oc.env:TOKEN}"
tags: ["${oc.env:TOKEN}"]
vars: {token: "${oc.env:TOKEN}"}
loop: {max_duration: 2, eval_interval: 1}
"""


HIDDEN = "fit +experiment=secret checkpoint.folder=${oc.env:TOKEN}"
"""Checkpoints are in a folder of this name, which no line on the screen shows."""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "configs/experiment").mkdir(parents=True)
    (tmp_path / "configs/experiment/secret.yaml").write_text(EXPERIMENT)
    (tmp_path / "parts_with_a_token.py").write_text(PARTS)
    monkeypatch.chdir(tmp_path)
    # An earlier test has imported that of another folder.
    monkeypatch.delitem(sys.modules, "parts_with_a_token", raising=False)
    monkeypatch.setenv("TOKEN", SECRET)
    return tmp_path


def _leaks(folder: Path) -> list[str]:
    return [str(file) for file in folder.rglob("*") if file.is_file() and b"S3CR3T" in file.read_bytes()]


FIT = "fit +experiment=secret"
WRONG = [
    *(f"{FIT} +model.fail={how}" for how in ("value", "key", "step", "evaluation")),
    *(
        f"{FIT} {key}=${{oc.env:TOKEN}}"
        for key in (
            "optimizer.lr", "precision.dtype", "loop.max_duration", "seed", "model._target_", "ckpt", "resume",
            "freeze", "+data.token", "+callbacks.x.decay", "checkpoint.save_interval", "checkpoint.keep_best.metric",
        )
    ),
    f"{FIT} model.token=${{vars.token}} +model.fail=value",
    f"{FIT} model._target_=parts_with_a_token.${{oc.env:TOKEN}}",
    "validate ckpt=${oc.env:TOKEN}",
    "predict ckpt=${oc.env:TOKEN}",
    "plan +experiment=secret optimizer.lr=${oc.env:TOKEN}",
]  # fmt: skip


# With the whole traceback, which only errors of the user's code have otherwise.
@pytest.mark.parametrize(("full", "line"), [*(("", line) for line in WRONG), *(("1", line) for line in WRONG[:4])])
def test_no_error_has_the_value_in_it(
    line: str, full: str, project: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAIN_FULL_ERROR", full)
    assert main(line.split(" ")) != 0
    out, err = capfd.readouterr()
    assert "S3CR3T" not in out + err
    assert _leaks(project) == []


def test_no_file_of_a_run_and_no_verb_has_the_value_in_it(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for line in (
        FIT,
        "validate ckpt=runs/secret@latest",
        "report runs/secret",
        "config +experiment=secret",
        "config +experiment=secret --json",
        "config +experiment=secret --provenance",
        "plan +experiment=secret name=other",
        f"{FIT} loop.max_duration=3",
    ):
        assert main(line.split(" ")) == 0, line
    out, err = capfd.readouterr()
    assert "S3CR3T" not in out + err
    assert _leaks(project) == []


@pytest.mark.parametrize(
    "lines",
    [
        [HIDDEN],
        [HIDDEN, HIDDEN],
        [HIDDEN, f"{HIDDEN} loop.max_duration=3"],
        [f"{HIDDEN} +model.fail=step"],
        [f"{HIDDEN} --json"],
        [HIDDEN, "validate ckpt=runs/secret@latest", "report runs/secret"],
    ],
)
def test_no_printed_line_and_no_file_has_the_name_of_a_hidden_folder(
    lines: list[str], project: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for line in lines:
        # Only a step that fails ends by an error.
        assert (main(line.split(" ")) == 0) == ("fail=step" not in line), line
        out, err = capfd.readouterr()
        assert "S3CR3T" not in out + err, line
    assert _leaks(project) == []
    if "report" in line:
        assert main(["ckpt", "show", "runs/secret@latest"]) == 0
        assert f"{SECRET}/step2" in capfd.readouterr().out, "the path is what it is asked for"
    assert "fail=step" in line or "report" in line or "nothing to do" in out or "${oc.env:TOKEN}/step" in out + err


def test_the_name_of_the_run_is_shown(
    project: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKEN", "shown-name")
    assert main([*FIT.split(" "), "name=${oc.env:TOKEN}"]) == 0
    assert "runs/shown-name" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("values", "text", "expected"),
    [
        ({"A": "secret"}, "the secret", "the ${oc.env:A}"),
        ({"A": "cuda"}, "on cuda", "on cuda"),
        ({"A": "secret", "B": "secret-longer"}, "secret-longer secret", "${oc.env:B} ${oc.env:A}"),
        ({"A": "a\\b\nsecret"}, repr("a\\b\nsecret"), "'${oc.env:A}'"),
    ],
)
def test_values_are_replaced_by_their_expressions(values: dict[str, str], text: str, expected: str) -> None:
    forget_secrets()
    for name, value in values.items():
        replace_in_messages(value, f"${{oc.env:{name}}}")
    try:
        assert without_secrets(text) == expected
    finally:
        forget_secrets()
