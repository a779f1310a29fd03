"""Has processes read hostile checkpoints, and checks what they say and do. Where a case ends one, another goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hostile import dcp, pickled, safetensors, tensor, torch_zip
from hostile_cases import OWN, entry, foreign_cases, own_checkpoint
from hostile_pickles import MARKER, Case

READER = Path(__file__).with_name("hostile_reader.py")
MOST_BYTES = 200 << 20
MOST_S = 60
READERS = 1
"""Processes that read at the same time."""
CASES: Mapping[str, Case] = {**foreign_cases(), **{f"own: {name}": case for name, case in OWN.items()}}


def read_cases(folder: Path) -> dict[str, dict[str, Any]]:
    """Make each case in the folder and have it read; returns by case what was said. Nothing else may happen.

    Raises:
        AssertionError: code ran, or a file was written or changed.
    """
    root, good, empty = (folder / name for name in ("hostile", "good", "empty"))
    for made in (root, good, empty):
        made.mkdir()
    lines = {}
    for number, (name, case) in enumerate(CASES.items()):
        (root / f"case{number}").mkdir()
        lines[name] = json.dumps([name, str(case(root / f"case{number}")), name.startswith("own: ")])
    before = _list_files(root)
    good_lines, names = _good_lines(good), list(lines)
    results: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor(READERS) as executor:
        # Each takes cases of every kind.
        shares = [{name: lines[name] for name in names[first::READERS]} for first in range(READERS)]
        for result in executor.map(lambda share: _read_all(share, good_lines, empty), shares):
            results |= result
    assert not (root / MARKER).exists(), "code ran"
    assert _list_files(root) == before
    assert not list(empty.iterdir())
    return {name: {**result, "path": json.loads(lines[name])[1]} for name, result in results.items()}


def why_wrong(result: Mapping[str, Any]) -> str | None:
    """Why what was said of a case is no refusal in one line, in little time and memory; None if it is one."""
    wrong = {
        "no error of this package": not set(result["error"] or []) & {"CheckpointError", "UserError"},
        "the file is not named": Path(result["path"]).name not in result["text"],
        "not one printable line": not result["text"].isprintable(),
        "a long message": len(result["text"]) >= 600 + 2 * len(result["path"]),
        "slow": result.get("seconds", 0) >= MOST_S,
        "much memory": result.get("bytes", 0) >= MOST_BYTES,
    }
    reasons = [reason for reason, is_so in wrong.items() if is_so]
    return f"{', '.join(reasons)}: {result}" if reasons else None


def _list_files(root: Path) -> dict[str, Any]:
    """Every file with its size and time."""
    return {str(path): (path.lstat().st_size, path.lstat().st_mtime_ns) for path in root.rglob("*")}


def _good_lines(folder: Path) -> list[str]:
    """Good checkpoints of each kind: what reading them takes is no fault of the hostile ones."""
    paths = {
        torch_zip(folder / "x.pt", pickled({"w": tensor()})): False,
        safetensors(folder / "x.safetensors", entry()): False,
        dcp(folder / "dcp"): False,
        own_checkpoint()(folder): True,
    }
    return [json.dumps(["good", str(path), own]) for path, own in paths.items()]


def _read_all(lines: Mapping[str, str], good: list[str], cwd: Path) -> dict[str, dict[str, Any]]:
    """What each case said. Of one that ended its process: how; another process then reads the rest."""
    results: dict[str, dict[str, Any]] = {}
    while left := [name for name in lines if name not in results]:
        run = subprocess.run(
            [sys.executable, str(READER)],
            input="\n".join([*good, *(lines[name] for name in left)]),
            capture_output=True,
            text=True,
            cwd=cwd,
            env={**os.environ, "TMPDIR": str(cwd), "OMP_NUM_THREADS": "1"},
            timeout=500,
        )
        found = [json.loads(line) for line in run.stdout.splitlines()]
        assert [one["error"] for one in found[: len(good)]] == [None] * len(good), run.stdout + run.stderr
        results |= {one["name"]: one for one in found[len(good) :]}
        if ended := [name for name in left if name not in results][:1]:
            results[ended[0]] = {"error": f"the process ended with {run.returncode}: {run.stderr[-500:]}", "text": ""}
    return results
