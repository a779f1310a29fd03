"""Reads the checkpoints that the lines of standard input name; a line of JSON to standard output for each.

A process of its own, which may be killed: by the alarm where a checkpoint takes too long, by the limit of memory.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import time
import warnings
from pathlib import Path

from trainer_cli.addons.formats.read import read_foreign
from trainer_cli.checkpoint.checkpointer import make_sync_checkpointer

LIMIT_S = 500
ADDRESS_SPACE_BYTES = 8 << 30
"""Beside what the process has mapped at first: more than any case may take, less than the machine has."""


def peak_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def read(path: Path, *, own: bool) -> dict[str, object]:
    begin, before = time.monotonic(), peak_bytes()
    said: dict[str, object]
    try:
        state = make_sync_checkpointer().load(path) if own else read_foreign(path).model
        said = {"error": None, "text": f"read {list(state)[:5]}"}
    except BaseException as error:
        said = {"error": [one.__name__ for one in type(error).__mro__], "text": str(error)}
    return {**said, "seconds": time.monotonic() - begin, "bytes": peak_bytes() - before}


if __name__ == "__main__":
    warnings.simplefilter("error")
    if sys.platform == "linux":
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + ADDRESS_SPACE_BYTES,) * 2)
    for line in sys.stdin:
        name, path, own = json.loads(line)
        signal.alarm(LIMIT_S)
        said = read(Path(path), own=own)
        signal.alarm(0)
        print(json.dumps({"name": name, **said}), flush=True)
