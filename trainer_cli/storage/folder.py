"""One folder on a local disk: writing its files front to back, reading them, and replacing it as a whole."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import glob
import logging
import os
import shutil
import stat
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from mmap import mmap
from pathlib import Path

from trainer_cli.errors import UserError
from trainer_cli.files import REFUSED, close_private, open_private, private_file, sync
from trainer_cli.layout import is_plain
from trainer_cli.manifest import FROZEN_SUFFIX, Digest, FileEntry, new_digest
from trainer_cli.schema import DigestAlgorithm
from trainer_cli.storage.disk import PAGE, Bytes, Disk, StrPath, delete_tree, exists

logger = logging.getLogger(__name__)

WRITE_BYTES = 1 << 25
"""Maximum number of bytes that are digested, then written by one call."""
_MOST_BUFFERS = 1000
"""Maximum number of buffers in one call; most systems accept 1,024."""
LATEST_LINK = "latest"
"""Symbolic link to the newest checkpoint, for other programs."""
_STAGING = ".part"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY


@dataclass(slots=True)
class LinkSource:
    """A file that this process has written, or read and verified, and to which a later checkpoint may link."""

    entry: FileEntry
    identity: tuple[int, ...]
    """By which it is recognised, and seen to be unchanged. Not by the time of the last change of the inode, which each
    new and each removed link changes."""
    paths: deque[Path]
    """Its names, the newest last. That of a save that failed, or of a checkpoint that was removed, does not exist."""
    is_synced: bool = True
    """False for one that this process has only read: another program may have copied it, and the disk not have it."""


def _identify(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


_MOST_PATHS = 100
"""Maximum number of names of a file that are remembered."""


class StagedFolder:
    """A folder being written under a hidden name.

    Args:
        publish: gives the folder its final name, durably.
        final: its final path.
        link_sources: file -> the file of an earlier folder to which this one may link. What is created here, under a
            name with `FROZEN_SUFFIX`, takes its place.

    Attributes:
        files: the files finished so far, by name.
        after_publish: called once the folder has its final name.
        check_replaced: called with the manifest of the checkpoint that the folder replaces. If it raises, that one
            stays.
    """

    def __init__(
        self,
        path: Path,
        disk: Disk,
        digest: DigestAlgorithm,
        publish: Callable[[], object] = lambda: None,
        *,
        final: Path | None = None,
        link_sources: dict[str, LinkSource] | None = None,
    ) -> None:
        self.path = path
        self.files: dict[str, FileEntry] = {}
        self.after_publish: Callable[[], object] = lambda: None
        self.check_replaced: Callable[[bytes], object] = lambda manifest: None
        self._publish = publish
        self._disk = disk
        self._digest = digest
        self._final = final or path
        self._link_sources = link_sources

    def publishes_by(self, publish: Callable[[], object]) -> None:
        """Set what gives the folder its final name."""
        self._publish = publish

    @property
    def hidden_name(self) -> str:
        """The argument of `Storage.joining` on another rank."""
        return self.path.name

    @contextmanager
    def create(self, file: str) -> Iterator[LocalFileWriter]:
        """A new file; it is in `files`, and fsynced, on clean exit."""
        _check_plain(file)
        fd = self._disk.open_new(self.path / file)
        try:
            writer = LocalFileWriter(fd, self._disk, self._digest)
            yield writer
            self.files[file] = writer.finish()
        finally:
            self._disk.close(fd)
        if self._link_sources is not None and file.endswith(FROZEN_SUFFIX):
            identity = _identify(self._disk.stat(self.path / file, follow=False))
            paths = deque([self._final / file], _MOST_PATHS)
            self._link_sources[file] = LinkSource(self.files[file], identity, paths)

    def write_or_link(self, file: str, content: Callable[[], Iterable[Bytes]]) -> None:
        """A file that an earlier folder probably has with the same bytes: a link to that one if their digests are
        equal, else a new file.

        Args:
            content: returns the bytes in pieces, the same each time.
        """
        digest: Digest | None = None
        if self._link_sources is not None and file in self._link_sources:
            digest, size_bytes = new_digest(self._digest), 0
            for piece in content():
                digest.update(piece)
                size_bytes += len(piece)
            if self.link(file, FileEntry(size_bytes, f"{self._digest.value}:{digest.hexdigest()}")):
                return
        with self.create(file) as writer:
            writer.digest_known = digest
            for piece in content():
                writer.write(piece)

    def link(self, file: str, entry: FileEntry) -> bool:
        """Link to the file of this name of an earlier folder, if it has this size and digest, and is unchanged since
        this process wrote or verified it. False if there is none, or the file system has no links."""
        source = None if self._link_sources is None else self._link_sources.get(file)
        if source is None or source.entry != entry:
            return False
        while source.paths:
            try:
                if self._link_to(source.paths[-1], file, source):
                    self.files[file] = entry
                    source.paths.append(self._final / file)
                    return True
                return False
            except FileNotFoundError:
                source.paths.pop()
            except OSError as error:
                logger.debug("%s is written, as it cannot be linked: %s", self.path / file, error)
                # If the error came after the link.
                with suppress(OSError):
                    self._disk.unlink(self.path / file)
                return False
        return False

    def _link_to(self, earlier: Path, file: str, source: LinkSource) -> bool:
        """Link to a file of this identity; False if it has another, or the file system has no links."""
        identity = source.identity
        if _identify(self._disk.stat(earlier, follow=False)) != identity:
            return False
        if not source.is_synced:
            fd = self._disk.open(earlier)
            try:
                self._disk.fsync(fd)
            finally:
                self._disk.close(fd)
            source.is_synced = True
        self._disk.link(earlier, self.path / file)
        if not exists(self._disk, self.path / file):
            return False
        if _identify(self._disk.stat(self.path / file, follow=False)) == identity:
            return True
        # It was replaced since it was looked at.
        self._disk.unlink(self.path / file)
        return False

    def publish(self) -> None:
        """Give the folder its name, durably.

        Raises:
            UnsyncedError: it has the name, but may lose it in a power cut.
        """
        self._publish()
        self.after_publish()


class LocalFileWriter:
    """Appends to one file. Aligned memory is written from where it is; all other bytes are buffered in one block first.

    A file smaller than a block is written at the end, through the page cache.

    Attributes:
        digest_known: the digest of all bytes that will be written, if it has been computed; None: it is computed here.
    """

    def __init__(self, fd: int, disk: Disk, algorithm: DigestAlgorithm) -> None:
        self._fd = fd
        self._disk = disk
        self._algorithm = algorithm
        self.digest_known: Digest | None = None
        self._digest = new_digest(algorithm)
        self._size_bytes = self._written_bytes = 0
        self._is_large = self._direct = False
        # An anonymous map begins at a page, and its untouched pages take no memory.
        self._block = memoryview(mmap(-1, disk.block_bytes))
        self._buffered_bytes = 0

    def write(self, data: Bytes) -> None:
        """Append bytes; the caller may reuse their memory afterwards."""
        view = memoryview(data).cast("B")
        self._size_bytes += len(view)
        if not self._is_large and self._size_bytes >= len(self._block):
            # Large files would evict everything else from the page cache, and are slower through it.
            self._is_large = True
            self._bypass_cache()
        while view:
            in_place = self._in_place_bytes(view)
            if in_place:
                self._write_out(view[:in_place], in_place)
                view = view[in_place:]
            else:
                view = self._buffer(view)

    def finish(self) -> FileEntry:
        """Write the buffered bytes and fsync the file; returns its size and digest."""
        if self._buffered_bytes:
            end = self._buffered_bytes
            # Past the page cache only whole pages can be written; the file is cut to its size afterwards.
            padded = end + -end % PAGE if self._direct else end
            self._block[end:padded] = bytes(padded - end)
            self._write_out(self._block[:padded], end)
        if self._written_bytes != self._size_bytes:
            self._disk.truncate(self._fd, self._size_bytes)
        # A failed fsync is never repeated: the kernel may have dropped the pages, and would then report success.
        self._disk.fsync(self._fd)
        digest = self.digest_known or self._digest
        return FileEntry(self._size_bytes, f"{self._algorithm.value}:{digest.hexdigest()}")

    def _in_place_bytes(self, view: memoryview) -> int:
        """Number of bytes at the beginning of the view that can be written without copying them to the block."""
        # Behind buffered bytes the order would be lost, and small writes are gathered in the block.
        if not self._is_large or self._buffered_bytes or len(view) < len(self._block):
            return 0
        if not self._direct:
            return len(view)
        # Past the page cache: whole pages alone, and only from memory that begins at a page.
        return 0 if _address_of(view) % PAGE else len(view) - len(view) % PAGE

    def _buffer(self, view: memoryview) -> memoryview:
        """Copy the beginning of the view into the block; returns the remainder."""
        piece = view[: len(self._block) - self._buffered_bytes]
        end = self._buffered_bytes + len(piece)
        self._block[self._buffered_bytes : end] = piece
        self._buffered_bytes = end
        if end == len(self._block) and self._is_large:
            self._write_out(self._block, end)
            self._buffered_bytes = 0
        return view[len(piece) :]

    def _write_out(self, view: memoryview, size_bytes: int) -> None:
        """Digest the first `size_bytes` and write the whole view, of which the remainder pads the last page."""
        # In slices, so that each is written while the digest has left it in the processor's cache.
        for start in range(0, len(view), WRITE_BYTES):
            end = start + WRITE_BYTES
            if self.digest_known is None:
                self._digest.update(view[start : min(end, size_bytes)])
            self._write_block(view[start:end])

    def _write_block(self, block: memoryview) -> None:
        """Write the whole block behind what is written; through the page cache if it cannot be written past it."""
        while block:
            try:
                count = self._disk.write(self._fd, block, self._written_bytes)
            except OSError as error:
                # Some file systems accept the flag, and refuse the write.
                if not (self._direct and error.errno in REFUSED):
                    raise
                self._disable_bypass(error)
                self._use_cache()
                continue
            if count <= 0:
                raise OSError(errno.EIO, "The disk took no bytes")
            self._written_bytes += count
            block = block[count:]
            if self._direct and count % PAGE:
                # A short write leaves an offset that is not aligned.
                self._use_cache()

    def _bypass_cache(self) -> None:
        """Write the file past the page cache from now on, if the file system supports that."""
        if self._disk.offers_bypass:
            try:
                self._disk.bypass_cache(self._fd, on=True)
            except OSError as error:
                if error.errno not in REFUSED:
                    raise
                self._disable_bypass(error)
            else:
                self._direct = True

    def _use_cache(self) -> None:
        """Write the remainder of this file through the page cache."""
        self._disk.bypass_cache(self._fd, on=False)
        self._direct = False

    def _disable_bypass(self, error: OSError) -> None:
        """Write every later file of this disk through the page cache."""
        self._disk.offers_bypass = False
        logger.debug("files are written through the page cache, since the file system says: %s", error)


def _address_of(view: memoryview) -> int:
    """The address of writable memory; 1, which is not aligned, for read-only memory: ctypes gives no address of it."""
    return 1 if view.readonly else ctypes.addressof(ctypes.c_char.from_buffer(view))


def write_file(disk: Disk, path: Path, content: bytes) -> None:
    """Write one small file and fsync its content (not its name)."""
    fd = disk.open_new(path)
    try:
        view, offset = memoryview(content), 0
        while offset < len(view):
            offset += disk.write(fd, view[offset:], offset)
        disk.fsync(fd)
    finally:
        disk.close(fd)


class LocalReadableFolder:
    """A folder on this machine.

    Args:
        link_sources: as in `StagedFolder`; what is verified here is added.
    """

    def __init__(self, path: Path, disk: Disk, link_sources: dict[str, LinkSource] | None = None) -> None:
        self.path = path
        self.is_shared = True
        self._disk = disk
        self._link_sources = link_sources
        self._identities: dict[str, tuple[int, ...]] = {}

    @contextmanager
    def open(self, file: str) -> Iterator[LocalSource]:
        """Open a plain file of the folder; it is closed at the end of the block."""
        _check_plain(file)
        source = open_source(self._disk, self.path / file)
        # Before it is read: a later change is then noticed.
        self._identities[file] = source.identity
        try:
            yield source
        finally:
            source.close()

    def on_verified(self, file: str, entry: FileEntry) -> None:
        """Later folders may link to this file."""
        if self._link_sources is not None and file.endswith(FROZEN_SUFFIX):
            paths = deque([self.path / file], _MOST_PATHS)
            self._link_sources[file] = LinkSource(entry, self._identities[file], paths, is_synced=False)


def open_source(disk: Disk, path: StrPath) -> LocalSource:
    """Open a plain file for reading; the caller closes it."""
    fd = disk.open(path)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "Not a plain file", str(path))
        return LocalSource(fd, disk, status, path)
    except BaseException:
        disk.close(fd)
        raise


class LocalSource:
    """A file that is read at any offset, from any thread."""

    def __init__(self, fd: int, disk: Disk, status: os.stat_result, path: StrPath) -> None:
        self.size_bytes, self.identity = status.st_size, _identify(status)
        self._fd = fd
        self._disk = disk
        self._path = path

    def close(self) -> None:
        """Close the file."""
        self._disk.close(self._fd)

    def read_at(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Fill the buffers in order, from an offset. OSError if the file ends before they are full."""
        unfilled = deque(buffer for buffer in buffers if buffer)
        while unfilled:
            count = self._disk.read(self._fd, list(islice(unfilled, _MOST_BUFFERS)), offset)
            if count <= 0:
                raise OSError(errno.EIO, "The file is shorter than it was", str(self._path))
            offset += count
            # A read may end within a buffer.
            while count and count >= len(unfilled[0]):
                count -= len(unfilled.popleft())
            if count:
                unfilled[0] = unfilled[0][count:]


