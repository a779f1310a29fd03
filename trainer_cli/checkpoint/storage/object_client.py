"""Requests to an object store through fsspec, each repeated a bounded number of times.

Only this module knows fsspec. Nothing that a listing says is trusted where it matters: an object is there if it can be
read. Objects are replaced as a whole, so a request that is repeated does no harm; a conditional write whose reply was
lost is recognised by reading the object back.

Read files of a web server with the requests of the standard library.

The file system of fsspec for http needs another package, reports every failed request as a missing file, and cannot
read a file whose server sends no size or no part of it.
"""

from __future__ import annotations

import errno
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from html.parser import HTMLParser
from http.client import HTTPException, HTTPResponse
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.error import HTTPError
from urllib.parse import quote, unquote, urldefrag, urljoin, urlsplit
from urllib.request import Request, urlopen

from trainer_cli.errors import StoreAwayError, UserError

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


logger = logging.getLogger(__name__)
T = TypeVar("T")

PART_BYTES = 16 * 1024 * 1024
"""Objects larger than this are sent and fetched in parts of this size, several at a time."""
_PARTS_AT_ONCE = 8
_ATTEMPTS = 6
_FIRST_WAIT_S = 0.2
_LONGEST_WAIT_S = 8.0
_TIMEOUTS = {"connect_timeout": 10, "read_timeout": 60}
_S3 = ("s3", "s3a")
_WEB = ("http", "https")
_PACKAGES = {"s3": "'trainer-cli[s3]'", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "hf": "huggingface_hub"}
_FINAL = (FileNotFoundError, FileExistsError, NotImplementedError, TypeError, ValueError)
"""Errors that a repeated request would raise again."""
_TAGS = ("ETag", "etag", "blob_id", "generation", "mtime", "Last-Modified", "last_modified", "LastModified")
"""Under which of these keys the file systems of fsspec tell that an object has changed."""
_NO_ACCESS = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "CredentialRetrievalError")


class ObjectInfo(NamedTuple):
    """What a listing says about an object."""

    size_bytes: int | None
    """None if the store does not say."""
    tag: str
    """Changes with the object; empty if the store gives nothing that does."""
    ranges: bool = True
    """Whether a part of it can be read."""


