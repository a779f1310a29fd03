"""`train pack RUN`: write what makes a run again into one file."""

from __future__ import annotations

import argparse
from pathlib import Path

from trainer_cli.errors import ExitCode
from trainer_cli.terminal import format_bytes

EXAMPLES = """examples:
  train pack runs/digits
  train pack runs/digits -o digits.tar.gz

The file holds the config, the kept source, the records and the digests of the checkpoints; no weights, no data and no
secrets of the environment. `train rerun FILE -o NEW` makes the run again from it, also on another machine.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the run and the file."""
    parser.add_argument("run_dir", metavar="RUN", type=Path, help="a run's directory")
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="the file to write (NAME.tar.gz)")


def run(args: argparse.Namespace) -> int:
    """Pack the run."""
    from trainer_cli.addons.exact.rerun import pack

    output = args.output or Path(f"{args.run_dir.resolve().name}.tar.gz")
    pack(args.run_dir, output)
    print(f"{output}: {format_bytes(output.stat().st_size)}")
    return int(ExitCode.DONE)
