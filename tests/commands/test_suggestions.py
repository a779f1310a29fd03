"""The likeliest mistakes in a command: one line each, with the cure."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from printed import message

from trainer_cli.commands.main import main


@pytest.mark.parametrize(
    ("command", "cure"),
    [
        ("+experiment=digits", "Did you mean 'train fit +experiment=digits'?"),
        ("digits seed=1", "Did you mean 'train fit experiment=digits seed=1'?"),
        ("mine", "Did you mean 'train fit experiment=mine'?"),
        ("fti", "Did you mean 'fit'?"),
        ("zzz", "There are: fit, validate, "),
        ("--experiment=digits fit", "Write train VERB first"),
        ("fit seed=3 mine", "Did you mean 'experiment=mine'?"),
        ("fit seed=3 digits", "Did you mean 'experiment=digits' or 'data=digits'?"),
        ("fit digit", "Did you mean 'experiment=digits'?"),
        ("fit +mine", "Did you mean 'experiment=mine'?"),
        ("fit large experiment=mine", "Did you mean 'model=large'?"),
        ("fit experiment digits", "Did you mean 'experiment=digits'?"),
        ("fit seed 3 experiment=mine", "Did you mean 'seed=3'?"),
        ("fit optimizer sgd", "Did you mean 'optimizer=sgd'?"),
        ("fit optimizer.lr = 0.1", "Write 'optimizer.lr=0.1', without spaces."),
        ("fit optimizer.lr= 0.1 seed=1", "Write 'optimizer.lr=0.1', without spaces."),
        ("fit seed=1 optimizer.lr =0.1", "Write 'optimizer.lr=0.1', without spaces."),
        ("fit experiment= digits", "Write 'experiment=digits', without spaces."),
        ("fit model", "Write model=VALUE."),
        ("fit configs/experiment/mine.yaml", "Did you mean 'experiment=mine'?"),
        ("fit --experiment digits", "Did you mean 'experiment=digits'?"),
        ("fit --experiment=digits", "Did you mean 'experiment=digits'?"),
        ("fit --lr 0.1", "Did you mean 'optimizer.lr=0.1'?"),
        ("fit +experiment=mine --noise 0", "Did you mean 'data.noise=0'?"),
        ("fit --batch-size=64", "Did you mean 'data.batch_size=64'?"),
        ("fit --optimizer.lr=0.1", "Did you mean 'optimizer.lr=0.1'?"),
        ("fit --loop.max_duration 3ep", "Did you mean 'loop.max_duration=3ep'?"),
        ("fit --epochs 5", "Did you mean 'loop.max_duration=5ep'?"),
        ("fit --max-steps=5", "Did you mean 'loop.max_duration=5st'?"),
        ("fit --seed --batch-size", "Did you mean 'seed=VALUE'?"),
        ("fit --confg-dir x", "Did you mean '--config-dir'?"),
        ("fit --zzz", "Values are given as key=value, without dashes. See train fit --help."),
        ("list --zzz", "See train list --help."),
        ("list experiment model", "unrecognized arguments: model. See train list --help."),
        ("validate runs/mine/checkpoints/step10", "Did you mean 'ckpt=runs/mine/checkpoints/step10'?"),
        ("validate runs/a/step1 runs/a/step2", "Write ckpt='GLOB', in quotes"),
        ("fit zzzz", "Write key=value, or the name of an experiment: mine, char_gpt, "),
        ("fit a*b", "'a*b' is no override"),
        ("complete fish", "(choose from"),
        ("new", "the following arguments are required: DIR"),
    ],
)
def test_a_likely_mistake_is_one_line_with_its_cure(
    made: Path, capsys: pytest.CaptureFixture[str], command: str, cure: str
) -> None:
    assert main(command.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(r"error: .*\n(  --> .*\n)?(help: .*\n)?", captured.err)
    assert cure in message(captured.err)


def test_what_is_suggested_can_be_run(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for overrides in (["experiment=mine"], ["model=large", "experiment=mine"], ["data.noise=0", "+experiment=mine"]):
        assert main(["config", *overrides]) == 0
    assert capsys.readouterr().err == ""
