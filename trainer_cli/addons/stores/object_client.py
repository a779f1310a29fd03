"""Requests to an object store through fsspec, or to a web server, each repeated a bounded number of times.

Only this module uses fsspec. A listing is never trusted where it matters: an object exists if it can be read. Objects
are replaced as a whole, so repeating a request is harmless; a conditional write whose reply was lost is recognised by
reading the object back.
"""

from __future__ import annotations

import errno
import logging
import random
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from html.parser import HTMLParser
from http.client import HTTPException, HTTPResponse
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.error import HTTPError
from urllib.parse import quote, unquote, urldefrag, urljoin, urlsplit
from urllib.request import Request, urlopen

from trainer_cli.errors import StoreAwayError, StoreRefusedError, UserError
from trainer_cli.terminal import format_count

logger = logging.getLogger(__name__)
T = TypeVar("T")

PART_BYTES = 16 * 1024 * 1024
"""Objects larger than this are sent and fetched in parts of this size, several at a time."""
_PARTS_AT_ONCE = 8
_COPIED_BYTES = 128 * 1024 * 1024
"""Objects are copied within a store in parts of this size, each of which takes a store a few seconds."""
_ATTEMPTS = 6
_FIRST_WAIT_S = 0.2
_LONGEST_WAIT_S = 8.0
_TIMEOUTS = {"connect_timeout": 10, "read_timeout": 60}
_S3 = ("s3", "s3a")
_WEB = ("http", "https")
_PACKAGES = {"s3": "'trainer-cli[s3]'", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "hf": "huggingface_hub"}
_FINAL = (FileNotFoundError, FileExistsError, InterruptedError, NotImplementedError, TypeError, ValueError)
"""Errors that a repeated request would raise again."""
_TAGS = ("ETag", "etag", "blob_id", "generation", "mtime", "Last-Modified", "last_modified", "LastModified")
"""Keys under which the file systems of fsspec give a value that changes with an object."""
_NO_ACCESS = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "CredentialRetrievalError")
"""Names of exceptions of the libraries below fsspec, which are imported only with their stores."""
_OTHER_REGION = ("AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "PermanentRedirect", "301")
_NO_CREDENTIALS = ("CredentialsNotSupported", "InvalidToken", "MissingSecurityHeader", "TokenRefreshRequired")
_PASSING = frozenset({
    "BadDigest", "BandwidthLimitExceeded", "IncompleteBody", "InvalidPart", "LimitExceededException",
    "PriorRequestNotComplete", "RequestLimitExceeded", "RequestThrottled", "RequestThrottledException",
    "RequestTimeout", "RequestTimeoutException", "SlowDown", "Throttling", "ThrottlingException", "ThrottledException",
    "TooManyRequestsException", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch",
})  # fmt: skip
"""Codes of S3, and of retries in botocore, that come with a 4xx status although a repeated request may succeed."""
_NOT_IMPLEMENTED = 501
_OF_OBJECT = (409, 412, 416)
"""Statuses about the state of an object, which another request may change."""
_CHECK_ACCESS = "Check the credentials and their permissions."
_CHECK_REGION = "Set the region of the bucket, for example by AWS_DEFAULT_REGION, and check the address of the store."
_WEB_TIMEOUT_S = 60
_MISSING = (404, 410)
_REFUSED = (401, 403, 407)
_TEMPORARY = (408, 425, 429)
_BLOCK_BYTES = 1024 * 1024
_LARGEST_PAGE = 16 * 1024 * 1024
_DEEPEST = 1
_RANDOM = random.Random()
"""Not Python's global generator, from which a training draws."""
_DRAWING = ("botocore.retryhandler", "gcsfs.retry")
"""Modules of clients that call Python's global generator before they repeat a request."""
_MOST_PAGES = 10_000
_SAFE = "%/:=&?~#+!$,;'@()*[]"
"""Characters of an address that are sent as they are, as other clients do."""


class ObjectInfo(NamedTuple):
    """An entry of a listing."""

    size_bytes: int | None
    """None if the store gives no size."""
    tag: str
    """A value that changes with the object; empty if the store gives none."""
    ranges: bool = True
    """Whether a range of bytes can be read."""


class ObjectClient:
    """The objects under one URL, by their keys relative to it.

    Args:
        url: `scheme://bucket/prefix`.
        wait: sleeps for a number of seconds.
        attempts: maximum number of times that a request is sent.
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
        self.is_training = False
        """Whether the store has been reached by a run, which then tolerates that it does not answer, or refuses."""
        self._wait, self._attempts = wait, attempts
        self._files = _file_system(self.scheme, options or {})
        # Some file systems cache listings even with `use_listings_cache=False`.
        self._fresh = _accepted_arguments(self._files, "ls", refresh=True)
        self._upload_settings = _accepted_arguments(
            self._files,
            "put_file",
            chunksize=PART_BYTES,
            max_concurrency=_PARTS_AT_ONCE if self.scheme in _S3 else None,
        )
        self._only_new = _accepted_arguments(self._files, "put_file", mode="create")
        self._is_conditional = True
        """Whether the store knows the condition that an object must not exist, as far as was tried."""

    def list(self, folder: str = "") -> dict[str, ObjectInfo]:
        """Every object under the URL, or under one folder of it, by its key relative to that.

        The list may lack an object that was just written, and contain one that was just deleted.
        """
        path = self._path(folder).rstrip("/")
        try:
            infos = self._repeat("list", lambda: self._files.find(path, detail=True, **self._fresh))
        except FileNotFoundError:
            return {}
        root = self._files._strip_protocol(path).rstrip("/") + "/"
        return {
            name.removeprefix(root): _to_object_info(info)
            for name, info in infos.items()
            if name.startswith(root) and info.get("type") != "directory"
        }

    def check_writable(self, run_id: str) -> None:
        """Write and delete a small object.

        Raises:
            UserError: there is no such bucket, or there is no permission to write to it.
        """
        key = f".probe.{run_id}"
        try:
            self.put(key, b"")
        except (FileNotFoundError, NotImplementedError) as error:
            raise UserError(f"{self.url} cannot be written: {error}", cure="Make the bucket first.") from error
        self.delete(key)

    def get(self, key: str) -> bytes | None:
        """The content of a small object, or None if it does not exist."""
        try:
            return self._repeat(f"get {key}", lambda: bytes(self._files.cat_file(self._path(key))))
        except FileNotFoundError:
            return None

    def get_range(self, key: str, start: int, end: int) -> bytes:
        """The bytes of an object from `start` to `end`; FileNotFoundError if it does not exist."""

        def read() -> bytes:
            content = bytes(self._files.cat_file(self._path(key), start=start, end=end))
            # A connection that was closed early may look like a complete reply.
            if len(content) != end - start:
                raise OSError(errno.EIO, f"{format_count(len(content), 'byte')} came instead of {end - start}")
            return content

        return self._repeat(f"get {key}", read)

    def blocks(self, key: str, size_bytes: int | None, *, part_bytes: int | None = None) -> Iterator[bytes]:
        """The content of an object, in order; some parts, of `part_bytes` or else `PART_BYTES`, are fetched ahead.
        FileNotFoundError if it does not exist."""
        if self.read_only:
            # A web server may not support ranges, or not give the size.
            info = self.info(key)
            if info is None:
                raise FileNotFoundError(errno.ENOENT, "There is no such file", self._path(key))
            size_bytes = info.size_bytes if info.ranges else None
        return self._stream(key) if size_bytes is None else self._parts(key, size_bytes, part_bytes or PART_BYTES)

    def _parts(self, key: str, size_bytes: int, part_bytes: int) -> Iterator[bytes]:
        ranges = [(start, min(start + part_bytes, size_bytes)) for start in range(0, size_bytes, part_bytes)]
        # A bounded queue: the memory for parts does not grow with the object.
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
        """The content of an object that is sent as a whole. Bytes read before a truncated reply are skipped."""
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

        while block := self._repeat(f"get {key}", read):
            position += len(block)
            yield block

    def info(self, key: str) -> ObjectInfo | None:
        """Size and tag of an object, or None if it does not exist."""
        try:
            info = self._repeat(f"head {key}", lambda: self._files.info(self._path(key), **self._fresh))
        except FileNotFoundError:
            return None
        return None if info["type"] == "directory" else _to_object_info(info)

    def put(self, key: str, content: bytes) -> None:
        """Write a small object, or replace it."""
        self._repeat(f"put {key}", lambda: self._files.pipe_file(self._path(key), content))

    def put_new(self, key: str, content: bytes) -> bool:
        """Write a small object that must not exist yet; False if it exists with another content."""
        return self._create(
            key,
            lambda condition: self._files.pipe_file(self._path(key), content, **condition),
            {"mode": "create"},
            lambda: self.get(key) == content,
        )

    def upload_new(
        self,
        key: str,
        path: Path,
        check: Callable[[], object] = lambda: None,
        on_part: Callable[[], object] = lambda: None,
    ) -> bool:
        """Send a file as an object that must not exist yet, in parallel parts if it is large; False if it exists with
        another content.

        A store whose file system in fsspec cannot do that for files replaces the object.

        Args:
            check: called before an object that arrived truncated is deleted; raises if it may be another process's.
            on_part: called before the first part, and after each; an InterruptedError ends the upload.
        """
        from fsspec.callbacks import Callback

        callback = Callback(hooks={"part": lambda size, value: on_part()})
        size_bytes = path.stat().st_size

        def count_sent() -> int | None:
            info = self.info(key)
            return info and info.size_bytes

        def send(condition: Mapping[str, Any]) -> None:
            self._files.put_file(str(path), self._path(key), callback=callback, **self._upload_settings, **condition)
            if (sent_bytes := count_sent()) != size_bytes:
                check()
                # It is the one that was just made, and would be in the way of the next attempt.
                self.delete(key)
                raise OSError(errno.EIO, f"{sent_bytes} of {format_count(size_bytes, 'byte')} arrived")

        def is_sent() -> bool:
            # It is read only if it has the size of the file.
            if count_sent() != size_bytes:
                return False
            with path.open("rb") as file:
                return all(file.read(len(block)) == block for block in self.blocks(key, size_bytes))

        return self._create(key, send, self._only_new, is_sent)

    def _create(
        self,
        key: str,
        write: Callable[[Mapping[str, Any]], object],
        condition: Mapping[str, Any],
        is_written: Callable[[], bool],
    ) -> bool:
        """Send a conditional write until it succeeds; False if an object exists that is not what it writes."""

        def create() -> bool:
            if self._is_conditional:
                try:
                    write(condition)
                except FileExistsError:
                    return is_written()
                # Not followed by further requests.
                except (InterruptedError, StoreAwayError):
                    raise
                except OSError as error:
                    # The reply may have been lost, or a rejected condition may have raised another error.
                    if is_written():
                        return True
                    if error.errno is None and "Precondition" in str(error):
                        return False
                    if _reply_of(error)[1] != _NOT_IMPLEMENTED:
                        raise
                    logger.debug("%s knows no conditions: %s", self.url, error)
                    self._is_conditional = False
                else:
                    return True
            # Less than the condition, as another process may write between the two.
            if self.info(key) is not None:
                return is_written()
            write({})
            return True

        return self._repeat(f"put {key}", create)

    def delete(self, key: str) -> None:
        """Delete an object, if it exists."""

        def delete() -> None:
            try:
                self._files.rm_file(self._path(key))
            except FileNotFoundError:
                return

        self._repeat(f"delete {key}", delete)

    def copy(self, key: str, new: str) -> None:
        """Copy an object to another key, within the store."""
        self._repeat(f"copy {key}", lambda: self._files.cp_file(self._path(key), self._path(new)))

    @property
    def copies_new(self) -> bool:
        """Whether `copy_new` is possible, as far as is known."""
        return self.scheme in _S3 and self._is_conditional

    def copy_new(self, key: str, new: str, info: ObjectInfo, on_part: Callable[[], object]) -> None:
        """Copy an object to a key that must not exist yet, within a store of S3.

        Args:
            info: size and tag that the object must still have.
            on_part: as in `upload_new`.

        Raises:
            FileNotFoundError: the object does not exist any more.
            OSError, UserError: it is another one, the new key exists, or the store does not copy.
        """
        # Not by `cp_file`, which overwrites. As a multipart upload, whose end has the condition of `upload_new`.
        root, name = (self._files.split_path(self._path(each))[:2] for each in (key, new))
        source = {"CopySource": dict(zip(("Bucket", "Key"), root, strict=True)), "CopySourceIfMatch": info.tag}

        def ask(call: str, **arguments: Any) -> Any:
            arguments |= zip(("Bucket", "Key"), name, strict=True)
            return self._repeat(f"copy {key}", lambda: self._files.call_s3(call, **arguments))

        upload = {"UploadId": ask("create_multipart_upload")["UploadId"]}
        try:
            parts: list[dict[str, Any]] = []
            size_bytes = info.size_bytes or 0
            for number, start in enumerate(range(0, size_bytes, _COPIED_BYTES), 1):
                on_part()
                some = f"bytes={start}-{min(start + _COPIED_BYTES, size_bytes) - 1}"
                part = ask("upload_part_copy", **upload, **source, PartNumber=number, CopySourceRange=some)
                parts.append({"PartNumber": number, "ETag": part["CopyPartResult"]["ETag"]})
            # Some stores ignore the condition of a part.
            if self.info(key) != info:
                raise OSError(errno.ESTALE, "it was replaced", self._path(key))
            ask("complete_multipart_upload", **upload, MultipartUpload={"Parts": parts}, IfNoneMatch="*")
        except BaseException:
            # Parts that stay are paid for.
            with suppress(Exception):
                ask("abort_multipart_upload", **upload)
            raise

    def _path(self, key: str) -> str:
        return f"{self.url}/{key}"

    def _repeat(self, description: str, request: Callable[[], T]) -> T:
        """Send a request until it succeeds, with growing pauses.

        Raises:
            StoreAwayError: every attempt failed.
            UserError: the store refuses the request, for example for its credentials or its region.
            StoreRefusedError: it does so during a training.
        """
        for attempt in range(1, self._attempts + 1):
            try:
                return request()
            # One that is away was asked often enough by a request within this one.
            except (*_FINAL, UserError, StoreAwayError):
                raise
            except Exception as error:  # The classes differ between stores.
                if (refusal := explain_refusal(error)) is not None:
                    fault, cure = refusal
                    if self.is_training:
                        raise StoreRefusedError(f"the store {fault}", where=self.url, cure=cure) from error
                    raise UserError(f"{self.url} {fault}", cure=cure) from error
                reason = f"{type(error).__name__}: {error}".strip(": ").splitlines()[0][:200]
                if attempt == self._attempts:
                    raise StoreAwayError(
                        f"{description} failed {format_count(attempt, 'time')}: {reason}", where=self.url
                    ) from error
                logger.debug("%s of %s failed, and is tried again: %s", description, self.url, reason)
                # Of random length: many ranks and jobs would otherwise meet a busy store at the same time again.
                longest = min(_LONGEST_WAIT_S, _FIRST_WAIT_S * 2**attempt)
                self._wait(longest * _RANDOM.uniform(0.5, 1.0))
        raise AssertionError("the last attempt returns or raises")


def explain_refusal(error: Exception) -> tuple[str, str] | None:
    """How a store refuses a request that cannot succeed if it is repeated, and the cure; None for any other error."""
    if type(error).__name__ in _NO_ACCESS:
        cure = "Set them as for other tools of this store, for example AWS_ACCESS_KEY_ID."
        return f"is given no credentials: {error}", cure
    # The client of S3 follows a redirect that names no region for ever.
    if isinstance(error, RecursionError):
        return "redirects each request", _CHECK_REGION
    code, status = _reply_of(error)
    reason = getattr(error, "strerror", None) or str(error)
    if code in _OTHER_REGION:
        return f"expects another region: {reason}", _CHECK_REGION
    if code == "RequestTimeTooSkewed":
        return f"gives no access: {reason}", "Set the clock of this machine."
    if isinstance(error, PermissionError) or status in _REFUSED or code in _NO_CREDENTIALS:
        return f"gives no access: {reason}", _CHECK_ACCESS
    is_final = 400 <= status < 500 or status == _NOT_IMPLEMENTED
    if not is_final or status in (*_TEMPORARY, *_OF_OBJECT) or code in _PASSING:
        return None
    return f"refuses the request: {reason}", "Check the region, the credentials and the address of the store."


def _reply_of(error: Exception) -> tuple[str, int]:
    """Code and status of the reply of S3 behind an error; empty and 0 if there is none."""
    # s3fs raises an OSError from the one of botocore, which has the reply.
    # Clients of other stores have a response of another kind, of which nothing is known.
    response = getattr(error.__cause__, "response", None)
    reply = response if isinstance(response, dict) else {}
    code = (reply.get("Error") or {}).get("Code", "")
    return code, (reply.get("ResponseMetadata") or {}).get("HTTPStatusCode", 0)


def _to_object_info(info: Mapping[str, Any]) -> ObjectInfo:
    size_bytes = info.get("size")
    tag = next((str(info[key]) for key in _TAGS if info.get(key)), "")
    return ObjectInfo(None if size_bytes is None else int(size_bytes), tag, info.get("ranges", True))


def _accepted_arguments(files: Any, method: str, **arguments: Any) -> dict[str, Any]:
    """Those of the arguments that a method of a file system names in its signature."""
    # The method of an asynchronous file system forwards `*args`; its parameters are those of the coroutine.
    function = getattr(files, f"_{method}", None) or getattr(files, method, None)
    names = signature(function).parameters if function is not None else ()
    return {name: value for name, value in arguments.items() if name in names}


def _file_system(scheme: str, options: dict[str, Any]) -> Any:
    if scheme in _WEB:
        return WebServer()
    import fsspec

    if scheme in _S3:
        # One attempt: `_repeat` repeats requests, and its bound would otherwise be multiplied.
        config = {**_TIMEOUTS, "retries": {"total_max_attempts": 1}, **options.pop("config_kwargs", {})}
        # With a concurrency of 1 a small object is read by one request; otherwise its size is requested first.
        options = {"config_kwargs": config, "max_concurrency": 1, **options}
    try:
        files = fsspec.filesystem(scheme, use_listings_cache=False, **options)
    except ImportError as error:
        package = _PACKAGES.get(scheme, f"the package that fsspec needs for {scheme}://")
        raise UserError(f"{scheme}:// needs another package: {error}", cure=f"pip install {package}") from None
    except ValueError:
        cure = "Known schemes are s3, gs, az, hf, http and others of fsspec."
        raise UserError(f"there is no storage for {scheme}://", cure=cure) from None
    if hasattr(files, "retries"):
        files.retries = 1
    # They draw the length of a pause in a thread that sends, while a training may draw from Python's generator.
    for module in filter(None, map(sys.modules.get, _DRAWING)):
        module.random = _RANDOM  # type: ignore[attr-defined]
    return files


class WebServer:
    """The methods of fsspec's file systems that `ObjectClient` calls to read, by the standard library.

    The file system of fsspec for http needs another package, reports every failed request as a missing file, and cannot
    read a file whose server gives no size or supports no ranges. Here FileNotFoundError means that the server says so.
    """

    def info(self, url: str) -> dict[str, Any]:
        """Size (None if the server gives none), tags, support of ranges, and type: a page of HTML is a directory."""
        # A GET, because servers of signed URLs refuse HEAD.
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
        """The bytes of a file, or a range of them. OSError without support of ranges, or if the reply is truncated."""
        with self._open(url, start, end) as reply:
            _refuse_page(url, reply)
            if start is not None and reply.status != 206:
                raise OSError(errno.EIO, "the server does not send parts of a file", url)
            expected, content = reply.length, reply.read()
            _check_length(url, len(content), expected)
            return content

    def stream(self, url: str) -> Iterator[bytes]:
        """A whole file in blocks. OSError if the reply is shorter than the server announced."""
        with self._open(url) as reply:
            _refuse_page(url, reply)
            expected, count = reply.length, 0
            while block := reply.read(_BLOCK_BYTES):
                count += len(block)
                yield block
            _check_length(url, count, expected)

    def find(self, url: str, detail: bool = True) -> dict[str, dict[str, Any]]:
        """The files in a folder and its folders, by the links of their index pages."""
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
        """The files and folders (ending in `/`) directly below a page, by its links."""
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
            reply: HTTPResponse = urlopen(Request(quote(url, safe=_SAFE), headers=headers), timeout=_WEB_TIMEOUT_S)
            return reply
        except HTTPError as error:
            error.close()
            status = f"HTTP status {error.code} {error.reason}".strip()
            if error.code in _MISSING:
                raise FileNotFoundError(errno.ENOENT, status, url) from None
            if error.code in _REFUSED:
                raise PermissionError(errno.EACCES, status, url) from None
            if error.code == 416:
                raise _EmptyFile(errno.EIO, status, url) from None
            if error.code in _TEMPORARY or error.code >= 500:
                raise OSError(errno.EIO, status, url) from None
            raise UserError(f"{url} cannot be read: {status}", cure="Check the address.") from None
        except (ValueError, HTTPException) as error:
            if isinstance(error, HTTPException) and urlsplit(url).hostname:
                raise OSError(
                    errno.EIO, f"the reply is not one of a web server ({type(error).__name__})", url
                ) from error
            raise UserError(f"{url} is not an address: {error}", cure="Check the address.") from None


class _EmptyFile(OSError):
    """The server has no first byte of the file."""


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
    # Some servers answer with a page if there is no file.
    if _is_page(reply):
        raise FileNotFoundError(errno.ENOENT, "The server shows a page, and no file", url)


def _check_length(url: str, count: int, expected: int | None) -> None:
    if expected is not None and count != expected:
        raise OSError(errno.EIO, f"{format_count(count, 'byte')} came instead of {expected:,}", url)
