"""On a terminal, lines are broken between words, before the terminal breaks them inside words."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from trainer_cli.commands.command_line import main

CASES = {
    "the verbs": [],
    "the help of a verb": ["fit", "--help"],
    "all options": ["list"],
    "the options of a section": ["list", "loop"],
    "keys": ["config", "--fields", "checkpoint"],
    "origins": ["config", "--provenance", "+experiment=digits", "optimizer.lr=0.1"],
    "a mistake": ["fit", "+experiment=digits", "optimizer=sgd", "optimizer.betas=[0.9,0.99]", "optimizer.eps=1e-8"],
    "a command to copy": ["fit", "+experiment=digits", "data._target_=trainer_cli.Text"],
}


@pytest.mark.parametrize("columns", [40, 80, 120])
@pytest.mark.parametrize("case", CASES)
def test_no_line_is_wider_than_the_terminal_and_no_word_is_broken(
    case: str,
    columns: int,
    empty_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    printed = []
    for is_terminal in (False, True):
        monkeypatch.setenv("COLUMNS", str(columns))
        for stream in (sys.stdout, sys.stderr):
            monkeypatch.setattr(stream, "isatty", lambda is_terminal=is_terminal: is_terminal)
        main(CASES[case])
        printed.append("".join(capsys.readouterr()).replace("loading torch …\x1b[K\r", "").replace("\x1b[K", ""))
    # Each line of a comment has its sign, and an origin may be above its value.
    whole, shown = (sorted(word for word in text.split() if word not in "#\\") for text in printed)
    assert shown == whole
    too_long = [line for line in printed[1].splitlines() if len(line) > columns]
    # A path, or what is to be copied, stays whole.
    assert [line for line in too_long if len(line.split()) > 3 and "'" not in line] == []
