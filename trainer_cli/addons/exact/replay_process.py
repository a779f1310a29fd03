"""Replay steps of a run in a process of its own: seeds, threads and kernels are set for the whole process."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer_cli.addons.exact.replay_plan import plan_replay
from trainer_cli.errors import CheckpointError, ExitCode, UserError
from trainer_cli.origin import NOTICES
from trainer_cli.processes import own_command
from trainer_cli.ranks import drop_ranks

_STDERR = 2

_said: set[str] = set()
"""What differs, as far as it was told."""


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
    return read_json_of(["replay", str(run), f"{first}..{last}", *["--quiet"] * quiet, "--json", *words], folder)


def read_json_of(arguments: Sequence[str], folder: Path | None = None) -> dict[str, Any]:
    """The JSON that this program prints for arguments in a process of its own, whose source is that of one attempt.

    Raises:
        UserError, CheckpointError: it failed, with its message.
    """
    done = subprocess.run(
        own_command(arguments), stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
        cwd=folder, env=drop_ranks(os.environ),
    )  # fmt: skip
    for line in re.findall(rf"warning: (?:{NOTICES}).*", done.stderr):
        # Each process of a search says it, of the checkpoint that it begins from.
        what = line.rpartition(" was trained with: ")[2]
        if what not in _said:
            _said.add(what)
            print(line, file=sys.stderr, flush=True)
    # It comes last, an answer indented and an error on one line: a model and a dataset may print, too.
    answer, last_line = done.stdout[done.stdout.rfind("\n{\n") + 1 :], done.stdout.rstrip().rpartition("\n")[2]
    try:
        text = last_line if last_line.startswith('{"error": ') else answer
        outcome: dict[str, Any] = json.JSONDecoder().raw_decode(text)[0]
    except ValueError:
        # It was killed.
        outcome = {"error": (done.stderr.strip().splitlines() or [""])[-1], "mistakes": ()}
    if "mistakes" not in outcome:
        return outcome
    kind = CheckpointError if done.returncode == ExitCode.NO_CHECKPOINT else UserError
    if outcome["mistakes"]:
        # The last one says in which project to run the command.
        last = outcome["mistakes"][-1]
        raise kind(last["message"], cure=last["cure"])
    raise kind(f"exit code {done.returncode}: {outcome['error']}".removesuffix(": "))


def replay_step(
    run: Path,
    step: int,
    *,
    replays: bool = True,
    overrides: Sequence[str] = (),
    config_dir: Path | None = None,
) -> None:
    """Write into `RUN/replayed` a step of a run, of which there is no checkpoint.

    Args:
        replays: False: refuse it.
        overrides: of the config of the run.

    Raises:
        CheckpointError: the run has not made that step, `replays` is False, or the replay failed, or its records are
            not those of the run.
    """
    try:
        plan = plan_replay(run, step, verify=False)
    except UserError as error:
        # Who names a checkpoint that cannot be gets the exit code of that, in whatever command.
        raise CheckpointError(f"{run}@step{step}: {error.what}", cure=error.cure) from error
    if not replays:
        raise CheckpointError(
            f"{run}@step{step}: there is no checkpoint of that step",
            cure=f"To compute it: train replay {shlex.quote(str(run))} {step} --keep ({plan}).",
        )
    print(f"{run}@step{step} was not kept: {plan}", file=sys.stderr, flush=True)
    flags = [] if config_dir is None else ["--config-dir", str(config_dir)]
    command = own_command(["replay", str(run), str(step), *overrides, "--keep", "--quiet", *flags])
    # This process may be a rank of another training, and its output an answer that a program reads.
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=_STDERR, env=drop_ranks(os.environ))
    if done.returncode != ExitCode.DONE:
        raise CheckpointError(f"{run}@step{step} could not be replayed, for the reason above")
