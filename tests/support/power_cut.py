"""Runs a command, and shuts the ext4 file system under it down once there is a checkpoint: every access is EIO then.

    python power_cut.py MOUNT_POINT COMMAND ...

A line that the command writes to stderr with `committed step` counts the checkpoints. Ends as the command does.
"""

from __future__ import annotations

import subprocess
import sys

from ext4 import shut_down


def main(mount_point: str, *command: str) -> int:
    """Run it and cut the power at the third checkpoint."""
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    committed = 0
    for line in process.stderr:
        sys.stderr.write(line)
        committed += "committed step" in line
        if committed == 3:
            break
    shut_down(mount_point, flush_journal=True)
    sys.stderr.write("the power is cut\n")
    sys.stderr.write(process.stderr.read())
    return process.wait()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
