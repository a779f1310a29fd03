"""The real command in this process."""

from __future__ import annotations

import io
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from command import Result, fork_jobs

from trainer_cli.commands.command_line import main


def train_here(*arguments: str, cwd: Path) -> Result:
    """Run the command in this process; what it starts of this program is forked from a warm one."""
    with (
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(io.StringIO()) as out,
        redirect_stderr(io.StringIO()) as err,
    ):
        patch.chdir(cwd)
        patch.setattr(sys, "path", [*sys.path])
        fork_jobs(patch)
        before = {*sys.modules}
        try:
            code = main(arguments)
        finally:
            # The next project may have modules with the same names.
            for name in [name for name in {*sys.modules} - before if name.partition(".")[0] in os.listdir(cwd)]:
                del sys.modules[name]
    return Result(code, out.getvalue(), err.getvalue())