def _check_plain(file: str) -> None:
    """Refuse a name that could lead out of the folder."""
    if not is_plain(file):
        raise ValueError(f"{file!r} is not a plain name of a file")


@contextmanager
def replacing(output: Path, *, overwrite: bool) -> Iterator[Path]:
    """A path in a hidden folder beside `output`; what was written there is fsynced and replaces `output` on clean exit.

    A file replaces a file in one rename. A folder takes two: a process that dies between them leaves the old one as
    `.NAME.PID.old`, and nothing at `output`. What a killed process had written is deleted by the next call for the same
    `output`.

    Raises:
        UserError: `output` exists, and must not be replaced.
    """
    if os.path.lexists(output) and not overwrite:
        raise UserError(f"{output} exists", cure="Choose another --output, or add --overwrite.")
    output.parent.mkdir(parents=True, exist_ok=True)
    old = output.parent / f".{output.name}.{os.getpid()}.old"
    with _staging_folder(output) as folder:
        staging = folder / output.name
        yield staging
        # fsync before rename: a rename may reach the disk before the data does.
        for path in (*staging.rglob("*"), staging):
            sync(path)
        if os.path.lexists(output) and (output.is_dir() or staging.is_dir()):
            # No rename replaces a folder that is not empty.
            os.rename(output, old)
        try:
            os.replace(staging, output)
        except OSError:
            if os.path.lexists(old):
                os.rename(old, output)
            raise
        # The old folder is deleted only after the new name is durable.
        sync(output.parent)
        delete_tree(Disk(), old)


