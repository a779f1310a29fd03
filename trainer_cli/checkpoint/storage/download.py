"""Copy a checkpoint from an object store to the local disk: in parallel parts, digested on the way."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from trainer_cli.checkpoint.manifest import Manifest
from trainer_cli.checkpoint.storage.copying import damaged, write_copy
from trainer_cli.checkpoint.storage.local import LocalStorage
from trainer_cli.checkpoint.storage.object_client import PART_BYTES, ObjectClient
from trainer_cli.errors import UserError

logger = logging.getLogger(__name__)

_PARTS_AT_ONCE = 8
_REPORT_S = 10.0


def download(client: ObjectClient, name: str, manifest: bytes, into: LocalStorage, where: str) -> None:
    """Write the files that a manifest lists into a local storage, under the same name, and the manifest last.

    Args:
        where: the checkpoint in the store, for messages.

    Raises:
        DamagedCheckpoint: the manifest is none, or a file is not what it says.
        OSError: the store does not answer, or the disk is full; nothing is left then.
    """
    entries = Manifest.parse(manifest).files
    with _progress(where, sum(entry.size_bytes for entry in entries.values())) as advance:

        def content(file: str, size_bytes: int) -> Iterator[bytes]:
            try:
                for part in _parts(client, f"{name}/{file}", size_bytes):
                    yield part
                    advance(len(part))
            except FileNotFoundError:
                raise damaged(f"{file} is missing", where) from None

        files = ((file, content(file, entry.size_bytes)) for file, entry in entries.items())
        write_copy(into, name, manifest, files, where)


def fetch(url: str) -> Path | None:
    """Copy a file, or all files of a folder, of another program into the user's cache; None if there is none.

    A copy of the same sizes and tags is used again, unless the store gives no tags.
    """
    parent, _, name = url.rstrip("/").rpartition("/")
    client = ObjectClient(parent)
    info = client.info(name)
    files = {name: info} if info is not None else {f"{name}/{key}": one for key, one in client.list(name).items()}
    if not files:
        return None
    state = "\n".join(f"{key} {own.size_bytes} {own.tag or uuid.uuid4()}" for key, own in sorted(files.items()))
    into = cache_of(f"{url}\n{state}") / name
    if into.exists():
        return into
    # A name of this call alone: another thread or process may fetch the same.
    unfinished = into.parent / f".{uuid.uuid4()}.{name}"
    with _progress(url, sum(own.size_bytes for own in files.values())) as advance:
        for key, (size_bytes, _) in files.items():
            path = unfinished if key == name else unfinished / key.removeprefix(f"{name}/")
            if ".." in path.parts:
                raise UserError(f"{url} holds {key!r}, which is no plain name")
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                for part in _parts(client, key, size_bytes):
                    file.write(part)
                    advance(len(part))
    try:
        os.rename(unfinished, into)
    except OSError:
        if not into.is_dir():
            raise
        shutil.rmtree(unfinished)  # Another call was first.
    return into


def cache_of(url: str) -> Path:
    """The folder for copies of what is at a URL, in the user's cache."""
    return _cache() / hashlib.sha256(url.encode()).hexdigest()[:16]


def is_cached(path: Path) -> bool:
    """Whether a path lies in the user's cache."""
    return _cache() in path.parents


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainer-cli"


def _parts(client: ObjectClient, key: str, size_bytes: int) -> Iterator[bytes]:
    """The content of an object, in order; some parts are fetched ahead."""
    ranges = [(start, min(start + PART_BYTES, size_bytes)) for start in range(0, size_bytes, PART_BYTES)]
    ahead: deque[Future[bytes]] = deque()
    with ThreadPoolExecutor(_PARTS_AT_ONCE, "checkpoint-download") as pool:
        try:
            for start, end in ranges:
                ahead.append(pool.submit(client.get_range, key, start, end))
                if len(ahead) == _PARTS_AT_ONCE:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


@contextmanager
def _progress(where: str, total: int) -> Iterator[Callable[[int], object]]:
    """Report the bytes of a download: a bar on a terminal, else a line every ten seconds."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(f"downloading {where}", total=total)
            yield lambda count: bar.advance(task, count)
        return
    logger.info("downloading %s (%s bytes)", where, f"{total:,}")
    done, reported = 0, time.monotonic()

    def advance(count: int) -> None:
        nonlocal done, reported
        done += count
        if time.monotonic() - reported > _REPORT_S:
            reported = time.monotonic()
            logger.info("downloaded %d%% of %s", 100 * done // max(total, 1), where)

    yield advance
