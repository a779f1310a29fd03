"""Reading a file of a checkpoint once, front to back, while proving that it is the one that was written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from trainer_cli.checkpoint.format.block_reader import Part, read_in_order
from trainer_cli.checkpoint.manifest import DamagedCheckpoint, Digest, Manifest, new_digest

if TYPE_CHECKING:
    from trainer_cli.checkpoint.storage.interfaces import ReadableFolder, Source


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
        self.size_bytes = self.left_bytes = entry.size_bytes
        self._source: Source

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
                self.skip(self.left_bytes)
                if f"{self._entry.algorithm}:{self._digest.hexdigest()}" != self._entry.digest:
                    raise self.damaged("its content is not what was written: the digest differs")
        finally:
            self._opening.__exit__(kind, error, trace)

    @contextmanager
    def peeked(self) -> Iterator[Source]:
        """Open it without the promise of a digest: for its header, and for what is proven later."""
        self.__enter__()
        try:
            yield self._source
        finally:
            self._opening.__exit__(None, None, None)

    def damaged(self, why: str) -> DamagedCheckpoint:
        """The error that names this file."""
        return DamagedCheckpoint(f"a file of the checkpoint is damaged: {why}", where=str(self.path))

    def read_into(self, buffer: memoryview) -> None:
        """Fill the buffer with the next bytes."""
        self.read_parts([Part(len(buffer), buffer)], len(buffer))

    def read_parts(
        self, parts: Iterable[Part], size_bytes: int, new_spare: Callable[[int], memoryview] | None = None
    ) -> None:
        """Read the next bytes, `size_bytes` in all, to where each part says."""
        offset = self.size_bytes - self.left_bytes
        more = () if new_spare is None else (new_spare,)
        read_in_order(self._source, parts, offset, size_bytes, self._digest.update, *more)
        self.left_bytes -= size_bytes

    def take(self, count: int) -> bytes:
        """The next bytes."""
        content = bytearray(count)
        self.read_into(memoryview(content))
        return bytes(content)

    def rest(self) -> bytes:
        """All that is left."""
        return self.take(self.left_bytes)

    def skip(self, count: int) -> None:
        """Skip bytes that are not needed; they are digested too."""
        self.read_parts([Part(count)], count)


def read_verified(folder: ReadableFolder, manifest: Manifest, file: str) -> bytes:
    """The content of a small file of a checkpoint, once its digest is found right."""
    with VerifiedFile(folder, manifest, file) as opened:
        return opened.rest()


def verify(folder: ReadableFolder, manifest: Manifest) -> None:
    """Read every file of a checkpoint and compare its digest.

    Raises:
        DamagedCheckpoint: naming the first file that is not what was written.
    """
    for file in sorted(manifest.files):
        with VerifiedFile(folder, manifest, file):
            pass
