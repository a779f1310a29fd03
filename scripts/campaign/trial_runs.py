"""A started run that a trial watches and disturbs, and moments in it that do not depend on the machine's speed."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from command import LIMIT_S, Result, environment, start
from printed import untimed

from campaign.kills import COMPOSED
from campaign.oracle import HANG_S

TRAINING = (
    "experiment=digits_mlp", "model.hidden=[16]", "loop.max_duration=30", "loop.log_interval=1",
    "loop.eval_interval=10", "loop.eval_steps=1", "checkpoint.save_interval=10", "checkpoint.max_checkpoints=2",
    "checkpoint.ephemeral_save_interval=3", "checkpoint.save_async=true", "run_dir=run",
)  # fmt: skip
"""Thirty steps, each logged; a dozen saves and three evaluations."""
STEPS = 30
ON_DISK = (*TRAINING, "run_dir=disk/run")
"""The same in a folder where a trial mounts a file system."""


def ending_of(result: Result) -> str:
    """The exit code of a run and what it said, without its progress."""
    progress = r"step=\d|committed|removed|(run|config|device|model|fused|data|batch|steps|saves)  |saves are"
    lines = [line for line in result.err.splitlines() if not re.match(progress, line)]
    return " / ".join([f"it ended with {result.code}", *lines])


@dataclass
class Watched:
    """A run whose stderr is in a file."""

    process: Any
    stderr: Path
    run: Path

    def announced(self) -> list[int]:
        """The steps of which it has said so far that they are saved."""
        return [int(step) for step in re.findall(r"committed step (\d+)", self.stderr.read_text())]

    def last_step(self) -> int:
        """The last step in metrics.jsonl; 0 before the first."""
        try:
            lines = (self.run / "metrics.jsonl").read_bytes().split(b"\n")
        except OSError:
            return 0
        # The last line is empty, or not whole yet.
        match = re.match(rb'{"step": (\d+)', lines[-2]) if len(lines) > 1 else None
        return int(match[1]) if match else 0

    def wait_until(self, condition: Callable[[], bool], limit_s: float = HANG_S) -> bool:
        """Wait for a condition; False where the run ends before."""
        until = time.monotonic() + limit_s
        while not condition():
            if self.process.poll() is not None or time.monotonic() > until:
                return False
            time.sleep(0.001)
        return True

    def wait_for_moment(self, chance: Random, *, announced: bool = False) -> bool:
        """Wait for a random moment: right after a random announcement, or shortly after a random step.

        False where the run ends before.
        """
        if announced:
            wanted = chance.randint(1, max(1, (STEPS - self.last_step()) // 3))
            return self.wait_until(lambda: len(self.announced()) >= wanted)
        step = chance.randint(min(self.last_step(), STEPS - 1), STEPS - 1)
        delay_s = chance.random() * (0.4 if step == 0 else 0.02)
        if not self.wait_until(lambda: self.last_step() >= step):
            return False
        time.sleep(delay_s)
        return self.process.poll() is None

    def end(self, limit_s: float = HANG_S) -> Result:
        """Wait for the end."""
        out, _ = self.process.communicate(timeout=limit_s)
        return Result(self.process.returncode or 0, out or "", untimed(self.stderr.read_text()))

    def send(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def kill(self) -> None:
        """Kill it, and wait until it is dead."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(LIMIT_S)


@contextmanager
def watched(*arguments: str, cwd: Path, run: Path, disk: Mapping[str, Any] = COMPOSED) -> Iterator[Watched]:
    """Start `train fit`; it is killed at the end of the block if it still lives.

    Args:
        disk: as of `train`.
    """
    stderr = cwd / f"stderr{len(list(cwd.glob('stderr*')))}"
    settings: dict[str, Any] = {"disk": disk, "operations": cwd / "operations"}
    with open(stderr, "wb") as stream:
        process = start(
            ["fit", *arguments], cwd, environment(), stderr=stream.fileno(), start_new_session=True, **settings
        )
    with process:
        started = Watched(process, stderr, run)
        try:
            yield started
        finally:
            started.kill()