@contextmanager
def _staging_folder(output: Path) -> Iterator[Path]:
    """A hidden folder beside `output`, deleted at exit. It is locked as long as this process lives."""
    for leftover in output.parent.glob(f".{glob.escape(output.name)}.*{_STAGING}"):
        _delete_if_unlocked(leftover)
    folder, descriptor = _make_locked(output)
    try:
        yield folder
    finally:
        delete_tree(Disk(), folder)
        close_private(descriptor)


def _make_locked(output: Path) -> tuple[Path, int]:
    """Make a staging folder beside `output`. Returns it, and the descriptor by which it is locked."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=_STAGING, dir=output.parent))
        try:
            descriptor = open_private(folder, _DIRECTORY)
        except FileNotFoundError:
            continue
        # A file system without locks: no process can lock the folder to delete it either.
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        # Before it was locked another process may have deleted it as abandoned.
        if folder.exists():
            return folder, descriptor
        close_private(descriptor)


def _delete_if_unlocked(folder: Path) -> None:
    """Delete a staging folder, unless the process that made it lives or its file system has no locks."""
    with suppress(OSError), private_file(folder, _DIRECTORY) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)


def point_latest_link(folder: Path, target: str) -> None:
    """Create the link to the newest checkpoint, or replace it in one rename, so that it always points to something.

    It is not there if a folder has its name, or the file system has no symbolic links; that is logged.
    """
    link, new = folder / LATEST_LINK, folder / f".{LATEST_LINK}.new"
    try:
        new.unlink(missing_ok=True)  # A process that died here may have left one.
        os.symlink(target, new)
        os.replace(new, link)
    except OSError as error:
        logger.warning("the link %s could not be replaced: %s", link, error.strerror)
