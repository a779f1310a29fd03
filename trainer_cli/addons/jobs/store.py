"""`train _store`: the internal verb of the process in which the ranks of one machine have their store."""

from __future__ import annotations

import argparse
import os
import signal
import sys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb has no arguments."""


def run(args: argparse.Namespace) -> int:
    """Serve a store, print its port, and end with the process at the other end of stdin."""
    from trainer_cli.parallel import serve_store
    from trainer_cli.signals import stopping

    # A scheduler may signal all processes: the ranks then save, and need the store.
    for number in stopping():
        signal.signal(number, signal.SIG_IGN)
    store = serve_store()
    # Torch may log each request, and the pipe is not read from here on: a full pipe would stop the store.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    print(store.port, flush=True)
    sys.stdin.buffer.read()
    # At once: no file is open, and the interpreter would take all that was imported apart.
    os._exit(0)
