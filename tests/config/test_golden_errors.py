"""Ten errors, whole, as the command prints them: a change of what people read is seen here.

Each is of another kind (`Code`). Other tests compare the code, the place and the distinctive words.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from command import EXPERIMENTS

from trainer_cli.commands.command_line import main
from trainer_cli.errors import Code

ROOT = Path(__file__).parents[2]
FOLDERS = [ROOT / "configs", *ROOT.glob("trainer_cli/addons/*/configs")]
GROUPS = ", ".join(sorted({group.name for folder in FOLDERS for group in folder.iterdir() if group.is_dir()}))
OPTIONS = ", ".join([*EXPERIMENTS, "x"])
EXPERIMENT = "configs/experiment/x.yaml"
GOLDEN: dict[Code, tuple[list[str], str, str]] = {
    Code.unknown_key: (["config", "loop.max_step=3"], "", (
        "error: there is no key 'loop.max_step'\n  --> command line\nhelp: Did you mean 'loop.max_duration=3'?\n")),
    Code.unknown_option: (["config", "+experiment=digit"], "", (
        "error: there is no experiment called 'digit'\n  --> command line\n"
        f"help: Did you mean '+experiment=digits'? Available: {OPTIONS}.\n")),
    Code.wrong_type: (["config", "name=1.5"], "", (
        "error: name is 1.5, but it must be a string or null\n  --> command line\n"
        "help: Write name='\"1.5\"' if a string is meant.\n")),
    Code.wrong_value: (["config", "loop.max_duration=3days"], "", (
        "error: loop.max_duration: '3days' is not a duration; expected a number of steps, or a string such as 500st, "
        "3ep, 0.25ep, 1e9tok, 2048sp, 90s, 30min, 1h30m\n  --> command line\n"
        "help: Did you mean 'loop.max_duration=3d'?\n")),
    Code.not_given: (["fit", "+experiment=char_gpt"], "", (
        "error: data.path must be given\n  --> trainer_cli/addons/text/configs/data/characters.yaml:4\n"
        "help: Add data.path=VALUE to the command line.\n")),
    Code.yaml: (["config", "+experiment=x"], "loop:\n  max_time: 12:30:45\n", (
        f"error: loop.max_time: 12:30:45 is read by YAML as the number 45045\n  --> {EXPERIMENT}:3\n"
        "help: Write 12h30m45s, or put it in quotes.\n")),
    Code.defaults_list: (["config", "+experiment=x"], "defaults:\n  - override /modle: cnn\n", (
        f"error: there is no group 'modle'\n  --> {EXPERIMENT}:3\n"
        f"help: Available: {GROUPS}. Did you mean '- override /model: cnn'?\n")),
    Code.override: (["config", "optimizer.lr=0,01"], "", (
        "error: 'optimizer.lr=0,01' gives several values, but one run takes one\n  --> command line\n"
        "help: For a number write 'optimizer.lr=0.01'. To run each: `train fit -m optimizer.lr=0,01`. For a list write "
        "'optimizer.lr=[0,01]'. For a string write 'optimizer.lr=\"0,01\"'.\n")),
    Code.argument: (["plan", "+experiment=x"], "model:\n  _target_: torch.nn.Linear\n", (
        "error: Linear: missing required arguments: 'in_features', 'out_features'\n"
        f"  --> model._target_, {EXPERIMENT}:3\n")),
    Code.several: (["config", "+experiment=x", "optimizer.lr=nan"], "sed: 3\nseed: abc\n", (
        f"error: there is no key 'sed'\n  --> {EXPERIMENT}:2\nhelp: Did you mean 'seed'?\n\n"
        f"error: seed is 'abc', but it must be a whole number\n  --> {EXPERIMENT}:3\n\n"
        "error: optimizer.lr is nan, but it must be finite\n  --> command line\n\nFound 3 mistakes.\n")),
}  # fmt: skip


@pytest.mark.parametrize(
    "code", [pytest.param(code, marks=pytest.mark.addon("text") if code is Code.not_given else ()) for code in GOLDEN]
)
def test_an_error_of_each_kind_is_printed_whole(
    code: Code, empty_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, content, expected = GOLDEN[code]
    file = Path(EXPERIMENT)
    file.parent.mkdir(parents=True)
    file.write_text(f"# @package _global_\n{content or 'seed: 1'}\n")
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.err == expected
    assert printed.out == ""
