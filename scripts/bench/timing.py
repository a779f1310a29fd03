"""Rounds: contenders measured in turn, so that all of them meet the same machine; what is missing is skipped aloud."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import warm_python

HERE = Path(__file__).parent
NOT_INSTALLED = "not-installed.json"
"""In an environment of peers: the name of each package that could not be installed, and why."""
Samples = dict[str, list[float]]
Measure = Callable[[], Mapping[str, float | list[float]]]


class Skipped(Exception):
    """A contender cannot be measured here; the text says why."""


def interleaved(
    contenders: Mapping[str, Measure], rounds: int, *, warm: int = 1, needed: Sequence[str] = ()
) -> tuple[dict[str, Samples], dict[str, str]]:
    """Samples of each contender, and why others were skipped.

    In each round all are measured once, in an order of that round's own; the first `warm` rounds are not kept.

    Raises:
        SystemExit: one of `needed` could not be measured.
    """
    found: dict[str, Samples] = {name: {} for name in contenders}
    skipped: dict[str, str] = {}
    for number in range(-warm, rounds):
        names = [name for name in contenders if name not in skipped]
        random.Random(number).shuffle(names)
        for name in names:
            say(f"round {number + 1} of {rounds}: {name}" if number >= 0 else f"warm-up: {name}")
            try:
                measured = contenders[name]()
            except Skipped as reason:
                if name in needed:
                    raise SystemExit(f"{name}: {reason}") from None
                skipped[name] = str(reason)
                say(f"{name} is skipped: {reason}")
                continue
            for column, value in measured.items() if number >= 0 else ():
                found[name].setdefault(column, []).extend(value if isinstance(value, list) else [value])
    return {name: samples for name, samples in found.items() if name not in skipped}, skipped


def require(module: str, package: str | None = None) -> None:
    """Refuse to go on without a module; the name of its package, where that is another.

    Raises:
        Skipped: it is not installed.
    """
    if find_spec(module) is not None:
        return
    try:
        reasons = json.loads((Path(sys.prefix) / NOT_INSTALLED).read_text())
    except OSError:
        reasons = {}
    package = package or module
    raise Skipped(f"{package} is not installed" + (f": {reasons[package]}" if package in reasons else ""))


def say(text: str) -> None:
    """How far it is; on stderr, where no table is."""
    print(f"  {text}", file=sys.stderr, flush=True)


def asked(command: Sequence[str], *, env: Mapping[str, str] | None = None, limit_s: float = 900.0) -> Any:
    """The JSON of the last line that a process prints, which may say that it is to be skipped."""
    done = run(command, env=env, limit_s=limit_s)
    answer = json.loads(done.strip().splitlines()[-1])
    if isinstance(answer, dict) and "skipped" in answer:
        raise Skipped(answer["skipped"])
    return answer


def run(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str | None = None, limit_s: float = 900.0
) -> str:
    """What a process prints; one that fails is skipped, for the last thing it said."""
    done = completed(command, env=env, cwd=cwd, limit_s=limit_s)
    if done.returncode != 0:
        raise Skipped(f"failed: {last_words(done.stderr)}")
    return done.stdout


def completed(
    command: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: str | None = None, limit_s: float = 900.0
) -> subprocess.CompletedProcess[str]:
    """A process that has ended, with what it printed."""
    whole = {**environment(), **(env or {})}
    if (forked := warm_python.run(command, whole, cwd)) is not None:
        return forked
    try:
        return subprocess.run(command, cwd=cwd, env=whole, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        raise Skipped(f"not done within {limit_s:g} s") from None


def environment() -> dict[str, str]:
    """This one's, but that modules are compiled once, as an installed package is, and not at each start."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def last_words(text: str) -> str:
    """The last line of an error, without paths."""
    lines = [line for line in text.splitlines() if line.strip()] or ["without a word"]
    return re.sub(r"(?<!\w)/\S+", "…", lines[-1].strip())[:160]


@contextmanager
def children_processor(found: dict[str, float], column: str) -> Iterator[None]:
    """Notes the processor's seconds of the processes that are started, and have ended, inside."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    yield
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    found[column] = now.ru_utime + now.ru_stime - before.ru_utime - before.ru_stime


def processor_s(pid: int) -> float:
    """User and system seconds of a process, in hundredths."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_mb() -> float:
    """Peak resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 1024


def seconds(work: Callable[[], object]) -> float:
    """How long a piece of work takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
