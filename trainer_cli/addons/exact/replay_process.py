"""Replay steps of a run in a process of its own, so that nothing of one replay reaches the next."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer_cli.addons.jobs import own_command
from trainer_cli.errors import CheckpointError, ExitCode, UserError
from trainer_cli.ranks import without_ranks


def replay_in_process(
    run: Path, first: int, last: int, words: Sequence[str] = (), *, folder: Path | None = None, quiet: bool = True
) -> dict[str, Any]:
    """The JSON of `train replay` for the steps from `first` to `last`.

    Args:
        words: further flags and overrides.
        folder: in which the process runs; None: the current one.
        quiet: the comparison alone, without what happened in the steps.

    Raises:
        UserError, CheckpointError: they cannot be made, with the message of the process.
    """
    command = own_command(["replay", str(run), f"{first}..{last}", *["--quiet"] * quiet, "--json", *words])
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
        cwd=folder, env=without_ranks(os.environ),
    )  # fmt: skip
    # The object comes last, indented: a model and a dataset may print, too.
    begin = done.stdout.rfind("\n{\n") + 1
    try:
        outcome: dict[str, Any] = json.JSONDecoder().raw_decode(done.stdout, begin)[0]
    except ValueError:
        # After the warnings; the place and the cure follow it on lines of their own.
        _, is_error, text = done.stderr.rpartition("error: ")
        message, _, later_lines = text.partition("\n")
        if not is_error:
            # It was killed, or failed by an exception of the user's code, whose last line names it.
            last_line = (done.stderr.strip().splitlines() or [""])[-1]
            message = f"exit code {done.returncode}" + (f": {last_line}" if last_line else "")
        cure = re.search(r"^help: (.*)$", later_lines, re.MULTILINE)
        kind = CheckpointError if done.returncode == ExitCode.NO_CHECKPOINT else UserError
        raise kind(message, cure=cure[1] if cure else None) from None
    return outcome
