"""An environment of its own for what is measured beside this project: `.venv-bench`, made by `--publish`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from timing import HERE, NOT_INSTALLED, last_words

ROOT = HERE.parents[1]
FOLDER = ROOT / ".venv-bench"
PEERS = HERE / "peers.txt"


def enter() -> None:
    """Run this command again in that environment, unless it runs there already."""
    if Path(sys.prefix).resolve() == FOLDER.resolve():
        return
    python = install()
    os.execv(python, [str(python), *sys.orig_argv[1:]])


def install() -> Path:
    """Install the project, then each peer by itself: one that cannot be installed is noted, with the reason.

    Raises:
        SystemExit: the project itself cannot be installed.
    """
    python, stamp = FOLDER / "bin" / "python", FOLDER / ".installed"
    sources = (ROOT / "pyproject.toml", ROOT / "constraints.txt", PEERS)
    if stamp.exists() and all(stamp.stat().st_mtime > source.stat().st_mtime for source in sources):
        return python
    print(f"installing the contenders into {FOLDER.name} …", file=sys.stderr, flush=True)
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", FOLDER], check=True)
    torch = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    # torch first and pinned, so that no peer brings another of its many builds.
    for needed in ([torch], ["--editable", f"{ROOT}[s3]"]):
        if (reason := _install(python, needed)) is not None:
            raise SystemExit(f"{' '.join(needed)} cannot be installed: {reason}")
    lines = [line for line in PEERS.read_text().splitlines() if line and not line.startswith("#")]
    reasons = {line: _install(python, [line]) for line in lines}
    missing = {line.split(">")[0]: reason for line, reason in reasons.items() if reason is not None}
    (FOLDER / NOT_INSTALLED).write_text(json.dumps(missing, indent=1) + "\n")
    for name, reason in missing.items():
        print(f"{name} cannot be installed: {reason}", file=sys.stderr, flush=True)
    if not missing:
        stamp.touch()
    return python


def _install(python: Path, what: list[str]) -> str | None:
    """None, or why it failed."""
    constraints = ["-c", str(ROOT / "constraints.txt")]
    command = [str(python), "-m", "pip", "install", "--quiet", "--no-compile", *constraints, *what]
    done = subprocess.run(command, capture_output=True, text=True)
    return None if done.returncode == 0 else last_words(done.stderr)
