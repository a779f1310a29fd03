"""Servers that answer in a thread of this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import TypeVar

from trainer_cli.addons.view.serve_http import RunServer
from trainer_cli.addons.view.serve_runs import ServedRuns

Server = TypeVar("Server", bound=ThreadingHTTPServer)


@contextmanager
def serving(server: Server) -> Iterator[Server]:
    """The server, which answers until the end of the block."""
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def served(folder: Path) -> Iterator[RunServer]:
    """The server of `train serve FOLDER`, which answers until the end of the block."""
    with closing(ServedRuns(folder)) as runs, serving(RunServer(runs, "127.0.0.1", 0)) as server:
        yield server
