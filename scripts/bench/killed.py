"""Runs of `train fit` that are killed and go on, with what their attempts noted: for recovery.py and failures.py."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from timing import HERE, Skipped, completed, last_words

FIT = (
    sys.executable, "-m", "trainer_cli", "fit", "--config-dir", str(HERE / "project" / "configs"),
    "recovering",
)  # fmt: skip
LIMIT_S = 600.0
STAMPS = "stamps.jsonl"


@dataclass(frozen=True, slots=True)
class Stamp:
    """How far an attempt came, and when: `born`, `started`, `imported`, `loaded`, `stepped`, `killed`, `ended`."""

    what: str
    at: float
    step: int = 0
    seconds: float = 0.0
    """Of `ended`: the median of the last steps, with their saves."""
    peak_mb: float = 0.0
    """Of `ended`: the most memory of its process."""


def attempts(
    scratch: Path, overrides: Sequence[str], *, kills: Sequence[int], env: Mapping[str, str] | None = None
) -> list[Stamp]:
    """Train until the end, by the same command again after each kill that it does not survive; all stamps in order."""
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        whole = {"BENCH_KILLS": ",".join(map(str, kills)), **(env or {})}
        for _ in range(len(kills) + 1):
            code = _fit(Path(folder), overrides, whole)
            if code == 0:
                return _stamps(Path(folder))
    raise Skipped(f"killed more than {len(kills)} times")


def fit(folder: Path, overrides: Sequence[str]) -> list[Stamp]:
    """Train in a folder, undisturbed; the stamps of all that was trained there."""
    _fit(folder, overrides, {})
    return _stamps(folder)


def _fit(folder: Path, overrides: Sequence[str], env: Mapping[str, str]) -> int:
    """The exit code: 0, or that of a kill."""
    whole = {
        "BENCH_STAMPS": str(folder / STAMPS), "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join([str(HERE / "project" / "site"), str(HERE.parents[1])]), **env,
    }  # fmt: skip
    done = completed((*FIT, *overrides), env=whole, cwd=str(folder), limit_s=LIMIT_S)
    if done.returncode not in (0, -signal.SIGKILL):
        raise Skipped(f"failed: {last_words(done.stderr)}")
    return done.returncode


def _stamps(folder: Path) -> list[Stamp]:
    plain: list[dict[str, Any]] = [json.loads(line) for line in (folder / STAMPS).read_text().splitlines()]
    return sorted((Stamp(**entry) for entry in plain), key=lambda stamp: stamp.at)


def after_each_kill(stamps: Sequence[Stamp]) -> list[list[Stamp]]:
    """From each kill to the next, or to the end."""
    starts = [index for index, stamp in enumerate(stamps) if stamp.what == "killed"]
    ends = [*starts[1:], len(stamps)]
    return [list(stamps[start:end]) for start, end in zip(starts, ends, strict=True)]
