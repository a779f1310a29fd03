"""Nothing is sent or fetched unless a config asks for it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import json, socket, sys

seen = []

def note(event, arguments):
    if event in ("socket.connect", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname"):
        seen.append([event, repr(arguments[1:] if event == "socket.connect" else arguments)])

sys.addaudithook(note)
from trainer_cli.commands.command_line import main

FIT = ["fit", "+experiment=digits_mlp", "loop.max_duration=2", "run_dir=run"]
codes = [main(["--help"]), main(["config", "+experiment=digits_mlp"]), main(FIT)]
before = list(seen)
try:
    # A control: the hook sees what is sent.
    socket.create_connection(("127.0.0.1", 9), timeout=1)
except OSError:
    pass
print("\\n" + json.dumps({"codes": codes, "connections": before, "control": len(seen) - len(before)}))
"""


def test_importing_the_package_help_config_and_a_training_make_no_connection(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, text=True, timeout=500, capture_output=True, check=True
    )
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["codes"] == [0, 0, 0], done.stderr
    assert result["connections"] == []
    assert result["control"] >= 1
