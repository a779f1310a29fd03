"""A proxy before an S3 server that fails as real stores do, by a seeded schedule."""

from __future__ import annotations

import http.client
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

FAULTS = ("500", "503", "429", "reset before", "reset in the answer", "lost reply", "truncated", "stale list")
"""What may happen to a request. A lost reply: the server has done it, and the client does not hear so."""


class Schedule:
    """Which requests fail, and how: a share of all, until `calm` is set."""

    def __init__(self, seed: int, share: float) -> None:
        self.lock = threading.Lock()
        self.begin(seed, share)

    def begin(self, seed: int, share: float) -> None:
        """Start anew."""
        self.random = random.Random(seed)
        self.share = share
        self.calm = False
        self.happened: list[str] = []

    def next_fault(self) -> str | None:
        with self.lock:
            if self.calm or self.random.random() >= self.share:
                return None
            fault = self.random.choice(FAULTS)
            self.happened.append(fault)
            return fault


@contextmanager
def proxy(endpoint: str, schedule: Schedule) -> Iterator[str]:
    """The address of a proxy of a server."""
    upstream = urlsplit(endpoint)
    listings: dict[str, bytes] = {}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            """Print nothing."""

        def handle_one_request(self) -> None:
            try:
                super().handle_one_request()
            except (ConnectionError, TimeoutError):
                self.close_connection = True

        def do(self) -> None:
            body = self._body()
            fault = schedule.next_fault()
            if fault == "hang":
                time.sleep(3)
                self._reset()
            elif fault is not None and fault[:3].isdecimal():
                status, _, code = fault.partition(" ")
                text = f"<Error><Code>{code or 'SlowDown'}</Code><Message>This is {code}.</Message></Error>"
                self._answer(int(status), text.encode(), {})
            elif fault == "reset before":
                self._reset()
            else:
                self._pass_on(body, fault)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = do

        def _body(self) -> bytes:
            if "chunked" in self.headers.get("Transfer-Encoding", ""):
                parts = []
                while size := int(self.rfile.readline().split(b";")[0], 16):
                    parts.append(self.rfile.read(size))
                    self.rfile.readline()
                while self.rfile.readline().strip():
                    pass
                return b"".join(parts)
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))

        def _pass_on(self, body: bytes, fault: str | None) -> None:
            server = http.client.HTTPConnection(upstream.hostname or "", upstream.port, timeout=500)
            headers = {key: value for key, value in self.headers.items() if key.lower() != "transfer-encoding"}
            server.request(self.command, self.path, body, {**headers, "Content-Length": str(len(body))})
            answer = server.getresponse()
            content = answer.read()
            found = {key: value for key, value in answer.getheaders() if key.lower() not in ("content-length", "date")}
            if self.command == "HEAD":
                found["Content-Length"] = answer.getheader("Content-Length") or "0"
            server.close()
            if "list-type" in self.path and answer.status == 200:
                before, listings[self.path] = listings.get(self.path), content
                if fault == "stale list" and before is not None:
                    content = before
            if fault == "lost reply":
                self._reset()
            elif fault == "reset in the answer" and len(content) > 1:
                self._answer(answer.status, content, found, cut=len(content) // 2)
                self._reset()
            elif fault == "truncated" and len(content) > 1 and self.command == "GET":
                self._answer(answer.status, content[: len(content) // 2], found)
            else:
                self._answer(answer.status, content, found)

        def _answer(self, status: int, content: bytes, headers: dict[str, str], cut: int | None = None) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            if "Content-Length" not in headers:
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content[:cut])

        def _reset(self) -> None:
            linger = struct.pack("ii", 1, 0)
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()
