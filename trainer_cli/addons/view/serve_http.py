"""The web server of `train serve`: it reads runs, answers GET alone, and only who may ask.

On this machine's own address a request must name it in its `Host` header, so that no other web page reaches the server
through a name of its own (DNS rebinding). On another address each request needs the token that is printed at the start.
No part of a request becomes a path: runs are named by numbers.
"""

from __future__ import annotations

import hmac
import ipaddress
import json
import logging
import secrets
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from trainer_cli.addons.view.report import page_frame, page_script
from trainer_cli.addons.view.serve_runs import ServedRuns, to_json

log = logging.getLogger(__name__)

Query = Mapping[str, list[str]]
"""The parameters of a request, each with its values."""
Answer = tuple[str, str]
"""The media type and the content of an answer."""

_SCRIPT = Path(__file__).with_name("serve_page.js")
_COOKIE = "train-serve"
_AXES = ("step", "epoch", "time")
_MOST_PARAMETERS = 1000
_SILENT_S = 60.0
"""Seconds after which a connection that sends nothing is closed."""
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'unsafe-inline'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class BadRequest(Exception):
    """A request that the page does not make."""


class RunServer(ThreadingHTTPServer):
    """Serves the runs below a folder.

    Args:
        host, port: the address; port 0 is any free one.
    """

    daemon_threads = True
    # A browser keeps connections open: the end must not wait for them.
    block_on_close = False

    def __init__(self, runs: ServedRuns, host: str, port: int) -> None:
        self.runs = runs
        if ":" in host:
            import socket

            self.address_family = socket.AF_INET6
        self.token = None if is_local(host) else secrets.token_urlsafe(16)
        super().__init__((host, port), _Handler)
        in_url = f"[{host}]" if ":" in host else host
        self.hosts = {f"{name}:{self.server_port}" for name in (in_url, "localhost", "127.0.0.1", "[::1]")}
        self.url = f"http://{in_url}:{self.server_port}/{'' if self.token is None else f'?token={self.token}'}"

    def server_bind(self) -> None:
        """Bind without the lookup of the host's name, which may ask a network."""
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that closes a connection is not reported."""
        log.debug("a request failed", exc_info=True)


def is_local(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection, in a thread of its own."""

    server: RunServer
    protocol_version = "HTTP/1.1"
    timeout = _SILENT_S

    def do_GET(self) -> None:
        """Answer a request of the page."""
        try:
            address = urlsplit(self.path)
            query = parse_qs(address.query, max_num_fields=_MOST_PARAMETERS)
        except ValueError as error:
            return self._refuse(HTTPStatus.BAD_REQUEST, f"The address cannot be read: {error}")
        if self.server.token is None and self.headers.get("Host", "") not in self.server.hosts:
            return self._refuse(HTTPStatus.FORBIDDEN, "This address is not the server's.")
        if self.server.token is not None and not self._has_token(self.server.token, query):
            return self._refuse(HTTPStatus.FORBIDDEN, "Open the address with the token that train serve has printed.")
        answer = _ANSWERS.get(address.path)
        if answer is None:
            return self._refuse(HTTPStatus.NOT_FOUND, "Page not found.")
        try:
            media_type, content = answer(self.server.runs, query)
        except BadRequest as error:
            return self._refuse(HTTPStatus.BAD_REQUEST, str(error))
        except Exception as error:
            log.warning("%s could not be answered: %s: %s", address.path, type(error).__name__, error)
            log.debug("the answer failed", exc_info=True)
            return self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}")
        self._send(HTTPStatus.OK, media_type, content.encode(errors="replace"))

    def _has_token(self, token: str, query: Query) -> bool:
        """Whether the request has the token, in its address or in the cookie that an earlier answer has set."""
        try:
            cookie = SimpleCookie(self.headers.get("Cookie", "")).get(_COOKIE)
        except CookieError:
            cookie = None
        sent = [*query.get("token", ()), *([] if cookie is None else [cookie.value])]
        return any(hmac.compare_digest(text.encode(), token.encode()) for text in sent)

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        """Answer with an error, and close the connection."""
        # What a body may hold is not read: the next request would begin in it.
        self.close_connection = True
        self._send(status, "text/plain", text.encode())

    def _send(self, status: HTTPStatus, media_type: str, content: bytes) -> None:
        """Answer with the content; a page that is allowed also gets the token as a cookie."""
        self.send_response(status)
        self.send_header("Content-Type", f"{media_type}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        if self.server.token is not None and status is HTTPStatus.OK:
            # Scripts cannot read it, and no other site's page makes the browser send it.
            self.send_header("Set-Cookie", f"{_COOKIE}={self.server.token}; HttpOnly; SameSite=Strict; Path=/")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not printed."""


def _frame(runs: ServedRuns, query: Query) -> Answer:
    return "text/html", page_frame("", '<script src="/page.js"></script>')


def _script(runs: ServedRuns, query: Query) -> Answer:
    return "text/javascript", page_script() + _SCRIPT.read_text("utf-8")


def _overview(runs: ServedRuns, query: Query) -> Answer:
    return "application/json", to_json(runs.overview(_numbers(query)))


def _page(runs: ServedRuns, query: Query) -> Answer:
    return "application/json", to_json(runs.page(_numbers(query)))


def _curves(runs: ServedRuns, query: Query) -> Answer:
    """Answer with the curves of metrics of some runs, over an axis."""
    axis = query.get("x", ["step"])[0]
    if axis not in _AXES:
        raise BadRequest(f"x is one of {', '.join(_AXES)}")
    return "application/json", runs.curves(_numbers(query), query.get("name", []), axis)


def _numbers(query: Query) -> list[int]:
    """The numbers of the runs that a request asks for; none if it names none.

    Raises:
        BadRequest: they are no whole numbers.
    """
    try:
        numbers = json.loads(f"[{query.get('runs', [''])[0]}]")
    except (ValueError, RecursionError):
        numbers = [None]
    if not all(type(number) is int for number in numbers):
        raise BadRequest("runs are whole numbers, separated by commas")
    return list(numbers)


# Path of a request -> makes the media type and the content of its answer from the parameters.
_ANSWERS: Mapping[str, Callable[[ServedRuns, Query], Answer]] = {
    "/": _frame,
    "/page.js": _script,
    "/api/runs": _overview,
    "/api/page": _page,
    "/api/curves": _curves,
}
