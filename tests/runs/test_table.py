"""Tables: whole lines in a pipe, as wide as the terminal on one."""

from __future__ import annotations

import sys

import pytest

from trainer_cli.terminal import table

LONG = "x" * 300


def test_a_pipe_gets_a_whole_line_for_each_row() -> None:
    text = table(["name", "none", "step"], [[f"[b]{LONG}", "", "5"], ["b", "", "10"]], right=["step"], indent="  ")
    assert [line.split() for line in text.splitlines()] == [["name", "step"], [f"[b]{LONG}", "5"], ["b", "10"]]
    assert text.splitlines()[2].endswith("    10")
    assert not any(line.endswith(" ") for line in text.splitlines())


def test_on_a_terminal_no_line_is_wider_and_nothing_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    lines = table(["name", "step"], [[LONG, "5"]], indent="  ").splitlines()
    assert max(map(len, lines)) <= 40
    assert "".join(lines).count("x") == 300
