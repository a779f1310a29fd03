"""`train serve [FOLDER]`: a page for a browser that shows all runs below a folder, and refreshes itself."""

from __future__ import annotations

import argparse
from pathlib import Path

from trainer_cli.errors import UserError

EXAMPLES = """examples:
  train serve                        all runs below runs/, on a free port of this machine
  train serve runs/digits/sweep      the runs of a sweep
  train serve --port 8080            http://127.0.0.1:8080/
  train serve --host 0.0.0.0         for other machines too; the printed address has a token
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the verb."""
    parser.add_argument(
        "dir", nargs="?", metavar="FOLDER", type=Path, default=Path("runs"), help="folder of runs (runs)"
    )
    parser.add_argument("--port", type=int, default=0, metavar="N", help="port (a free one)")
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen at (127.0.0.1: only this machine)"
    )


def run(args: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C."""
    if not args.dir.is_dir():
        raise UserError(f"there is no folder {args.dir}", cure="Name the folder that holds your runs: train serve DIR.")
    if not 0 <= args.port < 1 << 16:
        raise UserError(f"--port is {args.port}, but it must be between 0 and 65535")
    # Imported here: a mistake is said at once.
    from trainer_cli.addons.view.serve_http import RunServer
    from trainer_cli.addons.view.serve_runs import ServedRuns

    runs = ServedRuns(args.dir)
    try:
        server = RunServer(runs, args.host, args.port)
    except OSError as error:
        cure = "Choose another --port, or leave it out for a free one."
        raise UserError(f"{args.host}:{args.port} cannot be used: {error.strerror}", cure=cure) from error
    with server:
        print(f"{args.dir}: {server.url}\nCtrl-C ends it.", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
        finally:
            runs.close()
    return 0
