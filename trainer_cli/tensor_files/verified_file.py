"""Read a file of a checkpoint once, front to back, and verify its digest on the way.

Some threads read ahead in large blocks; the caller digests each block in order while it is still in the processor's
cache. Reading and digesting both release the interpreter's lock.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainer_cli.manifest import DamagedCheckpoint, Digest, Manifest, new_digest
from trainer_cli.tensor_files.header import TensorEntry, read_entries
from trainer_cli.terminal import format_count

if TYPE_CHECKING:
    from trainer_cli.storage import ReadableFolder

Destination = memoryview | int
"""Memory to read into, or a number of bytes that are digested and not kept."""
BLOCK_BYTES = 2 * 1024 * 1024
"""Small enough to be digested from the processor's cache, large enough for few calls."""
_STREAM_BYTES = 16 * 1024 * 1024
_THREADS = 4
_AHEAD = 8
"""Maximum number of blocks that are read ahead of the digest."""


@dataclass(slots=True)
class _Block:
    """Memory that is filled by one read."""

    offset: int
    views: list[memoryview] = field(default_factory=list)
    size_bytes: int = 0
    spare: memoryview | None = None
    """Memory for bytes that are only digested; reused by a later block."""


class VerifiedFile:
    """A file that is read once, front to back. The exit reads the remaining bytes and compares the digest.

    Its content must not be used before the exit.
    """

    def __init__(self, folder: ReadableFolder, manifest: Manifest, file: str) -> None:
        self.path = folder.path / file
        entry = manifest.files.get(file)
        if entry is None:
            raise self.damaged("the manifest does not list it")
        self._file, self._entry, self._folder = file, entry, folder
        self._opening = folder.open(file)
        self._digest: Digest = new_digest(entry.algorithm)
        self._spares: list[memoryview] = []
        self.size_bytes = self.left_bytes = entry.size_bytes

    def __enter__(self) -> VerifiedFile:
        try:
            self._source = self._opening.__enter__()
        except FileNotFoundError:
            raise self.damaged("it is missing") from None
        # Before any byte is read: the destinations are views of memory of the expected size.
        if self._source.size_bytes != self._entry.size_bytes:
            self._opening.__exit__(None, None, None)
            size = f"{format_count(self._source.size_bytes, 'byte')} instead of {self._entry.size_bytes:,}"
            raise self.damaged(f"it has {size}")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        try:
            # After an error only a part was read, whose digest cannot be compared.
            if kind is None:
                # The digest covers the whole file, so bytes that were not needed are read too.
                self.read([self.left_bytes])
                if f"{self._entry.algorithm}:{self._digest.hexdigest()}" != self._entry.digest:
                    raise self.damaged("its content is not what was written: the digest differs")
                self._folder.on_verified(self._file, self._entry)
        finally:
            self._opening.__exit__(kind, error, trace)

    @contextmanager
    def without_digest(self) -> Iterator[None]:
        """Open the file to read its header without verifying the digest."""
        self.__enter__()
        try:
            yield
        finally:
            self._opening.__exit__(None, None, None)

    def damaged(self, why: str) -> DamagedCheckpoint:
        """The error that names this file."""
        return DamagedCheckpoint.of_file(self.path, why)

    def take(self, count: int) -> bytes:
        """The next `count` bytes."""
        content = bytearray(count)
        self.read([memoryview(content)])
        return bytes(content)

    def read_entries(self) -> list[TensorEntry]:
        """The tensors of a file that is at its beginning, in its order. See `header.read_entries`."""
        try:
            return read_entries(self.take, self.left_bytes)
        except ValueError as error:
            raise self.damaged(str(error)) from None

    def take_all(self) -> bytes:
        """All remaining bytes."""
        return self.take(self.left_bytes)

    def stream(self) -> io.BufferedReader:
        """The remaining bytes as a file object that is read front to back."""
        return io.BufferedReader(_RawStream(self), _STREAM_BYTES)

    def read(self, destinations: Iterable[Destination]) -> None:
        """Read the next bytes into the destinations, in order.

        Raises:
            OSError: the first error in the order of the file, after all threads have ended.
        """
        blocks = self._blocks(destinations)
        if self.left_bytes <= BLOCK_BYTES:
            # Threads would cost more than they save.
            for block in blocks:
                self._source.read_at(block.views, block.offset)
                self._digest_block(block)
            return
        ahead: deque[tuple[_Block, Future[None]]] = deque()

        def digest_first() -> None:
            """Wait for the first block that is read ahead, and add it to the digest."""
            block, read = ahead.popleft()
            read.result()
            self._digest_block(block)

        with ThreadPoolExecutor(_THREADS, "checkpoint-reading") as pool:
            try:
                for block in blocks:
                    ahead.append((block, pool.submit(self._source.read_at, block.views, block.offset)))
                    if len(ahead) >= _AHEAD:
                        digest_first()
                while ahead:
                    digest_first()
            finally:
                # Waits for reads in progress, which fill memory that the caller may free.
                pool.shutdown(cancel_futures=True)

    def _digest_block(self, block: _Block) -> None:
        """Add a block to the digest, and keep its spare memory for a later one."""
        for view in block.views:
            # In the order of the file, although threads read ahead: a digest has an order.
            self._digest.update(view)
        self.left_bytes -= block.size_bytes
        if block.spare is not None:
            self._spares.append(block.spare)

    def _blocks(self, destinations: Iterable[Destination]) -> Iterator[_Block]:
        """Divide destinations into blocks of at most `BLOCK_BYTES`, and join small ones."""
        block = _Block(self.size_bytes - self.left_bytes)
        for destination in destinations:
            size_bytes, position = destination if isinstance(destination, int) else len(destination), 0
            while position < size_bytes:
                count = min(size_bytes - position, BLOCK_BYTES - block.size_bytes)
                if isinstance(destination, int):
                    if block.spare is None:
                        # Bytes that are not needed are digested too; reused memory instead of new for each block.
                        block.spare = self._spares.pop() if self._spares else memoryview(bytearray(BLOCK_BYTES))
                    view = block.spare[block.size_bytes : block.size_bytes + count]
                else:
                    view = destination[position : position + count]
                block.views.append(view)
                block.size_bytes += count
                position += count
                if block.size_bytes == BLOCK_BYTES:
                    yield block
                    block = _Block(block.offset + block.size_bytes)
        if block.views:
            yield block


class _RawStream(io.RawIOBase):
    """The remaining bytes of a file as one of Python's file objects."""

    def __init__(self, file: VerifiedFile) -> None:
        self._file = file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes into the beginning of a buffer, and return their number."""
        view = memoryview(buffer)[: self._file.left_bytes]
        self._file.read([view])
        return len(view)


def read_verified(folder: ReadableFolder, manifest: Manifest, file: str) -> bytes:
    """The content of a small file of a checkpoint, after its digest was verified."""
    with VerifiedFile(folder, manifest, file) as opened:
        content = opened.take_all()
    return content


def verify(folder: ReadableFolder, manifest: Manifest, files: Iterable[str] | None = None) -> None:
    """Read files of a checkpoint, by default all, and compare their digests.

    Raises:
        DamagedCheckpoint: a file differs from its digest; the message names the first one.
    """
    for file in sorted(manifest.files if files is None else files):
        with VerifiedFile(folder, manifest, file):
            pass
