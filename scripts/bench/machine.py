"""On what was measured: processors, memory, file system, versions; nothing that names the machine or its user."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PEERS = (
    "torch",
    "lightning",
    "accelerate",
    "transformers",
    "pytorch-ignite",
    "torch-checkpointing",
    "torchdata",
    "safetensors",
    "xxhash",
    "numpy",
)


def facts(folder: Path) -> dict[str, str | int | float]:
    """Of this machine, and of the file system under `folder`."""
    found: dict[str, str | int | float] = {
        "date": datetime.now(UTC).date().isoformat(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "processors": os.cpu_count() or 0,
        "memory, GiB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "file system": _file_system(folder),
        "load at the start": round(os.getloadavg()[0], 1),
        "threads": os.environ.get("OMP_NUM_THREADS", "default"),
        "python": platform.python_version(),
    }
    if (commit := _commit()) is not None:
        found["commit"] = commit
    for name in PEERS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _file_system(folder: Path) -> str:
    """Its type, such as ext4 or tmpfs; of the mount point nearest to the folder."""
    try:
        mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    except OSError:
        return "unknown"
    place = folder.absolute()
    above = [(len(point), kind) for _, point, kind, *_ in mounts if place.is_relative_to(point)]
    return max(above)[1] if above else "unknown"


def _commit() -> str | None:
    done = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"], capture_output=True, text=True
    )
    return done.stdout.strip() if done.returncode == 0 else None
