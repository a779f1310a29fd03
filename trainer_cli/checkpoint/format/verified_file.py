"""Reading a file of a checkpoint once, front to back, in large blocks, while its digest is taken.

Some threads read ahead; the caller digests each block in order while it is still in the processor's cache. Reading and
digesting both release the interpreter's lock.
"""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_cli.core.manifest import DamagedCheckpoint, Digest, Manifest, new_digest

if TYPE_CHECKING:
    from trainer_cli.checkpoint.storage.base import ReadableFolder

Part = memoryview | int
"""Memory to read into, or a number of bytes that are only digested."""
BLOCK_BYTES = 2 * 1024 * 1024
"""Small enough to be digested from the processor's cache, large enough that few calls are made."""
_STREAM_BYTES = 16 * 1024 * 1024
_THREADS = 4
_AHEAD = 8
"""Blocks that are read, or about to be, before one is digested."""


@dataclass(slots=True)
class _Block:
    """Memory that is filled by one call."""

    offset: int
    views: list[memoryview] = field(default_factory=list)
    size_bytes: int = 0
    spare: memoryview | None = None
    """Holds bytes that are only digested; used again for a later block."""


class VerifiedFile:
    """A file that is read once, front to back, while its digest is taken; leaving it compares the digest.

    What was read must not be used before that.
    """

    def __init__(self, folder: ReadableFolder, manifest: Manifest, file: str) -> None:
        self.path = folder.path / file
        entry = manifest.files.get(file)
        if entry is None:
            raise self.damaged("the manifest does not list it")
        self._entry = entry
        self._opening = folder.open(file)
        self._digest: Digest = new_digest(entry.algorithm)
        self._spares: list[memoryview] = []
        self.size_bytes = self.left_bytes = entry.size_bytes

    def __enter__(self) -> VerifiedFile:
        try:
            self._source = self._opening.__enter__()
        except FileNotFoundError:
            raise self.damaged("it is missing") from None
        if self._source.size_bytes != self._entry.size_bytes:
            self._opening.__exit__(None, None, None)
            size = f"{self._source.size_bytes:,} bytes instead of {self._entry.size_bytes:,}"
            raise self.damaged(f"it has {size}")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        try:
            if kind is None:
                self.read([self.left_bytes])
                if f"{self._entry.algorithm}:{self._digest.hexdigest()}" != self._entry.digest:
                    raise self.damaged("its content is not what was written: the digest differs")
        finally:
            self._opening.__exit__(kind, error, trace)

    @contextmanager
    def peeked(self) -> Iterator[None]:
        """Open it to read its header without verifying the digest."""
        self.__enter__()
        try:
            yield
        finally:
            self._opening.__exit__(None, None, None)

    def damaged(self, why: str) -> DamagedCheckpoint:
        """The error that names this file."""
        return damaged_file(self.path, why)

    def take(self, count: int) -> bytes:
        """The next bytes."""
        content = bytearray(count)
        self.read([memoryview(content)])
        return bytes(content)

    def rest(self) -> bytes:
        """All that is left."""
        return self.take(self.left_bytes)

    def stream(self) -> io.BufferedReader:
        """What is left, as a file that is read front to back."""
        return io.BufferedReader(_Raw(self), _STREAM_BYTES)

    def read(self, parts: Iterable[Part]) -> None:
        """Read the next bytes, part after part.

        Raises:
            OSError: what the source raised first, in the order of the file. No thread reads any more then.
        """
        blocks = self._blocks(parts)
        if self.left_bytes <= BLOCK_BYTES:
            for block in blocks:
                self._source.read_at(block.views, block.offset)
                self._seen(block)
            return
        ahead: deque[tuple[_Block, Future[None]]] = deque()

        def see_first() -> None:
            block, read = ahead.popleft()
            read.result()
            self._seen(block)

        with ThreadPoolExecutor(_THREADS, "checkpoint-reading") as pool:
            try:
                for block in blocks:
                    ahead.append((block, pool.submit(self._source.read_at, block.views, block.offset)))
                    if len(ahead) >= _AHEAD:
                        see_first()
                while ahead:
                    see_first()
            finally:
                pool.shutdown(cancel_futures=True)

    def _seen(self, block: _Block) -> None:
        for view in block.views:
            self._digest.update(view)
        self.left_bytes -= block.size_bytes
        if block.spare is not None:
            self._spares.append(block.spare)

    def _blocks(self, parts: Iterable[Part]) -> Iterator[_Block]:
        block = _Block(self.size_bytes - self.left_bytes)
        for part in parts:
            size_bytes, at = part if isinstance(part, int) else len(part), 0
            while at < size_bytes:
                count = min(size_bytes - at, BLOCK_BYTES - block.size_bytes)
                if isinstance(part, int):
                    block.spare = block.spare or (self._spares.pop() if self._spares else _new_spare())
                    view = block.spare[block.size_bytes : block.size_bytes + count]
                else:
                    view = part[at : at + count]
                block.views.append(view)
                block.size_bytes += count
                at += count
                if block.size_bytes == BLOCK_BYTES:
                    yield block
                    block = _Block(block.offset + block.size_bytes)
        if block.views:
            yield block


def damaged_file(path: Path, why: str) -> DamagedCheckpoint:
    """The error that names a file of a checkpoint."""
    return DamagedCheckpoint(f"a file of the checkpoint is damaged: {why}", where=str(path))


class _Raw(io.RawIOBase):
    """What is left of a file, for readers that know Python's files."""

    def __init__(self, file: VerifiedFile) -> None:
        self._file = file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        part = memoryview(buffer)[: self._file.left_bytes]
        self._file.read([part])
        return len(part)


def _new_spare() -> memoryview:
    return memoryview(bytearray(BLOCK_BYTES))


def read_verified(folder: ReadableFolder, manifest: Manifest, file: str) -> bytes:
    """The content of a small file of a checkpoint, after its digest was verified."""
    with VerifiedFile(folder, manifest, file) as opened:
        return opened.rest()


def verify(folder: ReadableFolder, manifest: Manifest, files: Iterable[str] | None = None) -> None:
    """Read files of a checkpoint, by default all, and compare their digests.

    Raises:
        DamagedCheckpoint: naming the first file that is not what was written.
    """
    for file in sorted(manifest.files if files is None else files):
        with VerifiedFile(folder, manifest, file):
            pass
