"""What a replay in a process of its own says, and what the user's code prints beside it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from trainer_cli.addons.exact import replay_process as module
from trainer_cli.addons.exact.replay_process import replay_in_process
from trainer_cli.errors import UserError

FAILS = """import sys
print('warning: slow', file=sys.stderr)
from trainer_cli.commands import command_line
from trainer_cli.errors import UserError
def fail(arguments):
    print('loading {')
    raise ERROR
command_line._dispatch = fail
sys.exit(command_line.main(['replay', '--json']))
"""
FAILURES = {
    "an error of the command": (
        FAILS.replace("ERROR", "UserError('no step 9', cure='Name another')"),
        "no step 9",
    ),
    "an exception of the user's code": (
        FAILS.replace("ERROR", "KeyError('label')"),
        "exit code 1: KeyError: 'label'",
    ),
    "a kill": (
        "import os, sys; print('warning: slow', file=sys.stderr, flush=True); os.kill(os.getpid(), 9)",
        "exit code -9: warning: slow",
    ),
}


def start(script: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    monkeypatch.setattr(module, "own_command", lambda arguments: [sys.executable, "-c", script])
    return replay_in_process(Path("run"), 1, 2)


def test_what_a_model_prints_is_no_part_of_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import json; print('loading {'); print('{\\n}'); print(json.dumps({'equal': {'a': 1}}, indent=2))"
    assert start(script, monkeypatch) == {"equal": {"a": 1}}


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_is_named_by_its_own_message(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    script, message = FAILURES[name]
    with pytest.raises(UserError) as failure:
        start(script, monkeypatch)
    assert failure.value.what == message
