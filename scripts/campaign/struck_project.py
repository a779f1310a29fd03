"""A user's project in which a fault strikes once: in a sample, a hook, a logger, or for want of memory.

`strike.json` in the current folder says where and what. Without it nothing strikes, under the same config.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from command import Result, make_project, train

from campaign.oracle import HANG_S, Reference, announced_steps, make_kept_folder, make_reference, verdict_of
from campaign.verdict import Outcome, Verdict

STRIKE = '''
"""Parts of a training in which a fault strikes once, as `strike.json` says."""

import json
import os
import resource
import signal
import time
from pathlib import Path

import torch

from mine.parts import Line, Points
from trainer_cli import Callback, Logger

PLAN = json.loads(Path("strike.json").read_text()) if Path("strike.json").exists() else {"at": "nowhere"}


class Struck(Exception):
    """The user's own error."""


def strike(what=PLAN.get("what")):
    """Let the fault happen, once."""
    if Path("struck").exists():
        return
    Path("struck").touch()
    if what == "raise":
        raise Struck(PLAN["at"])
    if what == "exit":
        os._exit(7)
    if what == "hang":
        time.sleep(3600)
    if what == "memory":
        leave_memory(PLAN["bytes"])
    if what.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[what])


def leave_memory(size):
    """Let this process have no more than so many bytes beyond what it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + size, resource.RLIM_INFINITY))


class Samples(Points):
    """Points, one of which is bad."""

    visits = 0

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        if PLAN["at"] == self.place and index == PLAN["index"]:
            self.visits += 1
            if PLAN["what"] != "nan":
                strike()
            elif self.visits == PLAN["visit"]:
                Path("struck").touch()
                return x * float("nan"), y
        return x, y


class Data:
    def __init__(self):
        self.train, self.val = Samples(160, "train"), Samples(20, "val")


class Wide(Line):
    """A line whose forward needs a hundred megabytes for a moment."""

    def forward(self, batch):
        torch.empty(100 << 20, dtype=torch.uint8)
        return super().forward(batch)


def callback():
    """A callback whose one hook strikes, at the first call from a step on."""

    def hook(self, *args):
        trainer = args[0] if args else None
        if trainer is None or trainer.progress.step >= PLAN["step"]:
            strike()

    return type("Striking", (Callback,), {PLAN["hook"]: hook} if PLAN["at"] == "hook" else {})()


class Log(Logger):
    """A logger that strikes in one of its methods."""

    def log(self, record):
        self._maybe("log", record.step)

    def start(self, facts):
        self._maybe("start", 1 << 30)

    def flush(self, durable=False):
        self._maybe("flush", 1 << 30)

    def close(self):
        self._maybe("close", 1 << 30)

    def _maybe(self, method, step):
        if PLAN["at"] == "logger" and PLAN["method"] == method and step >= PLAN["step"]:
            strike()
'''
FILES = {
    "mine/strike.py": STRIKE,
    "configs/model/wide.yaml": "# A line that needs memory\n_target_: mine.strike.Wide\nwidth: 8\ndropout: 0.1\n",
    "configs/data/samples.yaml": "# Points with a bad one\n_target_: mine.strike.Data\nbatch_size: 8\nnum_workers: 0\n",
    "configs/experiment/struck.yaml": (
        "# @package _global_\n# Struck by a fault\n"
        "defaults:\n  - override /model: wide\n  - override /data: samples\n  - override /optimizer: adam\n"
        "  - override /scheduler: warmup_cosine\n"
        "loop:\n  max_duration: 40st\n  eval_interval: 16st\n  log_interval: 4\n"
        "checkpoint:\n  save_interval: 8st\n"
        "callbacks:\n  strike:\n    _target_: mine.strike.callback\n"
        "loggers:\n  strike:\n    _target_: mine.strike.Log\n"
    ),
}


@dataclass(frozen=True)
class StruckProject:
    """The project, and its undisturbed run."""

    training: tuple[str, ...]
    reference: Reference

    def run(self, folder: Path, *overrides: str) -> Result:
        """Train, or go on, in a folder."""
        return train("fit", *self.training, *overrides, cwd=folder, limit_s=HANG_S)

    def strike(
        self,
        folder: Path,
        plan: Mapping[str, Any],
        *overrides: str,
        texts: Sequence[str] = (),
        resumes: bool = False,
    ) -> Outcome:
        """Train in a new folder until the fault strikes, then go on without it to the end.

        Args:
            plan: what strikes where, see `STRIKE`.
            texts: what the message must hold; the exit code must be 1.
            resumes: whether the run has been trained to step 16 before.
        """
        folder.mkdir()

        announced = announced_steps(self.run(folder, *overrides, "loop.hard_stop=16")) if resumes else []
        write_plan(folder, plan)
        struck = self.run(folder, *overrides)
        announced += announced_steps(struck)
        if not (folder / "struck").exists():
            return Outcome(Verdict.hard_fail, f"the fault did not strike: {plan}: {struck.err}", len(announced))
        missing = [text for text in texts if text not in struck.err]
        if struck.code != 1 or missing:
            detail = f"{plan}: ended with {struck.code}, its message lacks {missing}: {struck.err}"
            return Outcome(Verdict.hard_fail, detail, len(announced))
        remove_plan(folder)
        return verdict_of(folder / "run", self.reference, announced, lambda: self.run(folder, *overrides))


def write_plan(folder: Path, plan: Mapping[str, Any]) -> None:
    """Have the fault strike in the next start."""
    (folder / "strike.json").write_text(json.dumps(plan))


def remove_plan(folder: Path) -> None:
    """Have it strike no more."""
    (folder / "strike.json").unlink()
    (folder / "struck").unlink(missing_ok=True)


@cache
def _make_project() -> Path:
    return make_project(make_kept_folder(), **FILES)


def make_struck_project(folder: Path, *overrides: str) -> StruckProject:
    """Copy the undisturbed run of the project with these overrides into a folder. Classes share the project."""
    training = ("experiment=struck", "--config-dir", str(_make_project() / "configs"), *overrides, "run_dir=run")
    return StruckProject(training, make_reference(folder, *training))
