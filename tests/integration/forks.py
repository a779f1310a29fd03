"""`train` in milliseconds: each command is a fork of a process that has everything imported already."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from command import environment
from printed import untimed

_HERE = Path(__file__).parent


@dataclass(frozen=True)
class Done:
    """How a command ended: `code` is the exit code, or minus the signal that killed it."""

    code: int
    out: str
    err: str
    operations: list[str] = field(default_factory=list)
    """What was asked of a faulty disk, and each message `committed …` in its place among that."""

    def __post_init__(self) -> None:
        # What a line says counts here, not when it was written.
        object.__setattr__(self, "err", untimed(self.err))

    @property
    def killed(self) -> bool:
        return self.code == -signal.SIGKILL


class Forks:
    """The same `main` as the command's, in a process of its own each time."""

    def __init__(self) -> None:
        here = environment()
        self._server = subprocess.Popen(
            [sys.executable, str(_HERE / "forked.py")],
            env={**here, "PYTHONPATH": f"{here['PYTHONPATH']}:{_HERE}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._server.stdout is not None
        assert self._server.stdout.readline() == "ready\n", "what is imported there fails: see stderr"

    def fit(self, cwd: Path, *overrides: str, disk: Mapping[str, Any] | None = None, **env: str) -> Done:
        """Run it to its end. `disk`: the arguments of the FaultyDisk that holds its checkpoints."""
        return self.run(cwd, "fit", *overrides, disk=disk, **env)

    def run(
        self,
        cwd: Path,
        *arguments: str,
        disk: Mapping[str, Any] | None = None,
        imports: Sequence[str] = (),
        **env: str,
    ) -> Done:
        """Run any verb to its end. `imports`: heavy modules that it needs, imported once for all later commands."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        with tempfile.TemporaryDirectory() as out:
            asked = {"argv": list(arguments), "cwd": str(cwd), "env": env, "disk": disk, "out": out, "imports": imports}
            self._server.stdin.write(json.dumps(asked) + "\n")
            self._server.stdin.flush()
            answer = self._server.stdout.readline()
            assert answer, "the process to fork from has died"
            code = int(answer)
            said = {path.name: path.read_text() for path in Path(out).iterdir()}
        return Done(code, said["stdout"], said["stderr"], said.get("operations", "").splitlines())

    def close(self) -> None:
        """End the process."""
        self._server.communicate()
