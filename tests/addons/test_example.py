"""The add-on of the examples, installed as a user installs it: its verb, its callback, and runs that name it."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command import ROOT, Result, environment, train
from reader import blocks

EXAMPLE = ROOT / "examples" / "addon"
Command = Callable[..., Result]


@pytest.fixture(scope="module")
def train_with_addon(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """`train` where the example is installed; its working directory is empty at first."""
    site, folder = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("work")
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target", str(site)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(EXAMPLE)], check=True)
    path = f"{site}:{environment()['PYTHONPATH']}"
    return lambda *words: train(*words, cwd=folder, PYTHONPATH=path)


def test_the_readme_of_the_example_runs(train_with_addon: Command) -> None:
    ((_, _, text),) = blocks(EXAMPLE / "README.md")
    install, *commands = (shlex.split(line) for line in text.splitlines())
    assert install == ["pip", "install", "."]
    results = [train_with_addon(*words, *(["loop.max_duration=20"] if words[0] == "fit" else []))
               for _, *words in commands]  # fmt: skip
    assert [result.code for result in results] == [0, 0], results
    assert len(results[-1].out.splitlines()) == 3
    assert results[-1].out.startswith("step ")


def test_a_run_that_names_the_callback_is_evaluated_without_trust(train_with_addon: Command) -> None:
    fit = ("fit", "digits_mlp", "name=stopped", "loop.max_duration=20", "loop.log_interval=1")
    result = train_with_addon(*fit, "+callbacks.rise={_target_: trainer_cli.StopAtRise, factor: 0.5}")
    assert result.code == 0, result.err
    assert "times" in (train_with_addon("top", "runs/stopped", "--json").out)
    assert train_with_addon("validate", "ckpt=runs/stopped").code == 0


def test_help_lists_the_verb_and_its_mistakes_are_those_of_train(train_with_addon: Command) -> None:
    assert "  rises     list the steps at which the loss rose most" in train_with_addon("--help").out
    refused = train_with_addon("rises", "runs/none")
    assert (refused.code, refused.err.splitlines()[0]) == (2, "error: runs/none/metrics.jsonl does not exist")


def test_the_verb_is_unknown_without_the_example(tmp_path: Path) -> None:
    refused = train("rises", "runs/none", cwd=tmp_path)
    assert refused.code == 2
    assert "rises" in refused.err
