"""Copy checkpoints into a storage, from an object store or another storage, each file compared with its digest."""

from __future__ import annotations

import logging
import os
import sys
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import unquote

from trainer_cli.addons.stores.object_client import ObjectClient, ObjectInfo
from trainer_cli.errors import StoreAwayError, UserError
from trainer_cli.files import locked_file
from trainer_cli.layout import MANIFEST_FILE
from trainer_cli.manifest import DamagedCheckpoint, Manifest
from trainer_cli.storage import DOWNLOADS, Disk, LocalStorage, delete_tree, write_copy
from trainer_cli.terminal import COLOURS, format_count, is_terminal
from trainer_cli.user_cache import cache_of

logger = logging.getLogger(__name__)

_REPORT_S = 10.0


def download(client: ObjectClient, name: str, manifest: bytes, into: LocalStorage, where: str) -> None:
    """Copy a checkpoint of an object store into a local storage, under the same name.

    Args:
        where: URL of the checkpoint, for messages.

    Raises:
        DamagedCheckpoint: the manifest cannot be read, or a file differs from it.
        FileNotFoundError: the checkpoint was removed meanwhile.
        OSError: the store does not answer, or the disk is full. No copy is left.
    """
    entries = Manifest.parse(manifest).files
    with _progress(where, sum(entry.size_bytes for entry in entries.values())) as advance:

        def read_object(file: str, size_bytes: int) -> Iterator[bytes]:
            try:
                for block in client.blocks(f"{name}/{file}", size_bytes, part_bytes=DOWNLOADS.part_bytes):
                    yield block
                    advance(len(block))
            except FileNotFoundError:
                # A removal deletes the manifest first.
                if client.get(f"{name}/{MANIFEST_FILE}") is None:
                    raise
                why = f"a file of the checkpoint is damaged: {file} is missing"
                raise DamagedCheckpoint(why, where=where) from None

        files = ((file, read_object(file, entry.size_bytes)) for file, entry in entries.items())
        write_copy(into, name, manifest, files, where)


@contextmanager
def locking_copy(cache: Path, name: str, *, wait: bool = True) -> Iterator[bool]:
    """Keep other threads and processes from downloading or trimming a local copy.

    Yields False, without a lock, if another one does so and `wait` is False.
    """
    cache.mkdir(parents=True, exist_ok=True)
    path = cache / f".{name}.downloading"
    while True:
        with ExitStack() as stack:
            try:
                descriptor = stack.enter_context(locked_file(path, wait=wait))
            except BlockingIOError:
                yield False
                return
            try:
                # The last holder unlinked the file: another thread may have locked a new file of that name.
                if not os.path.samestat(os.fstat(descriptor), path.stat()):
                    continue
            except FileNotFoundError:
                continue
            try:
                yield True
            finally:
                os.unlink(path)
            return


def fetch(url: str, marks: Collection[str]) -> Path | None:
    """Copy a file, or a folder that contains one of the files `marks`, into the user's cache; None if there is neither.

    A copy of the same sizes and tags is used again, unless the store gives no tags.

    Raises:
        UserError: there is no access, or no storage for this scheme.
        StoreAwayError: the store does not answer, or a file was changed while it was read.
        OSError: the disk is full.
    """
    parent, _, name = url.rstrip("/").rpartition("/")
    client = ObjectClient(parent)
    files = _files_at(client, name, marks)
    if not files:
        return None
    # Without a tag a change would not show, so the cache key of such a copy is never found again.
    state = "\n".join(f"{key} {info.size_bytes} {info.tag or uuid.uuid4()}" for key, info in sorted(files.items()))
    # The query of a URL is not part of the file name.
    into = cache_of(f"{url}\n{state}") / (unquote(name.partition("?")[0]) if client.read_only else name)
    # Another thread or process, such as another rank of this machine, may fetch the same file: it is copied once.
    with locking_copy(into.parent, into.name):
        if into.exists():
            return into
        # A name unique to this call: one that was killed may have left a part.
        unfinished = into.parent / f".{uuid.uuid4()}.{into.name}"
        try:
            _copy(client, name, files, unfinished, url)
            # Files read before and after a change do not belong together.
            if _files_at(client, name, marks) != files:
                raise StoreAwayError("it was changed while it was read", where=url)
            os.rename(unfinished, into)
        finally:
            delete_tree(Disk(), unfinished)
    return into


def _copy(client: ObjectClient, name: str, files: Mapping[str, ObjectInfo], into: Path, url: str) -> None:
    """Copy an object to the file `into`, or the objects of a folder below it."""
    with _progress(url, sum(info.size_bytes or 0 for info in files.values())) as advance:
        for key, info in files.items():
            path = into if key == name else into / key.removeprefix(f"{name}/")
            # A key comes from the store: it must not lead out of the cache.
            if ".." in path.parts:
                raise UserError(f"{url} holds {key!r}, which is not a plain name")
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                for block in client.blocks(key, info.size_bytes, part_bytes=DOWNLOADS.part_bytes):
                    file.write(block)
                    advance(len(block))


def _files_at(client: ObjectClient, name: str, marks: Collection[str]) -> dict[str, ObjectInfo]:
    """The object `name`, or the objects of the folder `name` if it contains one of `marks`, by their keys."""
    if (info := client.info(name)) is not None:
        return {name: info}
    files = {f"{name}/{key}": info for key, info in client.list(name).items()}
    if not any(f"{name}/{mark}" in files for mark in marks):
        return {}  # Otherwise a wrong name would copy a whole bucket or web site.
    if client.read_only:
        # The index pages of a web server have no sizes.
        files = {key: info for key in files if (info := client.info(key)) is not None}
    return files


@contextmanager
def _progress(where: str, total: int) -> Iterator[Callable[[int], object]]:
    """Report the bytes of a download, unless that is off: a bar on a terminal, else a line every ten seconds."""
    if not DOWNLOADS.progress:
        yield lambda count: None
        return
    if is_terminal(sys.stderr):
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.theme import Theme

        # The green and the cyan that rich would take cannot be read on white.
        theme = Theme({f"progress.{part}": f"color({COLOURS['green']})" for part in ("download", "remaining")})
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True, theme=theme), transient=True) as bar:
            task = bar.add_task(f"downloading {where}", total=total)
            yield lambda count: bar.advance(task, count)
        return
    logger.info("downloading %s (%s)", where, format_count(total, "byte"))
    done, reported = 0, time.monotonic()

    def advance(count: int) -> None:
        nonlocal done, reported
        done += count
        if time.monotonic() - reported > _REPORT_S:
            reported = time.monotonic()
            logger.info("downloaded %d%% of %s", 100 * done // max(total, 1), where)

    yield advance