class ObjectClient:
    """The objects under one URL, by their keys relative to it.

    Args:
        url: `scheme://bucket/prefix`.
        wait: sleeps so many seconds.
        attempts: how often a request is sent at most.
        options: for the file system of fsspec, such as `endpoint_url` of s3.
    """

    def __init__(
        self,
        url: str,
        *,
        wait: Callable[[float], object] = time.sleep,
        attempts: int = _ATTEMPTS,
        options: dict[str, Any] | None = None,
    ) -> None:
        self.url = url.rstrip("/")
        self.scheme = url.partition("://")[0]
        self.read_only = self.scheme in _WEB
        self._wait, self._attempts = wait, attempts
        self._files = _file_system(self.scheme, options or {})
        self._fresh = _taken_by(self._files, "ls", refresh=True)
        """Some file systems cache listings even with `use_listings_cache=False`."""
        self._upload_settings = _taken_by(
            self._files,
            "put_file",
            chunksize=PART_BYTES,
            max_concurrency=_PARTS_AT_ONCE if self.scheme in _S3 else None,
        )

    def list(self, folder: str = "") -> dict[str, ObjectInfo]:
        """Every object under the URL, or under one folder of it, by its key relative to that.

        It may miss one that was just written, and hold one that was just deleted.
        """
        place = self._path(folder).rstrip("/")
        try:
            found = self._repeated("list", lambda: self._files.find(place, detail=True, **self._fresh))
        except FileNotFoundError:
            return {}
        root = self._files._strip_protocol(place).rstrip("/") + "/"
        return {
            name.removeprefix(root): _described(info)
            for name, info in found.items()
            if name.startswith(root) and info.get("type") != "directory"
        }

    def check_writable(self, run_id: str) -> None:
        """Write and delete a small object.

        Raises:
            UserError: there is no such bucket, or it may not be written.
        """
        key = f".probe.{run_id}"
        try:
            self.put(key, b"")
        except (FileNotFoundError, NotImplementedError) as error:
            raise UserError(f"{self.url} cannot be written: {error}", cure="Make the bucket first.") from error
        self.delete(key)

    def get(self, key: str) -> bytes | None:
        """The content of a small object, or None if it is not there."""
        try:
            return self._repeated(f"get {key}", lambda: bytes(self._files.cat_file(self._path(key))))
        except FileNotFoundError:
            return None

    def get_range(self, key: str, start: int, end: int) -> bytes:
        """The bytes of an object from `start` to `end`; FileNotFoundError if it is not there."""

        def read() -> bytes:
            content = bytes(self._files.cat_file(self._path(key), start=start, end=end))
            if len(content) != end - start:
                raise OSError(errno.EIO, f"{len(content)} bytes came instead of {end - start}")
            return content

        return self._repeated(f"get {key}", read)

    def blocks(self, key: str, size_bytes: int | None) -> Iterator[bytes]:
        """The content of an object, in order; some parts are fetched ahead. FileNotFoundError if it is not there."""
        if self.read_only:
            # A web server may send no parts, or not say the size.
            info = self.info(key)
            if info is None:
                raise FileNotFoundError(errno.ENOENT, "There is no such file", self._path(key))
            size_bytes = info.size_bytes if info.ranges else None
        return self._stream(key) if size_bytes is None else self._parts(key, size_bytes)

    def _parts(self, key: str, size_bytes: int) -> Iterator[bytes]:
        ranges = [(start, min(start + PART_BYTES, size_bytes)) for start in range(0, size_bytes, PART_BYTES)]
        ahead: deque[Future[bytes]] = deque()
        with ThreadPoolExecutor(_PARTS_AT_ONCE, "checkpoint-download") as pool:
            try:
                for start, end in ranges:
                    ahead.append(pool.submit(self.get_range, key, start, end))
                    if len(ahead) == _PARTS_AT_ONCE:
                        yield ahead.popleft().result()
                while ahead:
                    yield ahead.popleft().result()
            finally:
                pool.shutdown(cancel_futures=True)

    def _stream(self, key: str) -> Iterator[bytes]:
        """The content of an object that is sent as a whole. After a reply that was cut, what was read is skipped."""
        position = 0
        blocks: Iterator[bytes] | None = None

        def read() -> bytes:
            nonlocal blocks
            try:
                if blocks is None:
                    blocks = self._files.stream(self._path(key))
                    to_skip = position
                    while to_skip:
                        block = next(blocks, b"")
                        if len(block) > to_skip:
                            return block[to_skip:]
                        if not block:
                            raise OSError(errno.EIO, "the file is shorter than it was")
                        to_skip -= len(block)
                return next(blocks, b"")
            except BaseException:
                blocks = None
                raise

        while block := self._repeated(f"get {key}", read):
            position += len(block)
            yield block

    def info(self, key: str) -> ObjectInfo | None:
        """Size and tag of an object, or None if it is not there."""
        try:
            info = self._repeated(f"head {key}", lambda: self._files.info(self._path(key), **self._fresh))
        except FileNotFoundError:
            return None
        return None if info["type"] == "directory" else _described(info)

    def put(self, key: str, content: bytes) -> None:
        """Write a small object, replacing one that is there."""
        self._repeated(f"put {key}", lambda: self._files.pipe_file(self._path(key), content))

    def put_new(self, key: str, content: bytes) -> bool:
        """Write a small object that must not be there yet; False if another one is."""

        def write() -> bool:
            try:
                self._files.pipe_file(self._path(key), content, mode="create")
            except FileExistsError:
                return self.get(key) == content
            except OSError as error:
                # The reply may have been lost, or a rejected condition may look like another error.
                if self.get(key) == content:
                    return True
                if error.errno is None and "Precondition" in str(error):
                    return False
                raise
            return True

        return self._repeated(f"put {key}", write)

    def upload(self, key: str, path: Path) -> None:
        """Send a file as an object, in parallel parts if it is large. The size of what arrived is compared."""
        size_bytes = path.stat().st_size

        def send() -> None:
            self._files.put_file(str(path), self._path(key), **self._upload_settings)
            info = self.info(key)
            if info is None or info.size_bytes != size_bytes:
                raise OSError(errno.EIO, f"{info and info.size_bytes} bytes arrived instead of {size_bytes}")

        self._repeated(f"put {key}", send)

    def delete(self, key: str) -> None:
        """Delete an object, if it is there."""

        def delete() -> None:
            try:
                self._files.rm_file(self._path(key))
            except FileNotFoundError:
                return

        self._repeated(f"delete {key}", delete)

    def copy(self, key: str, new: str) -> None:
        """Copy an object to another key, within the store."""
        self._repeated(f"copy {key}", lambda: self._files.cp_file(self._path(key), self._path(new)))

    def _path(self, key: str) -> str:
        return f"{self.url}/{key}"

    def _repeated(self, what: str, request: Callable[[], T]) -> T:
        """Send a request until it succeeds, with growing pauses of random length.

        Raises:
            StoreAwayError: it failed as often as was tried.
            UserError: there are no credentials, or they give no access.
        """
        for attempt in range(1, self._attempts + 1):
            try:
                return request()
            except (*_FINAL, UserError):
                raise
            except PermissionError as error:
                raise UserError(
                    f"{self.url} gives no access: {error}", cure="Check the credentials, and what they may do."
                ) from error
            except Exception as error:  # The classes differ between stores.
                if type(error).__name__ in _NO_ACCESS:
                    raise UserError(
                        f"there are no credentials for {self.url}: {error}",
                        cure="Set them as for other tools of this store, for example AWS_ACCESS_KEY_ID.",
                    ) from error
                said = f"{type(error).__name__}: {error}".strip(": ").splitlines()[0][:200]
                if attempt == self._attempts:
                    raise StoreAwayError(f"{what} failed {attempt} times: {said}", where=self.url) from error
                logger.debug("%s of %s failed, and is tried again: %s", what, self.url, said)
                longest = min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2**attempt)
                self._wait(longest * random.uniform(0.5, 1.0))
        raise AssertionError("the last attempt returns or raises")


