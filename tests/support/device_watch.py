"""A project whose runs note on which devices they are, and how many runs each device has at that moment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from command import CODE, make_project

WATCHES = '''
def is_alive(pid):
    """Whether a process may still use its device."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def watch():
    """Note this process as one of a job on these devices, and how many jobs each of them has now."""
    import fcntl

    # In a sweep; or the name of the frozen config.
    seeds = [word for word in sys.argv if word.startswith("seed=")]
    job = (seeds or [os.path.basename(word)[:-5] for word in sys.argv if word.endswith(".yaml")])[-1]
    with open("devices", "a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for device in os.environ["CUDA_VISIBLE_DEVICES"].split(","):
            file.write(f"{device} {job} {os.getpid()}\\n")
            file.flush()
            file.seek(0)
            lines = [line.split() for line in file]
            jobs = {line[1] for line in lines if line[0] == device and line[1] != "has" and is_alive(line[2])}
            file.write(f"{device} has {len(jobs)}\\n")


class Data:
    def __init__(self, size=160):
        if "_job" in sys.argv:
            watch()
            if os.path.exists("dies") and os.path.getsize("dies") == 0:
                open("dies", "w").write("died")
                os.kill(os.getpid(), 9)
'''


def make_watched_project(folder: Path) -> Path:
    """Make the project. Its first run is killed if a file `dies` is there, which is empty."""
    code = CODE.replace("import time\n", "import sys\nimport time\n", 1)
    code = code.replace("class Data:\n    def __init__(self, size=160):\n", WATCHES.lstrip("\n"))
    assert "watch()" in code
    return make_project(folder, **{"mine/parts.py": code})


def environment_of(project: Path) -> dict[str, Any]:
    """The environment of a sweep in a process of its own, on a machine with two devices."""
    return {"CUDA_VISIBLE_DEVICES": "0,1", "XDG_CACHE_HOME": str(project / "cache")}


def read_notes(project: Path) -> tuple[dict[str, int], Mapping[str, list[tuple[str, int]]]]:
    """Device -> the most jobs that it had at a time; job -> the device and number of each of its processes."""
    most: dict[str, int] = {}
    processes: dict[str, list[tuple[str, int]]] = {}
    notes = project / "devices"
    for line in notes.read_text().splitlines() if notes.exists() else ():
        device, word, number = line.split()
        if word == "has":
            most[device] = max(most.get(device, 0), int(number))
        else:
            processes.setdefault(word, []).append((device, int(number)))
    return most, processes
