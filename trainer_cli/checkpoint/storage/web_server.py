"""Read files of a web server with the requests of the standard library.

The file system of fsspec for http needs another package, reports every failed request as a missing file, and cannot
read a file whose server sends no size or no part of it.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from html.parser import HTMLParser
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote, unquote, urldefrag, urljoin, urlsplit
from urllib.request import Request, urlopen

from trainer_cli.errors import UserError

_TIMEOUT_S = 60
_MISSING = (404, 410)
_REFUSED = (401, 403, 407)
_TEMPORARY = (408, 425, 429)
_BLOCK_BYTES = 1024 * 1024
_LARGEST_PAGE = 16 * 1024 * 1024
_DEEPEST = 1
_MOST_PAGES = 10_000
_SAFE = "%/:=&?~#+!$,;'@()*[]"
"""Characters of an address that are sent as they are, as other clients do."""


class WebServer:
    """The methods of fsspec's file systems that `ObjectClient` calls to read.

    FileNotFoundError is raised only where the server says that there is no such file.
    """

    def info(self, url: str) -> dict[str, Any]:
        """Size (None if the server does not say), tags, whether parts of it can be read, and the type: a page of HTML
        is a directory."""
        # A GET, because servers of signed addresses refuse HEAD.
        try:
            reply = self._open(url, 0, 1)
        except _EmptyFile:
            return {"type": "file", "size": 0, "ranges": False}
        with reply:
            ranges, size_bytes = reply.status == 206, reply.length
            if ranges:
                total = (reply.headers.get("Content-Range") or "").rpartition("/")[2]
                size_bytes = int(total) if total.isdecimal() else None
            tags = {key: reply.headers[key] for key in ("ETag", "Last-Modified") if key in reply.headers}
            return {"type": "directory" if _is_page(reply) else "file", "size": size_bytes, "ranges": ranges, **tags}

    def cat_file(self, url: str, start: int | None = None, end: int | None = None) -> bytes:
        """The bytes of a file, or of a part of it. OSError where the server sends no parts, or the reply is cut."""
        with self._open(url, start, end) as reply:
            _refuse_page(url, reply)
            if start is not None and reply.status != 206:
                raise OSError(errno.EIO, "the server sends no part of a file", url)
            expected, content = reply.length, reply.read()
            _check_length(url, len(content), expected)
            return content

    def stream(self, url: str) -> Iterator[bytes]:
        """A whole file in blocks. OSError where the reply is cut, as far as the server said how long it is."""
        with self._open(url) as reply:
            _refuse_page(url, reply)
            expected, count = reply.length, 0
            while block := reply.read(_BLOCK_BYTES):
                count += len(block)
                yield block
            _check_length(url, count, expected)

    def find(self, url: str, detail: bool = True) -> dict[str, dict[str, Any]]:
        """The files in a folder and its folders, by the links of the pages that the server shows for them."""
        pages = [("", 0)]
        files: dict[str, dict[str, Any]] = {}
        for count, (folder, depth) in enumerate(pages):
            if count == _MOST_PAGES:
                raise UserError(f"{url} has more than {_MOST_PAGES:,} folders", cure="Name one of them.")
            for name in self._links(f"{url}/{folder}"):
                if not name.endswith("/"):
                    files[f"{url}/{folder}{name}"] = {"type": "file", "size": None}
                elif depth < _DEEPEST:
                    pages.append((f"{folder}{name}", depth + 1))
        return files

    @staticmethod
    def _strip_protocol(url: str) -> str:
        return url

    def _links(self, url: str) -> set[str]:
        """The names of files and folders (those end in `/`) that a page shows directly below itself."""
        with self._open(url) as reply:
            if not _is_page(reply):
                return set()
            page = _Page()
            page.feed(reply.read(_LARGEST_PAGE).decode(errors="replace"))
            address = reply.url
        base = address.rpartition("/")[0] + "/"
        links = {urldefrag(urljoin(address, link)).url for link in page.links}
        names = {unquote(link.removeprefix(base)) for link in links if link.startswith(base) and "?" not in link}
        return {name for name in names if name.removesuffix("/") and "/" not in name[:-1]}

    def _open(self, url: str, start: int | None = None, end: int | None = None) -> HTTPResponse:
        headers = {"Accept-Encoding": "identity", "User-Agent": "trainer-cli"}
        if start is not None and end is not None:
            headers["Range"] = f"bytes={start}-{end - 1}"
        try:
            reply: HTTPResponse = urlopen(Request(quote(url, safe=_SAFE), headers=headers), timeout=_TIMEOUT_S)
            return reply
        except HTTPError as error:
            error.close()
            what = f"HTTP status {error.code} {error.reason}".strip()
            if error.code in _MISSING:
                raise FileNotFoundError(errno.ENOENT, what, url) from None
            if error.code in _REFUSED:
                raise PermissionError(errno.EACCES, what, url) from None
            if error.code == 416:
                raise _EmptyFile(errno.EIO, what, url) from None
            if error.code in _TEMPORARY or error.code >= 500:
                raise OSError(errno.EIO, what, url) from None
            raise UserError(f"{url} cannot be read: {what}", cure="Check the address.") from None
        except (ValueError, HTTPException) as error:
            if isinstance(error, HTTPException) and urlsplit(url).hostname:
                raise OSError(
                    errno.EIO, f"the reply is not one of a web server ({type(error).__name__})", url
                ) from error
            raise UserError(f"{url} is no address: {error}", cure="Check the address.") from None


class _EmptyFile(OSError):
    """The server has no first byte of a file."""


class _Page(HTMLParser):
    """Collects the links of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value for key, value in attrs if tag == "a" and key == "href" and value]


def _is_page(reply: HTTPResponse) -> bool:
    return reply.headers.get_content_type() == "text/html"


def _refuse_page(url: str, reply: HTTPResponse) -> None:
    """Some servers answer with a page where there is no file."""
    if _is_page(reply):
        raise FileNotFoundError(errno.ENOENT, "The server shows a page, and no file", url)


def _check_length(url: str, count: int, expected: int | None) -> None:
    if expected is not None and count != expected:
        raise OSError(errno.EIO, f"{count:,} bytes came instead of {expected:,}", url)