def _described(info: Mapping[str, Any]) -> ObjectInfo:
    size_bytes = info.get("size")
    return ObjectInfo(None if size_bytes is None else int(size_bytes), _tag(info), info.get("ranges", True))


def _taken_by(files: Any, method: str, **arguments: Any) -> dict[str, Any]:
    """Those of the arguments that a method of a file system names in its signature."""
    # A method that is asynchronous below has its names there.
    function = getattr(files, f"_{method}", None) or getattr(files, method, None)
    names = signature(function).parameters if function is not None else ()
    return {name: value for name, value in arguments.items() if name in names}


def _tag(info: Mapping[str, Any]) -> str:
    return next((str(info[key]) for key in _TAGS if info.get(key)), "")


def _file_system(scheme: str, options: dict[str, Any]) -> Any:
    if scheme in _WEB:
        return WebServer()
    import fsspec

    if scheme in _S3:
        # Repeated here, with a bound that is known.
        config = {**_TIMEOUTS, "retries": {"max_attempts": 1}, **options.pop("config_kwargs", {})}
        # With one, a small object is read by one request; else its size is asked for first.
        options = {"config_kwargs": config, "max_concurrency": 1, **options}
    try:
        files = fsspec.filesystem(scheme, use_listings_cache=False, **options)
    except ImportError as error:
        package = _PACKAGES.get(scheme, f"the package that fsspec needs for {scheme}://")
        raise UserError(f"{scheme}:// needs another package: {error}", cure=f"pip install {package}") from None
    except ValueError:
        cure = "Known are s3, gs, az, hf, http and others of fsspec."
        raise UserError(f"there is no storage for {scheme}://", cure=cure) from None
    if hasattr(files, "retries"):
        files.retries = 1
    return files
