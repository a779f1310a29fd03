"""A run that may only be read: what reads it works, and what would write into it says in one line what to do."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer_cli.commands.command_line import main

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the superuser's rights are dropped as on Linux")

_OVERRIDES = 0b110
"""CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH: with these the superuser writes where nobody may."""


def _effective(change: int | None) -> int:
    """This thread's first 32 effective capabilities; set before to `change`, if it is given."""
    libc = ctypes.CDLL(None, use_errno=True)
    header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert libc.capget(header, data) == 0
    before = data[0]
    if change is not None:
        data[0] = change
        assert libc.capset(header, data) == 0, os.strerror(ctypes.get_errno())
    return before


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A finished run in a folder in which nothing may be written, also by the superuser."""
    folder, here = tmp_path_factory.mktemp("shared"), Path.cwd()
    os.chdir(folder)
    short = ["loop.max_duration=2", "loop.limit_train_batches=2", "loop.eval_steps=1", "data.batch_size=8"]
    assert main(["fit", "+experiment=digits_mlp", *short]) == 0
    os.chdir(here)
    paths = [folder, *folder.rglob("*")]
    modes = {path: path.stat().st_mode for path in paths}
    for path in paths:
        path.chmod(modes[path] & ~0o222)
    before = _effective(None)
    _effective(before & ~_OVERRIDES)
    yield folder / "runs/digits_mlp"
    _effective(before)
    for path in paths:
        path.chmod(modes[path])


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (["ckpt", "ls", "{run}"], "valid"),
        (["ckpt", "verify", "{run}/checkpoints/step2"], "1 of 1 valid"),
        (["ckpt", "show", "{run}@latest"], "step      2"),
        (["ckpt", "diff", "{run}@step0", "{run}@latest"], "tensors that differ"),
        (["ckpt", "export", "{run}@latest", "--format", "safetensors", "--output", "{tmp}/a.safetensors"], "exported"),
        (["ckpt", "prune", "{run}", "--dry-run"], "nothing to do"),
        (["report", "{run}", "--output", "{tmp}/report.html"], "1 run"),
        (["top", "--once", "{run}"], "finished"),
        (["tail", "{run}"], "committed step 2"),
        (["config", "--diff", "{run}", "+experiment=digits_mlp"], "max_duration"),
        (["validate", "ckpt={run}@latest", "validate.folder={tmp}/results"], "results: "),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)
def test_what_reads_a_run_works(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], printed: str
) -> None:
    assert main([argument.format(run=run, tmp=tmp_path) for argument in arguments]) == 0
    assert printed in capsys.readouterr().out


def test_validate_prints_its_table_and_names_the_folder_for_results_before_it_evaluates(
    run: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["validate", f"ckpt={run}@latest"]) == 0
    shown = capsys.readouterr()
    assert "smallest val/loss" in shown.out
    text = shown.err + caplog.text
    assert text.index("validate.folder=FOLDER") < text.index("evaluating")


@pytest.mark.parametrize(
    ("arguments", "code", "cure"),
    [
        (["ckpt", "export", "{run}@latest", "--format", "safetensors"], 1, "--output PATH"),
        (["check", "run", "{run}"], 1, "--output FILE"),
        pytest.param(["predict", "ckpt={run}@latest"], 2, "predict.folder", marks=pytest.mark.addon("predict")),
        (["ckpt", "pin", "{run}@latest"], 1, "Check who may read and write the file"),
        (["ckpt", "rm", "{run}@step0", "--yes"], 1, "Check who may read and write the file"),
        (["fit", "+experiment=digits_mlp", "loop.max_duration=3", "run_dir={run}"], 4, "run_dir="),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else "",
)
def test_what_writes_into_it_ends_in_one_message_with_a_cure(
    run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, cure: str
) -> None:
    files = sorted(run.rglob("*"))
    assert main([argument.format(run=run) for argument in arguments]) == code
    printed = capsys.readouterr().err
    assert printed.count("error: ") == 1
    assert cure in printed
    assert sorted(run.rglob("*")) == files
