"""A web server on this machine, with the habits and faults of real ones."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit


@dataclass
class Habits:
    """How a server answers."""

    ranges: bool = False
    says_size: bool = True
    has_pages: bool = True
    redirects: bool = False
    faults: list[str] = field(default_factory=list)
    """One for each of the next requests of files: a status, `cut` or `drop`; `""` is none."""
    always: str = ""
    """A fault of every request of a file."""
    requests: list[str] = field(default_factory=list)


class _Handler(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, *args: Any, habits: Habits, **settings: Any) -> None:
        self.habits = habits
        super().__init__(*args, **settings)

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.send_error(403)  # As servers of signed addresses do.

    def do_GET(self) -> None:
        habits, address = self.habits, urlsplit(self.path)
        habits.requests.append(self.path)
        if habits.redirects and not address.path.startswith("/moved"):
            self._send(302, b"", {"Location": f"/moved{self.path}"})
            return
        path = Path(self.translate_path(address.path.removeprefix("/moved")))
        if path.is_dir():
            if not habits.has_pages:
                self._send(404, b"", {})
            elif not address.path.endswith("/"):
                self._send(301, b"", {"Location": f"{address.path}/"})
            else:
                links = "".join(f'<a href="{p.name}{"/" * p.is_dir()}">x</a>' for p in sorted(path.iterdir()))
                page = f'<a href="?C=N;O=D">sort</a><a href="../">up</a><a href="/">top</a>{links}'
                self._send(200, page.encode(), {"Content-Type": "text/html"})
            return
        if not path.is_file():
            self._send(404, b"no such file", {})
            return
        fault = habits.always or (habits.faults.pop(0) if habits.faults else "")
        if fault.isdigit():
            self._send(int(fault), b"", {})
        elif fault == "drop":
            self.close_connection = True
        else:
            self._send_file(path.read_bytes(), cut=fault == "cut")

    def _send_file(self, content: bytes, *, cut: bool) -> None:
        status, headers = 200, {"ETag": f'"{hash(content)}"', "Content-Type": "application/octet-stream"}
        if self.habits.ranges and (wanted := self.headers.get("Range")):
            start, _, last = wanted.removeprefix("bytes=").partition("-")
            total = len(content)
            if int(start) >= total:
                self._send(416, b"", {"Content-Range": f"bytes */{total}"})
                return
            content = content[int(start) : int(last) + 1]
            status, headers["Content-Range"] = 206, f"bytes {start}-{int(start) + len(content) - 1}/{total}"
        self._send(status, content, headers, cut=cut)

    def _send(self, status: int, content: bytes, headers: dict[str, str], *, cut: bool = False) -> None:
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        body = content[: len(content) // 2] if cut else content
        if self.habits.says_size or status != 200:
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(body)
        else:
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            if body:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(body), body))
            self.wfile.write(b"" if cut else b"0\r\n\r\n")
        self.close_connection = self.close_connection or cut


@contextmanager
def web_server(folder: Path, habits: Habits) -> Iterator[str]:
    """The address of a server of the files in a folder."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Handler, directory=str(folder), habits=habits))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()
